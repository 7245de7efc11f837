"""Policy, value and supervised losses whose denominators are global.

Every function here sees one micro-batch of one replica and returns `(loss, metrics)`: *sums* over its own tokens,
already divided by the denominators of the whole mini-batch. So the loss of a mini-batch is the plain sum of what is
returned over all micro-batches and all replicas, however the rows were split, and the same holds for each metric.

Shapes: all per-token tensors are [n, S] and aligned as in `nereus.rl.batch`: position t speaks of tokens[:, t + 1].
What stands outside the mask is never read: it may be infinite or NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from nereus.errors import ConfigError

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3", "k3+"]
Metrics = dict[str, Tensor]

LOG_RATIO_LIMIT = 20.0  # verl and OpenRLHF clamp log ratios to this before exp
K3_LIMIT = 10.0  # verl clamps the k3 estimate to this


@dataclass(frozen=True, kw_only=True, slots=True)
class Denominators:
    """What a mini-batch's sums are divided by, over all its replicas and micro-batches; counted once on the driver.

    tokens: masked-in tokens. sequences: rows with at least one such token (fully masked rows count nowhere).
    horizon_tokens: the constant of `seq-mean-token-sum-norm` (Dr.GRPO), usually the longest allowed response.

    Example: two rows with 3 and 5 response tokens give Denominators(tokens=8.0, sequences=2.0).
    """

    tokens: float
    sequences: float
    horizon_tokens: float = 0.0

    @classmethod
    def of(cls, mask: Tensor, *, horizon_tokens: float = 0.0) -> Denominators:
        """Counts the mask [n, S] of the whole mini-batch, in double."""
        lengths = mask.double().sum(dim=-1)
        return cls(
            tokens=float(lengths.sum()), sequences=float((lengths > 0).sum()), horizon_tokens=float(horizon_tokens)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """How the policy is updated. `dual_clip_ratio` 0 turns the dual clip off; otherwise it is above 1.

    Errors: ConfigError for a value out of range.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    dual_clip_ratio: float = 3.0
    entropy_coef: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_estimator: KlEstimator = "k3"
    loss_agg_mode: LossAggMode = "token-mean"

    def __post_init__(self) -> None:
        require_at_least("algorithm.clip_ratio_low", self.clip_ratio_low, 0.0)
        require_at_least("algorithm.clip_ratio_high", self.clip_ratio_high, 0.0)
        if self.dual_clip_ratio != 0.0 and not self.dual_clip_ratio > 1.0:
            raise ConfigError(
                "algorithm.dual_clip_ratio", self.dual_clip_ratio, "must be above 1, or 0 for no dual clip"
            )
        require_one_of("algorithm.kl_loss_estimator", self.kl_loss_estimator, get_args(KlEstimator))
        require_one_of("algorithm.loss_agg_mode", self.loss_agg_mode, get_args(LossAggMode))


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSettings:
    """How the critic is updated. `value_clip` 0 turns value clipping off. Errors: ConfigError."""

    value_clip: float = 0.2
    loss_agg_mode: LossAggMode = "token-mean"

    def __post_init__(self) -> None:
        require_at_least("algorithm.value_clip", self.value_clip, 0.0)
        require_one_of("algorithm.loss_agg_mode", self.loss_agg_mode, get_args(LossAggMode))


def require_at_least(key: str, value: float, least: float) -> None:
    """Raises ConfigError when `value` is below `least` or is not a number."""
    if not value >= least:
        raise ConfigError(key, value, f"must be at least {least:g}")


def require_one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError when `value` is none of `allowed`."""
    if value not in allowed:
        raise ConfigError(key, value, f"must be one of {', '.join(allowed)}")


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` where the mask is set and 0 elsewhere, in value and in gradient, whatever stands there. [n, S]."""
    return torch.where(mask > 0, values, torch.zeros((), dtype=values.dtype, device=values.device))


def aggregate(losses: Tensor, mask: Tensor, denominators: Denominators, mode: LossAggMode) -> Tensor:
    """This micro-batch's part of the aggregated loss: a scalar whose sum over all micro-batches is the global loss.

    losses, mask: [n, S]. With s_i the sum and l_i the length of row i, T tokens, B sequences and horizon H of the whole
    mini-batch: token-mean sum(s_i) / T; token-sum sum(s_i); seq-mean-token-mean sum(s_i / l_i) / B;
    seq-mean-token-sum sum(s_i) / B; seq-mean-token-sum-norm sum(s_i) / (B H).
    Source: DAPO 2503.14476, Dr.GRPO 2503.20783; names and conventions of verl's agg_loss.

    Errors: ValueError when `seq-mean-token-sum-norm` comes without a horizon.
    """
    tokens, sequences = max(denominators.tokens, 1.0), max(denominators.sequences, 1.0)
    rows = (masked(losses, mask) * mask).sum(dim=-1)
    if mode == "token-mean":
        return rows.sum() / tokens
    if mode == "token-sum":
        return rows.sum()
    if mode == "seq-mean-token-mean":
        return (rows / mask.sum(dim=-1).clamp(min=1.0)).sum() / sequences
    if mode == "seq-mean-token-sum":
        return rows.sum() / sequences
    if denominators.horizon_tokens <= 0.0:
        raise ValueError(
            "seq-mean-token-sum-norm needs Denominators.horizon_tokens above 0: the longest response allowed"
        )
    return rows.sum() / (sequences * denominators.horizon_tokens)


def kl_divergence(logp: Tensor, reference_logp: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from one sample, [n, S], with d = logp - reference_logp.

    k1 d; k2 d^2 / 2; k3 exp(-d) - 1 + d (d clamped to +-20, the estimate to +-10, as verl does); k3+ the value of k3
    with the gradient of k2, which is the right one. Source: Schulman 2020, joschu.net/blog/kl-approx.
    """
    difference = logp - reference_logp
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    third = (torch.exp(-bounded) - 1.0 + bounded).clamp(-K3_LIMIT, K3_LIMIT)
    if estimator == "k3":
        return third
    second = 0.5 * difference.square()
    return second - second.detach() + third.detach()


def policy_loss(
    logp: Tensor,
    entropy: Tensor | None,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: PolicySettings,
    denominators: Denominators,
    *,
    reference_logp: Tensor | None = None,
    rollout_weights: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped loss with asymmetric and dual clip, minus the entropy bonus, plus a KL loss if one is asked for.

    All tensors [n, S]; `logp` (and `entropy`) carry gradients, the others are constants. `rollout_weights` (see
    `nereus.rl.correction`) multiply the loss after the clip. `entropy` may be None when entropy_coef is 0, and
    `reference_logp` when kl_loss_coef is 0.
    Source: PPO 1707.06347; clip-higher DAPO 2503.14476; dual clip 1912.09729; log ratio clamped to +-20 as in verl.

    Metrics (summable): actor/pg_loss, actor/pg_clipfrac, actor/pg_clipfrac_lower, actor/ppo_kl, actor/loss; and
    actor/entropy, actor/kl_loss where given.
    Errors: ValueError when a term with a coefficient lacks its tensor.
    """
    losses, facts = clipped_policy_losses(
        masked(logp, mask), masked(old_logp, mask), masked(advantages, mask), settings
    )
    if rollout_weights is not None:
        losses = losses * masked(rollout_weights, mask)
    loss = aggregate(losses, mask, denominators, settings.loss_agg_mode)
    metrics = {f"actor/{name}": aggregate(fact, mask, denominators, "token-mean") for name, fact in facts.items()}
    metrics["actor/pg_loss"] = loss.detach()
    if entropy is not None:
        bonus = aggregate(entropy, mask, denominators, settings.loss_agg_mode)
        metrics["actor/entropy"] = bonus.detach()
        if settings.entropy_coef != 0.0:
            loss = loss - settings.entropy_coef * bonus
    elif settings.entropy_coef != 0.0:
        raise ValueError(f"entropy_coef is {settings.entropy_coef}: policy_loss needs the entropy tensor")
    if settings.kl_loss_coef != 0.0:
        if reference_logp is None:
            raise ValueError(f"kl_loss_coef is {settings.kl_loss_coef}: policy_loss needs reference_logp")
        kl = kl_divergence(masked(logp, mask), masked(reference_logp, mask), settings.kl_loss_estimator)
        penalty = aggregate(kl, mask, denominators, settings.loss_agg_mode)
        metrics["actor/kl_loss"] = penalty.detach()
        loss = loss + settings.kl_loss_coef * penalty
    metrics["actor/loss"] = loss.detach()
    return loss, metrics


def clipped_policy_losses(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, settings: PolicySettings
) -> tuple[Tensor, Metrics]:
    """Per-token PPO losses [n, S] and per-token facts [n, S]: which clip was active (strictly), and old - new logp."""
    log_ratio = (logp - old_logp.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, advantages = torch.exp(log_ratio), advantages.detach()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    losses = torch.maximum(plain, clipped)
    facts = {"pg_clipfrac": (clipped > plain).to(logp.dtype), "pg_clipfrac_lower": torch.zeros_like(ratio)}
    if settings.dual_clip_ratio != 0.0:
        cap = -advantages * settings.dual_clip_ratio
        lower = (advantages < 0) & (losses > cap)
        facts["pg_clipfrac_lower"] = lower.to(logp.dtype)
        losses = torch.where(advantages < 0, torch.minimum(losses, cap), losses)
    facts["ppo_kl"] = -log_ratio
    return losses, {name: fact.detach() for name, fact in facts.items()}


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    settings: ValueSettings,
    denominators: Denominators,
) -> tuple[Tensor, Metrics]:
    """Half the aggregated max of the plain and the clipped squared error. All tensors [n, S].

    0.5 agg(max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2)). Source: PPO 1707.06347; N details 2403.17031.
    Metrics (summable): critic/vf_loss, critic/vf_clipfrac (strictly larger), critic/vpred_mean, critic/return_mean.
    """
    values, old_values, returns = (
        masked(values, mask),
        masked(old_values, mask).detach(),
        masked(returns, mask).detach(),
    )
    plain = (values - returns).square()
    losses, active = plain, torch.zeros_like(plain)
    if settings.value_clip > 0.0:
        bounded = torch.clamp(values, old_values - settings.value_clip, old_values + settings.value_clip)
        clipped = (bounded - returns).square()
        losses, active = torch.maximum(plain, clipped), (clipped > plain).to(values.dtype)
    loss = 0.5 * aggregate(losses, mask, denominators, settings.loss_agg_mode)
    facts = {"vf_clipfrac": active, "vpred_mean": values.detach(), "return_mean": returns}
    metrics = {f"critic/{name}": aggregate(fact, mask, denominators, "token-mean") for name, fact in facts.items()}
    metrics["critic/vf_loss"] = loss.detach()
    return loss, metrics


def sft_loss(logp: Tensor, mask: Tensor, denominators: Denominators) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood a target token: -sum(logp) / global tokens. logp, mask: [n, S]. Metric: sft/loss."""
    loss = aggregate(-masked(logp, mask), mask, denominators, "token-mean")
    return loss, {"sft/loss": loss.detach()}
