"""Who plans in the simulated world: graphs of changes, each made once, their prices, and the answers to searches.

Graphs are the controller's, made with what it believes of links and tolls; what they really take is the world's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import hypot

from nereus.config import Config
from nereus.control.fleet_outlook import FleetOutlook
from nereus.control.fleet_search import FLEET_SPACE, Pricer, propose_fleet
from nereus.control.records import PriceEstimate, Search, SearchDone, SearchRequest, plan_slots
from nereus.costs.calibrate import Factor
from nereus.fleet import Fleet
from nereus.layout import Plan
from nereus.planning.space import Space
from nereus.sim.changes import (
    DEVICE_ENGINE_SECONDS,
    Asked,
    Key,
    Placing,
    SimChange,
    change_between,
    estimated_seconds,
    restarts_generation,
)
from nereus.sim.edges import Delays, Log
from nereus.transition import same_cut
from nereus.transitions.durations import Durations, Tolls
from nereus.transitions.holders import InvalidGraph
from nereus.transitions.order import Infeasible
from nereus.transitions.price import price

FIRST_DEVIATION = 0.3
"""How far off the price of a graph may be before any change was measured."""
MANY_SLOTS = 256
"""On more slots changes are priced without their graphs."""
GRAPHLESS_SHARE = 0.1
"""So much more a change may take than what is expected without its graph (tests/sim/test_placing.py)."""
KEPT_GRAPHS = 4
"""A graph of a thousand slots is some ten megabytes."""
NOTHING = PriceEstimate(mean_seconds=0.0, deviation_seconds=0.0, bound_seconds=0.0)


@dataclass(kw_only=True)
class Changes:
    """The changes of a job on its fleets. An Infeasible is remembered as well."""

    config: Config
    tolls: Tolls = field(default_factory=Tolls)
    engine_seconds: Mapping[str, float] = field(default_factory=lambda: DEVICE_ENGINE_SECONDS)
    placing: Placing = "measured"
    delays: Delays = field(default_factory=Delays)
    factor: Factor = field(default_factory=lambda: Factor(variance_ratio=FIRST_DEVIATION**2))
    _made: OrderedDict[Key, SimChange | Infeasible] = field(
        default_factory=OrderedDict["Key", "SimChange | Infeasible"]
    )
    _prices: dict[Key, PriceEstimate | None] = field(default_factory=dict["Key", "PriceEstimate | None"])

    def between(self, asked: Asked) -> SimChange:
        """The change with its graph. Infeasible where no mode fits."""
        key = asked.key
        if key not in self._made:
            try:
                self._made[key] = change_between(
                    self.config,
                    asked.before,
                    asked.after,
                    asked.fleet,
                    Durations(fleet=asked.fleet, tolls=self.tolls),
                    self.engine_seconds,
                    holders=asked.holders,
                    placing=self.placing,
                    urgent=asked.urgent,
                )
            except Infeasible as error:
                self._made[key] = error
            while len(self._made) > KEPT_GRAPHS:
                self._made.popitem(last=False)
        found = self._made[key]
        if isinstance(found, Infeasible):
            raise found
        return found

    def price(self, asked: Asked) -> PriceEstimate | None:
        """What the controller expects of a change, by what the last ones took; None where no order fits in memory."""
        key = asked.key
        if key not in self._prices:
            self._prices[key] = self._priced(asked)
        return self._corrected(self._prices[key])

    def estimate(self, asked: Asked) -> PriceEstimate | None:
        """The price if it is known, else what is expected without a graph, and more: only a graph says whether there is room."""
        key = asked.key
        if key in self._prices:
            return self._corrected(self._prices[key])
        found = self.estimated(asked)
        if found.bound_seconds:
            more = 1 + GRAPHLESS_SHARE
            found = replace(found, mean_seconds=more * found.mean_seconds, commit_seconds=more * found.commit_seconds)
        return self._corrected(found)

    def _corrected(self, raw: PriceEstimate | None) -> PriceEstimate | None:
        """By what the last changes took beside their prices."""
        if raw is None or not raw.bound_seconds:
            return raw
        ratio = self.factor.ratio
        mean = ratio * raw.mean_seconds
        deviation = hypot(ratio * raw.deviation_seconds, self.factor.deviation_share * mean)
        return replace(raw, mean_seconds=mean, deviation_seconds=deviation, commit_seconds=ratio * raw.commit_seconds)

    def measured(self, asked: Asked, seconds: float) -> None:
        """Learns from what a change that had a price took, pause and interleaved."""
        raw = self._prices.get(asked.key)
        if raw is not None and raw.bound_seconds and seconds > 0:
            self.factor = self.factor.observe(raw.mean_seconds, seconds)

    def _priced(self, asked: Asked) -> PriceEstimate | None:
        if len(asked.fleet.slots) > MANY_SLOTS:
            return self.estimated(asked)
        try:
            found = self.between(asked)
        except (Infeasible, InvalidGraph):
            return None
        if found.missing:
            return self.restored(asked.fleet)
        if found.graph is None:
            return NOTHING
        cost = price(found.graph, Durations(fleet=asked.fleet, tolls=self.tolls))
        return PriceEstimate(
            mean_seconds=cost.seconds,
            deviation_seconds=cost.deviation_seconds,
            bound_seconds=min(cost.bound_seconds, cost.seconds),
            commit_seconds=cost.commit_seconds,
        )

    def estimated(self, asked: Asked) -> PriceEstimate:
        """A price without a graph, which takes seconds on so many slots and is made for what is carried out alone."""
        durations = Durations(fleet=asked.fleet, tolls=self.tolls)
        before, after, holders = asked.before, asked.after, asked.holders
        seconds, moved, whole = estimated_seconds(
            self.config, before, after, asked.fleet, durations, self.engine_seconds, holders, self.placing
        )
        if not whole:
            return self.restored(asked.fleet)
        if not seconds:
            return NOTHING
        return PriceEstimate(
            mean_seconds=seconds,
            deviation_seconds=self.tolls.deviation_share["build_engine"] * seconds,
            bound_seconds=seconds,
            commit_seconds=moved if asked.urgent else seconds,
        )

    def bound(self, before: Plan, after: Plan) -> float:
        """Below every price: what a slot's engines take that are built one after the other, whatever bytes move."""
        built = built_seconds(before, after, self.engine_seconds)
        if not built:
            return 0.0
        live = self.factor.ratio * (built + self.tolls.commit_seconds + self.tolls.activate_seconds)
        return min(live, self._engines_seconds)

    @property
    def _engines_seconds(self) -> float:
        """To build the engines of a job that is read from storage."""
        return self.engine_seconds["train"] + self.engine_seconds["generate"]

    def restored(self, fleet: Fleet, *, saved: bool = False, processes: bool = False) -> PriceEstimate:
        """What going on from storage is expected to take, and how unsure that is; no graph prices it.

        In the same processes or in new ones, from the last checkpoint or from the state as it is, `saved` first.
        """
        nodes = len(fleet.nodes)
        mean = self.delays.restart(self.config, nodes, self._engines_seconds, 1.0, processes=processes)
        mean += self.delays.stored(self.config, nodes) * saved
        return PriceEstimate(mean_seconds=mean, deviation_seconds=mean / 2, bound_seconds=0.0)


def built_seconds(before: Plan, after: Plan, engine_seconds: Mapping[str, float]) -> float:
    """Of the slot on which most is built anew when all slots of `before` live: a slot builds one engine at a time."""
    built: dict[int, float] = {}
    for name, stage in after.stages():
        anew = not same_cut(getattr(before, name), stage)
        if stage.stage == "generate":
            anew = restarts_generation(before, after)
        for slot in stage.slots if anew else ():
            built[slot] = built.get(slot, 0.0) + engine_seconds[stage.stage]
    return max(built.values(), default=0.0)


@dataclass(kw_only=True)
class FleetSearcher:
    """Answers searches in place; `outlook` is asked for what the controller believes at that moment.

    `free` has every change cost nothing: the controller without a price. With `by_restart` each is a restart, or with
    `through_storage` state in storage and processes that stay.
    """

    changes: Changes
    journal: Log
    outlook: Callable[[], FleetOutlook]
    fleet: Callable[[], Fleet]
    space: Space = FLEET_SPACE
    free: bool = False
    by_restart: bool = False
    through_storage: bool = False

    def __call__(self, search: Search, at_seconds: float) -> SearchDone:
        """The answer."""
        request = search.request
        found = propose_fleet(request, self.outlook(), self._pricer(request), search.budget_count, self.space)
        self.journal.append(
            "search_done",
            at_seconds=at_seconds,
            search_id=search.search_id,
            evaluated_count=found.evaluated_count,
            priced_count=found.priced_count,
            finished=found.finished,
        )
        return SearchDone(
            at_seconds=at_seconds,
            search_id=search.search_id,
            candidates=found.candidates,
            band=found.band,
            reason=found.reason,
        )

    def _pricer(self, request: SearchRequest) -> Pricer:
        if self.free or self.by_restart:
            by = self.changes.restored(self.fleet(), saved=True, processes=not self.through_storage)
            constant = NOTHING if self.free else by
            return Pricer(price=lambda _: constant, estimate=lambda _: constant, bound=lambda _: constant.mean_seconds)
        fleet, before = self.fleet(), request.present
        holders = frozenset(fleet.slots) - frozenset(request.empty_slots)
        urgent = not (plan_slots(before) & holders) <= set(request.slots)

        def asked(after: Plan) -> Asked:
            return Asked(before=before, after=after, fleet=fleet, holders=holders, urgent=urgent)

        there = frozenset(fleet.slots)
        return Pricer(
            price=lambda after: self.changes.price(asked(after)) if plan_slots(after) <= there else None,
            estimate=lambda after: self.changes.estimate(asked(after)) if plan_slots(after) <= there else None,
            bound=lambda after: self.changes.bound(before, after),
        )
