"""Forward and training steps of a model-stage's part: Megatron's own schedules over the replica's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_expert_tensor_and_model_parallel_group
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from nereus.engines.megatron.engine import TrainEngine
from nereus.engines.megatron.heads import log_probabilities
from nereus.rl.batch import Batch, join_rows, micro_batches, pad_rows

Outputs = dict[str, Tensor]
Loss = Callable[[Outputs, Batch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """One optimizer step: the replica's part of summable metrics (output slot only) and the global gradient norm."""

    metrics: dict[str, float]
    grad_norm: float


def _outputs(engine: TrainEngine, raw: Tensor, batch: Batch, temperature: float) -> Outputs:
    """What a head says at every position, [rows, S]: values, or log-probabilities of the labels and entropy."""
    if engine.spec.head != "language":
        return {"values": raw[..., 0]}
    first, rows = engine.vocab_range()
    group = engine.groups.tensor_group()
    logp, entropy = log_probabilities(raw, batch.labels, first=first, rows=rows, temperature=temperature, group=group)
    return {"logp": logp, "entropy": entropy}


def _schedule(
    engine: TrainEngine, parts: Sequence[Batch], temperature: float, loss: Loss | None
) -> list[Outputs] | list[dict[str, Tensor]]:
    """Runs Megatron's pipeline schedule over the parts; with `loss` None forward only. Last pipeline rank gets results."""

    def forward_step(parts_left: Iterator[Batch], model: torch.nn.Module, *_: object):  # noqa: ANN202
        part = next(parts_left)
        positions = torch.arange(part.width_tokens, device=part.tokens.device).expand_as(part.tokens)
        raw = model(part.tokens, positions, None)

        def collect(output: Tensor, non_loss_data: bool = False):  # noqa: ANN202
            outputs = _outputs(engine, output, part, temperature)
            if non_loss_data or loss is None:
                return outputs
            value, metrics = loss(outputs, part)
            return value, torch.tensor(1, dtype=torch.int), metrics

        return raw, collect

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(parts),
        model=[engine.model],
        num_microbatches=len(parts),
        seq_length=parts[0].width_tokens,
        micro_batch_size=parts[0].rows,
        forward_only=loss is None,
        collect_non_loss_data=loss is None,
    )


def _parts(engine: TrainEngine, share: Batch, micro_batch: int) -> tuple[Batch, ...]:
    """The replica's micro-batches; replicas that share out experts run as many as the one with most samples.

    Each layer with experts is an exchange among all ranks over which experts are spread and cut, so none of them may be
    without a micro-batch.
    """
    if engine.stage.layout.ep > 1:
        most = torch.tensor(share.rows, device=share.tokens.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=get_expert_tensor_and_model_parallel_group())
        share = pad_rows(share, int(most))
    return micro_batches(share, micro_batch)


def forward(engine: TrainEngine, share: Batch, *, micro_batch: int, temperature: float) -> Outputs | None:
    """Outputs [share.rows, S] of a replica's share on its output slot, None elsewhere. Collective in the stage."""
    with engine.inside(), torch.no_grad():
        parts = _parts(engine, share, micro_batch)
        engine.module.eval()
        found = _schedule(engine, parts, temperature, None)
        engine.module.train()
    if not engine.last_stage or engine.at.tp:
        return None
    return {name: join_rows([part[name] for part in found], share.rows) for name in found[0]}


def train(
    engine: TrainEngine, share: Batch, *, micro_batch: int, temperature: float, loss: Loss, lr: float
) -> TrainResult:
    """One optimizer step on a replica's share; `loss` divides by global denominators, so sums are all there is.

    A replica without samples runs one micro-batch of zero weight and takes part in every collective.
    """
    optimizer = engine.optimizer
    if optimizer is None:
        raise ValueError(f"{engine.spec.name} has no optimizer: it is an inference-only stage")
    with engine.inside():
        parts = _parts(engine, share, micro_batch)
        engine.model.zero_grad_buffer()
        optimizer.zero_grad()
        found = _schedule(engine, parts, temperature, loss)
        for group in optimizer.param_groups:
            group["lr"] = lr
        _, grad_norm, _ = optimizer.step()
    metrics: dict[str, float] = {}
    if engine.last_stage and engine.at.tp == 0:
        metrics = {name: float(sum(part[name] for part in found)) for name in found[0]}
    return TrainResult(metrics=metrics, grad_norm=float(grad_norm))
