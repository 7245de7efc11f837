"""A slot's part of a weight sync: layers travel, and the engine takes each while the next is on its way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nereus.runtime import fabric, state
from nereus.runtime.fabric import Program, Traffic
from nereus.storage import Shard

if TYPE_CHECKING:
    from nereus.runtime.slot import Slot

Layer = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]
"""Name, full shape, start of the slot's own box, and its data."""


def run_sync(slot: Slot, programs: Sequence[Program], sources: Mapping[Shard, Tensor], *, poison: bool) -> Traffic:
    """Moves the weights of `sources` to the slot's engine, a program per layer; slots without an engine only send."""
    traffic = Traffic()
    layers = _layers(slot, programs, sources, traffic)
    staging = max((fabric.staging_bytes(p) + sum(s.size_bytes for s in p.wanted) for p in programs), default=0)
    with slot.ledger.in_phase("update_weights"), slot.ledger.during("staging", staging):
        if slot.generation is None:
            for _ in layers:
                pass
        else:
            slot.generation.load(layers, poison=poison)
    return traffic


def _layers(
    slot: Slot, programs: Sequence[Program], sources: Mapping[Shard, Tensor], traffic: Traffic
) -> Iterator[Layer]:
    spec = slot.specs["actor"]
    given: set[str] = set()
    for program in programs:
        targets = state.empty(program.wanted)
        part = fabric.run(program, sources, targets, slot.control.check)
        part.staged_bytes += state.size_bytes(targets)
        traffic.add(part)
        for shard, data in targets.items():
            given.add(shard.tensor)
            yield shard.tensor, spec.tensor(shard.tensor).shape, shard.box.start, data
    for tensor in spec.tensors:  # a rank without rows of the vocabulary offers an empty box
        if slot.generation is not None and tensor.name not in given:
            empty = torch.empty(0, tensor.shape[-1], device=state.device())
            yield tensor.name, tensor.shape, (*tensor.shape[:1], 0), empty
