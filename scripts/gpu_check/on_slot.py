"""What a slot does in a check: each function is called in the slots' own processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from ray import cloudpickle

from nereus.boxes import Box
from nereus.runtime import state
from nereus.runtime.digest import box_digest, by_torch
from nereus.runtime.shards import bytes_of

if TYPE_CHECKING:
    from nereus.runtime.slot import Slot

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # slots need not find this file

WIRE_ELEMENTS, STAGED_ELEMENTS, REPEATS = 16 << 20, 16 << 20, 5


def sum_and_ring(slot: Slot) -> tuple[float, float]:
    """Collective: a sum over all slots and a ring of messages, both checked; GB/s of each (0 where there is one slot)."""
    world, device, size = slot.joined, state.device(), slot.joined.size
    data = torch.full((WIRE_ELEMENTS,), float(world.rank + 1), device=device)
    dist.all_reduce(data)
    if not bool((data == size * (size + 1) / 2).all()):
        raise ValueError(
            f"rank {world.rank}: a sum of 1..{size} over the slots gave {float(data.min())} to {float(data.max())}"
        )
    if size == 1:
        return 0.0, 0.0
    after, before = (world.rank + 1) % size, (world.rank - 1) % size
    sent = torch.arange(WIRE_ELEMENTS, dtype=torch.int32, device=device) + world.rank
    found = torch.empty_like(sent)

    def ring() -> None:
        swaps = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, found, before)]
        for request in dist.batch_isend_irecv(swaps):
            request.wait()

    rates = [rate(data.nbytes, lambda: dist.all_reduce(data)), rate(sent.nbytes, ring)]
    if not torch.equal(found, sent - world.rank + before):
        raise ValueError(f"rank {world.rank}: what came from rank {before} is not what it sent")
    return rates[0], rates[1]


def digests_agreed(slot: Slot) -> int:  # noqa: ARG001 - every function on a slot takes it
    """Digests by torch on the device against the host's (on a CPU: its compiled kernel's); how many agreed."""
    boxes = (Box(start=(0,), stop=(5,)), Box(start=(7,), stop=(4103,)), Box(start=(3, 11), stop=(260, 1035)))
    host = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        for box in boxes:
            data = torch.randn(box.shape, generator=host).to(dtype)
            there = by_torch(data.to(state.device()), box)
            here = by_torch(data, box) if torch.cuda.is_available() else box_digest(data, box)
            if there != here:
                raise ValueError(f"{dtype} {box}: the device says {there:016x}, the host {here:016x}")
    return 2 * len(boxes)


def staging_rate(slot: Slot) -> float:  # noqa: ARG001
    """Bytes from the device to the host (pinned where it is a GPU) and back again, compared; GB/s to the host (0 on a CPU)."""
    data = torch.randn(STAGED_ELEMENTS, device=state.device())
    back = torch.from_numpy(bytes_of(data).copy()).view(torch.float32).to(state.device())
    if not torch.equal(back, data):
        raise ValueError("what came back from the host is not what went there")
    return rate(data.nbytes, lambda: bytes_of(data)) if data.is_cuda else 0.0


def rate(size_bytes: int, work: Callable[[], object]) -> float:
    """GB/s of `work`, whose work on the device is waited for."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(REPEATS):
        work()
    wait()
    return size_bytes * REPEATS / (time.perf_counter() - began) / 1e9
