"""A change of plan on the live job, as a transaction over state versions, driven by its transition graph.

Planned and proved while a step runs; what may come early runs at a boundary between two phases of that step, the rest
in the pause after it. The old state is kept until the new one is verified and the commit record is on the disk.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nereus.control.written import written
from nereus.errors import DigestMismatch, NereusError, SlotFailed, TransferFailed
from nereus.interchange.start import first_steps
from nereus.layout import Plan
from nereus.runtime.fabric import Traffic
from nereus.runtime.job import Digests, Job, MoveReport, combined, report, short
from nereus.runtime.journal import Journal
from nereus.runtime.plans import Planned, engine_seconds_of, plan_change
from nereus.runtime.transformation import Outcome, Performed, snapshot_name
from nereus.storage import Shard, emu_name, holding
from nereus.transitions.execution import Execution, OperationDone, OperationFailed, PauseBegun
from nereus.transitions.order import Infeasible
from nereus.transitions.planned import SlotRoom
from nereus.transitions.programs import Stretch

NEXT = "next"


@dataclass(kw_only=True)
class ChangeRecord:
    """What a change did: seconds of the pause by kind of operation, of the two other places, bytes, digests, version.

    `interleaved_seconds` lengthened the step before the pause; `outside_seconds` ran beside it.
    """

    transition: str
    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    interleaved_seconds: dict[str, float] = field(default_factory=dict)
    outside_seconds: dict[str, float] = field(default_factory=dict)
    moved: MoveReport | None = None
    digests: dict[str, str] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    state_version: int = 0

    @property
    def pause_seconds(self) -> float:
        """How long the job stood still between two steps for the change."""
        return sum(self.seconds.values())


class ChangeUndone(Exception):  # an outcome, not an error: the job goes on
    """The change failed before its commit, and the plan before it is live again."""


class ChangeBroken(Exception):  # an outcome too: `nereus.runtime.recovery` brings the job to where it can go on
    """The change cannot simply be undone or ended: slots are lost, or their world is torn down.

    `committed` says whether the new version stands, `lost` which slots are known to be dead.
    """

    def __init__(self, reason: str, *, committed: bool, lost: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.committed, self.lost = committed, lost


class Transaction:
    """One change of plan. `start`, then `early` at a boundary of the running step if there is one, then `finish`."""

    def __init__(self, job: Job, plan: Plan, record: ChangeRecord, journal: Journal, *, urgent: bool = False) -> None:
        self.job, self.plan, self.record, self.journal, self.urgent = job, plan, record, journal, urgent
        self.execution: Execution | None = None
        self._planning: Future[Planned] | None = None
        self._before: dict[int, dict[Shard, int]] = defaultdict(dict)
        self._after: dict[int, dict[Shard, int]] = defaultdict(dict)
        self._outcomes: dict[int, list[Outcome]] = defaultdict(list)
        self._begun = False
        self._refused = ""

    # -- outside -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Plans and proves the change beside whatever runs next."""
        room = self.job.pool.call_all("room")
        worker = ThreadPoolExecutor(1, thread_name_prefix="plan")
        self._planning = worker.submit(partial(_timed_plan, self, room))
        worker.shutdown(wait=False)

    @property
    def planned(self) -> Planned:
        """The plan of the change, waited for. ChangeUndone where none fits; nothing has been touched then."""
        if self._planning is None:
            raise RuntimeError("the change has not been started")
        try:
            return self._planning.result()
        except (Infeasible, TransferFailed) as error:
            raise ChangeUndone(str(error)) from error

    # -- interleaved ---------------------------------------------------------------------------------------------

    def early(self) -> None:
        """At a boundary of the running step after its generation: what may come before the pause.

        Errors are kept for `finish`, so that the step goes on; only a torn world ends it: ChangeBroken.
        """
        if self._begun or self._refused or self._planning is None or not self._planning.done():
            return
        started = time.monotonic()
        try:
            self._begin()
            self._run_early(self.record.interleaved_seconds)
        except ChangeUndone as error:
            self._refused = str(error)
        parts = self.record.interleaved_seconds
        parts["wait"] = max(time.monotonic() - started - sum(parts.values()), 0.0)

    def _begin(self) -> None:
        """Tells the slots their parts."""
        planned, job = self.planned, self.job
        stages = [getattr(self.plan, name) for name in planned.stage_names]
        job.align(stages)
        told = planned.told(job, max(job.pool.call_all("group_count").values()) + 1)
        job.pool.call("begin_change", {slot: (change,) for slot, change in told.items()})
        self.execution = Execution(planned.graph)
        self.execution.begin()
        self._begun = True
        self.record.modes = planned.modes

    def _run_early(self, seconds: dict[str, float]) -> None:
        for stretch in self.planned.stretches:
            if stretch.when == "early":
                self._run(stretch, seconds)

    # -- the pause -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Carries the change out. ChangeUndone when the plan before it is live again; ChangeBroken otherwise."""
        if self._refused:
            raise ChangeUndone(self._refused)
        started = time.monotonic()
        pause = self.record.seconds
        if not self._begun:
            self.planned  # noqa: B018  # waited for in the pause
            pause["plan"] = time.monotonic() - started
            self._begin()
            self._run_early(pause)
        if self.execution is None:
            raise RuntimeError("the change has not begun")
        self.execution.handle(PauseBegun())
        for stretch in self.planned.stretches:
            if stretch.when != "early":
                self._run(stretch, pause)
        try:
            self._end()
        except NereusError as error:  # the commit is behind: the new version stands whatever happens
            lost = error.lost if isinstance(error, SlotFailed) else ()
            raise ChangeBroken(str(error), committed=True, lost=lost) from error
        pause["wait"] = max(time.monotonic() - started - sum(pause.values()), 0.0)

    def _end(self) -> None:
        planned, job, pause = self.planned, self.job, self.record.seconds
        job.pool.call_all("finish_change")
        planned.cache_shells(job)
        job.plan = self.plan
        job.engine_seconds |= engine_seconds_of(self._outcomes)
        started = time.monotonic()
        job.use_sync(planned.sync)
        pause["sync"] = time.monotonic() - started
        job.host.drop_snapshots()

    # -- stretches -----------------------------------------------------------------------------------------------

    def _run(self, stretch: Stretch, seconds: dict[str, float]) -> None:
        """Carries a stretch out on the slots, then what the driver does at its end."""
        committed = self.execution is not None and self.execution.committed
        given = {slot: (tasks, committed, dict(self.job.optimizer_steps)) for slot, tasks in stretch.tasks.items()}
        answers = self.job.pool.gather("perform", given, _failed, together=True)
        performed = {slot: answer for slot, answer in answers.items() if isinstance(answer, Performed)}
        self._take(performed)
        _add_seconds(performed, seconds)
        broken = [f"slot {s}: {a}" for s, a in answers.items() if isinstance(a, NereusError)]
        broken += [
            f"slot {slot} in {answer.failed.kind} of {answer.failed.emu or 'all'}: {answer.error}"
            for slot, answer in performed.items()
            if answer.failed is not None
        ]
        if broken:
            lost = tuple(s for a in answers.values() if isinstance(a, SlotFailed) for s in a.lost)
            raise ChangeBroken("; ".join(broken), committed=committed, lost=lost)
        for operation in stretch.order:
            if operation.kind == "commit":
                self._commit(seconds)
            if self.execution is not None:
                self.execution.handle(OperationDone(operation_id=operation.id))

    def _take(self, performed: Mapping[int, Performed]) -> None:
        for slot, answer in performed.items():
            for outcome in answer.outcomes:
                kind = outcome.task.kind
                if kind == "quiesce":
                    self._before[slot].update(outcome.digests)
                elif kind == "verify":
                    self._after[slot].update(outcome.digests)
                self._outcomes[slot].append(outcome)

    def _commit(self, seconds: dict[str, float]) -> None:
        """Digests and bytes must be what they should be; then the one record that decides."""
        started = time.monotonic()
        job, record = self.job, self.record
        try:
            record.moved = self._report()
            before, after = combined(job.specs, self._before), combined(job.specs, self._after)
            compare(before, after)
        except (TransferFailed, DigestMismatch) as error:
            self._undo(str(error))
        record.digests = short(after)
        job.state_version += 1
        record.state_version = job.state_version
        self.journal.append(
            "commit",
            sync=True,
            transition=record.transition,
            plan=written(self.plan),
            digests=record.digests,
            **{**job.counters(), "plan_id": self.plan.plan_id},
        )
        seconds["commit"] = seconds.get("commit", 0.0) + time.monotonic() - started

    def _report(self) -> MoveReport:
        moved = self.planned.moved
        return report(moved, {slot: _total(outcomes) for slot, outcomes in self._outcomes.items()})

    def known_digests(self) -> Digests:
        """Digests of the changing EMUs' old state, where the slots that answered took those of all of it."""
        before = self.planned.stages(self.planned.transition.before)
        taken = {shard for shards in self._before.values() for shard in shards}
        wanted = {shard.emu for shard in taken} & {emu for emu, stage in before.items() if stage.stage != "generate"}
        whole = {
            emu
            for emu in wanted
            if all(taken.issuperset(s) for s in holding(self.job.specs[before[emu].model], before[emu]).values())
        }
        by_slot = {n: {s: v for s, v in shards.items() if s.emu in whole} for n, shards in self._before.items()}
        try:
            return combined(self.job.specs, by_slot)
        except DigestMismatch:  # replicas differ: nothing is known
            return {}

    def whole_snapshots(self) -> dict[str, Path]:
        """The folders of the EMUs of which every slot has copied its old bytes; of a job on one host alone."""
        if not self._begun or len(set(self.job.pool.hosts.values())) > 1:
            return {}
        before = self.planned.stages(self.planned.transition.before)
        return {
            emu: Path(folder)
            for emu, folder in self.planned.folders.items()
            if all((Path(folder) / snapshot_name(emu, slot)).is_file() for slot in before[emu].slots)
        }

    def _undo(self, reason: str) -> None:
        """Raises ChangeUndone once the plan before is live again; ChangeBroken where old engines are gone already."""
        if self.execution is not None:
            commit = next(o for o in self.planned.graph.operations if o.kind == "commit")
            self.execution.handle(OperationFailed(operation_id=commit.id, reason=reason))
        if any(emu.mode != "beside" for emu in self.planned.graph.change.emus):
            raise ChangeBroken(reason, committed=False)
        self.job.pool.call_all("abandon_change")
        if self.planned.restart_generation:
            self.job.pool.call_all("stop_generation")
            start_generation(self.job)
        raise ChangeUndone(reason)


def _timed_plan(change: Transaction, room: Mapping[int, SlotRoom]) -> Planned:
    started = time.monotonic()
    try:
        return plan_change(change.job, change.plan, room, urgent=change.urgent)
    finally:
        change.record.outside_seconds["plan"] = time.monotonic() - started


def _failed(answer: Performed | NereusError) -> bool:
    return not isinstance(answer, Performed) or answer.failed is not None


def _add_seconds(performed: Mapping[int, Performed], seconds: dict[str, float]) -> None:
    """The seconds of the slot that worked longest, by kind: what the others waited for."""
    by_slot: dict[int, dict[str, float]] = {}
    for slot, answer in performed.items():
        parts = by_slot.setdefault(slot, {})
        for outcome in answer.outcomes:
            parts[outcome.task.kind] = parts.get(outcome.task.kind, 0.0) + outcome.seconds
    if not by_slot:
        return
    longest = max(by_slot, key=lambda slot: sum(by_slot[slot].values()))
    for kind, value in by_slot[longest].items():
        seconds[kind] = seconds.get(kind, 0.0) + value


def _total(outcomes: list[Outcome]) -> Traffic:
    total = Traffic()
    for outcome in outcomes:
        if outcome.traffic is not None:
            total.add(outcome.traffic)
    return total


def compare(before: Digests, after: Digests) -> None:
    """DigestMismatch that names the first tensor whose digest changed, or that is missing on one side."""
    for key in sorted({*before, *after}):
        old, new = before.get(key, {}), after.get(key, {})
        for tensor in sorted({*old, *new}):
            if old.get(tensor) != new.get(tensor):
                raise DigestMismatch(
                    f"{key} of {tensor} is {new.get(tensor)} after the movement, was {old.get(tensor)}"
                )


def change_plan(job: Job, plan: Plan, record: ChangeRecord, journal: Journal, *, urgent: bool = False) -> None:
    """A whole change in one pause. ChangeUndone when it was rolled back, ChangeBroken when the job needs recovery."""
    transaction = Transaction(job, plan, record, journal, urgent=urgent)
    transaction.start()
    transaction.finish()


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
