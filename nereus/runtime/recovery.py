"""After a loss: the state that stands, from the slots that are left, from snapshots, or from the last checkpoint.

All engines are taken apart, the world is formed anew over the slots that are left, the bytes are brought to where the
plan wants them, and the engines are built again. Nothing of the lost slots is needed that another slot or a snapshot
holds; else the job goes back to its last checkpoint, and the steps since then are done again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nereus.checkpoint import CheckpointFile, Manifest, Part, reads
from nereus.errors import CheckpointError, NereusError, SlotFailed, TransferFailed
from nereus.layout import Plan, StagePlan
from nereus.runtime.changes import NEXT, start_generation
from nereus.runtime.checkpoints import newest_good
from nereus.runtime.job import Job
from nereus.runtime.restore import restore
from nereus.runtime.transformation import OLD, snapshot_name
from nereus.slices import cut, movement
from nereus.storage import Shard, emu_name, holding


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What stands when a job is hit: the plan of the state that is valid, whether it is valid at all, and snapshots.

    `whole` is False where a step was half done. `snapshots` gives the folder of each EMU of which a change under way has
    copied all old bytes to this host.
    """

    plan: Plan
    committed: bool
    whole: bool
    snapshots: Mapping[str, Path]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """How the job goes on: its next step, and by EMU where the bytes came from (slots, snapshot or checkpoint)."""

    next_step: int
    sources: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retreat:
    """New slot numbers by old ones, and what each slot says: the optimizer steps of its parts, by EMU."""

    numbers: Mapping[int, int]
    optimizer_steps: tuple[Mapping[str, int], ...]


def retreat(job: Job, lost: Sequence[int], *, committed: bool) -> Retreat:
    """Takes the slots that are left apart and forms their world anew.

    SlotFailed when another slot is lost meanwhile.
    """
    left = [slot for slot in job.pool.numbers if slot not in lost]
    answers = job.pool.gather("retreat", dict.fromkeys(left, (committed, OLD)))
    broken = {slot: answer for slot, answer in answers.items() if isinstance(answer, NereusError)}
    if broken:
        raise SlotFailed("; ".join(f"slot {slot}: {error}" for slot, error in broken.items()), job.pool.lost())
    for steps in answers.values():
        job.optimizer_steps |= {emu: count for emu, count in steps.items() if count >= 0}
    numbers = job.pool.drop(lost)
    job.shells.clear()
    job.pool.rejoin()
    return Retreat(numbers=numbers, optimizer_steps=tuple(answers.values()))


def recover(
    job: Job,
    plan: Plan,
    standing: Standing,
    numbers: Mapping[int, int],
    *,
    next_step: int,
    checkpoints: Path,
    detached: Mapping[int, frozenset[Shard]] | None = None,
) -> Recovery:
    """Brings the job to `plan` from what `retreat` left. CheckpointError when there is nothing to go back to.

    `detached` says what each slot, by its new number, has indeed left; else it is what the standing plan says.
    """
    held = _held(job, standing.plan, numbers, detached)
    job.plan = plan
    stages = [stage for _, stage in plan.stages() if stage.stage != "generate"]
    sources = {emu_name(stage): _source(job, stage, held, standing) for stage in stages}
    if not standing.whole or "checkpoint" in sources.values():
        lacking = [emu for emu, source in sources.items() if source == "checkpoint"]
        try:
            next_step = _from_checkpoint(job, checkpoints)
        except CheckpointError as error:
            why = f"no slot that is left holds all of {', '.join(lacking)}" if lacking else "a step was half done"
            raise CheckpointError(f"{why}: {error}") from error
        sources = dict.fromkeys(sources, "checkpoint")
    else:
        for stage in stages:
            _rebuild(job, stage, held, sources[emu_name(stage)], standing)
    job.pool.call_all("drop", OLD)
    start_generation(job)
    job.plan_sync()
    job.host.drop_snapshots()
    return Recovery(next_step=next_step, sources=sources)


def _held(
    job: Job, plan: Plan, numbers: Mapping[int, int], detached: Mapping[int, frozenset[Shard]] | None
) -> dict[str, dict[int, tuple[Shard, ...]]]:
    """What is left of each EMU, under the new numbers."""
    found: dict[str, dict[int, tuple[Shard, ...]]] = {}
    for _, stage in plan.stages():
        if stage.stage != "generate":
            shards = holding(job.specs[stage.model], stage)
            left = {numbers[slot]: s for slot, s in shards.items() if slot in numbers}
            if detached is not None:
                left = {slot: tuple(shard for shard in s if shard in detached[slot]) for slot, s in left.items()}
            found[emu_name(stage)] = left
    return found


def _source(job: Job, stage: StagePlan, held: Mapping[str, Mapping[int, tuple[Shard, ...]]], standing: Standing) -> str:
    """Where an EMU's bytes are: in its snapshot, on slots, or only in a checkpoint.

    Without a whole snapshot nothing was dropped: that waits until all slots have copied theirs.
    """
    emu = emu_name(stage)
    if emu in standing.snapshots and not standing.committed:
        return "snapshot"
    try:
        cut(held[emu], holding(job.specs[stage.model], stage))
    except TransferFailed:
        return "checkpoint"
    return "slots"


def _rebuild(
    job: Job, stage: StagePlan, held: Mapping[str, Mapping[int, tuple[Shard, ...]]], source: str, standing: Standing
) -> None:
    emu, target = emu_name(stage), holding(job.specs[stage.model], stage)
    if source == "snapshot":
        wanted, folder = reads(_snapshot_manifest(job, emu, standing), target), str(standing.snapshots[emu])
        job.pool.call("load", {slot: (folder, wanted[slot], (), NEXT) for slot in target})
    elif dict(held[emu]) == dict(target):
        job.attach([stage], OLD)
        return
    else:
        moved = movement(cut(held[emu], target), job.config.transfer.bucket_bytes)
        job.move(moved, target, (emu,), OLD, NEXT)
        job.pool.call_all("drop", OLD, emu)
    job.attach([stage], NEXT)
    job.pool.call_all("drop", NEXT)


def _snapshot_manifest(job: Job, emu: str, standing: Standing) -> Manifest:
    """The snapshot of an EMU in the words of a checkpoint."""
    stage = next(stage for _, stage in standing.plan.stages() if emu_name(stage) == emu)
    files: list[CheckpointFile] = []
    seen: set[Shard] = set()  # replicas hold the same
    for slot, shards in sorted(holding(job.specs[stage.model], stage).items()):
        boxes = tuple(Part(shard=shard, box=shard.box).stored for shard in shards if shard not in seen)
        seen.update(shards)
        files.append(CheckpointFile(name=snapshot_name(emu, slot), size_bytes=0, sha256="", boxes=boxes))
    config = job.config
    return Manifest(
        run_id=config.run.name,
        step=0,
        state_version=job.state_version,
        model={},
        plan={},
        plan_text="",
        seed=config.run.seed,
        data_position=job.data_position,
        kl_coef=config.algorithm.kl_coef,
        optimizer_steps=dict(job.optimizer_steps),
        files=tuple(files),
    )


def _from_checkpoint(job: Job, folder: Path) -> int:
    """All state as the newest good checkpoint has it; the step after it. Versions only advance."""
    version = job.state_version
    found = newest_good(folder)
    job.pool.call_all("drop", OLD)
    missing = restore(job, found.path, found.manifest)
    if missing:
        raise CheckpointError(f"{found.path}: holds nothing of {', '.join(missing)}")
    job.state_version = max(version, job.state_version)
    return found.manifest.step + 1
