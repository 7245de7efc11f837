"""Policies without a search: what DP follows the fleet, who waits, who restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.control.controller import AdaptiveController
from nereus.control.policies import DpScaling, Fixed, Policy, policy_problem, with_dp
from nereus.control.records import FleetChanged, Restart, StateRestored, StepMeasured
from nereus.events import ChangePlan, JobReady, RunStep, TransitionDone, TransitionFailed
from nereus.fleet import uniform
from tests.core.control_scenes import SAMPLES, entries, plan_on

FIRST = plan_on((0, 1, 2, 3), tp=2)


@settings(deadline=None)
@given(st.sampled_from(((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))), st.frozensets(st.integers(0, 15)), st.booleans())
def test_dp_is_the_most_that_the_slots_allow(degrees: tuple[int, int], usable: frozenset[int], divisible: bool) -> None:
    tp, pp = degrees
    fleet = uniform(16, slots_per_node=4)
    found = with_dp(plan_on(tuple(range(tp * pp)), tp, pp), fleet, usable, divisible=divisible)
    most = min(len(usable) // (tp * pp), SAMPLES)
    allowed = [dp for dp in range(1, most + 1) if not divisible or SAMPLES % dp == 0]
    if not allowed:
        assert found is None
        return
    assert found is not None
    for _, stage in found.stages():
        assert (stage.layout.tp, stage.layout.pp, stage.layout.dp) == (tp, pp, allowed[-1])
        assert len(set(stage.slots)) == stage.layout.ranks
        assert set(stage.slots) <= usable
        assert sum(stage.shares) == SAMPLES
        assert min(stage.shares) >= 1
    slots = found.actor_train.slots
    groups = [slots[i : i + tp] for i in range(0, len(slots), tp)]
    inside = sum(len({slot // 4 for slot in group}) == 1 for group in groups)
    possible = sum(len([slot for slot in usable if slot // 4 == node]) // tp for node in range(4))
    assert inside >= min(len(groups), possible)


def test_stages_apart_divide_the_slots_in_proportion() -> None:
    apart = replace(FIRST, actor_generate=plan_on((4, 5)).actor_generate)
    found = with_dp(apart, uniform(12), range(12), divisible=False)
    assert found is not None
    assert (found.actor_train.layout.dp, found.actor_generate.layout.dp) == (4, 4)
    assert not set(found.actor_train.slots) & set(found.actor_generate.slots)
    assert found.critic_train.slots == found.actor_train.slots


def controller(policy: Policy, slots: int = 4) -> AdaptiveController:
    made = AdaptiveController(plan=FIRST, fleet=uniform(slots), last_step=9, policy=policy)
    assert made.handle(JobReady(at_seconds=0, step=1)) == (RunStep(step=1),)
    return made


def changed(slots: int, *lost: int) -> FleetChanged:
    return FleetChanged(at_seconds=1, fleet=uniform(slots), lost_slots=lost)


def test_fixed_waits_for_its_slots_and_is_rebuilt_there() -> None:
    made = controller(Fixed())
    waits = made.handle(changed(3, 3))
    assert made.state == "waiting"
    assert "slot 3 of the plan is gone" in str(entries(waits)[0])
    (change,) = made.handle(changed(4))
    assert change == ChangePlan(step=1, plan=FIRST, reason=change.reason)  # pyright: ignore[reportAttributeAccessIssue]
    assert made.handle(TransitionDone(at_seconds=2, plan=FIRST, state_version=1, pause_seconds=1)) == (RunStep(step=1),)
    made.check()


def test_dp_scaling_shrinks_at_once_and_grows_at_the_next_step() -> None:
    made = controller(DpScaling(FIRST, divisible=False))
    (change,) = made.handle(changed(3, 3))
    assert isinstance(change, ChangePlan)
    assert change.plan.actor_train.slots == (0, 1)
    assert made.handle(TransitionDone(at_seconds=2, plan=change.plan, state_version=1, pause_seconds=1)) == (
        RunStep(step=1),
    )
    assert made.handle(changed(4)) == ()
    (change,) = made.handle(StepMeasured(at_seconds=3, step=1, step_seconds=1, tokens=10))
    assert isinstance(change, ChangePlan)
    assert change.plan == FIRST


def test_a_change_that_failed_is_not_tried_again_before_the_fleet_changes() -> None:
    made = controller(DpScaling(FIRST, divisible=False))
    (change,) = made.handle(changed(3, 3))
    assert isinstance(change, ChangePlan)
    waits = made.handle(TransitionFailed(at_seconds=2, plan=change.plan, reason="out of memory"))
    assert made.state == "waiting"
    assert "failed on this fleet" in str(entries(waits)[0])
    assert isinstance(made.handle(changed(4))[0], ChangePlan)


def test_a_change_that_a_loss_ended_is_tried_again_with_those_that_are_left() -> None:
    made = controller(DpScaling(FIRST, divisible=False), slots=5)
    (change,) = made.handle(changed(3, 3, 4))
    assert isinstance(change, ChangePlan)
    assert made.handle(changed(2, 2)) == ()
    (again,) = made.handle(TransitionFailed(at_seconds=2, plan=change.plan, reason="slot 2 lost"))
    assert isinstance(again, ChangePlan)
    assert again.plan == change.plan


def test_a_slot_that_was_lost_while_a_change_went_there_is_empty_afterwards() -> None:
    made = controller(DpScaling(FIRST, divisible=False))
    assert made.handle(changed(6)) == ()
    (change,) = made.handle(StepMeasured(at_seconds=1, step=1, step_seconds=1, tokens=10))
    assert isinstance(change, ChangePlan)
    assert change.plan.actor_train.slots == (0, 1, 2, 3, 4, 5)
    assert made.handle(changed(6, 5)) == ()  # lost, and there again at once
    (again,) = made.handle(TransitionDone(at_seconds=2, plan=change.plan, state_version=1, pause_seconds=1))
    assert again == change
    assert made.situation().empty_slots == (5,)


def test_restart_commands_restarts_and_goes_on_from_the_restored_step() -> None:
    made = controller(DpScaling(FIRST, divisible=True, by_restart=True))
    made.handle(StepMeasured(at_seconds=1, step=1, step_seconds=1, tokens=10))
    (restart,) = made.handle(changed(3, 3))
    assert isinstance(restart, Restart)
    assert restart.step == 2
    assert made.handle(StateRestored(at_seconds=9, plan=restart.plan, step=1, state_version=1)) == (RunStep(step=1),)


@pytest.mark.parametrize(("name", "good"), [("nereus", True), ("dp-scaling", True), ("dp_scaling", False)])
def test_names(name: str, good: bool) -> None:
    assert (policy_problem(name) is None) == good
