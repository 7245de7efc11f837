"""Rows that grow, by a schedule, by themselves or at once: controller, edge and search over a world with real peaks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from nereus.config import Config, PlanConfig, ResponseStepConfig, StageConfig
from nereus.control.records import StepRefused
from nereus.events import ChangePlan
from nereus.layout import Plan, first_plan
from nereus.lengths import limit_row_tokens
from nereus.memory import OVERHEAD_BYTES, plan_peaks
from nereus.report.replay import first_difference
from nereus.workload import StepBatch, largest_batch
from tests.runtime.toy_world import ToyWorld, job, run

OVERHEAD_SHARE = 0.3
"""What of the overhead that is supposed of a slot this world's slots have, until engines are built anew: then they have all."""
WIDE = PlanConfig(
    actor_train=StageConfig(dp=4, micro_batch=16),
    actor_generate=StageConfig(dp=4),
    critic_train=StageConfig(dp=4, micro_batch=16),
    reference_infer=StageConfig(dp=4, micro_batch=16),
)


def growing(rises: dict[int, int], first_tokens: int, budget_tokens: int, steps: int = 24) -> Config:
    """Prompts of 64 tokens, responses as stated, a budget that holds the first plan with rows of `budget_tokens`."""
    schedule = tuple(ResponseStepConfig(step=step, max_response_tokens=tokens) for step, tokens in rises.items())
    made = replace(job(steps=steps), plan=WIDE)
    data = replace(
        made.data,
        prompts_per_step=32,
        samples_per_prompt=4,
        max_prompt_tokens=64,
        max_response_tokens=first_tokens,
        response_schedule=schedule,
    )
    made = replace(made, data=data)
    budget = max(peaks_of(made, first_plan(made), budget_tokens).values()) + (1 << 20)
    return replace(made, fleet=replace(made.fleet, slot_budget_bytes=budget))


def peaks_of(config: Config, plan: Plan, width_tokens: int) -> dict[str, int]:
    """What the slots really have."""
    less = round((1 - OVERHEAD_SHARE) * OVERHEAD_BYTES) if plan == first_plan(config) else 0
    return {str(peak.slot): peak.total_bytes - less for peak in plan_peaks(config, plan, width_tokens)}


@dataclass
class GrowingWorld(ToyWorld):
    """Rows are as wide as `widths` says, else as they may be; steps whose rows are too wide are refused."""

    widths: dict[int, int] = field(default_factory=dict)
    refusals: list[int] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def batch(self, step: int) -> StepBatch:
        return replace(largest_batch(self.config, step), width_tokens=self.width(step))

    def width(self, step: int) -> int:
        return self.widths.get(step, limit_row_tokens(self.config.data, step))

    def peak_bytes(self, batch: StepBatch) -> dict[str, int]:
        return peaks_of(self.config, self.plan, batch.width_tokens)

    def _ran_step(self, step: int) -> Any:
        width = self.width(step)
        needed = max(peaks_of(self.config, self.plan, width).values())
        if needed > self.config.fleet.slot_budget_bytes:
            assert self.refusals[-1:] != [step], "the next plan does not hold these rows either"
            self.refusals.append(step)
            return StepRefused(at_seconds=self._clock, step=step, width_tokens=width, reason="too wide")
        self.peaks.append(needed)
        return super()._ran_step(step)


def ran(world: GrowingWorld, path: Path) -> list[ChangePlan]:
    """Drives the job to its end; the changes. Every step was done once, within the budget, and a replay decides alike."""
    _, records = run(world, path / "events.jsonl")
    assert [step for step, _ in world.ran] == list(range(1, world.config.run.steps + 1))
    assert max(world.peaks) <= world.config.fleet.slot_budget_bytes
    assert first_difference(records) is None
    return [order for order in world.orders if isinstance(order, ChangePlan)]


def test_a_plan_that_a_rise_of_the_limit_outgrows_is_left_before_it(tmp_path: Path) -> None:
    world = GrowingWorld(growing({14: 192}, 32, budget_tokens=176))
    changes = ran(world, tmp_path)
    assert not world.refusals
    forced = [change for change in changes if "with rows of 256 tokens" in change.reason]
    assert forced, [change.reason for change in changes]
    assert forced[0].step <= 14
    roomy = GrowingWorld(growing({14: 192}, 32, budget_tokens=400))
    (tmp_path / "roomy").mkdir()
    assert not [change for change in ran(roomy, tmp_path / "roomy") if "fit" in change.reason]


def test_rows_that_grow_by_themselves_are_met_before_they_are_too_wide(tmp_path: Path) -> None:
    widths = {step: 96 + 8 * step for step in range(1, 25)}
    world = GrowingWorld(growing({}, 448, budget_tokens=200), widths=widths)
    changes = ran(world, tmp_path)
    assert not world.refusals
    assert any("stops fitting" in change.reason for change in changes), [change.reason for change in changes]


@pytest.mark.parametrize("at", [1, 9])
def test_rows_that_are_suddenly_too_wide_wait_for_a_plan_that_holds_them(tmp_path: Path, at: int) -> None:
    widths = {step: 96 if step < at else 256 for step in range(1, 25)}
    world = GrowingWorld(growing({}, 448, budget_tokens=176), widths=widths)
    changes = ran(world, tmp_path)
    assert world.refusals == [at]
    assert changes[-1].step >= at
    assert [change for change in changes if change.step == at], "the plan is changed before that very step"
