"""Folders of torch.distributed.checkpoint: a pickled .metadata and .distcp files, read box by box without torch's loader.

Source: torch 2.13, torch/distributed/checkpoint/{metadata,filesystem}.py. Megatron's torch_dist is this format too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from nereus.boxes import Box
from nereus.interchange.archive import MAPPED, Archive, SavedTensor
from nereus.interchange.source import Found, UnreadableFolder
from nereus.interchange.unpickle import Record, RefusedPickle, unpickle

METADATA = ".metadata"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A box of a tensor, saved in `file` at [offset_bytes, offset_bytes + length_bytes)."""

    box: Box
    file: str
    offset_bytes: int
    length_bytes: int


class DcpFolder:
    """The tensors of a DCP folder. Raises RefusedPickle for hostile or damaged pickles, UnreadableFolder otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = (path / METADATA).read_bytes()
        except OSError as error:
            raise UnreadableFolder(f"{path / METADATA}: {error.strerror}; expected a torch DCP folder") from error
        metadata = unpickle(data, str(path / METADATA))
        try:
            self._found, self._chunks = _entries(metadata)
        except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise RefusedPickle(f"{path / METADATA}: refused: not the metadata of a checkpoint: {error!r}") from error
        self._archives: dict[tuple[str, int], Archive] = {}

    def tensors(self) -> Mapping[str, Found]:
        """Every tensor by its key; saved objects that are no tensors are left out."""
        return self._found

    def _saved(self, chunk: Chunk) -> tuple[Archive, SavedTensor]:
        key = chunk.file, chunk.offset_bytes
        path = self.path / chunk.file
        if key not in self._archives:
            if not path.is_file():
                raise UnreadableFolder(f"{path}: is missing, {METADATA} says that it holds part of the checkpoint")
            self._archives[key] = Archive(path, chunk.offset_bytes, chunk.length_bytes)
        archive = self._archives[key]
        saved = archive.content
        if not isinstance(saved, SavedTensor) or saved.shape != chunk.box.shape:
            shape = saved.shape if isinstance(saved, SavedTensor) else type(saved).__name__
            raise UnreadableFolder(f"{path}: holds {shape}, {METADATA} says a tensor of {chunk.box.shape}")
        return archive, saved

    def read(self, name: str, box: Box) -> Tensor:
        """The elements of `box`, put together from the chunks that it meets. UnreadableFolder when they leave a gap."""
        if name not in self._found:
            raise UnreadableFolder(f"{self.path}: has no tensor {name}")
        found = self._found[name]
        target = torch.empty(box.shape, dtype=getattr(torch, found.dtype))
        rest = [box]
        for chunk in self._chunks[name]:
            common = chunk.box.intersect(box)
            if common is None:
                continue
            archive, saved = self._saved(chunk)
            inner = _moved(common, chunk.box.start)
            target[common.slices(box.start)] = archive.read(saved, inner).to(target.dtype)
            rest = [part for piece in rest for part in piece.subtract(common)]
        if rest:
            raise UnreadableFolder(f"{self.path}: {name} has no bytes for {rest[0].start} to {rest[0].stop}")
        return target


def _moved(box: Box, origin: tuple[int, ...]) -> Box:
    """`box` as seen from `origin`."""
    return Box(
        tuple(a - o for a, o in zip(box.start, origin, strict=True)),
        tuple(b - o for b, o in zip(box.stop, origin, strict=True)),
    )


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(isinstance(n, int) and n >= 0 for n in value):
        raise ValueError(f"{value!r} is no size")
    return value


def _dtype(properties: Record) -> str:
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
    if dtype not in MAPPED:
        raise ValueError(f"type {dtype!r}, expected one of {', '.join(MAPPED)}")
    return dtype


def _entries(metadata: Any) -> tuple[dict[str, Found], dict[str, tuple[Chunk, ...]]]:
    """The tensors and their chunks from the unpickled metadata."""
    places: dict[tuple[str, tuple[int, ...]], Record] = {}
    for index, info in metadata.get("storage_data").items():
        places[index.get("fqn"), _numbers(index.get("offset") or ())] = info
    found: dict[str, Found] = {}
    chunks: dict[str, tuple[Chunk, ...]] = {}
    for name, entry in metadata.get("state_dict_metadata").items():
        if entry.kind.endswith(".BytesStorageMetadata"):
            continue
        found[name] = Found(shape=_numbers(entry.get("size")), dtype=_dtype(entry.get("properties")))
        parts = [(_numbers(chunk.get("offsets")), _numbers(chunk.get("sizes"))) for chunk in entry.get("chunks")]
        chunks[name] = tuple(_chunk(name, start, sizes, places) for start, sizes in parts)
    return found, chunks


def _chunk(
    name: str, start: tuple[int, ...], sizes: tuple[int, ...], places: Mapping[tuple[str, tuple[int, ...]], Record]
) -> Chunk:
    info = places.get((name, start)) or places[name, ()]
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} was transformed by {info.get('transform_descriptors')}, expected plain bytes")
    file = info.get("relative_path")
    if not isinstance(file, str) or PurePath(file).name != file:
        raise ValueError(f"{name} lies in {file!r}, expected the name of a file in the folder itself")
    stop = tuple(a + n for a, n in zip(start, sizes, strict=True))
    return Chunk(
        box=Box(start, stop), file=file, offset_bytes=int(info.get("offset")), length_bytes=int(info.get("length"))
    )
