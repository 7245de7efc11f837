"""Rollouts on record: one compressed file a step, from which another run can train on the same tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nereus.errors import JournalError
from nereus.rollout import SampleId


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """A step's samples in batch order: prompt and response tokens, the engine's log-probabilities, scores."""

    samples: tuple[SampleId, ...]
    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    scores: tuple[float, ...]

    @property
    def digest(self) -> str:
        """A name that is a function of ids, tokens and scores (not of log-probabilities, which differ in last bits)."""
        content = (self.samples, self.prompts, self.responses, self.scores)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _flat(rows: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.array([value for row in rows for value in row], dtype=dtype)


def _ragged(flat: np.ndarray, lengths: np.ndarray) -> list[list[float]]:
    ends = np.cumsum(lengths)
    return [flat[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


def rollout_file(folder: Path, step: int) -> Path:
    """Where the rollouts of `step` are, in a run's rollouts folder."""
    return folder / f"step_{step:06d}.npz"


def save(rollouts: Rollouts, folder: Path) -> Path:
    """Writes the rollouts of a step, whole or not at all; JournalError when the file cannot be written."""
    step = rollouts.samples[0].step
    path = rollout_file(folder, step)
    arrays = {
        "samples": np.array([(s.step, s.prompt, s.sample) for s in rollouts.samples], dtype=np.int64),
        "prompt_lengths": np.array([len(p) for p in rollouts.prompts], dtype=np.int32),
        "prompts": _flat(rollouts.prompts, np.int32),
        "response_lengths": np.array([len(r) for r in rollouts.responses], dtype=np.int32),
        "responses": _flat(rollouts.responses, np.int32),
        "logprobs": _flat(rollouts.logprobs, np.float32),
        "scores": np.array(rollouts.scores, dtype=np.float64),
    }
    draft = path.with_suffix(".tmp")
    try:
        with draft.open("wb") as file:
            np.savez_compressed(file, **arrays)
        draft.replace(path)
    except OSError as error:
        raise JournalError(f"rollouts of step {step} cannot be written to {path}: {error}") from error
    return path


def load(folder: Path, step: int) -> Rollouts:
    """The recorded rollouts of a step; JournalError when they are missing or torn."""
    path = rollout_file(folder, step)
    try:
        with np.load(path) as arrays:
            samples = tuple(
                SampleId(step=int(a), prompt=int(b), sample=int(c)) for a, b, c in arrays["samples"].tolist()
            )
            return Rollouts(
                samples=samples,
                prompts=tuple(tuple(map(int, p)) for p in _ragged(arrays["prompts"], arrays["prompt_lengths"])),
                responses=tuple(tuple(map(int, r)) for r in _ragged(arrays["responses"], arrays["response_lengths"])),
                logprobs=tuple(tuple(p) for p in _ragged(arrays["logprobs"], arrays["response_lengths"])),
                scores=tuple(arrays["scores"].tolist()),
            )
    except FileNotFoundError as error:
        raise JournalError(f"no rollouts are recorded for step {step}: {path} is missing") from error
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise JournalError(f"the rollouts of step {step} in {path} cannot be read: {error}") from error


def recorded_steps(folder: Path) -> tuple[int, ...]:
    """The steps whose rollouts are recorded in a run's rollouts folder."""
    found = (re.fullmatch(r"step_(\d+)\.npz", p.name) for p in folder.glob("step_*.npz"))
    return tuple(sorted(int(m.group(1)) for m in found if m))
