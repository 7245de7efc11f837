"""What bench-adapt makes of its runs: which static plan is best, how steps add up, paired ratios with intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.adapt_job import (
    BUDGET_BYTES,
    LONG_TOKENS,
    SHORT_TOKENS,
    SMALL,
    WHOLE,
    Segment,
    fleet_steps,
    job,
    response_steps,
    schedule_of,
    told,
)
from benchmarks.adapt_job import PLANS as STATIC
from benchmarks.adapt_report import best_by_segment, best_static, lasting, ratio, segment_steps, static_rows
from nereus.config import FleetConfig, NereusConfig
from nereus.layout import first_plan
from nereus.lengths import row_tokens
from nereus.memory import check_memory, plan_peaks
from nereus.validate import validate

SEGMENTS = (Segment(name="a", first_step=1), Segment(name="b", first_step=5, slots=3), Segment(name="c", first_step=7))


def run(repeat: int, seconds: list[float], **more: Any) -> dict[str, Any]:
    return {"repeat": repeat, "step_seconds": seconds, "complete": True, **more}


def test_the_schedule_covers_the_steps_and_the_fleet_is_whole_at_its_end() -> None:
    segments = schedule_of(30)
    assert sum(segment_steps(segments, 30)) == 30
    steps = fleet_steps(segments, 7.5)
    assert [(each.slots, each.away_seconds) for each in steps] == [(3, None), (4, 7.5)]
    assert [each.max_response_tokens for each in response_steps(segments)] == [LONG_TOKENS]


@pytest.mark.parametrize("name", STATIC)
def test_every_plan_is_a_valid_job_that_may_begin(name: str) -> None:
    config = job(STATIC[name], 30, 1, NereusConfig(policy="fixed"), FleetConfig(slot_budget_bytes=BUDGET_BYTES))
    validate(config)
    check_memory(config)


def test_the_budget_holds_whole_mini_batches_of_short_responses_alone() -> None:
    for micro_batch, tokens, fits in (
        (WHOLE, SHORT_TOKENS, True),
        (SMALL, LONG_TOKENS, True),
        (WHOLE, LONG_TOKENS, False),
    ):
        config = job(STATIC[f"DP4 mb{micro_batch}"], 30, 1, NereusConfig(), FleetConfig())
        peaks = plan_peaks(config, first_plan(config), row_tokens(config.data, tokens))
        assert (max(peak.total_bytes for peak in peaks) <= BUDGET_BYTES) == fits


def test_the_best_plan_by_segment_and_over_all() -> None:
    def found(*seconds: float, peak_bytes: int = 1) -> dict[str, Any]:
        return {"seconds": list(seconds), "peak_bytes": peak_bytes}

    measured = {
        "a": {"wide": found(1.0, 1.0, 9.0), "small": found(1.5), "fat": found(0.5)},
        "b": {"small": found(1.5), "fat": found(0.5)},
        "c": {"wide": found(2.0), "small": found(1.5), "fat": found(0.5, peak_bytes=BUDGET_BYTES + 1)},
    }
    rows = static_rows(SEGMENTS, measured)
    assert rows == {"wide": [1.0, None, 2.0], "small": [1.5, 1.5, 1.5], "fat": [0.5, 0.5, None]}
    assert lasting(measured) == {"wide", "small"}
    assert best_by_segment(rows) == ["fat", "fat", "small"]
    del rows["fat"]
    assert best_by_segment(rows) == ["wide", "small", "small"]
    assert best_static(rows, segment_steps(SEGMENTS, 10)) == "small"  # the other one waits in the second segment


def test_ratios_are_of_the_same_repetitions_and_their_interval_covers_noise() -> None:
    rng = np.random.default_rng(3)
    slow = [run(n, list(rng.lognormal(0.0, 0.1, 10))) for n in range(3)]
    fast = [run(each["repeat"], [0.5 * second for second in each["step_seconds"]]) for each in slow]
    found = ratio(fast, slow, SEGMENTS)
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    other = [run(n, list(rng.lognormal(0.0, 0.1, 10))) for n in range(3)]
    noisy = ratio(other, slow, SEGMENTS)
    assert noisy is not None
    assert noisy.low < noisy.mean < noisy.high
    assert noisy.low < 1.0 < noisy.high
    assert ratio(fast, [run(7, [1.0] * 10)], SEGMENTS) is None
    assert ratio(fast, [run(0, [1.0] * 10) | {"complete": False}], SEGMENTS) is None


def test_steps_add_up_to_the_wall_whatever_came_between_and_was_done_twice() -> None:
    ends = ((1, 12.0), (2, 14.0), (3, 17.0), (2, 25.0), (3, 27.0), (4, 29.0))
    records = [
        {"kind": "state", "at_seconds": 10.0},
        *({"kind": "step_done", "step": step, "at_seconds": at, "plan_id": "x"} for step, at in ends[:3]),
        {"kind": "recovered", "at_seconds": 22.0},
        {"kind": "suspended", "at_seconds": 22.0, "seconds": 1.5},
        *({"kind": "step_done", "step": step, "at_seconds": at, "plan_id": "x"} for step, at in ends[3:]),
    ]
    found = told(records)
    assert found["step_seconds"] == [2.0, 13.0, 2.0, 2.0]
    assert sum(found["step_seconds"]) == 29.0 - 10.0
    assert (found["waited_seconds"], found["reformed"]) == (1.5, 1)
