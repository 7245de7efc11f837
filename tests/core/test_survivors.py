"""Plans for the slots that are left after a loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import FleetConfig
from nereus.errors import InfeasiblePlan
from nereus.layout import first_plan
from nereus.survivors import renumbering, surviving_plan
from tests.core.scenes import CONFIG

PLAN = first_plan(CONFIG)


@settings(deadline=None)
@given(st.sets(st.integers(0, 3), min_size=1, max_size=3))
def test_any_loss_leaves_a_plan_on_the_slots_that_are_left(lost: set[int]) -> None:
    left, plan = surviving_plan(CONFIG, PLAN, lost)
    assert left.fleet.slots == 4 - len(lost)
    for name, stage in plan.stages():
        assert set(stage.slots) <= set(range(left.fleet.slots)), name
        assert len(set(stage.slots)) == stage.layout.ranks == len(stage.slots)
        assert len(stage.shares) == stage.layout.dp
        before = getattr(PLAN, name)
        if not set(before.slots) & lost:
            numbers = renumbering(4, lost)
            assert stage == replace(before, slots=tuple(numbers[slot] for slot in before.slots)), "it stays"
    assert surviving_plan(CONFIG, PLAN, lost) == (left, plan)


def test_numbers_stay_in_order() -> None:
    assert renumbering(4, [1]) == {0: 0, 2: 1, 3: 2}
    assert renumbering(2, []) == {0: 0, 1: 1}


def test_what_does_not_fit_on_fewer_slots_is_refused() -> None:
    tight = replace(CONFIG, fleet=FleetConfig(slots=4, slot_budget_bytes=150_000_000))
    surviving_plan(tight, PLAN, ())
    with pytest.raises(InfeasiblePlan, match=r"fleet\.slots = 1.*a plan for 1 slots: slot 0 would need"):
        surviving_plan(tight, PLAN, (0, 1, 2))


def test_a_loss_of_all_slots_leaves_nothing() -> None:
    with pytest.raises(InfeasiblePlan, match="at least one slot"):
        surviving_plan(CONFIG, PLAN, range(4))
