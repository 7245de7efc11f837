"""The oracle: exact against every path on small questions, and no policy of the simulated world ends before it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.cli.simulation import commander_of
from nereus.config import Config, RolloutConfig
from nereus.layout import first_plan
from nereus.sim.edges import Delays
from nereus.sim.hindsight import Hindsight, Past
from nereus.sim.oracle import HOPS, Edge, Program, Timeline
from nereus.world import drive
from tests.sim.scene import H100, Kept, job, plan_config, world

SLOTS = (frozenset({0}), frozenset({1}), frozenset({0, 1}))


class Table:
    """Prices that are all known: of a change from a plan to another, more where a slot of it lost its state."""

    def __init__(self, seconds: list[list[float]], lost_seconds: float) -> None:
        self.table, self.lost_seconds = seconds, lost_seconds

    def least(self, before: int, after: int) -> float:
        return self.table[before][after]

    def seconds(self, edge: Edge) -> float:
        lost = len(SLOTS[edge.before] - edge.holders)
        return self.table[edge.before][edge.after] + self.lost_seconds * lost

    def charge(self, edge: Edge) -> bool:
        return False


def least(program: Program, prices: Table) -> float:
    """The end of the best path, by trying all of them."""
    line = program.timeline

    def there(plan: int, begin: float, end: float) -> bool:
        return line.kept(SLOTS[plan], begin, end) == SLOTS[plan]

    def starts(at: float) -> list[float]:
        return [at, *(moment for moment in line.at_seconds if moment > at)]

    def go(at: float, plan: int, step: int, hops: int) -> float:
        if step > program.steps:
            return at
        best = inf
        for begin in starts(at):
            over = begin + program.step_seconds(plan, step, line.index_at(begin))
            if there(plan, at, begin) and there(plan, begin, over - 1e-9):
                best = min(best, go(over, plan, step + 1, 0))
            for other in range(len(SLOTS)) if hops < HOPS else ():
                holders = line.kept(SLOTS[plan], at, begin)
                if other == plan and holders == SLOTS[plan]:
                    continue
                edge = Edge(before=plan, after=other, moment=line.index_at(begin), holders=holders)
                done = begin + (0.0 if program.free else prices.seconds(edge))
                if there(other, begin, max(begin, done - 1e-9)):
                    best = min(best, go(done, other, step, hops + 1))
        return best

    return min(go(0.0, plan, 1, 0) for plan in program.first)


seconds = st.sampled_from([1.0, 2.0, 3.5, 5.25, 8.125])


@given(
    fleets=st.lists(st.sampled_from([*SLOTS, frozenset[int]()]), min_size=1, max_size=2),
    gaps=st.lists(st.sampled_from([1.7, 4.3, 9.9]), min_size=3, max_size=3),
    table=st.lists(st.lists(seconds, min_size=3, max_size=3), min_size=3, max_size=3),
    times=st.lists(st.lists(seconds, min_size=4, max_size=4), min_size=6, max_size=6),
    lost_seconds=seconds,
    free=st.booleans(),
)
def test_the_best_of_all_paths(fleets, gaps, table, times, lost_seconds, free) -> None:
    present = (frozenset({0, 1}), *fleets, frozenset({0, 1}))
    at = [0.0]
    for index in range(len(present) - 1):
        at.append(at[-1] + gaps[index % 3])
    line, prices = Timeline(at_seconds=tuple(at), present=present), Table(table, lost_seconds)
    program = Program(
        timeline=line,
        slots=SLOTS,
        first=(2,),
        steps=2,
        step_seconds=lambda plan, step, moment: times[plan + 3 * (step - 1)][moment % 4],
        prices=prices,
        free=free,
    )
    legs = program.solve()
    assert (legs[-1].ended_seconds if legs else inf) == pytest.approx(least(program, prices))
    for before, after in pairwise(legs):
        assert before.ended_seconds <= after.began_seconds
    for leg in legs:
        assert line.kept(SLOTS[leg.plan], leg.began_seconds, leg.ended_seconds - 1e-9) == SLOTS[leg.plan]


class Bounded(Table):
    """Prices of which nothing is known but that they are not below 0, until they are asked for."""

    def __init__(self, seconds: list[list[float]]) -> None:
        super().__init__(seconds, 0.0)
        self.asked = set[Edge]()

    def least(self, before: int, after: int) -> float:
        return 0.0

    def seconds(self, edge: Edge) -> float:
        return super().seconds(edge) if edge in self.asked else 0.0

    def charge(self, edge: Edge) -> bool:
        fresh = edge not in self.asked
        self.asked.add(edge)
        return fresh


@given(
    table=st.lists(st.lists(seconds, min_size=3, max_size=3), min_size=3, max_size=3),
    times=st.lists(st.lists(seconds, min_size=3, max_size=3), min_size=4, max_size=4),
)
def test_prices_that_are_found_out_on_the_way_lead_to_the_same_path(table, times) -> None:
    line = Timeline(at_seconds=(0.0,), present=(frozenset({0, 1}),))
    make = partial(
        Program, timeline=line, slots=SLOTS, first=(0,), steps=4, step_seconds=lambda p, step, _: times[step - 1][p]
    )
    known = make(prices=Table(table, 0.0)).solve()
    found = make(prices=Bounded(table)).solve()
    assert found[-1].ended_seconds == pytest.approx(known[-1].ended_seconds)


POLICIES = ("nereus", "dp-scaling", "dp-scaling-any-free", "restart", "fixed")
POINTS = [(0.0, 2), (90.0, 3), (230.0, 2), (330.0, 3)]


def small() -> Config:
    """From a recipe that is far from the best."""
    config = job(steps=14, plan=plan_config(8, 2, 1, 8))
    config = replace(config, rollout=RolloutConfig(kv_cache_bytes=16 << 30))
    return replace(config, data=replace(config.data, prompts_per_step=96))


def played(policy: str) -> tuple[Any, Kept]:
    """A policy in the small scenario."""
    config = small()
    made, kept = world(config, POINTS, memory_bytes=H100.memory_bytes, delays=Delays(notice_seconds=60.0))
    drive(commander_of(policy, config, first_plan(config), made, kept), made)  # type: ignore[arg-type]
    return made, kept


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[Any, Kept]]:
    return {policy: played(policy) for policy in POLICIES}


@pytest.fixture(scope="module")
def hindsight(runs: dict[str, tuple[Any, Kept]]) -> Hindsight:
    past = Past()
    for _, kept in runs.values():
        past.read(json.loads(json.dumps(kept.events)))
    made = runs["nereus"][0]
    return Hindsight(config=small(), moments=made.moments, workload=made.workload, truth=made.truth, past=past)


def test_steps_are_those_of_the_world(runs: dict[str, tuple[Any, Kept]], hindsight: Hindsight) -> None:
    plans = hindsight.past.plans
    for _, kept in runs.values():
        for event in kept.kinds("step_done"):
            began = event["at_seconds"] - event["metrics"]["timing_s/step"]
            moment = sum(at <= began for at, _ in POINTS) - 1
            if moment < len(hindsight.moments):
                found = hindsight.steps.seconds(plans[event["plan_id"]], event["step"], moment)
                assert found == pytest.approx(event["metrics"]["timing_s/step"], rel=1e-9)


def test_no_policy_ends_before_it(runs: dict[str, tuple[Any, Kept]], hindsight: Hindsight) -> None:
    ends = {policy: made.env.now for policy, (made, _) in runs.items() if made.steps_done == small().run.steps}
    assert "nereus" in ends
    oracle, ceiling = hindsight.oracle(first_plan(small())), hindsight.ceiling()
    assert oracle.total_seconds <= min(ends.values()) * (1 + 1e-9)
    assert ceiling.total_seconds < oracle.total_seconds
    assert sum(oracle.spent()) == pytest.approx(oracle.total_seconds)
    assert [leg.step for leg in oracle.legs] == list(range(1, small().run.steps + 1))
