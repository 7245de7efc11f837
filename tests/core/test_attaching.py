"""What a driver that takes over live slots decides: what stands by the journal, and what the slots hold of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nereus.attaching import Hold, Stand, held, last_stand, one_step_more
from nereus.control.written import written
from nereus.layout import changed_plan, first_plan
from tests.core.scenes import CONFIG, TRANSITIONS

FIRST = first_plan(CONFIG)
SECOND = changed_plan(FIRST, TRANSITIONS["tp2pp2_to_pp2dp2"][1], CONFIG)
DIGESTS = {"actor.train weight": "a", "critic.train weight": "c"}
UPDATES = 2


def counters(step: int, version: int = 0) -> dict[str, Any]:
    steps = {"actor.train": step * UPDATES, "critic.train": step * UPDATES}
    return {"state_version": version, "data_position": 8 * step, "kl_coef": 0.1, "optimizer_steps": steps}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, **fields}


def done(step: int, version: int = 0) -> dict[str, Any]:
    return event("step_done", step=step, **counters(step, version))


STARTED = event("run_started")
BUILT = event("state", step=0, plan=written(FIRST), digests=DIGESTS, **counters(0))
BEGUN = event("transition_started", transition="t1", step=2)
COMMIT = event("commit", plan=written(SECOND), digests={"actor.train weight": "a2"}, **counters(1, 1))
CHANGED = event("transition_done", transition="t1", step=2)
UNDONE = event("transition_failed", transition="t1", step=2)
LOST = event("slots_lost", lost=[1])
MENDING = event("recovering", lost=[1])
BACK = event("recovered", next_step=2, plan=written(FIRST), digests=DIGESTS, **counters(1))
SAVED = event("checkpoint_saved", step=1, digests={"actor.train weight": "a1"}, state_version=0)
RESUMED, ATTACHED = event("resumed", step=1, attached=False), event("resumed", step=1, attached=True)
ENDED = event("run_stopped", reason="failed")  # of a driver that could not reach the slots
WHOLE = [STARTED, BUILT, done(1)]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], "too little"),
        ([STARTED], "before the first state"),
        ([STARTED, event("state", state_version=0, digests={}), done(1)], "before the first state"),
        ([*WHOLE, RESUMED], "before the checkpoint was on the slots"),
        ([*WHOLE, LOST, MENDING], "recovered"),
        ([*WHOLE, ATTACHED, MENDING], "recovered"),
    ],
)
def test_nothing_stands(events: list[dict[str, Any]], why: str) -> None:
    found = last_stand(events)
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize(
    ("events", "step", "version", "plan", "change", "committed"),
    [
        ([STARTED, BUILT], 0, 0, FIRST, None, False),
        (WHOLE, 1, 0, FIRST, None, False),
        ([*WHOLE, BEGUN], 1, 0, FIRST, BEGUN, False),
        ([STARTED, BUILT, BEGUN, done(1)], 1, 0, FIRST, BEGUN, False),
        ([*WHOLE, BEGUN, COMMIT], 1, 1, SECOND, BEGUN, True),
        ([*WHOLE, BEGUN, COMMIT, CHANGED], 1, 1, SECOND, None, False),
        ([*WHOLE, BEGUN, COMMIT, CHANGED, done(2, 1)], 2, 1, SECOND, None, False),
        ([*WHOLE, BEGUN, UNDONE], 1, 0, FIRST, None, False),
        ([*WHOLE, LOST], 1, 0, FIRST, None, False),
        ([*WHOLE, BEGUN, LOST], 1, 0, FIRST, BEGUN, False),
        ([*WHOLE, BEGUN, LOST, MENDING, BACK], 1, 0, FIRST, None, False),
        ([*WHOLE, ATTACHED, ENDED], 1, 0, FIRST, None, False),
        ([STARTED, BUILT, RESUMED, BUILT], 0, 0, FIRST, None, False),
    ],
)
def test_what_stands(
    events: list[dict[str, Any]], step: int, version: int, plan: object, change: object, committed: bool
) -> None:
    found = last_stand(events)
    assert isinstance(found, Stand), found
    assert (found.step, found.state_version, found.plan) == (step, version, plan)
    assert (found.change, found.committed) == (change, committed)
    assert (found.data_position, found.optimizer_steps) == (8 * step, counters(step)["optimizer_steps"])


def known(*events: dict[str, Any]) -> Stand:
    found = last_stand(events)
    assert isinstance(found, Stand), found
    return found


def test_digests_are_of_this_very_state() -> None:
    assert known(STARTED, BUILT).digests == DIGESTS
    assert known(*WHOLE).digests == {}
    assert known(*WHOLE, SAVED).digests == {"actor.train weight": "a1"}
    assert known(*WHOLE, SAVED, done(2)).digests == {}
    assert known(STARTED, BUILT, BEGUN, COMMIT).digests == {"actor.train weight": "a2", "critic.train weight": "c"}
    assert known(*WHOLE, BEGUN, COMMIT, SAVED).digests == {"actor.train weight": "a2"}, (
        "a checkpoint of another version"
    )


def test_a_change_that_is_behind_stays_behind() -> None:
    before, after = [*WHOLE, BEGUN], [*WHOLE, BEGUN, COMMIT]
    assert known(*before).changed_step == 0
    assert known(*after).changed_step == known(*after, CHANGED, done(2, 1)).changed_step == 2
    assert known(*after, CHANGED, MENDING, BACK).changed_step == 2
    assert known(*after, CHANGED, RESUMED, BUILT).changed_step == 0, "a checkpoint from before it"


def slot(actor: int | None, critic: int | None = None, *, torn: bool = False) -> Hold:
    steps = {"actor.train": actor, "critic.train": critic, "reference.infer": 0}
    return Hold(optimizer_steps={emu: n for emu, n in steps.items() if n is not None}, torn=torn)


STAND = known(*WHOLE)  # two optimizer steps each


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        ([slot(2, 2), slot(2, 2)], "whole"),
        ([slot(2), slot(None, 2)], "whole"),
        ([slot(2, 2), slot(-1, 2)], "whole"),
        ([slot(2, 2), slot(2, 2, torn=True)], "torn"),
        ([slot(3, 3), slot(3, 3)], "torn"),
        ([slot(2, 3), slot(2, 3)], "torn"),
        ([slot(4, 4), slot(2, 4)], "torn"),
        ([slot(3, 4), slot(3, 4)], "torn"),
        ([slot(4, 4), slot(4, 4)], "step done"),
        ([slot(4), slot(None, 4)], "step done"),
        ([slot(4, 4), slot(4, 4, torn=True)], "torn"),
        ([slot(1, 1)], "torn"),
        ([], "whole"),
    ],
)
def test_what_the_slots_hold(holds: list[Hold], expected: str) -> None:
    assert held(STAND, holds, UPDATES) == expected
    after_a_commit = replace(STAND, change=BEGUN, committed=True)
    assert held(after_a_commit, holds, UPDATES) == ("torn" if expected == "step done" else expected)


def test_one_step_more() -> None:
    more = one_step_more(STAND, UPDATES, 8)
    after = known(*WHOLE, done(2))
    assert more == after
