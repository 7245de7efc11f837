"""The files of a checkpoint as a slot writes and reads them: safetensors, a key for each box.

The slot's main thread copies its boxes to host memory and goes on training; a second thread writes the copy, which is
plain bytes by then: it touches neither torch nor an engine. Where the copy does not fit into the slot's budget, the
main thread writes, a chunk at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nereus.boxes import Box
from nereus.checkpoint import (
    DIGEST_MASK,
    VERSION,
    Manifest,
    Part,
    Read,
    StoredBox,
    chunks,
    folder_name,
    manifest_of,
    step_of,
)
from nereus.errors import CheckpointError
from nereus.model import DTYPE_BYTES
from nereus.runtime.digest import box_digest
from nereus.storage import Shard

MANIFEST = "manifest.json"
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16"}
ALIGN_BYTES = 8  # of the header, so that data is aligned when the file is mapped
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveStarted:
    """What a slot says when its part of a checkpoint has begun: the boxes with their digests.

    `reason` says why the slot wrote in the foreground, "" where it writes in the background.
    """

    boxes: tuple[StoredBox, ...]
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveState:
    """How far a slot's file is; size, checksum and seconds of writing once it is done, or the error."""

    done: bool
    size_bytes: int = 0
    sha256: str = ""
    seconds: float = 0.0
    error: str = ""


def manifest_in(path: Path) -> Manifest:
    """The manifest in a checkpoint's folder, itself verified. CheckpointError where it is missing, torn or changed."""
    name = path / MANIFEST
    try:
        manifest = manifest_of(name.read_bytes().decode())
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name}: its bytes differ from what was written ({error})") from error
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    if path.name != folder_name(manifest.step) and step_of(path.name) is not None:
        raise CheckpointError(f"{name}: it is of step {manifest.step}")
    return manifest


def header(boxes: Sequence[StoredBox]) -> bytes:
    """The head of a safetensors file whose data are `boxes` in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "nereus-checkpoint", "version": str(VERSION)}}
    at = 0
    for stored in boxes:
        entries[stored.key] = {
            "dtype": DTYPE_NAMES[stored.dtype],
            "shape": list(stored.box.shape),
            "data_offsets": [at, at + stored.size_bytes],
        }
        at += stored.size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path, boxes: Sequence[StoredBox], data: Iterable[Bytes], *, hashed: bool = True
) -> tuple[int, str]:
    """Writes a new safetensors file and puts it on the disk; (size in bytes, SHA-256 in hex if `hashed`) of all of it.

    `data` are the bytes of the boxes in order, row-major, in pieces of any length. Raises OSError (a full disk, say)
    and CheckpointError when `data` is not as long as the boxes say.
    """
    seen, size_bytes = hashlib.sha256(), 0
    expected_bytes = sum(stored.size_bytes for stored in boxes)
    with path.open("xb", buffering=0) as file:
        for piece in _pieces(header(boxes), data):
            if hashed:
                seen.update(piece)
            left = piece
            while left:
                left = left[file.write(left) :]
            size_bytes += len(piece)
        os.fsync(file.fileno())
    head_bytes = len(header(boxes))
    if size_bytes - head_bytes != expected_bytes:
        raise CheckpointError(f"{path}: {size_bytes - head_bytes:,} bytes of data, the boxes have {expected_bytes:,}")
    return size_bytes, seen.hexdigest() if hashed else ""


def mapped(path: Path, shards: Sequence[Shard]) -> dict[Shard, Tensor]:
    """The shards that `write_file` wrote whole and in this order, as tensors over the file's pages; never written to.

    OSError where the file is gone. Types of more bytes must come first, so that all are aligned.
    """
    boxes = [Part(shard=shard, box=shard.box).stored for shard in shards]
    data = np.memmap(path, dtype=np.uint8, mode="c", offset=len(header(boxes)))
    found: dict[Shard, Tensor] = {}
    at = 0
    for shard, stored in zip(shards, boxes, strict=True):
        flat = torch.from_numpy(data[at : at + stored.size_bytes]).view(getattr(torch, shard.dtype))
        found[shard] = flat.view(shard.box.shape)
        at += stored.size_bytes
    return found


def _pieces(head: bytes, data: Iterable[Bytes]) -> Iterator[memoryview]:
    yield memoryview(head)
    for array in data:
        if array.size:
            yield np.ascontiguousarray(array).reshape(-1).data


def bytes_of(tensor: Tensor) -> Bytes:
    """The bytes of a tensor in host memory, row-major, whatever its type; not a copy where it is contiguous there.

    From a GPU they come through pinned memory, which torch keeps for the next piece.
    """
    data = tensor.detach().contiguous().reshape(-1)
    if data.device.type != "cpu":
        data = torch.empty_like(data, device="cpu", pin_memory=True).copy_(data)
    return data.view(torch.uint8).numpy()


class Writing:
    """A thread that writes one file from plain bytes; `state` says how far it is."""

    def __init__(self, path: Path, boxes: Sequence[StoredBox], data: Iterable[Bytes]) -> None:
        self._state = SaveState(done=False)
        self._thread = threading.Thread(target=self._run, args=(path, boxes, data), daemon=True, name="checkpoint")
        self._thread.start()

    def _run(self, path: Path, boxes: Sequence[StoredBox], data: Iterable[Bytes]) -> None:
        self._state = written(path, boxes, data)

    def state(self) -> SaveState:
        """How far it is; at once."""
        return self._state

    def join(self, timeout_seconds: float) -> None:
        """Waits until the file is written."""
        self._thread.join(timeout_seconds)


def written(path: Path, boxes: Sequence[StoredBox], data: Iterable[Bytes]) -> SaveState:
    """Writes the file; a failure is told in the state, with the file's name."""
    started = time.monotonic()
    try:
        size_bytes, sha256 = write_file(path, boxes, data)
    except OSError as error:
        return SaveState(done=True, error=f"{path}: {error.strerror or error}")
    except CheckpointError as error:
        return SaveState(done=True, error=str(error))
    return SaveState(done=True, size_bytes=size_bytes, sha256=sha256, seconds=time.monotonic() - started)


class Reader:
    """Gives the bytes of `parts` chunk by chunk and adds up their digests on the way; `sources` are live tensors."""

    def __init__(
        self,
        parts: Sequence[Part],
        sources: Mapping[Shard, Tensor],
        limit_bytes: int,
    ) -> None:
        self._parts, self._sources, self._limit_bytes = parts, sources, limit_bytes
        self._digests = dict.fromkeys(parts, 0)

    @property
    def boxes(self) -> tuple[StoredBox, ...]:
        """The boxes, with the digests of what has been read so far."""
        return tuple(replace(part.stored, digest=f"{value:016x}") for part, value in self._digests.items())

    def data(self) -> Iterator[Bytes]:
        """The bytes of all parts in order; each piece is at most `limit_bytes` or a row, and no part of the source."""
        for part in self._parts:
            for box, piece in copies(part, self._sources[part.shard], self._limit_bytes):
                self._digests[part] = (self._digests[part] + box_digest(piece, box)) & DIGEST_MASK
                yield bytes_of(piece)


def copies(part: Part, source: Tensor, limit_bytes: int) -> Iterator[tuple[Box, Tensor]]:
    """A part of a shard, whose tensor is `source`, as copies of at most `limit_bytes` (or a row) each, one at a time."""
    for box in chunks(part.box, source.element_size(), limit_bytes):
        yield box, source[box.slices(part.shard.box.start)].detach().clone(memory_format=torch.contiguous_format)


def fill(folder: Path, reads: Sequence[Read], targets: Mapping[Shard, Tensor], limit_bytes: int) -> int:
    """Fills shards from the files in `folder`, reading only what is wanted; returns the bytes read.

    At most `limit_bytes` (or a row) are held beside the targets. Types are converted (a master may come from a weight).
    CheckpointError names the file that cannot be read as its manifest says.
    """
    read_bytes = 0
    for name, of_file in groupby(sorted(reads), key=lambda read: read.file):
        try:
            with safe_open(folder / name, framework="pt", device="cpu") as file:
                for read in of_file:
                    read_bytes += _fill(file, read, targets[read.wanted], limit_bytes)
        except (OSError, SafetensorError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"{folder / name}: cannot be read as its manifest says: {error}") from error
    return read_bytes


def _fill(file: Any, read: Read, target: Tensor, limit_bytes: int) -> int:
    stored = file.get_slice(read.stored.key)
    item_bytes = DTYPE_BYTES[read.stored.dtype]
    for box in chunks(read.box, item_bytes, limit_bytes):
        piece = stored[box.slices(read.stored.box.start)]
        target[box.slices(read.wanted.box.start)].copy_(piece)
    return read.box.elements * item_bytes
