"""Lower bounds of choices are below what the choices take, and near it; what a stage takes at least is below all of them."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from nereus.planning.evaluate import Problem
from nereus.planning.objective import Budget, Objective
from nereus.planning.search import _Search, search  # pyright: ignore[reportPrivateUsage]
from nereus.planning.space import Space
from tests.planning.scenes import problem_of

PROBLEMS = {
    "dense": problem_of("llama-3.1-8b", "61xh100"),
    "large": problem_of("llama-3.1-70b", "100xh100"),
    "experts": problem_of("qwen3-30b-a3b", "48xh100"),
    "long": problem_of("llama-3.1-8b", "16xh100", cap=30_000, mean=9_000),
}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_no_choice_takes_less_than_its_bound(kind: str) -> None:
    problem, space = PROBLEMS[kind], Space(micro_batches=(1, 4))
    state = _Search(problem=problem, space=space, objective=Objective(), top_count=1, budget_nodes=Budget().nodes)
    ground = state.ground(state.relaxation.slots)
    for name in ("actor_train", "critic_train", "reference_infer"):
        table = state.table(name, ground, alone=True)
        table.reach(float("inf"))
        bound_of = dict(zip(table.choices, table.bounds_seconds, strict=True))
        ratios = [bound_of[replace(option.choice, keep="all")] / option.seconds for option in table.options]
        assert max(ratios) <= 1 + 1e-9
        assert median(ratios) >= 0.7
        least = state.relaxation.stages.least(name, ground)
        assert least.seconds <= min(option.seconds for option in table.options) * (1 + 1e-9)
        assert least.infer_seconds <= min(option.infer_seconds for option in table.options) * (1 + 1e-9)
        assert least.train_seconds <= min(option.train_seconds for option in table.options) * (1 + 1e-9)
        work = state.relaxation.stages.quick(name, ground, len(ground.slots))
        assert work.seconds <= least.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("model", "fleet"), [("llama-3.1-8b", "61xh100"), ("llama-3.1-70b", "100xh100"), ("qwen2.5-7b", "1000xh100")]
)
def test_the_loss_is_bounded_by_a_few_per_cent(model: str, fleet: str) -> None:
    problem: Problem = problem_of(model, fleet)
    found = search(problem)
    assert found.best is not None
    assert 0 < found.lower_bound_seconds <= found.best.cost_seconds
    assert found.gap_share <= 0.03
    if len(problem.terrain.fleet.slots) > 100:
        return  # judging every number of replicas takes long
    wider = search(problem, space=Space(exact_slots=len(problem.terrain.fleet.slots), pools=False), top_count=1)
    assert wider.best is None or wider.best.cost_seconds >= found.lower_bound_seconds * (1 - 1e-9)
