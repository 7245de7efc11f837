"""The search against the best plan by definition; its bound, its budget, its price, and that more is never less."""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import product

import pytest

from nereus.fleet import DEVICES, Device, uniform
from nereus.layout import Layout
from nereus.planning.evaluate import evaluate
from nereus.planning.ground import Terrain
from nereus.planning.objective import Budget, Objective
from nereus.planning.plan import GlobalPlan, StageChoice
from nereus.planning.search import search
from nereus.planning.space import Space
from tests.planning.definition import best_step, choices
from tests.planning.instances import NARROW, cost_mismatch, random_problem
from tests.planning.scenes import problem_of, small_problem


@pytest.mark.parametrize("seed", range(1000, 1008))
def test_horizon_times_step_plus_price_is_least_by_definition(seed: int) -> None:
    assert cost_mismatch(seed) <= 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_the_best_plan_is_the_best_by_definition(seed: int) -> None:
    problem = random_problem(seed)
    least = best_step(problem, NARROW)
    result = search(problem, space=NARROW)
    found = result.best.cost_seconds if result.best else float("inf")
    assert result.exact or not result.best
    assert found == pytest.approx(least, rel=1e-9)
    if result.best:
        judged = evaluate(problem, result.best.plan)
        assert judged.fits
        assert judged.step.mean_seconds == pytest.approx(least, rel=1e-9)
        assert result.gap_share == 0


def test_a_price_is_weighed_against_the_steps_that_it_is_paid_for() -> None:
    problem = small_problem(2, 40, critic=False, reference=False, layers=2, samples=8)
    asked: list[GlobalPlan] = []

    def bound(plan: GlobalPlan) -> float:
        degrees = [(c.layout.tp, c.layout.pp, c.layout.dp, c.layout.pipeline) for _, c in plan.stages]
        return zlib.crc32(repr(degrees).encode()) % 1000 / 100

    def price(plan: GlobalPlan) -> float:
        asked.append(plan)
        return 1.5 * bound(plan)

    slots = problem.terrain.ordered()
    engines = [Layout(tp=tp, pp=1, dp=dp, pipeline=(2,)) for tp, dp in ((1, 1), (1, 2), (2, 1))]
    plans = [
        GlobalPlan(pools=(slots,), stages=(("actor_train", trained), ("actor_generate", StageChoice(layout=engine))))
        for trained, engine in product(choices(problem, "actor_train", 2, NARROW), engines)
    ]
    shared = replace(NARROW, pools=False)
    judged = [(plan, evaluate(problem, plan)) for plan in plans]
    for horizon in (0.5, 3.0, 50.0):
        least = min(horizon * e.step.mean_seconds + 1.5 * bound(plan) for plan, e in judged if e.fits)
        asked.clear()
        objective = Objective(horizon_steps=horizon, price=price, price_bound=bound)
        result = search(problem, space=shared, objective=objective, top_count=1)
        assert result.best is not None
        assert result.best.cost_seconds == pytest.approx(least, rel=1e-9)
        assert len(asked) < len(plans) / 4  # the bound spares most of them


def test_the_answer_is_the_same_again_and_the_budget_ends_it() -> None:
    problem = small_problem(4, 20, critic=True, reference=True, layers=2, samples=8)
    first, second = search(problem, space=NARROW), search(problem, space=NARROW)
    assert first.candidates == second.candidates
    assert first.evaluated_nodes == second.evaluated_nodes
    short = search(problem, space=NARROW, budget=Budget(nodes=first.evaluated_nodes // 3))
    assert not short.finished
    assert not short.exact
    assert short.evaluated_nodes <= first.evaluated_nodes
    assert first.best is not None
    if short.best is not None:
        assert short.best.cost_seconds >= first.best.cost_seconds
        assert short.lower_bound_seconds <= first.best.cost_seconds


def test_a_known_plan_spares_work_and_changes_nothing() -> None:
    problem = small_problem(4, 26, critic=True, reference=True, layers=2, samples=8)
    cold = search(problem, space=NARROW, top_count=1)
    assert cold.best is not None
    warm = search(problem, space=NARROW, top_count=1, known=[cold.best.plan])
    assert warm.best is not None
    assert warm.best.cost_seconds == pytest.approx(cold.best.cost_seconds, rel=1e-9)
    assert warm.evaluated_nodes < cold.evaluated_nodes


@pytest.mark.parametrize("seed", range(6))
def test_the_lower_bound_is_below_the_best_plan(seed: int) -> None:
    problem = random_problem(100 + seed)
    loose = search(problem, space=replace(NARROW, exact_slots=0))
    exact = search(problem, space=NARROW)
    if exact.best is not None:
        assert loose.lower_bound_seconds <= exact.best.cost_seconds * (1 + 1e-9)
        assert loose.best is None or loose.best.cost_seconds >= exact.best.cost_seconds * (1 - 1e-9)


def better(device: Device, what: str) -> Device:
    if what == "memory":
        return replace(device, memory_bytes=int(device.memory_bytes * 1.3))
    return replace(device, **{what: 1.5 * getattr(device, what)})


@pytest.mark.parametrize(
    "what",
    [
        "memory",
        "peak_flops_per_second",
        "memory_bytes_per_second",
        "link_bytes_per_second",
        "nic_bytes_per_second",
        "pcie_bytes_per_second",
    ],
)
@pytest.mark.parametrize("memory_gigabytes", [14, 30])
def test_a_better_device_is_never_slower_nor_too_small(what: str, memory_gigabytes: float) -> None:
    problem = small_problem(4, memory_gigabytes, critic=True, reference=True, layers=2, samples=16)
    device = next(iter(problem.terrain.fleet.device_of.values()))
    improved = replace(problem, terrain=replace(problem.terrain, fleet=uniform(4, better(device, what))))
    before, after = search(problem, space=NARROW).best, search(improved, space=NARROW).best
    assert before is None or (after is not None and after.cost_seconds <= before.cost_seconds * (1 + 1e-9))


def test_an_eighth_gpu_is_never_a_loss_and_seven_are_used() -> None:
    steps = []
    for count in (6, 7, 8):
        fleet = uniform(count, DEVICES["h100"])
        problem = replace(problem_of("llama-3.2-3b", "8xh100", "grpo"), terrain=Terrain(fleet=fleet))
        best = search(problem, space=Space(micro_batches=(1, 4))).best
        assert best is not None
        steps.append(best.step_seconds)
    assert steps[0] > steps[1] > steps[2]
