"""The process world: parts of it, their names, and that closing leaves nothing open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nereus.engines.world import ProcessWorld, census, destroy_groups
from nereus.runtime.meeting import Meeting
from tests.processes import prepared, side_by_side

SIZE = 3


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
    meeting = Meeting("127.0.0.1", 20)
    side_by_side(member, meeting.port, count=SIZE)
    meeting.close()


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


@contextmanager
def two(target: Callable[[int, int, mp.SimpleQueue], None]) -> Iterator[tuple[Meeting, mp.SimpleQueue]]:
    """Two processes in a world, what they say, and that both end well."""
    context = prepared()
    said, meeting = context.SimpleQueue(), Meeting("127.0.0.1", 20)
    processes = [context.Process(target=target, args=(rank, meeting.port, said)) for rank in range(2)]
    for process in processes:
        process.start()
    yield meeting, said
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


def test_close_after_a_peer_died() -> None:
    with two(survivor) as (_, said):
        pass
    assert said.get() == 0


def waiter(rank: int, port: int, finished: mp.SimpleQueue) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = ProcessWorld(rank=rank, size=2, address="127.0.0.1", port=port, timeout_seconds=20)
    if rank == 0:
        finished.put("waits")
        try:
            dist.new_group([0, 1])
        except RuntimeError as error:
            finished.put(type(error).__name__)
    world.close()
    finished.put(rank)


def test_the_end_of_the_meeting_ends_the_wait_for_a_peer() -> None:
    with two(waiter) as (meeting, said):
        assert {said.get(), said.get()} == {"waits", 1}  # slot 1 has left: nobody comes
        meeting.close()
        assert said.get() == "DistNetworkError"  # of the closed store, not DistStoreError, its timeout
        assert said.get() == 0
