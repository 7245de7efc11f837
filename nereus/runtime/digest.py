"""Digests of state that add over disjoint boxes, so that any layout of the same state has the same digest.

Of a tensor: the sum mod 2^64 over its elements of mix(canonical index, bits); mix is the finaliser of splitmix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") applied to (index + 1) * golden ratio ^ bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.boxes import Box


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
MASK = (1 << 64) - 1


def prepare() -> None:
    """Compiles, or loads what was compiled, so that the first digest does not wait for it; does nothing where CUDA is."""
    if not torch.cuda.is_available():
        from nereus.runtime import digest_kernel  # noqa: F401


def box_digest(data: Tensor, box: Box, full_shape: tuple[int, ...]) -> int:
    """Digest of `data`, the elements of `box` of a tensor of `full_shape` (one or two axes); 0 <= digest < 2^64.

    On a CPU `data` may have any row stride: it is read once, where it is; columns that are not adjacent are copied first.
    """
    bits = data.detach().view(torch.int16 if data.element_size() == 2 else torch.int32)
    if data.device.type != "cpu":
        return by_torch(bits, box, full_shape)
    from nereus.runtime.digest_kernel import mixed_sum

    if bits.data_ptr() % bits.element_size() or bits.stride(-1) != 1:
        bits = bits.clone(memory_format=torch.contiguous_format)  # bytes in the middle of a file, or columns apart
    rows = bits if len(full_shape) == 2 else bits[None]
    count, columns = rows.shape
    if not rows.numel():
        return 0
    stride = rows.stride(0) if count > 1 else columns
    flat = rows.as_strided(((count - 1) * stride + columns,), (1,))
    width = full_shape[-1]
    first = box.start[0] * width + box.start[1] if len(full_shape) == 2 else box.start[0]
    return int(mixed_sum(flat.numpy(), count, columns, stride, first, width))


def by_torch(bits: Tensor, box: Box, full_shape: tuple[int, ...]) -> int:
    """The same of int16 or int32 `bits` with torch's operations, for a GPU."""
    index = torch.arange(box.start[-1], box.stop[-1], dtype=torch.int64, device=bits.device)
    if len(full_shape) == 2:
        rows = torch.arange(box.start[0], box.stop[0], dtype=torch.int64, device=bits.device)
        index = rows[:, None] * full_shape[1] + index[None, :]
    mixed = (index + 1).mul_(_GOLDEN).bitwise_xor_(bits)
    mixed.bitwise_xor_(_shift_right(mixed, 30)).mul_(_FIRST)
    mixed.bitwise_xor_(_shift_right(mixed, 27)).mul_(_SECOND)
    mixed.bitwise_xor_(_shift_right(mixed, 31))
    return int(mixed.sum().item()) & MASK


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch shifts arithmetically)."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)
