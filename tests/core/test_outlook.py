"""The job's outlook: joint deviations, what steps teach, memory now and to come."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import Config, DataConfig, FleetConfig, PlanConfig, ResponseStepConfig, RunConfig, StageConfig
from nereus.control.outlook import JobOutlook, StepObserved
from nereus.control.records import PriceEstimate, StepMeasured, candidate
from nereus.costs.profile import supposed
from nereus.layout import Plan, first_plan
from nereus.memory import plan_peaks
from nereus.observe import Observed, after, outgrown
from nereus.workload import largest_batch

POOR = PlanConfig(
    actor_train=StageConfig(tp=2, pp=2),
    actor_generate=StageConfig(tp=2, dp=2),
    critic_train=StageConfig(pp=2, dp=2),
    reference_infer=StageConfig(dp=4),
)
CONFIG = Config(plan=POOR, fleet=FleetConfig(slots=4), data=DataConfig(prompts_per_step=8))
STATE = after(Observed(), {"kind": "probe", "profile": supposed("cpu", 4, 4, 2).record()})


def plans() -> dict[str, Plan]:
    wide = replace(POOR, actor_train=StageConfig(dp=4), critic_train=StageConfig(dp=4))
    shifted = replace(POOR, critic_train=StageConfig(dp=4))
    made = [first_plan(replace(CONFIG, plan=plan)) for plan in (POOR, wide, shifted)]
    return dict(zip(("poor", "wide", "shifted"), made, strict=True))


PLANS = plans()
IDS = {name: plan.plan_id for name, plan in PLANS.items()}


def outlook() -> JobOutlook:
    first = PLANS["poor"]
    found = JobOutlook(config=CONFIG, state=STATE, plans={first.plan_id: first})
    free = PriceEstimate(mean_seconds=0.0, deviation_seconds=0.0, bound_seconds=0.0)
    return found.met(tuple(candidate(plan, free) for plan in PLANS.values()))


def measured(
    number: int, factor: float, believed: JobOutlook, plan_id: str, width_tokens: int | None = None
) -> StepObserved:
    """A step whose every phase takes `factor` times what is believed of it."""
    batch = largest_batch(CONFIG)
    batch = replace(batch, width_tokens=width_tokens or batch.width_tokens)
    terms = replace(believed, state=replace(believed.state, batch=batch)).terms(plan_id)
    shares = {phase: sum(each.values()) for phase, each in terms.items()}
    return StepObserved(
        at_seconds=float(number),
        step=number,
        step_seconds=factor * sum(shares.values()),
        tokens=1000,
        plan_id=plan_id,
        phase_seconds={phase: factor * seconds for phase, seconds in shares.items()},
        batch=batch,
        peak_bytes={},
    )


def test_what_plans_share_cancels_in_the_deviation_of_a_saving() -> None:
    known = outlook()
    same = known.saving(IDS["poor"], IDS["poor"], 1.0, 1.0)
    assert (same.mean_seconds, same.deviation_seconds) == (0.0, 0.0)
    one = known.saving(IDS["poor"], IDS["shifted"], 1.0, 1.0)
    apart = known.step(IDS["poor"]).deviation_seconds + known.step(IDS["shifted"]).deviation_seconds
    assert one.deviation_seconds < apart / 2
    steps = known.step(IDS["poor"]).mean_seconds - known.step(IDS["shifted"]).mean_seconds
    assert one.mean_seconds == pytest.approx(steps, rel=1e-9)


@settings(deadline=None, max_examples=20)
@given(old=st.floats(0.5, 2.0), new=st.floats(0.5, 2.0))
def test_a_saving_scales_with_the_ratios(old: float, new: float) -> None:
    known = outlook()
    found = known.saving(IDS["poor"], IDS["wide"], old, new)
    expected = old * known.step(IDS["poor"]).mean_seconds - new * known.step(IDS["wide"]).mean_seconds
    assert found.mean_seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_steps_teach_and_a_ratio_takes_its_part() -> None:
    known, with_ratio = outlook(), outlook()
    before = known.step(IDS["poor"])
    for number in range(1, 7):
        step = measured(number, 2.0, outlook(), IDS["poor"])
        known = known.observe(step, IDS["poor"], ratio=1.0, noise_share=0.03)
        with_ratio = with_ratio.observe(step, IDS["poor"], ratio=2.0, noise_share=0.03)
    learnt = known.step(IDS["poor"])
    total = sum(measured(1, 2.0, outlook(), IDS["poor"]).phase_seconds.values())
    assert learnt.mean_seconds == pytest.approx(total, rel=0.1)
    assert learnt.deviation_seconds / learnt.mean_seconds < before.deviation_seconds / before.mean_seconds
    assert with_ratio.step(IDS["poor"]).mean_seconds == pytest.approx(learnt.mean_seconds / 2, rel=0.1)


def test_the_first_use_of_an_engine_is_expected_of_the_plan_that_ran_only() -> None:
    known = outlook()
    step = replace(measured(1, 1.0, known, IDS["wide"]), fresh=("actor_train",))
    cold, warm = known.expected(step, IDS["wide"]), known.expected(replace(step, fresh=()), IDS["wide"])
    assert cold.mean_seconds > warm.mean_seconds
    assert known.expected(step, IDS["poor"]) == known.expected(replace(step, fresh=()), IDS["poor"])


def test_a_step_without_phases_is_refused() -> None:
    step = StepMeasured(at_seconds=1.0, step=1, step_seconds=1.0, tokens=5)
    with pytest.raises(TypeError, match="StepObserved"):
        outlook().expected(step, IDS["poor"])


def tight(width_tokens: int) -> Config:
    """The job with longer responses and a budget that holds rows of `width_tokens`, with the margin, and not 32 more."""
    long = replace(CONFIG, data=replace(CONFIG.data, max_response_tokens=512))

    def safe(width: int) -> float:
        response = width - CONFIG.data.max_prompt_tokens
        sized = replace(long, data=replace(long.data, max_response_tokens=response))
        parts = [
            {
                "overhead": float(peak.components["overhead"]),
                "state": float(peak.total_bytes - peak.components["overhead"]),
            }
            for peak in plan_peaks(sized, PLANS["poor"])
        ]
        return max(STATE.margin.safe_bytes(each) for each in parts)

    budget = int((safe(width_tokens) + safe(width_tokens + 32)) / 2)
    return replace(long, fleet=replace(long.fleet, slot_budget_bytes=budget))


def test_rows_that_grow_are_foreseen_to_pass_the_budget_before_they_do() -> None:
    config = tight(320)
    known = JobOutlook(config=config, state=STATE, plans={IDS["poor"]: PLANS["poor"]})
    for number in range(1, 9):
        step = measured(number, 1.0, outlook(), IDS["poor"], width_tokens=160 + 16 * number)
        known = known.observe(step, IDS["poor"], ratio=1.0, noise_share=0.03)
    found = known.misfit(IDS["poor"], 9)
    assert found is not None
    assert 1 <= found.within_steps <= 6  # rows of 320 tokens come in step 10, of 336 in step 11
    assert "slot" in found.reason
    wide = replace(known, recent_tokens=(*known.recent_tokens, (9, 400)))
    now = wide.misfit(IDS["poor"], 10)
    assert now is not None
    assert now.within_steps == 0
    roomy = replace(known, lacking={}, config=replace(config, fleet=FleetConfig(slots=4, slot_budget_bytes=1 << 40)))
    assert roomy.misfit(IDS["poor"], 9) is None


def test_rows_that_a_plan_has_carried_are_no_question() -> None:
    known = after_rows(rising({}, 200), {8: 256})
    found = known.misfit(IDS["poor"], 9)
    assert found is not None
    assert found.within_steps == 0
    carried = replace(known, lacking={}, state=replace(STATE, carried={IDS["poor"]: 256}))
    assert carried.misfit(IDS["poor"], 9) is None
    higher = after_rows(replace(rising({10: 136}, 200), state=carried.state), {8: 256})
    grown = higher.misfit(IDS["poor"], 10)
    assert grown is not None
    assert "with rows of 264 tokens" in grown.reason


# -- a limit that rises ------------------------------------------------------------------------------------------------


def rising(rises: dict[int, int], budget_tokens: int, first: int = 128, steps: int = 60) -> JobOutlook:
    """The job with these limits of a response by step (prompts of 128 tokens), and a budget for rows of `budget_tokens`."""
    tight_one = tight(budget_tokens)
    schedule = tuple(ResponseStepConfig(step=step, max_response_tokens=limit) for step, limit in rises.items())
    data = replace(CONFIG.data, max_prompt_tokens=128, max_response_tokens=first, response_schedule=schedule)
    config = replace(tight_one, run=RunConfig(steps=steps), data=data)
    return JobOutlook(config=config, state=STATE, plans={IDS["poor"]: PLANS["poor"]})


def after_rows(known: JobOutlook, widths: dict[int, int]) -> JobOutlook:
    for step, width in widths.items():
        known = known.met_rows(step, width)
    return known


def test_a_rise_of_the_limit_is_known_before_it_comes() -> None:
    known = after_rows(rising({20: 256}, 320), dict.fromkeys(range(1, 9), 256))
    found = known.misfit(IDS["poor"], 9)
    assert found is not None
    assert found.within_steps == 11
    assert "with rows of 384 tokens slot" in found.reason
    assert known.misfit(IDS["poor"], 19) == replace(found, within_steps=1)
    assert known.misfit(IDS["poor"], 20) == replace(found, within_steps=0)
    assert after_rows(rising({20: 192}, 320), {8: 256}).misfit(IDS["poor"], 9) is None  # rows of 320 fit
    assert after_rows(rising({20: 256}, 320, steps=19), {8: 256}).misfit(IDS["poor"], 9) is None  # after the end


def test_rows_below_the_limit_are_supposed_to_grow_by_as_much_as_it_does() -> None:
    known = after_rows(rising({20: 256}, 320), dict.fromkeys(range(1, 9), 160))  # 96 tokens short of the limit
    assert [known.supposed_tokens(step) for step in (9, 19, 20, 40)] == [160, 160, 288, 288]
    assert known.misfit(IDS["poor"], 9) is None
    fallen = after_rows(rising({5: 32}, 320), {3: 256, 4: 256})
    assert [fallen.supposed_tokens(step) for step in (4, 5)] == [256, 160]


def test_what_the_schedule_lets_rows_grow_by_is_no_trend_of_their_own() -> None:
    widths = {step: 256 if step < 10 else 296 for step in range(1, 19)}
    known = after_rows(rising({10: 168, 40: 512}, 320), widths)
    found = known.misfit(IDS["poor"], 19)
    assert found is not None
    assert found.within_steps == 21  # the second rise, and not sooner


def test_rows_that_grow_on_their_own_below_a_limit_that_rises_are_met_first() -> None:
    known = after_rows(rising({50: 1024}, 320, first=512), {step: 160 + 16 * step for step in range(1, 9)})
    found = known.misfit(IDS["poor"], 9)
    assert found is not None
    assert 1 <= found.within_steps <= 6


def test_nothing_is_foreseen_of_the_plan_before_rows_were_measured_and_candidates_hold_what_is_allowed() -> None:
    known = rising({20: 256}, 200)
    assert known.misfit(IDS["poor"], 1) is None
    found = known.foreseen(PLANS["poor"], IDS["poor"], 1)
    assert found is not None
    assert found.within_steps == 0
    resumed = replace(known, state=replace(STATE, batch=replace(largest_batch(CONFIG), width_tokens=176), last_step=6))
    assert resumed.misfit(IDS["poor"], 7) == replace(found, within_steps=13, reason=resumed_reason(resumed))


def resumed_reason(known: JobOutlook) -> str:
    found = known.misfit(IDS["poor"], 20)
    assert found is not None
    return found.reason


@settings(deadline=None, max_examples=30)
@given(
    rises=st.dictionaries(st.integers(2, 30), st.integers(1, 16).map(lambda n: 32 * n), max_size=4),
    width=st.integers(5, 8).map(lambda n: 32 * n),
    step=st.integers(2, 30),
)
def test_the_first_step_whose_rows_are_too_wide_is_found(rises: dict[int, int], width: int, step: int) -> None:
    """Against a walk over the steps: rows grow with the limit from what they were in the step before."""
    limits = dict(sorted(rises.items()))
    known = rising(limits, 320)

    def limit(at: int) -> int:
        return 128 + [128, *(value for start, value in limits.items() if start <= at)][-1]

    width = min(width, limit(step - 1))
    known = known.met_rows(step - 1, width)
    wide = [min(limit(at), width + max(0, limit(at) - limit(step - 1))) for at in range(step, 61)]
    first = next((ahead for ahead, rows in enumerate(wide) if rows > 320), None)
    found = known.misfit(IDS["poor"], step)
    assert (None if found is None else found.within_steps) == first


def test_a_plan_that_cannot_hold_the_rows_of_a_step_is_named_with_slot_phase_and_bytes() -> None:
    config = rising({}, 320).config
    assert outgrown(STATE, config, PLANS["poor"], 7, 320) is None
    found = outgrown(STATE, config, PLANS["poor"], 7, 512)
    assert found is not None
    assert (found.step, found.width_tokens) == (7, 512)
    peak = max(plan_peaks(config, PLANS["poor"], 512), key=lambda each: each.total_bytes)
    for part in (f"slot {peak.slot} needs {peak.total_bytes:,} bytes in {peak.phase} (activations ", "step 7 ", "512"):
        assert part in str(found)
    carried = replace(STATE, carried={IDS["poor"]: 512})
    assert outgrown(carried, config, PLANS["poor"], 7, 512) is None  # it has worked on such rows before
    assert outgrown(carried, config, PLANS["poor"], 7, 520) is not None
