"""The controller: `handle(event) -> commands`, with no clock, thread or socket of its own.

Its policy here is a script: changes of plan come from the configuration, each before its step.

    state      event              next state   commands
    starting   JobReady           running      what is due before the step, or the step
    running    StepFinished       running      the same for the next step; Finish after the last or when asked to stop
    changing   TransitionDone     running      the step
    changing   TransitionFailed   running      the step, under the plan as it was
    any        StopRequested      same         none; the next safe point gives Finish
"""

from __future__ import annotations

from typing import Literal

from nereus.config import Config
from nereus.errors import InvalidEvent
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
from nereus.layout import Plan, first_plan
from nereus.transition import placed_change

State = Literal["starting", "running", "changing", "finished"]


class Controller:
    """Decides what happens next; see the table of the module."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._changes = {change.step: change.plan for change in config.changes}
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
                self._expect(event, "running")
                if event.step != self.step:
                    raise InvalidEvent(f"step {event.step} finished while step {self.step} was running")
                self.step += 1
                return self._next()
            case TransitionDone():
                self._expect_change(event)
                self.plan = event.plan
                return self._next()
            case TransitionFailed():
                self._expect_change(event)
                return self._next()

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
        change = self._changes.pop(self.step, None)
        if change is not None:
            plan = placed_change(self._config, self.plan, change)
            if plan != self.plan:
                self.state, self._wanted = "changing", plan
                return (ChangePlan(step=self.step, plan=plan, reason=f"scripted before step {self.step}"),)
        self.state = "running"
        return (RunStep(step=self.step),)
