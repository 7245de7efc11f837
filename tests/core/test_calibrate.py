"""Calibration: learns from few measurements, keeps what it has not seen, shrugs off outliers, follows drift, replays."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.costs.calibrate import Calibration, Prior, observe, predict, start

PRIOR = Prior(means={"gemm": 1.3, "tp": 0.8, "step": 1.0, "decode_cache": 0.9}, noise_share=0.03)
TRUE = {"gemm": 1.6, "tp": 1.1, "step": 1.2}


def measured(terms: dict[str, float], noise: float = 0.0, rng: random.Random | None = None) -> float:
    seconds = sum(TRUE[name] * value for name, value in terms.items())
    return seconds * (1 + noise * (rng.gauss(0, 1) if rng else 0))


def work(rng: random.Random) -> dict[str, float]:
    return {"gemm": rng.uniform(1, 4), "tp": rng.uniform(0.1, 2), "step": 0.3}


def learnt(steps: int, seed: int = 1, noise: float = 0.02) -> Calibration:
    rng = random.Random(seed)
    state = start(PRIOR)
    for _ in range(steps):
        terms = work(rng)
        state = observe(state, terms, measured(terms, noise, rng))
    return state


def test_before_any_measurement_the_prior_predicts() -> None:
    guess = predict(start(PRIOR), {"gemm": 2.0})
    assert guess.mean_seconds == pytest.approx(2.6)
    assert guess.deviation_seconds == pytest.approx(2.6 * (0.2**2 + 0.15**2 + 0.03**2) ** 0.5)


def test_one_measurement_corrects_most_of_a_common_error() -> None:
    terms = {"gemm": 2.0, "tp": 1.0, "step": 0.3}
    state = observe(start(PRIOR), terms, measured(terms))
    error = abs(predict(state, terms).mean_seconds / measured(terms) - 1)
    before = abs(predict(start(PRIOR), terms).mean_seconds / measured(terms) - 1)
    assert error < before / 5
    other = {"gemm": 1.0, "tp": 2.0, "step": 0.3}
    assert abs(predict(state, other).mean_seconds / measured(other) - 1) < 0.12


def test_many_measurements_separate_the_terms() -> None:
    state = learnt(60)
    for terms in ({"gemm": 3.0}, {"gemm": 1.0, "tp": 1.5}):
        assert predict(state, terms).mean_seconds == pytest.approx(measured(terms), rel=0.06)


def test_a_term_that_never_ran_keeps_its_prior_up_to_what_is_common() -> None:
    state = learnt(40)
    assert state.coefficients["decode_cache"] == pytest.approx(0.9, rel=0.25)
    unseen, seen = predict(state, {"decode_cache": 1.0}), predict(state, {"gemm": 1.0})
    assert unseen.deviation_seconds / unseen.mean_seconds > 0.15 > seen.deviation_seconds / seen.mean_seconds


@given(factor=st.floats(3, 50), at=st.integers(5, 20))
def test_an_outlier_does_not_wreck_it(factor: float, at: int) -> None:
    state, rng = learnt(at), random.Random(7)
    terms = work(rng)
    hit = observe(state, terms, measured(terms) * factor)
    assert predict(hit, terms).mean_seconds == pytest.approx(measured(terms), rel=0.1)


def test_a_lasting_change_is_followed_in_a_few_steps() -> None:
    state, rng = learnt(30), random.Random(3)
    for _ in range(6):
        terms = work(rng)
        state = observe(state, terms, 1.5 * measured(terms, 0.02, rng))
    terms = work(rng)
    assert predict(state, terms).mean_seconds == pytest.approx(1.5 * measured(terms), rel=0.06)


def test_slow_drift_is_followed() -> None:
    state, rng = start(PRIOR), random.Random(5)
    for step in range(200):
        terms = work(rng)
        state = observe(state, terms, (1 + 0.002 * step) * measured(terms, 0.02, rng))
    terms = work(rng)
    assert predict(state, terms).mean_seconds == pytest.approx(1.4 * measured(terms), rel=0.05)


def test_deviations_cover_what_comes() -> None:
    inside = 0
    for seed in range(100):
        state, rng = learnt(10, seed), random.Random(1000 + seed)
        terms = work(rng)
        guess = predict(state, terms)
        inside += abs(guess.mean_seconds - measured(terms, 0.02, rng)) < 2 * guess.deviation_seconds
    assert inside >= 90


@given(st.lists(st.tuples(st.floats(0.1, 5), st.floats(0, 5), st.floats(0.01, 100)), min_size=1, max_size=20))
def test_replays_to_the_bit_and_stays_sane(history: list[tuple[float, float, float]]) -> None:
    states: list[Calibration] = []
    for _ in range(2):
        state = start(PRIOR)
        for gemm, tp, seconds in history:
            state = observe(state, {"gemm": gemm, "tp": tp}, seconds)
        states.append(state)
    assert states[0] == states[1]
    assert all(coefficient > 0 for coefficient in states[0].coefficients.values())
    assert predict(states[0], {"gemm": 1.0}).deviation_seconds > 0


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(KeyError, match="no coefficient for gen"):
        predict(start(PRIOR), {"gen": 1.0})
    with pytest.raises(ValueError, match="measured_seconds = 0"):
        observe(start(PRIOR), {"gemm": 1.0}, 0.0)
