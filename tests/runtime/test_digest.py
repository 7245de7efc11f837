"""The digest against its definition in whole numbers, for any box, stride and type; and the two ways to compute it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nereus.boxes import Box
from nereus.runtime import digest
from nereus.runtime.digest import MASK, box_digest, by_torch, prepare

prepare()  # compiling is slower than an example may be, and so are keys up to here
box_digest(torch.zeros(1, 1), Box((1 << 20, 1 << 20), ((1 << 20) + 1,) * 2))
DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def key(index: int, salt: int) -> int:
    """splitmix64's finaliser, from its definition, made odd."""
    mixed = ((index + 1) * 0x9E3779B97F4A7C15 & MASK) ^ salt
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return (mixed ^ mixed >> 31) | 1


def defined(bits: torch.Tensor, box: Box) -> int:
    """The sum over elements of row key, column key and bits, from its definition in whole numbers."""
    unsigned = (1 << 8 * bits.element_size()) - 1
    first_row, first_column = (0, *box.start)[-2:]
    rows = bits[None] if bits.dim() == 1 else bits
    return (
        sum(
            key(first_row + r, 0) * key(first_column + c, MASK) * (element & unsigned)
            for r, row in enumerate(rows.tolist())
            for c, element in enumerate(row)
        )
        & MASK
    )


@given(
    start=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=2),
    extent=st.tuples(st.integers(1, 11), st.integers(1, 21)),
    gap=st.integers(0, 5),
    offset=st.integers(0, 3),
    dtype=st.sampled_from(sorted(DTYPES, key=str)),
    seed=st.integers(0, 1 << 30),
)
def test_any_box_of_any_tensor(
    start: list[int], extent: tuple[int, int], gap: int, offset: int, dtype: torch.dtype, seed: int
) -> None:
    counts = extent[-len(start) :]
    box = Box(tuple(start), tuple(s + n for s, n in zip(start, counts, strict=True)))
    stride = counts[-1] + gap
    flat = torch.randn(offset + stride * extent[0], generator=torch.Generator().manual_seed(seed)).to(dtype)
    data = flat[offset:].view(-1, stride)[:, : counts[-1]]
    data = data if len(counts) == 2 else data[0]
    bits = data.view(DTYPES[dtype])
    expected = defined(bits, box)
    assert box_digest(data, box) == expected
    assert by_torch(data, box) == expected


def test_a_gpu_widens_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    data, box = torch.randn(9, 7), Box((3, 2), (12, 9))
    expected = defined(data.view(torch.int32), box)
    for elements in (1, 20, 1000):
        monkeypatch.setattr(digest, "TILE_ELEMENTS", elements)
        assert by_torch(data, box) == expected


def test_known_values() -> None:
    """Digests are in checkpoints and journals: they must not change."""
    data = (torch.arange(12, dtype=torch.float32).view(3, 4) + 1) / 3
    assert f"{box_digest(data, Box((5, 6), (8, 10))):016x}" == "2ae3ec5485e235e8"
    assert f"{box_digest(data.bfloat16()[0], Box((6,), (10,))):016x}" == "0dcb078e751153eb"


def test_rows_and_columns_are_told_apart() -> None:
    data, box = torch.randn(4, 4), Box((0, 0), (4, 4))
    others = data[[1, 0, 2, 3]], data[:, [0, 1, 3, 2]], data.T, -data
    assert len({box_digest(each, box) for each in (data, *others)}) == 5


def test_digests_add_and_notice_every_bit() -> None:
    data = torch.randn(9, 13)
    box = Box((4, 2), (13, 15))
    one = box_digest(data, box)
    halves = [(slice(0, 5), Box((4, 2), (9, 15))), (slice(5, 9), Box((9, 2), (13, 15)))]
    assert sum(box_digest(data[rows], part) for rows, part in halves) & MASK == one
    for bit in (0, 7, 31):
        flipped = data.clone()
        flipped.view(torch.int32)[8, 12] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
        assert box_digest(flipped, box) != one


@given(
    rows=st.integers(0, 9),
    width=st.integers(1, 40),
    cut=st.integers(0, 9),
    top=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_rows_add_however_they_are_cut(rows: int, width: int, cut: int, top: int, seed: int) -> None:
    data = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    shape, at, split = (top + rows, width), min(cut, rows), min(cut, width)
    expected = defined(data.view(torch.int32), Box((top, 0), shape))
    assert box_digest(data, Box((top, 0), shape)) == expected
    across = [(data[:at], Box((top, 0), (top + at, width))), (data[at:], Box((top + at, 0), shape))]
    down = [(data[:, :split], Box((top, 0), (shape[0], split))), (data[:, split:], Box((top, split), shape))]
    for parts in (across, down):
        assert sum(box_digest(part, box) for part, box in parts) & MASK == expected


def test_columns_that_are_not_adjacent() -> None:
    data = torch.randn(6, 7)
    box = Box((0, 0), (7, 6))
    assert box_digest(data.T, box) == box_digest(data.T.contiguous(), box)


def test_bytes_that_are_not_aligned() -> None:
    raw = torch.randint(0, 255, (1 + 4 * 24,), dtype=torch.uint8)
    whole = torch.frombuffer(bytearray(raw[1:].numpy().tobytes()), dtype=torch.float32)
    shifted = torch.frombuffer(memoryview(bytearray(raw.numpy().tobytes()))[1:], dtype=torch.float32)
    box = Box((0, 0), (4, 6))
    assert shifted.data_ptr() % 4 != whole.data_ptr() % 4
    assert box_digest(shifted.view(4, 6), box) == box_digest(whole.view(4, 6), box)
