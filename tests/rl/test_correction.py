"""Rollout correction: truncated importance weights and the mismatch metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nereus.rl.correction import Mismatch, mismatch, rollout_weights

torch.set_num_threads(1)

MASK = torch.tensor([[0.0, 1, 1, 0], [1, 1, 0, 0]])


def test_equal_log_probabilities_are_no_mismatch() -> None:
    logp = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    junk = torch.where(MASK > 0, 0.0, math.nan)
    torch.testing.assert_close(rollout_weights(logp, logp + junk, MASK), MASK)
    equal = Mismatch(mean_exp_abs=1.0, max_abs_nats=0.0, kl_nats=0.0, k3_nats=0.0, tokens=4)
    assert mismatch(logp, logp + junk, MASK) == equal


def test_weights_and_metrics_by_definition() -> None:
    generator = torch.Generator().manual_seed(2)
    old, rollout = torch.randn(2, 2, 4, generator=generator, dtype=torch.float64)
    gap = (old - rollout).numpy()[MASK.numpy() > 0]
    weights = rollout_weights(old, rollout, MASK, cap=1.5)
    np.testing.assert_allclose(weights.numpy()[MASK.numpy() > 0], np.minimum(np.exp(gap), 1.5))
    assert float((weights * (1 - MASK)).abs().sum()) == 0.0
    found = mismatch(old, rollout, MASK)
    assert found.mean_exp_abs == pytest.approx(np.exp(np.abs(gap)).mean())
    assert found.max_abs_nats == pytest.approx(np.abs(gap).max())
    assert found.kl_nats == pytest.approx(-gap.mean())
    assert found.k3_nats == pytest.approx((np.exp(gap) - 1 - gap).mean())
    assert found.tokens == len(gap)


def test_weights_carry_no_gradient_and_extremes_stay_finite() -> None:
    old = torch.full((2, 4), 1000.0, requires_grad=True)
    weights = rollout_weights(old, torch.zeros(2, 4), MASK)
    assert not weights.requires_grad
    assert float(weights.max()) == 2.0
    found = mismatch(old, torch.zeros(2, 4), MASK)
    assert all(math.isfinite(number) for number in (found.mean_exp_abs, found.max_abs_nats, found.k3_nats))


def test_an_empty_batch_is_no_mismatch() -> None:
    empty = torch.zeros(2, 4)
    assert mismatch(empty + math.nan, empty, empty).mean_exp_abs == 1.0
    assert mismatch(empty[:0], empty[:0], empty[:0]).max_abs_nats == 0.0
