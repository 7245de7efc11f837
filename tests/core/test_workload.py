"""Terms of a step: more of anything never makes it slower, longer is never faster, phases add up to the step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import AlgorithmConfig, Config, DataConfig, PlanConfig, StageConfig
from nereus.costs.profile import supposed
from nereus.layout import first_plan
from nereus.observe import KIND_TERMS
from nereus.workload import (
    FIRST_USE_SECONDS,
    PHASE_KINDS,
    StepBatch,
    largest_batch,
    measured_phases,
    recorded_batch,
    step_batch,
    step_terms,
)

S = StageConfig
PROFILE = supposed("cpu", 4, 4, 2)
LAYOUTS = (S(), S(tp=2), S(pp=2), S(dp=2), S(tp=2, pp=2), S(pp=2, dp=2), S(dp=4))
RATES = ("flops_per_second", "memory_bytes_per_second", "link_bytes_per_second", "nic_bytes_per_second")


def config(train: StageConfig = LAYOUTS[4], generate: StageConfig = LAYOUTS[1], **changes: object) -> Config:
    plan = PlanConfig(actor_train=train, actor_generate=generate, critic_train=train, reference_infer=S(dp=4))
    base = Config(
        plan=plan,
        data=DataConfig(prompts_per_step=16, samples_per_prompt=4, max_prompt_tokens=64, max_response_tokens=64),
        algorithm=AlgorithmConfig(mini_batches=2),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def batch(response_tokens: float = 30.0, width_tokens: int = 96) -> StepBatch:
    lengths = tuple(response_tokens * part / 4 for part in (1, 2, 3, 4))
    return StepBatch(samples=64, width_tokens=width_tokens, prompt_tokens=40.0, response_tokens=lengths)


def seconds(of: Config, sized: StepBatch, **changes: float) -> float:
    terms = step_terms(of, first_plan(of), sized, replace(PROFILE, **changes))  # type: ignore[arg-type]
    return sum(sum(each.values()) for each in terms.values())


trains, generates = st.sampled_from(LAYOUTS), st.sampled_from((S(), S(tp=2), S(dp=2), S(tp=2, dp=2), S(dp=4)))


@settings(deadline=None)
@given(train=trains, generate=generates, rate=st.sampled_from(RATES), factor=st.floats(1.0, 20.0))
def test_more_of_a_rate_is_never_slower(train: StageConfig, generate: StageConfig, rate: str, factor: float) -> None:
    of = config(train, generate)
    faster = seconds(of, batch(), **{rate: getattr(PROFILE, rate) * factor})
    assert faster <= seconds(of, batch()) * (1 + 1e-9)


@settings(deadline=None)
@given(train=trains, generate=generates, together=st.floats(1.0, 4.0), more=st.floats(1.0, 4.0))
def test_more_cores_are_never_slower(train: StageConfig, generate: StageConfig, together: float, more: float) -> None:
    of = config(train, generate)
    few, many = sorted((together, more))
    assert seconds(of, batch(), together_slots=many) <= seconds(of, batch(), together_slots=few) * (1 + 1e-9)


@settings(deadline=None)
@given(train=trains, generate=generates, tokens=st.floats(4, 60), factor=st.floats(1.0, 4.0))
def test_longer_responses_are_never_faster(
    train: StageConfig, generate: StageConfig, tokens: float, factor: float
) -> None:
    of = config(train, generate)
    short, long = batch(tokens, 96), batch(tokens * factor, 96 + round(tokens * (factor - 1)))
    assert seconds(of, long) >= seconds(of, short) * (1 - 1e-9)


def test_every_term_has_a_coefficient_and_every_phase_a_kind() -> None:
    for train in LAYOUTS:
        of = config(train)
        plan = first_plan(of)
        fresh = [name for name, _ in plan.stages()]
        terms = step_terms(of, plan, batch(), PROFILE, fresh)
        assert set(terms) == set(PHASE_KINDS)
        for phase, each in terms.items():
            assert set(each) <= set(KIND_TERMS[PHASE_KINDS[phase]])
            assert all(value >= 0 for value in each.values())


def test_a_first_use_and_a_second_epoch_cost_what_they_say() -> None:
    of = config()
    plan = first_plan(of)
    plain, fresh = (step_terms(of, plan, batch(), PROFILE, stages) for stages in ((), ("critic_train",)))
    assert fresh["values"]["first_use"] == pytest.approx(FIRST_USE_SECONDS * PROFILE.crowding(4))
    assert "first_use" not in fresh["ref"]
    twice = config(algorithm=AlgorithmConfig(mini_batches=2, epochs=2))
    doubled = step_terms(twice, plan, batch(), PROFILE)["update_actor"]
    assert doubled["gemm"] == pytest.approx(2 * plain["update_actor"]["gemm"])


def test_read_rollouts_need_neither_sync_nor_generation() -> None:
    of = config()
    terms = step_terms(of, first_plan(of), replace(batch(), sampled=False), PROFILE)
    assert {"gen", "update_weights"}.isdisjoint(terms)
    assert "update_actor" in terms


def test_crowded_replicas_take_what_one_takes_with_all_their_rows() -> None:
    """Four slots on one core: cutting the batch over replicas wins nothing in arithmetic."""
    one, four = config(S(micro_batch=8)), config(S(dp=4, micro_batch=8))
    alone = replace(PROFILE, together_slots=1.0)
    gemm = [step_terms(of, first_plan(of), batch(), alone)["old_log_prob"]["gemm"] for of in (one, four)]
    assert gemm[1] == pytest.approx(gemm[0], rel=1e-6)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["gen", "ref", "values", "reward", "adv"]), st.floats(0.01, 5), min_size=1))
def test_measured_phases_add_up_to_the_step(parts: dict[str, float]) -> None:
    timings = {**parts, "step": sum(parts.values()) + 0.25 + 0.5, "interleaved": 0.5}
    found = measured_phases(timings)
    assert sum(found.values()) == pytest.approx(timings["step"] - 0.5), "what is no work of the step is left out"
    assert found["rest"] == pytest.approx(0.25 + parts.get("reward", 0) + parts.get("adv", 0))


def test_batches_from_lengths_from_limits_and_from_json() -> None:
    found = step_batch([4, 6], [1, 9], 16)
    assert (found.samples, found.prompt_tokens, max(found.response_tokens)) == (2, 5.0, 9.0)
    assert recorded_batch(found.record()) == found
    assert largest_batch(config()).width_tokens == 128
