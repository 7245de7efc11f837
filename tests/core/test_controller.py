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


def widest(change: PlanChange) -> int:
    """The most slots that a stage of the change takes."""
    stages = (getattr(change, name) for name in STAGES)
    return max((max(s.tp * s.pp * s.dp, max(s.slots or (0,)) + 1) for s in stages if s is not None), default=0)


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
        self.prepared: ChangePlan | None = None  # beside the step that runs
        self.begun = self.stopped = False

    def take(self, commands: tuple[Command, ...]) -> None:
        """What follows a safe point: the end, the change that is due, or the step with the change due after it."""
        step = len(self.started) + 1
        self.pending, self.prepared = commands[-1], None
        if self.stopped or step > self.steps:
            assert commands == (Finish(reason="stopped" if self.stopped else "done"),)
            return
        if (plan := self.due(step)) is not None:
            (command,) = commands
            assert isinstance(command, ChangePlan)
            assert (command.step, command.plan) == (step, plan)
            return
        assert commands[-1] == RunStep(step=step)
        self.started.append(step)
        plan = self.due(step + 1) if step < self.steps else None
        assert len(commands) == (1 if plan is None else 2)
        if plan is not None:
            assert isinstance(commands[0], ChangePlan)
            assert (commands[0].step, commands[0].plan) == (step + 1, plan)
            self.prepared = commands[0]

    def due(self, step: int) -> Plan | None:
        """The plan that the script wants before a step and has not been commanded."""
        change = self.scripted.get(step)
        if change is None or step in self.changed_before:
            return None
        self.changed_before.append(step)
        plan = placed_change(self.config, self.plan, change)
        return None if plan == self.plan else plan

    @precondition(lambda self: not self.begun)
    @rule()
    def job_is_ready(self) -> None:
        self.begun = True
        self.take(self.controller.handle(ready()))

    @precondition(lambda self: isinstance(self.pending, RunStep))
    @rule()
    def step_finishes(self) -> None:
        commands = self.controller.handle(finished(self.started[-1]))
        if self.prepared is None:
            self.take(commands)
        else:
            assert commands == ()
            self.pending, self.prepared = self.prepared, None

    @precondition(lambda self: isinstance(self.pending, ChangePlan))
    @rule(succeeds=st.booleans())
    def change_ends(self, succeeds: bool) -> None:
        command = self.pending
        assert isinstance(command, ChangePlan)
        if succeeds:
            self.plan = command.plan
        self.take(self.controller.handle(done(command.plan) if succeeds else failed(command.plan)))

    @precondition(lambda self: self.begun and not isinstance(self.pending, Finish) and self.config.fleet.slots > 2)
    @rule(slot=st.integers(0, 3), back=st.integers(0, 2))
    def a_slot_is_lost(self, slot: int, back: int) -> None:
        """Whatever runs is void; the job goes on, perhaps from an earlier step."""
        slots = self.config.fleet.slots
        lost = (slot % slots,)
        event = SlotsLost(
            at_seconds=0.0, lost_slots=lost, slot_count=slots, plan=self.plan, reason="planned by the test"
        )
        (command,) = self.controller.handle(event)
        self.config, self.plan = surviving_plan(self.config, self.plan, lost)
        assert command == Recover(lost_slots=lost, plan=self.plan)
        assert all(max(stage.slots) < slots - 1 for _, stage in self.plan.stages())
        if isinstance(self.pending, RunStep):
            self.started.pop()
        del self.started[max(len(self.started) - back, 0) :]
        self.scripted = {step: change for step, change in self.scripted.items() if widest(change) < slots}
        done = Recovered(at_seconds=0.0, plan=self.plan, slots=slots - 1, next_step=len(self.started) + 1)
        self.take(self.controller.handle(done))

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
        self.prepared: Event | None = None
        self.step = 0
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
                self.step = step
                if self.prepared is not None:
                    self.queue.append(self.prepared)
                    self.prepared = None
            case ChangePlan(step=step, plan=plan):
                event = failed(plan) if step in self.failing else done(plan)
                if step == self.step + 1:
                    self.queue.append(event)
                else:
                    self.prepared = event
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
    expected = "change1 step1 change3 step2 step3 change5 step4 step5 finish"  # before 4 the plan is already that
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
        "change3",
        "step2",
        "change4",
        "step3",
        "change5",
        "step4",
        "step5",
        "finish",
    ]
    assert controller.plan == placed_change(SCRIPT, placed_change(SCRIPT, PLAN, CHANGES[2]), CHANGES[0])


def test_a_stop_ends_the_run_at_the_next_safe_point() -> None:
    world = ScriptedWorld(stop_in=2)
    drive(Controller(SCRIPT), world)
    assert words(world) == ["change1", "step1", "change3", "step2", "finish"]
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
