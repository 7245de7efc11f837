"""A transition under way, as a transaction over state versions: events in, commands out.

Operations are handed out as soon as all that they wait for is done; completions and failures come in any order. Before
the commit is recorded a failure ends in the old version, after it in the new one. Nothing here owns a clock or a socket:
fed the same events, an Execution gives the same commands again, which is how a restarted driver re-attaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

from nereus.errors import InvalidEvent
from nereus.transitions.change import Residency
from nereus.transitions.graph import Operation, TransitionGraph
from nereus.transitions.order import Lane, lane_name

Status = Literal["waiting", "running", "done", "failed", "gone"]
Source = Literal["old", "new", "snapshot", "held", "survivors"]
Result = Literal["committed", "rolled_back", "replan"]
STORY_EVENTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseBegun:
    """The step has stopped at a phase boundary: operations of the pause may start."""


@dataclass(unsafe_hash=True, kw_only=True, slots=True)
class OperationDone:
    """An operation ended well on all its lanes. Made in hundreds of thousands, so not frozen; nobody changes one."""

    operation_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationFailed:
    """An operation ended with an error or was cancelled; its slots live unless a LanesLost says otherwise."""

    operation_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LanesLost:
    """Slot processes died, or nodes with their host memory: the lanes' memory is gone."""

    lanes: tuple[Lane, ...]
    reason: str


ExecutionEvent = PauseBegun | OperationDone | OperationFailed | LanesLost


@dataclass(unsafe_hash=True, kw_only=True, slots=True)
class Start:
    """Carry out an operation and report how it ended. Made as often as OperationDone, and no more changed."""

    operation: Operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancel:
    """End a running operation as soon as possible (groups torn down, nothing half-written used) and report it."""

    operation: Operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The end of a transition. `version` says whose plan's state stands.

    committed: the new plan runs. rolled_back: no slot is lost, back to the old plan. replan: the version stands, but
    its plan cannot simply go on: lanes are lost, or the new plan did not come up. `sources` by EMU, where its bytes are:

    old, new: every byte on the lanes of that plan (a byte of a lost lane on another that guards it).
    snapshot: every byte on a lane of the old plan or in the snapshot.
    held: every byte on some lane, where it was or where it has arrived or is parked.
    survivors: what remains may lack bytes of the lost lanes: complete it from the checkpoint.
    """

    result: Result
    version: Literal["old", "new"]
    reason: str
    lost: tuple[Lane, ...]
    sources: Mapping[str, Source]


ExecutionCommand = Start | Cancel | Settled


class Execution:
    """Hands out a checked graph's operations and decides how the transition ends.

    Lanes that are lost after the commit, and that the new plan does not use, end nothing.

    `settled` is None while it runs. Raises InvalidEvent for an event that cannot be true, with the operation's status
    and the last events.
    """

    def __init__(self, graph: TransitionGraph) -> None:
        self.graph = graph
        self.settled: Settled | None = None
        self.events: list[ExecutionEvent] = []
        self.lost: set[Lane] = set()
        self._number = {name: index for index, name in enumerate(graph.ids)}
        self._status: list[Status] = ["waiting"] * len(graph.operations)
        self._waits = list(graph.waits)
        self._open = [index for index, count in enumerate(self._waits) if count == 0]
        self._held: list[int] = []  # open, but of the pause, which has not begun
        self._running: set[int] = set()
        self._left = len(graph.operations)
        self._early_left = sum(op.place != "pause" for op in graph.operations)
        self._paused = False
        self._trouble = ""
        self._commit = graph.by_kind["commit"][0]
        self._dropped = [i for i in graph.by_kind["release"] if graph.operations[i].note == "" and i not in graph.late]

    @property
    def committed(self) -> bool:
        """Whether the commit is recorded: the new version stands."""
        return self._status[self._commit] == "done"

    @property
    def early_left_count(self) -> int:
        """Operations outside and interleaved that are not done: at 0 nothing but the pause is left."""
        return self._early_left

    def status(self, operation_id: str) -> Status:
        """Where an operation stands; gone: its lane was lost while it ran."""
        return self._status[self._number[operation_id]]

    def begin(self) -> tuple[ExecutionCommand, ...]:
        """The first commands: what may happen before the pause."""
        return self._next()

    def handle(self, event: ExecutionEvent) -> tuple[ExecutionCommand, ...]:
        """Takes an event; the commands that follow from it."""
        self._check(event)
        self.events.append(event)
        if self.settled is not None:
            if isinstance(event, LanesLost):
                self.lost.update(event.lanes)
            return ()
        match event:
            case PauseBegun():
                self._paused = True
                self._open, self._held = [*self._held, *self._open], []
            case OperationDone():
                self._end(self._number[event.operation_id], "done")
            case OperationFailed():
                self._end(self._number[event.operation_id], "failed")
                return self._stop(f"{event.operation_id}: {event.reason}")
            case LanesLost():
                return self._lose(event)
            case _:
                assert_never(event)
        return self._next()

    def _lose(self, event: LanesLost) -> tuple[ExecutionCommand, ...]:
        self.lost.update(event.lanes)
        needless = self.committed and not self._trouble and self._needless(event.lanes)
        for index in sorted(self._running):
            if needless and self._idle(index):
                self._forgo(index)
            elif not needless and self.lost.intersection(self.graph.operations[index].lanes):
                self._end(index, "gone")
        if needless:
            return self._next()
        return self._stop(f"{', '.join(lane_name(lane) for lane in event.lanes)} lost: {event.reason}")

    def _check(self, event: ExecutionEvent) -> None:
        """InvalidEvent for an operation that is not known or not running; what is gone may still report."""
        if isinstance(event, PauseBegun):
            if self._paused:
                raise self._invalid("the pause has begun already")
        elif isinstance(event, LanesLost):
            unknown = [lane for lane in event.lanes if lane not in self.graph.change.capacity_bytes]
            if unknown:
                raise self._invalid(f"{lane_name(unknown[0])} is not a lane of this transition")
        elif (index := self._number.get(event.operation_id)) is None:
            raise self._invalid(f"no operation {event.operation_id} in this transition")
        elif (status := self._status[index]) not in ("running", "gone"):
            raise self._invalid(f"{event.operation_id} is {status}, so it cannot end now")

    def _invalid(self, what: str) -> InvalidEvent:
        story = "; ".join(map(repr, self.events[-STORY_EVENTS:])) or "none"
        return InvalidEvent(f"{what}; last events: {story}")

    def _end(self, index: int, status: Status) -> None:
        if self._status[index] == "gone":
            return
        self._status[index] = status
        self._running.discard(index)
        if status != "done":
            return
        self._left -= 1
        self._early_left -= self.graph.operations[index].place != "pause"
        waits = self._waits
        for after in self.graph.successors[index]:
            waits[after] -= 1
            if not waits[after]:
                self._open.append(after)

    def _stop(self, reason: str) -> tuple[ExecutionCommand, ...]:
        """The first trouble: nothing new starts, what runs is cancelled; the commit record alone is waited for."""
        cancels: list[ExecutionCommand] = []
        if not self._trouble:
            self._trouble = reason
            self._open.clear()
            cancels = [Cancel(operation=self.graph.operations[i]) for i in sorted(self._running) if i != self._commit]
        return (*cancels, *self._next())

    def _next(self) -> tuple[ExecutionCommand, ...]:
        """What may start now; or the settlement, when nothing runs and nothing more may."""
        if self._trouble:
            return (self._settle(),) if not self._running else ()
        operations, starts = self.graph.operations, list[int]()
        for index in self._open:  # it may grow
            if self.lost and self._idle(index):
                self._forgo(index)
                continue
            early = self._paused or operations[index].place != "pause"
            (starts if early else self._held).append(index)
        self._open.clear()
        for index in starts:
            self._status[index] = "running"
            self._running.add(index)
        if not self._left:
            return (self._settle(),)
        return tuple([Start(operation=operations[index]) for index in starts])

    def _needless(self, lanes: tuple[Lane, ...]) -> bool:
        """Whether nothing of the plan after the change is on these lanes."""
        gone = set(lanes)
        return not any(r.lane in gone and r.target_bytes + r.blank_target_bytes for r in self.graph.change.residencies)

    def _forgo(self, index: int) -> None:
        """An operation that has nothing left to do counts as done; it may still report."""
        self._end(index, "done")
        self._status[index] = "gone"

    def _idle(self, index: int) -> bool:
        """Whether an operation, all of whose work is on lost lanes or is to take old communicators apart, has nothing left to do."""
        lanes = set(self.graph.operations[index].lanes)
        return bool(lanes & self.lost) and (lanes <= self.lost or self.graph.operations[index].kind == "destroy_groups")

    def _settle(self) -> Settled:
        result: Result = "replan" if self.lost or (self.committed and self._left) else "rolled_back"
        if not self._trouble:
            result = "committed"
        sources: dict[str, Source] = {emu.emu: self._source(emu.emu) for emu in self.graph.change.emus}
        self.settled = Settled(
            result=result,
            version="new" if self.committed else "old",
            reason=self._trouble or "all operations are done",
            lost=tuple(sorted(self.lost)),
            sources=sources,
        )
        return self.settled

    def _source(self, emu: str) -> Source:
        """Where the EMU's bytes are, from its mode, what was dropped, and what the lost lanes had of it."""
        here = [r for r in self.graph.change.residencies if r.emu == emu]
        gone = [r for r in here if r.lane in self.lost and r.present_bytes]
        if not self.committed and len(gone) > 1 and any(r.guarded_bytes for r in gone):
            return "survivors"  # they may have guarded each other's bytes
        touched = any(self._status[i] != "waiting" for i in self._dropped if self.graph.operations[i].emu == emu)
        if self.committed:
            return "survivors" if any(r.lane in self.lost and r.target_bytes for r in here) else "new"
        if not touched:
            bare = [r for r in here if r.lane in self.lost and self._bare_bytes(r)]
            if not bare:
                return "old"
            return "snapshot" if all(self._in_snapshot(r) for r in bare) else "survivors"
        if self.graph.change.mode_of(emu) == "snapshot" and not any(self._needs_lost_host(r) for r in here):
            return "snapshot"
        if emu in self.graph.change.through():
            return "survivors"
        return "held" if not any(r.lane in self.lost for r in here) and not self._parked_on_lost(emu) else "survivors"

    def _bare_bytes(self, r: Residency) -> int:
        """Old bytes of a lane that nobody else holds until the commit."""
        return r.present_bytes - r.guarded_bytes

    def _snapshots_of(self, r: Residency) -> list[int]:
        operations = self.graph.operations
        return [
            i
            for i in self.graph.by_kind["stage_out"]
            if operations[i].note == "snapshot" and operations[i].key == (r.emu, r.lane)
        ]

    def _in_snapshot(self, r: Residency) -> bool:
        """Whether all that only this slot had is in host memory that is still there."""
        found = self._snapshots_of(r)
        hosts = {self.graph.operations[i].lanes[1] for i in found}
        return bool(found) and all(self._status[i] == "done" for i in found) and not hosts & self.lost

    def _needs_lost_host(self, r: Residency) -> bool:
        """Whether the snapshot, or a host's own old state, of this residency went with a lost host."""
        if r.lane < 0:
            return r.lane in self.lost and r.present_bytes > 0
        return any(self.graph.operations[i].lanes[1] in self.lost for i in self._snapshots_of(r))

    def _parked_on_lost(self, emu: str) -> bool:
        operations = self.graph.operations
        return any(
            operations[i].emu == emu and operations[i].note == "parked" and operations[i].lanes[1] in self.lost
            for i in self.graph.by_kind["stage_out"]
            if self._status[i] == "done"
        )
