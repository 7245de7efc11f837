"""Moves slices between slots: point-to-point buckets in the planned rounds, counted byte by byte.

The same code runs over NCCL and gloo. A slot stages at most one bucket that it sends and one that it receives at a
time, each at most half of `transfer.bucket_bytes`. Nothing here is collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from nereus.boxes import Box
from nereus.errors import TransferFailed
from nereus.slices import Bucket, Movement, Slice
from nereus.storage import Shard


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


def _in_order(bucket: Bucket) -> list[Slice]:
    """Wide elements first, so that every slice of a mixed bucket is aligned."""
    return sorted(bucket.slices, key=lambda s: -(s.held.size_bytes // s.held.box.elements))


def _spans(bucket: Bucket, buffer: Tensor) -> list[tuple[Slice, Tensor]]:
    spans: list[tuple[Slice, Tensor]] = []
    at = 0
    for piece in _in_order(bucket):
        flat = buffer[at : at + piece.size_bytes].view(getattr(torch, piece.held.dtype))
        spans.append((piece, flat.view(piece.box.shape)))
        at += piece.size_bytes
    return spans


def run(program: Program, sources: Mapping[Shard, Tensor], targets: Mapping[Shard, Tensor]) -> Traffic:
    """Carries out this slot's part: fills `targets` from its own `sources` and from its peers.

    The world's ranks are the slots. TransferFailed when a peer fails or does not answer within the world's timeout.
    """
    traffic = Traffic()
    for piece in program.kept:
        _part(targets[piece.wanted], piece.wanted, piece.box).copy_(_part(sources[piece.held], piece.held, piece.box))
    for turn in sorted({b.turn for b in program.buckets}):
        sends = [b for b in program.buckets if b.turn == turn and b.source == program.slot]
        receives = [b for b in program.buckets if b.turn == turn and b.destination == program.slot]
        _turn(sends, receives, sources, targets, traffic)
    return traffic


def _turn(
    sends: list[Bucket],
    receives: list[Bucket],
    sources: Mapping[Shard, Tensor],
    targets: Mapping[Shard, Tensor],
    traffic: Traffic,
) -> None:
    """One round: at most one bucket each way."""
    device = next(iter(sources.values() or targets.values())).device if sources or targets else torch.device("cpu")
    buffers = [(b, torch.empty(b.size_bytes, dtype=torch.uint8, device=device)) for b in receives]
    operations = [dist.P2POp(dist.irecv, buffer, bucket.source) for bucket, buffer in buffers]
    for bucket in sends:
        buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=device)
        for piece, span in _spans(bucket, buffer):
            given = targets if piece.hop else sources  # what is handed on came in an earlier round
            span.copy_(_part(given[piece.held], piece.held, piece.box))
        operations.append(dist.P2POp(dist.isend, buffer, bucket.destination))
    try:
        for work in dist.batch_isend_irecv(operations):  # one group on NCCL, one by one on gloo
            work.wait()
    except RuntimeError as error:
        peers = sorted({b.source for b in receives} | {b.destination for b in sends})
        raise TransferFailed(f"transfer with slots {peers} failed: {error}") from error
    traffic.received_bytes += sum(buffer.numel() for _, buffer in buffers)
    traffic.sent_bytes += sum(o.tensor.numel() for o in operations if o.op is dist.isend)
    staged = sum(o.tensor.numel() for o in operations)
    traffic.staged_bytes = max(traffic.staged_bytes, staged)
    for bucket, buffer in buffers:
        for piece, span in _spans(bucket, buffer):
            _part(targets[piece.wanted], piece.wanted, piece.box).copy_(span)
