"""The fabric over gloo: every byte arrives in its place, however buckets, messages and room are cut."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from nereus.boxes import Box
from nereus.engines.world import ProcessWorld
from nereus.runtime import fabric, state
from nereus.runtime.meeting import Meeting
from nereus.slices import Holding, check, cut, movement
from nereus.storage import Shard
from tests.processes import side_by_side

SIZE = 3
SHAPES = {"wide": ((7, 1500), "float32"), "tall": ((610, 9), "bfloat16"), "square": ((64, 90), "float32")}
ALONE_BYTES = (64 << 10, 700, 96)
BUCKETS_BYTES = (1 << 20, 16 << 10, 6002)


def shard(tensor: str, box: Box) -> Shard:
    return Shard(emu="actor.train", component="weight", tensor=tensor, box=box, dtype=SHAPES[tensor][1])


def parted(axis: int, turn: int) -> Holding:
    """Each tensor in as many unequal parts along an axis as there are slots, the first of them on slot `turn`."""
    found: dict[int, list[Shard]] = {slot: [] for slot in range(SIZE)}
    for tensor, (shape, _) in SHAPES.items():
        cuts = (0, shape[axis] // 5, shape[axis] // 2, shape[axis])
        for part in range(SIZE):
            start, stop = [0, 0], list(shape)
            start[axis], stop[axis] = cuts[part], cuts[part + 1]
            found[(part + turn) % SIZE].append(shard(tensor, Box(tuple(start), tuple(stop))))
    return {slot: tuple(shards) for slot, shards in found.items()}


def contents(of: Shard) -> Tensor:
    """A function of the place in the tensor."""
    shape, dtype = SHAPES[of.tensor]
    whole = torch.arange(shape[0] * shape[1]).remainder(251).view(shape).to(getattr(torch, dtype))
    return whole[of.box.slices((0, 0))]


def apart(of: Shard) -> Tensor:
    """Unfilled, its rows with a gap between them, as engines hold fused parameters."""
    rows, columns = of.box.shape
    return torch.full((rows, columns + 3), torch.nan, dtype=getattr(torch, of.dtype))[:, :columns]


def member(rank: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    world = ProcessWorld(rank=rank, size=SIZE, address="127.0.0.1", port=port, timeout_seconds=60)
    for alone_bytes in ALONE_BYTES:
        fabric.ALONE_BYTES = alone_bytes
        for bucket_bytes in BUCKETS_BYTES:
            for before, after in (
                (parted(0, 0), parted(1, 1)),
                (parted(1, 0), parted(0, 2)),
                (parted(0, 0), parted(0, 1)),
            ):
                moves(rank, before, after, bucket_bytes)
    world.close()


def moves(rank: int, before: Holding, after: Holding, bucket_bytes: int) -> None:
    moved = movement(cut(before, after, relay_least_bytes=1), bucket_bytes)
    check(before, after, moved, bucket_bytes)
    program = fabric.program_of(moved, rank, after[rank])
    for whole in (True, False):  # shards in one piece, and with gaps
        sources = {of: contents(of) for of in before[rank]}
        targets = state.empty(after[rank]) if whole else {of: apart(of) for of in after[rank]}
        traffic = fabric.run(program, sources, targets)
        assert all(torch.equal(data, contents(of)) for of, data in targets.items())
        assert (traffic.sent_bytes, traffic.received_bytes) == (moved.sent_bytes(rank), moved.received_bytes(rank))
        assert 0 <= traffic.staged_bytes <= fabric.staging_bytes(program) <= bucket_bytes
    nothing = fabric.run(replace(program, buckets=()), sources, targets)
    assert nothing == fabric.Traffic()


def test_what_arrives_is_what_was_sent() -> None:
    meeting = Meeting("127.0.0.1", 60)
    side_by_side(member, meeting.port, count=SIZE)
    meeting.close()
