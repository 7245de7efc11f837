"""When slots die or their world is torn down: what stands, and how the run goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from nereus.control.written import written
from nereus.errors import CheckpointError, NereusError, SlotFailed
from nereus.events import Recover, Recovered, SlotsLost
from nereus.report.display import Display
from nereus.runtime.changes import ChangeBroken, compare
from nereus.runtime.changing import Changing
from nereus.runtime.checkpoints import Checkpoints
from nereus.runtime.job import Digests, Job, short
from nereus.runtime.journal import Journal
from nereus.runtime.recovery import Recovery, Standing, recover, retreat
from nereus.storage import emu_name


@dataclass(kw_only=True)
class Losses:
    """Takes failures of slots; `hit` judges one, `recover` brings the job back."""

    job: Job
    journal: Journal
    display: Display
    changing: Changing
    checkpoints: Checkpoints
    standing: Standing | None = None

    def __post_init__(self) -> None:
        self._known: Digests = {}

    def hit(self, error: NereusError | ChangeBroken, *, whole: bool) -> SlotsLost | None:
        """What a failure means: the slots that are lost; or None when all live and only their world is torn.

        Raises the error where it is neither, or where fleet.on_loss is stop.
        """
        known: tuple[int, ...] = error.lost if isinstance(error, SlotFailed | ChangeBroken) else ()
        lost = tuple(sorted({*known, *self.job.pool.lost()}))
        broken = isinstance(error, ChangeBroken)
        if (not lost and not broken) or (lost and self.job.config.fleet.on_loss == "stop"):
            raise error if isinstance(error, NereusError) else SlotFailed(str(error), lost)
        transaction = self.changing.transaction
        committed = broken and error.committed  # type: ignore[union-attr]
        plan = transaction.plan if committed and transaction is not None else self.job.plan
        snapshots = transaction.whole_snapshots() if transaction is not None else {}
        self._known = transaction.known_digests() if transaction is not None and whole else {}
        self.standing = Standing(plan=plan, committed=committed, whole=whole, snapshots=snapshots)
        self.changing.refused = str(error)
        self.journal.append(
            "slots_lost",
            sync=True,
            lost=lost,
            reason=str(error),
            state_version=self.job.state_version,
            whole=whole,
            digests=short(self._known),
        )
        if not lost:
            return None
        self.display.note(f"slots {', '.join(map(str, lost))} lost, the run goes on without them: {str(error)[:200]}")
        return SlotsLost(
            at_seconds=time.time(), lost_slots=lost, slot_count=len(self.job.pool.numbers), plan=plan, reason=str(error)
        )

    def mend(self, next_step: int) -> bool:
        """All slots live: the same plan again over a new world; whether a committed change stands."""
        standing = self._taken()
        self.journal.append("recovering", lost=())
        numbers = retreat(self.job, (), committed=standing.committed).numbers
        self._tell(recover(self.job, standing.plan, standing, numbers, next_step=next_step, checkpoints=self._folder))
        return standing.committed

    def recover(self, command: Recover, next_step: int) -> Recovered:
        """Goes on without the lost slots. CheckpointError where only a checkpoint would help and there is none."""
        standing, job = self._taken(), self.job
        self.changing.command = self.changing.transaction = None
        self.checkpoints.abandon()
        self.journal.append("recovering", lost=command.lost_slots)
        numbers = retreat(job, command.lost_slots, committed=standing.committed).numbers
        job.config = replace(job.config, fleet=replace(job.config.fleet, slots=len(numbers)))
        try:
            found = recover(job, command.plan, standing, numbers, next_step=next_step, checkpoints=self._folder)
        except CheckpointError as error:
            raise CheckpointError(f"{self.changing.refused}\n{error}") from error
        self._tell(found)
        return Recovered(
            at_seconds=time.time(), plan=command.plan, slots=len(job.pool.numbers), next_step=found.next_step
        )

    @property
    def _folder(self) -> Path:
        return self.checkpoints.folder

    def _taken(self) -> Standing:
        if self.standing is None:
            raise RuntimeError("nothing was lost")
        standing, self.standing = self.standing, None
        return standing

    def _tell(self, found: Recovery) -> None:
        job = self.job
        emus = tuple(emu_name(stage) for _, stage in job.plan.stages() if stage.stage != "generate")
        digests = job.digests(emus, "")
        if "checkpoint" not in found.sources.values():
            compare(self._known, {k: {t: digests[k].get(t, "") for t in held} for k, held in self._known.items()})
        self.journal.append(
            "recovered",
            sync=True,
            slots=len(job.pool.numbers),
            plan=written(job.plan),
            plan_text=str(job.plan),
            next_step=found.next_step,
            **job.counters(),
            sources=dict(found.sources),
            digests=short(digests),
        )
