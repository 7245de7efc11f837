"""Writes torch DCP folders chunk by chunk, with torch's own writer: what it asks for is read when it asks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from nereus.boxes import Box
from nereus.errors import NereusError


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A tensor to write: its chunks are disjoint boxes that cover `shape`; `read` gives one of them."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Box, ...]
    read: Callable[[Box], Tensor]


class _Planner(dcp.DefaultSavePlanner):
    """Plans one item for each chunk, and reads it when it is written."""

    def __init__(self, tensors: Iterable[Written]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = {t.key: t for t in tensors}

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for tensor in self._tensors.values():
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            for number, box in enumerate(tensor.chunks):
                chunk = ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))
                items.append(
                    WriteItem(
                        index=MetadataIndex(tensor.key, torch.Size(box.start), number),
                        type=WriteItemType.SHARD,
                        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(tensor.shape)),
                    )
                )
        self.plan = SavePlan(items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        data: Any = write_item.tensor_data
        tensor = self._tensors[write_item.index.fqn]
        start, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        box = Box(start, tuple(a + n for a, n in zip(start, sizes, strict=True)))
        return tensor.read(box).to(getattr(torch, tensor.dtype)).reshape(sizes).contiguous()


def write_dcp(folder: Path, tensors: Iterable[Written]) -> None:
    """A DCP folder of these tensors, one chunk in memory at a time.

    Raises OSError where it cannot be written, and what a tensor's `read` raises where that is a NereusError.
    """
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as no_dist asks for
            dcp.save({}, storage_writer=writer, planner=_Planner(tensors), no_dist=True)
    except CheckpointException as error:  # no Exception, and around whatever happened
        cause, _ = next(iter(error.failures.values()))
        raise (cause if isinstance(cause, OSError | NereusError | KeyboardInterrupt) else os_error(cause)) from error


def os_error(cause: BaseException) -> OSError:
    """The OSError behind what torch raises on a full disk, a RuntimeError of many lines; else its first line as one."""
    behind: BaseException | None = cause
    while behind is not None:
        if isinstance(behind, OSError):
            return behind
        behind = behind.__cause__ or behind.__context__
    said = str(cause).strip() or repr(cause)
    return OSError(said.splitlines()[0])
