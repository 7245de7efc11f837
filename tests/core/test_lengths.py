"""The limit of a response by step and the width of rows, against their definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.config import (
    ChangeConfig,
    Config,
    DataConfig,
    FleetConfig,
    NereusConfig,
    PlanChange,
    PlanConfig,
    ResponseStepConfig,
    RolloutConfig,
    StageConfig,
)
from nereus.errors import ConfigError, InfeasiblePlan
from nereus.layout import first_plan
from nereus.lengths import largest_limit, limit_row_tokens, request_tokens, response_limit, row_tokens
from nereus.memory import check_memory, kv_bytes_per_token, plan_peaks

schedules = st.dictionaries(st.integers(2, 30), st.integers(1, 500), max_size=5)


def data(first: int, schedule: dict[int, int], prompt: int = 10) -> DataConfig:
    steps = tuple(ResponseStepConfig(step=step, max_response_tokens=schedule[step]) for step in sorted(schedule))
    return DataConfig(max_prompt_tokens=prompt, max_response_tokens=first, response_schedule=steps)


def defined(first: int, schedule: dict[int, int], step: int) -> int:
    """The limit by going through the steps one by one."""
    limit = first
    for each in range(1, step + 1):
        limit = schedule.get(each, limit)
    return limit


@given(st.integers(1, 500), schedules, st.integers(1, 35), st.integers(0, 35))
def test_the_limit_is_the_last_one_stated_and_the_largest_that_of_all_steps(
    first: int, schedule: dict[int, int], step: int, more: int
) -> None:
    made = data(first, schedule)
    assert response_limit(made, step) == defined(first, schedule, step)
    limits = [defined(first, schedule, each) for each in range(step, 40)]
    assert largest_limit(made, step) == max(limits)
    assert largest_limit(made, step, step + more + 1) == max(limits[: more + 1])
    assert request_tokens(made) == 10 + max(defined(first, schedule, each) for each in range(1, 40))


@given(st.integers(1, 500), st.integers(1, 500))
def test_rows_hold_prompt_and_response_in_whole_eights(prompt: int, response: int) -> None:
    width = row_tokens(data(response, {}, prompt), response)
    assert width % 8 == 0
    assert 0 <= width - prompt - response < 8
    assert limit_row_tokens(data(response, {}, prompt), 1) == width


LONG = StageConfig(dp=4, micro_batch=32)
SHORT = StageConfig(dp=4, micro_batch=4)


def job(policy: str, first: StageConfig, *changes: tuple[int, StageConfig], budget_tokens: int) -> Config:
    """Rows of 32 tokens, from step 5 on of 96; the budget holds `LONG` with rows of `budget_tokens` to the byte."""
    plan = PlanConfig(actor_train=LONG, critic_train=SHORT, actor_generate=StageConfig(dp=4), reference_infer=SHORT)
    most = Config(plan=plan, data=data(22, {5: 86}))
    budget = max(peak.total_bytes for peak in plan_peaks(most, first_plan(most), budget_tokens))
    return Config(
        plan=PlanConfig(actor_train=first, critic_train=SHORT, actor_generate=StageConfig(dp=4), reference_infer=SHORT),
        data=data(22, {5: 86}),
        fleet=FleetConfig(slot_budget_bytes=budget),
        nereus=NereusConfig(policy=policy),
        changes=tuple(ChangeConfig(step=step, plan=PlanChange(actor_train=stage)) for step, stage in changes),
    )


def test_a_script_has_to_hold_the_rows_of_all_its_steps() -> None:
    check_memory(job("script", LONG, budget_tokens=96))
    with pytest.raises(InfeasiblePlan, match="with rows of 96 tokens") as refused:
        check_memory(job("script", LONG, budget_tokens=64))
    assert refused.value.key == "plan"
    check_memory(job("script", LONG, (5, SHORT), budget_tokens=64))  # the change comes in time
    check_memory(job("script", LONG, (5, SHORT), budget_tokens=64), first_step=3)
    for late in (4, 6), (6,), (6, 9):
        steps = [(late[0], LONG if len(late) > 1 else SHORT), *((step, SHORT) for step in late[1:])]
        with pytest.raises(InfeasiblePlan, match="with rows of 96 tokens") as refused:
            check_memory(job("script", LONG, *steps, budget_tokens=64))
        assert refused.value.key == ("changes[0].plan" if late == (4, 6) else "plan")


def test_a_controller_begins_with_what_the_first_step_needs() -> None:
    check_memory(job("fixed", LONG, budget_tokens=32))
    with pytest.raises(InfeasiblePlan, match="with rows of 32 tokens"):
        check_memory(job("fixed", LONG, budget_tokens=24))
    with pytest.raises(InfeasiblePlan, match="with rows of 96 tokens"):
        check_memory(job("dp-scaling", LONG, budget_tokens=64), first_step=5)  # a run that is resumed there
    check_memory(job("nereus", LONG, budget_tokens=24))  # it takes another plan when rows are that wide
    with pytest.raises(InfeasiblePlan, match="with rows of 16 tokens"):
        check_memory(job("nereus", LONG, budget_tokens=8))


def test_an_engine_has_to_hold_the_longest_request_of_the_run() -> None:
    made = job("fixed", LONG, budget_tokens=96)
    token = kv_bytes_per_token(made.model, 1)
    least = 4 * 32 * token  # 96 tokens are three blocks of 32, and one that vLLM keeps
    check_memory(replaced(made, least))
    with pytest.raises(ConfigError, match=f"{least:,}") as refused:
        check_memory(replaced(made, least - 1))
    assert refused.value.key == "rollout.kv_cache_bytes"


def replaced(config: Config, cache_bytes: int) -> Config:
    """The same with another cache, and a budget that is of no matter."""
    return Config(
        plan=config.plan,
        data=config.data,
        nereus=config.nereus,
        rollout=RolloutConfig(kv_cache_bytes=cache_bytes),
    )
