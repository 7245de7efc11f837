"""What stands on a model's last hidden state: log-probabilities over a vocabulary cut by TP, and values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

_FAR_BELOW = -1e30  # a logit that no padding row can win with


class _LogProbability(torch.autograd.Function):
    """log softmax at the targets, and entropy, over logits whose last axis is cut over `group`."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:  # noqa: ANN001
        top = logits.max(dim=-1).values
        many = group.size() > 1
        if many:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - top[..., None]
        exp = shifted.exp()
        local = (targets - first).clamp(0, logits.shape[-1] - 1)
        mine = (targets >= first) & (targets < first + logits.shape[-1])
        at_target = shifted.gather(-1, local[..., None])[..., 0] * mine
        sums = torch.stack((exp.sum(-1), at_target, (exp * shifted).sum(-1)))
        if many:
            dist.all_reduce(sums, group=group)
        log_total = sums[0].log()
        entropy = log_total - sums[2] / sums[0]
        ctx.save_for_backward(shifted - log_total[..., None], local, mine, entropy)
        return sums[1] - log_total, entropy

    @staticmethod
    def backward(ctx, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        logp, local, mine, entropy = ctx.saved_tensors
        p = logp.exp()
        grad = -p * (grad_logp + grad_entropy * entropy)[..., None] - grad_entropy[..., None] * p * logp
        grad.scatter_add_(-1, local[..., None], (grad_logp * mine)[..., None])
        return grad, None, None, None


def log_probabilities(
    logits: Tensor, targets: Tensor, *, first: int, rows: int, temperature: float, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(log-probability of `targets`, entropy), each [samples, positions] float32.

    `logits` [samples, positions, local rows] holds vocabulary rows from `first`, of which the first `rows` are real and
    the rest padding that takes no probability and gets no gradient. d entropy / d z_j = -p_j (log p_j + entropy).
    """
    scaled = logits.float() / temperature
    if rows < logits.shape[-1]:
        padding = torch.arange(logits.shape[-1], device=logits.device) >= rows
        scaled = scaled.masked_fill(padding, _FAR_BELOW)
    return _LogProbability.apply(scaled, targets, first, group)  # type: ignore[return-value]


class ValueHead(nn.Linear):
    """A scalar head in the place of GPTModel's output layer, the same on every TP rank."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__(hidden, 1, bias=False, dtype=dtype)

    def forward(self, hidden_states: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):  # noqa: ANN201
        """([positions, samples, 1] float32, no bias): the signature that GPTModel calls."""
        return super().forward(hidden_states).float(), None
