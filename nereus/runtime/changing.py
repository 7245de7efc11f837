"""The changes of plan of a run: prepared beside a step, carried out after it, written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nereus.events import ChangePlan, TransitionDone, TransitionFailed
from nereus.layout import Plan
from nereus.report.display import Display
from nereus.runtime.changes import ChangeRecord, ChangeUndone, Transaction
from nereus.runtime.job import Job
from nereus.runtime.journal import Journal
from nereus.runtime.phases import StepRecord


@dataclass(kw_only=True)
class Changing:
    """The change under way, if there is one, and the records of those that are done. `settle` ends checkpoint writes."""

    job: Job
    journal: Journal
    display: Display
    settle: Callable[[], None]
    count: int = 0
    done: list[ChangeRecord] = field(default_factory=list)
    command: ChangePlan | None = None
    transaction: Transaction | None = None
    refused: str = ""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])

    def prepare(self, command: ChangePlan) -> None:
        """Plans a change beside what runs next."""
        self.count += 1
        self.command, self.refused = command, ""
        self.facts = {
            "transition": f"t{self.count}",
            "step": command.step,
            "from": str(self.job.plan),
            "to": str(command.plan),
        }
        self.journal.append("transition_started", reason=command.reason, plan=plan_record(command.plan), **self.facts)
        self.display.note(f"change t{self.count} before step {command.step}: {command.reason}")
        record = ChangeRecord(transition=f"t{self.count}", step=command.step)
        self.transaction = Transaction(self.job, command.plan, record, self.journal, urgent=command.urgent)
        self.transaction.start()

    def between(self, record: StepRecord) -> None:
        """At a boundary between two phases of a step: what of the change may come early. ChangeBroken."""
        if self.transaction is not None:
            with record.timed("interleaved"):
                self.transaction.early()

    def finish(self) -> TransitionDone | TransitionFailed:
        """Carries the prepared change out in the pause. ChangeBroken when the job needs recovery first."""
        command, transaction = self.command, self.transaction
        if command is None:
            raise RuntimeError("no change is under way")
        self.settle()
        if transaction is None:
            return self.failed()
        try:
            transaction.finish()
        except ChangeUndone as error:
            self.refused = str(error)
            return self.failed()
        record = transaction.record
        self.done.append(record)
        self.command = self.transaction = None
        self._tell(record, self.facts)
        return TransitionDone(
            at_seconds=time.time(),
            plan=command.plan,
            state_version=record.state_version,
            pause_seconds=record.pause_seconds,
        )

    def stands(self) -> TransitionDone:
        """The change broke after its commit and the job was mended: the new version stands."""
        command, transaction = self.command, self.transaction
        if command is None or transaction is None:
            raise RuntimeError("no change is under way")
        record = transaction.record
        self.done.append(record)
        self.command = self.transaction = None
        self._tell(record, {**self.facts, "mended": self.refused})
        return TransitionDone(
            at_seconds=time.time(),
            plan=command.plan,
            state_version=record.state_version,
            pause_seconds=record.pause_seconds,
        )

    def settled(self, change: Mapping[str, Any], version: int | None, seconds: float) -> None:
        """A change that the last driver began is over: `version` was committed, or None and it has no effect.

        `seconds` are those of the new driver alone, until the job could go on.
        """
        facts = {key: change[key] for key in ("transition", "step", "from", "to")}
        if version is None:
            self.journal.append("transition_failed", reason="its driver died before the commit", **facts)
            return
        record = ChangeRecord(transition=change["transition"], step=change["step"], state_version=version)
        record.seconds["recover"] = seconds
        self.done.append(record)
        self._tell(record, {**facts, "mended": "its driver died after the commit"})

    def _tell(self, record: ChangeRecord, facts: dict[str, Any]) -> None:
        moved = record.moved
        done: dict[str, Any] = {
            **facts,
            "state_version": record.state_version,
            "digests": record.digests,
            "modes": record.modes,
            "seconds": record.seconds,
            "pause_seconds": record.pause_seconds,
            "interleaved_seconds": record.interleaved_seconds,
            "outside_seconds": record.outside_seconds,
            "planned_bytes": moved.planned_bytes if moved else 0,
            "counted_bytes": moved.counted_bytes if moved else 0,
            "staged_bytes": moved.staged_bytes if moved else 0,
            "sent_bytes": moved.sent_bytes if moved else {},
            "received_bytes": moved.received_bytes if moved else {},
        }
        self.journal.append("transition_done", **done)
        self.display.transition(done)

    def failed(self) -> TransitionFailed:
        """The change is over without effect, as `refused` says."""
        command, self.command, self.transaction = self.command, None, None
        if command is None:
            raise RuntimeError("no change is under way")
        self.journal.append("transition_failed", reason=self.refused, **self.facts)
        self.display.note(f"transition t{self.count} was undone: {self.refused}")
        return TransitionFailed(at_seconds=time.time(), plan=command.plan, reason=self.refused)


def plan_record(plan: Plan) -> dict[str, object]:
    """The plan as JSON holds it."""
    return {name: asdict(stage) for name, stage in plan.stages()}
