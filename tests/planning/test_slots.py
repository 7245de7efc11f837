"""Plans for a run's own slots: bytes as `nereus.memory` predicts them, plans to the runtime's form and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import Config, FleetConfig, ModelConfig, PlanConfig, StageConfig
from nereus.layout import first_plan
from nereus.memory import OVERHEAD_BYTES, plan_peaks
from nereus.planning.evaluate import evaluate
from nereus.planning.search import search
from nereus.planning.slots import global_plan, problem_of, runtime_plan, space_of

cuts = st.sampled_from([(1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 1)])
stages = st.builds(
    lambda cut, micro: StageConfig(tp=cut[0], pp=cut[1], dp=cut[2], micro_batch=micro),
    cuts,
    st.sampled_from([1, 4, 16]),
)


@settings(max_examples=15, deadline=None)
@given(actor=stages, critic=stages, reference=stages, engine=st.sampled_from([(1, 4), (2, 2), (4, 1)]))
def test_the_peak_is_that_of_the_runtimes_own_prediction_or_a_little_above(
    actor: StageConfig, critic: StageConfig, reference: StageConfig, engine: tuple[int, int]
) -> None:
    plan = PlanConfig(
        actor_train=actor,
        critic_train=critic,
        reference_infer=reference,
        actor_generate=StageConfig(tp=engine[0], dp=engine[1]),
    )
    config = Config(plan=plan, fleet=FleetConfig(slots=4))
    judged = evaluate(problem_of(config), global_plan(config, first_plan(config)))
    exact = max(peak.total_bytes for peak in plan_peaks(config, first_plan(config)))
    found = max(peak.safe_bytes for peak in judged.peaks)
    assert exact <= found <= 1.15 * exact + config.transfer.bucket_bytes


def test_a_plan_comes_back_from_the_runtimes_form() -> None:
    config = Config(fleet=FleetConfig(slots=4), model=ModelConfig(layers=6))
    result = search(problem_of(config), space=space_of(config))
    assert result.best is not None
    there = runtime_plan(config, result.best.plan)
    assert global_plan(config, there) == result.best.plan
    assert there.actor_train.slots == tuple(range(there.actor_train.layout.ranks))
    assert sum(there.actor_generate.shares) == config.data.prompts_per_step * config.data.samples_per_prompt


@pytest.mark.parametrize("slots", [1, 3, 5])
def test_any_number_of_slots_gets_a_plan_and_a_small_budget_none(slots: int) -> None:
    config = Config(fleet=FleetConfig(slots=slots))
    assert search(problem_of(config), space=space_of(config)).best is not None
    small = replace(config, fleet=FleetConfig(slots=slots, slot_budget_bytes=OVERHEAD_BYTES + (4 << 20)))
    result = search(problem_of(small), space=space_of(small))
    assert result.best is None
    assert result.near_misses[0].misfits[0].needed_bytes > OVERHEAD_BYTES + (4 << 20)
