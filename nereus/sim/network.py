"""Links that flows share fairly: at every moment rates are max-min fair, so no flow can be faster without a slower one paying.

A flow goes over some resources (ports, PCIe, host memory) at once, at one rate; a resource's rates sum to its capacity at
most. Rates are worked out anew whenever flows begin or end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import simpy

MOST_LEGS = 4
DONE_SHARE = 1e-12
"""A flow is over when so little of it is left."""
SAME_SHARE = 1e-12

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def fair_rates(legs: Ints, capacity: Floats) -> Floats:
    """[flows] max-min fair bytes per second. `legs` [flows, legs] are numbers of resources, -1 for none.

    A resource whose equal share is the least that each of its flows finds anywhere is filled; then the others share what
    is left.
    """
    columns = legs.shape[1]
    while columns and not (legs[:, columns - 1] >= 0).any():
        columns -= 1  # what is none comes last
    rates = np.zeros(len(legs))
    left = np.concatenate([[np.inf], capacity])  # the first one stands for none
    mine = np.ascontiguousarray(legs[:, :columns].T) + 1  # [legs, flows]: numpy is slow over short rows
    waiting = np.arange(len(legs) if columns else 0)
    while len(waiting):
        count = np.bincount(mine.ravel(), minlength=len(left))
        count[0] = 0
        shares = np.full(len(left), np.inf)
        np.divide(np.maximum(left, 0.0), count, out=shares, where=count > 0)
        share = shares[mine]
        least = share.min(axis=0)
        tight = (share <= least * (1 + SAME_SHARE)) & (mine > 0)
        full = (count > 0) & (np.bincount(mine[tight], minlength=len(left)) == count)
        fixed = (tight & full[mine]).any(axis=0)
        now, after = np.flatnonzero(fixed), np.flatnonzero(~fixed)
        rates[waiting[now]] = least[now]
        left -= np.bincount(mine[:, now].T.ravel(), np.repeat(least[now], columns), len(left))
        waiting, mine = waiting[after], mine[:, after]
    return rates


class Network:
    """Resources by number, and the flows over them.

    With `together_seconds` above 0 flows that begin or end within so much of each other do so at once, which spares
    working out rates for each of ten thousands: the times of flows are rounded to that.
    """

    def __init__(self, env: simpy.Environment, *, together_seconds: float = 0.0) -> None:
        self.env, self.together_seconds = env, together_seconds
        self._number: dict[int, int] = {}
        self._capacity: list[float] = []
        self._capacities: Floats | None = None  # the same as an array, until one changes
        self._legs = np.zeros((0, MOST_LEGS), dtype=np.int64)
        self._left = np.zeros(0)
        self._size = np.zeros(0)
        self._rates = np.zeros(0)
        self._flows: list[simpy.Event] = []
        self._fresh: list[tuple[list[int], float, simpy.Event]] = []
        self._then = env.now
        self._asked = False
        self._turn = 0

    def flow(self, legs: Sequence[tuple[int, float]], size_bytes: float) -> simpy.Event:
        """Begins a flow over (resource, bytes per second); the event comes when it is over.

        A resource has the largest rate that it was ever told to have.
        """
        done = self.env.event()
        numbers: list[int] = []
        for resource, rate in legs:
            number = self._number.get(resource)
            if number is None:
                number = self._number[resource] = len(self._number)
                self._capacity.append(0.0)
            if rate > self._capacity[number]:
                self._capacity[number], self._capacities = rate, None
            numbers.append(number)
        if size_bytes <= 0 or not numbers:
            return done.succeed()
        self._fresh.append((numbers, float(size_bytes), done))
        self._ask()
        return done

    def stop(self, flow: simpy.Event) -> None:
        """Ends a flow that is not over; its event never comes."""
        self._fresh = [entry for entry in self._fresh if entry[2] is not flow]
        if flow in self._flows:
            self._advance()
            self._keep(np.array([other is not flow for other in self._flows]))
            self._ask()

    @property
    def flows_count(self) -> int:
        """Flows under way."""
        return len(self._flows) + len(self._fresh)

    def _ask(self) -> None:
        """Rates are worked out once for all that happens at this moment."""
        if not self._asked:
            self._asked = True
            self.env.timeout(self.together_seconds).callbacks.append(self._settle)  # type: ignore[union-attr]

    def _settle(self, _: object = None) -> None:
        self._asked = False
        self._advance()
        if self._fresh:
            legs = np.full((len(self._fresh), MOST_LEGS), -1, dtype=np.int64)
            for row, (numbers, _, _) in enumerate(self._fresh):
                legs[row, : len(numbers)] = numbers
            sizes = np.array([size for _, size, _ in self._fresh])
            self._legs = np.concatenate([self._legs, legs])
            self._left, self._size = np.concatenate([self._left, sizes]), np.concatenate([self._size, sizes])
            self._flows += [done for _, _, done in self._fresh]
            self._fresh = []
        if self._capacities is None:
            self._capacities = np.array(self._capacity)
        self._rates = fair_rates(self._legs, self._capacities)
        self._turn += 1
        if self._flows:
            wait = float((self._left / self._rates).min())
            wake = self.env.timeout(max(wait, 0.0), value=self._turn)
            wake.callbacks.append(self._wake)  # type: ignore[union-attr]

    def _wake(self, event: simpy.Event) -> None:
        if event.value != self._turn:
            return  # rates have changed since
        self._advance()
        over = self._left <= DONE_SHARE * self._size + self._rates * (np.spacing(self.env.now) * 4)
        if self.together_seconds:
            over |= self._left <= self._rates * self.together_seconds
        if not over.any():
            over[int(np.argmin(self._left / self._rates))] = True
        ended = [flow for flow, done in zip(self._flows, over, strict=True) if done]
        self._keep(~over)
        for flow in ended:
            flow.succeed()
        self._ask()

    def _advance(self) -> None:
        if len(self._flows) == len(self._rates):
            self._left = self._left - self._rates * (self.env.now - self._then)
        self._then = self.env.now

    def _keep(self, kept: npt.NDArray[np.bool_]) -> None:
        self._legs, self._left, self._size = self._legs[kept], self._left[kept], self._size[kept]
        self._rates = self._rates[kept]
        self._flows = [flow for flow, stays in zip(self._flows, kept, strict=True) if stays]
