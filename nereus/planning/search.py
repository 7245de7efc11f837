"""The search for the best global plan: placements in the order of their bound, then depth first over options.

Within a placement every model-stage has a list of options from which those are gone that another matches in everything.
Stages are decided in turn; a branch ends where the step that it can still reach is no better than the worst plan kept, or
where its bytes cannot fit. Generation comes last: its seconds follow from the memory that the others leave it.

The cost of a plan is `horizon_steps` x its step + its price. The price of what is not yet decided is bounded by nothing, so
that gains are over-estimated, never under. With a price no option is dropped for being matched: it may be cheap to reach.
Deterministic; the budget counts evaluated options and branches, never seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nereus.planning.bounds import Relaxation
from nereus.planning.evaluate import Evaluation, Problem, evaluate
from nereus.planning.ground import Ground
from nereus.planning.misses import near_misses
from nereus.planning.options import (
    EngineOption,
    EngineTimes,
    Option,
    Table,
    engine_options,
    front,
    stage_options,
)
from nereus.planning.plan import GlobalPlan, StageChoice
from nereus.planning.space import Placement, Space, placements
from nereus.planning.stagework import framework_work, sync_work

ENGINE = "actor_generate"


def free(plan: GlobalPlan) -> float:
    """The price of a change that costs nothing."""
    del plan
    return 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What is minimised: `horizon_steps` x step seconds + `price` seconds of reaching the plan.

    Equal to maximising horizon x saving - price: the present plan's step is a constant. `price_bound` is never above
    `price` and cheap; `price` is asked for only where the bound leaves a chance. `priced` false: both are 0.
    """

    horizon_steps: float = 1.0
    price: Callable[[GlobalPlan], float] = free
    price_bound: Callable[[GlobalPlan], float] = free

    @property
    def priced(self) -> bool:
        """Whether plans cost something to reach."""
        return self.price is not free


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much may be evaluated: options of stages, and branches and plans of the search, together."""

    nodes: int = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that fits, with its cost under the objective, and its step and price in seconds."""

    plan: GlobalPlan
    cost_seconds: float
    step_seconds: float
    price_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best plans, cheapest first, of different layouts; what was too large; how much better any plan could be.

    `lower_bound_seconds` is below the cost of every plan there is, other numbers of replicas and divisions of the
    slots included; where slots are not `equal_slots`, of every plan on the placements that were listed. `exact` says that every plan was judged, so that it is the best one's cost. `near_misses` are faster
    plans that do not fit, or without any that fits those that come closest.
    """

    candidates: tuple[Candidate, ...]
    near_misses: tuple[Evaluation, ...]
    lower_bound_seconds: float
    exact: bool
    evaluated_nodes: int
    finished: bool
    equal_slots: bool

    @property
    def best(self) -> Candidate | None:
        """The best plan, None where nothing fits."""
        return self.candidates[0] if self.candidates else None

    @property
    def gap_share(self) -> float:
        """By how much of its cost the best plan may be above the best there is."""
        if not self.candidates:
            return 0.0
        cost = self.candidates[0].cost_seconds
        return max(0.0, (cost - self.lower_bound_seconds) / cost) if cost > 0 else 0.0


@dataclass(kw_only=True)
class _Search:
    """The state of a search: the plans kept, and tables of options by stage and ground."""

    problem: Problem
    space: Space
    objective: Objective
    top_count: int
    budget_nodes: int
    kept: dict[tuple[object, ...], Candidate] = field(default_factory=dict[tuple[object, ...], Candidate])
    tables: dict[tuple[object, ...], Table] = field(default_factory=dict[tuple[object, ...], Table])
    fronts: dict[tuple[object, ...], list[Option]] = field(default_factory=dict[tuple[object, ...], list[Option]])
    grounds: dict[tuple[int, ...], Ground] = field(default_factory=dict[tuple[int, ...], Ground])
    times: EngineTimes = field(init=False)
    relaxation: Relaxation = field(init=False)
    nodes: int = 0
    limit_seconds: float = float("inf")

    def __post_init__(self) -> None:
        self.times = EngineTimes(problem=self.problem)
        self.relaxation = Relaxation(problem=self.problem, space=self.space, times=self.times)

    @property
    def spent(self) -> bool:
        return self.nodes >= self.budget_nodes

    def ground(self, slots: tuple[int, ...]) -> Ground:
        if slots not in self.grounds:
            self.grounds[slots] = self.problem.terrain.ground(slots)
        return self.grounds[slots]

    def table(self, name: str, ground: Ground, *, alone: bool) -> Table:
        """The options of a stage; alike grounds share a table."""
        key = (name, ground.domain_slots, ground.devices, alone)
        if key not in self.tables:
            self.tables[key] = stage_options(self.problem, name, ground, self.space, alone=alone)
            self.nodes += len(self.tables[key].options)
        return self.tables[key]

    def options(self, name: str, ground: Ground, *, alone: bool, together: bool) -> list[Option]:
        """The options of a stage that may be in the best plan, fastest first."""
        key = (name, ground.domain_slots, ground.devices, alone, together)
        if key not in self.fronts:
            options = self.table(name, ground, alone=alone).options
            priced = self.objective.priced
            self.fronts[key] = sorted(options, key=_seconds) if priced else front(options, together=together)
        return self.fronts[key]

    def offer(self, plan: GlobalPlan, step: float) -> None:
        """Keeps a plan that fits if it is among the best of its kind; asks for its price only if its bound allows."""
        horizon = self.objective.horizon_steps
        if horizon * step + self.objective.price_bound(plan) >= self.limit_seconds:
            return
        price = self.objective.price(plan)
        cost = horizon * step + price
        kind = (plan.pools, *((choice.pool, choice.layout) for _, choice in plan.stages))
        known = self.kept.get(kind)
        if cost >= self.limit_seconds or (known is not None and known.cost_seconds <= cost):
            return
        self.kept[kind] = Candidate(plan=plan, cost_seconds=cost, step_seconds=step, price_seconds=price)
        if len(self.kept) > self.top_count:
            del self.kept[max(self.kept, key=lambda each: self.kept[each].cost_seconds)]
        if len(self.kept) == self.top_count:
            self.limit_seconds = max(each.cost_seconds for each in self.kept.values())


def _seconds(option: Option) -> float:
    return option.seconds


def _in_pool(choice: StageChoice, pool: int) -> StageChoice:
    if choice.pool == pool:
        return choice
    return StageChoice(
        layout=choice.layout,
        pool=pool,
        micro_batch=choice.micro_batch,
        recompute=choice.recompute,
        sharding=choice.sharding,
        keep=choice.keep,
    )


@dataclass(kw_only=True)
class _Descent:
    """Depth first over the options of one placement. Lists are by depth, or by pool."""

    search: _Search
    placement: Placement
    names: tuple[str, ...]
    lists: list[list[Option]]
    engines: list[EngineOption]
    pools: list[int]
    grounds: list[Ground]
    constant_seconds: float
    beside: bool
    engine_bound_seconds: list[float] = field(init=False)
    chosen: list[StageChoice] = field(default_factory=list[StageChoice])

    def __post_init__(self) -> None:
        """What is still to come, by depth and pool: least seconds, bytes."""
        count = len(self.grounds)
        engine_pool = self.placement.of(ENGINE)
        room = [ground.room_bytes / (1 + self.search.problem.memory.margin_share) for ground in self.grounds]
        self.rooms, self.engine_pool = room, engine_pool
        depth = len(self.names)
        self.infer = [[0.0] * count for _ in range(depth + 1)]
        self.train = [[0.0] * count for _ in range(depth + 1)]
        self.both = [[0.0] * count for _ in range(depth + 1)]
        self.resident = [[0.0] * count for _ in range(depth + 1)]
        self.excess = [[0.0] * count for _ in range(depth + 1)]
        self.resident[depth][engine_pool] = min(each.resident_bytes for each in self.engines)
        self.excess[depth][engine_pool] = min(each.excess_bytes for each in self.engines)
        for at in reversed(range(depth)):
            pool, options = self.pools[at], self.lists[at]
            for table in (self.infer, self.train, self.both, self.resident, self.excess):
                table[at] = list(table[at + 1])
            self.infer[at][pool] += min(each.infer_seconds for each in options)
            self.train[at][pool] += min(each.train_seconds for each in options)
            self.both[at][pool] += min(each.seconds for each in options)
            self.resident[at][pool] += min(each.resident_bytes for each in options)
            self.excess[at][pool] = max(self.excess[at][pool], min(each.excess_bytes for each in options))
        least = self.resident[0][engine_pool] - self.resident[depth][engine_pool]
        self.engine_bound_seconds = [self._generation(engine, least) for engine in self.engines]
        self.least_generation = min(self.engine_bound_seconds)

    def _generation(self, engine: EngineOption, others: float) -> float:
        ground = self.grounds[self.engine_pool]
        return self.search.times.seconds(engine, ground, others)

    def _step(self, generation: float, infer: float, train: float) -> float:
        if self.beside:
            return self.constant_seconds + max(generation, infer + train)
        return self.constant_seconds + generation + infer + train

    def bound(self, at: int, infer: list[float], train: list[float], generation: float) -> float:
        """The least step that is still possible."""
        pools = range(len(infer))
        blocks = max(infer[p] + self.infer[at][p] for p in pools) + max(train[p] + self.train[at][p] for p in pools)
        pooled = max(infer[p] + train[p] + self.both[at][p] for p in pools)
        return self._step(generation, 0.0, max(blocks, pooled))

    def descend(self, at: int, infer: list[float], train: list[float], sizes: list[tuple[float, float, float]]) -> None:
        """Every option of the stage at this depth. `sizes` by pool: resident, largest excess, host bytes so far."""
        search = self.search
        if at == len(self.names):
            self.finish(infer, train, sizes)
            return
        pool, horizon = self.pools[at], search.objective.horizon_steps
        resident, excess, host = sizes[pool]
        host_room = self.grounds[pool].host_room_bytes
        for option in self.lists[at]:
            if search.spent:
                return
            search.nodes += 1
            after = (
                resident + option.resident_bytes,
                max(excess, option.excess_bytes),
                host + option.host_bytes,
            )
            room = after[0] + self.resident[at + 1][pool] + max(after[1], self.excess[at + 1][pool])
            if room > self.rooms[pool] or after[2] > host_room:
                continue
            infer[pool] += option.infer_seconds
            train[pool] += option.train_seconds
            bound = horizon * self.bound(at + 1, infer, train, self.least_generation)
            if bound < search.limit_seconds:
                sizes[pool] = after
                self.chosen.append(option.choice)
                self.descend(at + 1, infer, train, sizes)
                self.chosen.pop()
                sizes[pool] = (resident, excess, host)
            infer[pool] -= option.infer_seconds
            train[pool] -= option.train_seconds
            if bound >= search.limit_seconds and len(infer) == 1:
                return  # the others take longer

    def finish(self, infer: list[float], train: list[float], sizes: list[tuple[float, float, float]]) -> None:
        """Every engine beside what was chosen."""
        search, pool = self.search, self.engine_pool
        resident, excess, _ = sizes[pool]
        for engine, bound in zip(self.engines, self.engine_bound_seconds, strict=True):
            search.nodes += 1
            if resident + engine.resident_bytes + max(excess, engine.excess_bytes) > self.rooms[pool]:
                continue
            horizon = search.objective.horizon_steps
            if horizon * self._step(bound, max(infer), max(train)) >= search.limit_seconds:
                continue
            step = self._step(self._generation(engine, resident), max(infer), max(train))
            if horizon * step < search.limit_seconds:
                search.offer(self._plan(engine), step)

    def _plan(self, engine: EngineOption) -> GlobalPlan:
        picked = dict(zip((*self.names, ENGINE), (*self.chosen, engine.choice), strict=True))
        stages = tuple((name, _in_pool(picked[name], pool)) for name, pool in self.placement.pool_of)
        return GlobalPlan(pools=self.placement.pools, stages=stages)


def search(
    problem: Problem,
    *,
    space: Space | None = None,
    objective: Objective | None = None,
    top_count: int = 5,
    budget: Budget | None = None,
    known: Sequence[GlobalPlan] = (),
) -> SearchResult:
    """The `top_count` best plans of different layouts, with a bound on what was missed.

    The first is the best of the space where the budget sufficed; the others are the best of those that the search met.
    `known` plans, such as the present one, are judged first: what they reach, the search need not look below.
    """
    space = space or Space()
    state = _Search(
        problem=problem,
        space=space,
        objective=objective or Objective(),
        top_count=top_count,
        budget_nodes=(budget or Budget()).nodes,
    )
    slots = problem.terrain.ordered()
    every = list(placements(problem.job.stages(), slots, _borders(problem, slots), space))
    bounds = [state.relaxation.placed(placement, state.ground) for placement in every]
    for plan in known:
        judged = evaluate(problem, plan)
        state.nodes += 1
        if judged.fits:
            state.offer(plan, judged.step.mean_seconds)
    finished = _finished(state, every, bounds)
    ordered = sorted(state.kept.values(), key=lambda each: each.cost_seconds)
    exact = finished and len(slots) <= space.exact_slots
    least = state.objective.horizon_steps * state.relaxation.anywhere(bounds, state.ground)
    if exact and ordered:
        least = ordered[0].cost_seconds
    return SearchResult(
        candidates=tuple(ordered),
        near_misses=tuple(_misses(state, every[0], ordered)),
        lower_bound_seconds=least,
        exact=exact,
        evaluated_nodes=state.nodes,
        finished=finished,
        equal_slots=not _borders(problem, slots),
    )


def _finished(state: _Search, every: Sequence[Placement], bounds: Sequence[float]) -> bool:
    """Explores the placements, the shared one first, then by bound; whether the budget sufficed."""
    for index in (0, *sorted(range(1, len(every)), key=lambda i: (bounds[i], i))):
        if state.objective.horizon_steps * bounds[index] < state.limit_seconds:
            _explore(state, every[index])
        if state.spent:
            return False
    return True


def _borders(problem: Problem, slots: Sequence[int]) -> list[int]:
    device_of = problem.terrain.fleet.device_of
    return [i for i in range(1, len(slots)) if device_of[slots[i]].name != device_of[slots[i - 1]].name]


def _explore(state: _Search, placement: Placement) -> None:
    grounds = [state.ground(pool) for pool in placement.pools]
    names = tuple(name for name, _ in placement.pool_of if name != ENGINE)
    pool_of = dict(placement.pool_of)
    sharing = [sum(pool == other for _, other in placement.pool_of) for pool in range(len(grounds))]
    engines = engine_options(
        state.problem,
        grounds[pool_of[ENGINE]],
        every_slot=state.space.every_slot,
        fewer=state.objective.priced and len(placement.pools[pool_of[ENGINE]]) <= state.space.exact_slots,
    )
    lists: list[list[Option]] = []
    for name in names:
        pool = pool_of[name]
        lists.append(state.options(name, grounds[pool], alone=sharing[pool] == 1, together=len(grounds) == 1))
        if not lists[-1]:
            return
    if not engines:
        return
    descent = _Descent(
        search=state,
        placement=placement,
        names=names,
        lists=lists,
        engines=engines,
        pools=[pool_of[name] for name in names],
        grounds=grounds,
        constant_seconds=constant_seconds(state.problem, placement, state.ground),
        beside=not state.problem.job.on_policy and sharing[pool_of[ENGINE]] == 1,
    )
    empty = [(0.0, 0.0, 0.0)] * len(grounds)
    descent.descend(0, [0.0] * len(grounds), [0.0] * len(grounds), empty)


def constant_seconds(problem: Problem, placement: Placement, ground_of: Callable[[tuple[int, ...]], Ground]) -> float:
    """Seconds of weight sync and framework: they follow from the placement."""
    trained, served = placement.of("actor_train"), placement.of(ENGINE)
    ground = ground_of(placement.pools[trained])
    both = ground if trained == served else ground_of(placement.pools[trained] + placement.pools[served])
    sync = sync_work(problem.job, ground.rates, one_domain=both.one_domain)
    return ground.seconds(sync) + ground.seconds(framework_work(problem.job))


def _misses(state: _Search, placement: Placement, ordered: Sequence[Candidate]) -> list[Evaluation]:
    ground = state.ground(placement.pools[0])
    tables = {
        name: state.table(name, ground, alone=len(placement.pool_of) == 1)
        for name, _ in placement.pool_of
        if name != ENGINE
    }
    best = ordered[0] if ordered else None
    seconds = best.step_seconds if best else float("inf")
    return near_misses(state.problem, tables, best.plan if best else None, seconds)
