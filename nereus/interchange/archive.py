"""Files of `torch.save`, read box by box: the zip directory, the pickle without running it, and mapped storages.

torch writes an uncompressed zip: NAME/data.pkl, which refers to storages by key, and NAME/data/KEY, their plain bytes.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from nereus.boxes import Box
from nereus.interchange.source import UnreadableFolder
from nereus.interchange.unpickle import Record, RefusedPickle, unpickle

# how numpy maps the bytes of a type that it may not know
MAPPED = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.uint8,
}
# what zipfile raises for bytes that are no archive of torch.save; RuntimeError where they are encrypted or packed anyhow
NO_ARCHIVE = (zipfile.BadZipFile, zlib.error, struct.error, KeyError, ValueError, EOFError, OverflowError, RuntimeError)
_LOCAL_HEADER_BYTES = 30  # of a zip entry, before its name and extra field (PKZIP application note, 4.3.7)


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """A run of `elements` values of one type in the archive."""

    dtype: str
    key: str
    elements: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A tensor as the pickle describes it; `offset` and `stride` in elements of its storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Window(io.RawIOBase):
    """The bytes [start, start + length) of a file as a file of their own."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self._file = path.open("rb")
        self._start, self._length, self._at = start, length, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._length)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


class Archive:
    """What `torch.save` wrote into `path` at [start, start + length), all of the file by default.

    Raises RefusedPickle for what is no such archive, names a class that is not listed, or points outside itself, and
    UnreadableFolder where the file cannot be read.
    """

    def __init__(self, path: Path, start: int = 0, length: int | None = None) -> None:
        self.path, self.start = path, start
        try:
            size = path.stat().st_size
        except OSError as error:
            self._unreadable(error)
        self.length = size - start if length is None else length
        if start < 0 or self.length < 0 or start + self.length > size:
            raise self._damaged(f"bytes {start:,} to {start + self.length:,} are not in a file of {size:,} bytes")
        try:
            with _Window(path, start, self.length) as window, zipfile.ZipFile(window) as archive:  # type: ignore[arg-type]
                self._entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                order = archive.read(self._entries["byteorder"]) if "byteorder" in self._entries else b"little"
                self._pickle = archive.read(self._entries["data.pkl"])
        except OSError as error:
            self._unreadable(error)
        except NO_ARCHIVE as error:
            raise self._damaged(f"no archive of torch.save: {error}") from error
        if order != b"little":
            raise self._damaged(f"byte order {order!r}, expected little")

    def _damaged(self, what: str) -> RefusedPickle:
        return RefusedPickle(f"{self.path}: refused: {what}")

    def _unreadable(self, error: OSError) -> NoReturn:
        raise UnreadableFolder(f"{self.path}: cannot be read: {error.strerror or error}") from error

    @cached_property
    def content(self) -> Any:
        """The saved value: tensors as SavedTensor, listed classes as Record."""
        value = unpickle(self._pickle, str(self.path), self._storage)
        try:
            return self._plain(value)
        except (TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
            raise self._damaged(f"a value in its pickle is damaged: {type(error).__name__}: {error}") from error

    def _storage(self, pid: Any) -> Storage:
        try:
            kind, dtype, key, _, elements = pid
            if kind != "storage" or dtype not in MAPPED:
                raise ValueError(f"storage of {dtype!r}")
            return Storage(dtype=dtype, key=str(key), elements=int(elements))
        except (TypeError, ValueError) as error:
            raise self._damaged(f"persistent id {pid!r}: {error}") from error

    def _plain(self, value: Any) -> Any:
        """`value` with rebuilt tensors and parameters in the place of the Records that stand for them."""
        if isinstance(value, Record) and value.kind == "torch._utils._rebuild_tensor_v2":
            storage, offset, shape, strides, *_ = value.arguments
            if not isinstance(storage, Storage):
                raise self._damaged("a tensor without storage")
            sizes, steps = _numbers(shape), _numbers(strides)
            if len(sizes) != len(steps):
                raise self._damaged(f"a tensor of shape {sizes} with strides {steps}")
            return SavedTensor(storage=storage, offset=_number(offset), shape=sizes, stride=steps)
        if isinstance(value, Record) and value.kind == "torch._utils._rebuild_parameter":
            return self._plain(value.arguments[0])
        if isinstance(value, Record):
            value.fields = {name: self._plain(part) for name, part in value.fields.items()}
            return value
        if isinstance(value, dict):
            return {name: self._plain(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._plain(part) for part in value)
        return value

    def _data_start(self, storage: Storage, item_bytes: int) -> int:
        """Where a storage's bytes begin in the file."""
        info = self._entries.get(f"data/{storage.key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size < storage.elements * item_bytes:
            raise self._damaged(f"storage {storage.key} of {storage.elements:,} {storage.dtype} is not there in full")
        try:
            with _Window(self.path, self.start, self.length) as window:
                window.seek(info.header_offset + 26)
                name_bytes, extra_bytes = struct.unpack("<HH", window.read(4))
        except OSError as error:
            self._unreadable(error)
        except (struct.error, ValueError) as error:
            raise self._damaged(f"storage {storage.key} has no header: {error}") from error
        start = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if start + info.file_size > self.length:
            raise self._damaged(f"storage {storage.key} ends behind the archive")
        return self.start + start

    def read(self, tensor: SavedTensor, box: Box) -> Tensor:
        """The elements of `box` of a saved tensor, in the type it was saved in; only their pages are read."""
        storage = tensor.storage
        numpy_type = np.dtype(MAPPED[storage.dtype])
        last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True))
        if min((tensor.offset, *tensor.stride), default=0) < 0 or (all(tensor.shape) and last >= storage.elements):
            raise self._damaged(f"a tensor of shape {tensor.shape} reaches outside its storage {storage.key}")
        start = self._data_start(storage, numpy_type.itemsize)
        try:
            mapped = np.memmap(self.path, dtype=numpy_type, mode="r", offset=start, shape=(storage.elements,))
        except OSError as error:
            self._unreadable(error)
        except (ValueError, OverflowError) as error:
            raise self._damaged(f"storage {storage.key} of {storage.elements:,} elements: {error}") from error
        strides = tuple(s * numpy_type.itemsize for s in tensor.stride)
        view = np.lib.stride_tricks.as_strided(mapped[tensor.offset :], tensor.shape, strides, writeable=False)
        part = torch.from_numpy(np.array(view[box.slices((0,) * len(tensor.shape))], order="C"))
        return part.view(getattr(torch, storage.dtype)) if storage.dtype in ("bfloat16", "bool") else part


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} where a whole number belongs")
    return value


def _numbers(value: object) -> tuple[int, ...]:
    """The sizes or strides of a tensor; ValueError for a negative one."""
    if not isinstance(value, tuple | list):
        raise TypeError(f"{value!r} where numbers belong")
    numbers = tuple(_number(part) for part in value)
    if min(numbers, default=0) < 0:
        raise ValueError(f"{numbers} with a negative number")
    return numbers
