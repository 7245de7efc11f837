"""Movements carried out with arrays of unique ids: any layout to any layout, on any slots; bytes against the bound."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import ModelConfig
from nereus.errors import TransferFailed
from nereus.layout import Coordinates, Layout
from nereus.model import ModelSpec, llama
from nereus.slices import Holding, Movement, Slice, check, cut, movement
from nereus.storage import Shard, holding, megatron_regions
from tests.core import definition
from tests.strategies import FEW_VOCABS, specs, stage_plan, stage_plans

BOUNDS = Path(__file__).parents[3] / "shared/data/points/layout_pairs_bounds.csv"
Memory = dict[int, dict[Shard, np.ndarray]]
BUCKETS = (200, 3000, 1 << 20)
CASES = specs(FEW_VOCABS).flatmap(
    lambda spec: st.tuples(st.just(spec), stage_plans(spec.config), stage_plans(spec.config), st.sampled_from(BUCKETS))
)


def filled(spec: ModelSpec, held: Holding) -> Memory:
    """Storage by shard, holding the global state: element ids, told apart by component."""
    ids = definition.element_ids(spec)
    return {
        slot: {s: ids[s.tensor][s.box.slices((0,) * len(s.box.start))] + 0.25 * kind(s.component) for s in shards}
        for slot, shards in held.items()
    }


def kind(component: str) -> int:
    return ("weight", "master", "exp_avg", "exp_avg_sq").index(component)


def carried_out(present: Memory, target: Holding, moved: Movement) -> Memory:
    """What the target slots hold after every slice has been copied, round by round; NaN where nothing was written."""
    made: Memory = {slot: {s: np.full(s.box.shape, np.nan) for s in shards} for slot, shards in target.items()}

    def copy(piece: Slice, source: int, destination: int) -> None:
        into = made[destination][piece.wanted][piece.box.slices(piece.wanted.box.start)]
        assert np.isnan(into).all()  # written once
        into[...] = present[source][piece.held][piece.box.slices(piece.held.box.start)]

    for piece in moved.kept:
        copy(piece, piece.source, piece.source)
    for bucket in sorted(moved.buckets, key=lambda b: b.turn):
        for piece in bucket.slices:
            copy(piece, bucket.source, bucket.destination)
    return made


def missing_bytes(present: Holding, target: Holding) -> int:
    """F1 of the formal facts: the sum over slots of |wanted without held|, counted element by element."""
    total = 0
    for slot, shards in target.items():
        have: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
        for s in present.get(slot, ()):
            have[s.component, s.tensor] |= set(map(tuple, np.argwhere(np.ones(s.box.shape)) + s.box.start))
        for s in shards:
            want = set(map(tuple, np.argwhere(np.ones(s.box.shape)) + s.box.start))
            total += len(want - have[s.component, s.tensor]) * (2 if s.dtype == "bfloat16" else 4)
    return total


def assert_legal(moved: Movement, bucket_bytes: int) -> None:
    """Each round is a matching between different slots, and no bucket exceeds half of bucket_bytes."""
    sends = Counter((b.turn, b.source) for b in moved.buckets)
    receives = Counter((b.turn, b.destination) for b in moved.buckets)
    assert set(sends.values()) | set(receives.values()) <= {1}
    assert all(b.source != b.destination and 0 < b.size_bytes <= bucket_bytes // 2 for b in moved.buckets)
    assert {b.turn for b in moved.buckets} == set(range(moved.turns))


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_any_layout_to_any_layout(case) -> None:
    spec, before, after, bucket_bytes = case
    present, target = holding(spec, before), holding(spec, after)
    moved = movement(cut(present, target), bucket_bytes)
    made, wanted = carried_out(filled(spec, present), target, moved), filled(spec, target)
    for slot, shards in wanted.items():
        for shard, values in shards.items():
            np.testing.assert_array_equal(made[slot][shard], values, err_msg=f"slot {slot}: {shard}")
    assert_legal(moved, bucket_bytes)
    assert moved.turns <= 2 * max(moved_degree(moved), 1)
    check(present, target, moved, bucket_bytes)


def moved_degree(moved: Movement) -> int:
    """The most buckets that one port sends or receives."""
    sends, receives = Counter(b.source for b in moved.buckets), Counter(b.destination for b in moved.buckets)
    return max((*sends.values(), *receives.values()), default=0)


@settings(max_examples=40, deadline=None)
@given(CASES)
def test_moved_bytes_are_the_lower_bound(case) -> None:
    spec, before, after, bucket_bytes = case
    present, target = holding(spec, before), holding(spec, after)
    moved = movement(cut(present, target), bucket_bytes)
    assert moved.moved_bytes == missing_bytes(present, target)
    slots = set(present) | set(target)
    assert sum(map(moved.sent_bytes, slots)) == sum(map(moved.received_bytes, slots)) == moved.moved_bytes
    kept = sum(s.size_bytes for s in moved.kept)
    assert kept + moved.moved_bytes == sum(s.size_bytes for shards in target.values() for s in shards)


@settings(max_examples=30, deadline=None)
@given(
    specs(FEW_VOCABS).flatmap(lambda spec: st.tuples(st.just(spec), stage_plans(spec.config))), st.sampled_from(BUCKETS)
)
def test_nothing_moves_to_the_same_layout(case, bucket_bytes: int) -> None:
    spec, stage = case
    held = holding(spec, stage)
    moved = movement(cut(held, held), bucket_bytes)
    assert moved.moved_bytes == moved.turns == 0
    check(held, held, moved, bucket_bytes)


@settings(max_examples=30, deadline=None)
@given(
    specs(FEW_VOCABS).flatmap(lambda spec: st.tuples(st.just(spec), stage_plans(spec.config), stage_plans(spec.config)))
)
def test_movement_is_a_function_of_the_holdings(case) -> None:
    """In whatever order slots are listed: every slot computes the same plan, and the same name for it."""
    spec, before, after = case
    present, target = holding(spec, before), holding(spec, after)
    turned = dict(reversed(present.items())), dict(reversed(target.items()))
    one, other = movement(cut(present, target), 100), movement(cut(*turned), 100)
    assert one == other
    assert one.movement_id == other.movement_id


@settings(max_examples=15, deadline=None)
@given(
    specs(FEW_VOCABS).flatmap(lambda spec: st.tuples(st.just(spec), stage_plans(spec.config), stage_plans(spec.config)))
)
def test_state_that_nobody_holds_is_refused(case) -> None:
    spec, before, after = case
    present, target = dict(holding(spec, before)), holding(spec, after)
    lost = before.replica_slots(0)[0]
    present.pop(lost)
    held = {(s.component, e) for shards in filled(spec, present).values() for s, a in shards.items() for e in a.ravel()}
    wanted = {
        (s.component, e) for shards in filled(spec, target).values() for s, a in shards.items() for e in a.ravel()
    }
    if wanted <= held:
        check(present, target, movement(cut(present, target), 100), 100)
    else:
        with pytest.raises(TransferFailed, match="no slot holds"):
            cut(present, target)


# -- balance --------------------------------------------------------------------------------------------------------


def quickstart_spec() -> ModelSpec:
    return llama("m", ModelConfig())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), specs(FEW_VOCABS))
def test_replicas_share_the_sending(dp: int, more: int, spec: ModelSpec) -> None:
    """New slots filled from DP replicas that all hold everything: the busiest sends at most the mean and one shard."""
    pipeline = (spec.config.layers,)
    before = stage_plan(Layout(tp=1, pp=1, dp=dp, pipeline=pipeline, distributed_optimizer=False))
    grown = Layout(tp=1, pp=1, dp=dp + more, pipeline=pipeline, distributed_optimizer=False)
    present, target = holding(spec, before), holding(spec, stage_plan(grown))
    moved = movement(cut(present, target), 1 << 20)
    sent = [moved.sent_bytes(slot) for slot in before.slots]
    largest = max(s.size_bytes for shards in target.values() for s in shards)
    assert moved.moved_bytes == more * sum(s.size_bytes for s in target[0])
    assert max(sent) <= moved.moved_bytes / dp + largest


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_replicas_of_the_quickstart_model_share_the_sending(dp: int) -> None:
    """With the model's real shards the busiest sender of a growth by one replica is within a tenth of the mean."""
    spec = quickstart_spec()
    layouts = [Layout(tp=1, pp=1, dp=n, pipeline=(4,), distributed_optimizer=False) for n in (dp, dp + 1)]
    present, target = (holding(spec, stage_plan(layout)) for layout in layouts)
    moved = movement(cut(present, target), 4 << 20)
    sent = [moved.sent_bytes(slot) for slot in range(dp)]
    assert max(sent) <= 1.1 * sum(sent) / dp


# -- published bounds -----------------------------------------------------------------------------------------------


LAYERS = 24  # every pipeline of the table divides it
IDEAL = llama("m", ModelConfig(layers=LAYERS, hidden=1, heads=16, kv_heads=16, head_dim=1, ffn=16))


def ideal(layout: Layout, slots: tuple[int, ...]) -> dict[int, tuple[Shard, ...]]:
    """The idealised model of the bounds: layers times one tensor axis, nothing replicated; weights only."""
    shards: dict[Coordinates, tuple[Shard, ...]] = {}
    held: dict[int, tuple[Shard, ...]] = {}
    for rank, slot in enumerate(slots):
        at = replace(layout.coordinates(rank), dp=0)  # replicas hold the same
        if at not in shards:
            shards[at] = tuple(
                Shard(emu="m", component=r.component, tensor=r.tensor, box=r.box, dtype="float32")
                for r in megatron_regions(IDEAL, layout, at, trained=False)
                if "down_proj" in r.tensor or "up_proj" in r.tensor
            )
        held[slot] = shards[at]
    return held


def bound_rows() -> list[dict[str, str]]:
    if not BOUNDS.exists():
        return []
    with BOUNDS.open() as file:
        return list(csv.DictReader(file))


def row_layout(row: dict[str, str], side: str) -> Layout:
    tp, pp, dp = (int(row[f"{side}_{degree}"]) for degree in ("tp", "pp", "dp"))
    return Layout(tp=tp, pp=pp, dp=dp, pipeline=(LAYERS // pp,) * pp)


@pytest.mark.skipif(not BOUNDS.exists(), reason=f"the table of published layout pairs is not at {BOUNDS}")
def test_moved_bytes_agree_with_the_published_bounds() -> None:
    """All pairs, identity placement on the same or on disjoint slots, in units of the model's weights."""
    rows = bound_rows()
    assert len(rows) > 100
    weights = sum(s.size_bytes for s in ideal(Layout(tp=1, pp=1, dp=1, pipeline=(LAYERS,)), (0,))[0])
    for row in rows:
        source, target = row_layout(row, "src"), row_layout(row, "dst")
        first = 0 if row["collocated"] == "1" else source.ranks
        present = ideal(source, tuple(range(source.ranks)))
        wanted = ideal(target, tuple(range(first, first + target.ranks)))
        moved = movement(cut(present, wanted), 1 << 20)
        assert moved.moved_bytes / weights == pytest.approx(float(row["moved_identity_W"]), abs=1e-3), row
