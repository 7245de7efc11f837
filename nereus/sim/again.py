"""A real run's journal played again in the simulated world, to see how well calibrated coefficients foretell its time.

Its configuration, its changes at their steps and its batches are the journal's. A phase takes what the terms of the plan in
use take with coefficients learnt from the run; a change is carried out operation by operation from its graph, with tolls
learnt from the changes before. No other measured time is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nereus.config import Config
from nereus.control.controller import AdaptiveCommand
from nereus.control.records import StepMeasured
from nereus.control.written import fleet_of
from nereus.costs.calibrate import predict
from nereus.errors import ConfigError, JournalError
from nereus.events import ChangePlan, Command, Finish, JobReady, RunStep, TransitionDone, TransitionFailed
from nereus.fleet import Fleet
from nereus.layout import Plan, first_plan
from nereus.observe import Observed, after, calibrated_tolls
from nereus.report.display import QuietDisplay
from nereus.report.record import structured
from nereus.sim.edges import Log, Metrics
from nereus.sim.memory import PeakBytes
from nereus.sim.play import steady
from nereus.sim.searching import Changes
from nereus.sim.truth import Floats, Truth
from nereus.sim.workload import SimWorkload, StepSamples, constant
from nereus.sim.world import SimulatedWorld
from nereus.transitions.durations import HOST_TOLLS
from nereus.workload import PHASE_KINDS, StepBatch, recorded_batch, step_terms
from nereus.world import drive

Events = Sequence[Mapping[str, Any]]
PHASES = ("update_weights", "gen", "rest", "old_log_prob", "ref", "values", "update_critic", "update_actor")
"""Of a measured step, in their order."""
ENGINE_SECONDS = 0.3
"""What building an engine on a process is expected to take before any was built, as the real world expects it."""
ROOM_BYTES = 1 << 50
"""Of a slot: its changes had room."""
LOSSES = ("slots_lost", "recovered", "resumed", "transition_failed")
"""What is not played again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What a run had learnt at a moment: coefficients and tolls, and what building an engine takes."""

    state: Observed
    engine_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RealRun:
    """What of a real run's journal is played again: its changes and batches by step, what it took, and what was learnt.

    `known` is by step what its times are made of. `measured_seconds` is from the beginning of the first step to the end of
    the last one; `step_seconds` and `pause_seconds` are parts of it.
    """

    config: Config
    fleet: Fleet
    changes: Mapping[int, Plan]
    batches: Mapping[int, StepBatch]
    known: Mapping[int, Known]
    measured_seconds: float
    step_seconds: float
    pause_seconds: float


def real_run(events: Events, learnt_steps: int | None = None) -> RealRun:
    """The run of a journal, with what was known before each step, or always what was after the first `learnt_steps`.

    JournalError where the journal is not of one whole run on slots, of one controller and without losses.
    """
    kinds = {str(event["kind"]) for event in events}
    for needed in ("probe", "observed", "control_started"):
        if needed not in kinds:
            raise JournalError(f"the journal has no {needed}: expected a run of real slots with probe.seconds above 0")
    for other in LOSSES:
        if other in kinds:
            raise JournalError(f"the journal has {other}: only runs without losses and ends between are played again")
    steps = [int(event["step"]) for event in events if event["kind"] == "observed"]
    if learnt_steps is not None and not 1 <= learnt_steps <= len(steps):
        raise ConfigError("--learn-steps", learnt_steps, f"expected 1 to {len(steps)}, the steps of the run")
    known = _known(events)
    if learnt_steps is not None:
        known = dict.fromkeys(known, known[learnt_steps + 1])
    started = next(event for event in events if event["kind"] == "control_started")
    paused = [event for event in events if event["kind"] == "transition_done"]
    begun = [event for event in events if event["kind"] == "transition_started"]
    return RealRun(
        config=_config(events),
        fleet=fleet_of(started["fleet"]),
        changes={int(event["step"]): structured(Plan, event["plan"]) for event in begun},
        batches={int(e["step"]): recorded_batch(e["batch"]) for e in events if e["kind"] == "observed"},
        known=known,
        measured_seconds=_took(events),
        step_seconds=sum(float(e["metrics"]["timing_s/step"]) for e in events if e["kind"] == "step_done"),
        pause_seconds=sum(float(event["pause_seconds"]) for event in paused),
    )


def _config(events: Events) -> Config:
    try:
        return structured(Config, events[0]["config"])
    except (ValueError, KeyError) as error:
        raise JournalError(f"line 1: the configuration cannot be read: {error}") from error


def _known(events: Events) -> dict[int, Known]:
    """What was known before each step, and before the one after the last."""
    found: dict[int, Known] = {}
    state, step = Observed(), 1
    for index, event in enumerate(events):
        if event["kind"] == "probe" or (event["kind"] == "observed" and int(event["step"]) >= step):
            state = after(state, event)
            step = int(event["step"]) + 1 if event["kind"] == "observed" else step
            found[step] = Known(state=state, engine_seconds=ENGINE_SECONDS * _engine_ratio(events[:index]))
        else:
            state = after(state, event)
    return found


def _engine_ratio(events: Events) -> float:
    """What building engines took over what was expected, of the changes that are known."""
    known = [event for event in events if event["kind"] == "transition_observed"]
    expected = sum(float(event["expected_seconds"].get("build_engine", 0.0)) for event in known)
    measured = sum(float(event["seconds"].get("build_engine", 0.0)) for event in known)
    return measured / expected if expected and measured else 1.0


def _took(events: Events) -> float:
    done = [event for event in events if event["kind"] == "step_done"]
    first = float(done[0]["at_seconds"]) - float(done[0]["metrics"]["timing_s/step"])
    return float(done[-1]["at_seconds"]) - first


class CalibratedTimes:
    """What phases take by the terms of a plan and learnt coefficients; memory is no question: the run has had it."""

    def __init__(self, run: RealRun, plan: Plan, *, is_first: bool) -> None:
        self.run, self.plan, self.memory = run, plan, self
        self._fresh = () if is_first else tuple(name for name, _ in plan.stages())

    def phases(self, step: int, samples: StepSamples, slowness: Floats) -> Iterator[tuple[str, float]]:
        """(name, seconds) in the order of a step."""
        del samples, slowness
        learnt = self.run.known[step].state
        profile = learnt.profile
        assert profile is not None
        terms = step_terms(self.run.config, self.plan, self.run.batches[step], profile, self._fresh)
        self._fresh = ()
        for phase in PHASES:
            if phase in terms:
                seconds = predict(learnt.calibrations[PHASE_KINDS[phase]], terms[phase]).mean_seconds
                yield "reward" if phase == "rest" else phase, seconds

    def peak(self, tokens: Floats) -> PeakBytes:
        """Nothing."""
        del tokens
        return PeakBytes(slot=0, phase="", used_bytes=0, room_bytes=1)


@dataclass(kw_only=True)
class WorldAgain(SimulatedWorld):
    """The simulated world with the times of a real run."""

    run: RealRun
    _calibrated: dict[str, CalibratedTimes] = field(default_factory=dict[str, CalibratedTimes])

    def times(self) -> CalibratedTimes:  # type: ignore[override]
        """Of the plan in use; a plan's first step uses its new engines for the first time."""
        if self.plan_id not in self._calibrated:
            self._calibrated[self.plan_id] = CalibratedTimes(self.run, self.plan, is_first=not self._calibrated)
        return self._calibrated[self.plan_id]

    def submit(self, command: Command | AdaptiveCommand) -> None:
        """Begins to carry out a command; a change with what was known before it."""
        if isinstance(command, ChangePlan):
            known = self.run.known[command.step]
            self.tolls = calibrated_tolls(known.state, HOST_TOLLS)
            self.truth = Truth(exact=True, link_share=self.tolls.rate_share)
            self.changes = Changes(
                config=self.config,
                tolls=self.tolls,
                engine_seconds=dict.fromkeys(("train", "infer", "generate"), known.engine_seconds),
            )
        super().submit(command)


@dataclass(frozen=True)
class BatchesAgain:
    """The batches of a real run as the simulated world asks for them: lengths by their quantiles."""

    run: RealRun
    limits: SimWorkload

    def batch(self, step: int) -> StepSamples:
        """The samples of a step."""
        known = self.run.batches[step]
        picks = (np.arange(known.samples) * len(known.response_tokens)) // known.samples
        return StepSamples(
            prompt_tokens=np.full(known.samples, round(known.prompt_tokens), dtype=np.int64),
            response_tokens=np.asarray(known.response_tokens, dtype=np.float64)[picks].astype(np.int64),
        )

    def limit_at(self, step: int) -> int:
        """The longest response of a step."""
        return self.limits.limit_at(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Commands a real run's changes before their steps."""

    changes: Mapping[int, Plan]
    last_step: int

    def handle(self, event: object) -> tuple[RunStep | ChangePlan | Finish, ...]:
        """What follows from an event. JournalError where a change does not succeed that did."""
        match event:
            case JobReady():
                return self._next(event.step)
            case StepMeasured():
                return self._next(event.step + 1)
            case TransitionDone():
                return (RunStep(step=self._after(event.plan)),)
            case TransitionFailed():
                raise JournalError(f"a change of the journal cannot be played again: {event.reason}")
            case _:
                return ()

    def _next(self, step: int) -> tuple[RunStep | ChangePlan | Finish, ...]:
        if step in self.changes:
            return (ChangePlan(step=step, plan=self.changes[step], reason="as the journal has it"),)
        return (RunStep(step=step) if step <= self.last_step else Finish(reason="done"),)

    def _after(self, plan: Plan) -> int:
        return next(step for step, other in self.changes.items() if other == plan)


def played_again(run: RealRun, journal: Log, metrics: Metrics) -> WorldAgain:
    """The run in the simulated world, to its end."""
    data, config = run.config.data, run.config
    limits = SimWorkload(
        prompts_per_step=data.prompts_per_step,
        samples_per_prompt=data.samples_per_prompt,
        mean_prompt_tokens=float(data.max_prompt_tokens),
        most_prompt_tokens=data.max_prompt_tokens,
        most_response_tokens=data.max_response_tokens,
        limit_tokens=tuple((each.step, each.max_response_tokens) for each in data.response_schedule),
        curve=constant(1.0),
    )
    world = WorldAgain(
        run=run,
        config=replace(
            config,
            checkpoint=replace(config.checkpoint, every_steps=0),
            fleet=replace(config.fleet, slot_budget_bytes=ROOM_BYTES),
        ),
        first=first_plan(config),
        moments=steady(run.fleet),
        workload=BatchesAgain(run, limits),  # type: ignore[arg-type]
        truth=Truth(exact=True),
        journal=journal,
        metrics=metrics,
        display=QuietDisplay(),
    )
    drive(Script(changes=run.changes, last_step=max(run.batches)), world)
    return world
