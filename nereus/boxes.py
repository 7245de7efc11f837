"""Axis-aligned ranges of a logical tensor: the coordinates in which every byte of state is named."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """A half-open range [start, stop) on every axis, in elements of the logical tensor.

    Example: Box((0, 64), (128, 128)) is the right half of rows 0..127 of a 128 x 128 matrix.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per axis, in elements."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        """How many elements the box holds."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when it is empty."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        return None if any(a >= b for a, b in zip(start, stop, strict=True)) else Box(start, stop)

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """Disjoint boxes that cover this box without `other`, at most two per axis."""
        common = self.intersect(other)
        if common is None:
            return (self,)
        rest: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for axis in range(len(start)):
            if start[axis] < common.start[axis]:
                edge = (*stop[:axis], common.start[axis], *stop[axis + 1 :])
                rest.append(Box(tuple(start), edge))
                start[axis] = common.start[axis]
            if common.stop[axis] < stop[axis]:
                edge = (*start[:axis], common.stop[axis], *start[axis + 1 :])
                rest.append(Box(edge, tuple(stop)))
                stop[axis] = common.stop[axis]
        return tuple(rest)

    def contains(self, other: Box) -> bool:
        """Whether `other` lies wholly inside."""
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """Index of this box within storage whose first element is `origin`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, origin, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    """The box that covers a tensor of this shape."""
    return Box((0,) * len(shape), shape)


def flat_boxes(box: Box, start: int, stop: int) -> tuple[tuple[int, Box], ...]:
    """Boxes of the elements [start, stop) of `box` flattened row-major, each with its flat offset; at most three.

    `box` has one or two axes: a part row, whole rows, a part row.
    """
    start, stop = max(start, 0), min(stop, box.elements)
    if start >= stop:
        return ()
    if len(box.start) == 1:
        origin = box.start[0]
        return ((start, Box((origin + start,), (origin + stop,))),)
    (row0, col0), width = box.start, box.shape[1]
    parts: list[tuple[int, Box]] = []
    while start < stop:
        row, col = divmod(start, width)
        rows = (stop - start) // width if col == 0 else 0
        if rows:
            taken, part = rows * width, Box((row0 + row, col0), (row0 + row + rows, col0 + width))
        else:
            taken = min(width - col, stop - start)
            part = Box((row0 + row, col0 + col), (row0 + row + 1, col0 + col + taken))
        parts.append((start, part))
        start += taken
    return tuple(parts)
