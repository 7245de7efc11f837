"""Hugging Face folders: safetensors read box by box and written tensor by tensor, never a whole model in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nereus.boxes import Box, whole
from nereus.checkpoint import chunks
from nereus.interchange.source import Found, UnreadableFolder
from nereus.model import LM_HEAD, ModelSpec
from nereus.runtime.shards import bytes_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CODES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
CODE_OF = {dtype: code for code, dtype in CODES.items()}
SHARD_BYTES = 4_000_000_000
READ_BYTES = 64 << 20
T = TypeVar("T")


class WeightsFolder:
    """The tensors of model.safetensors, or of the files that its index lists. UnreadableFolder when damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _weight_files(path)
        self._open: dict[str, Any] = {}
        self._found: dict[str, Found] = {}
        self._place: dict[str, str] = {}
        for file in self._files:
            for name in self._file(file).keys():  # noqa: SIM118  # safetensors' handle is no mapping
                part = self._file(file).get_slice(name)
                code = str(part.get_dtype())
                self._found[name] = Found(shape=tuple(part.get_shape()), dtype=CODES.get(code, code))
                self._place[name] = file

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.path / name
            try:
                self._open[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UnreadableFolder(f"{path}: expected a whole safetensors file: {error}") from error
        return self._open[name]

    def tensors(self) -> Mapping[str, Found]:
        """Every tensor by its name."""
        return self._found

    def read(self, name: str, box: Box) -> Tensor:
        """The elements of `box` of a tensor; only their bytes are read."""
        part = self._file(self._place[name]).get_slice(name)
        return part[box.slices((0,) * len(box.start))] if box.start else part[...]


def _weight_files(path: Path) -> tuple[str, ...]:
    """The safetensors files of the folder. UnreadableFolder when there are none, or the index names one elsewhere."""
    index = path / INDEX
    if not index.is_file():
        if (path / SINGLE).is_file():
            return (SINGLE,)
        pickled = sorted(file.name for file in path.glob("*.bin"))
        also = f"; {pickled[0]} is a pickle: convert it to safetensors first" if pickled else ""
        raise UnreadableFolder(f"{path}: has neither {SINGLE} nor {INDEX}{also}")
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not files or not all(isinstance(name, str) and PurePath(name).name == name for name in files):
            raise ValueError(f"files {files[:3]}, expected names of files in the folder itself")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableFolder(f"{index}: expected an index with a weight_map: {error!r}") from error
    return tuple(files)


class HfModel:
    """A Hugging Face folder as the state of `spec`: weights alone.

    Raises UnreadableFolder that names the first tensors that are missing, too many or of another shape, with what was
    expected; only headers are read for that.
    """

    optimizer_steps = 0

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.folder = WeightsFolder(path)
        wrong = wrong_tensors(self.folder.tensors(), spec)
        if wrong:
            raise UnreadableFolder(f"{path}: does not hold {spec.name}: {wrong}")

    def has(self, component: str, tensor: str) -> bool:
        """Whether it is a weight."""
        return component == "weight" and tensor in self.folder.tensors()

    def read(self, component: str, tensor: str, box: Box) -> Tensor:
        """The elements of `box` of a weight, in the folder's type."""
        if component != "weight":
            raise UnreadableFolder(f"{self.folder.path}: holds weights only, no {component} of {tensor}")
        return self.folder.read(tensor, box)


def wrong_tensors(found: Mapping[str, Found], spec: ModelSpec) -> str:
    """The first tensors that are missing, of another shape or type, or too many, with what was expected; "" if none."""
    wrong = [*_lacking(found, spec), *_extra(found, spec)]
    more = f" (and {len(wrong) - 4} more)" if len(wrong) > 4 else ""
    return "; ".join(wrong[:4]) + more


def _lacking(found: Mapping[str, Found], spec: ModelSpec) -> Iterator[str]:
    for tensor in spec.tensors:
        real = found.get(tensor.name)
        if real is None:
            yield f"{tensor.name} is missing (expected {tensor.shape})"
        elif real.shape != tensor.shape:
            yield f"{tensor.name} has shape {real.shape}, expected {tensor.shape}"
        elif real.dtype not in ("float32", "bfloat16", "float16", "float64"):
            yield f"{tensor.name} has type {real.dtype}, expected a floating-point type"


def _extra(found: Mapping[str, Found], spec: ModelSpec) -> Iterator[str]:
    """Tensors that the model does not have; a copy of the tied embedding and rotary tables are let pass."""
    for name in found:
        known = name in spec.by_name or (name == LM_HEAD and spec.tied) or name.endswith("rotary_emb.inv_freq")
        if not known:
            yield f"{name} is not a tensor of this model"


# -- writing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


Read = Callable[[Entry, Box], Tensor]


def write_file(path: Path, entries: Sequence[Entry], read: Read) -> None:
    """A safetensors file of these tensors, read and written at most READ_BYTES at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for entry in entries:
        offsets = [at, at + entry.size_bytes]
        header[entry.name] = {"dtype": CODE_OF[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        at += entry.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            for box in chunks(whole(entry.shape), getattr(torch, entry.dtype).itemsize, READ_BYTES):
                file.write(bytes_of(read(entry, box).to(getattr(torch, entry.dtype))).data)


def split(entries: Iterable[T], size_bytes: Callable[[T], int], limit_bytes: int = SHARD_BYTES) -> list[list[T]]:
    """What goes into files, in order, in groups of at most `limit_bytes` (one entry at least)."""
    groups: list[list[T]] = [[]]
    held_bytes = 0
    for entry in entries:
        if groups[-1] and held_bytes + size_bytes(entry) > limit_bytes:
            groups.append([])
            held_bytes = 0
        groups[-1].append(entry)
        held_bytes += size_bytes(entry)
    return groups


def write_weights(folder: Path, entries: Sequence[Entry], read: Read, limit_bytes: int = SHARD_BYTES) -> None:
    """model.safetensors, or numbered shards of at most `limit_bytes` and their index."""
    groups = split(entries, lambda entry: entry.size_bytes, limit_bytes)
    if len(groups) == 1:
        write_file(folder / SINGLE, groups[0], read)
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(folder / name, group, read)
        weight_map |= {entry.name: name for entry in group}
    total = sum(entry.size_bytes for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
