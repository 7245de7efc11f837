"""Placement: fewest bytes against every permutation, groups in nodes, the horizon's weight syncs, what a cost counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.fleet import DEVICES, Fleet, uniform
from nereus.layout import Layout, Stage, StagePlan
from nereus.model import ModelSpec
from nereus.slices import cut
from nereus.storage import holding
from nereus.transfer.boxtable import of_stage
from nereus.transfer.placement import Objective, PlacementCost, StageMove, group_ranks, place
from nereus.transfer.routes import routes
from nereus.transfer.streams import streams
from tests.moving import fleets, layouts_within, missing_bytes, missing_of, numbered, together
from tests.published import DENSE, SPARSE
from tests.strategies import general_specs, stage_plan

H100 = DEVICES["h100"]
OBJECTIVES: tuple[Objective, ...] = ("cost", "total_bytes", "inter_node_bytes", "identity")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Models to place on a few slots."""

    specs: tuple[ModelSpec, ...]
    before: tuple[StagePlan, ...]
    after: tuple[StagePlan, ...]
    fleet: Fleet

    @property
    def moves(self) -> dict[str, StageMove]:
        parts = zip(self.specs, self.before, self.after, strict=True)
        return {spec.name: StageMove(spec=spec, before=before, after=after) for spec, before, after in parts}

    def target(self, slots: dict[str, tuple[int, ...]]):
        return together(
            *(
                holding(spec, replace(after, slots=slots[spec.name]))
                for spec, after in zip(self.specs, self.after, strict=True)
            )
        )


@st.composite
def cases(draw: st.DrawFn, slots: int, ranks: int, most: int = 2) -> Case:
    """Each model on any slots before; after, on any that are allowed, at least as many as it needs."""
    made = tuple(replace(draw(general_specs()), name=name) for name in ("m", "n")[: draw(st.integers(1, most))])
    before: list[StagePlan] = []
    after: list[StagePlan] = []
    for spec in made:
        old, new = (draw(layouts_within(spec.config, ranks)) for _ in range(2))
        used = tuple(draw(st.permutations(range(slots)))[: old.ranks])
        allowed = tuple(draw(st.permutations(range(slots)))[: draw(st.integers(new.ranks, slots))])
        before.append(replace(stage_plan(old, used), model=spec.name))
        after.append(replace(stage_plan(new, allowed), model=spec.name))
    return Case(specs=made, before=tuple(before), after=tuple(after), fleet=draw(fleets(range(slots))))


def by_pair(spec: ModelSpec, before: StagePlan, after: StagePlan, fleet: Fleet) -> tuple[np.ndarray, np.ndarray]:
    """[slots, ranks] bytes that each slot would miss as each rank, and those that nobody in its node has either."""
    ranks = replace(after, slots=tuple(range(after.layout.ranks)))
    have, need = numbered(holding(spec, before), holding(spec, ranks))
    missing, bare = (np.zeros((len(fleet.node_of), after.layout.ranks)) for _ in range(2))
    for slot in range(len(fleet.node_of)):
        node = [have[s] for s in fleet.nodes[fleet.node_of[slot]].slots if s in have]
        near = {size: np.concatenate([h.get(size, np.zeros(0)) for h in node] or [np.zeros(0)]) for size in (2, 4)}
        for rank, ids in need.items():
            missing[slot, rank] = missing_of(have.get(slot, {}), ids)
            bare[slot, rank] = missing_of(near, ids)
    return missing, bare


def least(pairs: np.ndarray, allowed: tuple[int, ...]) -> float:
    """The least sum over all ways to give the ranks to allowed slots."""
    ranks = range(pairs.shape[1])
    return min(sum(pairs[slot, rank] for rank, slot in enumerate(some)) for some in permutations(allowed, len(ranks)))


@settings(max_examples=30, deadline=None)
@given(cases(slots=5, ranks=4))
def test_no_permutation_moves_fewer_bytes(case: Case) -> None:
    """All placements of every model, counted element by element; also for bytes between nodes."""
    total = between = 0.0
    for spec, before, after in zip(case.specs, case.before, case.after, strict=True):
        missing, bare = by_pair(spec, before, after, case.fleet)
        total += least(missing, after.slots)
        between += least(bare, after.slots)
    fewest = place(case.moves, case.fleet, objective="total_bytes")
    assert fewest.cost.moved_bytes == fewest.least_moved_bytes == total
    assert fewest.gap == 0
    nearest = place(case.moves, case.fleet, objective="inter_node_bytes")
    assert nearest.cost.inter_node_bytes == between


@settings(max_examples=20, deadline=None)
@given(cases(slots=12, ranks=8), st.sampled_from(("cost", "total_bytes", "inter_node_bytes", "identity")))
def test_slots_are_allowed_and_distinct_and_the_cost_is_what_moves(case: Case, objective: Objective) -> None:
    found = place(case.moves, case.fleet, objective=objective)
    present = together(*(holding(spec, before) for spec, before in zip(case.specs, case.before, strict=True)))
    target = case.target(dict(found.slots))
    assert found.cost.moved_bytes == missing_bytes(present, target)
    node = case.fleet.node_of
    crossing = [s for s in cut(present, target, fleet=case.fleet) if node[s.source] != node[s.destination]]
    assert found.cost.inter_node_bytes == sum(s.size_bytes for s in crossing)
    assert found.cost.moved_bytes >= found.least_moved_bytes
    for spec, after in zip(case.specs, case.after, strict=True):
        slots = found.slots[spec.name]
        assert len(set(slots)) == len(slots) == after.layout.ranks
        assert set(slots) <= set(after.slots)
        if objective == "identity":
            assert slots == after.slots[: after.layout.ranks]
    assert found.exact


@settings(max_examples=20, deadline=None)
@given(cases(slots=12, ranks=8))
def test_the_default_costs_no_more_than_any_other(case: Case) -> None:
    costs = {objective: place(case.moves, case.fleet, objective=objective).cost for objective in OBJECTIVES}
    assert costs["cost"] == min(costs.values())


@settings(max_examples=15, deadline=None)
@given(cases(slots=12, ranks=8), st.sampled_from(OBJECTIVES))
def test_without_matrices_the_bound_holds_and_slots_fit(case: Case, objective: Objective) -> None:
    """As on fleets too large for exact assignments; what is pinned stays in either way."""
    found = place(case.moves, case.fleet, objective=objective, exact_slots=0)
    fewest = place(case.moves, case.fleet, objective="total_bytes").cost.moved_bytes
    assert not found.exact
    assert found.least_moved_bytes <= fewest <= found.cost.moved_bytes
    for name, move in case.moves.items():
        assert len(set(found.slots[name])) == move.after.layout.ranks
        assert set(found.slots[name]) <= set(move.after.slots)
    pinned = {name: replace(move, pinned=True) for name, move in case.moves.items()}
    for exact_slots in (0, 1024):
        kept = place(pinned, case.fleet, objective=objective, exact_slots=exact_slots).slots
        assert kept == {name: move.after.slots[: move.after.layout.ranks] for name, move in case.moves.items()}


def test_costs_compare_groups_before_seconds_before_bytes() -> None:
    base = PlacementCost(split_groups=0, seconds=2.0, inter_node_bytes=5, moved_bytes=9)
    better = [
        replace(base, seconds=1.0, inter_node_bytes=50, moved_bytes=90),
        replace(base, inter_node_bytes=4, moved_bytes=90),
        replace(base, moved_bytes=8),
    ]
    assert all(one < base for one in better)
    assert base < replace(base, split_groups=1, seconds=0.1, inter_node_bytes=0, moved_bytes=0)


# -- groups and syncs -----------------------------------------------------------------------------------------------


def staged(tp: int, pp: int, dp: int, slots=None, stage: Stage = "train", **degrees) -> StagePlan:
    pipeline = {1: (8,), 2: (4, 4), 4: (2, 2, 2, 2)}[pp]
    layout = Layout(tp=tp, pp=pp, dp=dp, pipeline=pipeline, distributed_optimizer=stage == "train", **degrees)
    return stage_plan(layout, tuple(range(layout.ranks)) if slots is None else tuple(slots), stage=stage)


def test_group_sizes() -> None:
    assert group_ranks(staged(4, 1, 2).layout) == 4
    assert group_ranks(staged(2, 1, 8, ep=8, etp=1).layout) == 8
    assert group_ranks(staged(2, 1, 8, ep=4).layout) == 8
    assert group_ranks(staged(1, 4, 2).layout) == 1


@pytest.mark.parametrize("spec", [DENSE, SPARSE], ids=["dense", "experts"])
def test_groups_stay_in_their_node_though_fewer_bytes_would_split_them(spec: ModelSpec) -> None:
    """Data parallel replicas lie across nodes; growing TP from 2 to 4 the fewest bytes take partners from both nodes."""
    fleet = uniform(8, H100, slots_per_node=4)
    scattered = staged(2, 1, 4, slots=(0, 4, 1, 5, 2, 6, 3, 7))
    after = staged(4, 1, 2, ep=4, etp=1) if spec is SPARSE else staged(4, 1, 2)
    moves = {"m": StageMove(spec=spec, before=scattered, after=after)}
    fewest = place(moves, fleet, objective="total_bytes")
    default = place(moves, fleet)
    assert fewest.cost.split_groups > 0
    assert default.cost.split_groups == 0
    nodes = fleet.node_of[list(default.slots["m"])].reshape(2, 4)
    assert (nodes == nodes[:, :1]).all()


def test_relabelling_moves_no_weights_where_every_shard_is_held() -> None:
    """TP2 DP4 to TP4 DP2 moves all of the weights' bytes with the old numbers, none with the best (facts: F3)."""
    before, after = staged(2, 1, 4, stage="infer"), staged(4, 1, 2, stage="infer")
    moves = {"m": StageMove(spec=DENSE, before=before, after=after)}
    fleet = uniform(8, H100)
    assert place(moves, fleet, objective="identity").cost.moved_bytes > DENSE.parameters
    assert place(moves, fleet).cost.moved_bytes == 0
    assert place(moves, fleet).gap == 0


def sync_bytes(spec: ModelSpec, train: StagePlan, generate: StagePlan) -> int:
    weights = of_stage(spec, replace(train, stage="infer"))
    found = streams(weights, of_stage(spec, generate), {"m.generate": "m.infer"})
    return routes(found, np.arange(8), uniform(8, H100, slots_per_node=8)).moved_bytes


@pytest.mark.parametrize("standing", [False, True], ids=["placed with it", "standing"])
def test_a_long_horizon_pays_for_a_cheaper_weight_sync(standing: bool) -> None:
    """Training grows; over many steps the sync behind it costs more than the change, over none it does not count."""
    fleet = uniform(8, H100, slots_per_node=8)
    before, after = staged(1, 4, 2, stage="train"), staged(4, 1, 2)
    generate = staged(2, 1, 4, slots=(5, 2, 7, 0, 1, 6, 3, 4), stage="generate")
    moves = {"train": StageMove(spec=DENSE, before=before, after=after)}
    known = {}
    if standing:
        known = {"generate": (DENSE, generate)}
    else:
        moves["generate"] = StageMove(spec=DENSE, before=None, after=generate)
    found = {
        steps: place(moves, fleet, syncs=[("train", "generate")], standing=known, horizon_steps=steps)
        for steps in (0.0, 1e6)
    }

    def synced(steps: float) -> int:
        slots = found[steps].slots
        train = replace(after, slots=slots["train"])
        return sync_bytes(DENSE, train, replace(generate, slots=slots.get("generate", generate.slots)))

    without = place(moves, fleet, syncs=[], standing={}).cost
    assert found[0.0].cost.seconds == pytest.approx(without.seconds)
    assert found[1e6].cost.seconds > 0
    fewest = place(
        moves, fleet, objective="total_bytes", syncs=[("train", "generate")], standing=known, horizon_steps=1e6
    )
    assert found[1e6].cost < fewest.cost
    assert synced(1e6) <= synced(0.0)


def test_nothing_to_do_costs_nothing() -> None:
    stage = staged(2, 2, 2)
    found = place({"m": StageMove(spec=DENSE, before=stage, after=stage)}, uniform(8, H100))
    assert found.slots["m"] == stage.slots
    assert (found.cost.seconds, found.cost.moved_bytes, found.gap) == (0.0, 0, 0.0)


def test_slots_that_idle_are_used_where_they_hold_something() -> None:
    """Shrinking from four replicas to one keeps the replica whose slots hold it, wherever the plan's list begins."""
    before = staged(2, 1, 4, stage="infer")
    after = staged(2, 1, 1, slots=(7, 6, 5, 4, 3, 2, 1, 0), stage="infer")
    found = place({"m": StageMove(spec=DENSE, before=before, after=after)}, uniform(8, H100))
    assert found.cost.moved_bytes == 0
    assert len(found.slots["m"]) == 2
