"""The torch.distributed world of the live slots, and the parts of it that engines take for the whole.

Engines build their groups "over the world". To give an engine a part of the slots, `ProcessWorld.inside` makes the
part's group the default one while the engine's code runs (facts/engines.md 7.2). Two hazards come with parts (8.5):

(a) Names of groups are numbers from a counter of the process that grows only where groups are built. After work inside
    a part the counters differ, and the next group built over the whole world hangs, because its members look for
    each other under different names. So before every group-building work that follows work inside a part the driver
    collects `group_count` over the slots and gives the maximum back with `align_group_count`.
(b) A group made by its members alone (`use_local_synchronization`) gets the same name each time and then finds the
    addresses of its dead predecessor. So `sub` uses plain `new_group`, called by every rank, and keeps each group for
    the life of the world.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_RANK_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Census:
    """What this process holds open: c10d process groups (the default one included), file descriptors, threads."""

    groups: int
    descriptors: int
    threads: int


class ProcessWorld:
    """This slot's membership in the world: `rank` of `size` processes, gloo on the CPU and NCCL where CUDA is.

    Construction is collective and ends when all `size` ranks have come to the store at `address`:`port` (that of a
    `runtime.meeting.Meeting`, a new one for each world; every group built later meets there too); it raises torch.distributed.DistError (a RuntimeError) after `timeout_seconds`,
    which is also the limit of every collective in the world and in its parts. Sets RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT, which engines read. A process has one world at a time.
    """

    def __init__(self, *, rank: int, size: int, address: str, port: int, timeout_seconds: float) -> None:
        self.rank, self.size = rank, size
        self.timeout_seconds = timeout_seconds
        self._timeout = timedelta(seconds=timeout_seconds)
        os.environ.update(_rank_environment(rank, size), MASTER_ADDR=address, MASTER_PORT=str(port))
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=self._timeout),
            rank=rank,
            world_size=size,
            timeout=self._timeout,
        )
        if cuda:  # NCCL wants a collective of all ranks before point-to-point operations of some
            dist.barrier()
        self._default: dist.ProcessGroup | None = c10d._get_default_group()
        self._subs: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks; RuntimeError after `close`."""
        if self._default is None:
            raise RuntimeError("the process world is closed")
        return self._default

    @property
    def group_count(self) -> int:
        """The counter that names this process's next group: see hazard (a) of the module."""
        return c10d._world.group_count

    def align_group_count(self, count: int) -> None:
        """Sets the counter to `count`, the maximum over the slots; it never goes back (names would be used twice)."""
        c10d._world.group_count = max(c10d._world.group_count, count)

    def sub(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of `ranks`, in that order, or None where this rank is not in it.

        All ranks of the world call it, in the same order of calls; an order of ranks is built once and kept until
        `forget_idle` or `close`. The whole world in its own order is the default group.
        """
        if ranks == tuple(range(self.size)):
            return self.group
        if ranks not in self._subs:
            made = dist.new_group(list(ranks), timeout=self._timeout, sort_ranks=False)
            self._subs[ranks] = made if isinstance(made, dist.ProcessGroup) else None
        self._subs[ranks] = self._subs.pop(ranks)  # the last one used is the last to be forgotten
        return self._subs[ranks]

    def forget_idle(self, used: Collection[tuple[int, ...]], most_idle: int) -> None:
        """Destroys groups of `sub` for orders of ranks outside `used`, but for the `most_idle` last used ones.

        All ranks call it with the same arguments between the same calls of `sub`; nothing is sent.
        """
        idle = [ranks for ranks in self._subs if ranks not in used]
        for ranks in idle[: max(len(idle) - most_idle, 0)]:
            destroy_groups([self._subs.pop(ranks)])

    @contextmanager
    def inside(self, group: dist.ProcessGroup | None) -> Iterator[None]:
        """While inside, `group` is the default group and the environment's ranks count within it.

        Group-building code of Megatron and vLLM then sees the part as the world. Nothing changes for the whole
        world. ValueError where this rank is not a member (`group` is None).
        """
        if group is None:
            raise ValueError(f"rank {self.rank} is not a member of the group that it was asked to work inside")
        if group is self.group:
            yield
            return
        world = c10d._world
        default, ranks = world.default_pg, world.pg_group_ranks[group]
        environment = {key: os.environ[key] for key in _RANK_KEYS}
        world.default_pg = group
        world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
        os.environ.update(RANK=str(group.rank()), WORLD_SIZE=str(group.size()))
        try:
            yield
        finally:
            world.default_pg = default
            if group in world.pg_group_ranks:  # not after `close`
                world.pg_group_ranks[group] = ranks
            os.environ.update(environment)

    def close(self) -> None:
        """Destroys every group of this process, the default one too; local, so it is safe after a peer has died.

        A second call does nothing. After an error in a collective call it at once, outside the except block and with
        the traceback dropped: frames hold groups open, and peers wait on them (facts/engines.md 7.5).
        """
        if self._default is None:
            return
        c10d._world.default_pg = self._default
        self._default = None
        self._subs.clear()
        dist.destroy_process_group()


def destroy_groups(groups: Iterable[object]) -> None:
    """Destroys each of `groups` that is still known to c10d; the default group, None and strangers are left alone."""
    for group in groups:
        if isinstance(group, dist.ProcessGroup) and group in c10d._world.pg_map and group is not c10d._world.default_pg:
            dist.destroy_process_group(group)


def census() -> Census:
    """Counts what this process holds open (Linux: /proc/self); a leak of groups shows in all three numbers."""
    return Census(
        groups=len(c10d._world.pg_map),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=len(list(Path("/proc/self/task").iterdir())),
    )


def _rank_environment(rank: int, size: int) -> dict[str, str]:
    """RANK, WORLD_SIZE and LOCAL_RANK: the latter is the device index where CUDA is, else the rank."""
    devices = torch.cuda.device_count()
    return dict(zip(_RANK_KEYS, (str(rank), str(size), str(rank % devices if devices else rank)), strict=True))
