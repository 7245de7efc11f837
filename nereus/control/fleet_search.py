"""The answer to a `Search` on a fleet of GPUs: the planner's best plans, priced from what the slots hold now. Pure.

Plans come from the planner's search by horizon x step, from the present plan with one stage of those, and from the plans
asked for. In rising horizon x step + least price their changes are estimated, until the next one's least cost is above the
cost of the best. The best is priced by its transition graph, and so is whichever is best then.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil

from nereus.control.fleet_outlook import ORDER, FleetMemory, FleetOutlook, planned
from nereus.control.policies import with_dp
from nereus.control.proposals import BAND_SHARE, Proposal
from nereus.control.records import Band, Candidate, PriceEstimate, SearchRequest, Switches, candidate, plan_kind
from nereus.control.scaling import TRAINED
from nereus.fleet import Fleet
from nereus.layout import Plan, StagePlan
from nereus.planning.evaluate import Problem, evaluate
from nereus.planning.objective import Budget, Objective
from nereus.planning.plan import GlobalPlan
from nereus.planning.search import search
from nereus.planning.slots import stage_plan
from nereus.planning.space import Space

ROOM_RATIO = 1.15
"""A plan has to have room for samples so many times as long as now."""
MET_COUNT = 8
"""How many plans of different layouts the planner answers."""
PRICED_COUNT, MANY_SLOTS, FEW_PRICED_COUNT = 6, 128, 3
"""So many changes are estimated in one search; on more than MANY_SLOTS slots fewer."""
ALTERNATIVES_COUNT = 3
"""So many are answered even if none can be better than the first: memory or a failed change may bar that one."""
MARGINS_MORE = (0.0, 0.03, 0.08, 0.16, 0.32)
"""So much more margin the planner's search gets, one after the other, while all that it finds does not fit by what is foreseen."""
FLEET_SPACE = Space(recomputes=("none",), shardings=("optimizer",), pools=False)
"""What a Plan can say: all stages share the slots, nothing is recomputed or fully sharded."""


@dataclass(frozen=True, kw_only=True)
class Pricer:
    """What changes from the present plan cost: `price` by the graph (None: no change leads there), `estimate` without it,
    `bound` never above both.
    """

    price: Callable[[Plan], PriceEstimate | None]
    estimate: Callable[[Plan], PriceEstimate | None]
    bound: Callable[[Plan], float]


@dataclass(kw_only=True)
class _FleetSearch:
    request: SearchRequest
    outlook: FleetOutlook
    pricer: Pricer
    budget_count: int
    space: Space
    evaluated_count: int = 0
    near_miss: str = ""
    met: dict[str, tuple[float, Plan]] = field(default_factory=dict[str, tuple[float, Plan]])

    def __post_init__(self) -> None:
        wanted = frozenset(self.request.slots)
        every = self.outlook.inventory
        self.fleet: Fleet = every.without(frozenset(every.slots) - wanted)
        self.ratios = dict(self.request.ratios)
        outlook = self.outlook
        longest = outlook.longest_tokens(ceil(ROOM_RATIO * outlook.mean_tokens))
        room = tuple((size, ROOM_RATIO * ratio) for size, ratio in outlook.fullest_ratios())
        self.problem: Problem = outlook.problem(outlook.present_batch, self.fleet, longest, room)
        self.switches = Switches(allow=self.request.allow, deny=self.request.deny)
        self.broken = not _slots(self.request.present).isdisjoint(self.request.empty_slots)

    def plans(self) -> None:
        """Meets every plan that is worth judging, with more margin where none of them would fit the next step."""
        memory = self.problem.memory
        assert isinstance(memory, FleetMemory)
        for more in MARGINS_MORE:
            self.problem = replace(self.problem, memory=replace(memory, margin_share=memory.margin_share + more))
            if not self._met_plans() or self.met:
                return

    def _met_plans(self) -> bool:
        """Meets what the search finds; whether it found any plan."""
        self.near_miss = ""
        present, whole = self.request.present, self.problem.terrain.ordered()
        known = [plan for plan in self._asked() if _slots(plan) <= set(whole)]
        found = search(
            self.problem,
            space=self.space,
            objective=Objective(horizon_steps=max(self.request.horizon_steps, 1.0)),
            top_count=MET_COUNT,
            budget=Budget(nodes=self.budget_count),
            known=[planned(self.outlook.config, plan, whole) for plan in known],
        )
        self.evaluated_count += found.evaluated_nodes
        for each in found.candidates:
            self._meet(self.runtime_plan(each.plan))
        for plan in known:
            self._meet(plan)
        base = present if present in known else self._scaled()
        if base is not None and base in known:
            self._meet(self._with_micro_batches(base))
        if found.candidates:
            for plan in self._neighbours(present, self.runtime_plan(found.candidates[0].plan)):
                self._meet(plan)
        elif found.near_misses and found.near_misses[0].misfits:
            self.near_miss = found.near_misses[0].misfits[0].reason
        return bool(found.candidates)

    def _asked(self) -> Iterator[Plan]:
        present = self.request.present
        yield present
        yield from self.request.include
        scaled = self._scaled()
        if scaled is not None:
            yield scaled

    def _scaled(self) -> Plan | None:
        return with_dp(self.request.present, self.fleet, self.request.slots, divisible=False)

    def _with_micro_batches(self, plan: Plan) -> Plan:
        """The plan with the fastest micro-batches that fit, stage by stage: a change to these alone costs nothing."""
        whole, sizes = self.problem.terrain.ordered(), self.space.micro_batches
        best = replace(plan, **{name: replace(getattr(plan, name), micro_batch=min(sizes)) for name in TRAINED})
        for name in TRAINED:
            found: list[tuple[float, int, Plan]] = []
            for size in sizes:
                other = replace(best, **{name: replace(getattr(best, name), micro_batch=size)})
                judged = evaluate(self.problem, planned(self.outlook.config, other, whole))
                self.evaluated_count += 1
                if judged.fits:
                    found.append((judged.step.mean_seconds, size, other))
            lasting = (each for _, _, each in sorted(found) if self.outlook.fits(each, self.request.step))
            best = next(lasting, best)
        return best

    def _neighbours(self, present: Plan, best: Plan) -> Iterator[Plan]:
        """The present plan with one or with all but one of the best plan's stages, where all its slots are there."""
        there = set(self.request.slots)
        for name in ORDER:
            for base, other in ((present, best), (best, present)):
                mixed = replace(base, **{name: getattr(other, name)})
                if _slots(mixed) <= there:
                    yield mixed

    def _meet(self, plan: Plan) -> None:
        if plan.plan_id in self.met or (plan == self.request.present and not self.broken):
            return
        if self.switches.denies(plan) is not None:
            return
        whole = self.problem.terrain.ordered()
        judged = evaluate(self.problem, planned(self.outlook.config, plan, whole))
        self.evaluated_count += 1
        if judged.fits and not self.outlook.fits(plan, self.request.step):
            self.near_miss = self.near_miss or "the longest samples that are foreseen do not fit"
        elif judged.fits:
            ratio = self.ratios.get(plan_kind(plan), 1.0)
            self.met[plan.plan_id] = (ratio * judged.step.mean_seconds, plan)
        elif not self.near_miss:
            self.near_miss = judged.misfits[0].reason

    def runtime_plan(self, plan: GlobalPlan) -> Plan:
        """A plan of the planner on its seats; a stage that is cut as it was stays where it is."""
        seats = self.request.slots
        stages: dict[str, StagePlan] = {}
        for name, choice in plan.stages:
            before: StagePlan = getattr(self.request.present, name)
            slots = seated(self.fleet, seats, choice.layout.tp)[: choice.layout.ranks]
            stage = stage_plan(self.outlook.config, name, choice, slots)
            if stage.layout == before.layout and set(before.slots) <= set(seats):
                stage = replace(before, micro_batch=stage.micro_batch)
            stages[name] = stage
        if "critic_train" not in stages:
            stages["critic_train"] = replace(stages["actor_train"], model="critic")
        return Plan(**stages)

    def priced(self) -> list[Candidate]:
        """The best of what was met, cheapest first: by estimates, and the first one by its graph."""
        horizon = max(self.request.horizon_steps, 1.0)
        left = deque(self._estimable(horizon))
        kept: list[tuple[float, Candidate]] = []
        graphed = set[str]()
        while True:
            while left and (len(kept) < ALTERNATIVES_COUNT or left[0][0] < kept[0][0]):
                _, name = left.popleft()
                self._keep(kept, horizon, name, self.pricer.estimate)
            if not kept or kept[0][1].plan_id in graphed:
                return [each for _, each in kept]
            _, best = kept.pop(0)
            graphed.add(best.plan_id)
            self._keep(kept, horizon, best.plan_id, self.pricer.price)

    def _estimable(self, horizon: float) -> Iterator[tuple[float, str]]:
        """(least cost, plan) in rising order, one plan of each cut."""
        count: int = PRICED_COUNT if len(self.request.slots) <= MANY_SLOTS else FEW_PRICED_COUNT
        bounds = sorted((horizon * step + self.pricer.bound(plan), name) for name, (step, plan) in self.met.items())
        seen = set[object]()
        for least, name in bounds:
            cut = tuple((stage.layout, stage.slots) for _, stage in self.met[name][1].stages())
            if cut not in seen and len(seen) < count:
                seen.add(cut)
                yield least, name

    def _keep(
        self,
        kept: list[tuple[float, Candidate]],
        horizon: float,
        name: str,
        asked: Callable[[Plan], PriceEstimate | None],
    ) -> None:
        """Puts a plan among the kept by its cost, if a change leads there."""
        step, plan = self.met[name]
        found = asked(plan)
        if found is not None:
            insort(
                kept,
                (horizon * step + found.mean_seconds, candidate(plan, found)),
                key=lambda each: (each[0], each[1].plan_id),
            )

    def band(self) -> Band | None:
        """Of the predicted present step and its tokens; None where the present plan cannot run."""
        present = self.request.present
        if self.broken or not _slots(present) <= set(self.outlook.inventory.slots):
            return None
        batch = self.outlook.present_batch
        tokens = batch.samples * (batch.prompt_tokens + sum(batch.response_tokens) / len(batch.response_tokens))
        step = self.ratios.get(plan_kind(present), 1.0) * self.outlook.step(present.plan_id).mean_seconds
        return Band(
            least_step_seconds=step * (1 - BAND_SHARE),
            most_step_seconds=step * (1 + BAND_SHARE),
            least_tokens=tokens * (1 - BAND_SHARE),
            most_tokens=tokens * (1 + BAND_SHARE),
        )


def propose_fleet(
    request: SearchRequest, outlook: FleetOutlook, pricer: Pricer, budget_count: int, space: Space = FLEET_SPACE
) -> Proposal:
    """The best plans on the request's slots under its horizon. The same question has the same answer."""
    made = _FleetSearch(request=request, outlook=outlook, pricer=pricer, budget_count=budget_count, space=space)
    made.plans()
    found = made.priced()
    count = len(request.slots)
    why = f"of the plans for {count} slots none fits in memory: {made.near_miss}"
    if not made.near_miss:
        why = f"there is no other plan for {count} slots that nereus.plans allows and a change can reach"
    return Proposal(
        candidates=tuple(found),
        band=made.band(),
        reason="" if found else why,
        evaluated_count=made.evaluated_count,
        priced_count=len(found),
        finished=made.evaluated_count < budget_count,
    )


def _slots(plan: Plan) -> frozenset[int]:
    return frozenset[int]().union(*(stage.slots for _, stage in plan.stages()))


def seated(fleet: Fleet, slots: Iterable[int], tp: int) -> tuple[int, ...]:
    """The slots node by node, in whole groups of `tp` first."""
    wanted = set(slots)
    whole: list[int] = []
    rest: list[int] = []
    for node in fleet.nodes:
        members = [slot for slot in node.slots if slot in wanted]
        cut = len(members) - len(members) % tp
        whole += members[:cut]
        rest += members[cut:]
    return (*whole, *rest)
