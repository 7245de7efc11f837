"""The simulated world: carries out a controller's commands on a fleet of measured times, and writes the same journal.

Two ways of speaking, as controllers have them. `renumbered`: the scripted Controller, whose slots are dense numbers; a
loss is a SlotsLost, answered by Recover. Otherwise slots keep their numbers, losses and gains are FleetChanged, notices
PreemptionNotice, and a step that loses a slot of its plan is void.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import simpy

from nereus.config import Config
from nereus.control.controller import AdaptiveCommand, AdaptiveEvent, Record
from nereus.control.records import (
    FleetChanged,
    Restart,
    Search,
    SearchDone,
    StateRestored,
    plan_slots,
)
from nereus.events import (
    ChangePlan,
    Command,
    Event,
    Finish,
    JobReady,
    Recover,
    Recovered,
    RunStep,
    SlotsLost,
    TransitionDone,
    TransitionFailed,
)
from nereus.fleet import Fleet
from nereus.layout import Plan
from nereus.sim.changes import DEVICE_ENGINE_SECONDS, Asked, Placing
from nereus.sim.edges import ChangeUnderWay, Delays, Log, Metrics, Searcher, Shown, state_bytes
from nereus.sim.memory import PeakBytes
from nereus.sim.network import Network
from nereus.sim.phases import StepTimes, observed, step_row
from nereus.sim.play import Moment, notices
from nereus.sim.searching import Changes
from nereus.sim.transit import Process, Transit
from nereus.sim.truth import Truth
from nereus.sim.workload import SimWorkload, StepSamples
from nereus.survivors import renumbering
from nereus.transitions.durations import Durations, Tolls
from nereus.transitions.execution import Settled
from nereus.transitions.order import Infeasible

MOST_OVERFLOWS = 3
MANY_SLOTS, TOGETHER_SECONDS = 32, 5e-3
"""On larger fleets transfers begin and end on a grid of so many seconds."""


@dataclass(kw_only=True)
class SimulatedWorld:
    """See the module. `first` is the controller's first plan; `moments` the fleet over time, the first of them at 0."""

    config: Config
    first: Plan
    moments: tuple[Moment, ...]
    workload: SimWorkload
    truth: Truth
    journal: Log
    metrics: Metrics
    display: Shown
    renumbered: bool = False
    keeps_processes: bool = True  # what lives is not started anew for a state from storage
    searcher: Searcher | None = None
    delays: Delays = field(default_factory=Delays)
    tolls: Tolls = field(default_factory=Tolls)
    engine_seconds: Mapping[str, float] = field(default_factory=lambda: DEVICE_ENGINE_SECONDS)
    placing: Placing = "measured"

    def __post_init__(self) -> None:
        self.env = simpy.Environment()
        self.fleet: Fleet = self.moments[0].fleet
        self.numbers: list[int] = list(self.fleet.slots)  # the controller's slot i is this one, where it renumbers
        self.plan = self.first
        self.state_version = 0
        self.steps_done = 0
        self.step_seconds: list[float] = []
        self.tokens = 0  # of all finished steps
        self.stands_still = False
        self.transitions: list[dict[str, Any]] = []
        self.lost_seconds = 0.0  # of steps that were void, recoveries and restarts
        self._saved_step = 0
        self._empty: frozenset[int] = frozenset()
        self._queue: deque[AdaptiveEvent | Event] = deque()
        self._finished = False
        self._overflows: dict[int, int] = {}
        self._running: simpy.Process | None = None
        self._change: ChangeUnderWay | None = None
        self._times: tuple[Plan, StepTimes] | None = None
        self._named: tuple[Plan, str] | None = None
        slots = 1 + max(max(m.fleet.slots) for m in self.moments)
        self._slowness = self.truth.slowness(slots)
        self.network = Network(self.env, together_seconds=TOGETHER_SECONDS if slots > MANY_SLOTS else 0.0)
        self.changes = Changes(
            config=self.config, tolls=self.tolls, engine_seconds=self.engine_seconds, placing=self.placing
        )

    # -- World ---------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Any]:
        """Yields what happens until `Finish` has been carried out, or the job waits and the fleet changes no more."""
        self._log(
            "run_started", config=asdict(self.config), slots=len(self.fleet.slots), rollouts=None,
            simulated=str(self.fleet),
        )  # fmt: skip
        self._log("state", state_version=self.state_version, plan_id=self.plan_id, digests={})
        self.env.process(self._play())
        self._queue.append(JobReady(at_seconds=self.env.now, step=1))
        while not self._finished:
            if self._queue:
                yield self._queue.popleft()
            elif self.env.peek() < float("inf"):
                self.env.step()
            else:
                self._finished = self.stands_still = True
                self._log("run_stopped", reason="stands still", steps=self.steps_done)

    def submit(self, command: Command | AdaptiveCommand) -> None:
        """Begins to carry out a command."""
        match command:
            case RunStep():
                self._running = self.env.process(self._step(command.step))
            case ChangePlan():
                self._prepare(command)
                if command.step == self.steps_done + 1:
                    self._running = self.env.process(self._finish_change())
            case Recover():
                self._running = self.env.process(self._recover(command))
            case Restart():
                self._running = self.env.process(self._restart(command))
            case Search():
                self.env.process(self._search(command))
            case Record():
                pass  # `nereus.sim.told` writes it
            case Finish():
                self._finished = True
                self._log("run_stopped", reason=command.reason, steps=self.steps_done)

    def _log(self, kind: str, **fields: Any) -> None:
        self.journal.append(kind, at_seconds=self.env.now, **fields)

    @property
    def plan_id(self) -> str:
        """The present plan's name, worked out once for each plan."""
        if self._named is None or self._named[0] is not self.plan:
            self._named = (self.plan, self.plan.plan_id)
        return self._named[1]

    # -- plans and slots -----------------------------------------------------------------------------------------

    def physical(self, plan: Plan) -> Plan:
        """The plan on the fleet's own slot numbers."""
        if not self.renumbered:
            return plan
        stages = {n: replace(s, slots=tuple(self.numbers[slot] for slot in s.slots)) for n, s in plan.stages()}
        return replace(plan, **stages)

    def times(self) -> StepTimes:
        """What steps take under the present plan; kept until it changes: a slot that stays, stays on its node."""
        if self._times is None or self._times[0] is not self.plan:
            self._times = (self.plan, StepTimes(self.config, self.physical(self.plan), self.fleet, self.truth))
        return self._times[1]

    def slowness(self, step: int) -> np.ndarray:
        """[slots] how much longer each slot takes in a step."""
        nodes = self.fleet.node_of
        return self._slowness[: len(nodes)] * self.truth.straggling(len(self.fleet.nodes), step)[nodes]

    # -- steps ---------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> Process:
        began, seconds = self.env.now, dict[str, float]()
        samples = self.workload.batch(step)
        try:
            for phase, takes in self.times().phases(step, samples, self.slowness(step)):
                yield self.env.timeout(takes)
                seconds[phase] = takes
                if self._change is not None and self._change.transit is not None:
                    at = self.env.now
                    yield from self._change.transit.boundary()
                    seconds["interleaved"] = seconds.get("interleaved", 0.0) + self.env.now - at
        except simpy.Interrupt:
            self.lost_seconds += self.env.now - began
            return
        self._running = None
        peak = self.times().memory.peak((samples.prompt_tokens + samples.response_tokens).astype(np.float64))
        if peak.used_bytes > peak.room_bytes:
            self._out_of_memory(step, peak, self.env.now - began)
            return
        seconds["step"] = self.env.now - began
        self._step_done(step, samples, seconds, peak)
        if self._change is not None:
            self._running = self.env.process(self._finish_change())

    def _out_of_memory(self, step: int, peak: PeakBytes, seconds: float) -> None:
        """The step is void and so is the state: processes end. A job that does so at one step again and again is stuck."""
        self.lost_seconds += seconds
        used = plan_slots(self.physical(self.plan))
        self._log("out_of_memory", step=step, plan_id=self.plan_id, **asdict(peak))
        self._overflows[step] = self._overflows.get(step, 0) + 1
        if self._overflows[step] >= MOST_OVERFLOWS or self.renumbered:
            self._finished = self.stands_still = True
            self._log("run_stopped", reason="out of memory", phase=peak.phase, steps=self.steps_done)
            return
        self._empty |= used
        if self._change is not None:
            self._change.lost_slots |= used
        self._queue.append(peak.alarm(self.env.now))
        self._queue.append(FleetChanged(at_seconds=self.env.now, fleet=self.fleet, lost_slots=tuple(sorted(used))))

    def _step_done(self, step: int, samples: StepSamples, seconds: dict[str, float], peak: PeakBytes) -> None:
        self.steps_done = step
        self.step_seconds.append(seconds["step"])
        self.tokens += samples.total_tokens
        done = self.transitions[-1] if self.transitions and self.transitions[-1]["step"] == step else None
        metrics = step_row(step, samples, seconds, self.plan, len(self.fleet.slots), peak) | {
            "timing_s/transition": float(done["pause_seconds"]) if done else 0.0,
            "response_length/clip_ratio": float((samples.response_tokens >= self.workload.limit_at(step)).mean()),
            "plan/state_version": float(self.state_version),
            "transition/count": float(len(self.transitions)),
        }
        self._log(
            "step_done", step=step, plan_id=self.plan_id, metrics=metrics, updates=[], state_version=self.state_version
        )
        self.metrics.write(step, metrics)
        self.display.step(metrics, str(self.plan))
        every = self.config.checkpoint.every_steps
        if every and step % every == 0:
            self._saved_step = step
            self._log("checkpoint_saved", step=step, size_bytes=int(state_bytes(self.config)), folder=f"step-{step}")
        self._queue.append(observed(self.env.now, step, samples, seconds, self.plan_id, peak))

    # -- changes -------------------------------------------------------------------------------------------------

    def _durations(self) -> Durations:
        tolls = replace(self.tolls, rate_share=self.truth.link_share)
        return Durations(fleet=self.truth.fleet(self.fleet), tolls=tolls)

    def _prepare(self, command: ChangePlan) -> None:
        count = len(self.transitions) + 1
        facts = {"transition": f"t{count}", "step": command.step, "from": str(self.plan), "to": str(command.plan)}
        plan = {name: asdict(stage) for name, stage in command.plan.stages()}
        self._log("transition_started", reason=command.reason, plan=plan, **facts)
        self._change = change = ChangeUnderWay(command=command, facts=facts)
        self._plan_change(change)

    def _plan_change(self, change: ChangeUnderWay) -> None:
        durations = self._durations()
        living = self.fleet.without(self._empty) if self._empty else self.fleet
        target = self.physical(change.command.plan)
        try:
            if away := plan_slots(target) - set(self.fleet.slots):
                change.refused = f"slot {min(away)} of the new plan is not there"
                return
            change.asked = Asked(
                before=self.physical(self.plan), after=target, fleet=self.fleet, holders=frozenset(living.slots),
                urgent=change.command.urgent,
            )  # fmt: skip
            found = self.changes.between(change.asked)
        except Infeasible as error:
            change.refused = str(error)
            return
        change.planned = found
        if found.graph is not None:
            change.transit = Transit(
                self.env, found.graph, durations, self.network, self.truth, count=len(self.transitions) + 1,
                ahead=self.placing == "standby", on_commit=self._committed,
            )  # fmt: skip
            change.transit.begin()

    def _committed(self) -> None:
        self.state_version += 1
        name = self._change.facts["transition"] if self._change else ""
        self._log("commit", transition=name, state_version=self.state_version, digests={})

    def _finish_change(self) -> Process:
        """The pause: to the end of the transition, and the event of how it ended."""
        change = self._change
        assert change is not None
        began = self.env.now
        try:
            if change.refused:
                self._refuse(change, change.refused)
                return
            if change.planned is not None and change.planned.missing:
                yield from self._restore(change.command.plan, began)
                return
            if change.transit is None:
                self._adopt(change, began)
                return
            yield from change.transit.pause()
        except simpy.Interrupt:
            return
        settled = change.transit.settled.value
        assert isinstance(settled, Settled)
        if settled.version == "new":
            self._adopt(change, began)
        else:
            self._refuse(change, settled.reason)

    def _adopt(self, change: ChangeUnderWay, began: float) -> None:
        transit, command = change.transit, change.command
        self.plan, self._change, self._running = command.plan, None, None
        target = plan_slots(self.physical(self.plan))
        self._empty = (self._empty - target) | (change.lost_slots & target)
        done = {
            **change.facts,
            "state_version": self.state_version,
            "digests": {},
            "modes": {emu.emu: emu.mode for emu in transit.graph.change.emus} if transit else {},
            "seconds": transit.place_seconds("pause") if transit else {},
            "pause_seconds": self.env.now - began,
            "interleaved_seconds": transit.place_seconds("interleaved") if transit else {},
            "outside_seconds": transit.place_seconds("outside") if transit else {},
            "planned_bytes": change.planned.moved_bytes if change.planned else 0,
            "counted_bytes": transit.moved_bytes if transit else 0,
        }
        if change.asked is not None:
            spent = self.env.now - began + sum(done["interleaved_seconds"].values())
            self.changes.measured(change.asked, spent)
        self.transitions.append(done)
        self._log("transition_done", **done)
        self.display.transition(done)
        self._queue.append(
            TransitionDone(
                at_seconds=self.env.now,
                plan=command.plan,
                state_version=self.state_version,
                pause_seconds=self.env.now - began,
            )
        )

    def _refuse(self, change: ChangeUnderWay, reason: str) -> None:
        self._change, self._running = None, None
        self._log("transition_failed", reason=reason, **change.facts)
        self.display.note(f"transition {change.facts['transition']} was undone: {reason}")
        self._queue.append(TransitionFailed(at_seconds=self.env.now, plan=change.command.plan, reason=reason))

    # -- restarts, losses ----------------------------------------------------------------------------------------

    def _restart_seconds(self) -> float:
        engines = self.engine_seconds["train"] + self.engine_seconds["generate"]
        draw = self.truth.generator("restart", len(self.transitions), self.steps_done)
        spread = 1.0 if self.truth.exact else float(np.exp(0.2 * draw.standard_normal()))
        return self.delays.restart(
            self.config, len(self.fleet.nodes), engines, spread, processes=not self.keeps_processes
        )

    def _restore(self, plan: Plan, began: float) -> Process:
        """From the last checkpoint, into `plan`: the steps since are lost."""
        self._empty = frozenset()
        yield self.env.timeout(self._restart_seconds())
        step = self._saved_step + 1
        change, self._change, self._running = self._change, None, None
        self.plan, self.state_version = plan, self.state_version + 1
        self.steps_done = self._saved_step
        done = {**(change.facts if change else {}), "pause_seconds": self.env.now - began, "restored_step": step - 1}
        self.transitions.append(done)
        self._log(
            "transition_done", state_version=self.state_version, seconds={"restore": self.env.now - began}, **done
        )
        self._queue.append(
            StateRestored(at_seconds=self.env.now, plan=plan, step=step, state_version=self.state_version)
        )

    def _restart(self, command: Restart) -> Process:
        """Saves what lives, stops, and goes on under another plan; without what lives from the last checkpoint."""
        began = self.env.now
        facts = {"transition": f"t{len(self.transitions) + 1}", "step": command.step}
        facts |= {"from": str(self.plan), "to": str(command.plan)}
        self._log("transition_started", reason=command.reason, plan={}, restart=True, **facts)
        self._change = ChangeUnderWay(
            command=ChangePlan(step=command.step, plan=command.plan, reason=command.reason), facts=facts
        )
        try:
            lives = self._lives()
            if lives:
                yield self.env.timeout(self.delays.stored(self.config, len(self.fleet.nodes)))
                lives = self._lives()  # else a slot left before all was saved
            if lives:
                self._saved_step = self.steps_done
            yield from self._restore(command.plan, began)
        except simpy.Interrupt:
            return

    def _lives(self) -> bool:
        """Whether every slot of the plan is there with its state."""
        return plan_slots(self.physical(self.plan)) <= set(self.fleet.slots) - self._empty

    def _recover(self, command: Recover) -> Process:
        """The job without lost slots, under the plan for those that are left; in dense numbers."""
        began = self.env.now
        before = self.physical(self.plan)
        numbers = renumbering(len(self.numbers), command.lost_slots)
        self.numbers = [self.numbers[old] for old in numbers]
        self.plan = command.plan
        try:
            after, slots = self.physical(command.plan), frozenset(self.fleet.slots)
            found = self.changes.between(Asked(before=before, after=after, fleet=self.fleet, holders=slots))
            if found.graph is None:
                yield self.env.timeout(self._restart_seconds())
            else:
                transit = Transit(self.env, found.graph, self._durations(), self.network, self.truth)
                transit.begin()
                yield from transit.pause()
        except simpy.Interrupt:
            return
        if found.missing:
            self.steps_done = self._saved_step
        self.state_version += 1
        self._running = None
        self.lost_seconds += self.env.now - began
        self._log(
            "recovered", slots=len(self.numbers), plan_id=self.plan_id, plan_text=str(self.plan),
            state_version=self.state_version, next_step=self.steps_done + 1, seconds=self.env.now - began,
        )  # fmt: skip
        self._queue.append(
            Recovered(at_seconds=self.env.now, plan=self.plan, slots=len(self.numbers), next_step=self.steps_done + 1)
        )

    def _search(self, command: Search) -> Process:
        yield self.env.timeout(self.delays.search_seconds)
        if self.searcher is None:
            answer = SearchDone(
                at_seconds=self.env.now, search_id=command.search_id, candidates=(), reason="this world has no planner"
            )
        else:
            answer = self.searcher(command, self.env.now)
        self._queue.append(answer)

    # -- the fleet -----------------------------------------------------------------------------------------------

    def _play(self) -> Process:
        """The moments of the fleet, and notices of the losses where notices are given."""
        seconds = 0.0 if self.renumbered else self.delays.notice_seconds
        coming = [*self.moments[1:], *(notices(self.moments, seconds) if seconds else ())]
        for each in sorted(coming, key=lambda each: each.at_seconds):
            yield self.env.timeout(each.at_seconds - self.env.now)
            if self._finished:
                return
            if isinstance(each, Moment):
                self._happen(each)
            else:
                self._log("preemption_notice", slots=each.slots, deadline_seconds=each.deadline_seconds)
                self._queue.append(each)

    def _happen(self, moment: Moment) -> None:
        lost = set(moment.lost_slots)
        used = plan_slots(self.physical(self.plan))
        hosts = tuple(sorted({-1 - int(self.fleet.node_of[slot]) for slot in moment.lost_slots}))
        if self._change is not None:
            used |= plan_slots(self.physical(self._change.command.plan))
            self._change.lost_slots |= lost
        self.fleet = moment.fleet
        self._empty |= lost & used
        self._log("fleet_changed", slots=len(self.fleet.slots), lost=moment.lost_slots, gained=moment.gained_slots)
        if self._change is not None and self._change.transit is not None and lost:
            self._change.transit.lose((*moment.lost_slots, *hosts), "its node left")
        elif self._running is not None and lost & used and self._change is None:
            self._running.interrupt()
            self._running = None
        if self.renumbered:
            self._lose_numbers(lost)
            return
        self._queue.append(FleetChanged(at_seconds=self.env.now, fleet=self.fleet, lost_slots=moment.lost_slots))

    def _lose_numbers(self, lost: set[int]) -> None:
        numbers = tuple(number for number, slot in enumerate(self.numbers) if slot in lost)
        if not numbers:
            return  # the controller of dense numbers knows no gains
        if self._running is not None and self._running.is_alive:
            self._running.interrupt()
        self._running = self._change = None
        self._log("slots_lost", lost=numbers, reason="its node left", state_version=self.state_version)
        self.env.process(self._detected(numbers))

    def _detected(self, numbers: tuple[int, ...]) -> Process:
        yield self.env.timeout(self.delays.detect_seconds)
        self._queue.append(
            SlotsLost(
                at_seconds=self.env.now,
                lost_slots=numbers,
                slot_count=len(self.numbers),
                plan=self.plan,
                reason="its node left",
            )
        )
