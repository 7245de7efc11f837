"""The real world: carries out the controller's commands on Ray slots, and writes down what happened."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nereus.catalogue import hf_config
from nereus.config import Config
from nereus.errors import JournalError, NereusError
from nereus.events import (
    ChangePlan,
    Command,
    Event,
    Finish,
    JobReady,
    RunStep,
    StepFinished,
    StopRequested,
    TransitionDone,
    TransitionFailed,
)
from nereus.interchange.companions import carry_tokenizer, settings_beside
from nereus.layout import Plan, first_plan
from nereus.model import VALUE_HEAD
from nereus.report.display import Display
from nereus.resumption import Resumption
from nereus.runtime.changes import NEXT, ChangeRecord, ChangeUndone, change_plan, first_state, start_generation
from nereus.runtime.checkpoints import Checkpoints
from nereus.runtime.job import Job, short
from nereus.runtime.journal import Journal, RunFolder
from nereus.runtime.metrics import MetricsWriter
from nereus.runtime.phases import Phases, StepRecord, task_of
from nereus.runtime.pool import SlotPool
from nereus.runtime.restore import restore
from nereus.slices import cut, movement
from nereus.storage import emu_name, holding


class Stop(Protocol):
    """Whether the user asked to stop."""

    requested: bool

    def hold(self) -> None:
        """Takes the signals again, after Ray has put its own handlers on them."""
        ...


@dataclass(kw_only=True)
class RealWorld:
    """See the module. `submit` carries a command out at once; its event is queued for `events`."""

    config: Config
    folder: RunFolder
    pool: SlotPool
    journal: Journal
    metrics: MetricsWriter
    display: Display
    stop: Stop
    recorded: Path | None = None
    resumption: Resumption | None = None
    records: list[StepRecord] = field(default_factory=list)
    changes: list[ChangeRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        data = self.config.data
        self.job = Job(config=self.config, pool=self.pool, plan=first_plan(self.config))
        seed, template = self.config.run.seed, data.prompt_template
        task = task_of(data.task, data.task_options, seed, template, "train", self.config.model)
        self.phases = Phases(job=self.job, task=task, folder=self.folder.rollouts, recorded=self.recorded)
        self._queue: deque[Event] = deque()
        self._finished = False
        self._stop_told = False
        self._warm = True
        self._transitions = self.resumption.transition_count if self.resumption else 0
        self._step = self.resumption.manifest.step if self.resumption else 0  # the last that is done
        self.checkpoints = Checkpoints(
            job=self.job, folder=self.folder.checkpoints, journal=self.journal, note=self.display.note
        )

    # -- World ---------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        """Prepares the job, then yields what happens until `Finish` has been carried out."""
        self._prepare()
        self._queue.append(JobReady(at_seconds=time.time(), step=self._step + 1))
        while not self._finished:
            if self.stop.requested and not self._stop_told:
                self._stop_told = True
                self.journal.append("stop_requested")
                yield StopRequested(at_seconds=time.time())
            if not self._queue:
                raise NereusError("the controller gave no command and nothing is left to happen")
            yield self._queue.popleft()

    def submit(self, command: Command) -> None:
        """Carries out one command."""
        match command:
            case RunStep():
                self._run_step(command.step)
            case ChangePlan():
                self._change(command)
            case Finish():
                self._finished = True
                self._save_last()
                self.journal.append("run_stopped", reason=command.reason, steps=len(self.records), sync=True)

    # -- preparation ---------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        export_model(self.config, self.folder.model)
        self.pool.call_all("configure", self.config, str(self.folder.model))
        if self.resumption is not None:
            self._resume(self.resumption)
        else:
            self.display.phase("building the actor")
            first_state(self.job)
            self._warm_up()
            self.display.phase("building reference and critic, starting the engines")
            other_states(self.job)
        start_generation(self.job)
        self.job.plan_sync()
        self.journal.append(
            "state", state_version=self.job.state_version, digests=self._digests(), plan_id=self.job.plan.plan_id
        )

    def _resume(self, resumption: Resumption) -> None:
        folder = Path(resumption.folder)
        self.display.phase(f"reading {folder.name} onto the slots")
        missing = restore(self.job, folder, resumption.manifest)
        other_states(self.job, missing)
        self.job.state_version = max(self.job.state_version, resumption.state_version)
        self.checkpoints.saved_step = self._step

    def _save_last(self) -> None:
        """The state at the end; none of a warm-up that was cut short, from which nothing could be resumed alike."""
        if self._warm:
            self.display.phase("saving a checkpoint")
            self.checkpoints.at_end(self._step)

    def _warm_up(self) -> None:
        steps = self.config.warmup.steps
        for step in range(1, steps + 1):
            loss = self.phases.warm_up(step)
            if step == 1 or step % 10 == 0 or step == steps:
                self.display.phase(f"warm-up {step}/{steps} loss {loss:.3f}")
            if self.stop.requested:
                self._warm = step == steps
                break
        actor = emu_name(self.job.plan.actor_train)
        if steps:
            self.pool.call_all("reset_optimizer", actor)
            self.job.optimizer_steps[actor] = 0
        self.journal.append("warmup_done", steps=steps)

    def _digests(self) -> dict[str, str]:
        emus = tuple(emu_name(s) for name, s in self.job.plan.stages() if s.stage != "generate")
        return short(self.job.digests(emus, ""))

    # -- commands ------------------------------------------------------------------------------------------------

    def _run_step(self, step: int) -> None:
        record = self.phases.run(step)
        self.records.append(record)
        self._step = step
        self._save(record)
        memory = self.pool.call_all("memory")
        for slot, facts in memory.items():
            record.metrics[f"perf/ledger_bytes/slot_{slot}"] = float(max(facts.peaks.values(), default=0))
            record.metrics[f"perf/resident_bytes/slot_{slot}"] = float(facts.resident_bytes)
        train, generate = self.job.plan.actor_train.layout, self.job.plan.actor_generate.layout
        record.metrics |= {
            "plan/tp": float(train.tp),
            "plan/pp": float(train.pp),
            "plan/dp": float(train.dp),
            "plan/gen_tp": float(generate.tp),
            "plan/gen_dp": float(generate.dp),
            "plan/state_version": float(self.job.state_version),
            "fleet/slots": float(len(self.pool.numbers)),
        }
        done = self.changes[-1] if self.changes and self.changes[-1].step == step else None
        record.metrics["timing_s/transition"] = done.pause_seconds if done else 0.0
        before = self.resumption.applied_count if self.resumption else 0
        record.metrics["transition/count"] = float(before + len(self.changes))
        if done and done.moved:
            record.metrics["transition/planned_bytes"] = float(done.moved.planned_bytes)
            record.metrics["transition/counted_bytes"] = float(done.moved.counted_bytes)
        self.journal.append(
            "step_done",
            step=step,
            plan_id=self.job.plan.plan_id,
            metrics=record.metrics,
            updates=record.updates,
            rollouts=record.rollouts,
            data_position=self.job.data_position,
            state_version=self.job.state_version,
        )
        self.metrics.write(step, record.metrics)
        self.display.step(record.metrics, str(self.job.plan))
        self._queue.append(StepFinished(at_seconds=time.time(), step=step, step_seconds=record.seconds["step"]))

    def _save(self, record: StepRecord) -> None:
        """What of a checkpoint stops the step's slots counts as part of the step, as in verl's metrics."""
        if not self.config.checkpoint.every_steps:
            return
        seconds = self.checkpoints.after_step(record.step)
        record.seconds["step"] += seconds
        tokens, slots = record.metrics["perf/total_num_tokens"], len(self.pool.numbers)
        record.metrics |= {
            "timing_s/save_checkpoint": seconds,
            "timing_s/step": record.seconds["step"],
            "perf/time_per_step": record.seconds["step"],
            "perf/throughput": tokens / (record.seconds["step"] * slots),
        }

    def _change(self, command: ChangePlan) -> None:
        self.checkpoints.settle()
        self._transitions += 1
        name = f"t{self._transitions}"
        before, after = str(self.job.plan), str(command.plan)
        facts: dict[str, Any] = {"transition": name, "step": command.step, "from": before, "to": after}
        self.journal.append("transition_started", reason=command.reason, plan=plan_record(command.plan), **facts)
        record = ChangeRecord(transition=name, step=command.step)
        try:
            change_plan(self.job, command.plan, record, self.journal)
        except ChangeUndone as error:
            self.journal.append("transition_failed", reason=str(error), **facts)
            self.display.note(f"transition {name} was undone: {error}")
            self._queue.append(TransitionFailed(at_seconds=time.time(), plan=command.plan, reason=str(error)))
            return
        self.changes.append(record)
        moved = record.moved
        done: dict[str, Any] = {
            **facts,
            "state_version": record.state_version,
            "digests": record.digests,
            "seconds": record.seconds,
            "pause_seconds": record.pause_seconds,
            "planned_bytes": moved.planned_bytes if moved else 0,
            "counted_bytes": moved.counted_bytes if moved else 0,
            "staged_bytes": moved.staged_bytes if moved else 0,
            "sent_bytes": moved.sent_bytes if moved else {},
            "received_bytes": moved.received_bytes if moved else {},
        }
        self.journal.append("transition_done", **done)
        self.display.transition(done)
        self._queue.append(
            TransitionDone(
                at_seconds=time.time(),
                plan=command.plan,
                state_version=record.state_version,
                pause_seconds=record.pause_seconds,
            )
        )


def plan_record(plan: Plan) -> dict[str, object]:
    """The plan as JSON holds it."""
    return {name: asdict(stage) for name, stage in plan.stages()}


def other_states(job: Job, names: Sequence[str] = ("reference_infer", "critic_train")) -> None:
    """Reference and critic from the actor: the reference is its copy, the critic its backbone with a new head."""
    actor = job.plan.actor_train
    present = holding(job.specs["actor"], actor)
    for stage in (getattr(job.plan, name) for name in names):
        full = holding(job.specs[stage.model], stage)
        job.create(stage, full, NEXT)
        target = {
            slot: tuple(s for s in shards if s.component in ("weight", "master") and s.tensor != VALUE_HEAD)
            for slot, shards in full.items()
        }
        slices = cut(present, target, rename={emu_name(stage): emu_name(actor)})
        job.move(movement(slices, job.config.transfer.bucket_bytes), target, (emu_name(actor),), "", NEXT)
        job.attach([stage], NEXT)
        job.pool.call_all("drop", NEXT)


def export_model(config: Config, folder: Path) -> None:
    """Writes what vLLM reads: a Hugging Face config.json (the weights come by sync), and the tokenizer.

    JournalError where `folder` cannot be written.
    """
    made = hf_config(config.model)
    settings = made | settings_beside(config.model, made)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        carry_tokenizer(config.model.folder, folder)
    except OSError as error:
        raise JournalError(f"{folder}: cannot be written: {error.strerror or error}") from error
