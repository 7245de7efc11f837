"""The best switching sequence in hindsight, by dynamic programming over (step, plan)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def best_in_hindsight(seconds: Array, prices: Array, first: int) -> tuple[float, list[int]]:
    """Least total of steps and prices, and its plans.

    `seconds` [step, plan] is inf where a plan cannot run the step, `prices` [from, to] is paid before a step; the run
    starts in `first` and may change before its first step. ValueError when no sequence runs every step.
    """
    steps, plans = seconds.shape
    prices = prices.copy()
    np.fill_diagonal(prices, 0.0)
    # one change may be cheaper over a third plan: closed under composition, so that one change a step is enough
    for over in range(plans):
        prices = np.minimum(prices, prices[:, over, None] + prices[None, over, :])
    best = np.full(plans, np.inf)
    best[first] = 0.0
    came_from = np.zeros((steps, plans), dtype=np.int64)
    for step in range(steps):
        reach = best[:, None] + prices
        came_from[step] = reach.argmin(axis=0)
        best = reach.min(axis=0) + seconds[step]
    if not np.isfinite(best).any():
        raise ValueError("no sequence of plans runs every step")
    path = [int(best.argmin())]
    for step in range(steps - 1, 0, -1):
        path.append(int(came_from[step, path[-1]]))
    return float(best.min()), path[::-1]
