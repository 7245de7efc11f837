"""How far requests have come, in host memory: what a slot has generated outlives it.

Each slot writes its own file now and then while it generates. After a loss the requests that were finished are not done
again, and the others are submitted with their tokens so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from nereus.rollout import Completion

INTERVAL_SECONDS = 2.0
LARGEST_SHARE = 0.01
"""Of the time that generation takes, for writing: long lists are written more rarely."""
ENDS = ("running", "stop", "length")


class Progress:
    """The file of one slot for one call of generation. Without room on the disk nothing is kept, and nothing fails."""

    def __init__(self, folder: Path, slot: int, optimizer_steps: int) -> None:
        self._folder, self._path = folder, folder / f"slot-{slot:03d}.npz"
        self._optimizer_steps = optimizer_steps
        self._next_seconds = time.monotonic() + INTERVAL_SECONDS

    def tell(self, so_far: Callable[[], Sequence[Completion]]) -> None:
        """Called after every step of the engine: asks for the completions so far, and writes them, when it is time."""
        started = time.monotonic()
        if started < self._next_seconds:
            return
        self._write(so_far())
        ended = time.monotonic()
        self._next_seconds = ended + max(INTERVAL_SECONDS, (ended - started) / LARGEST_SHARE)

    def end(self) -> None:
        """All is told otherwise: the file goes, and folders that are empty then."""
        try:
            self._path.unlink()
            self._folder.rmdir()
            self._folder.parent.rmdir()
        except OSError:  # there is none, or others use them
            return

    def _write(self, completions: Sequence[Completion]) -> None:
        arrays = {
            "optimizer_steps": np.array(self._optimizer_steps),
            "ids": np.array([c.request_id for c in completions]),
            "ends": np.array([ENDS.index(c.finished) for c in completions], dtype=np.int8),
            "lengths": np.array([len(c.tokens) for c in completions], dtype=np.int32),
            "tokens": np.array([token for c in completions for token in c.tokens], dtype=np.int32),
            "logprobs": np.array([value for c in completions for value in c.logprobs], dtype=np.float64),
        }
        draft = self._path.with_suffix(".draft")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
            draft.replace(self._path)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)


def completions(folder: Path, optimizer_steps: int) -> Mapping[str, Completion]:
    """What slots have written into `folder` of a policy after so many optimizer steps, the longest of each request.

    A file that cannot be read is left out: its requests are done again.
    """
    found: dict[str, Completion] = {}
    for path in sorted(folder.glob("slot-*.npz")) if folder.is_dir() else ():
        try:
            with np.load(path) as arrays:
                if int(arrays["optimizer_steps"]) != optimizer_steps:
                    continue
                read = _completions({key: arrays[key] for key in arrays.files})
        except (OSError, ValueError, KeyError, EOFError, IndexError, BadZipFile):
            continue
        for completion in read:
            known = found.get(completion.request_id)
            if known is None or len(known.tokens) < len(completion.tokens):
                found[completion.request_id] = completion
    return found


def _completions(arrays: Mapping[str, np.ndarray]) -> list[Completion]:
    ends = np.cumsum(arrays["lengths"])
    return [
        Completion(
            request_id=str(request_id),
            tokens=tuple(arrays["tokens"][end - length : end].tolist()),
            logprobs=tuple(arrays["logprobs"][end - length : end].tolist()),
            finished=ENDS[kind],  # type: ignore[arg-type]
        )
        for request_id, kind, length, end in zip(arrays["ids"], arrays["ends"], arrays["lengths"], ends, strict=True)
    ]
