"""The best plan by definition: every division of the stages, every layout, every residency, nothing left out early.

Times and bytes of single phases come from the cost model; enumeration, memory, the step and its cost are written here anew.
"""

from __future__ import annotations

from itertools import combinations, pairwise, product
from math import ceil

import numpy as np

from nereus.layout import Layout, first_problem
from nereus.planning.evaluate import Problem, stage_terms
from nereus.planning.job import PHASES_OF
from nereus.planning.plan import StageChoice
from nereus.planning.space import Space
from nereus.planning.stagework import framework_work, generate_work, sync_work

TRAINS = ("actor_train", "critic_train")


def divisions(stages):
    """Stages -> group number: all together; generation, critic with reward, or inference apart; the first two apart."""

    def group(name, apart):
        for number, names in enumerate(apart, 1):
            if name in names:
                return number
        return 0

    critic, infer = ("critic_train", "reward_infer"), ("reference_infer", "reward_infer")
    for apart in ((), (("actor_generate",),), (critic,), (infer,), (("actor_generate",), critic)):
        by_stage = {name: group(name, apart) for name in stages}
        if set(by_stage.values()) == set(range(len(apart) + 1)):
            yield by_stage


def pipelines(layers, pp):
    base, more = divmod(layers, pp)
    even = [base + 1] * more + [base] * (pp - more)
    cuts = [even, even[::-1]]
    for less in (1, 2, 3, 4, 6, 8) if pp > 1 else ():
        base, more = divmod(layers + less, pp)
        lighter = [base + 1] * more + [base] * (pp - more)
        lighter[-1] -= less
        cuts.append(lighter)
    return {tuple(cut) for cut in cuts if min(cut) >= 1}


def layouts(problem: Problem, name: str, slots: int):
    """Every Layout of a stage that trains or infers on equal slots of one node."""
    config = problem.job.model(name).config
    kind = "train" if name in TRAINS else "infer"
    degrees = product(range(1, slots + 1), range(1, config.layers + 1), range(1, slots + 1))
    for tp, pp, dp in degrees:
        for pipeline in pipelines(config.layers, pp) if tp * pp * dp <= slots else ():
            layout = Layout(tp=tp, pp=pp, dp=dp, pipeline=pipeline)
            if first_problem(config, layout, kind) is None:
                yield layout


def choices(problem: Problem, name: str, slots: int, space: Space):
    """Every StageChoice of such a stage, those included that the search leaves out as never better."""
    trains = name in TRAINS
    shardings = ("none", "optimizer", "full") if trains else ("optimizer", "full")
    recomputes = ("none", "selective", "full") if trains else ("none",)
    keeps = ("all", "weights", "nothing")
    ways = product(layouts(problem, name, slots), shardings, space.micro_batches, recomputes, keeps)
    for layout, sharding, micro_batch, recompute, keep in ways:
        if sharding == "full" and (layout.tp > 1 or layout.pp > 1 or layout.dp == 1):
            continue
        yield StageChoice(layout=layout, micro_batch=micro_batch, recompute=recompute, sharding=sharding, keep=keep)


def free(name: str, layout: Layout) -> float:
    return 0.0


def table(problem: Problem, name: str, slots: int, ground, space: Space, price_of=free):
    """[options, 6]: infer and train seconds, bytes left between phases, largest phase beyond that, host bytes, price."""
    samples = problem.job.samples if name.endswith("_infer") else ceil(problem.job.samples / problem.job.mini_batches)
    rows = []
    for choice in choices(problem, name, slots, space):
        if choice.micro_batch > 1 and choice.micro_batch > ceil(samples / choice.layout.dp):
            continue
        sizes = problem.memory.stage(problem.job, name, choice)
        terms = stage_terms(problem.job, name, choice, ground, sizes)
        seconds = [ground.seconds(terms[phase]) for phase in PHASES_OF[name]] + [0.0]
        left = sum(sizes.resident.values())
        beyond = max(sum(phase.values()) for phase in sizes.phases.values()) - left
        price = price_of(name, choice.layout)
        rows.append((seconds[0], seconds[1], left, beyond, sum(sizes.offloaded.values()), price))
    return np.array(rows).reshape(-1, 6)


def best_step(problem: Problem, space: Space) -> float:
    """The least step seconds of all plans; inf where none fits."""
    return best_cost(problem, space, 1.0)


def best_cost(problem: Problem, space: Space, horizon: float, price_of=free) -> float:
    """The least horizon x step + price of all plans, a price being the sum of its stages'; inf where none fits."""
    slots = problem.terrain.ordered()
    best = float("inf")
    for by_stage in divisions(problem.job.stages()):
        groups = max(by_stage.values()) + 1
        for ends in combinations(range(1, len(slots)), groups - 1):
            bounds = (0, *ends, len(slots))
            pools = [slots[a:b] for a, b in pairwise(bounds)]
            best = min(best, best_of_division(problem, by_stage, pools, space, horizon, price_of))
    return best


def best_of_division(problem: Problem, by_stage, pools, space: Space, horizon: float, price_of) -> float:
    grounds = [problem.terrain.ground(pool) for pool in pools]
    names = [name for name in by_stage if name != "actor_generate"]
    tables = [table(problem, n, len(pools[by_stage[n]]), grounds[by_stage[n]], space, price_of) for n in names]
    if not all(len(rows) for rows in tables):
        return float("inf")
    mesh = np.meshgrid(*[np.arange(len(rows)) for rows in tables], indexing="ij")
    picked = [rows[index.ravel()] for rows, index in zip(tables, mesh, strict=True)]
    count = len(picked[0])
    infer, train, left, host = (np.zeros((len(pools), count)) for _ in range(4))
    beyond = np.full((len(pools), count), -np.inf)
    price = np.zeros(count)
    for name, rows in zip(names, picked, strict=True):
        pool = by_stage[name]
        infer[pool] += rows[:, 0]
        train[pool] += rows[:, 1]
        left[pool] += rows[:, 2]
        beyond[pool] = np.maximum(beyond[pool], rows[:, 3])
        host[pool] += rows[:, 4]
        price += rows[:, 5]
    after = infer.max(axis=0) + train.max(axis=0)
    trained, served = by_stage["actor_train"], by_stage["actor_generate"]
    ground = grounds[trained]
    fixed = ground.seconds(framework_work(problem.job)) + ground.seconds(
        sync_work(problem.job, ground.rates, one_domain=True)
    )
    best = float("inf")
    for tp in range(1, len(pools[served]) + 1):
        for dp in range(1, len(pools[served]) // tp + 1):
            layout = Layout(tp=tp, pp=1, dp=dp, pipeline=(problem.job.actor.config.layers,))
            if first_problem(problem.job.actor.config, layout, "generate") is None:
                steps = engine_steps(problem, layout, grounds, served, left, beyond)
                steps[(host > ground.host_room_bytes - 6e9).any(axis=0)] = np.inf
                costs = horizon * (fixed + steps + after) + price + price_of("actor_generate", layout)
                best = min(best, float(costs.min()))
    return best


def engine_steps(problem: Problem, layout, grounds, served, left, beyond):
    """Generation beside each combination, inf where a pool's memory does not suffice."""
    memory, engine = problem.memory, problem.memory.engine(problem.job, layout)
    asleep, fixed = sum(engine.resident.values()), sum(engine.fixed.values())
    room = grounds[served].room_bytes
    cache = np.clip(room * 0.9 - left[served] - fixed, engine.least_bytes, engine.most_bytes)
    kinds, index = np.unique(cache, return_inverse=True)
    ground = grounds[served]
    seconds = np.array([ground.seconds(generate_work(problem.job, layout, ground.rates, each)) for each in kinds])
    steps = seconds[index.ravel()]
    for pool, place in enumerate(grounds):
        own = asleep if pool == served else 0.0
        total, most = left[pool] + own, beyond[pool]
        if pool == served:
            most = np.maximum(most, fixed + engine.least_bytes - asleep)
        steps[(total + most) * (1 + memory.margin_share) > place.room_bytes] = np.inf
    return steps
