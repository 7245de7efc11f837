"""Responses that grow beyond what the plan holds: a fixed plan stops before the step, the controller has left it by then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    FleetConfig,
    NereusConfig,
    PlanConfig,
    ResponseStepConfig,
    RunConfig,
    WarmupConfig,
)
from nereus.errors import PlanOutgrown
from nereus.layout import first_plan
from nereus.memory import OVERHEAD_BYTES, plan_peaks
from nereus.runtime.checkpoints import newest_good
from nereus.runtime.journal import read_journal
from nereus.runtime.metrics import read_metrics
from nereus.runtime.pool import SlotPool
from tests.live.scene import S, config, run_job

FIRST_TOKENS, LAST_TOKENS, RISE = 16, 64, 5  # rows before the step of the rise, and from there on
WIDE = PlanConfig(
    actor_train=S(dp=4, micro_batch=16),
    actor_generate=S(dp=4),
    critic_train=S(dp=4, micro_batch=16),
    reference_infer=S(dp=4, micro_batch=16),
)


def growing(pool: SlotPool, policy: str) -> Config:
    """A model that was not warmed up answers as long as it may. The budget holds 20 MB more than the first rows need."""
    data = replace(
        config().data,
        prompts_per_step=64,
        samples_per_prompt=1,
        max_prompt_tokens=8,
        max_response_tokens=FIRST_TOKENS - 8,
        response_schedule=(ResponseStepConfig(step=RISE, max_response_tokens=LAST_TOKENS - 8),),
    )
    made = config(
        run=RunConfig(name="growth", seed=3, steps=RISE + 1),
        data=data,
        algorithm=AlgorithmConfig(mini_batches=1, actor_lr=2e-4, critic_lr=2e-4),
        warmup=WarmupConfig(steps=0),
        plan=WIDE,
        checkpoint=CheckpointConfig(keep_count=1),
        nereus=NereusConfig(policy=policy),
    )
    pool.call_all("as_new")
    needed = [
        max(peak.total_bytes for peak in plan_peaks(made, first_plan(made), width))
        for width in (FIRST_TOKENS, LAST_TOKENS)
    ]
    budget = needed[0] + (20 << 20)
    assert needed[1] - OVERHEAD_BYTES > budget + (8 << 20), "the growth is no question of the margin"
    return replace(made, fleet=FleetConfig(slot_budget_bytes=budget))


def test_a_fixed_plan_stops_before_the_step_that_it_cannot_hold(pool: SlotPool, tmp_path: Path) -> None:
    made = growing(pool, "fixed")
    with pytest.raises(PlanOutgrown, match=rf"step {RISE} has rows of {LAST_TOKENS} tokens.* in update_") as refused:
        run_job(pool, made, tmp_path)
    assert f"is {made.fleet.slot_budget_bytes:,}" in str(refused.value)
    (folder,) = tmp_path.iterdir()
    assert newest_good(folder / "checkpoints").manifest.step == RISE - 1
    assert all(told is not None for told in pool.status().values()), "every slot lives"
    assert max(max(facts.peaks.values()) for facts in pool.call_all("memory").values()) <= made.fleet.slot_budget_bytes


def test_the_controller_leaves_a_plan_before_rows_outgrow_it(pool: SlotPool, tmp_path: Path) -> None:
    made = growing(pool, "nereus")
    world = run_job(pool, made, tmp_path)
    assert [record.step for record in world.records] == list(range(1, RISE + 2))
    assert [record.batch.width_tokens for record in world.records if record.batch] == [FIRST_TOKENS] * (RISE - 1) + [
        LAST_TOKENS
    ] * 2
    journal: list[Any] = list(read_journal(world.folder.events))
    changes = [each for each in journal if each["kind"] == "transition_started"]
    assert any("with rows of" in each["reason"] and each["step"] <= RISE for each in changes)
    assert not [each for each in journal if each["kind"] == "step_refused"], "it was foreseen"
    for row in read_metrics(world.folder.metrics):
        limit = LAST_TOKENS - 8 if row["training/global_step"] >= RISE else FIRST_TOKENS - 8
        assert row["response_length/limit"] == row["response_length/max"] == limit
        peaks = [value for name, value in row.items() if name.startswith("perf/ledger_bytes/")]
        assert max(peaks) <= made.fleet.slot_budget_bytes
