"""The real world: carries out the controller's commands on Ray slots, and writes down what happened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from nereus.config import Config
from nereus.control.outlook import StepObserved
from nereus.control.records import SearchDone, StepRefused
from nereus.control.written import written
from nereus.costs.profile import Profile
from nereus.errors import NereusError, PlanOutgrown, SlotFailed
from nereus.events import (
    ChangePlan,
    Command,
    Event,
    Finish,
    JobReady,
    Recover,
    Recovered,
    RunStep,
    StopRequested,
)
from nereus.layout import first_plan
from nereus.report.display import Display
from nereus.resumption import Resumption
from nereus.runtime.attach import line, reattach, told
from nereus.runtime.attachment import Attaching
from nereus.runtime.changes import ChangeBroken, first_state, start_generation
from nereus.runtime.changing import Changing
from nereus.runtime.checkpoints import Checkpoints, newest_good
from nereus.runtime.fleet_schedule import FleetSchedule, Relaunch, SlotsArrived, SlotsLeaving, SlotsStay, Suspend
from nereus.runtime.job import Job, short
from nereus.runtime.journal import Journal, RunFolder, read_journal
from nereus.runtime.losses import Losses
from nereus.runtime.metrics import MetricsWriter
from nereus.runtime.observer import Observer
from nereus.runtime.outset import export_model, other_states
from nereus.runtime.phases import Phases, StepRecord, task_of
from nereus.runtime.pool import SlotPool
from nereus.runtime.recovery import Standing
from nereus.runtime.restore import restore
from nereus.runtime.searches import Searches, Seek
from nereus.storage import emu_name
from nereus.workload import measured_phases

PACE_COUNT, STOP_POLL_SECONDS = 8, 0.2


class Stop(Protocol):
    """Whether the user asked to stop."""

    @property
    def requested(self) -> bool:
        """Asked between commands."""
        ...

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
    attaching: Attaching | None = None
    deciding_seconds: Callable[[], float] | None = None  # what a controller has taken of the job so far
    why: Callable[[], str] = lambda: ""  # the controller's last reason to give no other plan
    records: list[StepRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        data = self.config.data
        self.job = Job(config=self.config, pool=self.pool, plan=first_plan(self.config), folder=self.folder.path)
        seed, template = self.config.run.seed, data.prompt_template
        task = task_of(data.task, data.task_options, seed, template, "train", self.config.model)
        self.phases = Phases(job=self.job, task=task, folder=self.folder.rollouts, recorded=self.recorded)
        self.observer = Observer(
            config=self.config,
            pool=self.pool,
            journal=self.journal,
            sampled=self.recorded is None,
            watching=self.config.nereus.policy == "nereus" and self.config.probe.seconds > 0,
            note=self.display.note,
        )
        self.phases.refusal = lambda step, width: self.observer.refusal(step, self.job.plan, width)
        self._queue: deque[Event | StepRefused | SlotsLeaving | SlotsArrived | SlotsStay] = deque()
        self._outgrown: tuple[str, PlanOutgrown] | None = None  # the plan that last refused a step, and why
        self.schedule = FleetSchedule(self.config, self.pool)
        self.searches = Searches(self.job, self.journal)
        self._profile: Profile | None = None  # as the last step's event told it
        self._finished = False
        self._stop_told = False
        self._warm = True
        self._step = self.resumption.manifest.step if self.resumption else 0  # the last that is done
        self.checkpoints = Checkpoints(
            job=self.job, folder=self.folder.checkpoints, journal=self.journal, note=self.display.note
        )
        self.changing = Changing(
            job=self.job,
            journal=self.journal,
            display=self.display,
            settle=self.checkpoints.settle,
            count=self.resumption.transition_count if self.resumption else 0,
        )
        self.losses = Losses(
            job=self.job,
            journal=self.journal,
            display=self.display,
            changing=self.changing,
            checkpoints=self.checkpoints,
        )

    # -- World ---------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Event | SearchDone | StepRefused | SlotsLeaving | SlotsArrived | SlotsStay]:
        """Prepares the job, then yields what happens until `Finish` has been carried out."""
        if self.config.nereus.policy == "nereus":
            self.searches.start()  # its imports run beside the preparation
        self._prepare()
        self._profile = self.observer.state.profile
        self._queue.append(JobReady(at_seconds=time.time(), step=self._step + 1))
        while not self._finished:
            if self.stop.requested and not self._stop_told:
                self._stop_told = True
                self.journal.append("stop_requested")
                yield StopRequested(at_seconds=time.time())
            if (found := self.searches.poll()) is not None:
                yield found
            elif self._queue:
                yield self._queue.popleft()
            elif self.searches.pending:
                self.display.phase("searching for a plan")
                limit_seconds = self.config.fleet.phase_timeout_seconds
                found = self.searches.wait(limit_seconds, lambda: self.stop.requested and not self._stop_told)
                if found is not None:
                    yield found
            elif self._outgrown is not None:
                self._stop_outgrown(self._outgrown[1])
            else:
                self._stop_without_plan()

    def submit(self, command: Command | Seek | Relaunch | Suspend) -> None:
        """Carries out one command."""
        match command:
            case Seek():
                self.searches.begin(command)
            case Relaunch():
                self._relaunch(command)
            case Suspend():
                self._suspend(command)
            case RunStep():
                self._run_step(command.step)
            case ChangePlan():
                self.changing.prepare(command)
                if command.step == self._step + 1:  # else a step comes first, which carries what may come early
                    self._finish_change()
            case Recover():
                self._recover(command)
            case Finish():
                self._finished = True
                self._save_last()
                self.journal.append("run_stopped", reason=command.reason, steps=len(self.records), sync=True)

    def close(self) -> None:
        """Ends the process of searches and gives host memory back; the pool is the caller's."""
        self.searches.close()
        self.job.host.close()

    # -- preparation ---------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        export_model(self.config, self.folder.model)
        if self.attaching is not None:
            self._attach(self.attaching)
            return
        self.pool.call_all("configure", self.config, str(self.folder.model))
        self._probe()
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
        plan = written(self.job.plan)
        self.journal.append("state", step=self._step, plan=plan, digests=self._digests(), **self.job.counters())

    def _probe(self) -> None:
        if self.config.fleet.reattach_seconds:
            self.pool.host_memory = str(self.job.host.folder)
            self.pool.tell()
        self.display.phase("probing the slots")
        self.observer.begin(read_journal(self.folder.events))

    def _attach(self, attaching: Attaching) -> None:
        started, job = time.monotonic(), self.job
        attached = reattach(job, attaching, self.journal, self.folder.model, self.folder.checkpoints)
        seconds, stand = time.monotonic() - started, attached.stand
        self._step = attached.recovery.next_step - 1
        self.journal.append("reattached", sync=True, **told(attached, attaching, job, self.config, seconds))
        self.display.note(line(attached, attaching))
        if stand.change is not None:
            self.changing.settled(stand.change, stand.state_version if stand.committed else None, seconds)
        if "checkpoint" in attached.recovery.sources.values():
            self.checkpoints.saved_step = self._step
        self._probe()

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
        try:
            done = self._try_step(step)
        except PlanOutgrown as error:
            self._refuse(error)
            return
        self._outgrown = None
        if done and self.changing.command is not None:
            self._finish_change()

    def _refuse(self, error: PlanOutgrown) -> None:
        """Tells who can answer with another plan; else, or where the answer was none, the run stops before the step."""
        plan_id, wanted = self.job.plan.plan_id, self.config.nereus
        answers = wanted.policy == "nereus" and not wanted.dry_run
        if not answers or (self._outgrown is not None and self._outgrown[0] == plan_id):
            self._stop_outgrown(error)
        self._outgrown = plan_id, error
        self.journal.append(
            "step_refused", step=error.step, plan_id=plan_id, width_tokens=error.width_tokens, reason=str(error)
        )
        self.display.note(f"step {error.step} waits for another plan: its rows are {error.width_tokens} tokens wide")
        self._queue.append(
            StepRefused(at_seconds=time.time(), step=error.step, width_tokens=error.width_tokens, reason=str(error))
        )

    def _stop_outgrown(self, error: PlanOutgrown) -> NoReturn:
        """The state before the step is saved, so that the run goes on from there under another plan."""
        self._save_last()
        raise error

    def _stop_without_plan(self) -> NoReturn:
        """The controller waits and nothing is left to happen. What is whole is saved."""
        if self.losses.standing is None:
            self._save_last()
        raise NereusError(
            f"no plan is left for step {self._step + 1}: {self.why() or 'the controller gave no command'}"
        )

    def _try_step(self, step: int) -> bool:
        """Whether the step was done; else slots were lost."""
        try:
            self.observer.before_step(step, self.job.plan)
            record = self.phases.run(step, self.changing.between)
        except PlanOutgrown:
            raise
        except (NereusError, ChangeBroken) as error:
            whole, self.phases.updating = not self.phases.updating, False
            event = self.losses.hit(error, whole=whole)
            if event is not None:
                self._queue.append(replace(event, whole=whole))
                return False
            self.losses.mend(step)  # the change that tore the world is over without effect: the step once more
            self.changing.transaction = None
            record = self.phases.run(step)
        self._step_done(record)
        return True

    def _step_done(self, record: StepRecord) -> None:
        step = record.step
        memory = self._asked(record)
        self.records.append(record)
        self._step = step
        self._save(record)
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
        if self.deciding_seconds is not None:
            record.metrics["controller/deciding_s"] = self.deciding_seconds()
            record.metrics["controller/searching_processor_s"] = self.searches.processor_seconds
        changes = self.changing.done
        done = changes[-1] if changes and changes[-1].step == step else None
        record.metrics["timing_s/transition"] = done.pause_seconds if done else 0.0
        before = self.resumption.applied_count if self.resumption else 0
        record.metrics["transition/count"] = float(before + len(changes))
        if done and done.moved:
            record.metrics["transition/planned_bytes"] = float(done.moved.planned_bytes)
            record.metrics["transition/counted_bytes"] = float(done.moved.counted_bytes)
        self.journal.append(
            "step_done",
            step=step,
            metrics=record.metrics,
            updates=record.updates,
            rollouts=record.rollouts,
            **self.job.counters(),
        )
        self.metrics.write(step, record.metrics)
        self.display.step(record.metrics, str(self.job.plan))
        self._queue.extend(self.schedule.before(step + 1))
        self._queue.append(self._observed(record))

    def _asked(self, record: StepRecord) -> dict[int, Any]:
        """What the slots say after a step. Where one has died since, the step stands and the next one finds the loss."""
        try:
            self.observer.after_step(record, self.job.plan)
            return self.pool.call_all("memory", False)
        except SlotFailed as error:
            self.display.note(f"after step {record.step}: {str(error)[:200]}")
            return {}

    def _observed(self, record: StepRecord) -> StepObserved:
        """The step as an event: its seconds are those of its phases, without what of a change ran between them."""
        told, batch, profile = self.observer.told or {}, record.batch, self.observer.state.profile
        assert batch is not None, "a step has a batch"
        phases = told.get("seconds") or measured_phases(record.seconds)
        news, self._profile = profile if profile != self._profile else None, profile
        return StepObserved(
            at_seconds=time.time(),
            step=record.step,
            step_seconds=sum(phases.values()),
            tokens=round(record.metrics["perf/total_num_tokens"]),
            plan_id=self.job.plan.plan_id,
            phase_seconds=phases,
            batch=batch,
            peak_bytes=told.get("peak_bytes", {}),
            fresh=tuple(told.get("fresh", ())),
            profile=news,
        )

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

    def _finish_change(self) -> None:
        """Carries out what was prepared."""
        transaction = self.changing.transaction
        try:
            self._queue.append(self.changing.finish())
        except (NereusError, ChangeBroken) as error:
            self._hit(error, whole=True)
            return
        if transaction is not None:
            self.observer.changed(transaction)

    def _hit(self, error: NereusError | ChangeBroken, *, whole: bool) -> None:
        """Between steps: slots are lost, or only their world is torn, which is mended here."""
        event = self.losses.hit(error, whole=whole)
        if event is not None:
            self._queue.append(event)
            return
        committed = self.losses.mend(self._step + 1)
        self._queue.append(self.changing.stands() if committed else self.changing.failed())

    def _suspend(self, command: Suspend) -> None:
        """Waits as long as the slots that the plan needs are away; a stop ends it."""
        recent = [record.seconds["step"] for record in self.records[-PACE_COUNT:]]
        seconds = self.schedule.away_seconds(command.step, sum(recent) / max(len(recent), 1))
        self.display.phase(f"waiting {seconds:.0f} s for slots")
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop.requested:
            time.sleep(min(STOP_POLL_SECONDS, max(until - time.monotonic(), 0.0)))
        self.journal.append("suspended", step=command.step, seconds=seconds)
        self._queue.append(SlotsStay(at_seconds=time.time()))

    def _relaunch(self, command: Relaunch) -> None:
        """As a stop and a resume: all processes anew, all state from the newest checkpoint."""
        started, job = time.monotonic(), self.job
        if command.torn:
            self.checkpoints.abandon()
        else:
            self.display.phase("saving a checkpoint")
            self.checkpoints.at_end(self._step)
        self.losses.standing = self.changing.command = self.changing.transaction = None
        self.display.phase("restarting the slots")
        self.journal.append("recovering", lost=self.pool.numbers)
        self.pool.restart(command.slots)
        job.plan, job.sync = command.plan, None
        job.config = replace(job.config, fleet=replace(job.config.fleet, slots=command.slots))
        job.shells.clear()
        self.pool.call_all("configure", self.config, str(self.folder.model))
        found, version = newest_good(self.folder.checkpoints), job.state_version
        other_states(job, restore(job, found.path, found.manifest))
        job.state_version = max(version, job.state_version)
        start_generation(job)
        job.plan_sync()
        self._step = self.checkpoints.saved_step = found.manifest.step
        self.journal.append(
            "recovered",
            sync=True,
            slots=command.slots,
            plan=written(job.plan),
            plan_text=str(job.plan),
            next_step=self._step + 1,
            **job.counters(),
            sources=dict.fromkeys((emu_name(s) for _, s in job.plan.stages() if s.stage != "generate"), "checkpoint"),
            digests=self._digests(),
        )
        self._queue.append(
            Recovered(
                at_seconds=time.time(),
                plan=command.plan,
                slots=command.slots,
                next_step=self._step + 1,
                state_version=job.state_version,
                pause_seconds=time.monotonic() - started,
            )
        )

    def _recover(self, command: Recover) -> None:
        started = time.monotonic()
        if command.saved:
            self.display.phase("saving a checkpoint")
            self.checkpoints.at_end(self._step)
        if self.losses.standing is None:  # nothing was lost: slots leave or join, from a state that stands
            self.losses.standing = Standing(plan=self.job.plan, committed=False, whole=True, snapshots={})
            for slot in self.pool.admit() if not command.lost_slots else ():
                self.pool.call("configure", {slot: (self.config, str(self.folder.model))})
        try:
            event = self.losses.recover(command, self._step + 1)
        except SlotFailed as error:  # another one, while nothing was in its place
            self._hit(error, whole=False)
            return
        self._step = event.next_step - 1
        took = time.monotonic() - started
        self._queue.append(replace(event, state_version=self.job.state_version, pause_seconds=took))
