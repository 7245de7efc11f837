"""Advantages against loops written from the definitions, and their edge cases."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nereus.errors import ConfigError
from nereus.rl import advantages as adv

torch.set_num_threads(1)


def random_case(seed: int, *, rows: int = 5, width: int = 9, holes: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards, values, mask) in double; with holes the mask is arbitrary, else contiguous, possibly empty."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((rows, width))
    for row in mask:
        if holes:
            row[:] = rng.random(width) < 0.5
        else:
            start = rng.integers(0, width)
            row[start : start + rng.integers(0, width - start + 1)] = 1
    rewards, values = rng.normal(size=(2, rows, width))
    return torch.tensor(rewards), torch.tensor(values), torch.tensor(mask)


def gae_by_definition(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> np.ndarray:
    """A_k = sum_j (gamma lam)^j delta_{k+j} over the row's masked-in positions only, V beyond the end 0."""
    result = np.zeros(mask.shape)
    for row in range(mask.shape[0]):
        kept = np.flatnonzero(mask[row].numpy())
        reward, value = rewards[row].numpy()[kept], np.append(values[row].numpy()[kept], 0.0)
        delta = reward + gamma * value[1:] - value[:-1]
        for k, position in enumerate(kept):
            result[row, position] = sum((gamma * lam) ** j * delta[k + j] for j in range(len(kept) - k))
    return result


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 1.0)])
def test_gae_is_the_discounted_sum_of_deltas(holes: bool, gamma: float, lam: float) -> None:
    for seed in range(20):
        rewards, values, mask = random_case(seed, holes=holes)
        advantages, returns = adv.gae(rewards, values, mask, gamma=gamma, lam=lam)
        expected = gae_by_definition(rewards, values, mask, gamma, lam)
        np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-12)
        np.testing.assert_allclose(returns.numpy(), expected + (values * mask).numpy(), atol=1e-12)


def test_gae_with_a_contiguous_mask_is_the_plain_backward_loop() -> None:
    """The loop of TRL's PPO and OpenRLHF, which knows no holes."""
    rewards, values, mask = random_case(3, rows=1, width=6)
    mask[:] = 1
    running, expected = 0.0, []
    for t in reversed(range(6)):
        following = float(values[0, t + 1]) if t < 5 else 0.0
        running = float(rewards[0, t]) + 0.97 * following - float(values[0, t]) + 0.97 * 0.9 * running
        expected.insert(0, running)
    advantages, _ = adv.gae(rewards, values, mask, gamma=0.97, lam=0.9)
    np.testing.assert_allclose(advantages[0].numpy(), expected, atol=1e-12)


def test_gae_with_gamma_and_lam_1_is_return_minus_value() -> None:
    rewards, values, mask = random_case(4, holes=True)
    advantages, returns = adv.gae(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = torch.flip(torch.cumsum(torch.flip(rewards * mask, [1]), 1), [1]) * mask
    torch.testing.assert_close(returns, to_go)
    torch.testing.assert_close(advantages, (to_go - values) * mask)


def test_junk_outside_the_mask_is_never_read() -> None:
    rewards, values, mask = random_case(5)
    junk = torch.where(mask > 0, 0.0, math.nan)
    for clean, dirty in zip(
        adv.gae(rewards, values, mask, gamma=0.9, lam=0.9),
        adv.gae(rewards + junk, values + junk, mask, gamma=0.9, lam=0.9),
        strict=True,
    ):
        torch.testing.assert_close(clean, dirty)
    torch.testing.assert_close(adv.whiten(rewards, mask), adv.whiten(rewards + junk, mask))


def test_whiten_is_global_with_bessel_correction() -> None:
    rewards, _, mask = random_case(6)
    chosen = rewards.numpy()[mask.numpy() > 0]
    expected = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    white = adv.whiten(rewards, mask)
    np.testing.assert_allclose(white.numpy()[mask.numpy() > 0], expected, atol=1e-12)
    assert float((white * (1 - mask)).abs().sum()) == 0.0
    kept_mean = adv.whiten(rewards, mask, shift_mean=False).numpy()[mask.numpy() > 0]
    np.testing.assert_allclose(kept_mean, expected + chosen.mean(), atol=1e-12)


def test_score_lands_on_the_last_response_token_and_kl_on_all() -> None:
    mask = torch.tensor([[0.0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
    kl = torch.full((4, 4), 0.5)
    rewards = adv.token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask, kl=kl, kl_coef=0.1)
    expected = [[0, -0.05, 0.95, 0], [1.95, 0, 0, 0], [0, 0, 0, 0], [0, -0.05, -0.05, 3.95]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


def test_adaptive_kl_moves_towards_its_target() -> None:
    controller = adv.AdaptiveKl(coef=0.1, target_nats=6.0, horizon_samples=1000)
    assert controller.after(60.0, 100).coef == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))
    assert controller.after(0.0, 100).coef == pytest.approx(0.1 * (1 - 0.2 * 100 / 1000))
    assert controller.after(6.6, 100).coef == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    assert controller.after(6.0, 100) == controller
    assert adv.AdaptiveKl(coef=0.1).after(60.0, 100).coef == 0.1


def test_group_estimators_by_definition() -> None:
    scores = torch.tensor([1.0, 0.0, 0.5, 3.0, 3.0, 7.0], dtype=torch.float64)
    groups = torch.tensor([4, 9, 4, 9, 4, 2])
    mask = torch.ones(6, 2, dtype=torch.float64)
    mask[3, 1] = 0
    relative, left_out = adv.grpo(scores, groups, mask), adv.rloo(scores, groups, mask)
    unscaled = adv.grpo(scores, groups, mask, normalize_by_std=False)
    for row in range(6):
        own = scores.numpy()[groups.numpy() == int(groups[row])]
        score = float(scores[row])
        if len(own) == 1:
            assert relative[row].tolist() == left_out[row].tolist() == unscaled[row].tolist() == [7.0, 7.0]
            continue
        others = (own.sum() - score) / (len(own) - 1)
        kept = mask[row].numpy()
        np.testing.assert_allclose(relative[row].numpy(), kept * (score - own.mean()) / (own.std(ddof=1) + 1e-6))
        np.testing.assert_allclose(unscaled[row].numpy(), kept * (score - own.mean()), atol=1e-12)
        np.testing.assert_allclose(left_out[row].numpy(), kept * (score - others), atol=1e-12)


def test_reinforce_plus_plus_whitens_discounted_returns() -> None:
    rewards, _, mask = random_case(8)
    returns = np.zeros(mask.shape)
    for row in range(mask.shape[0]):
        running = 0.0
        for t in reversed(range(mask.shape[1])):  # verl's loop: reset where the mask is 0
            running = (float(rewards[row, t]) + 0.9 * running) * float(mask[row, t])
            returns[row, t] = running
    expected = adv.whiten(torch.tensor(returns), mask)
    torch.testing.assert_close(adv.reinforce_plus_plus(rewards, mask, gamma=0.9), expected)


@given(order=st.permutations(range(6)))
@settings(max_examples=20, deadline=None)
def test_order_of_rows_does_not_matter(order: list[int]) -> None:
    rewards, values, mask = random_case(9, rows=6)
    groups = torch.tensor([0, 0, 1, 1, 1, 2])
    for name in get_args(adv.AdvEstimator):
        chosen = adv.AdvantageSettings(adv_estimator=name, gamma=0.9, lam=0.9)
        plain = adv.estimate(chosen, rewards, mask, values=values, groups=groups)
        mixed = adv.estimate(chosen, rewards[order], mask[order], values=values[order], groups=groups[order])
        for one, other in zip(plain, mixed, strict=True):
            torch.testing.assert_close(one[order], other, atol=1e-10, rtol=0)


EDGE_MASKS = {
    "all masked": [[0.0, 0, 0, 0], [0, 0, 0, 0]],
    "one row masked": [[0.0, 0, 0, 0], [0, 1, 1, 0]],
    "eos at once": [[1.0, 0, 0, 0], [0, 1, 0, 0]],
    "one token in the batch": [[0.0, 1, 0, 0], [0, 0, 0, 0]],
    "longest without eos": [[1.0, 1, 1, 1], [1, 1, 1, 1]],
}


@pytest.mark.parametrize("name", ["gae", "grpo", "rloo", "reinforce++"])
@pytest.mark.parametrize("mask", EDGE_MASKS.values(), ids=EDGE_MASKS.keys())
@pytest.mark.parametrize("groups", [[0, 0], [0, 1]])
@pytest.mark.parametrize("scores", [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
def test_edge_cases_are_finite(
    name: adv.AdvEstimator, mask: list[list[float]], groups: list[int], scores: list[float]
) -> None:
    kept = torch.tensor(mask)
    rewards = adv.token_rewards(torch.tensor(scores), kept)
    for result in adv.estimate(
        adv.AdvantageSettings(adv_estimator=name), rewards, kept, values=torch.zeros(2, 4), groups=torch.tensor(groups)
    ):
        assert result.dtype == torch.float32
        assert bool(torch.isfinite(result).all())
        assert float((result * (1 - kept)).abs().sum()) == 0.0


def test_wrong_settings_and_missing_inputs_are_named() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.adv_estimator = 'gea': must be one of gae, grpo"):
        adv.AdvantageSettings(adv_estimator="gea")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"algorithm.gamma = 1.5: must be at most 1"):
        adv.AdvantageSettings(gamma=1.5)
    with pytest.raises(ValueError, match="needs values"):
        adv.estimate(adv.AdvantageSettings(), torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="needs groups"):
        adv.estimate(adv.AdvantageSettings(adv_estimator="rloo"), torch.zeros(1, 2), torch.ones(1, 2))
