"""Moves slices between slots: point-to-point buckets in the planned rounds, counted byte by byte.

The same code runs over NCCL and gloo. What is large and contiguous travels straight out of and into the state; the rest
is packed: a slot stages at most as much as the largest bucket that it sends and the largest that it receives, each at
most half of `transfer.bucket_bytes`. A bucket travels in two steps, so that one is packed or unpacked while the other is on
the wire: a step waits for older ones that are in its room, and for all only where something is handed on. Nothing here is
collective.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.boxes import Box
from nereus.errors import TransferFailed
from nereus.runtime import state
from nereus.slices import Bucket, Movement, Slice
from nereus.storage import Shard

ALONE_BYTES = 64 << 10
"""From this size on a slice is a message of its own: below it a message costs more than the copy that it saves."""
ALIGN_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One slot's part of a Movement: local copies, and its buckets in the order of their rounds."""

    slot: int
    kept: tuple[Slice, ...]
    buckets: tuple[Bucket, ...]
    wanted: tuple[Shard, ...]


def program_of(moved: Movement, slot: int, wanted: Sequence[Shard]) -> Program:
    """The part of `slot`, which shall end with `wanted`."""
    return Program(
        slot=slot,
        kept=tuple(s for s in moved.kept if s.destination == slot),
        buckets=tuple(b for b in moved.buckets if slot in (b.source, b.destination)),
        wanted=tuple(wanted),
    )


def staging_bytes(program: Program) -> int:
    """The most that a slot stages for a program: a bucket out and a bucket in."""
    return sum(_room_bytes(program))


def _room_bytes(program: Program) -> tuple[int, int]:
    """Bytes to stage out and in."""
    sends = (b.size_bytes for b in program.buckets if b.source == program.slot)
    receives = (b.size_bytes for b in program.buckets if b.destination == program.slot)
    return max(sends, default=0), max(receives, default=0)


@dataclass(kw_only=True)
class Traffic:
    """Bytes that this slot put on and took off the wire, and the most that it staged at once."""

    sent_bytes: int = 0
    received_bytes: int = 0
    staged_bytes: int = 0

    def add(self, other: Traffic) -> None:
        """Adds another movement's traffic."""
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.staged_bytes = max(self.staged_bytes, other.staged_bytes)


def _part(tensor: Tensor, shard: Shard, box: Box) -> Tensor:
    return tensor[box.slices(shard.box.start)]


class _Room:
    """Memory for messages that cannot travel out of or into the state itself, used round and round: pages are not free."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        between_bytes = ALIGN_BYTES * (size_bytes // ALONE_BYTES + 2)
        self._buffer = torch.empty(size_bytes + between_bytes, dtype=torch.uint8, device=state.device())
        self._next = 0

    def range_of(self, messages: Sequence[_Message]) -> range:
        """The next bytes in turn, for what these messages stage; those that use them now must be done first."""
        sizes = [message.staged_bytes for message in messages if message.staged_bytes]
        length = sum(map(_aligned, sizes[:-1])) + sum(sizes[-1:])
        start = self._next if self._next + length <= self._size_bytes else 0
        self._next = _aligned(start + length)
        return range(start, start + length)

    def at(self, start: int, size_bytes: int) -> Tensor:
        """Bytes of the room."""
        return self._buffer[start : start + size_bytes]


class _Message:
    """Slices of a bucket that travel as one, as their places in the state: one that needs no copy, or several packed."""

    def __init__(self, peer: int, places: list[Tensor]) -> None:
        self.peer, self._places = peer, places
        self.size_bytes = sum(_size_bytes(place) for place in places)
        self._direct = len(places) == 1 and places[0].is_contiguous()
        self.staged_bytes = 0 if self._direct else self.size_bytes

    def wire(self, room: _Room, at: int) -> Tensor:
        """The flat bytes that travel; where they are staged they lie in `room` from `at` on."""
        return self._places[0].view(-1).view(torch.uint8) if self._direct else room.at(at, self.size_bytes)

    def spans(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each place in the state beside its place in the staged `buffer`; none where the message is not staged."""
        found: list[tuple[Tensor, Tensor]] = []
        at = 0
        for place in [] if self._direct else self._places:
            size = _size_bytes(place)
            found.append((place, buffer[at : at + size].view(place.dtype).view(place.shape)))
            at += size
        return found


def _size_bytes(place: Tensor) -> int:
    return place.numel() * place.element_size()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _steps(peer: int, places: list[Tensor], limit_bytes: int) -> list[list[_Message]]:
    """How a bucket travels, the same for both ends: large slices alone, small ones together, in steps of about `limit_bytes`.

    Wide elements first, so that every slice of a packed message is aligned.
    """
    large = [part for place in places if _size_bytes(place) >= ALONE_BYTES for part in _rows(place, limit_bytes)]
    small = sorted((place for place in places if _size_bytes(place) < ALONE_BYTES), key=lambda p: -p.element_size())
    packed = [small[cut] for cut in _cuts([_size_bytes(place) for place in small], limit_bytes)]
    messages = [_Message(peer, group) for group in (*([part] for part in large), *packed)]
    return [messages[cut] for cut in _cuts([message.size_bytes for message in messages], limit_bytes)]


def _rows(place: Tensor, limit_bytes: int) -> Sequence[Tensor]:
    """A slice in runs of rows (of elements, where it has one axis), each at most `limit_bytes` or a row."""
    if _size_bytes(place) <= limit_bytes:
        return (place,)
    return place.split(max(limit_bytes * place.shape[0] // _size_bytes(place), 1))


def _cuts(sizes: Sequence[int], limit_bytes: int) -> list[slice]:
    """Where to cut things of these sizes, in order, into groups of at most `limit_bytes`, or one that is longer."""
    starts: list[int] = []
    room = 0
    for index, size in enumerate(sizes):
        if not starts or size > room:
            starts.append(index)
            room = limit_bytes
        room -= size
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=False)]


def run(
    program: Program,
    sources: Mapping[Shard, Tensor],
    targets: Mapping[Shard, Tensor],
    check: Callable[[], None] = lambda: None,
) -> Traffic:
    """Carries out this slot's part: fills `targets` from its own `sources` and from its peers.

    The world's ranks are the slots. TransferFailed when a peer fails or does not answer within the world's timeout;
    `check` is called before each round and raises where the slot shall go no further.
    """
    for piece in program.kept:
        _part(targets[piece.wanted], piece.wanted, piece.box).copy_(_part(sources[piece.held], piece.held, piece.box))
    wire = _Wire(program, sources, targets)
    turns: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in program.buckets:
        turns[bucket.turn].append(bucket)
    for turn in sorted(turns):
        check()
        wire.turn(turns[turn])
    wire.drain()
    return wire.traffic


@dataclass(kw_only=True)
class _Step:
    """Messages under way together: where they are staged out and in, and what to put in its place when they have come."""

    out_range: range
    in_range: range
    staged_bytes: int
    peer_slots: list[int]
    works: list[dist.Work]
    arriving: list[tuple[_Message, Tensor]]

    def finish(self) -> None:
        """Waits, and unpacks what came in packed."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"transfer with slots {sorted(set(self.peer_slots))} failed: {error}") from error
        for message, buffer in self.arriving:
            for place, span in message.spans(buffer):
                place.copy_(span)

    def uses(self, out_range: range, in_range: range) -> bool:
        """Whether it is staged in any of these bytes."""
        return _overlap(self.out_range, out_range) or _overlap(self.in_range, in_range)


def _overlap(one: range, other: range) -> bool:
    return bool(one) and bool(other) and one.start < other.stop and other.start < one.stop


class _Wire:
    """The messages under way, step by step.

    No slots can wait for each other: a step waits for older ones alone, and the peers of those have come to the same
    step of the same round, or wait for still older ones.
    """

    def __init__(self, program: Program, sources: Mapping[Shard, Tensor], targets: Mapping[Shard, Tensor]) -> None:
        self._slot, self._sources, self._targets = program.slot, sources, targets
        self.traffic = Traffic()
        self._under_way: deque[_Step] = deque()
        self._out, self._in = (_Room(size) for size in _room_bytes(program))

    def turn(self, buckets: list[Bucket]) -> None:
        """Starts one round: at most one bucket each way."""
        if any(piece.hop for b in buckets if b.source == self._slot for piece in b.slices):
            self.drain()
        receives = [step for b in buckets if b.destination == self._slot for step in self._received(b)]
        sends = [step for b in buckets if b.source == self._slot for step in self._sent(b)]
        for incoming, outgoing in zip_longest(receives, sends, fillvalue=()):
            self._step(incoming, outgoing)

    def _received(self, bucket: Bucket) -> list[list[_Message]]:
        places = [_part(self._targets[p.wanted], p.wanted, p.box) for p in bucket.slices]
        return _steps(bucket.source, places, bucket.size_bytes // 2)

    def _sent(self, bucket: Bucket) -> list[list[_Message]]:
        held = [(self._targets if p.hop else self._sources)[p.held] for p in bucket.slices]  # handed on: came before
        places = [_part(tensor, p.held, p.box) for tensor, p in zip(held, bucket.slices, strict=True)]
        return _steps(bucket.destination, places, bucket.size_bytes // 2)

    def _step(self, receives: Sequence[_Message], sends: Sequence[_Message]) -> None:
        out_range, in_range = self._out.range_of(sends), self._in.range_of(receives)
        while (out_range or in_range) and any(step.uses(out_range, in_range) for step in self._under_way):
            self._under_way.popleft().finish()
        arriving = _placed(receives, self._in, in_range)
        leaving = _placed(sends, self._out, out_range)
        for message, buffer in leaving:
            for place, span in message.spans(buffer):
                span.copy_(place)
        operations = [dist.P2POp(dist.irecv, buffer, message.peer) for message, buffer in arriving]
        operations += [dist.P2POp(dist.isend, buffer, message.peer) for message, buffer in leaving]
        peers = [operation.peer for operation in operations]
        try:  # one group on NCCL, one by one on gloo
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise TransferFailed(f"transfer with slots {sorted(set(peers))} failed: {error}") from error
        staged_bytes = sum(message.staged_bytes for message in (*receives, *sends))
        step = _Step(
            out_range=out_range,
            in_range=in_range,
            staged_bytes=staged_bytes,
            peer_slots=peers,
            works=works,
            arriving=arriving,
        )
        self._under_way.append(step)
        self.traffic.received_bytes += sum(message.size_bytes for message in receives)
        self.traffic.sent_bytes += sum(message.size_bytes for message in sends)
        if staged_bytes:
            held_bytes = sum(step.staged_bytes for step in self._under_way)
            self.traffic.staged_bytes = max(self.traffic.staged_bytes, held_bytes)

    def drain(self) -> None:
        """Waits for all that is under way and puts what came in packed into its place."""
        while self._under_way:
            self._under_way.popleft().finish()


def _placed(messages: Sequence[_Message], room: _Room, at: range) -> list[tuple[_Message, Tensor]]:
    """Each message with the bytes that travel, the staged ones one after the other in `at`."""
    found: list[tuple[_Message, Tensor]] = []
    start = at.start
    for message in messages:
        found.append((message, message.wire(room, start)))
        start += _aligned(message.staged_bytes)
    return found
