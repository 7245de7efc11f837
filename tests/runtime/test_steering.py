"""Controller, edge and journal together over a world without processes; replay and explanation of what they wrote."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.cli.load import dump_config
from nereus.cli.main import main
from nereus.config import DataConfig, PlanConfig, PlansConfig, StageConfig
from nereus.control import proposals
from nereus.control.controller import AdaptiveController
from nereus.control.records import plan_slots
from nereus.control.written import written
from nereus.errors import JournalError
from nereus.events import ChangePlan, Finish, Recover, RunStep
from nereus.layout import STAGES, first_plan
from nereus.report.explain import explained, render
from nereus.report.replay import first_difference, made_again, recorded
from nereus.runtime.fleet_schedule import Relaunch, SlotsArrived, SlotsLeaving, Suspend
from nereus.runtime.searches import Seek
from nereus.runtime.steering import Steering
from tests.runtime.toy_world import ToyWorld, job, run, told

PRICED = [("nereus", 4.0, False), ("nereus", 0.0, True), ("dp-scaling", 4.0, True)]
Usual = tuple[ToyWorld, Steering, list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Usual:
    """A run that nothing disturbs, with its journal: not to be changed."""
    world, events = ToyWorld(job()), tmp_path_factory.mktemp("usual") / "events.jsonl"
    return world, *run(world, events), events


def test_the_poor_layout_is_left_for_a_better_one_and_replay_decides_alike(usual: Usual) -> None:
    world, steering, records, _ = usual
    assert [step for step, _ in world.ran] == list(range(1, 17))
    assert steering.controller is not None
    assert steering.controller.transitions_count >= 1
    outlook = steering.controller.policy.outlook  # type: ignore[attr-defined]
    first, last = first_plan(world.config).plan_id, world.ran[-1][1]
    assert outlook.step(last).mean_seconds < outlook.step(first).mean_seconds
    assert first_difference(records) is None
    bare = [record for record in records if record["kind"] not in ("commanded", "decision")]
    again = [(made.kind, made.content) for made in made_again(bare)]
    assert again == [(made.kind, made.content) for made in recorded(records)]
    assert any(kind == "decision" for kind, _ in again)


def test_a_changed_event_gives_another_decision(usual: Usual) -> None:
    _, _, records, _ = usual
    slow = [event for event in records if event["kind"] == "told"][2]["event"]
    seconds = {phase: 3.0 * value for phase, value in slow["phase_seconds"].items()}
    other = told(records, 2, step_seconds=3.0 * slow["step_seconds"], phase_seconds=seconds)
    difference = first_difference(other)
    assert difference is not None
    assert difference.recorded != difference.again


def test_a_decision_that_was_tampered_with_is_found_and_told_with_exit_code_1(
    usual: Usual, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, _, _, events = usual
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(events, folder)
    (folder / "config.yaml").write_text(dump_config(world.config))
    assert main(["replay", str(folder)]) == 0
    assert "made again: equal" in capsys.readouterr().out
    assert main(["explain", str(folder)]) == 0
    assert "before step" in capsys.readouterr().out
    text = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(text.replace('"is":"RunStep","step":9', '"is":"RunStep","step":8'))
    assert main(["replay", str(folder)]) == 1
    assert "a decision is another" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["nereus", "dp-scaling"])
def test_a_lost_slot_is_told_by_its_first_number_and_the_pool_by_its_own(tmp_path: Path, policy: str) -> None:
    wide = PlanConfig(**{name: StageConfig(dp=4) for name in STAGES})
    world = ToyWorld(replace(job(policy, divisible=False), plan=wide), losses={5: (1,), 9: (1,)})
    steering, records = run(world, tmp_path / "events.jsonl")
    assert steering.ids == (0, 3)  # the pool's slot 1 was slot 1 first, then slot 2
    recoveries = [order for order in world.orders if isinstance(order, Recover)]
    assert [order.lost_slots for order in recoveries] == [(1,), (1,)]
    assert [max(plan_slots(order.plan)) < 4 - count for count, order in enumerate(recoveries, 1)] == [True, True]
    assert steering.controller is not None
    assert plan_slots(steering.controller.plan) <= {0, 3}
    assert sorted({step for step, _ in world.ran}) == list(range(1, 17))
    assert first_difference(records) is None


def test_steps_are_done_again_when_a_step_was_half_done(tmp_path: Path) -> None:
    world = ToyWorld(job(), losses={6: (2,)}, half_done=True, back_steps=3)
    steering, records = run(world, tmp_path / "events.jsonl")
    assert [step for step, _ in world.ran] == [1, 2, 3, 4, 5, 3, *range(4, 17)]
    assert steering.ids == (0, 1, 3)
    assert first_difference(records) is None


def test_a_slot_that_no_stage_used_costs_a_new_world_and_the_step_again(tmp_path: Path) -> None:
    config = job("fixed")
    narrow = PlanConfig(**{name: StageConfig(dp=2, slots=(0, 3)) for name in STAGES})
    world = ToyWorld(replace(config, plan=narrow), losses={4: (1,)})
    steering, records = run(world, tmp_path / "events.jsonl")
    assert [order.lost_slots for order in world.orders if isinstance(order, Recover)] == [(1,)]
    assert plan_slots(world.plan) == {0, 2}  # the pool's numbers
    assert steering.controller is not None
    assert plan_slots(steering.controller.plan) == {0, 3}
    assert sum(order == RunStep(step=4) for order in world.orders) == 2
    assert [step for step, _ in world.ran] == list(range(1, 17))
    assert first_difference(records) is None


@pytest.mark.parametrize(("policy", "reform_seconds", "joins"), PRICED)
def test_a_slot_leaves_with_its_state_moved_off_first_and_comes_back_where_that_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, reform_seconds: float, joins: bool
) -> None:
    """A slot that is back waits until a plan wants it: one new world then, and none where it costs more than it saves."""
    monkeypatch.setattr(proposals, "REFORM_SECONDS", reform_seconds)
    wide = PlanConfig(**{name: StageConfig(dp=4) for name in STAGES})
    news = {5: SlotsLeaving(at_seconds=0.0, slots=(3,)), 9: SlotsArrived(at_seconds=0.0, slots=1)}
    world = ToyWorld(replace(job(policy, divisible=False), plan=wide), fleet=news)
    steering, records = run(world, tmp_path / "events.jsonl")
    kinds = [type(order) for order in world.orders if not isinstance(order, Seek)]
    leave = kinds.index(Recover)
    assert kinds[leave - 1] is ChangePlan  # off the slot, as a change from a state that is whole
    assert [order.lost_slots for order in world.orders if isinstance(order, Recover)] == [(3,), *[()] * joins]
    assert (steering.ids, steering.waiting_slots) == (((0, 1, 2, 3), ()) if joins else ((0, 1, 2), (3,)))
    assert [step for step, _ in world.ran] == list(range(1, 17))
    assert steering.controller is not None
    assert set(steering.controller.fleet.slots) == {0, 1, 2, 3}
    assert not any(record["kind"] == "told" and record["event"]["is"] == "StateRestored" for record in records)
    if policy == "dp-scaling":
        assert steering.controller.plan == first_plan(world.config)
    assert first_difference(records) is None


def test_a_slot_that_no_plan_has_taken_goes_as_it_came(tmp_path: Path) -> None:
    news = {9: SlotsArrived(at_seconds=0.0, slots=1), 12: SlotsArrived(at_seconds=0.0, slots=0)}
    world = ToyWorld(job("nereus", divisible=False), fleet=news)
    steering, records = run(world, tmp_path / "events.jsonl")
    assert (steering.ids, steering.waiting_slots) == ((0, 1, 2, 3), ())
    assert steering.controller is not None
    assert set(steering.controller.fleet.slots) == {0, 1, 2, 3}
    assert not any(isinstance(order, Recover) for order in world.orders)
    fleets = [
        record["event"] for record in records if record["kind"] == "told" and record["event"]["is"] == "FleetChanged"
    ]
    assert [event["lost_slots"] for event in fleets] == [[], [4]]
    assert first_difference(records) is None


def test_where_a_live_change_would_come_too_late_the_state_is_saved_and_the_processes_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdaptiveController, "_too_late", lambda self, _: "too late" if self._leaving else "")
    wide = PlanConfig(**{name: StageConfig(dp=4) for name in STAGES})
    news = {5: SlotsLeaving(at_seconds=0.0, slots=(3,)), 9: SlotsArrived(at_seconds=0.0, slots=1)}
    world = ToyWorld(replace(job("nereus", divisible=False), plan=wide), fleet=news)
    steering, records = run(world, tmp_path / "events.jsonl")
    kinds = [order for order in world.orders if isinstance(order, Recover | Relaunch)]
    assert [(order.lost_slots, order.saved) for order in kinds if isinstance(order, Recover)] == [((3,), True)]
    assert len(kinds) == 1
    assert (steering.ids, steering.waiting_slots) == ((0, 1, 2), (3,))
    assert [step for step, _ in world.ran] == list(range(1, 17))
    assert first_difference(records) is None


def test_the_policy_restart_takes_all_processes_anew_at_each_change_of_the_fleet(tmp_path: Path) -> None:
    wide = PlanConfig(**{name: StageConfig(dp=4) for name in STAGES})
    news = {5: SlotsLeaving(at_seconds=0.0, slots=(3,)), 9: SlotsArrived(at_seconds=0.0, slots=1)}
    config = replace(job("restart", divisible=False), plan=wide)
    world = ToyWorld(config, fleet=news, losses={12: (2,)})
    steering, records = run(world, tmp_path / "events.jsonl")
    orders = [order for order in world.orders if not isinstance(order, RunStep | Finish)]
    assert [(order.slots, order.torn) for order in orders if isinstance(order, Relaunch)] == [
        (3, False),
        (4, False),
        (3, True),
    ]
    assert len(orders) == 3
    assert steering.ids == (0, 1, 3)
    assert [step for step, _ in world.ran] == list(range(1, 17))
    assert first_difference(records) is None


@pytest.mark.parametrize("policy", ["fixed", "dp-scaling", "restart"])
def test_a_policy_without_a_plan_for_the_slots_that_stay_waits_and_goes_on_as_it_was(
    tmp_path: Path, policy: str
) -> None:
    """TP2·PP2 needs four slots: the job stands still before step 5 and loses nothing."""
    deep = PlanConfig(**{**dict.fromkeys(STAGES, StageConfig(tp=2, pp=2)), "actor_generate": StageConfig(tp=2, dp=2)})
    world = ToyWorld(replace(job(policy), plan=deep), fleet={5: SlotsLeaving(at_seconds=0.0, slots=(3,))})
    steering, records = run(world, tmp_path / "events.jsonl")
    assert [order for order in world.orders if not isinstance(order, RunStep)] == [
        Suspend(step=5),
        Finish(reason="done"),
    ]
    assert [step for step, _ in world.ran] == list(range(1, 17))
    assert steering.controller is not None
    assert steering.controller.transitions_count == 0
    assert first_difference(records) is None


def test_a_slow_slot_gets_less_or_nothing_to_do_and_its_full_part_when_it_has_recovered(tmp_path: Path) -> None:
    wide = PlanConfig(**{name: StageConfig(dp=4, micro_batch=1) for name in STAGES})
    config = replace(job(steps=60), plan=wide, data=DataConfig(prompts_per_step=24))
    world = ToyWorld(config, slow={12: ((1, 0.4),), 36: ()})
    _, records = run(world, tmp_path / "events.jsonl")
    plans = {each["plan_id"]: each["plan"] for each in _candidates(records)} | {
        first_plan(config).plan_id: written(first_plan(config))
    }
    ran = {step: plans[plan_id] for step, plan_id in world.ran}

    def part(step: int) -> float:
        """Slot 1's part of the actor's training."""
        stage = ran[step]["actor_train"]
        shares = dict(zip(stage["slots"], stage["shares"], strict=True)) if stage["layout"]["tp"] == 1 else {}
        return shares.get(1, 0.0) / sum(stage["shares"])

    assert part(11) == pytest.approx(0.25)
    assert part(24) < 0.17
    assert part(60) == pytest.approx(0.25)
    reasons = [each["command"]["request"]["reason"] for each in records if _is_search(each)]
    assert "slot 1 computes at 0.40 of the usual speed" in reasons
    assert "slot 1 is as fast as the others again" in reasons
    assert first_difference(records) is None


def _candidates(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answers = [each["event"] for each in records if each["kind"] == "told" and each["event"]["is"] == "SearchDone"]
    return [candidate for answer in answers for candidate in answer["candidates"]]


def _is_search(record: dict[str, Any]) -> bool:
    return record["kind"] == "commanded" and record["command"]["is"] == "Search"


def test_a_change_that_fails_is_not_tried_again_and_the_run_ends(tmp_path: Path) -> None:
    world = ToyWorld(job(), refused=1)
    steering, records = run(world, tmp_path / "events.jsonl")
    tried = [order.plan.plan_id for order in world.orders if isinstance(order, ChangePlan)]
    assert len(tried) == len(set(tried))
    assert sum(isinstance(order, RunStep) for order in world.orders) == 16
    assert first_difference(records) is None
    assert steering.controller is not None


def test_dry_run_writes_decisions_and_changes_nothing(tmp_path: Path) -> None:
    world = ToyWorld(job(dry_run=True))
    _, records = run(world, tmp_path / "events.jsonl")
    assert not any(isinstance(order, ChangePlan) for order in world.orders)
    text = render(explained(records))
    assert "dry run" in text


def test_denied_layouts_are_no_candidates(tmp_path: Path) -> None:
    world = ToyWorld(job(plans=PlansConfig(allow=("actor_train TP2*",), deny=("critic_train *DP1",))))
    _, records = run(world, tmp_path / "events.jsonl")
    found = explained(records)
    assert len(found.plans) > 1
    assert {plan.actor_train.layout.tp for plan in found.plans.values()} == {2}
    assert all(plan.critic_train.layout.dp > 1 for plan in found.plans.values())


def test_a_run_with_a_script_has_nothing_to_replay() -> None:
    with pytest.raises(JournalError, match="script"):
        made_again([])


def test_a_stop_before_the_job_is_ready_ends_it_once_it_is(tmp_path: Path) -> None:
    world = ToyWorld(job(), stopped=True)
    _, records = run(world, tmp_path / "events.jsonl")
    assert world.orders == [Finish(reason="stopped")]
    assert first_difference(records) is None
