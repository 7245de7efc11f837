"""A transition carried out operation by operation: its graph handed out by an Execution, on threads and shared links.

A slot's thread does one thing at a time: while it builds or verifies, it serves no transfer of its slot. Operations
outside run beside the steps, interleaved ones at the boundaries of phases, what is left of both in the pause.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any

import simpy

from nereus.sim.network import Network
from nereus.sim.truth import Truth
from nereus.transitions.durations import Durations
from nereus.transitions.execution import (
    Cancel,
    Execution,
    ExecutionCommand,
    LanesLost,
    OperationDone,
    OperationFailed,
    PauseBegun,
    Settled,
    Start,
)
from nereus.transitions.graph import Operation, TransitionGraph
from nereus.transitions.order import Lane

Process = Generator[simpy.Event, Any, None]
MANY_LANES = 256
"""Of so many slots and hosts all operations end on the grid of the network, if it has one; else transfers alone."""


@dataclass(eq=False, slots=True)
class _Task:
    """An operation that was handed out: what it is and needs, how it waits or runs."""

    operation: Operation
    name: str
    lanes: tuple[Lane, ...]  # slots whose thread it needs: alone, or as one of several transfers
    carries: bool
    waits: bool = False
    began_seconds: float = -1.0  # of one that runs
    ahead_seconds: float = 0.0  # done before it was asked for
    flow: simpy.Event | None = None


class Transit:
    """One transition under way. `settled` is the event of its end, with the Settled as its value.

    `on_commit` is called when the commit record would be written. `ahead`: what is outside was done by standby processes
    before the change was asked for; it counts as busy seconds, and nothing waits for it. `place_seconds` are busy seconds by place and kind of
    the slot that worked longest, as the real world counts them.
    """

    def __init__(
        self,
        env: simpy.Environment,
        graph: TransitionGraph,
        durations: Durations,
        network: Network,
        truth: Truth,
        *,
        count: int = 1,
        ahead: bool = False,
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.env, self.graph, self.durations, self.network, self.truth = env, graph, durations, network, truth
        self.count, self.ahead, self.on_commit = count, ahead, on_commit
        self.execution = Execution(graph)
        self._names = {id(operation): name for operation, name in zip(graph.operations, graph.ids, strict=True)}
        self.settled: simpy.Event = env.event()
        self.moved_bytes = 0
        self._busy: dict[str, dict[Lane, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        self._kept: list[Operation] = []  # interleaved, until a boundary
        self._open = False  # whether interleaved operations may start
        self._stopped = False  # whether the job waits for the transition
        self._interleaved_running = 0
        self._quiet: simpy.Event | None = None
        self._waiting: dict[Lane, deque[_Task]] = defaultdict(deque)
        self._readers: dict[Lane, int] = defaultdict(int)
        self._writers: set[Lane] = set()
        self._tasks: dict[str, _Task] = {}  # that wait or run
        many = len(graph.change.capacity_bytes) > MANY_LANES
        self._grid_seconds = network.together_seconds if many else 0.0
        self._ends: dict[float, list[Callable[[simpy.Event], None]]] = {}  # what ends at a time of the grid

    # -- what the world does -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts what may run beside the steps."""
        self._carry(self.execution.begin())

    def boundary(self) -> Process:
        """At a boundary between two phases: runs what is interleaved, until nothing of it runs any more."""
        if self.settled.triggered:
            return
        self._open = True
        kept, self._kept = self._kept, []
        for operation in kept:
            self._enqueue(operation)
        while self._interleaved_running and not self.settled.triggered:
            yield self._change()
        self._open = False

    def pause(self) -> Process:
        """Stops the step: what is left of the early operations, then everything else, to the end of the transition."""
        self._stopped = True
        while self.execution.early_left_count and not self.settled.triggered:
            yield from self.boundary()
            if self.execution.early_left_count and not self._kept and not self.settled.triggered:
                yield self._change()  # what is outside goes on
        if not self.settled.triggered:
            self._carry(self.execution.handle(PauseBegun()))
        if not self.settled.triggered:
            yield self.settled

    def _change(self) -> simpy.Event:
        """When the next early operation ends, or all is over."""
        self._quiet = self.env.event()
        return self._quiet | self.settled

    def lose(self, lanes: tuple[Lane, ...], reason: str) -> None:
        """Slots or hosts are gone: their operations too."""
        known = tuple(lane for lane in lanes if lane in self.graph.change.capacity_bytes)
        if not known or self.execution.settled is not None:
            return
        gone = set(known)
        for task in list(self._tasks.values()):
            if gone.intersection(task.operation.lanes):
                self._drop(task)
        self._kept = [kept for kept in self._kept if not gone.intersection(kept.lanes)]
        self._carry(self.execution.handle(LanesLost(lanes=known, reason=reason)))

    def place_seconds(self, place: str) -> dict[str, float]:
        """Seconds by kind of the lane that worked longest in a place."""
        lanes = self._busy.get(place, {})
        if not lanes:
            return {}
        return dict(max(lanes.values(), key=lambda parts: sum(parts.values())))

    # -- operations ----------------------------------------------------------------------------------------------

    def _carry(self, commands: Iterable[ExecutionCommand]) -> None:
        for command in commands:
            match command:
                case Start(operation=operation):
                    if operation.place == "interleaved" and not self._open:
                        self._kept.append(operation)
                    else:
                        self._enqueue(operation)
                case Cancel(operation=operation):
                    self._cancel(operation)
                case Settled():
                    if not self.settled.triggered:
                        self.settled.succeed(command)

    def _enqueue(self, operation: Operation) -> None:
        self._interleaved_running += operation.place == "interleaved"
        carries = operation.carries
        lanes = operation.lanes if carries or self.durations.needs_thread(operation) else ()
        if len(lanes) > 1 or (lanes and lanes[0] < 0):  # a host has no thread
            lanes = tuple([lane for lane in dict.fromkeys(lanes) if lane >= 0])
        name = self._names[id(operation)]
        self._tasks[name] = task = _Task(operation, name, lanes, carries)
        if not lanes or self._may_start(task):
            self._start(task)
            return
        task.waits = True
        for lane in lanes:
            self._waiting[lane].append(task)

    def _may_start(self, task: _Task) -> bool:
        for lane in task.lanes:
            if lane in self._writers or (not task.carries and self._readers[lane]):
                return False
            if not task.waits and self._first(lane) is not None:
                return False  # it came after those that wait
        return True

    def _first(self, lane: Lane) -> _Task | None:
        """What waits first at a lane; what another lane's turn has started meanwhile does not count."""
        queue = self._waiting[lane]
        while queue and not queue[0].waits:
            queue.popleft()
        return queue[0] if queue else None

    def _start(self, task: _Task) -> None:
        operation, env = task.operation, self.env
        for lane in task.lanes:
            if task.carries:
                self._readers[lane] += 1
            else:
                self._writers.add(lane)
        task.began_seconds = env.now
        if task.carries:
            latency = self.durations.tolls.move_seconds
            if latency < self.network.together_seconds:
                self._flow(task)  # it begins on the network's grid anyway
            else:
                self._after(latency, lambda _: self._flow(task))
            return
        takes = self.truth.operation_seconds(operation, task.name, self.count)
        if self.ahead and operation.place == "outside":
            takes, task.ahead_seconds = 0.0, takes
        self._after(takes, lambda _: self._done(task))

    def _after(self, seconds: float, then: Callable[[simpy.Event], None]) -> None:
        """A process for each of ten thousands of operations would take three times as long."""
        if not self._grid_seconds:
            callbacks = self.env.timeout(seconds).callbacks
            assert callbacks is not None
            callbacks.append(then)
            return
        end = ceil((self.env.now + seconds) / self._grid_seconds) * self._grid_seconds
        if end not in self._ends:
            self._ends[end] = []
            self._after_grid(end)
        self._ends[end].append(then)

    def _after_grid(self, end: float) -> None:
        """One event for all that ends at a time of the grid."""
        event = self.env.timeout(max(end - self.env.now, 0.0))

        def ended(_: simpy.Event) -> None:
            for then in self._ends.pop(end):
                then(event)

        assert event.callbacks is not None
        event.callbacks.append(ended)

    def _flow(self, task: _Task) -> None:
        """A move's bytes, after what it takes before the first."""
        operation = task.operation
        if self._tasks.get(task.name) is not task:
            return  # it was dropped
        source = operation.lanes[0] if operation.via is None else operation.via
        legs = self.durations.legs(source, operation.lanes[-1])
        task.flow = self.network.flow(legs, operation.size_bytes)
        callbacks = task.flow.callbacks
        assert callbacks is not None
        callbacks.append(lambda _: self._done(task))

    def _done(self, task: _Task) -> None:
        operation = task.operation
        if self._tasks.get(task.name) is not task:
            return  # it was dropped
        if task.carries:
            self.moved_bytes += operation.size_bytes
        if operation.kind == "commit":
            self.on_commit()
        self._account(operation, task.ahead_seconds + self.env.now - task.began_seconds)
        del self._tasks[task.name]
        self._free(task)
        self._carry(self.execution.handle(OperationDone(operation_id=task.name)))
        self._ended(operation)

    def _account(self, operation: Operation, seconds: float) -> None:
        """An operation that would be interleaved with a step counts to the pause when it runs there, as in the real world."""
        place = "pause" if self._stopped and operation.place == "interleaved" else operation.place
        for lane in operation.lanes[-1:] if operation.carries else operation.lanes or (0,):
            parts = self._busy[place][lane]
            parts[operation.kind] = parts.get(operation.kind, 0.0) + seconds

    def _free(self, task: _Task) -> None:
        for lane in task.lanes:
            if task.carries:
                self._readers[lane] -= 1
            else:
                self._writers.discard(lane)
        for lane in task.lanes:
            self._next(lane)

    def _next(self, lane: Lane) -> None:
        """Starts what waits first at a lane, as far as it can."""
        while (task := self._first(lane)) is not None:
            if not self._may_start(task):
                return
            task.waits = False
            self._start(task)

    def _ended(self, operation: Operation) -> None:
        self._interleaved_running -= operation.place == "interleaved"
        if operation.place != "pause" and self._quiet is not None and not self._quiet.triggered:
            self._quiet.succeed()

    # -- failures ------------------------------------------------------------------------------------------------

    def _drop(self, task: _Task) -> None:
        """Ends an operation that waits or runs, without a report."""
        del self._tasks[task.name]
        if task.waits:
            task.waits = False
        else:
            if task.flow is not None:
                self.network.stop(task.flow)
            self._free(task)
        self._ended(task.operation)

    def _cancel(self, operation: Operation) -> None:
        """Ends a running or waiting operation and reports it."""
        name = self._names[id(operation)]
        task = self._tasks.get(name)
        if task is not None:
            self._drop(task)
        else:
            self._kept = [kept for kept in self._kept if kept is not operation]
        if self.execution.settled is None and self.execution.status(name) in ("running", "gone"):
            self._carry(self.execution.handle(OperationFailed(operation_id=name, reason="cancelled")))
