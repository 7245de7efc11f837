"""The search for the best global plan: placements in the order of their bound, then depth first over options.

Within a placement every model-stage has a list of options from which those are gone that another matches in everything.
Stages are decided in turn; a branch ends where the step that it can still reach is no better than the worst plan kept, or
where its bytes cannot fit. Generation comes last: its seconds follow from the memory that the others leave it.

The cost of a plan is `horizon_steps` x its step + its price. The price of what is not yet decided is bounded by nothing, so
that gains are over-estimated, never under. With a price no option is dropped for being matched: it may be cheap to reach.
Deterministic; the budget counts evaluated options and branches, never seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nereus.planning.bounds import ENGINE, Relaxation
from nereus.planning.evaluate import Evaluation, Problem, evaluate
from nereus.planning.ground import Ground
from nereus.planning.misses import near_misses
from nereus.planning.objective import Budget, Candidate, Objective, SearchResult
from nereus.planning.options import EngineOption, EngineTimes, Option, Table, engine_options, front
from nereus.planning.plan import GlobalPlan, StageChoice
from nereus.planning.space import Placement, Space, placements, stage_keeps, stage_list
from nereus.planning.stagework import framework_work, sync_work

FIRST_ABOVE_SHARE = 0.01
"""So far above the least seconds of its stages a plan is tried first."""
GROWTH, PRICED_GROWTH = 2, 8
"""How much farther above the next try goes."""
MOST_ABOVE_SHARE = 2.0
"""Beyond so much of the step's bound everything is tried."""


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
    grounds: dict[tuple[int, ...], Ground] = field(default_factory=dict[tuple[int, ...], Ground])
    times: EngineTimes = field(init=False)
    relaxation: Relaxation = field(init=False)
    nodes: int = 0
    worst_seconds: float = float("inf")
    tried_seconds: float = float("inf")

    def __post_init__(self) -> None:
        self.times = EngineTimes(problem=self.problem)
        slots = self.problem.terrain.ordered()
        self.relaxation = Relaxation(problem=self.problem, space=self.space, times=self.times, slots=slots)

    @property
    def spent(self) -> bool:
        return self.nodes >= self.budget_nodes

    def ground(self, slots: tuple[int, ...]) -> Ground:
        if slots not in self.grounds:
            self.grounds[slots] = self.problem.terrain.ground(slots)
        return self.grounds[slots]

    def table(self, name: str, ground: Ground, *, alone: bool) -> Table:
        """The choices of a stage; alike grounds share a table."""
        key = (name, ground.domain_slots, ground.devices, alone)
        if key not in self.tables:
            listed = stage_list(self.problem.job, name, ground, self.space)
            bounds = self.relaxation.stages
            infer, train = bounds.seconds(name, ground, bounds.rows(name, ground, listed.degrees))
            order: list[int] = np.argsort(infer + train, kind="stable").tolist()
            self.tables[key] = Table(
                problem=self.problem,
                name=name,
                ground=ground,
                keeps=stage_keeps(self.problem.memory, name, alone=alone),
                choices=[listed.choices[at] for at in order],
                bounds_seconds=(infer + train)[order].tolist(),
            )
        return self.tables[key]

    def options(self, table: Table, most_seconds: float, *, together: bool) -> list[Option]:
        """The options of a stage that may be in the best plan and take less than `most_seconds`, fastest first."""
        self.nodes += table.reach(most_seconds)
        near = (option for option in table.options if option.seconds < most_seconds)
        return front(near, together=together, apart=self.objective.priced)

    @property
    def limit_seconds(self) -> float:
        """The cost that a plan must be below: of the worst plan kept, and for now of what is tried."""
        return min(self.worst_seconds, self.tried_seconds)

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
            self.worst_seconds = max(each.cost_seconds for each in self.kept.values())


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
        stage_bound = self.search.objective.stage_bound
        slots = self.placement.pools
        self.prices = [
            [stage_bound(name, each.choice, slots[pool]) for each in listed]
            for name, listed, pool in zip(self.names, self.lists, self.pools, strict=True)
        ]
        self.engine_prices = [stage_bound(ENGINE, each.choice, slots[engine_pool]) for each in self.engines]
        self.price_to_come = [0.0] * depth + [min(self.engine_prices)]
        for at in reversed(range(depth)):
            self.price_to_come[at] = self.price_to_come[at + 1] + min(self.prices[at])
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

    def descend(
        self, at: int, infer: list[float], train: list[float], sizes: list[tuple[float, float, float]], price: float
    ) -> None:
        """Every option of the stage at this depth. `sizes` by pool: resident, largest excess, host bytes so far.

        `price` is the least of what was chosen so far.
        """
        search = self.search
        if at == len(self.names):
            self.finish(infer, train, sizes, price)
            return
        pool, horizon = self.pools[at], search.objective.horizon_steps
        resident, excess, host = sizes[pool]
        host_room = self.grounds[pool].host_room_bytes
        for option, own_price in zip(self.lists[at], self.prices[at], strict=True):
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
            paid = price + own_price
            if bound + paid + self.price_to_come[at + 1] < search.limit_seconds:
                sizes[pool] = after
                self.chosen.append(option.choice)
                self.descend(at + 1, infer, train, sizes, paid)
                self.chosen.pop()
                sizes[pool] = (resident, excess, host)
            infer[pool] -= option.infer_seconds
            train[pool] -= option.train_seconds
            if bound + price + self.price_to_come[at] >= search.limit_seconds and len(infer) == 1:
                return  # the others take longer

    def finish(
        self, infer: list[float], train: list[float], sizes: list[tuple[float, float, float]], price: float
    ) -> None:
        """Every engine beside what was chosen."""
        search, pool = self.search, self.engine_pool
        resident, excess, _ = sizes[pool]
        for engine, bound, own in zip(self.engines, self.engine_bound_seconds, self.engine_prices, strict=True):
            search.nodes += 1
            if resident + engine.resident_bytes + max(excess, engine.excess_bytes) > self.rooms[pool]:
                continue
            horizon, paid = search.objective.horizon_steps, price + own
            if horizon * self._step(bound, max(infer), max(train)) + paid >= search.limit_seconds:
                continue
            step = self._step(self._generation(engine, resident), max(infer), max(train))
            if horizon * step + paid < search.limit_seconds:
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
    with_misses: bool = False,
    with_bound: bool = True,
) -> SearchResult:
    """The `top_count` best plans of different layouts, with a bound on what was missed.

    The first is the best of the space where the budget sufficed; the others are the best of those that the search met.
    `known` plans, such as the present one, are judged first: what they reach, the search need not look below. Where something
    fits, near misses are looked for `with_misses` alone. Without `with_bound` the lower bound is 0.
    """
    space = space or Space()
    state = _Search(
        problem=problem,
        space=space,
        objective=objective or Objective(),
        top_count=top_count,
        budget_nodes=(budget or Budget()).nodes,
    )
    slots = state.relaxation.slots
    every = list(placements(problem.job.stages(), slots, _borders(problem, slots), space))
    quick = [state.relaxation.quick(placement, state.ground) for placement in every]
    for plan in known:
        judged = evaluate(problem, plan)
        state.nodes += 1
        if judged.fits:
            state.offer(plan, judged.step.mean_seconds)
    finished = _finished(state, every, quick)
    ordered = sorted(state.kept.values(), key=lambda each: each.cost_seconds)
    exact = finished and len(slots) <= space.exact_slots
    least = 0.0
    if exact and ordered:
        least = ordered[0].cost_seconds
    elif with_bound:
        least = state.objective.horizon_steps * state.relaxation.anywhere(every, quick, state.ground)
    return SearchResult(
        candidates=tuple(ordered),
        near_misses=tuple(_misses(state, every[0], ordered)) if with_misses or not ordered else (),
        lower_bound_seconds=least,
        exact=exact,
        evaluated_nodes=state.nodes,
        finished=finished,
        covers_all=not _borders(problem, slots) and problem.job.on_policy,
    )


def _finished(state: _Search, every: Sequence[Placement], quick: Sequence[float]) -> bool:
    """Explores the placements, the shared one first, then by bound; whether the budget sufficed."""
    horizon = state.objective.horizon_steps
    for index in (0, *sorted(range(1, len(every)), key=lambda i: (quick[i], i))):
        if horizon * quick[index] < state.limit_seconds:
            bound = state.relaxation.placed(every[index], state.ground)
            if horizon * bound < state.limit_seconds:
                _explore(state, every[index], bound)
        if state.spent:
            return False
    return True


def _borders(problem: Problem, slots: Sequence[int]) -> list[int]:
    device_of = problem.terrain.fleet.device_of
    return [i for i in range(1, len(slots)) if device_of[slots[i]].name != device_of[slots[i - 1]].name]


def _explore(state: _Search, placement: Placement, bound: float) -> None:
    """All plans of a placement that are better than the worst of those kept; `bound` is below each of their steps."""
    grounds = [state.ground(pool) for pool in placement.pools]
    pool_of = dict(placement.pool_of)
    sharing = [sum(pool == other for _, other in placement.pool_of) for pool in range(len(grounds))]
    served = pool_of[ENGINE]
    engines = engine_options(
        state.problem,
        grounds[served],
        every_slot=state.space.every_slot,
        fewer=state.objective.priced and len(placement.pools[served]) <= state.space.exact_slots,
    )
    if allowed := state.space.only_engine_tps:
        engines = [each for each in engines if each.choice.layout.tp in allowed]
    tables = {
        name: state.table(name, grounds[pool], alone=sharing[pool] == 1)
        for name, pool in placement.pool_of
        if name != ENGINE
    }
    if not engines or bound == float("inf"):
        return
    least = _least(state, tables)
    if max(least.values()) == float("inf"):
        return
    _Exploration(
        search=state,
        placement=placement,
        tables=tables,
        engines=engines,
        grounds=grounds,
        least_seconds=least,
        beside=not state.problem.job.on_policy and sharing[served] == 1,
    ).run(bound)


def _least(state: _Search, tables: Mapping[str, Table]) -> dict[str, float]:
    """The seconds of each stage's fastest option."""
    least: dict[str, float] = {}
    for name, table in tables.items():
        before = table.evaluated_count
        least[name] = table.least_seconds()
        state.nodes += table.evaluated_count - before
    return least


@dataclass(kw_only=True)
class _Exploration:
    """One placement's plans: those little above the bound first, then those twice as far above, until they are enough."""

    search: _Search
    placement: Placement
    tables: Mapping[str, Table]
    engines: list[EngineOption]
    grounds: list[Ground]
    least_seconds: Mapping[str, float]
    beside: bool

    def __post_init__(self) -> None:
        self.pools = [self.placement.of(name) for name in self.tables]
        named = list(zip(self.tables, self.pools, strict=True))
        self.by_pool = [
            sum(self.least_seconds[name] for name, own in named if own == pool) for pool in range(len(self.grounds))
        ]
        self.constant = constant_seconds(self.search.problem, self.placement, self.search.ground)

    def run(self, bound: float) -> None:
        """Until every plan that may be better than the worst one kept was judged, or the budget is spent."""
        search, horizon = self.search, self.search.objective.horizon_steps
        served = self.placement.of(ENGINE)
        ahead = self.constant
        if not self.beside:
            ahead += search.relaxation.generation(self.grounds[served])
        bound, above = max(bound, ahead + max(self.by_pool)), FIRST_ABOVE_SHARE * sum(self.by_pool)
        while not search.spent:
            is_near = above < MOST_ABOVE_SHARE * bound
            tried = horizon * (bound + above) if is_near else float("inf")
            search.tried_seconds = float("inf") if search.objective.priced else tried
            room = min(search.limit_seconds, tried) / horizon - ahead if horizon else float("inf")
            near = max(self.by_pool) + above
            hidden = self.beside and is_near and room > near  # behind generation nothing is too slow
            self.descend(near if hidden else room)
            search.tried_seconds = float("inf")
            if search.worst_seconds <= (horizon * bound if hidden else tried):
                return
            above *= PRICED_GROWTH if search.objective.priced else GROWTH

    def descend(self, room_seconds: float) -> None:
        """Plans of the options beside which the fastest of their pool's other stages stay within `room_seconds`."""
        lists = [
            self.search.options(
                table,
                room_seconds - self.by_pool[pool] + self.least_seconds[name],
                together=len(self.grounds) == 1,
            )
            for (name, table), pool in zip(self.tables.items(), self.pools, strict=True)
        ]
        if not all(lists):
            return
        descent = _Descent(
            search=self.search,
            placement=self.placement,
            names=tuple(self.tables),
            lists=lists,
            engines=self.engines,
            pools=self.pools,
            grounds=self.grounds,
            constant_seconds=self.constant,
            beside=self.beside,
        )
        count = len(self.grounds)
        descent.descend(0, [0.0] * count, [0.0] * count, [(0.0, 0.0, 0.0)] * count, 0.0)


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
    if best is None:
        for table in tables.values():
            table.reach(float("inf"))
    seconds = best.step_seconds if best else float("inf")
    return near_misses(state.problem, tables, best.plan if best else None, seconds)
