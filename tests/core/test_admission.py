"""Admission: the rule's parts, its competitive bound on random spells, and that each number can change the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.control.admission import (
    Admitted,
    Caution,
    Forced,
    Known,
    Rejected,
    Weighed,
    admit,
    force,
    nearest,
    weigh,
)
from nereus.control.horizon import Horizon
from nereus.control.probation import Offsets
from nereus.control.records import Misfit, Switches
from tests.core.control_scenes import TableOutlook, plan_kind, plan_on, shown

OLD, NEW = plan_on((0, 1, 2, 3), tp=2, pp=2), plan_on((0, 1, 2, 3))
SURE = Caution(caution_ratio=1.0, trust_share=0.5)


def known(outlook: TableOutlook, expected: float = 50.0, remaining: int = 100, novelty: float = 0.0) -> Known:
    horizon = Horizon(expected_steps=expected, remaining_steps=remaining, seen_count=0, seen_steps=0)
    offsets = Offsets(novelty_share=novelty).first(plan_kind(OLD))
    return Known(
        outlook=outlook,
        offsets=offsets,
        present_id=OLD.plan_id,
        present_kind=plan_kind(OLD),
        present_seconds=outlook.step(OLD.plan_id).mean_seconds,
        horizon=horizon,
        caution=SURE,
        step=1,
    )


def table(old: float, new: float, **more: object) -> TableOutlook:
    return TableOutlook({OLD.plan_id: old, NEW.plan_id: new}, **more)  # pyright: ignore[reportArgumentType]


def test_gain_is_horizon_times_saving_less_price_with_the_joint_deviation() -> None:
    found = weigh(shown(NEW, 20.0, 3.0), known(table(10.0, 8.0, joint_share=0.1), novelty=0.05))
    assert found.saving_seconds == pytest.approx(2.0)
    assert found.saving_deviation_seconds == pytest.approx((0.2**2 + (0.05 * 8) ** 2) ** 0.5)  # not of 10 and of 8
    assert found.gain_seconds == pytest.approx(50 * 2 - 20)
    assert found.gain_deviation_seconds == pytest.approx(((50 * found.saving_deviation_seconds) ** 2 + 9) ** 0.5)
    assert found.least_gain_seconds == pytest.approx(found.gain_seconds - found.gain_deviation_seconds)


def test_a_plan_that_soon_stops_fitting_has_so_long_a_horizon() -> None:
    misfit = Misfit(within_steps=7, reason="kv cache")
    found = weigh(shown(NEW, 20.0), known(table(10.0, 8.0, misfits={NEW.plan_id: misfit})))
    assert (found.horizon_steps, found.gain_seconds) == (7, pytest.approx(7 * 2 - 20))


@pytest.mark.parametrize(
    ("outlook", "novelty", "price_seconds", "expected", "remaining", "regret", "reason"),
    [
        (table(10.0, 8.0), 0.05, 20.0, 50.0, 100, 9.9, "regret"),
        (table(10.0, 9.7), 0.05, 1.0, 50.0, 100, 1e9, "saving"),
        (table(10.0, 8.0, joint_share=1.1), 0.0, 1.0, 50.0, 100, 1e9, "saving"),
        (table(10.0, 8.0), 0.05, 20.0, 12.0, 12, 1e9, "price"),
        (table(10.0, 8.0), 0.05, 20.0, 3.0, 100, 39.9, "regret"),  # not promised: until price / trust
    ],
)
def test_each_number_can_reject(
    outlook: TableOutlook,
    novelty: float,
    price_seconds: float,
    expected: float,
    remaining: int,
    regret: float,
    reason: str,
) -> None:
    found = admit(weigh(shown(NEW, price_seconds), known(outlook, expected, remaining, novelty)), regret, SURE)
    assert isinstance(found, Rejected)
    assert found.reason == reason
    assert found.best is not None


@pytest.mark.parametrize(("expected", "regret", "promised"), [(50.0, 10.0, True), (3.0, 40.0, False)])
def test_enough_regret_admits(expected: float, regret: float, promised: bool) -> None:
    found = admit(weigh(shown(NEW, 20.0), known(table(10.0, 8.0), expected)), regret, SURE)
    assert isinstance(found, Admitted)
    assert (found.promised, found.threshold_seconds) == (promised, regret)


def test_nothing_to_go_to_is_a_rejection() -> None:
    assert admit(None, 1e9, SURE) == Rejected(reason="no candidate", detail="no other plan may be used")


# -- the bound --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.floats(0.1, 3.0), st.floats(0.5, 60.0), st.integers(1, 200), st.floats(0.5, 400), st.sampled_from((0.25, 0.5, 1))
)
def test_a_spell_costs_no_more_than_the_bound(
    saving: float, price_seconds: float, spell: int, expected: float, trust: float
) -> None:
    """One spell in which NEW is better by `saving`, that ends after `spell` steps; the horizon may say anything."""
    caution = Caution(trust_share=trust)
    outlook, regret, lost = table(10.0, 10.0 - saving), 0.0, 0.0
    for _ in range(spell):
        found = admit(weigh(shown(NEW, price_seconds), known(outlook, expected, 10**6)), regret, caution)
        if isinstance(found, Admitted):
            lost += price_seconds
            break
        lost += saving
        regret += saving
    best = min(spell * saving, price_seconds)
    assert lost <= (1 + 1 / trust) * best + saving + 1e-9
    right = (expected * saving > price_seconds) == (spell * saving > price_seconds)
    assert not right or lost <= (1 + trust) * best + saving + 1e-9


# -- forced -----------------------------------------------------------------------------------------------------------

PLANS = [plan_on(tuple(range(n)), tp) for n, tp in ((1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (4, 4))]


@st.composite
def numbers(draw: st.DrawFn) -> list[Weighed]:
    chosen = draw(st.lists(st.sampled_from(PLANS), unique=True, min_size=1))
    seconds = {p.plan_id: draw(st.floats(1, 20)) for p in [*PLANS, OLD]}
    misfits = {
        p.plan_id: Misfit(within_steps=draw(st.integers(0, 9)), reason="x") for p in chosen if draw(st.booleans())
    }
    basis = known(TableOutlook(seconds, misfits=misfits), draw(st.floats(0, 60)))
    return [
        weigh(shown(p, draw(st.floats(0, 40))), basis, draw(st.sampled_from(["", "", "plans.deny"]))) for p in chosen
    ]


@settings(deadline=None)
@given(numbers(), st.randoms(use_true_random=False))
def test_forced_is_the_cheapest_that_lasts(weighed: list[Weighed], random: object) -> None:
    found = force(weighed, "slot 3 is gone", SURE)
    usable = [w for w in weighed if not w.barred and w.fits_steps != 0]
    lasting = [w for w in usable if w.fits_steps is None or w.fits_steps > SURE.lead_steps]
    steps = max((w.horizon_steps for w in usable), default=0)
    if not usable:
        assert found is None
        return
    assert isinstance(found, Forced)
    costs = {w.plan_id: w.price_seconds + steps * w.step_seconds for w in lasting or usable}
    assert costs[found.chosen.plan_id] == pytest.approx(min(costs.values()))
    shuffled = sorted(weighed, key=lambda _: random.random())  # pyright: ignore[reportAttributeAccessIssue]
    assert force(shuffled, "slot 3 is gone", SURE) == found
    assert nearest(shuffled) == nearest(weighed)


def test_barred_candidates_are_never_nearest() -> None:
    basis = known(table(10.0, 1.0))
    assert nearest([weigh(shown(NEW, 0.0), basis, "plans.deny has it")]) is None


# -- switches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "why"),
    [
        (Switches(), None),
        (Switches(deny=("critic_train TP2*",)), "plans.deny has 'critic_train TP2*'"),
        (Switches(deny=("critic_train TP4*",)), None),
        (Switches(allow=("actor_train TP2*",)), None),
        (Switches(allow=("actor_train TP1*", "actor_train *DP4")), "none of plans.allow: 'actor_train TP1*'"),
        (Switches(allow=("actor_train TP1*", "actor_* *PP2*")), None),
    ],
)
def test_patterns_bar_plans(switches: Switches, why: str | None) -> None:
    found = switches.denies(OLD)
    assert (found is None) if why is None else (found is not None and why in found)


def test_kinds_forget_the_numbers_of_slots_alone() -> None:
    assert plan_kind(plan_on((4, 5, 6, 7), 2)) == plan_kind(plan_on((0, 1, 2, 3), 2)) != plan_kind(plan_on((0, 1), 2))
    apart = replace(NEW, actor_generate=plan_on((4, 5, 6, 7)).actor_generate)
    assert plan_kind(apart) != plan_kind(NEW)
