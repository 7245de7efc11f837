"""The engine samples from slightly other probabilities than the trainer computes: weights and metrics for that gap.

Shapes: [n, S], aligned as in `nereus.rl.batch`. `old_logp` is the trainer's before the update, `rollout_logp` the
engine's. Both must be of the untruncated distribution at the same temperature: with top-p or top-k below 1 the engine's
are renormalised over the kept tokens and the ratio is biased.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.rl.losses import LOG_RATIO_LIMIT, Denominators, masked, require_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """How far the engine's log-probabilities are from the trainer's on the same tokens, with d = old - rollout.

    mean_exp_abs: mean exp|d|, NeMo-RL's token_mult_prob_error (1 is equality, above 1.05 investigate).
    max_abs_nats: max |d|. kl_nats: mean -d, the k1 estimate of KL(rollout || old). k3_nats: mean exp(d) - 1 - d.

    Example: equal log-probabilities give Mismatch(mean_exp_abs=1.0, max_abs_nats=0.0, kl_nats=0.0, k3_nats=0.0, ...).
    """

    mean_exp_abs: float
    max_abs_nats: float
    kl_nats: float
    k3_nats: float
    tokens: int


def rollout_weights(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """Token-level truncated importance weights min(exp(old - rollout), cap), [n, S], detached, 0 outside the mask.

    Multiply the per-token loss by them after the clip and before aggregation (`policy_loss` does).
    Source: TIS, fengyao.notion.site/off-policy-rl; verl docs rollout_corr_math. Errors: ConfigError for cap below 0.
    """
    require_at_least("algorithm.rollout_weight_cap", cap, 0.0)
    gap = (masked(old_logp, mask) - masked(rollout_logp, mask)).detach()
    return masked(torch.exp(gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).clamp(max=cap), mask)


def mismatch(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Mismatch:
    """The gap over all masked-in tokens of the batch, in double; an empty mask is equality."""
    gap = (masked(old_logp, mask).double() - masked(rollout_logp, mask).double()).detach()
    bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    count = Denominators.of((mask > 0).double()).tokens

    def mean(values: Tensor) -> float:
        return float(masked(values, mask).sum()) / max(count, 1.0)

    return Mismatch(
        mean_exp_abs=mean(torch.exp(bounded.abs())) if count else 1.0,
        max_abs_nats=float(gap.abs().max()) if gap.numel() else 0.0,
        kl_nats=mean(-gap),
        k3_nats=mean(torch.exp(bounded) - 1.0 - bounded),
        tokens=int(count),
    )
