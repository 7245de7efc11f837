"""What live transitions are measured against, as functions that run in the slots and return their seconds.

torch.distributed.checkpoint, which reads and writes the boxes of the live engines straight from and to their storage (the
hooks that DTensor itself uses): no copy, no gathering, each byte written once, which is the least that it can cost.
Megatron-core's `swap_model_weights` over gloo. And gloo's own point-to-point transfer of the same totals.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray import cloudpickle
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from nereus.boxes import Box
from nereus.layout import StagePlan
from nereus.runtime import fabric, state
from nereus.runtime.fabric import Program
from nereus.runtime.state import Store
from nereus.storage import Shard, emu_name

if TYPE_CHECKING:
    from nereus.runtime.slot import Slot

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Piece = tuple[Box, Tensor]


class Boxes(Tensor):
    """A tensor of which this rank holds some boxes, as torch.distributed.checkpoint sees it."""

    pieces: list[Piece]

    @staticmethod
    def of(shape: tuple[int, ...], pieces: list[Piece]) -> Boxes:
        made: Any = Tensor._make_wrapper_subclass(Boxes, shape, dtype=pieces[0][1].dtype)  # noqa: SLF001
        made.pieces = pieces
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on boxes, which are there to be saved and loaded")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for box, _ in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box, _ in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(data for box, data in self.pieces if torch.Size(box.start) == index.offset)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))


def _boxes(slot: Slot, emus: tuple[str, ...]) -> dict[str, Boxes]:
    pieces: dict[tuple[str, str, str], list[Piece]] = defaultdict(list)
    for emu in emus:
        if emu in slot.live:
            for shard, view in slot.live[emu].views().items():
                pieces[emu, shard.component, shard.tensor].append((shard.box, view))
    return {
        f"{emu} {component} {tensor}": Boxes.of(slot.specs[emu.split(".")[0]].tensor(tensor).shape, held)
        for (emu, component, tensor), held in pieces.items()
    }


def dcp_save(slot: Slot, folder: str, emus: tuple[str, ...]) -> float:
    """Collective: torch.distributed.checkpoint saves the live state; its files are synced, as is its default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _timed(lambda: dcp.save(_boxes(slot, emus), storage_writer=dcp.FileSystemWriter(folder)))


def dcp_load(slot: Slot, folder: str, emus: tuple[str, ...]) -> float:
    """Collective: the live engines are filled from a folder."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return _timed(lambda: dcp.load(_boxes(slot, emus), storage_reader=dcp.FileSystemReader(folder)))


# -- engines beside the live ones, and what moves between them -----------------------------------------------------------


def build_beside(slot: Slot, stage: StagePlan) -> float:
    """Collective over the stage's slots: an empty engine beside the live one, for moves to be measured."""
    from nereus.engines.megatron.engine import TrainEngine, adam_of

    beside: dict[str, Any] = slot.__dict__.setdefault("beside", {})
    started = perf_counter()
    adam = adam_of(slot.config.algorithm, stage.model) if stage.stage == "train" else None
    beside[emu_name(stage)] = TrainEngine(slot.joined, slot.specs[stage.model], stage, slot.number, adam)
    return perf_counter() - started


def drop_beside(slot: Slot) -> float:
    """Drops the engines beside."""
    started = perf_counter()
    for engine in slot.__dict__.pop("beside", {}).values():
        engine.close()
    return perf_counter() - started


def _views(engines: Mapping[str, Any], emus: tuple[str, ...]) -> Store:
    return {shard: view for emu in emus if emu in engines for shard, view in engines[emu].views().items()}


def move(slot: Slot, program: Program, emus: tuple[str, ...], repetitions: int) -> list[float]:
    """Collective: the fabric fills the engines beside; seconds of each repetition."""
    sources, targets = _views(slot.live, emus), _views(slot.__dict__["beside"], emus)
    with torch.no_grad():
        return [_timed(lambda: fabric.run(program, sources, targets)) for _ in range(repetitions)]


def raw(slot: Slot, totals: Mapping[tuple[int, int], int], repetitions: int) -> list[float]:
    """Collective: gloo's isend and irecv of one message for each pair of slots, all at once, from and to ready buffers."""
    own = slot.number
    sends = {d: torch.ones(n, dtype=torch.uint8) for (s, d), n in totals.items() if s == own}
    receives = {s: torch.ones(n, dtype=torch.uint8) for (s, d), n in totals.items() if d == own}

    def run() -> None:
        pending = [dist.irecv(buffer, source) for source, buffer in receives.items()]
        pending += [dist.isend(buffer, destination) for destination, buffer in sends.items()]
        for work in pending:
            if work is not None:
                work.wait()

    return [_timed(run) for _ in range(repetitions)]


def digest_both(slot: Slot, emus: tuple[str, ...], repetitions: int) -> list[float]:
    """The digests of what is moved, before and after, as a change takes them."""
    stores = [_views(engines, emus) for engines in (slot.live, slot.__dict__["beside"])]

    def run() -> None:
        for held in stores:
            state.digests(held)

    return [_timed(run) for _ in range(repetitions)]


def same_digests(slot: Slot, emus: tuple[str, ...]) -> dict[Shard, int]:
    """Digests of the engines beside."""
    return state.digests(_views(slot.__dict__["beside"], emus))


def _timed(run: Callable[[], object]) -> float:
    dist.barrier()
    started = perf_counter()
    run()
    return perf_counter() - started


def swap(slot: Slot, emu: str, repetitions: int) -> list[float]:
    """Collective: Megatron-core's `swap_model_weights` over gloo into the engine beside; the first one plans as well."""
    from megatron.core.resharding import refit

    torch.cuda.Stream = lambda *_, **__: None  # its copy service makes one without CUDA, too
    source, target = slot.live[emu], slot.__dict__["beside"][emu]
    for engine in (source, target):
        for name, parameter in engine.module.named_parameters():
            if name.endswith("linear_fc1.weight"):
                parameter.partition_stride = 2  # gate and up: else what arrives is wrong where TP changes
    service: Any = refit.get_or_create_service("gloo")
    service._copy_stream = None  # noqa: SLF001
    found = [
        _timed(lambda: refit.swap_model_weights(source.module, target.module, service)) for _ in range(repetitions)
    ]
    refit.clear_service_cache()
    return found
