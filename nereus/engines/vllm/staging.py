"""Offers a slot's own slice of a weight to vLLM inside an otherwise unfilled tensor of the full shape.

vLLM's loaders take full Hugging Face tensors and read the TP rank's slice of each, so nothing else needs to be there
(facts/engines.md 8.2). A slice of rows lies in fresh memory whose other pages are never touched; a slice of columns
in a buffer of its own size whose rows overlap (`as_strided`).
"""

from __future__ import annotations

import torch

WeightSlice = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]
"""(Hugging Face name, full shape, start of the own box in it, the own box's data)."""


def offer(weight: WeightSlice, *, poison: bool, keep: bool) -> torch.Tensor:
    """A tensor of the full shape and the data's dtype that has the own slice in its place.

    `poison` fills all else with NaN. `keep` promises that the result does not share memory with the data. ValueError
    where the box is not one run of rows or of columns, or does not lie within the full shape.
    """
    name, full_shape, start, data = weight
    whole_axes = [size == full for size, full in zip(data.shape, full_shape, strict=True)]
    if any(first < 0 or first + size > full for first, size, full in zip(start, data.shape, full_shape, strict=True)):
        raise ValueError(f"{name}: box {tuple(data.shape)} at {start} does not lie within {full_shape}")
    if all(whole_axes):
        return data.clone() if keep else data
    if all(whole_axes[1:]):
        return _rows(full_shape, start[0], data, poison=poison)
    if len(full_shape) == 2 and whole_axes[0]:
        return _columns(full_shape, start[1], data, poison=poison)
    raise ValueError(f"{name}: box {tuple(data.shape)} of {full_shape} is neither a run of rows nor of columns")


def _rows(full_shape: tuple[int, ...], first: int, data: torch.Tensor, *, poison: bool) -> torch.Tensor:
    full = torch.empty(full_shape, dtype=data.dtype, device=data.device)
    if poison:
        full.fill_(torch.nan)
    full[first : first + data.shape[0]] = data
    return full


def _columns(full_shape: tuple[int, ...], first: int, data: torch.Tensor, *, poison: bool) -> torch.Tensor:
    rows, width = data.shape
    if poison or first % width:
        full = torch.full(full_shape, torch.nan, dtype=data.dtype, device=data.device)
        full[:, first : first + width] = data
        return full
    before, after = first // width, full_shape[1] // width - first // width - 1
    compact = torch.empty((before + rows + after, width), dtype=data.dtype, device=data.device)
    compact[before : before + rows] = data
    return compact.as_strided(full_shape, (width, 1))
