"""How far a plan holds as responses grow, and that it is said before it happens."""

from __future__ import annotations

import pytest

from nereus.forecast import trend
from nereus.planning.evaluate import evaluate
from nereus.planning.limits import grown, room_to_grow, will_not_fit
from nereus.planning.search import search
from tests.planning.scenes import problem_of

PROBLEM = problem_of("qwen2.5-7b", "8xh100", "grpo", mean=600, cap=1200)


def test_a_plan_fits_up_to_its_limit_and_not_beyond() -> None:
    best = search(PROBLEM).best
    assert best is not None
    factor = room_to_grow(PROBLEM, best.plan)
    assert 1 <= factor < 64
    assert evaluate(grown(PROBLEM, factor), best.plan).fits
    assert not evaluate(grown(PROBLEM, 1.02 * factor), best.plan).fits
    assert room_to_grow(grown(PROBLEM, 2 * factor), best.plan) == 0


def test_growth_is_foreseen() -> None:
    best = search(PROBLEM).best
    assert best is not None
    limit = 600 * room_to_grow(PROBLEM, best.plan)
    slope = (limit - 600) / 10
    lengths = trend([(step, 600 + slope * (step - 20) + (-1) ** step) for step in range(21)])
    assert lengths is not None
    passing = will_not_fit(PROBLEM, best.plan, lengths, steps=50)
    assert passing is not None
    assert 9 <= passing.in_steps <= 12
    assert passing.value_mean == pytest.approx(limit, rel=0.1)
    steady = trend([(step, 600 + (-1) ** step) for step in range(21)])
    assert steady is not None
    assert will_not_fit(PROBLEM, best.plan, steady, steps=50) is None
