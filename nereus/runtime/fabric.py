"""Moves slices between slots: point-to-point buckets in the planned rounds, counted byte by byte.

The same code runs over NCCL and gloo. What is large and contiguous travels straight out of and into the state; the rest
is packed: a slot stages at most as much as the largest bucket that it sends and the largest that it receives, each at
most half of `transfer.bucket_bytes`. Rounds follow each other without a wait until that room is used up or something is
handed on. Nothing here is collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    return 2 * max((bucket.size_bytes for bucket in program.buckets), default=0)


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


class _Staging:
    """Room for messages that cannot travel out of or into the state itself, used again and again: pages are not free."""

    def __init__(self, size_bytes: int) -> None:
        self._buffer = torch.empty(size_bytes, dtype=torch.uint8, device=state.device())
        self.used_bytes = 0

    def fits(self, size_bytes: int) -> bool:
        return self.used_bytes + size_bytes <= self._buffer.numel()

    def take(self, size_bytes: int) -> Tensor:
        """The next bytes; the room is big enough (`fits`)."""
        taken = self._buffer[self.used_bytes : self.used_bytes + size_bytes]
        self.used_bytes += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return taken


class _Message:
    """Slices of a bucket that travel as one, as their places in the state: one that needs no copy, or several packed."""

    def __init__(self, peer: int, places: list[Tensor]) -> None:
        self.peer, self._places = peer, places
        self.size_bytes = sum(_size_bytes(place) for place in places)
        self._direct = len(places) == 1 and places[0].is_contiguous()
        self.staged_bytes = 0 if self._direct else -(-self.size_bytes // ALIGN_BYTES) * ALIGN_BYTES

    def wire(self, staging: _Staging) -> Tensor:
        """The flat bytes that travel."""
        return self._places[0].view(-1).view(torch.uint8) if self._direct else staging.take(self.size_bytes)

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


def _messages(peer: int, places: list[Tensor]) -> list[_Message]:
    """How a bucket travels, the same for both ends: each large slice alone, all small ones together.

    Wide elements first, so that every slice of a packed message is aligned.
    """
    large = [place for place in places if _size_bytes(place) >= ALONE_BYTES]
    small = sorted((place for place in places if _size_bytes(place) < ALONE_BYTES), key=lambda p: -p.element_size())
    return [_Message(peer, [place]) for place in large] + ([_Message(peer, small)] if small else [])


def run(program: Program, sources: Mapping[Shard, Tensor], targets: Mapping[Shard, Tensor]) -> Traffic:
    """Carries out this slot's part: fills `targets` from its own `sources` and from its peers.

    The world's ranks are the slots. TransferFailed when a peer fails or does not answer within the world's timeout.
    """
    for piece in program.kept:
        _part(targets[piece.wanted], piece.wanted, piece.box).copy_(_part(sources[piece.held], piece.held, piece.box))
    wire = _Wire(program, sources, targets)
    turns: dict[int, list[Bucket]] = defaultdict(list)
    for bucket in program.buckets:
        turns[bucket.turn].append(bucket)
    for turn in sorted(turns):
        wire.turn(turns[turn])
    wire.drain()
    return wire.traffic


class _Wire:
    """The messages under way: started round by round, ended when their staging is needed or at the end."""

    def __init__(self, program: Program, sources: Mapping[Shard, Tensor], targets: Mapping[Shard, Tensor]) -> None:
        self._slot, self._sources, self._targets = program.slot, sources, targets
        self.traffic = Traffic()
        self._works: list[tuple[int, dist.Work]] = []
        self._arriving: list[tuple[_Message, Tensor]] = []
        sends = [b.size_bytes for b in program.buckets if b.source == program.slot]
        receives = [b.size_bytes for b in program.buckets if b.destination == program.slot]
        self._out, self._in = _Staging(max(sends, default=0)), _Staging(max(receives, default=0))

    def turn(self, buckets: list[Bucket]) -> None:
        """Starts one round: at most one bucket each way."""
        receives = [m for b in buckets if b.destination == self._slot for m in self._received(b)]
        sends = [m for b in buckets if b.source == self._slot for m in self._sent(b)]
        handed_on = any(piece.hop for b in buckets if b.source == self._slot for piece in b.slices)
        room = self._out.fits(sum(m.staged_bytes for m in sends)) and self._in.fits(
            sum(m.staged_bytes for m in receives)
        )
        if handed_on or not room:
            self.drain()
        operations: list[dist.P2POp] = []
        for message in receives:
            buffer = message.wire(self._in)
            self._arriving.append((message, buffer))
            operations.append(dist.P2POp(dist.irecv, buffer, message.peer))
        for message in sends:
            buffer = message.wire(self._out)
            for place, span in message.spans(buffer):
                span.copy_(place)
            operations.append(dist.P2POp(dist.isend, buffer, message.peer))
        self.traffic.received_bytes += sum(message.size_bytes for message in receives)
        self.traffic.sent_bytes += sum(message.size_bytes for message in sends)
        self.traffic.staged_bytes = max(self.traffic.staged_bytes, self._out.used_bytes + self._in.used_bytes)
        self._start(operations)

    def _received(self, bucket: Bucket) -> list[_Message]:
        return _messages(bucket.source, [_part(self._targets[p.wanted], p.wanted, p.box) for p in bucket.slices])

    def _sent(self, bucket: Bucket) -> list[_Message]:
        held = [(self._targets if p.hop else self._sources)[p.held] for p in bucket.slices]  # handed on: came before
        places = [_part(tensor, p.held, p.box) for tensor, p in zip(held, bucket.slices, strict=True)]
        return _messages(bucket.destination, places)

    def _start(self, operations: list[dist.P2POp]) -> None:
        peers = [operation.peer for operation in operations]
        try:  # one group on NCCL, one by one on gloo
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise TransferFailed(f"transfer with slots {sorted(set(peers))} failed: {error}") from error
        self._works += [(peers[min(i, len(peers) - 1)], work) for i, work in enumerate(works)]

    def drain(self) -> None:
        """Waits for all that is under way and puts what came in packed into its place."""
        try:
            for _, work in self._works:
                work.wait()
        except RuntimeError as error:
            peers = sorted({peer for peer, _ in self._works})
            raise TransferFailed(f"transfer with slots {peers} failed: {error}") from error
        for message, buffer in self._arriving:
            for place, span in message.spans(buffer):
                place.copy_(span)
        self._works.clear()
        self._arriving.clear()
        self._out.used_bytes = self._in.used_bytes = 0
