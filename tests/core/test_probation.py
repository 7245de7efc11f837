"""A plan's own ratio, the noise of steps, and probation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.control.probation import KEPT_KINDS, NOVELTY_SHARE, Noise, Offsets, Probation


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=30), st.floats(0.001, 0.1), st.floats(0.01, 0.2))
def test_a_ratio_is_what_the_scalar_kalman_filter_says(surprises: list[float], belief: float, noise: float) -> None:
    offsets = Offsets(kept_share=1.0)
    for value in surprises:  # measured log ratios to the raw prediction
        surprise = value - offsets.of("new").log_ratio
        offsets = offsets.observe("new", surprise, belief_share=belief, noise_share=noise)
    weight = len(surprises) / (belief**2 + noise**2)
    wanted = sum(surprises) / (belief**2 + noise**2) / (weight + NOVELTY_SHARE**-2)
    assert offsets.of("new").log_ratio == pytest.approx(wanted, abs=1e-9)
    assert offsets.of("new").variance_ratio == pytest.approx(1 / (weight + NOVELTY_SHARE**-2))


def test_the_first_plan_is_sure_until_another_runs() -> None:
    offsets = Offsets().first("first")
    for _ in range(20):
        offsets = offsets.observe("first", 0.3, belief_share=0.05, noise_share=0.05)
    assert (offsets.of("first").ratio, offsets.of("first").deviation_share) == (1.0, 0.0)
    for _ in range(200):
        offsets = offsets.observe("other", 0.0, belief_share=0.01, noise_share=0.05)
    assert 0.02 < offsets.of("first").deviation_share < NOVELTY_SHARE


def test_plans_that_never_ran_are_held_to_what_chosen_ones_turned_out_to_be() -> None:
    offsets = Offsets().first("first")
    assert offsets.of("unknown").ratio == 1.0
    for _ in range(100):
        offsets = offsets.observe("chosen", 0.2 - offsets.of("chosen").log_ratio, belief_share=0.0, noise_share=0.03)
    assert offsets.of("chosen").log_ratio == pytest.approx(0.2, rel=0.01)
    assert offsets.of("unknown").log_ratio == pytest.approx(0.1, rel=0.01)
    assert offsets.of("unknown").deviation_share == NOVELTY_SHARE


@pytest.mark.parametrize("share", [0.02, 0.05, 0.15])
def test_noise_is_found_and_an_outlier_does_not_carry_it_away(share: float) -> None:
    rng, noise = np.random.default_rng(3), Noise()
    for value in rng.normal(0, share, 400):
        noise = noise.observe(float(value), belief_share=0.0)
    assert noise.share == pytest.approx(share, rel=0.2)
    assert noise.observe(3.0, belief_share=0.0).share < 1.1 * noise.share


@settings(deadline=None, max_examples=60)
@given(st.floats(0.5, 2.0), st.integers(1, 6), st.floats(0.01, 0.15))
def test_probation_compares_the_same_tokens(factor: float, steps: int, noise: float) -> None:
    probation = Probation(plan_id="new", before_id="old", wanted_steps=steps)
    for step in range(steps):
        assert not probation.over
        tokens = 100 * (step + 1)
        probation = probation.observe(
            tokens=tokens, measured_seconds=factor * tokens, predicted_seconds=0.8 * tokens, before_seconds=1.0 * tokens
        )
    assert probation.over
    ended = probation.ended(learnt_ratio=1.0, noise_share=noise)
    assert ended.before_ratio == pytest.approx(factor)
    assert ended.predicted_ratio == pytest.approx(factor / 0.8)
    assert ended.measured_seconds_per_token == pytest.approx(factor)
    assert ended.verdict == ("worse" if factor > 1 + noise / steps**0.5 + 1e-12 else ended.verdict)
    assert factor > 1 or ended.verdict == "kept"


def test_offsets_of_plans_that_ran_long_ago_are_forgotten() -> None:
    offsets = Offsets().first("first")
    for number in range(3 * KEPT_KINDS):
        offsets = offsets.observe(f"kind {number}", 0.1, belief_share=0.0, noise_share=0.03)
    assert len(offsets.known) == KEPT_KINDS
    assert {"first", f"kind {3 * KEPT_KINDS - 1}"} <= offsets.known.keys()
    assert "kind 0" not in offsets.known
