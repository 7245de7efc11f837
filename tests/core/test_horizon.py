"""The horizon: a closed form against an integral, and what it must never do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from nereus.control.horizon import History


@settings(deadline=None, max_examples=60)
@given(
    st.floats(0, 50), st.floats(0, 500), st.integers(1, 2000), st.sampled_from((0.2, 0.5, 1.0, 2.0)), st.floats(1, 50)
)
def test_it_is_the_integral_of_the_survival_function(
    ended: float, seen: float, remaining: int, prior_count: float, prior_steps: float
) -> None:
    history = History(ended_count=ended, seen_steps=seen, prior_count=prior_count, prior_steps=prior_steps)
    shape, scale = prior_count + ended, prior_steps + seen
    stretched = np.log((scale + remaining) / scale)  # x = scale (e^u - 1): smooth over all magnitudes
    wanted, _ = quad(lambda u: scale * np.exp((1 - shape) * u), 0, stretched, limit=200)
    assert history.horizon(remaining).expected_steps == pytest.approx(wanted, rel=1e-5)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.booleans(), max_size=60), st.integers(-3, 500))
def test_it_stays_within_the_run_and_shrinks_with_every_end(ends: list[bool], remaining: int) -> None:
    history = History()
    for ended in ends:
        history = history.step()
        if ended:
            before = history.horizon(remaining).expected_steps
            history = history.ended()
            assert history.horizon(remaining).expected_steps <= before
    assert 0 <= history.horizon(remaining).expected_steps <= max(remaining, 0)
    assert history.horizon(0).expected_steps == 0


@pytest.mark.parametrize("every", [2, 5, 20, 80])
def test_it_finds_the_life_of_a_steady_rate(every: int) -> None:
    rng, history = np.random.default_rng(every), History()
    lives = []
    for _ in range(3000):
        history = history.step()
        if rng.random() < 1 / every:
            history = history.ended()
        lives.append(history.horizon(10_000).expected_steps)
    found = float(np.median(lives[500:]))
    assert every * 0.6 <= found <= every * (4 if every > 50 else 1.6), found  # 80: one end in what is remembered


def test_it_follows_a_fleet_that_begins_to_change() -> None:
    history = History()
    for _ in range(300):
        history = history.step()
    quiet = history.horizon(1000).expected_steps
    for step in range(60):
        history = history.step()
        if step % 2:
            history = history.ended()
    assert quiet > 300
    assert history.horizon(1000).expected_steps < 10
