"""Digests of state that add over disjoint boxes, so that any layout of the same state has the same digest.

Of a tensor: the sum mod 2^64 over its elements of row key * column key * bits (unsigned). A key is an odd number of 64 bits,
the finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") of the element's row
or column; a tensor of one axis is one row. It is multilinear hashing (Lemire, Kaser 2014, "Strongly universal string hashing
is fast"), whose keys are products so that they cost nothing in memory.

Odd keys notice every change of one element. Changes of several that know nothing of the keys cancel in at most 64 - b of
2^(63 - b) cases, b the lowest bit that any of them changes: at worst, of signs alone, once in 10^8.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nereus.boxes import Box

MASK = (1 << 64) - 1
TILE_ELEMENTS = 4 << 20
"""How many elements of 8 bytes a GPU's digest works on at once."""


class _Keys:
    """Odd pseudo-random numbers by index, kept as far as they were asked for. `salt` tells rows from columns."""

    def __init__(self, salt: int) -> None:
        self._salt, self._made = np.uint64(salt), np.empty(0, np.uint64)
        self._on_devices: dict[torch.device, Tensor] = {}

    def up_to(self, stop: int) -> NDArray[np.uint64]:
        """Those of [0, stop) and perhaps more."""
        if self._made.size < stop:
            mixed = (
                np.arange(1, (1 << stop.bit_length()) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ self._salt
            )
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
            self._made = mixed ^ mixed >> np.uint64(31) | np.uint64(1)
        return self._made

    def between(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Those of [start, stop) on a device, as int64 of the same bits."""
        there = self._on_devices.get(device)
        if there is None or there.numel() < stop:
            there = self._on_devices[device] = torch.from_numpy(self.up_to(stop).view(np.int64)).to(device)
        return there[start:stop]


_ROWS, _COLUMNS = _Keys(0), _Keys(MASK)


def prepare() -> None:
    """Compiles, or loads what was compiled, so that the first digest does not wait for it; does nothing where CUDA is."""
    if not torch.cuda.is_available():
        from nereus.runtime import digest_kernel  # noqa: F401


def box_digest(data: Tensor, box: Box) -> int:
    """Digest of `data`, the elements of `box` of a tensor of one or two axes; 0 <= digest < 2^64.

    On a CPU `data` may have any row stride: it is read once, where it is; columns that are not adjacent are copied first.
    """
    if data.device.type != "cpu":
        return by_torch(data, box)
    from nereus.runtime.digest_kernel import key_sum

    item_bytes = data.element_size()
    bits = data.detach().view(torch.uint32 if item_bytes == 4 else torch.uint16)
    if bits.data_ptr() % item_bytes or bits.stride(-1) != 1:
        bits = bits.clone(memory_format=torch.contiguous_format)  # bytes in the middle of a file, or columns apart
    columns = bits.shape[-1]
    rows, stride = (bits.shape[0], bits.stride(0)) if bits.dim() == 2 else (1, columns)
    if not rows or not columns:
        return 0
    flat = bits.as_strided(((rows - 1) * stride + columns,), (1,)).numpy()
    (row_start, row_stop), (start, stop) = _ranges(box)
    return int(key_sum(flat, stride, _ROWS.up_to(row_stop), row_start, row_stop, _COLUMNS.up_to(stop), start, stop))


def _ranges(box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
    """First row and the one after the last, and so for columns; a tensor of one axis is one row."""
    if len(box.start) == 1:
        return (0, 1), (box.start[0], box.stop[0])
    return (box.start[0], box.stop[0]), (box.start[1], box.stop[1])


def by_torch(data: Tensor, box: Box) -> int:
    """The same with torch's operations, for a GPU: rows by rows, so that at most TILE_ELEMENTS (or a row) are widened."""
    bits = data.detach().view(torch.int16 if data.element_size() == 2 else torch.int32)
    rows = bits if bits.dim() == 2 else bits[None]
    of_rows, of_columns = _ranges(box)
    row_keys, column_keys = _ROWS.between(*of_rows, data.device), _COLUMNS.between(*of_columns, data.device)
    mask = (1 << 8 * data.element_size()) - 1
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    step = max(TILE_ELEMENTS // max(rows.shape[1], 1), 1)
    for tile, keys in zip(rows.split(step), row_keys.split(step), strict=True):
        sums = tile.to(torch.int64).bitwise_and_(mask).mul_(column_keys).sum(1)
        total += sums.mul_(keys).sum()
    return int(total.item()) & MASK
