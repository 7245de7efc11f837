"""The answer to a `Search` on the real job: the best plans for its slots, priced from what the slots hold now. Pure.

The phases of a step run one after the other, and each belongs to one model-stage, so a step is the sum of what the
stages' own choices take. The choices of each stage are the planner's (`nereus.planning.space`). A lower bound of the price
is a sum over stages too: the first slot builds their engines and groups one after the other. So combinations are visited
by rising horizon x step + bound, every plan there is until the budget of nodes is spent; only where that is better than
the worst of the plans kept a plan is priced by its transition graph, and where it is not the search ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import hypot

from nereus.control.outlook import JobOutlook
from nereus.control.records import (
    Band,
    Candidate,
    PriceEstimate,
    SearchRequest,
    Switches,
    candidate,
    plan_kind,
    plan_slots,
)
from nereus.costs.calibrate import OVERHEAD, STATE, predict
from nereus.costs.speeds import fastest, shared_by_speed
from nereus.errors import TransferFailed
from nereus.fleet import CPU_SLOT, Fleet, Node
from nereus.layout import STAGES, Plan, StagePlan, equal_shares
from nereus.memory import OVERHEAD_BYTES, request_cache_bytes, stage_bytes
from nereus.model import ModelSpec, models_of
from nereus.observe import DRIVER_SECONDS
from nereus.planning.plan import StageChoice
from nereus.planning.slots import problem_of, space_of, stage_plan
from nereus.planning.space import engine_layouts, stage_choices, stage_layouts
from nereus.storage import emu_name
from nereus.transfer.placement import StageMove, place
from nereus.transition import Transition, build, same_cut
from nereus.transitions.change import Mode
from nereus.transitions.durations import Durations, Tolls
from nereus.transitions.holders import InvalidGraph
from nereus.transitions.order import Infeasible
from nereus.transitions.planned import Settings, SlotRoom, planned_graph
from nereus.transitions.price import price
from nereus.workload import (
    FIRST_USE_SECONDS,
    PHASE_KINDS,
    PHASE_STAGES,
    PhaseKind,
    every_slot,
    largest_batch,
    stage_terms,
)

TOP_COUNT = 5
PRICED_COUNT = 48
"""So many graphs are made at most in one search, beside those of the plans asked for."""
FIT_NODES = 20
"""What judging a plan's memory costs of the budget, in visited combinations."""
BAND_SHARE = 0.2
"""While step and tokens stay within this share of what they were, the answer stands."""
EXPECTED_ENGINE_SECONDS = 0.3
REFORM_SECONDS = 4.0
REFORM_SHARE = 0.5
"""What forming the world anew after a loss takes on the CPU, and how unsure that is; no graph prices it."""
Indices = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What of the running job a search rests on, by slot: beliefs, room, hosts; engines' seconds by EMU; what changes cost."""

    outlook: JobOutlook
    room: Mapping[int, SlotRoom]
    hosts: Mapping[int, int]
    engine_seconds: Mapping[str, float]
    tolls: Tolls = field(default_factory=Tolls)
    modes: Mapping[str, Mode] = field(default_factory=dict[str, Mode])


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """The candidates, cheapest first; the band for which they hold; how many nodes and graphs it took; why there is none."""

    candidates: tuple[Candidate, ...]
    band: Band | None
    reason: str
    evaluated_count: int
    priced_count: int
    finished: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Option:
    """A choice for one model-stage, what its phases take, and its part of the least cost: horizon x that + bound.

    `leaves_room` is whether it holds the rows to come beside what the other stages keep at present.
    """

    stage: StagePlan
    seconds: float
    cost_seconds: float
    leaves_room: bool


def propose(request: SearchRequest, ground: Ground, budget_count: int) -> Proposal:
    """The best plans on the request's slots under its horizon. The same question has the same answer."""
    search = _Search(request=request, ground=ground, budget_count=budget_count)
    for lasting, widest in ((True, True), (True, False), (False, True), (False, False)):
        search.run(widest=widest, lasting=lasting)
        if search.kept:
            break
    asked = [c for c in (search.priced(plan) for plan in request.include) if c is not None]
    found = sorted(search.kept.values(), key=lambda each: (each[0], each[1].plan_id))
    best = {c.plan_id: c for _, c in found} | {c.plan_id: c for c in asked}
    return Proposal(
        candidates=tuple(best.values()),
        band=search.band(),
        reason="" if best else search.reason(),
        evaluated_count=search.nodes_count,
        priced_count=search.priced_count,
        finished=search.finished and search.priced_count < PRICED_COUNT,
    )


@dataclass(kw_only=True)
class _Search:
    request: SearchRequest
    ground: Ground
    budget_count: int
    kept: dict[object, tuple[float, Candidate]] = field(default_factory=dict[object, tuple[float, Candidate]])
    nodes_count: int = 0
    priced_count: int = 0
    nearest: str = ""
    least_steps: float = 0.0  # so long at least the plans that are kept have to fit
    finished: bool = True

    def __post_init__(self) -> None:
        self.config = self.ground.outlook.config
        self.pricing = Pricing(request=self.request, ground=self.ground)
        self.ratios = dict(self.request.ratios)
        self.floor_ratio = min((1.0, *self.ratios.values()))
        self.present = self.request.present
        steps = max(1, round(self.request.horizon_steps))
        self.width_tokens = self.ground.outlook.coming_tokens(self.request.step, steps)
        self.kept_bytes = {name: self.stage_kept_bytes(stage) for name, stage in self.present.stages()}

    def run(self, *, widest: bool, lasting: bool) -> None:
        """Visits combinations by rising least cost, and spends the budget at most.

        `widest`: of each layout the fastest micro-batch that leaves room, else the smallest. `lasting`: only plans that are
        foreseen to fit over the horizon, else also those that soon stop to.
        """
        self.least_steps = self.request.horizon_steps if lasting else 1.0
        end_count = self.nodes_count + self.budget_count
        options = [self.options(name, widest=widest) for name in STAGES]
        if not all(options):
            return
        rest = self.rest_seconds()
        least = self.floor_ratio * self.request.horizon_steps * rest
        for cost, indices in rising([[each.cost_seconds for each in listed] for listed in options]):
            if self.nodes_count >= end_count:
                self.finished = False
                return
            if least + cost >= self.limit_seconds:
                return
            self.nodes_count += 1
            chosen = {name: options[at][indices[at]] for at, name in enumerate(STAGES)}
            step = rest + sum(each.seconds for each in chosen.values())
            self.visit(Plan(**{name: each.stage for name, each in chosen.items()}), step)

    def stage_kept_bytes(self, stage: StagePlan) -> int:
        """What a stage keeps on a slot between its phases."""
        held, _ = stage_bytes(self.config, self.pricing.specs[stage.model], stage, 0, self.width_tokens)
        return sum(held.values())

    @property
    def limit_seconds(self) -> float:
        """What a plan has to be below to be among the best."""
        if len(self.kept) < TOP_COUNT:
            return float("inf")
        return max(cost for cost, _ in self.kept.values())

    def visit(self, plan: Plan, step: float) -> None:
        """Keeps a plan that fits and is among the best of its layouts."""
        if all(stage == getattr(self.present, name) for name, stage in plan.stages()) and not self.pricing.broken:
            return
        horizon, kind = self.request.horizon_steps, tuple(stage.layout for _, stage in plan.stages())
        cost = horizon * step * self.ratios.get(plan_kind(plan), 1.0)
        limit = min(self.limit_seconds, self.kept[kind][0] if kind in self.kept else float("inf"))
        if cost + self.pricing.bound_seconds(plan) >= limit or self.priced_count >= PRICED_COUNT or not self.fits(plan):
            return
        self.priced_count += 1
        found = self.priced(plan)
        if found is None or cost + found.price.mean_seconds >= limit:
            return
        self.kept[kind] = (cost + found.price.mean_seconds, found)
        if len(self.kept) > TOP_COUNT:
            del self.kept[max(self.kept, key=lambda each: self.kept[each][0])]

    def priced(self, plan: Plan) -> Candidate | None:
        """The plan on its best seats with its price; None where no change leads to it."""
        if not {slot for _, stage in plan.stages() for slot in stage.slots} <= set(self.request.slots):
            return None
        placed = self.pricing.placed(plan)
        found = self.pricing.of(placed)
        return None if found is None else candidate(placed, found)

    def fits(self, plan: Plan) -> bool:
        """Whether every slot has the room, with the margin that was learnt, for the rows of so many steps as are wanted."""
        self.nodes_count += FIT_NODES
        misfit = self.ground.outlook.foreseen(plan, plan.plan_id, self.request.step)
        if misfit is not None and not self.nearest:
            when = f"in {misfit.within_steps} steps, " if misfit.within_steps else ""
            self.nearest = f"{plan}: {when}{misfit.reason}"
        return misfit is None or misfit.within_steps >= self.least_steps

    def reason(self) -> str:
        """Why there is no candidate."""
        count = len(self.request.slots)
        if self.nearest:
            return f"of the plans for {count} slots none fits in memory: {self.nearest}"
        return f"there is no other plan for {count} slots that nereus.plans allows and a change can reach"

    def band(self) -> Band | None:
        """Of the predicted present step and its tokens; None where the present plan cannot run."""
        if self.pricing.broken:
            return None
        outlook = self.ground.outlook
        batch = outlook.state.batch or largest_batch(self.config)
        tokens = batch.samples * (batch.prompt_tokens + sum(batch.response_tokens) / len(batch.response_tokens))
        ratio = self.ratios.get(plan_kind(self.present), 1.0)
        step = ratio * outlook.step(self.present.plan_id).mean_seconds
        return Band(
            least_step_seconds=step * (1 - BAND_SHARE),
            most_step_seconds=step * (1 + BAND_SHARE),
            least_tokens=tokens * (1 - BAND_SHARE),
            most_tokens=tokens * (1 + BAND_SHARE),
        )

    # -- options ------------------------------------------------------------------------------------------------------

    def options(self, name: str, *, widest: bool) -> list[_Option]:
        """The choices of a model-stage, fastest first: of each layout one, on the slots where it is if it is there."""
        switches = Switches(allow=self.request.allow, deny=self.request.deny)
        before: StagePlan = getattr(self.present, name)
        best: dict[object, _Option] = {}
        for choice in self.choices(name):
            for stage in self.seated(name, choice, before):
                if switches.denies_stage(name, str(stage.layout)) is not None:
                    continue
                option = self.option(name, stage)
                known = best.get(stage.layout)
                if known is None or self.better(option, known, widest=widest):
                    best[stage.layout] = option
        return sorted(best.values(), key=lambda each: (each.cost_seconds, repr(each.stage.layout)))

    def seated(self, name: str, choice: StageChoice, before: StagePlan) -> Iterator[StagePlan]:
        """The choice where its layout is, if it is there, also with other shares; else, or where slots are slow, on the fastest."""
        slots, slow = self.request.slots, self.pricing.slow
        new = stage_plan(self.config, name, choice, fastest(slots, choice.layout.ranks, slow))
        stands = new.layout == before.layout and set(before.slots) <= set(slots)
        if stands:
            there = replace(before, micro_batch=choice.micro_batch)
            yield from dict.fromkeys((there, shared_by_speed(there, slow)))
        if slow or not stands:
            yield from dict.fromkeys((new, shared_by_speed(new, slow)))  # micro-batches are whole: either may be best

    def better(self, option: _Option, known: _Option, *, widest: bool) -> bool:
        """Whether a micro-batch is to be preferred to another: among those that leave room the fastest, else the smaller."""
        alike = option.stage.micro_batch == known.stage.micro_batch  # on other slots, or with other shares
        if alike or (widest and option.leaves_room and known.leaves_room):
            return option.cost_seconds < known.cost_seconds
        return option.stage.micro_batch < known.stage.micro_batch

    def leaves_room(self, name: str, stage: StagePlan) -> bool:
        """Whether a slot has room for what the stage adds to what the present plan's other stages keep there."""
        if name == "actor_generate":
            return True
        others = sum(size for other, size in self.kept_bytes.items() if other != name)
        outlook = self.ground.outlook
        own = max(self.own_bytes(stage, rank) for rank in {0, stage.layout.ranks - 1})
        needed = outlook.state.margin.unseen_bytes({OVERHEAD: float(OVERHEAD_BYTES), STATE: float(others + own)})
        return needed <= self.config.fleet.slot_budget_bytes

    def own_bytes(self, stage: StagePlan, rank: int) -> int:
        """The peak of a stage alone."""
        held, phases = stage_bytes(self.config, self.pricing.specs[stage.model], stage, rank, self.width_tokens)
        return sum(held.values()) + max((sum(parts.values()) for parts in phases.values()), default=0)

    def option(self, name: str, stage: StagePlan) -> _Option:
        """A choice with what it costs at least."""
        seconds = self.stage_seconds(name, stage)
        bound = self.pricing.stage_bound_seconds(name, stage, self.request.slots[0])
        cost = self.floor_ratio * self.request.horizon_steps * seconds + bound
        room = self.leaves_room(name, stage)
        return _Option(stage=stage, seconds=seconds, cost_seconds=cost, leaves_room=room)

    def choices(self, name: str) -> Iterator[StageChoice]:
        """What the planner enumerates for this stage on so many slots."""
        count = len(self.request.slots)
        config = replace(self.config, fleet=replace(self.config.fleet, slots=count))
        problem, space = problem_of(config), space_of(config)
        ground = problem.terrain.ground(problem.terrain.ordered())
        if name == "actor_generate":
            for layout in engine_layouts(problem.job, ground, fewer=count <= space.exact_slots):
                if self.config.rollout.kv_cache_bytes >= request_cache_bytes(self.config, layout.tp):
                    yield StageChoice(layout=layout, micro_batch=self.present.actor_generate.micro_batch)
            return
        stated: StagePlan = getattr(self.present, name)
        space = replace(space, micro_batches=tuple(sorted({*space.micro_batches, stated.micro_batch})))
        experts = bool(self.config.model.experts) and name.endswith("_train")
        for layout in stage_layouts(problem.job, name, ground, space):
            if experts and (layout.tp > 1 or (layout.ep > 1 and layout.expert_tp > 1)):
                continue  # what nereus.validate refuses
            yield from stage_choices(problem.job, name, layout, space)

    def stage_seconds(self, name: str, stage: StagePlan) -> float:
        """Seconds of the phases that belong to the stage."""
        outlook = self.ground.outlook
        state, batch = outlook.state, outlook.state.batch or largest_batch(self.config)
        assert state.profile is not None, "no probe record was seen: nothing is known of the slots"
        return sum(
            predict(state.calibrations[PHASE_KINDS[phase]], each).mean_seconds
            for phase, each in stage_terms(self.config, name, stage, batch, state.profile).items()
        )

    def rest_seconds(self) -> float:
        """Seconds that belong to no stage."""
        outlook = self.ground.outlook
        terms = outlook.terms(self.present.plan_id)
        return sum(
            predict(outlook.state.calibrations[PHASE_KINDS[phase]], each).mean_seconds
            for phase, each in terms.items()
            if phase not in PHASE_STAGES
        )


@dataclass(kw_only=True)
class Pricing:
    """What changes from the present plan cost."""

    request: SearchRequest
    ground: Ground

    def __post_init__(self) -> None:
        config = self.ground.outlook.config
        self.specs: Mapping[str, ModelSpec] = models_of(config.model)
        profile = self.ground.outlook.state.profile
        self.slow = () if profile is None else profile.slow
        self.broken = not plan_slots(self.request.present).isdisjoint(self.request.empty_slots)
        nodes: dict[int, list[int]] = {}
        for slot, host in sorted(self.ground.hosts.items()):
            nodes.setdefault(host, []).append(slot)
        self.fleet = Fleet(nodes=tuple(Node(slots=tuple(each), device=CPU_SLOT) for each in nodes.values()))

    def reforms(self, plan: Plan) -> bool:
        """Whether the world is formed anew: after a loss, and for slots that are in none yet, of which no room is known."""
        return self.broken or not plan_slots(plan) <= self.ground.room.keys()

    def placed(self, plan: Plan) -> Plan:
        """The plan with each stage that is cut anew on the slots that make the change and the weight syncs cheapest."""
        if self.reforms(plan):
            return plan
        moves: dict[str, StageMove] = {}
        standing: dict[str, tuple[ModelSpec, StagePlan]] = {}
        for name, stage in plan.stages():
            before: StagePlan = getattr(self.request.present, name)
            if same_cut(before, stage) or stage.stage == "generate":
                standing[name] = (self.specs[stage.model], stage)
            else:
                moves[name] = StageMove(spec=self.specs[stage.model], before=before, after=stage)
        if not moves:
            return plan
        found = place(moves, self.fleet, syncs=(("actor_train", "actor_generate"),), standing=standing)
        placed = {name: replace(moves[name].after, slots=slots) for name, slots in found.slots.items()}
        return replace(plan, **{name: self.shared(stage) for name, stage in placed.items()})

    def shared(self, stage: StagePlan) -> StagePlan:
        """The stage with its shares by speed where it has such: another order of slots is another of replicas."""
        equal = stage.shares == equal_shares(sum(stage.shares), stage.layout.dp)
        return stage if equal or not self.slow else shared_by_speed(stage, self.slow)

    def of(self, plan: Plan) -> PriceEstimate | None:
        """The price of the change to `plan`; None where no order of it fits in memory, or bytes are missing."""
        first, driver = self.first_use_seconds(plan), sum(DRIVER_SECONDS.values())
        if self.reforms(plan):
            engines = self.engines_seconds(STAGES, plan)
            mean = REFORM_SECONDS + engines + first
            return PriceEstimate(mean_seconds=mean, deviation_seconds=REFORM_SHARE * mean, bound_seconds=engines)
        config = self.ground.outlook.config
        durations = Durations(fleet=self.fleet, tolls=self.ground.tolls)
        try:
            transition = build(self.specs, self.request.present, plan, config.transfer.bucket_bytes)
            if not transition.changed and not transition.restart_generation:
                return PriceEstimate(mean_seconds=driver + first, deviation_seconds=driver, bound_seconds=0.0)
            graph, _ = planned_graph(self.specs, transition, self.ground.room, self._settings(transition), durations)
        except (Infeasible, TransferFailed, InvalidGraph):
            return None
        found = price(graph, durations)
        return PriceEstimate(
            mean_seconds=found.seconds + driver + first,
            deviation_seconds=hypot(found.deviation_seconds, first / 2),
            bound_seconds=min(found.bound_seconds, found.seconds),
        )

    def _settings(self, transition: Transition) -> Settings:
        config = self.ground.outlook.config
        return Settings(
            engine_seconds={emu_name(stage): self._engine_seconds(stage) for _, stage in transition.after.stages()},
            hosts=self.ground.hosts,
            host_bytes=config.fleet.host_bytes,
            staging_bytes=config.transfer.bucket_bytes,
            kv_cache_bytes=config.rollout.kv_cache_bytes,
            modes=self.ground.modes,
        )

    def changed(self, plan: Plan) -> list[str]:
        """The stages that are cut anew."""
        return [name for name, stage in plan.stages() if not same_cut(getattr(self.request.present, name), stage)]

    def bound_seconds(self, plan: Plan) -> float:
        """Below every price: what one slot does one after the other, and the first uses after it."""
        slots = {slot for _, stage in plan.stages() for slot in stage.slots}
        return max(sum(self.stage_bound_seconds(n, s, slot) for n, s in plan.stages()) for slot in slots)

    def stage_bound_seconds(self, name: str, stage: StagePlan, slot: int) -> float:
        """A stage's part of the bound, as the given slot has it: placement changes the order of slots, not which they are."""
        before: StagePlan = getattr(self.request.present, name)
        if self.broken or same_cut(before, stage):
            return 0.0
        first, tolls = self.stage_first_use_seconds(name, stage), self.ground.tolls
        if slot not in stage.slots:
            return first
        quiesce = tolls.quiesce_seconds if slot in before.slots else 0.0
        return first + quiesce + self._engine_seconds(stage) + tolls.group_seconds + tolls.activate_seconds

    def _engine_seconds(self, stage: StagePlan) -> float:
        return self.ground.engine_seconds.get(emu_name(stage), EXPECTED_ENGINE_SECONDS)

    def engines_seconds(self, names: Sequence[str], plan: Plan) -> float:
        """What the slot with most of them takes to build the engines and groups of these stages."""
        by_slot: dict[int, float] = {}
        for name in names:
            stage: StagePlan = getattr(plan, name)
            for slot in stage.slots:
                by_slot[slot] = by_slot.get(slot, 0.0) + self._engine_seconds(stage) + self.ground.tolls.group_seconds
        return max(by_slot.values(), default=0.0)

    def first_use_seconds(self, plan: Plan) -> float:
        """By how much the first step is longer because engines are new."""
        names = STAGES if self.reforms(plan) else self.changed(plan)
        return sum(self.stage_first_use_seconds(name, getattr(plan, name)) for name in names)

    def stage_first_use_seconds(self, name: str, stage: StagePlan) -> float:
        """What a stage's first use adds to the phases that belong to it."""
        state = self.ground.outlook.state
        assert state.profile is not None, "no probe record was seen: nothing is known of the slots"
        own: list[PhaseKind] = [PHASE_KINDS[phase] for phase, of in PHASE_STAGES.items() if of == name]
        coefficients = [state.calibrations[kind].coefficients["first_use"] for kind in own]
        return sum(coefficients) * FIRST_USE_SECONDS * every_slot(stage, state.profile)


def rising(lists: Sequence[Sequence[float]]) -> Iterator[tuple[float, Indices]]:
    """Every combination of one entry of each ascending list, by rising sum: (sum, indices)."""
    first: Indices = (0,) * len(lists)
    heap: list[tuple[float, Indices]] = [(sum(each[0] for each in lists), first)]
    while heap:
        total, indices = heappop(heap)
        yield total, indices
        # each combination is reached once: from the one with its last index above 0 one lower
        last = max((at for at, index in enumerate(indices) if index), default=0)
        for at in range(last, len(lists)):
            index = indices[at]
            if index + 1 < len(lists[at]):
                after = (*indices[:at], index + 1, *indices[at + 1 :])
                heappush(heap, (sum(each[i] for each, i in zip(lists, after, strict=True)), after))
