"""Errors cross process borders whole, and hang on one tree."""

from __future__ import annotations

import pickle

import pytest

from nereus import errors
from nereus.errors import ConfigError, InfeasiblePlan, NereusError, PlanOutgrown, SlotOutOfMemory
from nereus.transitions.order import Infeasible

WITH_MORE = (ConfigError, PlanOutgrown, SlotOutOfMemory, Infeasible)
MADE = [
    ConfigError("plan.actor_train.tp", 3, "expected a divisor of model.heads = 8"),
    InfeasiblePlan("plan", "TP1", "slot 0 needs 5 bytes in update_actor"),
    SlotOutOfMemory(2, "update_actor", "grads", 1_000_000, 10),
    PlanOutgrown(9, "TP1", 32, 0, "20 bytes in update_actor", 10),
    Infeasible(1, "target", 10, 5, ("too large",), ((1, 5),)),
    *(kind("what and where") for kind in NereusError.__subclasses__() if kind not in WITH_MORE),
]


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: NereusError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert getattr(again, "key", None) == getattr(error, "key", None)


def test_every_error_hangs_on_the_tree_and_in_its_picture() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    assert all(issubclass(kind, NereusError) for kind in kinds)
    assert all(kind.__name__ in (errors.__doc__ or "") for kind in kinds)


def test_messages_say_what_where_and_what_next() -> None:
    assert str(MADE[0]) == "plan.actor_train.tp = 3: expected a divisor of model.heads = 8"
    text = str(MADE[2])
    for word in ("slot 2", "update_actor", "grads", "1,000,000", "10 are left", "fleet.slot_budget_bytes"):
        assert word in text
