"""The controller's table of states, under random events and with a small world of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nereus.config import PlanChange
from nereus.controller import Controller
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
from nereus.world import drive
from tests.core.scenes import CONFIG, DP4, PP2_DP2, THREE, TP2_PP2, with_changes

PLAN = first_plan(CONFIG)
CHANGES = [
    PlanChange(actor_train=PP2_DP2),
    PlanChange(actor_train=TP2_PP2),  # the first plan: no change where nothing came before
    PlanChange(critic_train=DP4),
    PlanChange(actor_train=THREE, critic_train=THREE),
]


def ready(step: int = 1) -> JobReady:
    return JobReady(at_seconds=0.0, step=step)


def finished(step: int) -> StepFinished:
    return StepFinished(at_seconds=0.0, step=step, step_seconds=1.0)


def done(plan: Plan) -> TransitionDone:
    return TransitionDone(at_seconds=0.0, plan=plan, state_version=1, pause_seconds=1.0)


def failed(plan: Plan) -> TransitionFailed:
    return TransitionFailed(at_seconds=0.0, plan=plan, reason="planned by the test")


STOP = StopRequested(at_seconds=0.0)


class ControllerMachine(RuleBasedStateMachine):
    """A model of the table beside the controller: what it must command next follows from what it has commanded."""

    @initialize(
        steps=st.integers(1, 6), scripted=st.dictionaries(st.integers(1, 6), st.sampled_from(CHANGES), max_size=4)
    )
    def begin(self, steps: int, scripted: dict[int, PlanChange]) -> None:
        self.steps = steps
        self.scripted = {step: change for step, change in sorted(scripted.items()) if step <= steps}
        self.config = with_changes(*self.scripted.items(), steps=steps)
        self.controller = Controller(self.config)
        self.plan = first_plan(self.config)
        self.pending: Command | None = None  # what the world carries out now
        self.started: list[int] = []
        self.changed_before: list[int] = []
        self.begun = self.stopped = False

    def take(self, commands: tuple[Command, ...]) -> None:
        """Exactly one command follows a safe point, and it is the right one."""
        (command,) = commands
        step = len(self.started) + 1
        self.pending = command
        if self.stopped or step > self.steps:
            assert command == Finish(reason="stopped" if self.stopped else "done")
            return
        change = self.scripted.get(step)
        plan = self.plan if change is None else placed_change(self.config, self.plan, change)
        if plan != self.plan and step not in self.changed_before:
            assert isinstance(command, ChangePlan)
            assert (command.step, command.plan) == (step, plan)
            self.changed_before.append(step)
            return
        assert command == RunStep(step=step)
        self.started.append(step)

    @precondition(lambda self: not self.begun)
    @rule()
    def job_is_ready(self) -> None:
        self.begun = True
        self.take(self.controller.handle(ready()))

    @precondition(lambda self: isinstance(self.pending, RunStep))
    @rule()
    def step_finishes(self) -> None:
        self.take(self.controller.handle(finished(self.started[-1])))

    @precondition(lambda self: isinstance(self.pending, ChangePlan))
    @rule(succeeds=st.booleans())
    def change_ends(self, succeeds: bool) -> None:
        command = self.pending
        assert isinstance(command, ChangePlan)
        if succeeds:
            self.plan = command.plan
        self.take(self.controller.handle(done(command.plan) if succeeds else failed(command.plan)))

    @rule(chance=st.integers(0, 3))
    def stop_is_asked_for(self, chance: int) -> None:
        if chance == 0:
            self.stopped = True
            assert self.controller.handle(STOP) == ()

    @rule(kind=st.sampled_from((JobReady, StepFinished, TransitionDone, TransitionFailed)))
    def an_event_out_of_place_is_refused(self, kind: type) -> None:
        expected = {RunStep: (StepFinished,), ChangePlan: (TransitionDone, TransitionFailed), Finish: ()}
        right = expected[type(self.pending)] if self.begun else (JobReady,)
        if kind in right:
            return
        event = {JobReady: ready(), StepFinished: finished(len(self.started) or 1)}.get(kind) or (
            done(self.plan) if kind is TransitionDone else failed(self.plan)
        )
        with pytest.raises(InvalidEvent, match="came in state"):
            self.controller.handle(event)

    @precondition(lambda self: isinstance(self.pending, RunStep))
    @rule(away=st.sampled_from((-1, 1, 5)))
    def another_step_cannot_finish(self, away: int) -> None:
        with pytest.raises(InvalidEvent, match="was running"):
            self.controller.handle(finished(self.started[-1] + away))

    @invariant()
    def state_is_that_of_the_table(self) -> None:
        if not hasattr(self, "controller"):
            return
        states = {RunStep: "running", ChangePlan: "changing", Finish: "finished", type(None): "starting"}
        assert self.controller.state == states[type(self.pending)]
        assert self.controller.plan == self.plan
        assert self.controller.stopping == self.stopped
        assert self.started == list(range(1, len(self.started) + 1))

    def teardown(self) -> None:
        """Whatever came before, the job ends: every step once in order, or at the first safe point after a stop."""
        if not hasattr(self, "controller"):
            return
        begun = len(self.started)
        if not self.begun:
            self.job_is_ready()
        for _ in range(20):
            if isinstance(self.pending, RunStep):
                self.step_finishes()
            elif isinstance(self.pending, ChangePlan):
                self.change_ends(succeeds=True)
        assert isinstance(self.pending, Finish)
        assert self.started == list(range(1, (begun if self.stopped else self.steps) + 1))


TestController = ControllerMachine.TestCase
TestController.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


class ScriptedWorld:
    """A world that does at once what it is told, asks to stop in a given step, and fails the changes it is told to."""

    def __init__(self, *, stop_in: int | None = None, failing: tuple[int, ...] = ()) -> None:
        self.queue: deque[Event] = deque([ready()])
        self.stop_in, self.failing = stop_in, failing
        self.done: list[Command] = []

    def events(self) -> Iterator[Event]:
        while self.queue:
            yield self.queue.popleft()

    def submit(self, command: Command) -> None:
        self.done.append(command)
        match command:
            case RunStep(step=step):
                if step == self.stop_in:
                    self.queue.append(STOP)
                self.queue.append(finished(step))
            case ChangePlan(step=step, plan=plan):
                self.queue.append(failed(plan) if step in self.failing else done(plan))
            case Finish():
                pass


SCRIPT = with_changes((1, CHANGES[2]), (3, CHANGES[0]), (4, CHANGES[0]), (5, CHANGES[3]), steps=5)


def words(world: ScriptedWorld) -> list[str]:
    """The commands in short."""
    return [
        {RunStep: "step", ChangePlan: "change", Finish: "finish"}[type(c)] + str(getattr(c, "step", ""))
        for c in world.done
    ]


def test_a_world_is_driven_through_the_script() -> None:
    world = ScriptedWorld()
    controller = Controller(SCRIPT)
    drive(controller, world)
    expected = "change1 step1 step2 change3 step3 step4 change5 step5 finish"  # before 4 the plan is already that
    assert words(world) == expected.split()
    assert world.done[-1] == Finish(reason="done")
    assert controller.plan.actor_train.slots == controller.plan.critic_train.slots == (0, 1, 3)


def test_a_failed_change_leaves_the_plan_and_the_run_goes_on() -> None:
    world = ScriptedWorld(failing=(3, 5))
    controller = Controller(SCRIPT)
    drive(controller, world)
    assert words(world) == [
        "change1",
        "step1",
        "step2",
        "change3",
        "step3",
        "change4",
        "step4",
        "change5",
        "step5",
        "finish",
    ]
    assert controller.plan == placed_change(SCRIPT, placed_change(SCRIPT, PLAN, CHANGES[2]), CHANGES[0])


def test_a_stop_ends_the_run_at_the_next_safe_point() -> None:
    world = ScriptedWorld(stop_in=2)
    drive(Controller(SCRIPT), world)
    assert words(world) == ["change1", "step1", "step2", "finish"]
    assert world.done[-1] == Finish(reason="stopped")


def test_a_stop_during_a_change_ends_the_run_before_its_step() -> None:
    controller = Controller(SCRIPT)
    (change,) = controller.handle(ready())
    assert isinstance(change, ChangePlan)
    assert controller.handle(STOP) == ()
    assert controller.handle(done(change.plan)) == (Finish(reason="stopped"),)
    assert controller.plan == change.plan  # committed: a resumed run goes on from it


def test_a_stop_before_the_job_is_ready_runs_nothing() -> None:
    controller = Controller(SCRIPT)
    assert controller.handle(STOP) == ()
    assert controller.handle(ready()) == (Finish(reason="stopped"),)


@pytest.mark.parametrize("event", [done, failed])
def test_the_end_of_a_change_to_another_plan_is_refused(event) -> None:
    controller = Controller(SCRIPT)
    (change,) = controller.handle(ready())
    assert isinstance(change, ChangePlan)
    with pytest.raises(InvalidEvent):
        controller.handle(event(placed_change(SCRIPT, PLAN, CHANGES[0])))
