"""The process world: parts of it, their names, and that closing leaves nothing open."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nereus.engines.world import ProcessWorld, census, destroy_groups

SIZE = 3


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def member(rank: int, port: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    world = ProcessWorld(rank=rank, size=SIZE, address="127.0.0.1", port=port, timeout_seconds=20)
    assert world.sub((0, 1, 2)) is world.group
    part = world.sub((2, 1))
    assert part is world.sub((2, 1))
    assert (part is None) == (rank == 0)
    settled = census()
    for _ in range(3):
        if rank == 0:
            with pytest.raises(ValueError, match="rank 0 is not a member"), world.inside(part):
                pass
        else:
            work_inside(world, part, rank)
        counts = torch.tensor([world.group_count])
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        world.align_group_count(int(counts))
        whole = dist.new_group([0, 1, 2])  # hangs when the names differ
        total = torch.ones(1)
        dist.all_reduce(total, group=whole)
        assert total.item() == SIZE
        destroy_groups([whole, world.group, None])
        del whole
        assert census().groups == settled.groups
    assert census().descriptors <= settled.descriptors + 2
    world.close()
    world.close()
    assert census().groups == 0


def work_inside(world: ProcessWorld, part: dist.ProcessGroup | None, rank: int) -> None:
    """A collective and a new group in the part (2, 1), as an engine would build it."""
    with world.inside(part):
        assert dist.get_world_size() == 2
        assert dist.get_rank() == {2: 0, 1: 1}[rank] == int(os.environ["RANK"])
        built = dist.new_group([0, 1])
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=built)
        assert total.item() == 3.0
        destroy_groups([built])
    assert dist.get_world_size() == SIZE
    assert os.environ["RANK"] == str(rank)


def test_parts_of_the_world_and_back() -> None:
    mp.spawn(member, args=(free_port(),), nprocs=SIZE)


def survivor(rank: int, port: int, finished: mp.SimpleQueue) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = ProcessWorld(rank=rank, size=2, address="127.0.0.1", port=port, timeout_seconds=20)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os._exit(0)
    failed = False
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        failed = True
    assert failed
    world.close()
    finished.put(census().groups)


def test_close_after_a_peer_died() -> None:
    context = mp.get_context("spawn")
    finished = context.SimpleQueue()
    port = free_port()
    processes = [context.Process(target=survivor, args=(rank, port, finished)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert finished.get() == 0
