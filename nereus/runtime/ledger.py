"""A slot's account of what it holds, by component, against its budget; and meters that fill it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nereus.errors import SlotOutOfMemory

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Memory of this process now: the allocator's on a GPU, else what is resident, shared file pages not counted."""
    if torch.cuda.is_available():
        return int(torch.cuda.memory_allocated())
    _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
    return (int(resident) - int(shared)) * _PAGE_BYTES


@dataclass(kw_only=True)
class Ledger:
    """What a slot holds above its baseline, in bytes by component; refuses beyond `budget_bytes`.

    `hold` sets a component that stays between phases, `during` one that lives in a block; `peaks` keeps each phase's
    largest total since `reset_peaks`. Single-threaded: the slot's one main thread is its only user.
    """

    slot: int
    budget_bytes: int
    held: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    phase: str = "start"
    _used: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    @property
    def total_bytes(self) -> int:
        """Everything that is held now."""
        return sum(self.held.values())

    def hold(self, component: str, size_bytes: int) -> None:
        """Sets what `component` holds; SlotOutOfMemory, and no entry, when the total would exceed the budget."""
        before = self.held.get(component, 0)
        free = self.budget_bytes - (self.total_bytes - before)
        if size_bytes > free:
            raise SlotOutOfMemory(self.slot, self.phase, component, size_bytes, free)
        self.held[component] = size_bytes
        if size_bytes == 0:
            del self.held[component]
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.total_bytes)

    def hold_all(self, prefix: str, parts: dict[str, int]) -> None:
        """Sets the components of one thing, e.g. "actor.train" with weights, grads, optimizer."""
        for name, size in parts.items():
            self.hold(f"{prefix}.{name}", size)

    def release(self, prefix: str) -> None:
        """Forgets a component and all of its parts."""
        for name in [n for n in self.held if n == prefix or n.startswith(f"{prefix}.")]:
            del self.held[name]

    def rename(self, prefix: str, name: str) -> None:
        """Gives a component and all of its parts another name, whose entries so far are forgotten."""
        parts = {n: size for n, size in self.held.items() if n == prefix or n.startswith(f"{prefix}.")}
        self.release(name)
        for old, size in parts.items():
            del self.held[old]
            self.held[name + old.removeprefix(prefix)] = size

    @contextmanager
    def during(self, component: str, size_bytes: int) -> Iterator[None]:
        """Holds `size_bytes` while inside."""
        self.hold(component, self.held.get(component, 0) + size_bytes)
        try:
            yield
        finally:
            self.hold(component, max(self.held.get(component, 0) - size_bytes, 0))

    def touch(self, component: str, size_bytes: int) -> None:
        """Books what was held for a moment of the present phase, such as activations measured in it."""
        with self.during(component, size_bytes):
            pass

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Entries inside are booked on phase `name`."""
        before, self.phase = self.phase, name
        self.peaks[name] = max(self.peaks.get(name, 0), self.total_bytes)
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def measured(self, component: str) -> Iterator[None]:
        """Adds to `component` what the process grew by inside, beyond what other entries made inside explain.

        For what has no size of its own: communicators, an engine's own tables. A GPU slot uses the allocator instead.
        """
        held, before = self.total_bytes, resident_bytes()
        yield
        grown = resident_bytes() - before - (self.total_bytes - held)
        if grown > 0:
            self.hold(component, self.held.get(component, 0) + grown)

    @contextmanager
    def first_use(self, emu: str, phase: str) -> Iterator[None]:
        """Books what a process grows by when an engine first runs a phase: tables and caches without a size."""
        if (emu, phase) in self._used:
            yield
            return
        self._used.add((emu, phase))
        settle()
        with self.measured("overhead.first_use"):
            yield
            settle()

    def forget_use(self, emu: str) -> None:
        """A new engine of the EMU has run no phase yet."""
        self._used = {used for used in self._used if used[0] != emu}


class ActivationMeter:
    """Counts bytes that autograd keeps for the backward pass: its `peak_bytes` is a phase's activations.

    Parameters are not counted, and a storage kept twice is counted once.
    """

    def __init__(self, parameters: Iterator[torch.Tensor]) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in parameters}
        self._users: dict[int, int] = {}
        self._live_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """While inside, saved tensors are counted."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._own:
            if key not in self._users:
                self._live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            self._users[key] = self._users.get(key, 0) + 1
        return _Saved(tensor, self, key, storage.nbytes())

    @staticmethod
    def _unpack(saved: _Saved) -> torch.Tensor:
        return saved.tensor

    def forget(self, key: int, size_bytes: int) -> None:
        """A saved tensor was dropped."""
        if key not in self._users:
            return
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self._live_bytes -= size_bytes


class _Saved:
    """A saved tensor that tells the meter when autograd drops it."""

    __slots__ = ("_key", "_meter", "_size_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor, meter: ActivationMeter, key: int, size_bytes: int) -> None:
        self.tensor, self._meter, self._key, self._size_bytes = tensor, meter, key, size_bytes

    def __del__(self) -> None:
        self._meter.forget(self._key, self._size_bytes)


def settle() -> None:
    """Gives memory that Python and the allocator keep for later back to the system, so that resident memory is real."""
    gc.collect()
    if os.uname().sysname == "Linux":
        import ctypes  # only here, only on Linux

        ctypes.CDLL(None).malloc_trim(0)
