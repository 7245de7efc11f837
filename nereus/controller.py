"""The controller: `handle(event) -> commands`, with no clock, thread or socket of its own.

Its policy here is a script: changes of plan come from the configuration, each before its step, prepared during the one
before.

    state      event              next state   commands
    starting   JobReady           running      what is due before the step, or the step
    running    StepFinished       running      the same for the next step; Finish after the last or when asked to stop
    running    StepFinished       changing     none, where a change was prepared during the step: its end is awaited
    changing   TransitionDone     running      the step
    changing   TransitionFailed   running      the step, under the plan as it was
    any        SlotsLost          recovering   Recover under a plan for the slots that are left
    recovering Recovered          running      the step that it names
    any        StopRequested      same         none; the next safe point gives Finish
"""

from __future__ import annotations

from typing import Literal

from nereus.config import ChangeConfig, Config, PlanChange, StageConfig
from nereus.errors import InvalidEvent
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
    StepFinished,
    StopRequested,
    TransitionDone,
    TransitionFailed,
)
from nereus.layout import STAGES, Plan, first_plan
from nereus.survivors import surviving_plan
from nereus.transition import placed_change

State = Literal["starting", "running", "changing", "recovering", "finished"]


class Controller:
    """Decides what happens next; see the table of the module."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._changes = {change.step: change for change in config.changes}
        self.state: State = "starting"
        self.plan: Plan = first_plan(config)
        self._wanted: Plan | None = None
        self.step = 0
        self.stopping = False

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Commands that follow from `event`; InvalidEvent when it cannot be true in this state."""
        match event:
            case StopRequested():
                self.stopping = True
                return ()
            case JobReady():
                self._expect(event, "starting")
                self.step = event.step
                return self._next()
            case StepFinished():
                return self._step_finished(event)
            case TransitionDone():
                self._expect_change(event)
                self.plan = event.plan
                return self._next()
            case TransitionFailed():
                self._expect_change(event)
                return self._next()
            case SlotsLost():
                return self._slots_lost(event)
            case Recovered():
                self._expect(event, "recovering")
                self.plan, self.step = event.plan, event.next_step
                return self._next()

    def _step_finished(self, event: StepFinished) -> tuple[Command, ...]:
        self._expect(event, "running")
        if event.step != self.step:
            raise InvalidEvent(f"step {event.step} finished while step {self.step} was running")
        self.step += 1
        if self._wanted is None:
            return self._next()
        self.state = "changing"
        return ()

    def _slots_lost(self, event: SlotsLost) -> tuple[Command, ...]:
        if self.state == "finished":
            raise InvalidEvent("slots were lost after the end")
        self._config, self.plan = surviving_plan(self._config, event.plan, event.lost_slots)
        self._wanted = None
        slots = self._config.fleet.slots
        self._changes = {step: change for step, change in self._changes.items() if fits(change, slots)}
        self.state = "recovering"
        return (Recover(lost_slots=event.lost_slots, plan=self.plan),)

    def _expect(self, event: Event, state: State) -> None:
        if self.state != state:
            raise InvalidEvent(f"{event} came in state {self.state}, it belongs to {state}")

    def _expect_change(self, event: TransitionDone | TransitionFailed) -> None:
        self._expect(event, "changing")
        if event.plan != self._wanted:
            raise InvalidEvent(f"{type(event).__name__} speaks of plan {event.plan.plan_id}, which was not commanded")
        self._wanted = None

    def _next(self) -> tuple[Command, ...]:
        if self.stopping or self.step > self._config.run.steps:
            self.state = "finished"
            return (Finish(reason="stopped" if self.stopping else "done"),)
        now = self._due(self.step)
        if now:
            self.state = "changing"
            return (now,)
        self.state = "running"
        ahead = self._due(self.step + 1) if self.step < self._config.run.steps else None
        return (*((ahead,) if ahead else ()), RunStep(step=self.step))

    def _due(self, step: int) -> ChangePlan | None:
        """The scripted change before `step`, if there is one and it changes anything."""
        change = self._changes.pop(step, None)
        if change is None:
            return None
        plan = placed_change(self._config, self.plan, change.plan)
        if plan == self.plan:
            return None
        self._wanted = plan
        return ChangePlan(step=step, plan=plan, reason="scripted")


def fits(change: ChangeConfig, slots: int) -> bool:
    """Whether a scripted change names only slots that there are."""
    return all(_most_slots(change.plan, name) <= slots for name in STAGES)


def _most_slots(change: PlanChange, name: str) -> int:
    stage: StageConfig | None = getattr(change, name)
    if stage is None:
        return 0
    return max(stage.tp * stage.cp * stage.pp * stage.dp, max(stage.slots or (0,)) + 1)
