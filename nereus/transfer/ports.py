"""Balance: how divisible loads are spread over ports so that the busiest is as idle as possible, and a proof of it.

A *load* is an amount that any port of a set may carry in any division. Spreading each load so that the levels of its
ports are equal, load after load until nothing changes, minimises the sum of squares over all divisions; its minimum has
the least busiest port as well (lexicographically optimal bases: Fujishige 1980). The proof: whatever can only be carried
by the ports of a set bounds the busiest port of that set from below (the dual of the LP).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
SWEEPS = 60
SETTLED = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class Load:
    """`amount_bytes` that the `ports` may share in any division."""

    ports: Ints
    amount_bytes: float


def pour(levels: Floats, rates: Floats, amount: float) -> Floats:
    """The division of `amount` over ports that already carry `levels`: the least busiest seconds, all equal below.

    `levels` and the result in bytes, `rates` in bytes per second.
    """
    height = levels / rates
    surface = (amount + levels.sum()) / rates.sum()
    if surface > height.max():  # every port is below it
        return np.asarray(surface * rates - levels)
    order = np.argsort(height, kind="stable")
    height = height[order]
    depth = (amount + np.cumsum(levels[order])) / np.cumsum(rates[order])  # the surface if only the first k are used
    count = int(np.flatnonzero(depth > height)[-1]) + 1 if amount > 0 else 0
    poured = np.zeros(len(levels))
    if count:
        used = order[:count]
        poured[used] = np.maximum(depth[count - 1] * rates[used] - levels[used], 0.0)
        poured[used] *= amount / poured[used].sum()
    return poured


def spread(fixed: Floats, rates: Floats, loads: Sequence[Load]) -> list[Floats]:
    """The division of every load over its ports, given what the ports carry already (`fixed`, bytes)."""
    level = fixed.copy()
    shares = [np.zeros(len(load.ports)) for load in loads]
    order = sorted(range(len(loads)), key=lambda i: (len(loads[i].ports), -loads[i].amount_bytes, i))
    rate = [rates[load.ports] for load in loads]
    for _ in range(SWEEPS):
        change = 0.0
        for index in order:
            ports = loads[index].ports
            others = level[ports] - shares[index]
            new = pour(others, rate[index], loads[index].amount_bytes)
            change = max(change, float(np.abs(new - shares[index]).max()))
            shares[index] = new
            level[ports] = others + new
        if change <= SETTLED * max(float(level.max(initial=0.0)), 1.0):
            break
    return shares


def bound(fixed: Floats, rates: Floats, loads: Sequence[Load], level: Floats) -> tuple[float, float]:
    """(seconds, bytes) that the busiest port cannot go below, from a division's final `level` (bytes).

    For every threshold the ports at or above it carry at least their fixed bytes and every load that only they may
    carry, so one of them works at least the mean; the best threshold counts. Equal to the optimum at the optimum.
    """
    height = level / rates
    lowest = np.array([height[load.ports].min() for load in loads])
    amounts = np.array([load.amount_bytes for load in loads])
    ports = np.argsort(-height, kind="stable")
    load_order = np.argsort(-lowest, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(amounts[load_order])])
    inside = np.searchsorted(-lowest[load_order], -height[ports], side="right")
    last = np.append(height[ports][1:] < height[ports][:-1], True)  # only whole groups of equal height
    total = np.cumsum(fixed[ports]) + sums[inside]
    seconds = np.where(last, total / np.cumsum(rates[ports]), 0.0)
    most_fixed = float((fixed / rates).max(initial=0.0))
    best = max(float(seconds.max(initial=0.0)), most_fixed)
    return best, best * float(rates.max(initial=0.0))
