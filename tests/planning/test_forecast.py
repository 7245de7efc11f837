"""Trends of a series: exact on a line, steady under wild values, honest about its own uncertainty."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.forecast import LEAST_POINTS, first_passing, trend

numbers = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


@given(level=numbers, slope=numbers, first=st.integers(0, 1000), count=st.integers(LEAST_POINTS, 60))
def test_a_straight_line_is_found_and_goes_on(level: float, slope: float, first: int, count: int) -> None:
    points = [(first + i, level + slope * i) for i in range(count)]
    line = trend(points)
    assert line is not None
    mean, deviation = line.at(7)
    scale = abs(level) + abs(slope) * (count + 7) + 1
    assert mean == pytest.approx(level + slope * (count - 1 + 7), abs=1e-6 * scale)
    assert deviation <= 1e-6 * scale


@given(values=st.lists(numbers, min_size=LEAST_POINTS, max_size=30), shift=numbers, factor=st.floats(0.1, 100))
def test_another_unit_or_zero_changes_nothing_else(values: list[float], shift: float, factor: float) -> None:
    plain, moved = trend(list(enumerate(values))), trend([(i, shift + factor * v) for i, v in enumerate(values)])
    assert plain is not None
    assert moved is not None
    scale = factor * (max(map(abs, values)) + 1) + abs(shift)
    assert moved.at(3)[0] == pytest.approx(shift + factor * plain.at(3)[0], abs=1e-6 * scale)
    assert moved.at(3)[1] == pytest.approx(factor * plain.at(3)[1], abs=1e-6 * scale)


@given(seed=st.integers(0, 10_000))
def test_a_fifth_of_wild_values_does_not_move_the_forecast_far(seed: int) -> None:
    rng = random.Random(seed)
    points = [(i, 1000 + 10 * i + rng.gauss(0, 5)) for i in range(30)]
    wild = [(i, v * 20 if i % 5 == 2 else v) for i, v in points]
    line = trend(wild)
    assert line is not None
    assert line.at(10)[0] == pytest.approx(1390, rel=0.05)


def test_the_deviation_covers_what_comes() -> None:
    rng = random.Random(1)
    inside = total = 0
    for _ in range(400):
        slope = rng.uniform(-3, 3)
        series = [(i, slope * i + rng.gauss(0, 4)) for i in range(25)]
        line = trend(series[:20])
        assert line is not None
        mean, deviation = line.at(5)
        inside += abs(series[24][1] - mean) <= 2 * deviation
        total += 1
    assert 0.88 <= inside / total <= 0.995


@given(bound=st.floats(1100, 5000), confidence=st.floats(0.55, 0.99))
def test_a_growing_series_is_said_to_pass_in_time_and_not_at_once(bound: float, confidence: float) -> None:
    rng = random.Random(7)
    line = trend([(i, 500 + 20 * i + rng.gauss(0, 10)) for i in range(20)])
    assert line is not None
    passing = first_passing(line, bound, steps=300, confidence_share=confidence)
    assert passing is not None
    true_steps = (bound - 500) / 20 - 19
    assert abs(passing.in_steps - true_steps) <= 4 + 0.2 * true_steps
    assert line.above(bound, passing.in_steps - 1) < confidence <= passing.confidence_share
    later = first_passing(line, bound + 100, steps=300, confidence_share=confidence)
    assert later is not None
    assert later.in_steps >= passing.in_steps


def test_a_steady_series_passes_nothing_and_few_points_say_nothing() -> None:
    rng = random.Random(3)
    line = trend([(i, 100 + rng.gauss(0, 1)) for i in range(30)])
    assert line is not None
    assert first_passing(line, 120, steps=50) is None
    assert trend([(1, 1.0), (2, 2.0), (3, 3.0)]) is None
    assert trend([(1, 5.0)] * 10) is None
