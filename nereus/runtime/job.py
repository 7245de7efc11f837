"""The job as the driver knows it: plan, state version, data position; and the operations on its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from nereus.boxes import Box
from nereus.config import Config
from nereus.errors import DigestMismatch, TransferFailed
from nereus.layout import Layout, Plan, StagePlan
from nereus.model import ModelSpec, models_of
from nereus.runtime.digest import MASK
from nereus.runtime.fabric import Program, Traffic, program_of
from nereus.runtime.host_memory import HostMemory
from nereus.runtime.pool import SlotPool
from nereus.slices import Holding, Movement
from nereus.storage import Shard, emu_name
from nereus.transition import WeightSync, build_sync
from nereus.transitions.change import Mode
from nereus.transitions.durations import HOST_TOLLS, Tolls

ShellKey = tuple[str, tuple[int, ...], Layout]
"""An EMU, the slots of its stage and its layout: what its communicators and the shell of its engine depend on.

All else that an engine is built from is the job's: its model's specification and its optimizer's settings.
"""
Digests = dict[str, dict[str, str]]
IDLE_GROUPS = 4  # of slots that no stage runs on, kept because plans come back


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveReport:
    """What a movement planned and what the fabric counted, in bytes; the largest staging of a slot."""

    planned_bytes: int
    counted_bytes: int
    staged_bytes: int
    sent_bytes: dict[int, int]
    received_bytes: dict[int, int]


@dataclass(kw_only=True)
class Job:
    """Mutable record of the driver; `state_version` and `data_position` only advance."""

    config: Config
    pool: SlotPool
    plan: Plan
    state_version: int = 0
    data_position: int = 0
    optimizer_steps: dict[str, int] = field(default_factory=dict)
    sync: WeightSync | None = None
    shells: list[ShellKey] = field(default_factory=list[ShellKey])
    engine_seconds: dict[str, float] = field(default_factory=dict[str, float])
    tolls: Tolls = HOST_TOLLS
    modes: dict[str, Mode] = field(default_factory=dict[str, Mode])
    folder: Path | None = None

    def __post_init__(self) -> None:
        self.specs: dict[str, ModelSpec] = models_of(self.config.model)
        self.host = HostMemory(None if self.folder is None else self.folder / "transition")

    def counters(self) -> dict[str, Any]:
        """What the journal keeps of the job beside its state and plan, for a driver that takes it over."""
        return {
            "plan_id": self.plan.plan_id,
            "state_version": self.state_version,
            "data_position": self.data_position,
            "optimizer_steps": dict(self.optimizer_steps),
            "kl_coef": self.config.algorithm.kl_coef,
        }

    def align(self, stages: Sequence[StagePlan]) -> None:
        """Before groups are built: equal counters on all slots, and a group for each stage's slots.

        Groups of slots that no stage of the plan runs on are kept for a while: plans come back. Those under cached
        communicators count among them.
        """
        counts = self.pool.call_all("group_count")
        rank_sets = tuple(dict.fromkeys(stage.slots for stage in stages))
        used = {*rank_sets, *(stage.slots for _, stage in self.plan.stages())}
        cached = {slots for _, slots, _ in self.shells} - used
        keep_count = max(IDLE_GROUPS - len(cached), 0)
        self.pool.call_all("align", rank_sets, max(counts.values()), frozenset(used | cached), keep_count)

    def attach(self, stages: Sequence[StagePlan], label: str) -> None:
        """Builds these stages from detached state, one after the other: engines build groups in one global order."""
        for stage in stages:
            self.align([stage])
            steps = self.optimizer_steps.get(emu_name(stage), 0)
            self.pool.call_all("attach", stage, label, steps)

    def create(self, stage: StagePlan, held: Holding, label: str) -> None:
        """Makes the state that a stage's model starts with, detached, where `held` wants it."""
        self.pool.call("create", {slot: (stage.model, shards, label) for slot, shards in held.items()})

    def move(
        self, moved: Movement, target: Holding, emus: tuple[str, ...], source_label: str, target_label: str
    ) -> MoveReport:
        """Carries out a movement on all slots; TransferFailed when the wire carried other bytes than planned."""
        programs = {slot: program_of(moved, slot, target.get(slot, ())) for slot in self.pool.numbers}
        arguments = {slot: (program, emus, source_label, target_label) for slot, program in programs.items()}
        return report(moved, self.pool.call("move", arguments))

    def digests(self, emus: tuple[str, ...], label: str) -> Digests:
        """Digest of every component of every tensor of `emus`: {"actor.train weight": {tensor: hex}}.

        Replicas must agree: DigestMismatch names the tensor where they do not, or where the state has a gap.
        """
        return combined(self.specs, self.pool.call_all("digests", emus, label))

    def plan_sync(self) -> WeightSync:
        """Makes the weight sync of the present plan and gives every slot its part."""
        self.use_sync(build_sync(self.specs["actor"], self.plan, self.config.transfer.bucket_bytes))
        return self.sync  # type: ignore[return-value]

    def use_sync(self, sync: WeightSync | None) -> None:
        """Gives every slot its part of a weight sync; None: the one there is stays."""
        if sync is None:
            return
        parts: dict[int, tuple[tuple[Program, ...]]] = {}
        for slot in self.pool.numbers:
            wanted = sync.target.get(slot, ())
            parts[slot] = (tuple(self._layer(part, slot, wanted) for part in sync.layers),)
        self.pool.call("plan_sync", parts)
        self.sync = sync

    def offload(self, stage: StagePlan) -> int:
        """An inference stage waits in host memory until its next phase; the bytes that moved."""
        given = dict.fromkeys(stage.slots, (emu_name(stage), str(self.host.offloaded)))
        return sum(self.pool.call("offload", given).values())

    @staticmethod
    def _layer(part: Movement, slot: int, wanted: tuple[Shard, ...]) -> Program:
        arriving = {s.wanted for b in part.buckets for s in b.slices if s.destination == slot}
        arriving |= {s.wanted for s in part.kept if s.destination == slot}
        return program_of(part, slot, [shard for shard in wanted if shard in arriving])


def report(moved: Movement, traffic: Mapping[int, Traffic]) -> MoveReport:
    """Compares counted with planned bytes slot by slot; TransferFailed names the slot where they differ."""
    for slot, counted in traffic.items():
        planned = moved.sent_bytes(slot), moved.received_bytes(slot)
        if planned != (counted.sent_bytes, counted.received_bytes):
            raise TransferFailed(
                f"slot {slot} sent and received {counted.sent_bytes:,} and {counted.received_bytes:,} bytes, "
                f"planned were {planned[0]:,} and {planned[1]:,}"
            )
    return MoveReport(
        planned_bytes=moved.moved_bytes,
        counted_bytes=sum(t.sent_bytes for t in traffic.values()),
        staged_bytes=max((t.staged_bytes for t in traffic.values()), default=0),
        sent_bytes={slot: t.sent_bytes for slot, t in traffic.items()},
        received_bytes={slot: t.received_bytes for slot, t in traffic.items()},
    )


def combined(specs: Mapping[str, ModelSpec], by_slot: Mapping[int, Mapping[Shard, int]]) -> Digests:
    """Adds shard digests to tensor digests over a cover of each tensor, replicas compared on the way."""
    seen: dict[Shard, tuple[int, int]] = {}
    for slot, shards in by_slot.items():
        for shard, value in shards.items():
            if shard in seen and seen[shard][1] != value:
                raise DigestMismatch(
                    f"{shard.emu} {shard.component} of {shard.tensor} {shard.box} differs between slots "
                    f"{seen[shard][0]} and {slot}"
                )
            seen[shard] = (slot, value)
    boxes: dict[tuple[str, str], list[tuple[Box, int]]] = {}
    for shard in sorted(seen):
        boxes.setdefault((f"{shard.emu} {shard.component}", shard.tensor), []).append((shard.box, seen[shard][1]))
    sums: dict[str, dict[str, str]] = {}
    for (key, tensor), held in sorted(boxes.items()):
        value = _tensor_digest(f"{key} of {tensor}", held, prod(specs[key.split(".")[0]].tensor(tensor).shape))
        sums.setdefault(key, {})[tensor] = f"{value:016x}"
    return sums


def _tensor_digest(what: str, held: Sequence[tuple[Box, int]], expected: int) -> int:
    """The digest of a tensor from its boxes: of each covering, where copies are cut in other places than each other."""
    coverings: list[list[tuple[Box, int]]] = []
    if sum(box.elements for box, _ in held) == expected:
        coverings.append(list(held))
    else:
        for box, value in held:
            apart = (c for c in coverings if all(box.intersect(other) is None for other, _ in c))
            covering = next(apart, None)
            if covering is None:
                coverings.append(covering := [])
            covering.append((box, value))
    for covering in coverings:
        count = sum(box.elements for box, _ in covering)
        if count != expected:
            raise DigestMismatch(f"{what}: {count} elements are held, the tensor has {expected}")
    found = {sum(value for _, value in covering) & MASK for covering in coverings}
    if len(found) > 1:
        raise DigestMismatch(f"{what}: its copies differ")
    return found.pop()


def short(digests: Digests) -> dict[str, str]:
    """One number per EMU component, for the journal: the sum of its tensors' digests, each times its rank by name."""
    return {
        key: f"{sum((rank + 1) * int(value, 16) for rank, value in enumerate(tensors.values())) & MASK:016x}"
        for key, tensors in digests.items()
    }
