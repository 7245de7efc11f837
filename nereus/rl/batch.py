"""Batches of padded samples, and how they are split over replicas and micro-batches.

The one alignment convention of `nereus.rl`: a row is prompt then response then padding, without gaps, and **position t
of every per-token tensor speaks of tokens[:, t + 1]**, the token that the model predicts at t. With prompt length p and
response length r (the response's eos included), the response tokens sit at p .. p+r-1, so the mask is 1 at
p-1 .. p+r-2, and

    logp[:, t]        log-probability of tokens[:, t + 1] given tokens[:, : t + 1]    (labels[:, t] == tokens[:, t + 1])
    values[:, t]      the critic's value of the state tokens[:, : t + 1], before tokens[:, t + 1] is chosen
    rewards, advantages, returns, mask[:, t]    those of choosing tokens[:, t + 1]

The last position never counts. Zero-weight rows are all padding, with lengths 0 and mask 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nereus.layout import micro_batch_rows
from nereus.rl.tokenizer import PAD_ID


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Samples as padded tensors; everything has the same n rows.

    tokens [n, S] int64; prompt_lengths, response_lengths [n] int64, in tokens; mask [n, S] float32 as above;
    columns: further tensors by name, each [n] or [n, S] (old_logp, advantages, groups, ...), split along with the rest.

    Example: prompt [257, 97], response [98, 258], S = 8: tokens [[257, 97, 98, 258, 256, 256, 256, 256]],
    mask [[0, 1, 1, 0, 0, 0, 0, 0]].
    """

    tokens: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    mask: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in self.columns.items():
            if tensor.shape[0] != self.rows:
                raise ValueError(f"column {name} has {tensor.shape[0]} rows, the batch has {self.rows}")

    @property
    def rows(self) -> int:
        """The number of samples n, zero-weight rows included."""
        return self.tokens.shape[0]

    @property
    def width_tokens(self) -> int:
        """The padded length S."""
        return self.tokens.shape[1]

    @property
    def labels(self) -> Tensor:
        """[n, S]: the token that each position predicts; the last column, which nothing predicts, is padding."""
        last = torch.full_like(self.tokens[:, :1], PAD_ID)
        return torch.cat([self.tokens[:, 1:], last], dim=1)

    def with_columns(self, **columns: Tensor) -> Batch:
        """The batch with these columns added or replaced. Errors: ValueError for another number of rows."""
        return replace(self, columns={**self.columns, **columns})

    def align(self, ragged: Sequence[Sequence[float]]) -> Tensor:
        """Per-response-token numbers (e.g. the engine's log-probabilities) as float32 [n, S], 0 elsewhere.

        Errors: ValueError when a row has another number of them than response tokens.
        """
        lengths = [len(row) for row in ragged]
        if lengths != self.response_lengths.tolist():
            raise ValueError(f"numbers a row {lengths} are not the response lengths {self.response_lengths.tolist()}")
        aligned = torch.zeros(self.tokens.shape, dtype=torch.float32)
        aligned[self.mask > 0] = torch.tensor([number for row in ragged for number in row], dtype=torch.float32)
        return aligned

    def ragged(self, aligned: Tensor) -> list[list[float]]:
        """The inverse of `align`: each row's numbers at its response tokens."""
        return [row[kept > 0].tolist() for row, kept in zip(aligned, self.mask, strict=True)]


def response_mask(prompt_lengths: Tensor, response_lengths: Tensor, width_tokens: int) -> Tensor:
    """The mask [n, S] float32 of the convention above; lengths are [n]."""
    position = torch.arange(width_tokens)[None, :]
    first = prompt_lengths[:, None] - 1
    return ((position >= first) & (position < first + response_lengths[:, None])).float()


def build(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    multiple_tokens: int = 8,
    width_tokens: int | None = None,
) -> Batch:
    """A batch of token id sequences, padded to `width_tokens`, or to the longest row rounded up to `multiple_tokens`.

    A response may be empty (the row then has no weight), a prompt may not.
    Errors: ValueError for an empty prompt, for different numbers of prompts and responses, or a row that does not fit.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses: they must be as many")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError(
            "a prompt is empty: it needs at least a bos token for its first response token to be predicted"
        )
    longest = max((len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)), default=1)
    width = width_tokens if width_tokens is not None else -(-longest // multiple_tokens) * multiple_tokens
    if longest > width:
        raise ValueError(f"a sample of {longest} tokens does not fit in width_tokens = {width}")
    tokens = torch.full((len(prompts), width), PAD_ID, dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response], dtype=torch.int64)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    response_lengths = torch.tensor([len(response) for response in responses], dtype=torch.int64)
    mask = response_mask(prompt_lengths, response_lengths, width)
    return Batch(tokens=tokens, prompt_lengths=prompt_lengths, response_lengths=response_lengths, mask=mask)


def over_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with `change` applied to each of its tensors, e.g. `lambda tensor: tensor.to(device)`."""
    return Batch(
        tokens=change(batch.tokens),
        prompt_lengths=change(batch.prompt_lengths),
        response_lengths=change(batch.response_lengths),
        mask=change(batch.mask),
        columns={name: change(tensor) for name, tensor in batch.columns.items()},
    )


def select(batch: Batch, rows: slice | Sequence[int]) -> Batch:
    """These rows of the batch, in this order."""
    index = rows if isinstance(rows, slice) else torch.tensor(list(rows), dtype=torch.int64)
    return over_tensors(batch, lambda tensor: tensor[index])


def split(batch: Batch, sizes: Sequence[int]) -> tuple[Batch, ...]:
    """Consecutive runs of rows: replica shares or mini-batches, of any sizes, 0 included.

    Errors: ValueError when the sizes are not the rows.
    """
    if sum(sizes) != batch.rows or any(size < 0 for size in sizes):
        raise ValueError(f"sizes {tuple(sizes)} do not add up to the batch's {batch.rows} rows")
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    return tuple(select(batch, slice(start, start + size)) for start, size in zip(starts, sizes, strict=True))


def pad_rows(batch: Batch, rows: int) -> Batch:
    """The batch with zero-weight rows appended up to `rows`: padding tokens, and 0 in everything else."""
    missing = rows - batch.rows
    if missing < 0:
        raise ValueError(f"a batch of {batch.rows} rows cannot be padded to {rows}")
    padded = over_tensors(batch, lambda tensor: torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]))
    padded.tokens[batch.rows :] = PAD_ID
    return padded


def micro_batches(share: Batch, most: int) -> tuple[Batch, ...]:
    """The share of one replica in micro-batches of at most `most` rows, all alike, the last padded with zero-weight rows.

    Their rows are `nereus.layout.micro_batch_rows`. A replica without samples gets one micro-batch of zero weight, so that
    it takes part in every collective. Errors: ValueError for fewer rows than 1.
    """
    if most < 1:
        raise ValueError(f"a micro-batch has at least 1 row, got {most}")
    rows = micro_batch_rows(share.rows, most)
    count = max(1, -(-share.rows // rows))
    return split(pad_rows(share, count * rows), [rows] * count)


def join_rows(parts: Sequence[Tensor], rows: int) -> Tensor:
    """Per-micro-batch results [rows of it, ...] as one tensor [rows, ...], the zero-weight rows at the end dropped."""
    return torch.cat(list(parts))[:rows]
