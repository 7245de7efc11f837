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


def pour(levels: Floats, rates: Floats, amounts: Floats) -> Floats:
    """The division of each row's amount over ports that already carry `levels`: the least busiest seconds, all equal below.

    `levels` and the result [rows, ports] and `amounts` [rows] in bytes, `rates` [rows, ports] in bytes per second.
    """
    height = levels / rates
    surface = (amounts + levels.sum(axis=1)) / rates.sum(axis=1)
    poured = np.maximum(surface[:, None] * rates - levels, 0.0)
    some = np.flatnonzero(surface <= height.max(axis=1))  # of the others every port is below the surface
    if len(some):
        poured[some] = _poured_low(levels[some], rates[some], amounts[some], height[some])
    total = poured.sum(axis=1)  # a small amount beside large levels loses digits
    poured *= np.divide(amounts, total, out=np.zeros(len(total)), where=total > 0)[:, None]
    return poured


def _poured_low(levels: Floats, rates: Floats, amounts: Floats, height: Floats) -> Floats:
    """`pour` where ports at some `height` may stay above the surface."""
    order = np.argsort(height, axis=1, kind="stable")
    height, levels, rates = [np.take_along_axis(each, order, axis=1) for each in (height, levels, rates)]
    depth = (amounts[:, None] + np.cumsum(levels, axis=1)) / np.cumsum(rates, axis=1)  # if only the first k are used
    wet: npt.NDArray[np.bool_] = (depth > height) & (amounts > 0)[:, None]
    count: Ints = np.where(wet.any(axis=1), levels.shape[1] - np.argmax(wet[:, ::-1], axis=1), 0)
    surface = np.take_along_axis(depth, np.maximum(count - 1, 0)[:, None], axis=1)
    place: Ints = np.arange(levels.shape[1], dtype=np.int64)
    used = place < count[:, None]
    poured = np.empty_like(levels)
    np.put_along_axis(poured, order, np.where(used, np.maximum(surface * rates - levels, 0.0), 0.0), axis=1)
    return poured


@dataclass(frozen=True, kw_only=True, eq=False)
class _Turn:
    """Loads of as many ports each, none of them shared: `index` [loads] of the list, `ports` and `rates` [loads, ports]."""

    index: list[int]
    ports: Ints
    rates: Floats
    amounts: Floats


def _turns(loads: Sequence[Load], rates: Floats) -> list[_Turn]:
    """The loads, those with few ports first, then large ones; each after all before it that share a port with it."""
    order = sorted(range(len(loads)), key=lambda i: (len(loads[i].ports), -loads[i].amount_bytes, i))
    last = np.zeros(len(rates), dtype=np.int64)
    turns: dict[tuple[int, int], list[int]] = {}
    for index in order:
        ports = loads[index].ports
        turn = int(last[ports].max()) + 1
        last[ports] = turn
        turns.setdefault((turn, len(ports)), []).append(index)
    found: list[_Turn] = []
    for _, index in sorted(turns.items()):
        ports = np.stack([loads[i].ports for i in index])
        amounts = np.array([loads[i].amount_bytes for i in index])
        found.append(_Turn(index=index, ports=ports, rates=rates[ports], amounts=amounts))
    return found


def spread(fixed: Floats, rates: Floats, loads: Sequence[Load]) -> list[Floats]:
    """The division of every load over its ports, given what the ports carry already (`fixed`, bytes)."""
    level = fixed.copy()
    turns = _turns(loads, rates)
    shares = [np.zeros(turn.ports.shape) for turn in turns]
    for _ in range(SWEEPS):
        change = 0.0
        for at, turn in enumerate(turns):
            others = level[turn.ports] - shares[at]
            new = pour(others, turn.rates, turn.amounts)
            change = max(change, float(np.abs(new - shares[at]).max()))
            shares[at] = new
            level[turn.ports] = others + new
        if change <= SETTLED * max(float(level.max(initial=0.0)), 1.0):
            break
    found: list[Floats] = [np.zeros(0)] * len(loads)
    for turn, share in zip(turns, shares, strict=True):
        for index, row in zip(turn.index, share, strict=True):
            found[index] = row
    return found


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
