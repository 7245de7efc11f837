"""State from a checkpoint onto the slots of any plan: each slot reads the boxes that it will hold, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nereus.checkpoint import Manifest, Origin, lacking, reads
from nereus.errors import CheckpointError
from nereus.layout import StagePlan
from nereus.runtime.changes import NEXT
from nereus.runtime.job import Digests, Job
from nereus.storage import MOMENTS, Shard, emu_name, holding


def restore(job: Job, folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """Builds what the checkpoint in `folder` holds under the job's plan, and sets the job's counters.

    Returns the names of the stages of which it holds nothing (an import need not hold them all). CheckpointError when
    a file is not what the manifest says, or the state on the slots has other digests than the manifest.
    """
    job.optimizer_steps = dict(manifest.optimizer_steps)
    job.data_position = manifest.data_position
    job.state_version = manifest.state_version
    known = {stored.emu for file in manifest.files for stored in file.boxes}
    missing: list[str] = []
    for name, stage in job.plan.stages():
        if stage.stage == "generate":
            continue
        if emu_name(stage) in known:
            _restore_stage(job, folder, manifest, stage)
        else:
            missing.append(name)
    if "actor_train" in missing:
        raise CheckpointError(f"{folder}: holds no actor")
    return tuple(missing)


def _restore_stage(job: Job, folder: Path, manifest: Manifest, stage: StagePlan) -> None:
    held = holding(job.specs[stage.model], stage)
    origins, blank = _without_optimizer(manifest, stage, held)
    wanted = {slot: tuple(s for s in shards if s not in blank) for slot, shards in held.items()}
    try:
        plan = reads(manifest, wanted, origins=origins)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    given = {
        slot: (str(folder), plan[slot], tuple(s for s in shards if s in blank), NEXT) for slot, shards in held.items()
    }
    job.pool.call("load", given)
    job.attach([stage], NEXT)
    job.pool.call_all("drop", NEXT)
    _compare(folder, manifest.digests, job.digests((emu_name(stage),), ""), emu_name(stage))


def _without_optimizer(
    manifest: Manifest, stage: StagePlan, held: Mapping[int, tuple[Shard, ...]]
) -> tuple[dict[Origin, Origin], frozenset[Shard]]:
    """What an import of weights alone leaves to be made: masters come from weights, moments of no step are zero."""
    emu = emu_name(stage)
    shards = {shard for mine in held.values() for shard in mine}
    absent = set(lacking(manifest, shards))
    of = {component: {s for s in shards if s.component == component} for component in ("master", *MOMENTS)}
    origins: dict[Origin, Origin] = {}
    if of["master"] and of["master"] <= absent:
        origins[emu, "master"] = (emu, "weight")
    moments = of[MOMENTS[0]] | of[MOMENTS[1]]
    fresh = moments <= absent and not manifest.optimizer_steps.get(emu, 0)
    return origins, frozenset(moments) if fresh else frozenset()


def _compare(folder: Path, expected: Digests, found: Digests, emu: str) -> None:
    for key in sorted(key for key in expected if key.startswith(f"{emu} ")):
        for tensor, digest in expected[key].items():
            if found.get(key, {}).get(tensor) != digest:
                raise CheckpointError(
                    f"{folder}: {key} of {tensor} has digest {found.get(key, {}).get(tensor)} on the slots, the manifest "
                    f"says {digest}"
                )
