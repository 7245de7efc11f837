"""Workloads: the mean is the curve's, the tail is there, equal seeds give equal batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import ConfigError
from nereus.sim.traces import LengthCurve
from nereus.sim.workload import LengthShape, SimWorkload, Spike, constant, shape_like


def workload(**changes: object) -> SimWorkload:
    made = SimWorkload(
        prompts_per_step=128,
        samples_per_prompt=8,
        mean_prompt_tokens=200.0,
        most_prompt_tokens=1024,
        most_response_tokens=8192,
        curve=constant(600.0),
    )
    return replace(made, **changes)


@settings(max_examples=25, deadline=None)
@given(st.floats(50, 5000), st.sampled_from([0.2, 0.6, 1.1]), st.sampled_from([0.0, 0.05]))
def test_the_mean_is_the_curves(mean: float, log_std: float, tail: float) -> None:
    made = workload(curve=constant(mean), shape=LengthShape(log_std=log_std, tail_share=tail))
    found = np.concatenate([made.batch(step).response_tokens for step in range(1, 31)])
    assert found.mean() == pytest.approx(mean, rel=0.04)
    assert found.min() >= 1
    assert found.max() <= 8192


def test_curves_grow_spike_and_shrink() -> None:
    curve = LengthCurve(name="c", at_steps=(1, 101, 201), mean_tokens=(300.0, 900.0, 200.0))
    made = workload(curve=curve, spikes=(Spike(step=50, steps=3, length_ratio=2.0),))
    means = [made.batch(step).response_tokens.mean() for step in (1, 49, 50, 53, 101, 201)]
    wanted = [300.0, 588.0, 2 * 594.0, 612.0, 900.0, 200.0]
    assert means == pytest.approx(wanted, rel=0.15)


def test_a_step_is_a_function_of_seed_and_step() -> None:
    one, same, other = workload().batch(7), workload().batch(7), workload(seed=2).batch(7)
    assert (one.response_tokens == same.response_tokens).all()
    assert (one.response_tokens != other.response_tokens).any()
    assert (one.response_tokens != workload().batch(8).response_tokens).any()


def test_samples_of_a_prompt_are_alike_and_have_one_prompt() -> None:
    batch = workload(shape=LengthShape(prompt_share=0.8, tail_share=0.0)).batch(1)
    logs = np.log(batch.response_tokens).reshape(128, 8)
    within, whole = logs.var(axis=1).mean(), logs.var()
    assert within / whole == pytest.approx(0.2, abs=0.06)
    assert (batch.prompt_tokens.reshape(128, 8) == batch.prompt_tokens.reshape(128, 8)[:, :1]).all()


def test_the_tail_is_heavy() -> None:
    batches = [workload().batch(step).response_tokens for step in range(1, 9)]
    bare = workload(shape=LengthShape(tail_share=0.0))
    most = np.mean([batch.max() / batch.mean() for batch in batches])
    plain = np.mean([bare.batch(step).response_tokens.max() / 600 for step in range(1, 9)])
    assert most > 1.3 * plain


def test_a_shape_is_found_again() -> None:
    wanted = LengthShape(log_std=0.5, tail_share=0.06, tail_shape=1.5, prompt_share=0.0)
    made = workload(shape=wanted, most_response_tokens=10**9, curve=constant(1000.0))
    lengths = np.concatenate([made.batch(step).response_tokens for step in range(1, 41)])
    found = shape_like(lengths.tolist())
    assert found.log_std == pytest.approx(0.5, rel=0.12)
    assert 0.005 < found.tail_share < 0.08  # what of the tail is above the body
    assert found.tail_shape == pytest.approx(1.5, abs=0.5)
    with pytest.raises(ConfigError, match="100"):
        shape_like([1, 2, 3])
    with pytest.raises(ConfigError, match="tail_shape"):
        workload(shape=LengthShape(tail_shape=0.9))
