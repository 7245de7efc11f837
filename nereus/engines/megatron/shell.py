"""The memory of an engine, given back while its objects wait as a shell for their layout to come back.

To build Megatron's modules, buffers and optimizer anew costs many times what it costs to take their memory again. The
storages stay the same objects, so every view of them, Megatron's and ours, holds again once they have their memory.

On a GPU a storage is resized. On the CPU torch refuses that once a numpy array has looked at the storage, as digests and
checkpoints do; there the kernel takes the pages back and gives zeros where they are next touched (madvise(2)).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DONTNEED, _POPULATE_WRITE = 4, 23  # MADV_ of Linux


class Shell:
    """Frees and takes again the storages of `states`: an engine's parameters, gradients and optimizer state.

    `blank` are those that whoever fills the engine does not fill wholly, padded rows of a vocabulary among them; they
    are zeroed. Gradients are not: each training step begins by that. `inners` are Megatron's optimizers, just built.
    """

    def __init__(self, states: Iterable[Tensor], blank: Sequence[Tensor], inners: Sequence[Any]) -> None:
        self._states, self._blank = tuple(states), tuple(blank)
        storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in self._states)}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self._optimizers = [inner.optimizer for inner in inners]
        self._settings = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]

    def free(self) -> None:
        """Gives the memory of every storage back; nothing may read or write it until `take`."""
        for storage, _ in self._storages:
            if storage.device.type == "cpu":
                _give_back(storage.data_ptr(), storage.nbytes())
            else:
                storage.resize_(0)

    def take(self) -> None:
        """Every storage has its size again, and no particular values."""
        for storage, size_bytes in self._storages:
            if storage.nbytes() != size_bytes:
                storage.resize_(size_bytes)

    def rest(self) -> None:
        """`free`, and gradients that tensors point to are forgotten."""
        for tensor in self._states:
            tensor.grad = None
        self.free()

    def wake(self, filled: Iterable[Tensor]) -> None:
        """Memory, zeros where nothing else will be, and the optimizers' settings as they were when they were built.

        What will be `filled` has its pages at once, so that whoever fills it in a pause does not wait for the kernel.
        """
        self.take()
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in filled)}
        for storage in storages.values():
            if storage.device.type == "cpu":
                _populate(storage.data_ptr(), storage.nbytes())
        with torch.no_grad():
            for tensor in self._blank:
                tensor.zero_()
        for optimizer, settings in zip(self._optimizers, self._settings, strict=True):
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update(values)


def _pages(address: int, size_bytes: int) -> tuple[int, int]:
    """First and last address of the whole pages in a range."""
    return -(-address // _PAGE_BYTES) * _PAGE_BYTES, (address + size_bytes) // _PAGE_BYTES * _PAGE_BYTES


def _advise(first: int, last: int, advice: int) -> bool:
    """Whether the kernel took it; no other system than Linux is asked."""
    if first >= last or os.uname().sysname != "Linux":
        return False
    return not ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def _populate(address: int, size_bytes: int) -> None:
    """The pages of a range, in one go; a kernel before 5.14 gives them one by one when they are touched."""
    _advise(*_pages(address, size_bytes), _POPULATE_WRITE)


def _give_back(address: int, size_bytes: int) -> None:
    """Zeros in a range of memory; its whole pages, which are the process's own, are the kernel's until they are touched.

    Elsewhere than on Linux they stay.
    """
    first, last = _pages(address, size_bytes)
    if not _advise(first, last, _DONTNEED):
        ctypes.memset(address, 0, size_bytes)
        return
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, address + size_bytes - last)
