"""What `nereus status` says of a run: under way, changing, hit, ended, broken off."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from nereus.config import Config, RunConfig
from nereus.errors import JournalError
from nereus.report.status import render, status_of

BEFORE, AFTER = "train TP2", "train DP2"


@pytest.fixture(scope="module")
def journal() -> list[dict[str, Any]]:
    """What the real world writes in eight steps with one change before the fifth."""
    steps = [step(number) for number in range(1, 9)]
    saving = {"saving_seconds": 0.5, "saving_deviation_seconds": 0.1, "horizon_steps": 3.0}
    chosen = {"plan_id": "ab12", "price_seconds": 2.0, "price_deviation_seconds": 0.25, **saving}
    admission = {"is": "Admitted", "chosen": chosen, "promised": True}
    decided = {"is": "Decision", "step": 4, "dry": False, "plan_id": "cd34", "weighed": [], "admission": admission}
    change = {"step": 5, "from": BEFORE, "to": AFTER}
    records = [
        {"kind": "run_started", "config": asdict(Config(run=RunConfig(name="run", steps=8)))},
        *steps[:4],
        {"kind": "decision", "entry": decided},
        {"kind": "transition_started", "reason": "saves 0.5 s", **change},
        {"kind": "transition_done", "state_version": 1, "pause_seconds": 0.5, **change},
        *steps[4:],
        {"kind": "checkpoint_saved", "step": 8},
        {"kind": "run_stopped", "reason": "done"},
    ]
    return [{**record, "at_seconds": 100.0 + number} for number, record in enumerate(records)]


def step(number: int) -> dict[str, Any]:
    metrics = {"timing_s/step": 1.0 + number / 8, "timing_s/gen": 0.25, "perf/ledger_bytes/slot_1": 2.0**20}
    return {"kind": "step_done", "step": number, "state_version": int(number > 4), "metrics": metrics}


def cut(journal: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The journal up to its first event of a kind."""
    index = next(i for i, record in enumerate(journal) if record["kind"] == kind)
    return journal[: index + 1]


def test_a_run_under_way_tells_its_pace_and_its_last_decision(journal: list[dict[str, Any]]) -> None:
    done = [i for i, record in enumerate(journal) if record["kind"] == "step_done"]
    status = status_of(journal[: done[5] + 1], writing=True)
    assert (status.step, status.state) == (6, "under way")
    seconds = [journal[i]["metrics"]["timing_s/step"] for i in done[:6]]
    assert status.recent_seconds == pytest.approx(sum(seconds) / 6)
    assert status.left_seconds == pytest.approx((status.steps - 6) * sum(seconds) / 6)
    text = render(status, status.last_at_seconds + 3)
    assert f"6 of {status.steps}" in text
    assert "step_done, 3 s ago" in text
    assert "fullest slot 1: 1 MiB" in text


def test_a_change_is_pending_until_it_is_done(journal: list[dict[str, Any]]) -> None:
    begun = status_of(cut(journal, "transition_started"), writing=True)
    assert begun.pending
    assert "change       pending before step" in render(begun, begun.last_at_seconds)
    ended = cut(journal, "transition_done")
    over = status_of(ended, writing=True)
    assert not over.pending
    assert over.plan == ended[-1]["to"]
    assert over.last_decision == (
        "before step 4: change plan ab12; saves 0.500 ± 0.100 s a step for 2.00 ± 0.25 s, over 3 expected steps"
    )


def test_the_end_and_a_process_that_is_gone(journal: list[dict[str, Any]]) -> None:
    ended = status_of(journal, writing=False)
    assert (ended.state, ended.step, ended.checkpoint_step, ended.state_version) == ("ended: done", 8, 8, 1)
    halfway = cut(journal, "step_done")
    assert status_of(halfway, writing=False).state == "broken off: its process is gone"
    assert "left" not in render(status_of(halfway, writing=False), 0.0)
    failed = [*halfway, {**halfway[-1], "kind": "run_stopped", "reason": "failed", "error": "slot 1 died\nand more"}]
    assert status_of(failed, writing=False).state == "ended: failed (slot 1 died)"


def test_a_loss_and_how_it_went_on(journal: list[dict[str, Any]]) -> None:
    last = cut(journal, "step_done")
    at = last[-1]["at_seconds"]
    lost = {"kind": "slots_lost", "at_seconds": at, "lost": [2], "reason": "slot 2 died\nwords"}
    back = {
        "kind": "recovered",
        "at_seconds": at,
        "slots": 3,
        "plan_text": "the other plan",
        "state_version": 4,
        "next_step": 2,
        "sources": {"actor.train": "slots", "critic.train": "slots"},
    }
    status = status_of([*last, lost, back], writing=True)
    assert (status.slots, status.plan, status.state_version, status.step) == (3, "the other plan", 4, 1)
    assert status.last_loss == "after step 1, slots 2: slot 2 died; went on with step 2 from slots"
    assert status.as_json(at + 1)["last_event_seconds_ago"] == 1


def test_a_journal_without_a_run() -> None:
    with pytest.raises(JournalError, match="has not begun"):
        status_of([], writing=False)


def test_a_slow_slot_is_named_until_it_has_recovered(journal: list[dict[str, Any]]) -> None:
    last = cut(journal, "step_done")
    slow = {"kind": "told", "at_seconds": 1.0, "event": {"is": "StepObserved", "profile": {"slow": [[3, 0.46]]}}}
    same = {"kind": "told", "at_seconds": 1.0, "event": {"is": "StepObserved", "profile": None}}
    again = {"kind": "told", "at_seconds": 1.0, "event": {"is": "StepObserved", "profile": {"slow": []}}}
    said = status_of([*last, slow, same], writing=True)
    assert "slow slots   slot 3 at 0.46 of the usual speed" in render(said, 2.0)
    assert said.as_json(2.0)["slow_slots"] == {"3": 0.46}
    assert "slow slots" not in render(status_of([*last, slow, again], writing=True), 2.0)


def test_live_slots_that_were_taken_over(journal: list[dict[str, Any]]) -> None:
    broken_off = [*cut(journal, "transition_started")]
    resumed = {**broken_off[0], "kind": "resumed", "step": 4}
    attached = {
        "kind": "reattached",
        "at_seconds": 200.0,
        "plan_text": "the other plan",
        "slots": 3,
        "lost": [1],
        "state_version": 1,
        "next_step": 5,
        "sources": {"actor.train": "slots", "critic.train": "slots"},
    }
    status = status_of([*broken_off, resumed, attached], writing=True)
    assert (status.step, status.slots, status.plan, status.state_version) == (4, 3, "the other plan", 1)
    assert status.pending == ""
    told = "after step 4: a new driver took over 3 live slots, slots 1 lost, from slots"
    assert told in render(status, 201.0)
    assert status.as_json(201.0)["attached"] == told
