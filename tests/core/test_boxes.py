"""Boxes against sets of indices, written from the definition."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.boxes import Box, flat_boxes, whole

Index = tuple[int, ...]


@st.composite
def boxes(draw: st.DrawFn, axes: int, least: int = 0) -> Box:
    start = draw(st.tuples(*[st.integers(0, 5)] * axes))
    return Box(start, tuple(a + draw(st.integers(least, 4)) for a in start))


pairs = st.integers(1, 3).flatmap(lambda axes: st.tuples(boxes(axes), boxes(axes)))


def indices(box: Box) -> set[Index]:
    """The elements: every index with start <= i < stop on every axis."""
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@given(pairs)
def test_elements_and_intersection(pair: tuple[Box, Box]) -> None:
    one, other = pair
    assert one.elements == len(indices(one))
    common = one.intersect(other)
    assert (set() if common is None else indices(common)) == indices(one) & indices(other)
    assert common is None or common.elements > 0


@given(pairs)
def test_subtraction_leaves_disjoint_boxes_of_the_rest(pair: tuple[Box, Box]) -> None:
    one, other = pair
    rest = one.subtract(other)
    elements = [index for box in rest for index in indices(box)]
    assert len(elements) == len(set(elements))
    assert set(elements) == indices(one) - indices(other)
    assert len(rest) <= max(1, 2 * len(one.start))


@given(st.integers(1, 3).flatmap(lambda axes: st.tuples(boxes(axes, 1), boxes(axes, 1))))
def test_containment(pair: tuple[Box, Box]) -> None:
    assert pair[0].contains(pair[1]) == (indices(pair[1]) <= indices(pair[0]))


@given(st.integers(1, 3).flatmap(lambda axes: boxes(axes, 1)), st.data())
def test_slices_index_storage_that_begins_at_origin(box: Box, data: st.DataObject) -> None:
    origin = tuple(data.draw(st.integers(0, a)) for a in box.start)
    storage = {index: tuple(i - o for i, o in zip(index, origin, strict=True)) for index in indices(box)}
    there = set(product(*(range(s.start, s.stop) for s in box.slices(origin))))
    assert there == set(storage.values())


def test_whole() -> None:
    assert whole((2, 3)) == Box((0, 0), (2, 3))
    assert whole((7,)).elements == 7


@settings(max_examples=300)
@given(st.integers(1, 2).flatmap(lambda axes: boxes(axes, 1)), st.integers(-3, 20), st.integers(-3, 20))
def test_flat_boxes_are_the_flat_range(box: Box, start: int, stop: int) -> None:
    flat = sorted(indices(box))  # row-major order is the order of tuples
    found = flat_boxes(box, start, stop)
    assert len(found) <= 3
    place: dict[Index, int] = {}
    for offset, part in found:
        assert box.contains(part)
        for n, index in enumerate(sorted(indices(part))):
            assert index not in place
            place[index] = offset + n
    assert place == {index: n for n, index in enumerate(flat) if start <= n < stop}
    assert [offset for offset, _ in found] == sorted(offset for offset, _ in found)


def test_flat_boxes_of_a_large_matrix() -> None:
    box = Box((8, 0), (16, 128))
    parts = flat_boxes(box, 100, 700)
    assert [(o, p.elements) for o, p in parts] == [(100, 28), (128, 512), (640, 60)]
    ids = np.arange(16 * 128).reshape(16, 128)
    origin = (0, 0)
    got = np.concatenate([ids[p.slices(origin)].ravel() for _, p in parts])
    assert (got == ids[8:].ravel()[100:700]).all()
