"""A transition carried out operation by operation: its graph handed out by an Execution, on threads and shared links.

A slot's thread does one thing at a time: while it builds or verifies, it serves no transfer of its slot. Operations
outside run beside the steps, interleaved ones at the boundaries of phases, what is left of both in the pause.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable
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


class Transit:
    """One transition under way. `settled` is the event of its end, with the Settled as its value.

    `on_commit` is called when the commit record would be written. `place_seconds` are busy seconds by place and kind of
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
        on_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.env, self.graph, self.durations, self.network, self.truth = env, graph, durations, network, truth
        self.count, self.on_commit = count, on_commit
        self.execution = Execution(graph)
        self._names = {id(operation): name for operation, name in zip(graph.operations, graph.ids, strict=True)}
        self._operations = dict(zip(graph.ids, graph.operations, strict=True))
        self._slots_of: dict[int, tuple[Lane, ...]] = {}
        self.settled: simpy.Event = env.event()
        self.moved_bytes = 0
        self._busy: dict[str, dict[Lane, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        self._kept: list[Operation] = []  # interleaved, until a boundary
        self._open = False  # whether interleaved operations may start
        self._stopped = False  # whether the job waits for the transition
        self._interleaved_running = 0
        self._quiet: simpy.Event | None = None
        self._waiting: dict[Lane, deque[Operation]] = defaultdict(deque)
        self._readers: dict[Lane, int] = defaultdict(int)
        self._writer: dict[Lane, Operation] = {}
        self._processes: dict[str, simpy.Process] = {}
        self._queued: set[str] = set()

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
        for name, process in list(self._processes.items()):
            operation = self._operation(name)
            if gone.intersection(operation.lanes):
                self._drop(name, process)
        for name in [name for name in self._queued if gone.intersection(self._operation(name).lanes)]:
            self._queued.discard(name)
            self._ended(self._operation(name))
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

    def _operation(self, name: str) -> Operation:
        return self._operations[name]

    def _name(self, operation: Operation) -> str:
        """The operation's id, which takes long to spell."""
        return self._names[id(operation)]

    def _enqueue(self, operation: Operation) -> None:
        self._interleaved_running += operation.place == "interleaved"
        lanes = self._lanes(operation)
        if not lanes or self._may_start(operation, lanes):
            self._start(operation, lanes)
            return
        self._queued.add(self._name(operation))
        for lane in lanes:
            self._waiting[lane].append(operation)

    def _lanes(self, operation: Operation) -> tuple[Lane, ...]:
        """Slots whose thread an operation needs: alone, or as one of several transfers."""
        found = self._slots_of.get(id(operation))
        if found is None:
            needed = operation.carries or self.durations.needs_thread(operation)
            found = tuple(lane for lane in dict.fromkeys(operation.lanes) if lane >= 0) if needed else ()
            self._slots_of[id(operation)] = found
        return found

    def _may_start(self, operation: Operation, lanes: tuple[Lane, ...]) -> bool:
        for lane in lanes:
            if lane in self._writer or (not operation.carries and self._readers[lane]):
                return False
            if self._name(operation) not in self._queued and self._first(lane) is not None:
                return False  # it came after those that wait
        return True

    def _first(self, lane: Lane) -> Operation | None:
        """What waits first at a lane; what another lane's turn has started meanwhile does not count."""
        queue = self._waiting[lane]
        while queue and self._name(queue[0]) not in self._queued:
            queue.popleft()
        return queue[0] if queue else None

    def _start(self, operation: Operation, lanes: tuple[Lane, ...]) -> None:
        for lane in lanes:
            if operation.carries:
                self._readers[lane] += 1
            else:
                self._writer[lane] = operation
        self._processes[self._name(operation)] = self.env.process(self._run(operation, lanes))

    def _run(self, operation: Operation, lanes: tuple[Lane, ...]) -> Process:
        began = self.env.now
        flow: simpy.Event | None = None
        try:
            if operation.carries:
                source = operation.lanes[0] if operation.via is None else operation.via
                yield self.env.timeout(self.durations.tolls.move_seconds)
                flow = self.network.flow(self.durations.legs(source, operation.lanes[-1]), operation.size_bytes)
                yield flow
                self.moved_bytes += operation.size_bytes
            else:
                yield self.env.timeout(self.truth.operation_seconds(operation, self._name(operation), self.count))
            if operation.kind == "commit":
                self.on_commit()
        except simpy.Interrupt:
            if flow is not None:
                self.network.stop(flow)
            return
        self._account(operation, self.env.now - began)
        self._processes.pop(self._name(operation))
        self._free(operation, lanes)
        self._carry(self.execution.handle(OperationDone(operation_id=self._name(operation))))
        self._ended(operation)

    def _account(self, operation: Operation, seconds: float) -> None:
        """An operation that would be interleaved with a step counts to the pause when it runs there, as in the real world."""
        place = "pause" if self._stopped and operation.place == "interleaved" else operation.place
        for lane in operation.lanes[-1:] if operation.carries else operation.lanes or (0,):
            parts = self._busy[place][lane]
            parts[operation.kind] = parts.get(operation.kind, 0.0) + seconds

    def _free(self, operation: Operation, lanes: tuple[Lane, ...]) -> None:
        for lane in lanes:
            if operation.carries:
                self._readers[lane] -= 1
            else:
                self._writer.pop(lane, None)
        for lane in lanes:
            self._next(lane)

    def _next(self, lane: Lane) -> None:
        """Starts what waits first at a lane, as far as it can."""
        while (operation := self._first(lane)) is not None:
            lanes = self._lanes(operation)
            if not self._may_start(operation, lanes):
                return
            self._queued.discard(self._name(operation))
            self._start(operation, lanes)

    def _ended(self, operation: Operation) -> None:
        self._interleaved_running -= operation.place == "interleaved"
        if operation.place != "pause" and self._quiet is not None and not self._quiet.triggered:
            self._quiet.succeed()

    # -- failures ------------------------------------------------------------------------------------------------

    def _drop(self, name: str, process: simpy.Process) -> None:
        operation = self._operation(name)
        self._processes.pop(name, None)
        if process.is_alive:
            process.interrupt()
        self._free(operation, self._lanes(operation))
        self._ended(operation)

    def _cancel(self, operation: Operation) -> None:
        """Ends a running or waiting operation and reports it."""
        process = self._processes.get(self._name(operation))
        if process is not None:
            self._drop(self._name(operation), process)
        elif self._name(operation) in self._queued:
            self._queued.discard(self._name(operation))
            self._ended(operation)
        else:
            self._kept = [kept for kept in self._kept if kept is not operation]
        if self.execution.settled is None and self.execution.status(self._name(operation)) in ("running", "gone"):
            self._carry(self.execution.handle(OperationFailed(operation_id=self._name(operation), reason="cancelled")))
