"""The best that could have been done, known afterwards: plans and changes whose times have come true, in the least time.

A dynamic program over steps and plans. A state is a plan that is live at a moment, in a span of time in which none of its
slots leaves; of two ways into the same state the earlier is as good, for whoever is early may wait. It shares nothing with
the simulated world: what steps and changes take, it is told.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Protocol

import numpy as np
import numpy.typing as npt

WAITED_MOMENTS = 3
"""A change may wait for so many changes of the fleet."""
HOPS = 2
"""So many changes may follow each other between two steps."""
PlanIndex = int
MomentIndex = int
State = tuple[PlanIndex, int]  # plan, and which of its spans
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The fleet over time: moment i begins at `at_seconds[i]` (ascending, the first at 0) with the slots `present[i]`."""

    at_seconds: tuple[float, ...]
    present: tuple[frozenset[int], ...]

    def index_at(self, seconds: float) -> int:
        """The moment that lasts then."""
        return bisect_right(self.at_seconds, seconds) - 1

    def spans(self, slots: frozenset[int]) -> tuple[tuple[float, float], ...]:
        """[begin, end) of the times in which all these slots are there without a break."""
        found: list[tuple[float, float]] = []
        for at, there in zip(self.at_seconds, self.present, strict=True):
            whole = slots <= there
            opened = bool(found) and found[-1][1] == inf
            if whole and not opened:
                found.append((at, inf))
            elif not whole and opened:
                found[-1] = (found[-1][0], at)
        return tuple(found)

    def kept(self, slots: frozenset[int], begin: float, end: float) -> frozenset[int]:
        """Those of the slots that were there at each time from begin to end."""
        for index in range(self.index_at(begin), self.index_at(end) + 1):
            slots = slots & self.present[index]
        return slots


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """A change: from which plan to which, in which moment of the fleet, with which slots that still hold their state."""

    before: PlanIndex
    after: PlanIndex
    moment: MomentIndex
    holders: frozenset[int]


Charged = tuple[Edge, float]  # with its seconds


class Prices(Protocol):
    """What changes take. `seconds` is what they are charged, or while that is not known a bound that is not above it."""

    def least(self, before: int, after: int) -> float:
        """Not above `seconds` of any change between these plans."""
        ...

    def seconds(self, edge: Edge) -> float:
        """What is known of the change's time."""
        ...

    def charge(self, edge: Edge) -> bool:
        """Finds out what the change takes; False if that was known."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """A step of the best path: its plan, when it began and ended, and the changes right before it with their seconds."""

    step: int
    plan: PlanIndex
    began_seconds: float
    ended_seconds: float
    changes: tuple[Charged, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """How a state was reached: when, from which one, by a change or by a step that began then."""

    at_seconds: float
    before: _Way | None
    state: State
    edge: Edge | None = None
    edge_seconds: float = 0.0
    began_seconds: float = -1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class _Standing:
    """The states whose plans have all their slots at a moment: their plans, their numbers among all states, until when."""

    states: tuple[State, ...]
    plans: Ints
    numbers: Ints
    ends: Floats


class _Ways(dict[State, _Way]):
    """The earliest way into each state, and [states] when it is there; infinite for one that is not reached."""

    def __init__(self, number: dict[State, int]) -> None:
        super().__init__()
        self.number = number
        self.at_seconds = np.full(len(number), inf)

    def put(self, way: _Way) -> None:
        """Replaces what was known of its state."""
        self[way.state] = way
        self.at_seconds[self.number[way.state]] = way.at_seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """The question. `slots[i]` are those of plan i; `step_seconds(plan, step, moment)` is infinite for what cannot run.

    It begins in one of the plans `first`, at 0, and ends after `steps` steps. With `free` changes take no time. States that are
    `most_behind_seconds` behind the earliest after the same step are given up: more than any change would take from there.
    """

    timeline: Timeline
    slots: Sequence[frozenset[int]]
    first: Sequence[int]
    steps: int
    step_seconds: Callable[[int, int, int], float]
    prices: Prices
    free: bool = False
    most_behind_seconds: float = inf

    def solve(self, most_rounds: int = 40) -> tuple[Leg, ...]:
        """The best path, () if there is none. Prices of changes on it are found out until all of them are known.

        After `most_rounds` what is not known stays bounded from below, so the path is never worse than the best.
        """
        legs: tuple[Leg, ...] = ()
        for _ in range(most_rounds):
            legs = self._best()
            news = [self.prices.charge(edge) for leg in legs for edge, _ in leg.changes]
            if not any(news):
                break
        return legs

    def _best(self) -> tuple[Leg, ...]:
        spans = [self.timeline.spans(slots) for slots in self.slots]
        states = ((plan, at) for plan, own in enumerate(spans) for at in range(len(own)))
        number = {state: index for index, state in enumerate(states)}
        there = self._standing(spans, number)
        ways = _Ways(number)
        for plan in self.first:
            ways.put(_Way(at_seconds=0.0, before=None, state=(plan, 0)))
        for step in range(1, self.steps + 1):
            fresh = list(ways.values())
            for _ in range(HOPS):
                fresh = self._changed(ways, fresh, there)
            latest = min(way.at_seconds for way in ways.values()) + self.most_behind_seconds
            kept = [way for way in ways.values() if way.at_seconds <= latest]
            ways = _Ways(number)
            for way in kept:
                done = self._stepped(way, way.state, spans[way.state[0]][way.state[1]][1], step)
                if done is not None:
                    ways.put(done)
            if not ways:
                return ()
        return _legs(min(ways.values(), key=lambda way: way.at_seconds), self.steps)

    def _standing(self, spans: Sequence[tuple[tuple[float, float], ...]], number: dict[State, int]) -> list[_Standing]:
        """What stands in each moment."""
        found: list[list[tuple[State, float]]] = [[] for _ in self.timeline.at_seconds]
        for plan, own in enumerate(spans):
            for at, (begin, end) in enumerate(own):
                last = len(found) if end == inf else self.timeline.index_at(end)
                for moment in range(self.timeline.index_at(begin), last):
                    found[moment].append(((plan, at), end))
        return [
            _Standing(
                states=tuple(state for state, _ in each),
                plans=np.array([plan for (plan, _), _ in each], dtype=np.int64),
                numbers=np.array([number[state] for state, _ in each], dtype=np.int64),
                ends=np.array([end for _, end in each]),
            )
            for each in found
        ]

    @cached_property
    def _least_seconds(self) -> Floats:
        """[plans, plans] not above any change from one to the other."""
        count = len(self.slots)
        if self.free:
            return np.zeros((count, count))
        return np.array([[self.prices.least(before, after) for after in range(count)] for before in range(count)])

    def _stepped(self, way: _Way, state: State, end: float, step: int) -> _Way | None:
        """The step, begun at once or at a later moment of the fleet if it is over sooner then."""
        best: tuple[float, float] | None = None
        at = self.timeline.at_seconds
        starts = [way.at_seconds, *at[self.timeline.index_at(way.at_seconds) + 1 :]]
        for begin in starts:
            if begin >= end or (best is not None and begin >= best[0]):
                break
            over = begin + self.step_seconds(state[0], step, self.timeline.index_at(begin))
            if over <= end and over < inf and (best is None or over < best[0]):
                best = (over, begin)
        if best is None:
            return None
        return _Way(at_seconds=best[0], before=way, state=state, began_seconds=best[1])

    def _changed(self, ways: _Ways, fresh: list[_Way], there: list[_Standing]) -> list[_Way]:
        """Puts into `ways` what a change more from `fresh` can reach sooner, and returns that."""
        better: dict[State, _Way] = {}
        for way in fresh:
            for reached in self._moved(way, ways, there):
                ways.put(reached)
                better[reached.state] = reached
        return list(better.values())

    def _moved(self, way: _Way, ways: _Ways, there: list[_Standing]) -> Iterator[_Way]:
        """Changes to other plans, now or after one of the next moments of the fleet, that are there sooner than `ways`."""
        line, before = self.timeline, way.state[0]
        now = line.index_at(way.at_seconds)
        starts = (way.at_seconds, *line.at_seconds[now + 1 : now + 1 + WAITED_MOMENTS])
        for moment, begin in enumerate(starts, now):
            holders: frozenset[int] | None = None
            standing = there[moment]
            soonest = begin + self._least_seconds[before, standing.plans]
            able = (soonest < ways.at_seconds[standing.numbers]) & (soonest <= standing.ends)
            for at in np.flatnonzero(able).tolist():
                state, end = standing.states[at], float(standing.ends[at])
                if state == way.state:
                    continue
                edge, seconds = None, 0.0
                if not self.free:
                    if holders is None:
                        holders = line.kept(self.slots[before], way.at_seconds, begin)
                    edge = Edge(before=before, after=state[0], moment=moment, holders=holders)
                    seconds = self.prices.seconds(edge)
                known, over = ways.get(state), begin + seconds
                if over <= end and over < inf and (known is None or over < known.at_seconds):
                    yield _Way(at_seconds=over, before=way, state=state, edge=edge, edge_seconds=seconds)


def _legs(last: _Way, steps: int) -> tuple[Leg, ...]:
    """The path that ends there, step by step."""
    legs: list[Leg] = []
    changes: list[tuple[Edge, float]] = []
    way: _Way | None = last
    ended: _Way | None = None
    while way is not None:
        if way.began_seconds >= 0:
            if ended is not None:
                legs.append(_leg(ended, changes, steps - len(legs)))
            ended, changes = way, []
        elif way.edge is not None:
            changes.append((way.edge, way.edge_seconds))
        way = way.before
    if ended is not None:
        legs.append(_leg(ended, changes, steps - len(legs)))
    return tuple(reversed(legs))


def _leg(way: _Way, changes: list[tuple[Edge, float]], step: int) -> Leg:
    return Leg(
        step=step,
        plan=way.state[0],
        began_seconds=way.began_seconds,
        ended_seconds=way.at_seconds,
        changes=tuple(reversed(changes)),
    )
