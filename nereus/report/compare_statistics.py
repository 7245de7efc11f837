"""How sure a compared number is: half widths of 95 % confidence intervals, from the steps of a run.

Steps are taken as independent. Where they are not, as in a run that changes its layout, the interval also holds what differs
between its spells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy.stats import t

CONFIDENCE = 0.95


def mean(values: Sequence[float]) -> float:
    """The mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def mean_half_width(values: Sequence[float]) -> float:
    """Of the mean of `values`, by Student's t; NaN for fewer than two."""
    count = len(values)
    return _quantile(count) * math.sqrt(_variance(values) / count) if count > 1 else math.nan


def ratio_of_sums_half_width(above: Sequence[float], below: Sequence[float]) -> float:
    """Of sum(above) / sum(below), pairs from the same steps, by linearisation (Cochran, Sampling Techniques, 2.11)."""
    count = len(above)
    if count < 2 or sum(below) <= 0:
        return math.nan
    ratio = sum(above) / sum(below)
    residuals = [one - ratio * other for one, other in zip(above, below, strict=True)]
    variance = sum(residual**2 for residual in residuals) / (count - 1)
    return _quantile(count) * math.sqrt(variance / count) / mean(below)


def ratio_of_means_half_width(above: Sequence[float], below: Sequence[float]) -> float:
    """Of mean(above) / mean(below), from different runs, by linearisation; degrees of freedom of the shorter one."""
    if min(len(above), len(below)) < 2 or mean(above) == 0 or mean(below) == 0:
        return math.nan
    relative_variances = (_variance(each) / len(each) / mean(each) ** 2 for each in (above, below))
    ratio = mean(above) / mean(below)
    return _quantile(min(len(above), len(below))) * abs(ratio) * math.sqrt(sum(relative_variances))


def _quantile(count: int) -> float:
    return float(t.ppf((1 + CONFIDENCE) / 2, count - 1))


def _variance(values: Sequence[float]) -> float:
    middle = mean(values)
    return sum((value - middle) ** 2 for value in values) / (len(values) - 1)
