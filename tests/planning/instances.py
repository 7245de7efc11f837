"""Random small jobs on tight memory, and the search's best cost on them against the definition's."""

from __future__ import annotations

import zlib
from random import Random

from nereus.layout import Layout
from nereus.planning.objective import Objective
from nereus.planning.plan import GlobalPlan
from nereus.planning.search import search
from nereus.planning.space import Space
from tests.planning.definition import best_cost, best_step
from tests.planning.scenes import small_problem

NARROW = Space(micro_batches=(1,))


def random_problem(seed: int):
    rng = Random(seed)
    critic, reference = rng.random() < 0.5, rng.random() < 0.6
    slots = (
        rng.choice([2, 3, 4]) if critic and reference else rng.choice([3, 4, 5] if critic or reference else [6, 7, 8])
    )
    memory = rng.choice([9, 12, 15, 20, 26, 34, 60])
    return small_problem(
        slots, memory, critic=critic, reference=reference, layers=rng.choice([1, 2]), samples=rng.choice([8, 13])
    )


def stage_price(name: str, layout: Layout) -> float:
    """Some price of reaching a layout, a function of its degrees."""
    degrees = (name, layout.tp, layout.pp, layout.dp, layout.pipeline)
    return zlib.crc32(repr(degrees).encode()) % 1000 / 200


def plan_price(plan: GlobalPlan) -> float:
    return sum(stage_price(name, choice.layout) for name, choice in plan.stages)


def cost_mismatch(seed: int) -> float:
    """How far the search's best cost is from the definition's, over it; 0 where both find nothing. A price on two of three."""
    problem, horizon = random_problem(seed), (1.0, 0.4, 6.0)[seed % 3]
    priced = seed % 3 > 0
    least = best_cost(problem, NARROW, horizon, stage_price) if priced else best_step(problem, NARROW)
    objective = Objective(horizon_steps=horizon)
    if priced:
        objective = Objective(
            horizon_steps=horizon,
            price=plan_price,
            price_bound=lambda plan: 0.8 * plan_price(plan),
            stage_bound=lambda name, choice, _: 0.7 * stage_price(name, choice.layout),
        )
    found = search(problem, space=NARROW, objective=objective, top_count=1 + seed % 5).best
    if found is None or least == float("inf"):
        return 0.0 if found is None and least == float("inf") else float("inf")
    return abs(found.cost_seconds - least) / least
