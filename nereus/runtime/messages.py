"""What slots and driver say to each other: records that travel between processes, without the engines' imports."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotMemory:
    """What a slot's ledger says, and what the process itself shows, above its baseline after imports."""

    slot: int
    held: dict[str, int]
    peaks: dict[str, int]
    resident_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseResult:
    """What one slot has to say after a phase; `outputs` and `metrics` only on a replica's output slot."""

    outputs: dict[str, Tensor] | None
    metrics: dict[str, float]
    grad_norm: float
    rng: str
