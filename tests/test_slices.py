"""The transfer planner from end to end: any layout to any layout, on any slots of any fleet, carried out with arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import ModelConfig
from nereus.errors import TransferFailed
from nereus.fleet import CPU_SLOT, DEVICES, Device, Fleet, Node
from nereus.layout import Layout, StagePlan
from nereus.model import ModelSpec, llama, model_spec
from nereus.slices import Holding, Movement, Slice, check, cut, layered, movement, slices_of
from nereus.storage import Shard, holding
from nereus.transfer.boxtable import joined, of_stage
from nereus.transfer.routes import RELAY_LEAST_BYTES, Routes, routes
from nereus.transfer.streams import streams
from nereus.transition import sync_order
from tests.lower_bound import classes, direct_seconds
from tests.moving import (
    SLOW,
    assert_legal,
    assert_same,
    carried_out,
    degree,
    filled,
    fleets,
    layouts_within,
    missing_bytes,
    numbered,
    together,
)
from tests.strategies import FEW_VOCABS, general_specs, specs, stage_plan

BUCKETS = (200, 3000, 1 << 20)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A change of one to three models that share slots: how each is cut before and after, and on what fleet."""

    specs: tuple[ModelSpec, ...]
    before: tuple[StagePlan, ...]
    after: tuple[StagePlan, ...]
    fleet: Fleet
    bucket_bytes: int
    relay_least_bytes: int | None

    @property
    def present(self) -> dict[int, tuple[Shard, ...]]:
        return together(*(holding(spec, stage) for spec, stage in zip(self.specs, self.before, strict=True)))

    @property
    def target(self) -> dict[int, tuple[Shard, ...]]:
        return together(*(holding(spec, stage) for spec, stage in zip(self.specs, self.after, strict=True)))

    def planned(self, present: Holding, target: Holding) -> Movement:
        slices = cut(present, target, fleet=self.fleet, relay_least_bytes=self.relay_least_bytes)
        return movement(slices, self.bucket_bytes)


@st.composite
def placed(draw: st.DrawFn, spec: ModelSpec, slots: tuple[int, ...]) -> StagePlan:
    """The model trained in any layout that fits it, on any of the slots, in any order."""
    layout = draw(layouts_within(spec.config, len(slots)))
    return replace(stage_plan(layout, tuple(draw(st.permutations(slots))[: layout.ranks])), model=spec.name)


WORLDS = {  # slots that may be used before and after, of 20
    "the same": (range(10), range(10)),
    "disjoint": (range(10), range(10, 20)),
    "overlapping": (range(10), range(5, 15)),
    "growing": (range(4), range(16)),
    "shrinking": (range(16), range(3, 7)),
}


@st.composite
def cases(draw: st.DrawFn, relay_least_bytes: int | None = RELAY_LEAST_BYTES) -> Case:
    first, last = WORLDS[draw(st.sampled_from(sorted(WORLDS)))]
    count = draw(st.sampled_from((1, 1, 1, 2, 3)))
    made = tuple(replace(draw(general_specs()), name=name) for name in ("m", "n", "o")[:count])
    return Case(
        specs=made,
        before=tuple(draw(placed(spec, tuple(first))) for spec in made),
        after=tuple(draw(placed(spec, tuple(last))) for spec in made),
        fleet=draw(fleets(range(20))),
        bucket_bytes=draw(st.sampled_from(BUCKETS)),
        relay_least_bytes=relay_least_bytes,
    )


@settings(max_examples=16, deadline=None)
@given(cases())
def test_any_layout_to_any_layout_and_back(case: Case) -> None:
    """Every destination byte once, nothing in place moves, as few bytes as can be, the state bit for bit, both ways."""
    present, target = case.present, case.target
    before, after = filled(present, *case.specs), filled(target, *case.specs)
    moved = case.planned(present, target)
    check(present, target, moved, case.bucket_bytes)
    made = carried_out(before, target, moved)
    assert_same(made, after)
    assert_legal(moved, case.bucket_bytes)
    assert moved.moved_bytes == missing_bytes(present, target)
    assert moved.turns <= max(degree(moved), 1)
    back = case.planned(target, present)
    check(target, present, back, case.bucket_bytes)
    assert_same(carried_out(made, present, back), before)


@settings(max_examples=10, deadline=None)
@given(cases(relay_least_bytes=1))
def test_relays_carry_the_same_state_and_no_more_bytes(case: Case) -> None:
    """On a slow network streams are handed on: each still crosses once to each slot that misses it."""
    slow = Fleet(nodes=tuple(Node(slots=n.slots, device=SLOW, nics=n.nics) for n in case.fleet.nodes))
    case = replace(case, fleet=slow)
    present, target = case.present, case.target
    moved = case.planned(present, target)
    check(present, target, moved, case.bucket_bytes)
    assert_same(carried_out(filled(present, *case.specs), target, moved), filled(target, *case.specs))
    assert_legal(moved, case.bucket_bytes)
    assert moved.moved_bytes == missing_bytes(present, target)


def test_relays_are_used_where_the_network_is_slow() -> None:
    """One holder and three bare nodes of four: each byte leaves the holder's node less often than it is wanted."""
    spec = llama("m", ModelConfig(layers=1))
    grown = Layout(tp=1, pp=1, dp=16, pipeline=(1,), distributed_optimizer=False)
    fleet = Fleet(nodes=tuple(Node(slots=tuple(range(n, n + 4)), device=SLOW) for n in range(0, 16, 4)))
    present = {0: holding(spec, stage_plan(replace(grown, dp=1)))[0]}
    target = holding(spec, stage_plan(grown))
    slices = cut(present, target, fleet=fleet, relay_least_bytes=1)
    moved = movement(slices, 1 << 20)
    check(present, target, moved, 1 << 20)
    whole = sum(s.size_bytes for s in present[0])
    assert moved.moved_bytes == 15 * whole
    assert any(s.hop for s in slices)
    assert moved.sent_bytes(0) < 6.5 * whole  # 15 without relays
    assert_same(carried_out(filled(present, spec), target, moved), filled(target, spec))


@st.composite
def syncs(draw: st.DrawFn) -> tuple[ModelSpec, StagePlan, StagePlan, Fleet]:
    """A model trained in one layout and generating in another, on the same or on other slots."""
    spec = draw(general_specs())
    train = draw(layouts_within(spec.config, 16))
    generate = draw(layouts_within(spec.config, 8, "generate"))
    first = draw(st.sampled_from((0, 3, 16)))
    slots = tuple(draw(st.permutations(range(first, first + 8)))[: generate.ranks])
    trained = stage_plan(train, tuple(draw(st.permutations(range(16)))[: train.ranks]))
    return spec, trained, stage_plan(generate, slots, stage="generate"), draw(fleets(range(24)))


@settings(max_examples=12, deadline=None)
@given(syncs(), st.sampled_from(BUCKETS), st.sampled_from((1, None)))
def test_weight_sync(case, bucket_bytes: int, relay_least_bytes: int | None) -> None:
    """Training's weights into generation's layout under another name, whole and layer by layer."""
    spec, train, generate, fleet = case
    rename = {"m.generate": "m.train"}
    present, target = holding(spec, train), holding(spec, generate)
    slices = cut(present, target, rename=rename, fleet=fleet, relay_least_bytes=relay_least_bytes)
    moved = movement(slices, bucket_bytes)
    check(present, target, moved, bucket_bytes, rename=rename)
    before, after = filled(present, spec), filled(target, spec)
    assert_same(carried_out(before, target, moved), after)
    assert moved.moved_bytes == missing_bytes(present, target)
    parts = layered(slices, sync_order(spec), bucket_bytes)
    whole = Movement(
        kept=tuple(s for part in parts for s in part.kept), buckets=tuple(b for part in parts for b in part.buckets)
    )
    check(present, target, whole, bucket_bytes, rename=rename)
    assert_same(carried_out(before, target, whole), after)


# -- survivors ------------------------------------------------------------------------------------------------------


@settings(max_examples=14, deadline=None)
@given(cases(), st.data())
def test_survivors_fill_the_new_plan_or_the_missing_box_is_named(case: Case, data: st.DataObject) -> None:
    """Some slots hold one layout's shards, some another's, some were lost: whatever is left of a byte is enough."""
    spec, old, new = case.specs[0], case.before[0], case.after[0]
    other = data.draw(placed(spec, tuple(range(10))))
    present: dict[int, tuple] = dict(holding(spec, old))
    for slot, shards in holding(spec, other).items():
        kind = data.draw(st.sampled_from(("old", "new", "both", "lost")))
        if kind == "lost":
            present.pop(slot, None)
        elif kind != "old":
            present[slot] = tuple(dict.fromkeys((*(present.get(slot, ()) if kind == "both" else ()), *shards)))
    target = holding(spec, new)
    had, needed = numbered(present, target)
    missing = set(all_ids(needed)) - set(all_ids(had))
    if missing:
        with pytest.raises(TransferFailed, match=r"no slot holds .* of .* for rank \d+"):
            case.planned(present, target)
    else:
        moved = case.planned(present, target)
        check(present, target, moved, case.bucket_bytes)
        assert_same(carried_out(filled(present, spec), target, moved), filled(target, spec))
        assert moved.moved_bytes == missing_bytes(present, target)


def all_ids(found) -> list[tuple[int, int]]:
    return [(size, int(i)) for slots in found.values() for size, ids in slots.items() for i in ids]


def test_the_named_box_is_the_one_that_nobody_holds() -> None:
    spec = llama("m", ModelConfig())
    cut_in_two = Layout(tp=2, pp=1, dp=1, pipeline=(4,), distributed_optimizer=False)
    present = holding(spec, stage_plan(cut_in_two))
    whole = holding(spec, stage_plan(replace(cut_in_two, tp=1)))
    kept = {0: present[0], 1: tuple(s for s in present[1] if "layers.3.mlp.down" not in s.tensor)}
    lost = next(s for s in present[1] if "layers.3.mlp.down" in s.tensor)
    with pytest.raises(TransferFailed) as raised:
        cut(kept, whole)
    assert lost.tensor in str(raised.value)
    assert str(lost.box) in str(raised.value)
    assert "m.train" in str(raised.value)


# -- a plan is a value ----------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(cases())
def test_nothing_moves_to_the_same_layout(case: Case) -> None:
    moved = case.planned(case.present, case.present)
    assert moved.moved_bytes == moved.turns == 0
    check(case.present, case.present, moved, case.bucket_bytes)


@settings(max_examples=6, deadline=None)
@given(cases(relay_least_bytes=1))
def test_movement_is_a_function_of_the_holdings(case: Case) -> None:
    """In whatever order slots are listed: every slot computes the same plan, and the same name for it."""
    present, target = case.present, case.target
    turned = [{slot: held[slot] for slot in reversed(held)} for held in (present, target)]
    one, other = case.planned(present, target), case.planned(*turned)
    assert one == other
    assert one.movement_id == other.movement_id


def whole_routes(case: Case) -> Routes:
    """The plan from tables instead of shards."""
    slots = max(max(s.slots) for s in (*case.before, *case.after)) + 1
    present = joined([of_stage(spec, stage) for spec, stage in zip(case.specs, case.before, strict=True)])
    target = joined([of_stage(spec, stage) for spec, stage in zip(case.specs, case.after, strict=True)])
    found = streams(present, target)
    return routes(found, np.arange(slots), case.fleet, relay_least_bytes=case.relay_least_bytes)


@settings(max_examples=10, deadline=None)
@given(cases(relay_least_bytes=1))
def test_tables_give_a_plan_of_the_same_bytes_slot_by_slot(case: Case) -> None:
    """Without a list of shards: the slices of each slot alone are those of the whole that it takes part in."""
    found = whole_routes(case)
    slices = tuple(slices_of(found))
    moved = movement(slices, case.bucket_bytes)
    check(case.present, case.target, moved, case.bucket_bytes)
    assert found.moved_bytes == moved.moved_bytes == missing_bytes(case.present, case.target)
    assert found.kept_bytes == sum(s.size_bytes for s in moved.kept)
    assert found.received_bytes().sum() == found.sent_bytes().sum() == found.moved_bytes
    assert found.buckets(100).sum() == sum(-(-int(size) // 100) for size in found.pairs()[1])
    for slot in sorted({*case.present, *case.target}):
        own = set(slices_of(found, slot))
        assert own == {s for s in slices if slot in (s.source, s.destination)}
        assert found.received_bytes()[slot] == moved.received_bytes(slot)


def test_check_refuses_what_is_wrong() -> None:
    """A slice left out, doubled, sent from where it is not, in place, handed on before it came, two sends at once."""
    spec = llama("m", ModelConfig())
    two = Layout(tp=2, pp=1, dp=1, pipeline=(4,), distributed_optimizer=False)
    present, target = holding(spec, stage_plan(two)), holding(spec, stage_plan(replace(two, tp=1, dp=2)))
    moved = movement(cut(present, target), 1 << 30)
    check(present, target, moved, 1 << 30)
    first = moved.buckets[0]
    piece = first.slices[0]

    def changed(*slices: Slice) -> Movement:
        return replace(moved, buckets=(replace(first, slices=slices), *moved.buckets[1:]))

    wrong = {
        "is not covered once": changed(*first.slices[1:]),
        "not covered once|written twice": changed(*first.slices, piece),
        "does not hold": changed(replace(piece, held=replace(piece.held, tensor="other")), *first.slices[1:]),
        "before it came|does not hold": changed(replace(piece, hop=1, held=piece.wanted), *first.slices[1:]),
        "twice or sends to itself": replace(moved, buckets=tuple(replace(b, source=0, turn=0) for b in moved.buckets)),
    }
    for message, movement_ in wrong.items():
        with pytest.raises(TransferFailed, match=message):
            check(present, target, movement_, 1 << 30)
    with pytest.raises(TransferFailed, match="exceeds half"):
        check(present, target, moved, first.size_bytes)


# -- balance --------------------------------------------------------------------------------------------------------


@st.composite
def large_cases(draw: st.DrawFn) -> Case:
    """One model of some megabytes, so that whole elements hardly matter."""
    found = draw(cases(relay_least_bytes=None))
    c = found.specs[0].config
    sizes = {"hidden": c.hidden * 512, "head_dim": c.head_dim * 64, "vocab": c.vocab * 100}
    config = replace(c, ffn=c.ffn * 256, expert_ffn=c.expert_ffn * 256, **sizes)
    spec = model_spec("m", config, found.specs[0].head)
    return replace(found, specs=(spec,), before=found.before[:1], after=found.after[:1])


@settings(max_examples=40, deadline=None)
@given(large_cases(), st.sampled_from((None, CPU_SLOT, SLOW, DEVICES["h100"])))
def test_the_busiest_port_is_within_a_twentieth_of_the_optimum(case: Case, device: Device | None) -> None:
    """Against the LP over all divisions; on mixed fleets (device None) only what is reported as a bound."""
    if device is not None:
        case = replace(case, fleet=Fleet(nodes=tuple(replace(n, device=device) for n in case.fleet.nodes)))
    direct = whole_routes(case)
    relayed = whole_routes(replace(case, relay_least_bytes=RELAY_LEAST_BYTES))
    optimum = direct_seconds(classes(direct.streams), case.fleet)
    if device is not None:
        assert direct.loads.seconds <= 1.05 * optimum
    assert relayed.loads.seconds <= direct.loads.seconds
    assert direct.direct_send_bytes <= optimum * case.fleet.link_rates.max() * (1 + 1e-9)
    for found in (direct, relayed):
        assert found.least.seconds <= min(found.loads.seconds, optimum) * (1 + 1e-9)
        assert found.moved_bytes == direct.moved_bytes


@settings(max_examples=8, deadline=None)
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
    """With the model's real shards the busiest sender of a growth by one replica is within 1 % of the mean."""
    spec = llama("m", ModelConfig())
    layouts = [Layout(tp=1, pp=1, dp=n, pipeline=(4,), distributed_optimizer=False) for n in (dp, dp + 1)]
    present, target = (holding(spec, stage_plan(layout)) for layout in layouts)
    moved = movement(cut(present, target), 4 << 20)
    sent = [moved.sent_bytes(slot) for slot in range(dp)]
    assert max(sent) <= 1.01 * moved.moved_bytes / dp
