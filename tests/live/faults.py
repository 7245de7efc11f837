"""Faults that a test plants in a live slot: they strike when the slot comes to a task of a kind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from nereus.errors import TransferFailed
from nereus.runtime import progress
from nereus.transitions.programs import Task

TOKENS = 5


def plant(slot: Any, fault: str, kind: str, emu: str) -> None:
    """The fault at the first task of `kind` (of `emu`, where one is named). For `SlotPool.call("apply", ...)`.

    A kill in kind "generate" comes after a few tokens, all of which the slot has told.
    """
    if kind == "generate":
        progress.INTERVAL_SECONDS, progress.LARGEST_SHARE = 0.0, float("inf")
        slot.generate = partial(_last_generation, slot, slot.generate)
    slot.on_task = partial(_strike, slot, fault, kind, emu)


def watch(slot: Any) -> None:
    """From now on the slot remembers the tasks of changes that it comes to."""
    slot.seen = []
    slot.on_task = lambda task: slot.seen.append((task.kind, task.emu))


def seen(slot: Any) -> list[tuple[str, str]]:
    """(kind, EMU) of the tasks since `watch`, which ends."""
    slot.on_task = None
    return slot.seen


def heal(slot: Any) -> None:
    """No fault any more."""
    slot.on_task = None


def _last_generation(slot: Any, generate: Callable[..., Any], *arguments: object) -> Any:
    slot.generation._engine.step = partial(_last_steps, slot.generation._engine.step, iter(range(TOKENS)))
    return generate(*arguments)


def _last_steps(step: Callable[[], Any], left: Iterator[int]) -> Any:
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return step()


def _strike(slot: Any, fault: str, kind: str, emu: str, task: Task) -> None:
    if task.kind != kind or emu not in ("", task.emu):
        return
    slot.on_task = None
    if fault.startswith("kill"):  # this process, or the one of a number
        os.kill(int(fault.split()[1]) if " " in fault else os.getpid(), signal.SIGKILL)
    elif fault.startswith("sleep"):
        time.sleep(float(fault.split()[1]))
    elif fault == "fail":
        raise TransferFailed(f"slot {slot.number}: a fault planted by a test")
    elif fault == "flip":
        shard, view = next(iter(sorted(slot._changing.next[task.emu].views().items(), key=lambda item: item[0])))
        with torch.no_grad():
            first = view.view(-1)[:1] if view.is_contiguous() else view[:1, :1].reshape(-1)
            bits = first.clone().view(torch.int32) ^ 1
            view[(0,) * view.dim()] = bits.view(torch.float32)[0]
        assert shard.emu == task.emu
