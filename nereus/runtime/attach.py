"""A new driver takes over slots that live: what they do is ended, and what stands goes on, as after a loss of none.

All engines are taken apart where the last driver left them, the world is formed anew, and the bytes are brought to
where the plan wants them, mostly to where they are. Where an optimizer step was cut short, or the slots hold another
state than the journal says, the job goes back to its last checkpoint, in the same processes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nereus.attaching import Held, Hold, Stand, held, one_step_more
from nereus.config import Config
from nereus.control.written import written
from nereus.errors import DigestMismatch
from nereus.runtime.attachment import Attaching
from nereus.runtime.control import UPDATES
from nereus.runtime.job import Digests, Job, short
from nereus.runtime.journal import Journal
from nereus.runtime.pool import SlotPool
from nereus.runtime.recovery import Recovery, Standing, recover, retreat
from nereus.runtime.slot import Slot
from nereus.runtime.transformation import OLD, snapshot_name
from nereus.storage import Shard, emu_name

REASON = "a new driver takes over"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """What came of it: what stands, what the slots held of it, and where the bytes came from."""

    stand: Stand
    held: Held
    recovery: Recovery
    digests: Digests


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What a slot holds once it is apart, and whether an optimizer step was cut short on it."""

    shards: frozenset[Shard]
    torn: bool


def reattach(job: Job, attaching: Attaching, journal: Journal, model_folder: Path, checkpoints: Path) -> Attached:
    """Brings what stands to the job's plan. SlotFailed when a slot is lost meanwhile, CheckpointError as `recover`."""
    stand, before, pool = attaching.stand, attaching.before.algorithm, job.pool
    adopted = bool(attaching.attachment.host_memory) and job.host.adopt(Path(attaching.attachment.host_memory))
    for slot in attaching.lost_slots:
        pool.kill(slot)
    pool.abort(REASON, _interruptible(attaching, pool))
    journal.append("recovering", lost=attaching.lost_slots)
    back = retreat(job, attaching.lost_slots, committed=stand.committed)
    found: dict[int, _Found] = pool.call_all("apply", _take_over, job.config, model_folder)
    torn = any(each.torn for each in found.values())
    updates = before.epochs * before.mini_batches
    state = held(stand, [Hold(optimizer_steps=steps, torn=torn) for steps in back.optimizer_steps], updates)
    if state == "step done":
        stand = one_step_more(stand, updates, attaching.before.data.prompts_per_step)
    job.state_version, job.data_position = stand.state_version, stand.data_position
    job.optimizer_steps = dict(stand.optimizer_steps)
    if state != "torn" and _differs(job, stand):
        state = "torn"
    standing = Standing(
        plan=stand.plan,
        committed=stand.committed,
        whole=state != "torn",
        snapshots=_snapshots(job, stand) if adopted else {},
    )
    shards = {slot: each.shards for slot, each in found.items()}
    recovery = recover(
        job,
        job.plan,
        standing,
        back.numbers,
        next_step=stand.step + 1,
        checkpoints=checkpoints,
        detached=shards,
    )
    emus = tuple(emu_name(stage) for _, stage in job.plan.stages() if stage.stage != "generate")
    return Attached(stand=stand, held=state, recovery=recovery, digests=job.digests(emus, ""))


def _interruptible(attaching: Attaching, pool: SlotPool) -> list[int]:
    """The slots that live, without those in an optimizer step: one that ends may be the last of its step."""
    live = [slot for slot in attaching.attachment.slots if slot not in attaching.lost_slots]
    return [slot for slot, told in pool.status(live).items() if told is None or told.phase != UPDATES]


def _take_over(slot: Slot, config: Config, model_folder: Path) -> _Found:
    """On a slot that is apart: the new driver's configuration holds from here on."""
    slot.config, slot.model_folder = config, model_folder
    slot.ledger.budget_bytes = config.fleet.slot_budget_bytes
    return _Found(shards=frozenset(slot.store.get(OLD, {})), torn=slot.control.status().torn)


def _differs(job: Job, stand: Stand) -> bool:
    """Whether the slots hold another state than the one that the journal knows digests of."""
    for emu in sorted({key.split()[0] for key in stand.digests}):
        try:
            digests = short(job.digests((emu,), OLD))
        except DigestMismatch:  # not all of it is there: a snapshot or other slots may help
            continue
        if any(stand.digests.get(key, digest) != digest for key, digest in digests.items()):
            return True
    return False


def _snapshots(job: Job, stand: Stand) -> dict[str, Path]:
    """The folders of the EMUs of which a change under way has copied all old bytes; of a job on one host alone."""
    if stand.change is None or stand.committed or len(set(job.pool.hosts.values())) > 1:
        return {}
    folders = job.host.snapshots("snapshot"), job.host.snapshots("checkpoint")
    return {
        emu_name(stage): folder
        for _, stage in stand.plan.stages()
        for folder in folders
        if all((folder / snapshot_name(emu_name(stage), slot)).is_file() for slot in stage.slots)
    }


def told(attached: Attached, attaching: Attaching, job: Job, config: Config, seconds: float) -> dict[str, Any]:
    """The fields of the journal's `reattached`."""
    return {
        "config": asdict(config),
        "lost": attaching.lost_slots,
        "held": attached.held,
        "change": str(attached.stand.change["transition"]) if attached.stand.change else "",
        "committed": attached.stand.committed,
        "slots": len(job.pool.numbers),
        "pids": [job.pool.pids[slot] for slot in job.pool.numbers],
        "plan": written(job.plan),
        "plan_text": str(job.plan),
        "next_step": attached.recovery.next_step,
        "sources": dict(attached.recovery.sources),
        "digests": short(attached.digests),
        "seconds": seconds,
        **job.counters(),
    }


def line(attached: Attached, attaching: Attaching) -> str:
    """What was found, for people."""
    stand, slots = attached.stand, len(attaching.attachment.slots) - len(attaching.lost_slots)
    parts = [f"attached to {slots} live slots: step {stand.step} stands, state version {stand.state_version}"]
    if attaching.lost_slots:
        parts.append(f"slots {', '.join(map(str, attaching.lost_slots))} are lost")
    if stand.change is not None:
        parts.append(f"change {stand.change['transition']} {'was committed' if stand.committed else 'is undone'}")
    if attached.held == "torn":
        parts.append(f"a step was half done, back to the checkpoint of step {attached.recovery.next_step - 1}")
    elif "checkpoint" in attached.recovery.sources.values():
        parts.append(f"not all of it is left, back to the checkpoint of step {attached.recovery.next_step - 1}")
    return "; ".join(parts)
