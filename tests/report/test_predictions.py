"""The summary of predictions: medians before and after calibration, first steps of new plans apart, nothing for no journal."""

from __future__ import annotations

from typing import Any

import pytest

from nereus.report.predictions import prediction_lines, predictions


def pair(step: int, said: float, prior: float, took: float, *, is_new: bool = False) -> list[dict[str, Any]]:
    return [
        {
            "kind": "prediction",
            "step": step,
            "is_new": is_new,
            "seconds": {"gen": [said / 2, 0.1], "update_actor": [said / 2, 0.1]},
            "step_seconds": [said, 0.1],
            "prior_seconds": prior,
            "memory_expected_bytes": {"0": 160.0},
            "memory_safe_bytes": {"0": 170.0},
        },
        {
            "kind": "observed",
            "step": step,
            "seconds": {"gen": took / 2, "update_actor": took / 2},
            "peak_bytes": {"0": 100 if step > 1 else 121},
            "memory_expected_bytes": {"0": 110.0},
            "memory_safe_bytes": {"0": 120.0},
        },
    ]


def run() -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"kind": "run_started"}, {"kind": "probe"}]
    events += pair(1, 3.0, 3.0, 2.0, is_new=True)
    for step in range(2, 12):
        events += pair(step, 2.1, 3.0, 2.0)
    events += pair(12, 1.2, 1.8, 1.0, is_new=True)
    change = {"predicted_seconds": [0.6, 0.1], "seconds": {"verify": 0.2, "rate": 0.2}}
    return [*events, {"kind": "transition_observed", **change}, {"kind": "run_stopped"}]


def test_errors_before_and_after_calibration_and_of_new_plans() -> None:
    found = predictions(run())
    assert found is not None
    assert (found.steps, found.last_steps, found.new_plans_count) == (12, 10, 2)
    assert found.prior_share == pytest.approx(0.5)
    assert found.last_share == pytest.approx(0.05)
    assert found.new_plan_share == pytest.approx((0.5 + 0.2) / 2)
    assert found.inside_share == pytest.approx(11 / 12)  # 0.2 off with 0.1 stated is inside, 1.0 off is not
    assert found.phase_share["gen"] == pytest.approx(0.05)
    assert found.memory_share == pytest.approx(0.1)  # against the rows that the steps had, not those they might have
    assert (found.peaks_count, found.unsafe_peaks_count) == (12, 1)
    assert found.change_share == pytest.approx(0.5)


def test_the_text_says_them() -> None:
    text = "\n".join(prediction_lines(predictions(run())))
    assert "before calibration (probe and priors only)   50.0%   of 12 steps" in text
    assert "calibrated, before each of the last steps     5.0%   of 10 steps" in text
    assert "first steps of plans not run before          35.0%   of 2" in text
    assert "seconds of a change of plan: 50.0%" in text
    assert "peak memory of a slot, last steps: 10.0%; 1 of 12 peaks above what was held safe" in text


def test_runs_without_predictions_have_no_lines() -> None:
    assert predictions([{"kind": "run_started"}, {"kind": "step_done", "step": 1}]) is None
    assert prediction_lines(None) == []


def test_a_step_that_was_never_measured_is_left_out() -> None:
    torn = [event for event in run() if not (event["kind"] == "observed" and event["step"] == 12)]
    found = predictions(torn)
    assert found is not None
    assert (found.steps, found.new_plans_count) == (11, 1)
    assert found.change_share == pytest.approx(0.5)
    again = predictions([*torn, *pair(12, 1.0, 1.0, 1.0)])  # the resumed run does it once more
    assert again is not None
    assert again.steps == 12
