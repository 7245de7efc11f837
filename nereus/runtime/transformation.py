"""What one slot does in a change of plan: the tasks of its program, one after the other, on its one thread."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nereus.checkpoint import Part
from nereus.engines.megatron.engine import TrainEngine, adam_of
from nereus.engines.megatron.groups import ModelGroups
from nereus.errors import NereusError
from nereus.layout import StagePlan
from nereus.runtime import fabric, state
from nereus.runtime.fabric import Program, Traffic
from nereus.runtime.job import ShellKey
from nereus.runtime.ledger import Ledger
from nereus.runtime.shards import bytes_of, copies, mapped, write_file
from nereus.slices import Slice
from nereus.storage import Shard
from nereus.transitions.planned import SlotRoom
from nereus.transitions.programs import Task

if TYPE_CHECKING:
    from nereus.runtime.slot import Slot

GENERATION = "actor.generate"
OLD = "old"
"""The label of state that was detached for a recovery."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotChange:
    """What a slot is told of a change: stages before and after by EMU, its part of each movement, what it copies.

    `counts` gives the counter from which each EMU's groups are named (all members start from the same); EMUs of
    `reused` take their engine, a shell, from the cache, old ones of `cached` go there, and those of `evicted` leave it.
    `snapshots` gives the folder that old bytes are copied to, for EMUs that change in place.
    """

    before: Mapping[str, StagePlan]
    after: Mapping[str, StagePlan]
    programs: Mapping[int, Program]
    copies: Mapping[str, tuple[Slice, ...]]
    counts: Mapping[str, int]
    reused: frozenset[str]
    cached: frozenset[str]
    evicted: tuple[ShellKey, ...]
    snapshots: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One task that ended well: its seconds, and what it found: digests of shards, traffic."""

    task: Task
    seconds: float
    digests: Mapping[Shard, int] = field(default_factory=dict[Shard, int])
    traffic: Traffic | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Performed:
    """What became of a program: the tasks that ended well, and the one that did not with its error."""

    outcomes: tuple[Outcome, ...]
    failed: Task | None = None
    error: NereusError | str = ""


class Transformation:
    """The change that a slot is part of: its next engines, the old ones, and what bytes are read from."""

    def __init__(self, slot: Slot, change: SlotChange) -> None:
        self._slot, self.change = slot, change
        self.next: dict[str, TrainEngine] = {}
        self.old: dict[str, TrainEngine] = {}
        self._groups: dict[str, ModelGroups] = {}
        self._woken: dict[str, TrainEngine] = {}
        self._resting: dict[str, TrainEngine] = {}
        self._dropped = False
        self._sources: dict[str, state.Store] = {}
        self._targets: dict[str, state.Store] = {}
        self._active: set[str] = set()
        self._steps: Mapping[str, int] = {}

    def perform(self, tasks: tuple[Task, ...], optimizer_steps: Mapping[str, int]) -> Performed:
        """Carries tasks out in order until one fails; the slot must then retreat, because peers may wait for it.

        `optimizer_steps` are those of each EMU now: the step that runs beside a change makes more of them.
        """
        self._steps = optimizer_steps
        outcomes: list[Outcome] = []
        with self._slot.ledger.in_phase("transition"):
            for task in tasks:
                started = time.monotonic()
                failure: NereusError | str = ""
                try:
                    self._slot.before_task(task)
                    found = getattr(self, f"_{task.kind}")(task)
                except NereusError as error:  # without what it came from: frames hold groups open, and peers wait
                    error.__cause__ = error.__context__ = None
                    failure = error.with_traceback(None)
                except Exception as error:  # noqa: BLE001  # whatever an engine raises is told to the driver
                    failure = f"{type(error).__name__}: {error}"
                if failure:
                    return Performed(outcomes=tuple(outcomes), failed=task, error=failure)
                outcomes.append(replace(found or _nothing(task), seconds=time.monotonic() - started))
        return Performed(outcomes=tuple(outcomes))

    # -- views ---------------------------------------------------------------------------------------------------

    def _source(self, emu: str) -> state.Store:
        """Where the old bytes of an EMU are read from: its live engine, or its snapshot."""
        if emu not in self._sources:
            here = emu in self._slot.live and emu not in self._active
            self._sources[emu] = self._slot.views(emu) if here else {}
        return self._sources[emu]

    def _target(self, emu: str) -> state.Store:
        if emu not in self._targets:
            self._targets[emu] = self.next[emu].views() if emu in self.next else {}
        return self._targets[emu]

    def _digests(self, task: Task, held: Mapping[Shard, Tensor]) -> Outcome:
        return replace(_nothing(task), digests=state.digests(held))

    # -- tasks, by kind ------------------------------------------------------------------------------------------

    def _quiesce(self, task: Task) -> Outcome | None:
        """No step touches the EMU any more: an engine of generation ends, of other state the digests are taken."""
        if task.emu == GENERATION:
            self._slot.stop_generation()
            return None
        source = self._source(task.emu)
        return self._digests(task, {shard: source[shard] for shard in source if self._speaks_for(shard)})

    def _speaks_for(self, shard: Shard) -> bool:
        """Whether the digest before is this slot's to take: of what replicas hold alike the first one does.

        What arrives is read back on every slot. Experts are replicated otherwise: there everybody speaks.
        """
        stage = self.change.before[shard.emu]
        rank = stage.rank_of(self._slot.number)
        if rank is None or stage.layout.ep > 1:
            return True
        at, sharded = stage.layout.coordinates(rank), stage.layout.distributed_optimizer
        return not (at.dp or at.cp) or (sharded and shard.component != "weight")

    def _allocate(self, task: Task) -> None:
        name = f"next.{task.emu}"
        self._slot.ledger.hold(name, self._slot.ledger.held.get(name, 0) + task.size_bytes)

    def _build_groups(self, task: Task) -> None:
        """The communicators of a Megatron stage, a shell has them; vLLM builds its own with its engine."""
        if task.emu == GENERATION:
            return
        stage = self.change.after[task.emu]
        if task.emu in self.change.reused:
            key = task.emu, stage.slots, stage.layout
            self._woken[task.emu] = self._slot.shells.pop(key)
            self._slot.ledger.rename(shell_name(key), f"overhead.next.{task.emu}")
            return
        world = self._slot.joined
        world.align_group_count(self.change.counts[task.emu])
        with self._slot.ledger.measured(f"overhead.next.{task.emu}"):
            self._groups[task.emu] = ModelGroups(world, world.sub(stage.slots), stage.layout)

    def _build_engine(self, task: Task) -> None:
        """The engine in the room that was claimed; its state is unfilled."""
        slot, stage = self._slot, self.change.after[task.emu]
        slot.ledger.release(f"next.{task.emu}")
        if task.emu == GENERATION:
            slot.joined.align_group_count(self.change.counts[task.emu])
            slot.start_generation(stage)
            return
        adam = adam_of(slot.config.algorithm, stage.model) if stage.stage == "train" else None
        with slot.ledger.measured(f"overhead.next.{task.emu}"):
            if task.emu in self._woken:
                engine = self._woken.pop(task.emu)
                self.next[task.emu] = engine
                engine.wake(stage)
            else:
                groups = self._groups.pop(task.emu)
                engine = TrainEngine(slot.joined, slot.specs[stage.model], stage, slot.number, adam, groups)
                self.next[task.emu] = engine
            slot.ledger.hold_all(f"next.{task.emu}", engine.resident_bytes())

    def _transfer(self, task: Task) -> Outcome:
        program = self.change.programs[task.movement_index]
        return replace(_nothing(task), traffic=self._run(program))

    def _run(self, program: Program) -> Traffic:
        sources, targets = _Merged(self._source, self.change.before), _Merged(self._target, self.change.after)
        with torch.no_grad(), self._slot.ledger.during("staging", fabric.staging_bytes(program)):
            return fabric.run(program, sources, targets, self._slot.control.check)

    def _copy(self, task: Task) -> None:
        kept = self.change.copies.get(task.emu, ())
        self._run(Program(slot=self._slot.number, kept=kept, buckets=(), wanted=()))

    def _stage_in(self, task: Task) -> None:
        """Own bytes come back from the snapshot."""
        self._copy(task)

    def _arrive(self, task: Task) -> None:
        """What is handed on has come from the host: the tasks before have seen to it."""

    def _verify(self, task: Task) -> Outcome:
        """All bytes are here: their digests; the count of optimizer steps belongs to them."""
        if task.emu in self.next:
            self.next[task.emu].optimizer_steps = self._steps.get(task.emu, 0)
        return self._digests(task, self._target(task.emu))

    def _stage_out(self, task: Task) -> None:
        """Copies the old bytes to the snapshot's file, from which they are read from now on."""
        slot = self._slot
        held = sorted(self._source(task.emu).items(), key=lambda item: (-item[1].element_size(), item[0]))
        parts = [(Part(shard=shard, box=shard.box), data) for shard, data in held]
        path = Path(self.change.snapshots[task.emu]) / snapshot_name(task.emu, slot.number)
        limit_bytes = max(slot.config.transfer.bucket_bytes // 2, 1)
        pieces = (bytes_of(piece) for part, data in parts for _, piece in copies(part, data, limit_bytes))
        path.parent.mkdir(parents=True, exist_ok=True)
        slot.keep(path.parent)
        draft = path.with_suffix(".draft")
        with slot.ledger.during("staging", limit_bytes):
            write_file(draft, tuple(part.stored for part, _ in parts), pieces, hashed=False)
        draft.rename(path)  # under its name it is whole
        self._sources[task.emu] = mapped(path, [shard for shard, _ in held])

    def _activate(self, task: Task) -> None:
        """The new engine is the live one; the old one waits for its release."""
        self._active.add(task.emu)
        slot, emu = self._slot, task.emu
        if emu == GENERATION:
            return
        if emu in slot.live:
            self._put_away(emu)
        slot.live[emu] = self.next.pop(emu)
        slot.steps[emu] = self._steps.get(emu, 0)
        slot.ledger.rename(f"next.{emu}", emu)
        slot.ledger.rename(f"overhead.next.{emu}", f"overhead.{emu}")
        slot.ledger.forget_use(emu)

    def _put_away(self, emu: str) -> None:
        self.old[emu] = self._slot.live.pop(emu)
        self._slot.ledger.rename(emu, f"old.{emu}")
        self._slot.ledger.rename(f"overhead.{emu}", f"overhead.old.{emu}")

    def _release(self, task: Task) -> None:
        """Old memory goes: gradients alone when blank memory goes before the state, else the whole old engine."""
        slot, emu = self._slot, task.emu
        if emu == GENERATION:
            return
        if task.note == "blank" and emu not in self._active and emu in slot.live:
            if emu in self.change.after:
                slot.live[emu].drop_gradients()
                slot.ledger.release(f"{emu}.grads")
            return
        if emu in slot.live and emu not in self._active:
            self._put_away(emu)
        if emu in self.old:
            if emu not in self.change.snapshots:
                self._sources.pop(emu, None)
            self._resting[emu] = self.old.pop(emu)
            self._resting[emu].rest()
            slot.ledger.release(f"old.{emu}")

    def _destroy_groups(self, task: Task) -> None:
        """Old communicators go, or into the cache with the shell that they belong to."""
        engine, name = self._resting.pop(task.emu, None), f"overhead.old.{task.emu}"
        if engine is None:
            return
        if task.emu in self.change.cached:
            before = self.change.before[task.emu]
            key = task.emu, before.slots, before.layout
            self._slot.shells[key] = engine
            self._slot.ledger.rename(name, shell_name(key))
        else:
            self._drop(engine)
            self._slot.ledger.release(name)

    def _drop(self, engine: TrainEngine) -> None:
        """A shell goes with its groups; one collection at the end takes all that went."""
        engine.release(collect=False).close()
        self._dropped = True

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """After the last task: what the cache has no room for goes."""
        for emu, folder in self.change.snapshots.items():  # the driver sees to its own host only
            (Path(folder) / snapshot_name(emu, self._slot.number)).unlink(missing_ok=True)
        while self._resting:
            emu, engine = self._resting.popitem()
            self._drop(engine)
            self._slot.ledger.release(f"overhead.old.{emu}")
        for key in self.change.evicted:
            if key in self._slot.shells:
                self._drop(self._slot.shells.pop(key))
                self._slot.ledger.release(shell_name(key))
        self._drop_views()
        if self._dropped:
            gc.collect()

    def _drop_views(self) -> None:
        self._sources.clear()
        self._targets.clear()

    def abandon(self) -> None:
        """Back to the engines before: the next ones go, and gradients that were dropped come back as zeros."""
        slot = self._slot
        self._drop_views()
        for engines in (self.next, self._woken, self._resting):
            while engines:
                engines.popitem()[1].close()
        for groups in self._groups.values():
            groups.close()
        self._groups.clear()
        for emu in self.change.after:
            slot.ledger.release(f"next.{emu}")
            slot.ledger.release(f"overhead.next.{emu}")
        for emu, engine in slot.live.items():
            if engine.restore_gradients():
                slot.ledger.hold_all(emu, engine.resident_bytes())

    def newest(self, *, committed: bool) -> dict[str, TrainEngine]:
        """The engines whose state is that of the version which stands; the others of this slot are closed."""
        self._drop_views()
        found = dict(self._slot.live)
        if committed:
            for emu, stage in self.change.after.items():
                if stage.rank_of(self._slot.number) is None:
                    found.pop(emu, None)
            found.update(self.next)
        else:
            found.update({emu: engine for emu, engine in self.old.items() if emu not in self.change.snapshots})
        kept = {id(engine) for engine in found.values()}
        shells = *self._woken.values(), *self._resting.values()
        for engine in (*self._slot.live.values(), *self.next.values(), *self.old.values(), *shells):
            if id(engine) not in kept:
                engine.close()
        for groups in self._groups.values():
            groups.close()
        self.next.clear()
        self.old.clear()
        return found


class _Merged(Mapping[Shard, Tensor]):
    """The views of several EMUs as one mapping, each EMU's made when it is first asked for."""

    def __init__(self, views_of: Callable[[str], state.Store], emus: Mapping[str, StagePlan]) -> None:
        self._views_of, self._emus = views_of, emus

    def __getitem__(self, shard: Shard) -> Tensor:
        return self._views_of(shard.emu)[shard]

    def __iter__(self) -> Iterator[Shard]:
        return (shard for emu in self._emus for shard in self._views_of(emu))

    def __len__(self) -> int:
        return sum(len(self._views_of(emu)) for emu in self._emus)


def _nothing(task: Task) -> Outcome:
    return Outcome(task=task, seconds=0.0)


def snapshot_name(emu: str, slot: int) -> str:
    """The file of a slot's snapshot of an EMU."""
    return f"{emu}-slot-{slot:03d}.safetensors"


def shell_name(key: ShellKey) -> str:
    """The ledger's name for what a cached shell holds: communicators and objects, no state."""
    emu, slots, layout = key
    return f"overhead.shell.{emu} {layout} {layout.distributed_optimizer} {slots}"


def room_of(ledger: Ledger) -> SlotRoom:
    """What a change of plan may count on, by the slot's ledger."""
    held = ledger.total_bytes
    engines = (size for name, size in ledger.held.items() if name.removeprefix("overhead.").startswith(GENERATION))
    return SlotRoom(
        budget_bytes=ledger.budget_bytes,
        held_bytes=held,
        phase_bytes=max(max(ledger.peaks.values(), default=0) - held, 0),
        generation_bytes=sum(engines),
    )
