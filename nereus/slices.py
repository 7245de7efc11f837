"""Which bytes go from which slot to which: slices, packed in buckets, ordered in rounds; and the proof that they may."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.boxes import Box, flat_boxes
from nereus.errors import TransferFailed
from nereus.fleet import Fleet, uniform
from nereus.schedule import pipelined, rounds
from nereus.storage import Shard
from nereus.transfer.boxtable import TRACK, box_of, of_holding
from nereus.transfer.demands import DESTINATION, HOP, SOURCE, START, STOP, STREAM
from nereus.transfer.routes import RELAY_LEAST_BYTES, Routes, routes
from nereus.transfer.streams import streams

Holding = Mapping[int, tuple[Shard, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A box that `source` gives and `destination` receives; `held` and `wanted` are the shards it lies in.

    At hop 0 `held` is of the present; at a higher hop it is what the source itself wanted and received before.
    """

    source: int
    destination: int
    held: Shard
    wanted: Shard
    box: Box
    hop: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the slice."""
        return self.box.elements * (self.held.size_bytes // self.held.box.elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Slices that travel together from one slot to another in round `turn`."""

    turn: int
    source: int
    destination: int
    slices: tuple[Slice, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire."""
        return sum(s.size_bytes for s in self.slices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Movement:
    """One movement of state: what stays on its slot (copied locally) and what travels, in rounds of buckets."""

    kept: tuple[Slice, ...]
    buckets: tuple[Bucket, ...]

    @property
    def movement_id(self) -> str:
        """A name that is a function of the content."""
        return hashlib.sha256(repr((self.kept, self.buckets)).encode()).hexdigest()[:12]

    @property
    def moved_bytes(self) -> int:
        """Bytes that travel between slots."""
        return sum(b.size_bytes for b in self.buckets)

    @property
    def turns(self) -> int:
        """How many rounds the movement takes."""
        return 1 + max((b.turn for b in self.buckets), default=-1)

    def sent_bytes(self, slot: int) -> int:
        """Bytes that `slot` sends."""
        return sum(b.size_bytes for b in self.buckets if b.source == slot)

    def received_bytes(self, slot: int) -> int:
        """Bytes that `slot` receives."""
        return sum(b.size_bytes for b in self.buckets if b.destination == slot)


def cut(
    present: Holding,
    target: Holding,
    *,
    rename: Mapping[str, str] | None = None,
    fleet: Fleet | None = None,
    relay_least_bytes: int | None = RELAY_LEAST_BYTES,
) -> tuple[Slice, ...]:
    """Slices that give every slot of `target` its shards from the holders in `present`; each byte exactly once.

    Senders are chosen by `nereus.transfer.routes` over `fleet` (default: one node). `rename` maps target EMU names to the
    present EMU that they are filled from. TransferFailed when nobody holds a needed box.
    """
    slots = max((*present, *target), default=-1) + 1
    links = fleet or uniform(slots, slots_per_node=max(slots, 1))
    wanted = streams(of_holding(present), of_holding(target), rename)
    return tuple(slices_of(routes(wanted, np.arange(slots), links, relay_least_bytes=relay_least_bytes)))


def slices_of(found: Routes, slot: int | None = None) -> Iterator[Slice]:
    """The slices of a routing, or only those that one slot gives, receives or keeps; made as they are asked for."""
    expand = _Expansion(found)
    kept = found.kept if slot is None else found.kept[found.kept[:, 1] == slot]
    for stream, holder in kept:
        yield from expand.range(int(stream), int(holder), int(holder), 0, int(found.streams.size_bytes[stream]), 0)
    for row in found.rows if slot is None else found.of_slot(slot):
        yield from expand.range(*(int(row[c]) for c in (STREAM, SOURCE, DESTINATION, START, STOP, HOP)))


class _Expansion:
    """Turns byte ranges of streams into slices."""

    def __init__(self, found: Routes) -> None:
        self.streams = found.streams
        self._shards: dict[tuple[bool, int, str], Shard] = {}
        self._members = [frozenset(s.tolist()) for s in found.streams.present.sets]

    def range(self, stream: int, source: int, destination: int, start: int, stop: int, hop: int) -> Iterator[Slice]:
        """Slices of the bytes [start, stop) of a stream."""
        s = self.streams
        base = int(s.ends[s.first[stream]])
        first = int(np.searchsorted(s.ends, base + start, side="right")) - 1
        last = int(np.searchsorted(s.ends, base + stop, side="left"))
        for atom in range(first, last):
            track = s.target.tracks[int(s.atoms[atom, TRACK])]
            box, unit = box_of(track, s.atoms[atom]), track.element_bytes
            low, high = (base + start - int(s.ends[atom])) // unit, (base + stop - int(s.ends[atom])) // unit
            row = int(s.wanted[atom])
            for _, part in flat_boxes(box, low, high):
                for component in track.components:
                    wanted = self._shard(True, row, component)
                    held = wanted if hop else self._shard(False, self._held(atom, source), component)
                    yield Slice(source=source, destination=destination, held=held, wanted=wanted, box=part, hop=hop)

    def _held(self, atom: int, source: int) -> int:
        """The present row from which `source` gives an atom: the first covering in which it holds it."""
        rows = (int(row) for row in self.streams.held[atom] if row >= 0)
        return next(row for row in rows if source in self._members[int(self.streams.present.holders[row])])

    def _shard(self, target: bool, row: int, component: str) -> Shard:
        key = (target, row, component)
        if key not in self._shards:
            self._shards[key] = (self.streams.target if target else self.streams.present).shard(row, component)
        return self._shards[key]


def _split(piece: Slice, limit_bytes: int) -> list[Slice]:
    """A slice cut along its longest axis until each part is at most `limit_bytes`."""
    if piece.size_bytes <= limit_bytes or piece.box.elements == 1:
        return [piece]
    shape = piece.box.shape
    axis = max(range(len(shape)), key=lambda a: shape[a])
    middle = piece.box.start[axis] + shape[axis] // 2
    low = Box(piece.box.start, (*piece.box.stop[:axis], middle, *piece.box.stop[axis + 1 :]))
    high = Box((*piece.box.start[:axis], middle, *piece.box.start[axis + 1 :]), piece.box.stop)
    return [p for box in (low, high) for p in _split(replace(piece, box=box), limit_bytes)]


def movement(slices: tuple[Slice, ...], bucket_bytes: int, first_turn: int = 0) -> Movement:
    """Packs slices into buckets of at most half of `bucket_bytes` and orders these in rounds.

    A slot sends and receives at most one bucket a round, so its staging never exceeds `bucket_bytes`. What is handed on
    goes in a later round than it came in.
    """
    limit = max(bucket_bytes // 2, 1)
    queues: dict[tuple[int, int, int], list[list[Slice]]] = defaultdict(lambda: [[]])
    sizes: dict[tuple[int, int, int], int] = defaultdict(int)
    for whole_piece in slices:
        if whole_piece.source == whole_piece.destination:
            continue
        key = (whole_piece.hop, whole_piece.source, whole_piece.destination)
        for piece in _split(whole_piece, limit):
            if sizes[key] + piece.size_bytes > limit and queues[key][-1]:
                queues[key].append([])
                sizes[key] = 0
            queues[key][-1].append(piece)
            sizes[key] += piece.size_bytes
    loads = [(key[1:], tuple(parts)) for key, lists in sorted(queues.items()) for parts in lists if parts]
    pairs = [pair for pair, _ in loads]
    relayed = any(key[0] for key in queues)
    turns = pipelined(pairs, _feeds([parts for _, parts in loads])) if relayed else rounds(pairs)
    buckets = tuple(
        Bucket(turn=first_turn + turn, source=pair[0], destination=pair[1], slices=parts)
        for (pair, parts), turn in sorted(zip(loads, turns, strict=True), key=lambda item: (item[1], item[0][0]))
    )
    return Movement(kept=tuple(s for s in slices if s.source == s.destination), buckets=buckets)


def _feeds(loads: Sequence[tuple[Slice, ...]]) -> list[list[int]]:
    """For each bucket the earlier ones that bring its source what it hands on."""
    arrived: dict[tuple[int, Shard], list[tuple[int, Box]]] = defaultdict(list)
    for index, parts in enumerate(loads):
        for piece in parts:
            arrived[piece.destination, piece.wanted].append((index, piece.box))
    return [
        sorted(
            {
                feed
                for piece in parts
                if piece.hop
                for feed, box in arrived[piece.source, piece.held]
                if feed < index and box.intersect(piece.box) is not None
            }
        )
        for index, parts in enumerate(loads)
    ]


def join(parts: tuple[Movement, ...]) -> Movement:
    """Movements made one after the other with rising `first_turn`, as one."""
    return Movement(
        kept=tuple(s for part in parts for s in part.kept), buckets=tuple(b for part in parts for b in part.buckets)
    )


def layered(slices: tuple[Slice, ...], order: Mapping[str, int], bucket_bytes: int) -> tuple[Movement, ...]:
    """One Movement per layer of `order` (tensor name -> layer number), rounds numbered through: a weight sync."""
    groups: dict[int, list[Slice]] = defaultdict(list)
    for piece in slices:
        groups[order[piece.wanted.tensor]].append(piece)
    made: list[Movement] = []
    turn = 0
    for layer in sorted(groups):
        made.append(movement(tuple(groups[layer]), bucket_bytes, turn))
        turn = max(turn, made[-1].turns)
    return tuple(made)


def check(
    present: Holding, target: Holding, moved: Movement, bucket_bytes: int, *, rename: Mapping[str, str] | None = None
) -> None:
    """Proves a movement before it runs: TransferFailed with the first violation.

    Every target byte is written exactly once, from a slot that holds that byte of that component of that tensor;
    nothing travels that is in place; what is handed on has come before; a slot takes part in at most one send and one receive a round; no bucket exceeds
    its half of `bucket_bytes`.
    """
    names = rename or {}
    held = {slot: set(shards) for slot, shards in present.items()}
    given = {slot: set(shards) for slot, shards in target.items()}
    written: dict[tuple[int, Shard], list[Box]] = defaultdict(list)
    for piece in (*moved.kept, *(s for b in moved.buckets for s in b.slices)):
        if piece.held not in (given if piece.hop else held).get(piece.source, ()) or not piece.held.box.contains(
            piece.box
        ):
            raise TransferFailed(f"slot {piece.source} does not hold {piece.held.tensor} {piece.box}")
        source_emu = piece.wanted.emu if piece.hop else names.get(piece.wanted.emu, piece.wanted.emu)
        if piece.held != replace(piece.wanted, emu=source_emu, box=piece.held.box):
            raise TransferFailed(f"{piece.wanted.component} of {piece.wanted.tensor} would be filled from {piece.held}")
        written[piece.destination, piece.wanted].append(piece.box)
    _check_nothing_in_place_travels(present, moved, names)
    for slot, shards in target.items():
        for shard in shards:
            _check_cover(slot, shard, written.pop((slot, shard), []))
    if written:
        raise TransferFailed(f"bytes written that no target wants: {next(iter(written))}")
    _check_handed_on(moved)
    _check_ports(moved, bucket_bytes)


def _check_handed_on(moved: Movement) -> None:
    """What is handed on has come, all of it, in an earlier round."""
    arrived: dict[tuple[int, Shard], list[tuple[int, Box]]] = defaultdict(list)
    for bucket in moved.buckets:
        for piece in bucket.slices:
            arrived[piece.destination, piece.wanted].append((bucket.turn, piece.box))
    for bucket in moved.buckets:
        for piece in bucket.slices:
            if piece.hop:
                there = arrived[piece.source, piece.held]
                common = [box.intersect(piece.box) for turn, box in there if turn < bucket.turn]
                if sum(box.elements for box in common if box is not None) != piece.box.elements:
                    raise TransferFailed(
                        f"slot {piece.source} would hand on {piece.held.tensor} {piece.box} before it came"
                    )


def _check_nothing_in_place_travels(present: Holding, moved: Movement, names: Mapping[str, str]) -> None:
    in_place: dict[tuple[int, str, str, str], list[Box]] = defaultdict(list)
    for slot, shards in present.items():
        for shard in shards:
            in_place[slot, shard.emu, shard.component, shard.tensor].append(shard.box)
    for piece in (s for b in moved.buckets for s in b.slices):
        emu = names.get(piece.wanted.emu, piece.wanted.emu)
        own = in_place[piece.destination, emu, piece.held.component, piece.held.tensor]
        if piece.source != piece.destination and any(box.intersect(piece.box) for box in own):
            raise TransferFailed(f"{piece.wanted.tensor} {piece.box} is in place on slot {piece.destination}, yet sent")


def _check_ports(moved: Movement, bucket_bytes: int) -> None:
    if any(piece.source != piece.destination for piece in moved.kept):
        raise TransferFailed("a slice between two slots is listed as kept")
    busy: set[tuple[int, str, int]] = set()
    for bucket in moved.buckets:
        ports = {(bucket.turn, "send", bucket.source), (bucket.turn, "receive", bucket.destination)}
        if ports & busy or bucket.source == bucket.destination:
            raise TransferFailed(f"round {bucket.turn} uses a port of slot {bucket.source} twice or sends to itself")
        busy |= ports
        if bucket.size_bytes > max(bucket_bytes // 2, 4):
            raise TransferFailed(f"a bucket of {bucket.size_bytes:,} bytes exceeds half of {bucket_bytes:,}")
        if any((s.source, s.destination) != (bucket.source, bucket.destination) for s in bucket.slices):
            raise TransferFailed(
                f"a bucket from slot {bucket.source} to {bucket.destination} holds another pair's slice"
            )


def _check_cover(slot: int, shard: Shard, boxes: list[Box]) -> None:
    if sum(b.elements for b in boxes) != shard.box.elements or not all(shard.box.contains(b) for b in boxes):
        raise TransferFailed(f"slot {slot}: {shard.component} of {shard.tensor} {shard.box} is not covered once")
    ordered = sorted(boxes)
    for index, box in enumerate(ordered):
        if any(box.intersect(other) for other in ordered[index + 1 :]):
            raise TransferFailed(f"slot {slot}: {shard.tensor} {box} is written twice")
