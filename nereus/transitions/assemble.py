"""From a change to its transition graph: operations, edges, lanes, places and predicted seconds.

Everything before the commit leads to it; activation, the end of old state kept beside, of snapshots and of old groups
follow; so do, in an urgent change, groups and engines of what has no state. Blank memory comes as early as there is room: before the commit the engine is built in it, else it is attached
at activation.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import get_args

import numpy as np

from nereus.errors import ConfigError
from nereus.transitions.change import Change, EmuChange, Hop, Residency
from nereus.transitions.durations import Durations
from nereus.transitions.graph import (
    EDGE_KINDS,
    MOVES,
    PLACES,
    EdgeKind,
    Kind,
    Operation,
    Place,
    TransitionGraph,
    edges_of,
    grouped,
    lane_id,
    uncollected,
)
from nereus.transitions.order import Lane, merged
from nereus.transitions.room import FlowPiece, RoomPlan, plan_room, snapshots, stays

BEFORE_PAUSE = tuple(kind for kind in get_args(Kind) if kind not in ("quiesce", "commit", "activate", "destroy_groups"))
FROZEN_EARLY = frozenset((*MOVES, "copy", "arrive", "verify"))
IDLE_EARLY = frozenset(("quiesce", "release"))
OUTSIDE, INTERLEAVED, PAUSE = range(len(PLACES))
Key = tuple[str, Lane]
Ends = tuple[list[int], list[int]]
"""Of edges: the operations before and the operations after."""


@uncollected()
def assemble(change: Change, durations: Durations) -> TransitionGraph:
    """The transition graph of a change; ConfigError for wrong numbers, Infeasible when memory allows no order.

    `nereus.transitions.proof.check` proves it independently of what is done here.
    """
    change.validate()
    for name in ("early", "outside"):
        for kind in getattr(change, name):
            if kind not in BEFORE_PAUSE:
                raise ConfigError(name, kind, f"kinds that may come before the pause: {', '.join(BEFORE_PAUSE)}")
    return _Builder(change, durations, plan_room(change)).graph()


@dataclass(slots=True)
class _Draft:
    """An Operation without seconds and place; made in thousands, so not frozen."""

    kind: Kind
    emu: str
    lanes: tuple[Lane, ...]
    size_bytes: int
    start: int = 0
    hop: Hop = 0
    note: str = ""
    peer: Lane | None = None
    via: Lane | None = None

    @property
    def delta_bytes(self) -> int:
        """How the operation changes the memory of its lane."""
        return self.size_bytes if self.kind == "allocate" else -self.size_bytes if self.kind == "release" else 0


class _Builder:
    """Operations and edges under construction; operations are numbered as they are made."""

    def __init__(self, change: Change, durations: Durations, room: RoomPlan) -> None:
        self.change, self.durations, self.room = change, durations, room
        self.emus = {emu.emu: emu for emu in change.emus}
        self.frozen = {emu.emu for emu in change.emus if emu.frozen and emu.mode == "beside"}
        self.idle = {emu.emu for emu in change.emus if emu.idle}
        self.through = change.through()
        self.built_last = change.after_commit()
        self.places = {(r.emu, r.lane): r for r in change.residencies}
        self.operations: list[_Draft] = []
        self.ends: dict[EdgeKind, Ends] = {kind: ([], []) for kind in EDGE_KINDS}
        self.lanes: dict[Lane, list[int]] = defaultdict(list)
        self.quiesced: dict[Key, int] = {}
        self.verified: dict[Key, int] = {}
        self.secured: dict[str, int] = {}
        self.claimed: dict[int, int] = {}
        self.released: dict[int, int] = {}
        self.staged: dict[int, tuple[int, Lane]] = {}
        self.parking: dict[int, int] = {}
        self.unparked: dict[int, int] = {}
        self.snapshots: list[int] = []
        self.snapped: dict[Key, int] = {}
        self.shell_rooms: dict[Key, list[int]] = defaultdict(list)
        self.filled: dict[Key, list[int]] = defaultdict(list)
        self.groups: list[int] = []
        self.blank: dict[Key, int] = {}
        self.late: set[int] = set()

    def graph(self) -> TransitionGraph:
        """The finished graph, operations in a legal serial order."""
        self._quiesce()
        self._snapshot()
        self._claim_and_release()
        self._move()
        self._copy_and_verify()
        built = self._build_groups()
        commit = self._add("commit")
        for emu in self.built_last & built.keys():
            self._late(commit, built[emu])
        self._after_commit(commit)
        self._blank()
        self._activate(commit, built)
        self._commit_follows(commit)
        self._chain_groups()
        return self._ordered()

    def _add(self, kind: Kind, emu: str = "", lanes: tuple[Lane, ...] = (), size_bytes: int = 0, **more: object) -> int:
        index = len(self.operations)
        self.operations.append(_Draft(kind, emu, lanes, size_bytes, **more))  # type: ignore[arg-type]
        if kind in ("allocate", "release"):
            self.lanes[lanes[0]].append(index)
        return index

    def _edge(self, before: int, after: int) -> None:
        before_all, after_all = self.ends["data"]
        before_all.append(before)
        after_all.append(after)

    def _still(self, emu: str, lane: Lane, after: int) -> None:
        """`after` waits until no step touches the EMU on the lane; frozen state is not touched anyway."""
        if (emu, lane) in self.quiesced and not self.emus[emu].frozen:
            self._edge(self.quiesced[emu, lane], after)

    def _quiesce(self) -> None:
        for key, r in self.places.items():
            if r.lane >= 0 and (r.present_bytes or r.blank_present_bytes):
                self.quiesced[key] = self._add("quiesce", r.emu, (r.lane,))

    def _snapshot(self) -> None:
        for (emu, lane), size in snapshots(self.change).items():
            host = self.change.host_of[lane]
            if emu not in self.secured:
                self.secured[emu] = self._add("secure", emu)
            note = f"snapshot {lane_id(lane)}"
            room = self._add("allocate", emu, (host,), size, note=note)
            copy = self._add("stage_out", emu, (lane, host), size, note="snapshot")
            self._edge(room, copy)
            self._edge(self.quiesced[emu, lane], copy)
            self._edge(copy, self.secured[emu])
            self.snapshots.append(room)
            self.snapped[emu, lane] = copy

    def _claim_and_release(self) -> None:
        """The steps of the order; a parked release is staged out first."""
        for step in self.room.steps:
            if step.kind == "claim":
                self._claim(step.index)
            elif step.kind == "release":
                self._release(step.index)
            elif step.kind == "park":
                self._park(step.index, step.lane)
            else:
                room = self.operations[self.parking[step.index]]
                more = {"note": room.note, "start": room.start}
                self.unparked[step.index] = self._add("release", room.emu, room.lanes, room.size_bytes, **more)

    def _claim(self, index: int) -> None:
        """Room for state; that of a shell comes with its blank memory."""
        claim, piece = self.room.claims[index], self.room.claim_pieces.get(index)
        emu, lane, size = claim.name, claim.lane, claim.size_bytes
        peer = self.change.flows[piece.flow_index] if piece else None
        more = {"peer": peer.source, "start": piece.start, "hop": peer.hop} if piece and peer else {}
        blank = self.places[emu, lane].blank_target_bytes if self.emus[emu].shell and lane >= 0 else 0
        if blank:
            self.blank[emu, lane] = self._add("allocate", emu, (lane,), blank, note="blank")
            self.shell_rooms[emu, lane].append(self.blank[emu, lane])
        if size > blank:
            self.claimed[index] = self._add("allocate", emu, (lane,), size - blank, **more)
            self.shell_rooms[emu, lane].append(self.claimed[index])

    def _release(self, index: int) -> int:
        release, piece = self.room.releases[index], self.room.release_pieces.get(index)
        emu, blank = release.name, index in self.room.blank_releases
        more: dict[str, object] = {"note": "blank"} if blank else {}
        if piece:
            more = {"peer": self.change.flows[piece.flow_index].destination, "start": piece.start}
        gone = self._add("release", emu, (release.lane,), release.size_bytes, **more)
        if blank and (emu, release.lane) in self.quiesced:
            self._edge(self.quiesced[emu, release.lane], gone)
        elif not blank:
            self._still(emu, release.lane, gone)
            if emu in self.secured:
                self._edge(self.secured[emu], gone)
        self.released[index] = gone
        return gone

    def _park(self, index: int, spot: Lane) -> None:
        release, piece = self.room.releases[index], self.room.release_pieces.get(index)
        lane, size = release.lane, release.size_bytes
        peer = self.change.flows[piece.flow_index].destination if piece else None
        start = piece.start if piece else 0
        note = f"parked {lane_id(lane)}" + (f" for {lane_id(peer)}" if peer is not None else "")
        self.parking[index] = room = self._add("allocate", release.name, (spot,), size, note=note, start=start)
        out = self._add("stage_out", release.name, (lane, spot), size, note="parked", peer=peer, start=start)
        self._edge(room, out)
        self._still(release.name, lane, out)
        self._edge(out, self._release(index))
        self.staged[index] = (out, spot)

    def _move(self) -> None:
        """The pieces of the flows; relays after all that their source receives in lower hops."""
        incoming: dict[Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        relays: dict[tuple[str, Lane, int], list[int]] = defaultdict(list)
        for piece in self.room.pieces:
            flow = self.change.flows[piece.flow_index]
            move = self._move_piece(piece)
            incoming[flow.emu, flow.destination][flow.hop].append(move)
            self.filled[flow.emu, flow.destination].append(move)
            if flow.hop:
                relays[flow.emu, flow.source, flow.hop].append(move)
        for (emu, lane, hop), moves in relays.items():
            arrive = self._add("arrive", emu, (lane,), hop=hop)
            for lower in (move for h, arrived in incoming[emu, lane].items() if h < hop for move in arrived):
                self._edge(lower, arrive)
            for move in moves:
                self._edge(arrive, move)

    def _move_piece(self, piece: FlowPiece) -> int:
        flow = self.change.flows[piece.flow_index]
        parked = self.staged.get(piece.release_index) if piece.release_index is not None else None
        snapshot = self._snapshot_of(flow.emu, flow.source) if flow.hop == 0 else None
        via = parked[1] if parked else self.operations[snapshot].lanes[1] if snapshot is not None else None
        read = flow.source if via is None else via
        kind: Kind = "stage_in" if read < 0 else "stage_out" if flow.destination < 0 else "transfer"
        lanes = (flow.source, flow.destination)
        move = self._add(kind, flow.emu, lanes, piece.size_bytes, start=piece.start, hop=flow.hop, via=via)
        self._edge(self.claimed[piece.claim_index], move)
        if snapshot is not None:
            self._edge(snapshot, move)
        elif flow.hop == 0:
            self._still(flow.emu, flow.source, move)
        if parked and piece.release_index is not None:
            self._edge(parked[0], move)
            self._edge(move, self.unparked[piece.release_index])
        elif piece.release_index is not None:
            self._edge(move, self.released[piece.release_index])
        return move

    def _snapshot_of(self, emu: str, lane: Lane) -> int | None:
        """The stage_out of the snapshot that is read in place of the lane's old bytes, if one is."""
        return self.snapped.get((emu, lane)) if emu in self.through else None

    def _copy_and_verify(self) -> None:
        for key, r in self.places.items():
            beside = self.emus[r.emu].mode == "beside"
            size = 0 if stays(r) else r.kept_bytes if beside else r.copied_bytes
            if size:
                self.filled[key].append(self._copy(key, r, size))
            if not r.target_bytes:
                continue
            self.verified[key] = self._add("verify", r.emu, (r.lane,), r.target_bytes)
            self._still(r.emu, r.lane, self.verified[key])
            for before in self.filled.get(key, ()):
                self._edge(before, self.verified[key])

    def _copy(self, key: Key, r: Residency, size: int) -> int:
        release = self.room.copy_releases.get(key)
        parked = self.staged.get(release) if release is not None else None
        snapshot = self._snapshot_of(*key)
        via = parked[1] if parked else self.operations[snapshot].lanes[1] if snapshot is not None else None
        copy = self._add("copy", r.emu, (r.lane,), size, via=via)
        self._edge(self.claimed[self.room.whole_claims[key]], copy)
        if snapshot is not None:
            self._edge(snapshot, copy)
        else:
            self._still(r.emu, r.lane, copy)
        if parked and release is not None:
            self._edge(parked[0], copy)
            self._edge(copy, self.unparked[release])
        elif release is not None:
            self._edge(copy, self.released[release])
        return copy

    def _build_groups(self) -> dict[str, int]:
        built: dict[str, int] = {}
        for emu in sorted(self.change.emus, key=lambda emu: emu.emu in self.built_last):
            lanes = self._slots(emu.emu, new=True)
            if emu.new_groups and lanes:
                built[emu.emu] = self._add("build_groups", emu.emu, lanes)
                self.groups.append(built[emu.emu])
        return built

    def _slots(self, emu: str, *, new: bool) -> tuple[Lane, ...]:
        """Slots where the EMU has anything after (new) or before the change."""
        found: list[Lane] = []
        for r in self.places.values():
            size = r.target_bytes + r.blank_target_bytes if new else r.present_bytes + r.blank_present_bytes
            if r.emu == emu and r.lane >= 0 and size:
                found.append(r.lane)
        return tuple(sorted(found))

    def _after_commit(self, commit: int) -> None:
        """Old state kept until now, snapshots and old groups go."""
        for r in self.places.values():
            mode = self.emus[r.emu].mode
            size = r.present_bytes if mode == "beside" else r.present_bytes - r.kept_bytes + r.copied_bytes
            if size and not stays(r) and (mode == "beside" or (mode == "snapshot" and r.lane < 0)):
                self._late(commit, self._add("release", r.emu, (r.lane,), size))
            if r.blank_present_bytes and mode == "beside" and self.emus[r.emu].shell:
                self._late(commit, self._add("release", r.emu, (r.lane,), r.blank_present_bytes, note="blank"))
        for room in self.snapshots:
            taken = self.operations[room]
            self._late(commit, self._add("release", taken.emu, taken.lanes, taken.size_bytes, note=taken.note))
        for emu in self.change.emus:
            old = self._slots(emu.emu, new=False)
            if emu.old_groups and old:
                self.groups.append(self._add("destroy_groups", emu.emu, old))
                self._late(commit, self.groups[-1])

    def _late(self, commit: int, operation: int) -> None:
        self.late.add(operation)
        self._edge(commit, operation)

    def _blank(self) -> None:
        """Blank memory last on each lane, but as early as it fits; the lanes' final order."""
        for key, r in self.places.items():
            if r.blank_target_bytes and key not in self.blank:
                self.blank[key] = self._add("allocate", r.emu, (r.lane,), r.blank_target_bytes, note="blank")
        used = self.change.used_bytes()
        for lane, indexes in self.lanes.items():
            deltas = [self.operations[index].delta_bytes for index in indexes]
            ordered = [indexes[at] for at in merged(used.get(lane, 0), self.change.capacity_bytes[lane], deltas)]
            self.ends["memory"][0].extend(ordered[:-1])
            self.ends["memory"][1].extend(ordered[1:])
            first = next((at for at, index in enumerate(ordered) if index in self.late), len(ordered))
            self.late.update(ordered[first:])

    def _activate(self, commit: int, built: dict[str, int]) -> None:
        """Engines are built before the commit, in their blank memory if it is there by then, or all after it; then activated.

        A shell is built slot by slot in all its memory, and what fills the memory waits for it. Processes of any other
        engine meet while they start, so it is one operation of all its slots: each meets it at the same place in its order.
        """
        for emu in self.change.emus:
            lanes, active = self._slots(emu.emu, new=True), dict[Lane, int]()
            for lane in lanes:
                activate = self._add("activate", emu.emu, (lane,))
                active[lane] = activate
                self._late(commit, activate)
                room = self.blank.get((emu.emu, lane))
                if room is not None:
                    self._edge(room, activate)
                if emu.shell:
                    self._around(emu.emu, lane, self._engine(emu, (lane,), built))
            if emu.engine_seconds and lanes and not emu.shell:
                engine = self._engine(emu, lanes, built)
                last = emu.emu in self.built_last
                if last:
                    self._late(commit, engine)
                for lane in lanes:
                    if last:
                        self._edge(engine, active[lane])
                    room = self.blank.get((emu.emu, lane))
                    if room is not None and (last or room not in self.late):
                        self._edge(room, engine)

    def _engine(self, emu: EmuChange, lanes: tuple[Lane, ...], built: dict[str, int]) -> int:
        """The operation that builds an EMU's engine on these slots, after its groups and an idle engine's end there."""
        engine = self._add("build_engine", emu.emu, lanes)
        if emu.emu in built:
            self._edge(built[emu.emu], engine)
        for lane in lanes:
            if emu.idle and (emu.emu, lane) in self.quiesced:
                self._edge(self.quiesced[emu.emu, lane], engine)
        return engine

    def _around(self, emu: str, lane: Lane, engine: int) -> None:
        for room in self.shell_rooms[emu, lane]:
            self._edge(room, engine)
        for fill in self.filled.get((emu, lane), ()):
            self._edge(engine, fill)

    def _commit_follows(self, commit: int) -> None:
        """Whatever leads to nothing else before the commit leads to it."""
        leads = {a for a, b in zip(*self.ends["data"], strict=True) if b not in self.late}
        for index in range(len(self.operations)):
            if index not in leads and index not in self.late and index != commit:
                self._edge(index, commit)

    def _chain_groups(self) -> None:
        """One global order of communicator operations, as an edge from each slot's last one to its next."""
        last: dict[Lane, int] = {}
        for index in self.groups:
            for lane in self.operations[index].lanes:
                if lane in last:
                    self.ends["communicator"][0].append(last[lane])
                    self.ends["communicator"][1].append(index)
                last[lane] = index

    def _ordered(self) -> TransitionGraph:
        """Operations renumbered in a topological order that stays near the order of making, each with its place."""
        ends = {kind: np.array(some, dtype=np.int64) for kind, some in self.ends.items()}
        before_all, after_all = np.concatenate(list(ends.values()), axis=1)
        after = grouped(before_all, after_all, len(self.operations))
        waits: list[int] = np.bincount(after_all, minlength=len(self.operations)).tolist()
        number, place = [0] * len(waits), [0] * len(waits)
        ready = [index for index, count in enumerate(waits) if count == 0]
        level = self.change.used_bytes()
        operations: list[Operation] = []
        while ready:
            index = heappop(ready)
            number[index] = len(operations)
            place[index] = at = max(place[index], self._place(self.operations[index], level))
            operations.append(self._operation(self.operations[index], PLACES[at]))
            for b in after[index]:
                waits[b] -= 1
                place[b] = max(place[b], at)
                if not waits[b]:
                    heappush(ready, b)
        edges = tuple(edges_of(kind, np.array(number, dtype=np.int64)[ends[kind]]) for kind in EDGE_KINDS)
        return TransitionGraph(change=self.change, operations=tuple(operations), edges=edges)

    def _place(self, draft: _Draft, level: dict[Lane, int]) -> int:
        """The first of PLACES that an operation may have: by kind, and what it claims must fit beside every phase."""
        early = draft.kind in self.change.early or (draft.kind in FROZEN_EARLY and draft.emu in self.frozen)
        early = early or (draft.kind in IDLE_EARLY and draft.emu in self.idle)
        place = OUTSIDE if draft.kind in self.change.outside else INTERLEAVED if early else PAUSE
        if not draft.delta_bytes:
            return place
        (lane,) = draft.lanes
        level[lane] = level.get(lane, 0) + draft.delta_bytes
        fits = level[lane] + self.change.phase_bytes.get(lane, 0) <= self.change.capacity_bytes[lane]
        return place if fits else PAUSE

    def _operation(self, draft: _Draft, place: Place) -> Operation:
        emu = self.emus.get(draft.emu)
        return Operation(
            kind=draft.kind,
            emu=draft.emu,
            lanes=draft.lanes,
            size_bytes=draft.size_bytes,
            seconds=self.durations.seconds(draft.kind, draft.lanes, draft.size_bytes, draft.via, emu),
            place=place,
            start=draft.start,
            hop=draft.hop,
            note=draft.note,
            peer=draft.peer,
            via=draft.via,
        )
