"""A change of plan on the live job, as a transaction: detach, move, verify, commit, attach; or back to what was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nereus.errors import DigestMismatch, TransferFailed
from nereus.interchange.start import first_steps
from nereus.layout import Plan, StagePlan
from nereus.runtime.job import Digests, Job, MoveReport, short
from nereus.runtime.journal import Journal
from nereus.storage import emu_name, holding
from nereus.transition import Transition, build, check_transition

OLD, NEXT = "old", "next"


@dataclass(kw_only=True)
class ChangeRecord:
    """What a change did: seconds by part (all of them in the pause), bytes, digests, state version."""

    transition: str
    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    moved: MoveReport | None = None
    digests: dict[str, str] = field(default_factory=dict)
    state_version: int = 0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Adds the wall seconds inside to a part."""
        started = time.monotonic()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started

    @property
    def pause_seconds(self) -> float:
        """How long the job stood still: planning too happens between two steps, with the slots idle."""
        return sum(self.seconds.values())


class ChangeUndone(Exception):  # an outcome, not an error: the job goes on
    """The change failed before its commit, and the plan before it is live again."""


def _stages(plan: Plan, names: tuple[str, ...]) -> list[StagePlan]:
    return [getattr(plan, name) for name in names]


def change_plan(job: Job, plan: Plan, record: ChangeRecord, journal: Journal) -> None:
    """Brings the job to `plan`. ChangeUndone when it was rolled back; other errors mean a slot is lost.

    The old state is kept, detached, until the new one has been verified and the commit record is on the disk (mode
    "beside"); so a failure before that costs nothing but time.
    """
    with record.timed("plan"):
        transition = build(job.specs, job.plan, plan, job.config.transfer.bucket_bytes)
        check_transition(transition, job.config.transfer.bucket_bytes)
        _check_room(job, transition)
    emus = transition.emus()
    with record.timed("quiesce"):
        if transition.restart_generation:
            job.pool.call_all("stop_generation")
    with record.timed("detach"):
        for emu in emus:
            job.pool.call_all("detach", emu, OLD)
    try:
        _move_and_verify(job, transition, record)
    except (TransferFailed, DigestMismatch) as error:
        _undo(job, transition)
        raise ChangeUndone(str(error)) from error
    with record.timed("commit"):
        job.state_version += 1
        record.state_version = job.state_version
        journal.append(
            "commit",
            sync=True,
            transition=record.transition,
            plan_id=plan.plan_id,
            state_version=job.state_version,
            digests=record.digests,
            optimizer_steps=dict(job.optimizer_steps),
            data_position=job.data_position,
        )
    with record.timed("attach"):
        job.pool.call_all("drop", OLD)
        job.plan = plan
        job.attach(_stages(plan, transition.changed), NEXT)
        job.pool.call_all("drop", NEXT)
    _follow_up(job, transition, record)


def _check_room(job: Job, transition: Transition) -> None:
    """ChangeUndone, with nothing touched, when a slot's ledger cannot hold old and new state beside each other."""
    for slot, free in job.pool.call_all("free_bytes").items():
        needed = transition.extra_bytes(slot, job.config.transfer.bucket_bytes)
        if needed > free:
            raise ChangeUndone(
                f"slot {slot} needs {needed:,} bytes to keep old and new state beside each other, {free:,} are left of "
                "fleet.slot_budget_bytes"
            )


def _move_and_verify(job: Job, transition: Transition, record: ChangeRecord) -> None:
    emus = transition.emus()
    if not emus:
        return
    with record.timed("verify"):
        before = job.digests(emus, OLD)
    with record.timed("move"):
        record.moved = job.move(transition.moved, transition.target, emus, OLD, NEXT)
    with record.timed("verify"):
        after = job.digests(emus, NEXT)
        compare(before, after)
        record.digests = short(after)


def compare(before: Digests, after: Digests) -> None:
    """DigestMismatch that names the first tensor whose digest changed, or that is missing on one side."""
    for key in sorted({*before, *after}):
        old, new = before.get(key, {}), after.get(key, {})
        for tensor in sorted({*old, *new}):
            if old.get(tensor) != new.get(tensor):
                raise DigestMismatch(
                    f"{key} of {tensor} is {new.get(tensor)} after the movement, was {old.get(tensor)}"
                )


def _undo(job: Job, transition: Transition) -> None:
    """Back to the plan before: its state was kept."""
    job.pool.call_all("drop", NEXT)
    job.attach(_stages(transition.before, transition.changed), OLD)
    job.pool.call_all("drop", OLD)
    if transition.restart_generation:
        start_generation(job)


def _follow_up(job: Job, transition: Transition, record: ChangeRecord) -> None:
    if transition.restart_generation:
        with record.timed("engine"):
            start_generation(job)
    with record.timed("sync"):
        job.plan_sync()


def start_generation(job: Job) -> None:
    """Starts the engines of the present plan; their weights come with the next sync."""
    job.align([job.plan.actor_generate])
    job.pool.call_all("start_generation", job.plan.actor_generate)


def first_state(job: Job) -> None:
    """Builds the actor under the first plan, from the run's seed or from model.folder."""
    stage = job.plan.actor_train
    job.create(stage, holding(job.specs["actor"], stage), NEXT)
    job.optimizer_steps[emu_name(stage)] = first_steps(job.config.model)
    job.attach([stage], NEXT)
