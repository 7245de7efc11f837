"""Slots' speeds: a slow one is found and told apart from noise, and work is shared out and priced accordingly."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nereus.config import Config, DataConfig, PlanConfig, StageConfig
from nereus.costs.profile import recorded, supposed
from nereus.costs.speeds import (
    FIRST_GAP_STEPS,
    MOST_GAP_STEPS,
    Speeds,
    fastest,
    finish,
    is_late,
    news_of,
    replica_speeds,
    shared_by_speed,
)
from nereus.layout import STAGES, first_plan
from nereus.observe import Observed, after
from nereus.workload import TRANSIT_TERMS, largest_batch, step_terms

S = StageConfig
NAMES = {slot: f"host:{1000 + slot}" for slot in range(4)}


def checked(speeds: Speeds, step: int, truth: tuple[float, ...], rng: random.Random, noise: float) -> Speeds:
    """One check of three rounds on slots of these speeds."""
    seconds = {
        NAMES[slot]: [0.01 / speed * rng.lognormvariate(0, noise) for _ in range(3)] for slot, speed in enumerate(truth)
    }
    return speeds.observe(seconds, step)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), slot=st.integers(0, 3), speed=st.floats(0.2, 0.55))
def test_a_slot_at_half_the_speed_is_found_in_three_checks_and_no_other(seed: int, slot: int, speed: float) -> None:
    rng, speeds = random.Random(seed), Speeds()
    truth = tuple(speed if each == slot else 1.0 for each in range(4))
    for step in range(3):
        speeds = checked(speeds, step, truth, rng, 0.1)
    assert [each for each, _ in speeds.slow(NAMES)] == [slot]
    assert dict(speeds.slow(NAMES))[slot] == pytest.approx(speed, rel=0.4)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_fifteen_per_cent_makes_no_slot_slow_in_1000_checks(seed: int) -> None:
    rng, speeds = random.Random(seed), Speeds()
    for step in range(1000):
        speeds = checked(speeds, step, (1.0,) * 4, rng, 0.15)
        assert speeds.slow(NAMES) == ()


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_slot_stays_so_without_flapping_and_recovers_when_it_has(seed: int) -> None:
    rng, speeds = random.Random(seed), Speeds()
    told: list[float] = []
    for step in range(200):
        speeds = checked(speeds, step, (1.0, 1.0, 0.5, 1.0), rng, 0.15)
        told.append(dict(speeds.slow(NAMES)).get(2, 1.0))
    assert all(each < 1.0 for each in told[3:])
    assert len(set(told[3:])) <= 12  # plans follow few values, not every check
    for step in range(200, 203):
        speeds = checked(speeds, step, (1.0,) * 4, rng, 0.15)
    assert speeds.slow(NAMES) == ()


def test_checks_follow_late_steps_and_come_back_to_slow_slots() -> None:
    rng, speeds = random.Random(1), Speeds()
    assert speeds.due(1, late=True)
    assert not speeds.due(1, late=False)
    usual = checked(speeds, 1, (1.0,) * 4, rng, 0.01)
    assert not usual.due(1 + FIRST_GAP_STEPS - 1, late=True)
    assert usual.due(1 + FIRST_GAP_STEPS, late=True)
    assert not usual.due(500, late=False)
    slow = checked(checked(speeds, 1, (1.0, 1.0, 1.0, 0.4), rng, 0.01), 2, (1.0, 1.0, 1.0, 0.4), rng, 0.01)
    assert slow.slow(NAMES)
    assert slow.due(2 + MOST_GAP_STEPS, late=False)
    doubtful = checked(speeds, 1, (1.0, 1.0, 1.0, 0.65), rng, 0.01)
    assert not doubtful.slow(NAMES)
    assert doubtful.due(2, late=False)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), slot=st.integers(0, 3), factor=st.floats(0.2, 0.5))
def test_a_single_disturbed_check_changes_nothing(seed: int, slot: int, factor: float) -> None:
    """Neither does it make a usual slot slow, nor a slow one usual."""
    rng = random.Random(seed)
    for usual, odd in ((1.0, factor), (factor, 1.0)):
        speeds = Speeds()
        for step in range(4):
            speeds = checked(speeds, step, tuple(usual if each == slot else 1.0 for each in range(4)), rng, 0.03)
        before = speeds.slow(NAMES)
        speeds = checked(speeds, 4, tuple(odd if each == slot else 1.0 for each in range(4)), rng, 0.03)
        assert [each for each, _ in speeds.slow(NAMES)] == [each for each, _ in before]
        assert speeds.due(5, late=False)
        speeds = checked(speeds, 5, tuple(usual if each == slot else 1.0 for each in range(4)), rng, 0.03)
        assert [each for each, _ in speeds.slow(NAMES)] == [each for each, _ in before]


def test_a_late_step_agrees_with_the_check_after_it() -> None:
    """A slot is slow from the first check on where the step said so too; a fast one does not become so by a late step."""
    rng, speeds = random.Random(1), Speeds()
    speeds = checked(speeds, 1, (1.0,) * 4, rng, 0.05)
    seconds = {name: [0.01 * (1 + 3 * (name == NAMES[2]))] * 3 for name in NAMES.values()}
    assert speeds.observe(seconds, 6).slow(NAMES) == ()
    ((slot, speed),) = speeds.observe(seconds, 6, late=True).slow(NAMES)
    assert (slot, speed) == (2, pytest.approx(0.25, rel=0.2))
    slow = speeds.observe(seconds, 6, late=True)
    usual = {name: [0.01] * 3 for name in NAMES.values()}
    assert slow.observe(usual, 7, late=True).slow(NAMES) != ()  # that it has recovered takes a second check


@pytest.mark.parametrize("seed", range(5))
def test_late_steps_and_noise_of_fifteen_per_cent_make_no_slot_slow(seed: int) -> None:
    rng, speeds = random.Random(seed), Speeds()
    for step in range(1000):
        seconds = {name: [0.01 * rng.lognormvariate(0, 0.15) for _ in range(3)] for name in NAMES.values()}
        speeds = speeds.observe(seconds, step, late=True)
        assert speeds.slow(NAMES) == ()


def test_a_late_step_is_late_beyond_noise() -> None:
    assert is_late(1.5, 1.0, 0.1)
    assert not is_late(1.5, 1.0, 0.4)
    assert not is_late(1.05, 1.0, 0.001)


def test_news_name_the_slots_that_became_slow_or_recovered() -> None:
    assert news_of((), ((3, 0.5),)) == "slot 3 computes at 0.50 of the usual speed"
    assert news_of(((3, 0.5),), ((3, 0.4),)) == ""
    assert news_of(((3, 0.5),), ()) == "slot 3 is as fast as the others again"


def record(step: int, last_seconds: float, processes: dict[str, str]) -> dict[str, object]:
    seconds = {slot: [0.01] * 3 for slot in processes}
    seconds[max(seconds)] = [last_seconds] * 3
    return {"kind": "speeds", "step": step, "seconds": seconds, "processes": processes}


def test_the_journals_speeds_follow_processes_when_their_numbers_change() -> None:
    profile = supposed("cpu", 4, 4, 2)
    four = {str(slot): name for slot, name in NAMES.items()}
    state = after(Observed(), {"kind": "probe", "profile": profile.record(), "processes": four})
    state = after(state, {"kind": "prediction", "step": 3})
    usual = after(state, record(3, 0.0101, four))
    assert usual.pending is not None
    doubtful = after(state, record(3, 0.025, four))
    assert doubtful.pending is not None
    assert doubtful.profile is not None
    assert doubtful.profile.slow == ()  # one check alone may be an accident
    assert doubtful.speeds.due(4, late=False)
    slow = after(doubtful, record(4, 0.025, four))
    assert slow.pending is None  # the step before it had another slot
    assert slow.profile is not None
    assert [slot for slot, _ in slow.profile.slow] == [3]
    assert recorded(slow.profile.record()) == slow.profile
    left = {"0": NAMES[0], "1": NAMES[2], "2": NAMES[3]}
    fewer = after(slow, {"kind": "probe", "profile": replace(profile, slots=3).record(), "processes": left})
    assert fewer.profile is not None
    assert [slot for slot, _ in fewer.profile.slow] == [2]


# -- shared work -------------------------------------------------------------------------------------------------------

speeds_of = st.lists(st.floats(0.1, 1.0), min_size=1, max_size=6)


@settings(deadline=None)
@given(speeds=speeds_of, together=st.floats(0.5, 6.0), data=st.data())
def test_workers_that_share_cores_finish_as_a_simulation_says(
    speeds: list[float], together: float, data: st.DataObject
) -> None:
    works = data.draw(st.lists(st.floats(0.1, 3.0), min_size=len(speeds), max_size=len(speeds)))
    left, at, step = list(works), 0.0, 1e-3
    while any(each > 0 for each in left):
        busy = sum(speed for speed, each in zip(speeds, left, strict=True) if each > 0)
        share = min(1.0, together / busy)
        left = [each - step * speed * share for speed, each in zip(speeds, left, strict=True)]
        at += step
    assert finish(works, speeds, alone=1.0, crowded=1.0, together=together) == pytest.approx(at, abs=0.05, rel=0.01)


def config(stage: StageConfig) -> Config:
    data = DataConfig(prompts_per_step=96, samples_per_prompt=1, max_prompt_tokens=32, max_response_tokens=32)
    plan = replace(PlanConfig(**dict.fromkeys(STAGES, stage)), actor_generate=replace(stage, pp=1))
    return Config(plan=plan, data=data)


def seconds(of: Config, slow: tuple[tuple[int, float], ...], together: float = 4.0) -> float:
    """A step with equal shares. Shares by speed compute no longer; the traffic of the larger share is more, which may cost
    what a hardly slow slot saves: a search weighs both.
    """
    profile = replace(supposed("cpu", 4, 4, 4), slow=slow, together_slots=together)
    plan = first_plan(of)
    shared = replace(plan, **{name: shared_by_speed(stage, slow) for name, stage in plan.stages()})
    equal, adapted = (step_terms(of, each, largest_batch(of), profile) for each in (plan, shared))
    if of.plan.actor_train.micro_batch == 1:  # else the larger share may be one micro-batch more
        computed = [
            sum(value for each in terms.values() for name, value in each.items() if name not in TRANSIT_TERMS)
            for terms in (equal, adapted)
        ]
        assert computed[1] <= computed[0] * (1 + 1e-9)
    return sum(sum(each.values()) for each in equal.values())


@settings(deadline=None, max_examples=30)
@example(stage=S(tp=2, dp=2), slot=0, speed=0.87890625, together=2.0)
@given(
    stage=st.sampled_from((S(), S(dp=2), S(dp=3), S(dp=4), S(pp=2, dp=2), S(tp=2, dp=2), S(tp=2, pp=2))),
    slot=st.integers(0, 3),
    speed=st.floats(0.2, 0.9),
    together=st.sampled_from((2.0, 4.0)),
)
def test_a_slow_slot_never_makes_a_plan_faster(stage: StageConfig, slot: int, speed: float, together: float) -> None:
    of = config(replace(stage, micro_batch=1))
    usual, slower = seconds(of, (), together), seconds(of, ((slot, speed),), together)
    assume(slot < stage.tp * stage.dp * stage.pp)
    assert slower >= usual * (1 - 1e-9)


def test_four_slots_of_which_one_is_slow() -> None:
    """With a core each: equal shares take twice as long, shares by speed 8/7, three slots alone 4/3 of the work."""
    of, slow = config(S(dp=4, micro_batch=1)), ((3, 0.5),)
    plan = first_plan(of)
    assert shared_by_speed(plan.actor_train, slow).shares == (14, 14, 13, 7)
    assert shared_by_speed(plan.actor_train, ()).shares == (12, 12, 12, 12)
    assert replica_speeds(plan.actor_train, slow) == (1.0, 1.0, 1.0, 0.5)
    assert fastest((0, 1, 2, 3), 3, slow) == (0, 1, 2)
    assert fastest((0, 1, 2, 3), 3, ((1, 0.5),)) == (0, 2, 3)
    assert fastest((0, 1, 2, 3), 2, ()) == (0, 1)
    assert seconds(of, slow) == pytest.approx(2 * seconds(of, ()), rel=0.15)
    assert seconds(config(S(dp=3, micro_batch=1)), slow) == pytest.approx(4 / 3 * seconds(of, ()), rel=0.15)
