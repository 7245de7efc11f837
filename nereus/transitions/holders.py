"""Holders: that every old byte of an EMU is somewhere until it is not needed any more.

Sources are held while they are read; before an EMU's first destructive operation its old bytes have a second holder in
another failure domain, as its mode says. Domains: a slot's process, a node (host memory outlives a slot), the job (a
checkpoint outlives all).
"""

from __future__ import annotations

from collections import defaultdict

from nereus.errors import NereusError
from nereus.transitions.change import Change, Residency
from nereus.transitions.graph import MOVES, TransitionGraph
from nereus.transitions.order import Lane, lane_name

Key = tuple[str, Lane]


class InvalidGraph(NereusError):
    """A transition graph that may not run; names the operation or the lane and the rule."""


def broken(graph: TransitionGraph, index: int, rule: str) -> InvalidGraph:
    """The refusal of a graph for one of its operations."""
    return InvalidGraph(f"{graph.ids[index]}: {rule}")


def flow_moves(graph: TransitionGraph) -> list[int]:
    """Moves that carry a flow; the others stage snapshots and parked bytes."""
    return [i for kind in sorted(MOVES) for i in graph.by_kind[kind] if not graph.operations[i].note]


def leaving(change: Change, r: Residency) -> int:
    """Old bytes that are released: all beside, in place those that do not stay where they are."""
    stays = r.present_bytes == r.kept_bytes == r.target_bytes and not r.copied_bytes
    if change.mode_of(r.emu) == "beside" and not stays:
        return r.present_bytes
    return r.present_bytes - r.kept_bytes + r.copied_bytes


def check_sources(graph: TransitionGraph) -> None:
    """InvalidGraph when bytes are read too early, dropped too early, too often or not at all."""
    _check_quiesced(graph)
    _check_snapshot_reads(graph)
    reads = _Reads(graph)
    gone: dict[tuple[str, Lane, str], int] = defaultdict(int)
    for index in graph.by_kind["release"]:
        operation = graph.operations[index]
        note = operation.note.split(" ")[0]
        gone[(*operation.key, note)] += operation.size_bytes
        reads.check(index, note)
    for r in graph.change.residencies:
        for size, note in ((leaving(graph.change, r), ""), (r.blank_present_bytes, "blank")):
            if (have := gone[r.emu, r.lane, note]) != size:
                what = f"{r.emu} on {lane_name(r.lane)}"
                raise InvalidGraph(f"{what}: {size:,} bytes of {note or 'state'} leave, {have:,} are released")
    for note in ("parked", "snapshot"):
        rooms = (graph.operations[index] for index in graph.by_kind["allocate"])
        taken = sum(room.size_bytes for room in rooms if room.note.startswith(note))
        if taken != (given := sum(size for (_, _, what), size in gone.items() if what == note)):
            raise InvalidGraph(f"{taken:,} bytes are claimed for what is {note}, {given:,} released")


def reads_snapshot(graph: TransitionGraph, through: set[str], index: int) -> bool:
    """Whether a move or a copy reads its EMU's old bytes on a slot from the snapshot in host memory."""
    op = graph.operations[index]
    return op.emu in through and op.hop == 0 and op.lanes[0] >= 0 and op.note == ""


def _check_snapshot_reads(graph: TransitionGraph) -> None:
    """What goes through the host: one whole snapshot of each slot, and every old byte is read there when it is written."""
    through = graph.change.through()
    if not through:
        return
    host_of, operations = graph.change.host_of, graph.operations
    written = {operations[i].key: i for i in graph.by_kind["stage_out"] if operations[i].note == "snapshot"}
    for r in graph.change.residencies:
        if r.emu in through and r.lane >= 0 and r.present_bytes:
            index = written.get((r.emu, r.lane))
            if index is None or operations[index].size_bytes != r.present_bytes:
                what = f"{r.emu} on {lane_name(r.lane)}"
                raise InvalidGraph(f"{what}: all {r.present_bytes:,} bytes must be in one snapshot, it is read there")
            if operations[index].lanes[1] != host_of[r.lane]:
                raise broken(graph, index, f"the snapshot belongs on {lane_name(host_of[r.lane])}")
    for index in (*flow_moves(graph), *graph.by_kind["copy"]):
        op = operations[index]
        if reads_snapshot(graph, through, index) and (
            op.via != host_of.get(op.lanes[0]) or not graph.joined(written[op.key], index)
        ):
            raise broken(graph, index, f"must read the snapshot of {lane_name(op.lanes[0])} when it is written")


def _check_quiesced(graph: TransitionGraph) -> None:
    """Old state is read and dropped only when no step touches it; frozen state may be read before."""
    quiesce = {graph.operations[index].key: index for index in graph.by_kind["quiesce"]}
    frozen, through = {emu.emu for emu in graph.change.emus if emu.frozen}, graph.change.through()
    for r in graph.change.residencies:
        if r.lane >= 0 and r.present_bytes + r.blank_present_bytes and (r.emu, r.lane) not in quiesce:
            raise InvalidGraph(f"{r.emu} on {lane_name(r.lane)}: must be quiesced")
    moves = (i for kind in sorted(MOVES) for i in graph.by_kind[kind] if graph.operations[i].hop == 0)
    reads = (i for i in (*moves, *graph.by_kind["copy"]) if not reads_snapshot(graph, through, i))
    for index in (*reads, *graph.by_kind["verify"], *graph.by_kind["release"]):
        operation = graph.operations[index]
        stopped = quiesce.get(operation.key)
        old = operation.note in ("", "blank", "snapshot") or operation.kind != "release"
        if stopped is None or index in graph.late or not old:
            continue
        free = operation.emu in frozen and operation.kind != "release" and operation.note != "snapshot"
        if not free and not graph.joined(stopped, index):
            raise broken(graph, index, f"must wait for {graph.ids[stopped]}")


class _Reads:
    """What reads an EMU's old bytes on a lane, by flow, and what parks them; who reads a snapshot does not."""

    def __init__(self, graph: TransitionGraph) -> None:
        self.graph = graph
        self.by_flow: dict[tuple[str, Lane, Lane], list[int]] = defaultdict(list)
        self.destinations: dict[Key, list[Lane]] = defaultdict(list)
        self.frees = {(f.emu, f.source, f.destination): f.frees_bytes for f in graph.change.flows if f.hop == 0}
        for emu, source, destination in self.frees:
            self.destinations[emu, source].append(destination)
        through = graph.change.through()
        self.kept_blank = {emu.emu for emu in graph.change.emus if emu.shell and emu.mode == "beside"}
        for index in flow_moves(graph):
            operation = graph.operations[index]
            if operation.hop == 0 and not reads_snapshot(graph, through, index):
                self.by_flow[(operation.emu, *operation.lanes)].append(index)  # type: ignore[index]
        self.copies: dict[Key, list[int]] = defaultdict(list)
        for index in (i for i in graph.by_kind["copy"] if not reads_snapshot(graph, through, i)):
            self.copies[graph.operations[index].key].append(index)
        self.outs: dict[Key, list[int]] = defaultdict(list)
        for index in graph.by_kind["stage_out"]:
            if graph.operations[index].note == "parked":
                self.outs[graph.operations[index].key].append(index)
        self.freed: dict[tuple[str, Lane, Lane], int] = defaultdict(int)
        for index in graph.by_kind["release"]:
            operation = graph.operations[index]
            if operation.peer is not None and operation.note == "":
                self.freed[(*operation.key, operation.peer)] += operation.size_bytes

    def check(self, index: int, note: str) -> None:
        """InvalidGraph when a release of what `note` says comes too early."""
        if note == "parked":
            self.check_parked(index)
        elif note == "snapshot" and index not in self.graph.late:
            raise broken(self.graph, index, "a snapshot stands until the commit")
        elif note == "blank" and index not in self.graph.late and self.graph.operations[index].emu in self.kept_blank:
            raise broken(self.graph, index, "an old engine beside a shell keeps its blank memory until the commit")
        elif note == "" and index not in self.graph.late:
            self.check_release(index)

    def readers(self, key: Key, peer: Lane | None, start: int, size_bytes: int) -> list[int]:
        """Moves and copies that read bytes [start, start + size) of the flow to `peer`, or, without peer, of the rest.

        The rest is what no release of its own covers; a flow's own releases cover its first bytes.
        """
        if peer is not None:
            moves = self.by_flow[(*key, peer)]
            return [i for i in moves if self._start(i) < start + size_bytes and start < self._stop(i)]
        found = list(self.copies[key])
        for destination in self.destinations[key]:
            moves = self.by_flow[(*key, destination)]
            found += [i for i in moves if self._stop(i) > self.freed[(*key, destination)]]
        return found

    def _start(self, index: int) -> int:
        return self.graph.operations[index].start

    def _stop(self, index: int) -> int:
        return self.graph.operations[index].start + self.graph.operations[index].size_bytes

    def check_release(self, index: int) -> None:
        """A release before the commit waits for every read of its bytes; those that are read where they are parked apart."""
        graph, op = self.graph, self.graph.operations[index]
        if op.peer is not None:
            frees = self.frees.get((*op.key, op.peer), 0)
            if op.start + op.size_bytes > frees or self.freed[(*op.key, op.peer)] > frees:
                raise broken(graph, index, f"drops more than the {frees:,} bytes that only this flow reads")
        outs = [out for out in self.outs[op.key] if graph.joined(out, index)]
        for read in self.readers(op.key, op.peer, op.start, op.size_bytes):
            elsewhere = any(graph.joined(out, read) for out in outs)
            if not graph.joined(read, index) and not elsewhere:
                raise broken(graph, index, f"{graph.ids[read]} still reads these bytes")
        for out in outs:
            if graph.operations[out].size_bytes != op.size_bytes:
                raise broken(graph, out, f"must park the {op.size_bytes:,} bytes that {graph.ids[index]} drops")

    def check_parked(self, index: int) -> None:
        """Parked bytes are dropped after all that read them: found by the stage_out that wrote them."""
        graph, op = self.graph, self.graph.operations[index]
        outs = [
            out
            for (emu, _), some in self.outs.items()
            if emu == op.emu
            for out in some
            if graph.operations[out].lanes[1] == op.lanes[0] and parking_note(graph, out) == (op.note, op.start)
        ]
        if len(outs) != 1:
            raise broken(graph, index, "one stage_out must have parked these bytes")
        out = graph.operations[outs[0]]
        for read in self.readers(out.key, out.peer, out.start, out.size_bytes):
            if not graph.joined(outs[0], read) or not graph.joined(read, index):
                raise broken(graph, index, f"{graph.ids[read]} must read these bytes here, before they go")


def parking_note(graph: TransitionGraph, out: int) -> tuple[str, int]:
    """The note and start of the allocate and the release of what a stage_out parks."""
    operation = graph.operations[out]
    room = next(i for i in graph.predecessors[out] if graph.operations[i].kind == "allocate")
    return graph.operations[room].note, operation.start


def durability(graph: TransitionGraph) -> tuple[dict[str, str], dict[str, int]]:
    """What stands in for each EMU's old bytes, in words, and its bytes that a lost slot takes along; else InvalidGraph."""
    words: dict[str, str] = {}
    exposed: dict[str, int] = {}
    destructive: dict[str, list[int]] = defaultdict(list)
    for index in graph.by_kind["release"]:
        if graph.operations[index].note == "" and index not in graph.late:
            destructive[graph.operations[index].emu].append(index)
    for emu in graph.change.emus:
        here = [r for r in graph.change.residencies if r.emu == emu.emu]
        _check_guards(here, kept=emu.mode == "beside" or emu.through_host)
        alone = sum(r.present_bytes - r.guarded_bytes for r in here if r.lane >= 0)
        first = destructive[emu.emu]
        exposed[emu.emu] = alone
        if not first:
            words[emu.emu] = "beside: nothing old is dropped before the commit"
        elif emu.mode == "beside":
            raise broken(graph, first[0], "mode beside drops nothing before the commit")
        elif emu.mode == "checkpoint":
            if not emu.checkpoint:
                raise broken(graph, first[0], "mode checkpoint must name the checkpoint that it falls back to")
            words[emu.emu] = f"checkpoint: a loss costs the steps since {emu.checkpoint}"
        else:
            _check_snapshot(graph, emu.emu, here, first)
            exposed[emu.emu] = 0
            copied = sum(r.present_bytes for r in here if r.lane >= 0) if emu.through_host else alone
            words[emu.emu] = f"snapshot: {copied:,} bytes in host memory until the commit"
    return words, exposed


def _check_guards(here: list[Residency], *, kept: bool) -> None:
    """Guarded bytes are held by others until the commit: at most what these keep in place, or have where all is `kept`."""
    held = [r.present_bytes if kept else r.kept_bytes - r.copied_bytes for r in here]
    for r, own in zip(here, held, strict=True):
        others = sum(held) - own
        if r.guarded_bytes > others and r.lane >= 0:
            what = f"{r.emu} on {lane_name(r.lane)}"
            raise InvalidGraph(f"{what}: {r.guarded_bytes:,} bytes cannot be guarded by others that keep {others:,}")


def _check_snapshot(graph: TransitionGraph, emu: str, here: list[Residency], destructive: list[int]) -> None:
    """Every old byte of a slot is guarded or in host memory before the first is dropped; hosts drop nothing early."""
    secure = next((i for i in graph.by_kind["secure"] if graph.operations[i].emu == emu), None)
    copied: dict[Lane, int] = defaultdict(int)
    for index in graph.by_kind["stage_out"]:
        operation = graph.operations[index]
        if operation.emu == emu and operation.note == "snapshot" and operation.lanes[1] < 0:
            if secure is None or not graph.joined(index, secure):
                raise broken(graph, index, "a snapshot must be complete before it counts: it must lead to secure")
            copied[operation.lanes[0]] += operation.size_bytes
    for r in here:
        if r.lane >= 0 and copied[r.lane] + r.guarded_bytes < r.present_bytes:  # through the host: all, checked apart
            missing = r.present_bytes - r.guarded_bytes - copied[r.lane]
            raise InvalidGraph(f"{emu} on {lane_name(r.lane)}: {missing:,} old bytes have no second holder")
    for index in destructive:
        if graph.operations[index].lanes[0] < 0:
            raise broken(graph, index, "host memory is the snapshot of what it holds: it stands until the commit")
        if secure is not None and not graph.joined(secure, index):
            raise broken(graph, index, "drops old bytes before their snapshot is secure")
