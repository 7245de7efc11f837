"""Token rewards, KL control and advantage estimators over the whole batch, on the driver.

Shapes: per-token tensors are [n, S] and aligned as in `nereus.rl.batch`; per-sample tensors are [n]. The arithmetic is
in double, results come back in the type of the rewards. What stands outside the mask is never read, and results are 0
there. Whitening and group statistics need the *whole* batch: call these before the batch is split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from nereus.errors import ConfigError
from nereus.rl.losses import masked, require_at_least, require_one_of

AdvEstimator = Literal["gae", "grpo", "rloo", "reinforce++"]

WHITEN_EPSILON = 1e-8
GRPO_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSettings:
    """Which estimator, and its discounts. `whiten_advantages` concerns gae; reinforce++ always whitens, grpo and rloo
    never do. `normalize_by_std` concerns grpo (False is Dr.GRPO). Errors: ConfigError for a value out of range.
    """

    adv_estimator: AdvEstimator = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    whiten_advantages: bool = True
    normalize_by_std: bool = True

    def __post_init__(self) -> None:
        require_one_of("algorithm.adv_estimator", self.adv_estimator, get_args(AdvEstimator))
        for key, value in (("algorithm.gamma", self.gamma), ("algorithm.lam", self.lam)):
            require_at_least(key, value, 0.0)
            if value > 1.0:
                raise ConfigError(key, value, "must be at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveKl:
    """The coefficient of the in-reward KL and its controller; `horizon_samples` 0 keeps the coefficient fixed.

    Source: Ziegler et al. 1909.08593, section 2.2.
    """

    coef: float
    target_nats: float = 0.0
    horizon_samples: float = 0.0

    def __post_init__(self) -> None:
        require_at_least("algorithm.kl_coef", self.coef, 0.0)
        if self.horizon_samples > 0.0 and not self.target_nats > 0.0:
            raise ConfigError("algorithm.kl_target", self.target_nats, "must be above 0 when the KL coefficient adapts")

    def after(self, kl_nats: float, samples: int) -> AdaptiveKl:
        """The controller after a step with mean KL `kl_nats`: b (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)."""
        if self.horizon_samples <= 0.0:
            return self
        error = min(max(kl_nats / self.target_nats - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * samples / self.horizon_samples))


def token_rewards(scores: Tensor, mask: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Rewards [n, S]: -kl_coef * kl at every response token, plus the score [n] at the last one.

    A row without response tokens has no place for its score and gets zeros. Source: Stiennon 2009.01325.
    """
    kept = mask > 0
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device)
    if kl is not None and kl_coef != 0.0:
        rewards = masked(-kl_coef * kl.to(scores.dtype), mask)
    positions = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    last = torch.where(kept, positions, -1).amax(dim=1)
    at_last = (positions == last[:, None]) & kept
    return rewards + at_last * scores[:, None]


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over all masked-in elements of [n, S], var Bessel-corrected; 0 outside the mask.

    Fewer than two elements have variance 0. `shift_mean=False` adds the mean back.
    Source: Huang et al. 2403.17031; verl's masked_whiten.
    """
    exact, weights = masked(values, mask).double(), (mask > 0).double()
    count = weights.sum()
    mean = exact.sum() / count.clamp(min=1.0)
    variance = ((exact - mean).square() * weights).sum() / (count - 1.0).clamp(min=1.0)
    white = (exact - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
    return masked(white if shift_mean else white + mean, mask).to(values.dtype)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns), each [n, S], not whitened, 0 outside the mask.

    d_t = r_t + gamma V_next - V_t; A_t = d_t + gamma lam A_next; R_t = A_t + V_t. V_next and A_next are those of the
    next masked-in position (carried through holes, as verl, AReaL and NeMo-RL do), 0 beyond the last one.
    Source: Schulman et al. 1506.02438.
    """
    kept = mask > 0
    reward, value = masked(rewards, mask).double(), masked(values, mask).double()
    advantages = torch.zeros_like(reward)
    next_value = torch.zeros(mask.shape[0], dtype=torch.float64, device=mask.device)
    next_advantage = torch.zeros_like(next_value)
    for position in range(mask.shape[1] - 1, -1, -1):
        here = kept[:, position]
        delta = reward[:, position] + gamma * next_value - value[:, position]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, value[:, position], next_value)
        advantages[:, position] = next_advantage
    advantages = masked(advantages, mask)
    return advantages.to(rewards.dtype), (advantages + value).to(rewards.dtype)


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_next over the masked-in positions, [n, S], 0 outside: GAE of a zero critic with lam 1."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0)[0]


def group_mean_and_size(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each sample's group mean and group size, [n] in double, and the group index [n] from 0."""
    index = torch.unique(groups, return_inverse=True)[1]
    total = torch.zeros(scores.shape[0], dtype=torch.float64, device=scores.device)
    size = torch.zeros_like(total).index_add_(0, index, torch.ones_like(total))
    total = total.index_add_(0, index, scores.double())
    return total[index] / size[index], size[index], index


def grpo(scores: Tensor, groups: Tensor, mask: Tensor, *, normalize_by_std: bool = True) -> Tensor:
    """(s_i - mean_g) / (std_g + 1e-6) on every response token, [n, S]; std with ddof 1.

    scores [n]; groups [n]: rows of one prompt share a number. A group of one keeps its score (mean 0, std 1), as verl
    does. Source: DeepSeekMath 2402.03300; without the std Dr.GRPO 2503.20783.
    """
    mean, size, index = group_mean_and_size(scores, groups)
    centred = torch.where(size > 1, scores.double() - mean, scores.double())
    if normalize_by_std:
        squares = torch.zeros_like(mean).index_add_(0, index, (scores.double() - mean).square())[index]
        deviation = torch.sqrt(squares / (size - 1.0).clamp(min=1.0))
        centred = torch.where(size > 1, centred / (deviation + GRPO_EPSILON), centred)
    return masked(centred[:, None].expand(mask.shape), mask).to(scores.dtype)


def rloo(scores: Tensor, groups: Tensor, mask: Tensor) -> Tensor:
    """Score minus the mean of the *other* samples of its group, on every response token, [n, S].

    n/(n-1) (s_i - mean_g); a group of one keeps its score. Source: Ahmadian et al. 2402.14740.
    """
    mean, size, _ = group_mean_and_size(scores, groups)
    exact = scores.double()
    left_out = torch.where(size > 1, (exact - mean) * size / (size - 1.0).clamp(min=1.0), exact)
    return masked(left_out[:, None].expand(mask.shape), mask).to(scores.dtype)


def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Whitened discounted returns of the token rewards, [n, S]. Source: REINFORCE++ 2501.03262.

    The return is carried through holes of the mask, as in `gae`; with a mask without holes this is verl's.
    """
    return whiten(discounted_returns(rewards, mask, gamma=gamma), mask)


def estimate(
    settings: AdvantageSettings,
    rewards: Tensor,
    mask: Tensor,
    *,
    values: Tensor | None = None,
    groups: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), each [n, S], of the whole batch by the estimator of the settings.

    rewards [n, S] from `token_rewards`; grpo and rloo use each row's sum of them as its score. `values` [n, S] are the
    critic's (gae); `groups` [n] number the prompts (grpo, rloo). Returns are GAE's un-whitened A + V, and the
    discounted returns for the estimators without a critic.
    Errors: ValueError when the estimator lacks its input.
    """
    if settings.adv_estimator == "gae":
        if values is None:
            raise ValueError("adv_estimator gae needs values [n, S] from the critic")
        advantages, returns = gae(rewards, values, mask, gamma=settings.gamma, lam=settings.lam)
        return (whiten(advantages, mask) if settings.whiten_advantages else advantages), returns
    returns = discounted_returns(rewards, mask, gamma=settings.gamma)
    if settings.adv_estimator == "reinforce++":
        return whiten(returns, mask), returns
    if groups is None:
        raise ValueError(f"adv_estimator {settings.adv_estimator} needs groups [n], the prompt number of each row")
    scores = masked(rewards, mask).double().sum(dim=1)
    if settings.adv_estimator == "rloo":
        return rloo(scores, groups, mask).to(rewards.dtype), returns
    by_std = settings.normalize_by_std
    return grpo(scores, groups, mask, normalize_by_std=by_std).to(rewards.dtype), returns
