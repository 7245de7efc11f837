"""The simulated world under real controllers: the same journal, losses and gains, equal runs for equal seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import ChangeConfig, PlanChange, StageConfig
from nereus.control.controller import AdaptiveController
from nereus.control.policies import DpScaling, Fixed
from nereus.controller import Controller
from nereus.fleet import uniform
from nereus.layout import first_plan
from nereus.report.summary import fold
from nereus.sim.edges import Delays
from nereus.sim.play import Moment, notices
from nereus.sim.truth import HIDDEN_TERMS, Truth
from nereus.world import drive
from tests.sim.scene import H100, Kept, job, plan_config, world

CHANGE = ChangeConfig(
    step=4,
    plan=PlanChange(actor_train=StageConfig(tp=2, pp=2, dp=4, micro_batch=4), actor_generate=StageConfig(tp=1, dp=16)),
)


def scaled(points: list[tuple[float, int]], steps: int = 8, *, by_restart: bool = False, **more) -> Kept:
    """A run of the policy dp-scaling on a fleet of nodes of 8."""
    config = job(steps=steps)
    made, kept = world(config, points, **more)
    made.keeps_processes = not by_restart
    policy = DpScaling(first_plan(config), divisible=True, by_restart=by_restart)
    controller = AdaptiveController(plan=first_plan(config), fleet=made.fleet, last_step=steps, policy=policy)

    class Checked:
        def handle(self, event):
            commands = controller.handle(event)
            controller.check()
            return commands

    drive(Checked(), made)
    return kept


def test_a_scripted_change_runs_through_its_graph_and_the_summary_reads_it() -> None:
    config = job(changes=(CHANGE,))
    made, kept = world(config, [(0, 2)], renumbered=True)
    drive(Controller(config), made)
    kinds = [event["kind"] for event in kept.events]
    assert kinds[:2] == ["run_started", "state"]
    assert kinds[-1] == "run_stopped"
    (done,) = kept.kinds("transition_done")
    assert done["planned_bytes"] == done["counted_bytes"] > 0
    assert done["pause_seconds"] > 0
    assert kinds.index("commit") < kinds.index("transition_done")
    assert [row["plan/tp"] for row in kept.rows] == [4, 4, 4, 2, 2, 2]
    carried = kept.rows[2]
    phases = [value for name, value in carried.items() if name.startswith("timing_s/") and name != "timing_s/step"]
    assert carried["timing_s/interleaved"] > 0
    assert sum(phases) - carried["timing_s/transition"] == pytest.approx(carried["timing_s/step"])
    summary = fold(kept.events, kept.rows, Path("run"))
    assert summary.outcome == "done"
    assert summary.steps == summary.planned_steps == 6
    assert summary.transitions[0].pause_seconds == pytest.approx(done["pause_seconds"])
    assert 0 < summary.transition_fraction < 0.2


def test_a_loss_without_notice_goes_back_to_the_checkpoint() -> None:
    config = job(budget_bytes=400 << 30)
    made, kept = world(config, [(0, 2), (60, 1)], renumbered=True)
    drive(Controller(config), made)
    (lost,), (recovered,) = kept.kinds("slots_lost"), kept.kinds("recovered")
    assert len(lost["lost"]) == 8
    assert recovered["next_step"] == 3  # steps 1 and 2 are saved, 3 was done, the sharded optimizer of half is gone
    assert [row["training/global_step"] for row in kept.rows] == [1, 2, 3, 3, 4, 5, 6]
    assert kept.rows[-1]["plan/dp"] == 2


def test_dp_follows_the_fleet() -> None:
    kept = scaled([(0, 2), (40, 1), (300, 4)], delays=Delays(notice_seconds=0))
    assert {row["plan/dp"] for row in kept.rows} == {4, 2, 8}
    assert kept.rows[-1]["training/global_step"] == 8
    assert kept.kinds("run_stopped")[0]["reason"] == "done"


def test_a_notice_saves_the_state_live() -> None:
    told = scaled([(0, 2), (300, 1)], steps=18, delays=Delays(notice_seconds=240.0))
    untold = scaled([(0, 2), (300, 1)], steps=18)
    assert told.kinds("preemption_notice")
    assert all("restored_step" not in done for done in told.kinds("transition_done"))
    assert any("restored_step" in done for done in untold.kinds("transition_done"))
    steps = [row["training/global_step"] for row in told.rows]
    assert steps == sorted(set(steps))  # nothing is done twice
    assert told.events[-1]["at_seconds"] < untold.events[-1]["at_seconds"]


def test_an_urgent_change_has_committed_when_the_slots_leave() -> None:
    """What is lost after the commit ends nothing: the engines of generation are built on, and no step is done again."""
    for loss in (264.0, 300.0):
        kept = scaled([(0, 2), (loss, 1)], steps=18, delays=Delays(notice_seconds=60.0))
        (commit,), (done,) = kept.kinds("commit"), kept.kinds("transition_done")
        assert kept.kinds("transition_started")[-1]["at_seconds"] < commit["at_seconds"] < loss < done["at_seconds"]
        assert commit["at_seconds"] < done["at_seconds"] - 40.0  # an engine's cold start
        assert "restored_step" not in done
        steps = [row["training/global_step"] for row in kept.rows]
        assert steps == sorted(set(steps))


def test_a_restart_costs_more_than_a_live_change() -> None:
    live = scaled([(0, 2), (40, 4)], steps=8)
    stopped = scaled([(0, 2), (40, 4)], steps=8, by_restart=True)
    pauses = [max(done["pause_seconds"] for done in run.kinds("transition_done")) for run in (live, stopped)]
    assert pauses[0] < pauses[1]


def test_equal_seeds_give_equal_runs() -> None:
    one, same = (scaled([(0, 2), (60, 1), (300, 2)], truth=Truth(seed=4)) for _ in range(2))
    other = scaled([(0, 2), (60, 1), (300, 2)], truth=Truth(seed=5))
    assert one.events == same.events
    assert one.events != other.events


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 250), st.integers(1, 4)), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_any_fleet_ends_the_run(points: list[tuple[float, int]], by_restart: bool, noticed: bool) -> None:
    ordered = sorted([(0.0, 2), *points, (4000.0, 2)], key=lambda point: point[0])
    kept = scaled(
        ordered, steps=4, by_restart=by_restart, delays=Delays(notice_seconds=60.0 * noticed), truth=Truth(seed=9)
    )
    assert kept.rows[-1]["training/global_step"] == 4
    times = [event["at_seconds"] for event in kept.events]
    assert times == sorted(times)
    versions = [event["state_version"] for event in kept.kinds("commit", "transition_done", "step_done")]
    assert versions == sorted(versions)


def test_a_fixed_plan_waits_for_its_slots() -> None:
    config = job(steps=4)
    made, kept = world(config, [(0, 2), (40, 1), (2000, 2)])
    controller = AdaptiveController(plan=first_plan(config), fleet=made.fleet, last_step=4, policy=Fixed())
    drive(controller, made)
    assert kept.rows[-1]["training/global_step"] == 4
    assert kept.events[-1]["at_seconds"] > 2000


def test_grpo_has_no_critic_phases() -> None:
    config = job(steps=1)
    config = replace(config, algorithm=replace(config.algorithm, adv_estimator="grpo"))
    made, kept = world(config, [(0, 2)], renumbered=True)
    drive(Controller(config), made)
    assert "timing_s/update_critic" not in kept.rows[0]
    assert "timing_s/update_actor" in kept.rows[0]


def test_layouts_matter_as_one_would_think() -> None:
    """More slots are faster; tensor groups over two nodes are slower than within one."""

    def step(slots: int, order: tuple[int, ...] | None = None) -> dict[str, float]:
        plan = plan_config(4, 1, slots // 4, 2)
        plan = replace(plan, actor_train=replace(plan.actor_train, slots=order))
        config = job(slots=slots, steps=1, plan=plan)
        made, kept = world(config, [(0, slots // 8)], renumbered=True, truth=Truth(exact=True))
        drive(Controller(config), made)
        return kept.rows[0]

    small, large = step(16), step(64)
    assert large["timing_s/step"] < small["timing_s/step"]
    assert large["timing_s/update_actor"] < small["timing_s/update_actor"] / 1.5
    across = tuple(slot for pair in zip(range(8), range(8, 16), strict=True) for slot in pair)
    assert step(16, across)["timing_s/update_actor"] > 1.2 * small["timing_s/update_actor"]


def test_hidden_terms_are_told() -> None:
    assert len(HIDDEN_TERMS) >= 10
    assert all(text[0].islower() for text in HIDDEN_TERMS.values())


def test_an_overflow_is_the_last_line_whatever_the_fleet_does_later() -> None:
    config = job(steps=3)
    made, kept = world(config, [(0, 2), (5000, 1)], renumbered=True, memory_bytes=20 << 30)
    drive(Controller(config), made)
    assert kept.kinds("out_of_memory")
    assert kept.events[-1]["kind"] == "run_stopped"
    assert kept.events[-1]["reason"] == "out of memory"
    assert made.env.now < 5000


def test_every_loss_is_told_before_it_however_soon_it_follows_another() -> None:
    fleet = uniform(32, H100)

    def moment(at: float, *, lost: tuple[int, ...] = (), gained: tuple[int, ...] = ()) -> Moment:
        return Moment(at_seconds=at, fleet=fleet, lost_slots=lost, gained_slots=gained)

    moments = [moment(0), moment(50, lost=(1,)), moment(200, lost=(2, 3), gained=(8,)), moment(260, lost=(4, 8))]
    told = [(each.at_seconds, each.deadline_seconds, each.slots) for each in notices(moments, 120.0)]
    assert told == [(0, 50, (1,)), (80, 200, (2, 3)), (140, 260, (4,)), (200, 260, (8,))]


def test_losses_that_follow_each_other_quickly_are_all_told() -> None:
    kept = scaled([(0, 4), (60, 3), (75, 2)], delays=Delays(notice_seconds=40.0))
    told = [(event["at_seconds"], event["deadline_seconds"]) for event in kept.kinds("preemption_notice")]
    assert told == [(20, 60), (35, 75)]
