"""Which bytes go from which slot to which: target holdings cut against present ones."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nereus.boxes import Box
from nereus.errors import TransferFailed
from nereus.schedule import rounds
from nereus.storage import Shard

Holding = Mapping[int, tuple[Shard, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A box that `source` gives and `destination` receives; `held` and `wanted` are the shards it lies in."""

    source: int
    destination: int
    held: Shard
    wanted: Shard
    box: Box

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


def cut(present: Holding, target: Holding, *, rename: Mapping[str, str] | None = None) -> tuple[Slice, ...]:
    """Slices that give every slot of `target` its shards from the holders in `present`; each byte exactly once.

    A slot serves itself first. What only one slot holds is charged to it first; then what several hold is taken, the
    largest first, from the one that sends least. `rename` maps target EMU names to the present EMU that they are
    filled from. TransferFailed when nobody holds a needed box.
    """
    holders: dict[tuple[str, str, str], list[tuple[int, Shard]]] = defaultdict(list)
    for slot in sorted(present):
        for shard in present[slot]:
            holders[shard.emu, shard.component, shard.tensor].append((slot, shard))
    names = rename or {}
    cells: list[_Cell] = []
    for slot in sorted(target):
        for wanted in target[slot]:
            key = (names.get(wanted.emu, wanted.emu), wanted.component, wanted.tensor)
            cells += _cells(slot, wanted, holders[key])
    sent: dict[int, int] = defaultdict(int)
    chosen: dict[int, Slice] = {}
    for index in sorted(range(len(cells)), key=lambda i: (len(cells[i].offers) > 1, -cells[i].size_bytes, i)):
        cell = cells[index]
        source = min(cell.offers, key=lambda slot: (sent[slot], slot))
        chosen[index] = Slice(
            source=source, destination=cell.slot, held=cell.offers[source], wanted=cell.wanted, box=cell.box
        )
        if source != cell.slot:
            sent[source] += cell.size_bytes
    return tuple(chosen[index] for index in range(len(cells)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cell:
    """A part of a wanted shard that each of `offers` (held shard by slot) could give whole."""

    slot: int
    wanted: Shard
    box: Box
    offers: Mapping[int, Shard]

    @property
    def size_bytes(self) -> int:
        return self.box.elements * (self.wanted.size_bytes // self.wanted.box.elements)


def _cells(slot: int, wanted: Shard, holders: list[tuple[int, Shard]]) -> list[_Cell]:
    """Cells of one wanted shard: first what the slot holds itself, then by the smallest common parts."""
    found: list[_Cell] = []
    missing: list[Box] = [wanted.box]
    while missing:
        box = missing.pop()
        offers = [(s, held, part) for s, held in holders if (part := held.box.intersect(box)) is not None]
        if not offers:
            raise TransferFailed(f"no slot holds {wanted.component} of {wanted.tensor} {box} for slot {slot}")
        own = [offer for offer in offers if offer[0] == slot]
        part = max(own, key=lambda o: o[2].elements)[2] if own else min(offers, key=lambda o: o[2].elements)[2]
        able = {s: held for s, held, _ in (own or offers) if held.box.contains(part)}
        found.append(_Cell(slot=slot, wanted=wanted, box=part, offers=able))
        missing += box.subtract(part)
    return found


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

    A slot sends and receives at most one bucket a round, so its staging never exceeds `bucket_bytes`.
    """
    limit = max(bucket_bytes // 2, 1)
    queues: dict[tuple[int, int], list[list[Slice]]] = defaultdict(lambda: [[]])
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for whole_piece in slices:
        if whole_piece.source == whole_piece.destination:
            continue
        pair = (whole_piece.source, whole_piece.destination)
        for piece in _split(whole_piece, limit):
            if sizes[pair] + piece.size_bytes > limit and queues[pair][-1]:
                queues[pair].append([])
                sizes[pair] = 0
            queues[pair][-1].append(piece)
            sizes[pair] += piece.size_bytes
    loads = [(pair, tuple(parts)) for pair, lists in sorted(queues.items()) for parts in lists if parts]
    turns = rounds([pair for pair, _ in loads])
    buckets = tuple(
        Bucket(turn=first_turn + turn, source=pair[0], destination=pair[1], slices=parts)
        for (pair, parts), turn in sorted(zip(loads, turns, strict=True), key=lambda item: (item[1], item[0][0]))
    )
    return Movement(kept=tuple(s for s in slices if s.source == s.destination), buckets=buckets)


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
    nothing travels that is in place; a slot takes part in at most one send and one receive a round; no bucket exceeds
    its half of `bucket_bytes`.
    """
    names = rename or {}
    held = {slot: set(shards) for slot, shards in present.items()}
    written: dict[tuple[int, Shard], list[Box]] = defaultdict(list)
    for piece in (*moved.kept, *(s for b in moved.buckets for s in b.slices)):
        if piece.held not in held.get(piece.source, ()) or not piece.held.box.contains(piece.box):
            raise TransferFailed(f"slot {piece.source} does not hold {piece.held.tensor} {piece.box}")
        same = replace(piece.held, emu=names.get(piece.wanted.emu, piece.wanted.emu), box=piece.wanted.box)
        if replace(piece.wanted, emu=same.emu) != same or piece.held.emu != same.emu:
            raise TransferFailed(f"{piece.wanted.component} of {piece.wanted.tensor} would be filled from {piece.held}")
        written[piece.destination, piece.wanted].append(piece.box)
    _check_nothing_in_place_travels(present, moved)
    for slot, shards in target.items():
        for shard in shards:
            _check_cover(slot, shard, written.pop((slot, shard), []))
    if written:
        raise TransferFailed(f"bytes written that no target wants: {next(iter(written))}")
    _check_ports(moved, bucket_bytes)


def _check_nothing_in_place_travels(present: Holding, moved: Movement) -> None:
    in_place: dict[tuple[int, str, str, str], list[Box]] = defaultdict(list)
    for slot, shards in present.items():
        for shard in shards:
            in_place[slot, shard.emu, shard.component, shard.tensor].append(shard.box)
    for piece in (s for b in moved.buckets for s in b.slices):
        own = in_place[piece.destination, piece.held.emu, piece.held.component, piece.held.tensor]
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
