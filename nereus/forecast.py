"""Where a measured series goes: response length and memory over the steps, with uncertainty, and when a bound is passed.

The trend is Theil and Sen's: the median of the slopes between all pairs of the last WINDOW_STEPS points, through the
median of what is left. A fifth of wild values (one odd batch, an allocator's peak) does not move it far. Its deviation is
that of least squares with a robust spread, a little wider for what the medians lose.

`first_passing` says before it happens that a value will be above a bound: the first of the next steps at which that is so
with the confidence asked for. Errors are taken as normal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erf, sqrt
from statistics import median

LEAST_POINTS = 4
WINDOW_STEPS = 40
ROBUST = 1.4826
"""Deviation of a normal distribution over its median absolute deviation."""
EFFICIENCY = 0.9
"""Least squares' variance over the medians', for normal errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """A straight line through the end of a series, and how sure it is. Values are in the series' own unit.

    `value_mean` is the line's value `behind_steps` before the last point, the centre of the points' steps, where it is
    surest; `slope_mean` is per step. `spread_std` is a point's deviation from the line.
    """

    last_step: int
    behind_steps: float
    value_mean: float
    slope_mean: float
    value_std: float
    slope_std: float
    spread_std: float
    points_count: int

    def at(self, steps: float) -> tuple[float, float]:
        """(mean, deviation) of what will be measured `steps` after the last point."""
        away = self.behind_steps + steps
        variance = self.value_std**2 + (self.slope_std * away) ** 2 + self.spread_std**2
        return self.value_mean + self.slope_mean * away, sqrt(variance)

    def above(self, bound: float, steps: float) -> float:
        """The probability of more than `bound` that many steps after the last point."""
        mean, deviation = self.at(steps)
        if deviation <= 0:
            return 1.0 if mean > bound else 0.0
        return 0.5 * (1 + erf((mean - bound) / deviation / sqrt(2)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Passing:
    """A bound that will be passed: `in_steps` from the last point, with this probability, mean and deviation there."""

    in_steps: int
    confidence_share: float
    value_mean: float
    value_std: float


def trend(points: Sequence[tuple[int, float]]) -> Trend | None:
    """The trend of (step, value) points in any order; None for fewer than LEAST_POINTS different steps.

    A step measured twice counts with its last value.
    """
    series = sorted(dict(points).items())[-WINDOW_STEPS:]
    if len(series) < LEAST_POINTS:
        return None
    slope = median((b - a) / (t - s) for i, (s, a) in enumerate(series) for t, b in series[i + 1 :])
    centre = sum(step for step, _ in series) / len(series)
    level = median(value - slope * (step - centre) for step, value in series)
    off = [abs(value - level - slope * (step - centre)) for step, value in series]
    freedom = len(series) / (len(series) - 2)
    spread = ROBUST * median(off) * sqrt(freedom)
    width = sum((step - centre) ** 2 for step, _ in series)
    return Trend(
        last_step=series[-1][0],
        behind_steps=series[-1][0] - centre,
        value_mean=level,
        slope_mean=slope,
        value_std=spread / sqrt(len(series) * EFFICIENCY),
        slope_std=spread / sqrt(width * EFFICIENCY),
        spread_std=spread,
        points_count=len(series),
    )


def first_passing(
    line: Trend, bound: float | Callable[[int], float], *, steps: int, confidence_share: float = 0.9
) -> Passing | None:
    """The first of the next `steps` steps at which the value is above `bound` with that confidence, or None.

    A bound that moves is a function of the steps after the last point.
    """
    for ahead in range(1, steps + 1):
        probability = line.above(bound(ahead) if callable(bound) else bound, ahead)
        if probability >= confidence_share:
            mean, deviation = line.at(ahead)
            return Passing(in_steps=ahead, confidence_share=probability, value_mean=mean, value_std=deviation)
    return None
