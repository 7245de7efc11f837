"""The transition graph as data: operations with readable ids, edges by kind, JSON there and back.

Edges are per EMU and per lane; the only operation that everything meets in is the commit.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from nereus.transitions.change import Change, EmuChange, Flow, Hop, Residency
from nereus.transitions.order import Lane

Kind = Literal[
    "quiesce",
    "allocate",
    "copy",
    "transfer",
    "stage_out",
    "stage_in",
    "secure",
    "arrive",
    "verify",
    "build_groups",
    "build_engine",
    "commit",
    "activate",
    "destroy_groups",
    "release",
]
Numbers = npt.NDArray[np.int64]
Place = Literal["outside", "interleaved", "pause"]
EdgeKind = Literal["data", "memory", "communicator"]
PLACES: tuple[Place, ...] = get_args(Place)
"""In the order in which a timeline runs them."""
EDGE_KINDS: tuple[EdgeKind, ...] = get_args(EdgeKind)
MOVES = frozenset(("transfer", "stage_out", "stage_in"))
"""Kinds that carry bytes from one lane to another."""


@dataclass(unsafe_hash=True, kw_only=True, slots=True)
class Operation:
    """One step of a transition; `lanes` take part, of a move the source and the destination. A value: nobody changes one.

    `size_bytes` are moved, claimed or released. `note` says which bytes: "" the EMU's state, or blank, snapshot, parked
    (then the lanes whose bytes wait there). What concerns one piece of a flow only names the flow's other lane in `peer`
    and covers its bytes from `start`; a move or a copy reads at `via`, if it is given, what is parked or in a snapshot
    there. `seconds` is the predicted time.

    quiesce: no step touches the EMU on the slot any more. copy: unmoved bytes to their new place. secure: every
    snapshot of the EMU is complete. arrive: all lower hops have reached the lane. verify: digests. Every allocate and
    release has one lane.
    """

    kind: Kind
    emu: str = ""
    lanes: tuple[Lane, ...] = ()
    size_bytes: int = 0
    seconds: float = 0.0
    place: Place = "pause"
    start: int = 0
    hop: Hop = 0
    note: str = ""
    peer: Lane | None = None
    via: Lane | None = None

    @property
    def id(self) -> str:
        """A readable name that is a function of the content: transfer:actor.train:0>1, release:critic:3:to 1@4096."""
        parts = [self.kind]
        if self.emu:
            parts.append(self.emu)
        if len(self.lanes) == 1:
            parts.append(lane_id(self.lanes[0]))
        elif self.lanes:
            parts.append(">".join(map(lane_id, self.lanes)) if self.kind in MOVES else _ranges(self.lanes))
        if self.peer is not None:
            parts.append(f"{'from' if self.kind == 'allocate' else 'to'} {lane_id(self.peer)}")
        if self.via is not None:
            parts.append(f"via {lane_id(self.via)}")
        if self.hop:
            parts.append(f"hop {self.hop}")
        if self.note:
            parts.append(self.note)
        return ":".join(parts) + (f"@{self.start}" if self.start else "")

    @property
    def carries(self) -> bool:
        """Whether bytes go from one lane to another, so over ports; a copy does when it reads elsewhere."""
        return self.kind in MOVES or self.via is not None

    @property
    def key(self) -> tuple[str, Lane]:
        """The EMU and the first lane."""
        return self.emu, self.lanes[0]

    @property
    def delta_bytes(self) -> int:
        """How the operation changes the memory of its lane."""
        return self.size_bytes if self.kind == "allocate" else -self.size_bytes if self.kind == "release" else 0


@contextmanager
def uncollected() -> Generator[None]:
    """Without collections of garbage, which would look at every operation again and again: nothing made here is in a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def grouped(keys: Numbers, values: Numbers, count: int) -> list[list[int]]:
    """The values of each key below `count`, in their order."""
    ordered = values[np.argsort(keys, kind="stable")].tolist()
    ends = np.cumsum(np.bincount(keys, minlength=count)).tolist()
    return [ordered[first:last] for first, last in pairwise([0, *ends])]


def lane_id(lane: Lane) -> str:
    """A lane in an id: 3, host0."""
    return str(lane) if lane >= 0 else f"host{-1 - lane}"


def _ranges(lanes: Sequence[Lane]) -> str:
    """Lanes as people read them: 0-3,host0."""
    ordered = sorted(lanes, key=lambda lane: (lane < 0, abs(lane)))
    cuts = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1 or a < 0]
    runs = [ordered[a:b] for a, b in pairwise([0, *cuts, len(ordered)])]
    return ",".join(lane_id(run[0]) if len(run) == 1 else f"{lane_id(run[0])}-{lane_id(run[-1])}" for run in runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Edges:
    """Edges of one kind: operation number before_index[i] must be complete before after_index[i] starts."""

    kind: EdgeKind
    before_index: tuple[int, ...] = ()
    after_index: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TransitionGraph:
    """Operations in a legal serial order, and edges (one record for each kind of EDGE_KINDS) that say what must wait."""

    change: Change
    operations: tuple[Operation, ...]
    edges: tuple[Edges, ...]

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The id of each operation."""
        return tuple(operation.id for operation in self.operations)

    @cached_property
    def successors(self) -> list[list[int]]:
        """Operations that wait for each operation, over all kinds of edges."""
        return grouped(self._edge_ends[0], self._edge_ends[1], len(self.operations))

    @cached_property
    def _edge_ends(self) -> tuple[Numbers, Numbers]:
        """The operation before and the one after, over all kinds of edges."""
        before, after = (
            np.concatenate([np.array(getattr(edges, name), dtype=np.int64) for edges in self.edges])
            for name in ("before_index", "after_index")
        )
        return before, after

    @cached_property
    def waits(self) -> list[int]:
        """How many edges lead into each operation."""
        return np.bincount(self._edge_ends[1], minlength=len(self.operations)).tolist()

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """Operations that each operation waits for, over all kinds of edges."""
        return grouped(self._edge_ends[1], self._edge_ends[0], len(self.operations))

    @cached_property
    def _joints(self) -> set[int]:
        size = len(self.operations)
        data = next(edges for edges in self.edges if edges.kind == "data")
        return {a * size + b for a, b in zip(data.before_index, data.after_index, strict=True)}

    def joined(self, before: int, after: int) -> bool:
        """Whether a data edge leads from one operation to another."""
        return before * len(self.operations) + after in self._joints

    @cached_property
    def by_kind(self) -> dict[str, list[int]]:
        """Operations of each kind."""
        found: dict[str, list[int]] = {kind: [] for kind in get_args(Kind)}
        for index, operation in enumerate(self.operations):
            found[operation.kind].append(index)
        return found

    @cached_property
    def late(self) -> set[int]:
        """Operations that wait for the commit."""
        return self._reached(self.successors)

    @cached_property
    def soon(self) -> set[int]:
        """Operations that the commit waits for."""
        return self._reached(self.predecessors)

    def _reached(self, following: list[list[int]]) -> set[int]:
        seen: set[int] = set()
        stack = [index for commit in self.by_kind["commit"] for index in following[commit]]
        while stack:
            index = stack.pop()
            if index not in seen:
                seen.add(index)
                stack += following[index]
        return seen

    def data(self) -> dict[str, Any]:
        """The graph as JSON values; `from_data` reads it back."""
        before: list[dict[str, list[str]]] = [{} for _ in self.operations]
        for edges in self.edges:
            for a, b in zip(edges.before_index, edges.after_index, strict=True):
                before[b].setdefault(edges.kind, []).append(self.ids[a])
        operations = [
            {"id": name} | _data(operation) | ({"after": after} if after else {})
            for name, operation, after in zip(self.ids, self.operations, before, strict=True)
        ]
        return {"change": _data(self.change), "operations": operations}


def _data(record: Any) -> dict[str, Any]:
    """A record's fields as JSON values, without those that have their default."""
    values: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if default is MISSING or value != default:
            values[field.name] = _value(value)
    return values


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        entries = cast("Mapping[Lane, int]", value)
        return {lane_id(lane): number for lane, number in sorted(entries.items(), key=lambda item: (item[0] < 0, item))}
    if isinstance(value, tuple):
        return [_value(part) for part in cast("tuple[Any, ...]", value)]
    return _data(value) if isinstance(value, EmuChange | Residency | Flow) else value


def from_data(data: Mapping[str, Any]) -> TransitionGraph:
    """The graph that `TransitionGraph.data` wrote; KeyError or TypeError for what it cannot have written."""
    wanted = dict(data["change"])
    for name, record in (("emus", EmuChange), ("residencies", Residency), ("flows", Flow)):
        wanted[name] = tuple(record(**entry) for entry in wanted[name])
    for name in ("capacity_bytes", "host_of", "other_bytes", "phase_bytes"):
        if name in wanted:
            wanted[name] = {_lane(key): value for key, value in wanted[name].items()}
    for name in ("early", "outside"):
        if name in wanted:
            wanted[name] = tuple(wanted[name])
    entries = [dict(entry) for entry in data["operations"]]
    index = {entry.pop("id"): number for number, entry in enumerate(entries)}
    pairs: dict[str, tuple[list[int], list[int]]] = {kind: ([], []) for kind in EDGE_KINDS}
    for number, entry in enumerate(entries):
        for kind, names in entry.pop("after", {}).items():
            pairs[kind][0].extend(index[name] for name in names)
            pairs[kind][1].extend([number] * len(names))
        entry["lanes"] = tuple(entry.get("lanes", ()))
    edges = tuple(edges_of(kind, np.array(pairs[kind], dtype=np.int64)) for kind in EDGE_KINDS)
    return TransitionGraph(
        change=Change(**wanted), operations=tuple(Operation(**entry) for entry in entries), edges=edges
    )


def _lane(name: str) -> Lane:
    return -1 - int(name.removeprefix("host")) if name.startswith("host") else int(name)


def edges_of(kind: EdgeKind, ends: Numbers) -> Edges:
    """Edges [before and after, edges] of one kind in a fixed order: by the operation that waits, then what it waits for."""
    if not ends.size:
        return Edges(kind=kind)
    size = int(ends.max()) + 1
    keys = np.unique(ends[1] * size + ends[0])
    return Edges(kind=kind, before_index=tuple((keys % size).tolist()), after_index=tuple((keys // size).tolist()))
