"""The oracle of a scenario: among which plans it may choose, and what it and the ceiling of free changes come to.

Its plans are all that the runs it looks back on used, where they stood, and for every fleet the fastest, by true times, of
their shapes and of the planner's best.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

from nereus.config import Config
from nereus.control.fleet_outlook import FleetOutlook, fullest_ratios_of
from nereus.control.fleet_search import FLEET_SPACE, seated
from nereus.control.records import plan_slots
from nereus.control.written import plan_of
from nereus.fleet import Fleet
from nereus.layout import Plan
from nereus.lengths import largest_row_tokens
from nereus.planning.objective import Budget
from nereus.planning.plan import GlobalPlan
from nereus.planning.search import search
from nereus.planning.slots import stage_plan
from nereus.sim.oracle import Leg, Program, Timeline
from nereus.sim.phases import batch_of
from nereus.sim.play import Moment, inventory_of
from nereus.sim.realised import RealisedPrices, RealisedSteps
from nereus.sim.truth import Truth
from nereus.sim.workload import SimWorkload

BANDS = (0.25, 0.75)
"""Plans are judged on the steps at these shares of the run."""
PLANNED_COUNT, KEPT_COUNT, SEARCH_NODES = 3, 2, 100_000
"""Of the planner's best for a number of slots and a band, and of the fastest on a fleet in a band; nodes of a search."""
MOST_BEHIND_SECONDS = 300.0
"""A change takes about 90 s, one that starts from a checkpoint about 150 s."""
STARTS_COUNT = 8
"""Of the planner's plans among which the best layout to start in is."""
LEAST_USED_SHARE = 0.9
"""Shapes that leave more of a fleet idle are not tried on it."""


@dataclass(kw_only=True)
class Past:
    """What runs of one scenario did: their plans, the first of each, what changes between two took at least, when they ended.

    Seconds of a change are all of its pause.
    """

    plans: dict[str, Plan] = field(default_factory=dict[str, Plan])
    first: dict[str, Plan] = field(default_factory=dict[str, Plan])
    charged: dict[tuple[str, str], float] = field(default_factory=dict["tuple[str, str]", float])
    end_seconds: float = inf

    def read(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Adds a run by its journal."""
        present = wanted = ""
        for event in events:
            kind = event["kind"]
            if kind == "control_started":
                present = self._met(plan_of(event["plan"]))
                self.first[present] = self.plans[present]
            elif kind == "commanded" and event["command"]["is"] in ("ChangePlan", "Restart"):
                wanted = self._met(plan_of(event["command"]["plan"]))
            elif kind == "transition_done":
                pair, seconds = (present, wanted), float(event["pause_seconds"])
                self.charged[pair] = min(seconds, self.charged.get(pair, inf))
                present = wanted
            elif kind == "run_stopped" and event["reason"] == "done":
                self.end_seconds = min(self.end_seconds, float(event["at_seconds"]))

    def _met(self, plan: Plan) -> str:
        name = plan.plan_id
        self.plans.setdefault(name, plan)
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A best path and the plans that its legs count."""

    legs: tuple[Leg, ...]
    plans: Sequence[Plan]

    @property
    def total_seconds(self) -> float:
        """To the end of the last step; infinite if there is no path."""
        return self.legs[-1].ended_seconds if self.legs else inf

    def spent(self) -> tuple[float, ...]:
        """Seconds from the end of the step before to the end of each step, changes and waiting included."""
        ends = [0.0, *(leg.ended_seconds for leg in self.legs)]
        return tuple(end - begin for begin, end in pairwise(ends))


@dataclass(kw_only=True)
class Hindsight:
    """A scenario that is past: the job, the fleet over time, the truth, and what others did in it."""

    config: Config
    moments: Sequence[Moment]
    workload: SimWorkload
    truth: Truth
    past: Past

    def __post_init__(self) -> None:
        self.moments = tuple(each for each in self.moments if each.at_seconds <= self.past.end_seconds)
        made = {"config": self.config, "moments": self.moments, "workload": self.workload}
        self.steps = RealisedSteps(**made, truth=self.truth)
        self._exact = RealisedSteps(**made, truth=replace(self.truth, exact=True))
        self.plans = tuple(self._plans())
        ids = [plan.plan_id for plan in self.plans]
        number = {name: index for index, name in enumerate(ids)}
        charged = {(number[a], number[b]): seconds for (a, b), seconds in self.past.charged.items()}
        self.prices = RealisedPrices(
            config=self.config, plans=self.plans, moments=self.moments, truth=self.truth, charged=charged
        )

    def oracle(self, first: Plan) -> Answer:
        """What could be had from the plan `first` on."""
        index = next(i for i, plan in enumerate(self.plans) if plan == first)
        return self._solved((index,), free=False)

    def ceiling(self) -> Answer:
        """What could be had if changes took no time and lost nothing."""
        there = frozenset(self.moments[0].fleet.slots)
        return self._solved([i for i, plan in enumerate(self.plans) if plan_slots(plan) <= there], free=True)

    def _solved(self, first: Sequence[int], *, free: bool) -> Answer:
        timeline = Timeline(
            at_seconds=tuple(each.at_seconds for each in self.moments),
            present=tuple(frozenset(each.fleet.slots) for each in self.moments),
        )
        program = Program(
            timeline=timeline,
            slots=[plan_slots(plan) for plan in self.plans],
            first=first,
            steps=self.config.run.steps,
            step_seconds=lambda plan, step, moment: self.steps.seconds(self.plans[plan], step, moment),
            prices=self.prices,
            free=free,
            most_behind_seconds=MOST_BEHIND_SECONDS,
        )
        return Answer(legs=program.solve(), plans=self.plans)

    # -- plans ---------------------------------------------------------------------------------------------------

    def _plans(self) -> Iterable[Plan]:
        """Those of the past, and for every fleet the fastest of all shapes in each band."""
        found, shapes = dict(self.past.plans), dict[int, list[Plan]]()
        for fleet in {moment.fleet.slots: moment.fleet for moment in self.moments}.values():
            count = len(fleet.slots)
            if count not in shapes:
                shapes[count] = list(self._fastest(fleet))
            for shape in shapes[count]:
                plan = on(fleet, shape)
                if plan is not None:
                    found.setdefault(plan.plan_id, plan)
        return found.values()

    def _fastest(self, fleet: Fleet) -> Iterable[Plan]:
        """On a fleet; others of as many slots are taken to be like it."""
        placed = {
            plan.plan_id: plan for plan in (on(fleet, shape) for shape in self._shapes(fleet)) if plan is not None
        }
        for step in self._bands():
            timed = [(self._exact.seconds(plan, step, 0), name) for name, plan in placed.items()]
            for seconds, name in sorted(timed)[:KEPT_COUNT]:
                if seconds < inf:
                    yield placed[name]

    def _bands(self) -> tuple[int, ...]:
        return tuple(max(1, round(share * self.config.run.steps)) for share in BANDS)

    def _shapes(self, fleet: Fleet) -> Iterable[Plan]:
        yield from self.past.plans.values()
        outlook = FleetOutlook(config=self.config, inventory=inventory_of(tuple(self.moments)), plans={})
        for step in self._bands():
            batch = batch_of(self.workload.batch(step))
            problem = outlook.problem(batch, fleet, batch.width_tokens, fullest_ratios_of(batch))
            budget = Budget(nodes=SEARCH_NODES)
            for each in search(problem, space=FLEET_SPACE, top_count=PLANNED_COUNT, budget=budget).candidates:
                yield stated(self.config, each.plan, fleet)


def stated(config: Config, plan: GlobalPlan, fleet: Fleet) -> Plan:
    """A planner's plan on a fleet."""
    stages = {
        name: stage_plan(config, name, choice, seated(fleet, fleet.slots, choice.layout.tp)[: choice.layout.ranks])
        for name, choice in plan.stages
    }
    if "critic_train" not in stages:
        stages["critic_train"] = replace(stages["actor_train"], model="critic")
    return Plan(**stages)


def best_layout(config: Config, moments: Sequence[Moment], workload: SimWorkload, stated_plan: Plan) -> Plan:
    """The best layout to start in: of the planner's best for the first fleet that hold the longest samples allowed, and the
    stated one, that which takes the first step in the least time, all slots being equal.
    """
    fleet = moments[0].fleet
    outlook = FleetOutlook(config=config, inventory=fleet, plans={})
    batch = batch_of(workload.batch(1))
    longest = largest_row_tokens(config.data)
    found = search(
        outlook.problem(batch, fleet, longest, fullest_ratios_of(batch)),
        space=FLEET_SPACE,
        top_count=STARTS_COUNT,
        budget=Budget(nodes=SEARCH_NODES),
    )
    plans = [stated_plan, *(stated(config, each.plan, fleet) for each in found.candidates)]
    exact = RealisedSteps(config=config, moments=moments, workload=workload, truth=Truth(exact=True))
    return min(plans, key=lambda plan: exact.seconds(plan, 1, 0))


def on(fleet: Fleet, shape: Plan) -> Plan | None:
    """A plan of all shared slots moved to another fleet; None where it needs more slots, or leaves many idle."""
    used, there = len(plan_slots(shape)), len(fleet.slots)
    if not LEAST_USED_SHARE * there <= used <= there:
        return None
    stages = {
        name: replace(stage, slots=seated(fleet, fleet.slots, stage.layout.tp)[: stage.layout.ranks])
        for name, stage in shape.stages()
    }
    return replace(shape, **stages)
