"""The summary: a fold of what a run recorded; absence is tolerated, arithmetic is checked against numpy."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus.errors import JournalError
from nereus.report.summary import fold, render, reward_gain, summarise
from nereus.runtime.journal import Journal, RunFolder
from nereus.runtime.metrics import MetricsWriter, NoMirror

PLACE = Path("/runs/example")


def rows_of(samples: list[np.ndarray]) -> list[dict[str, float]]:
    return [
        {"critic/score/mean": step.mean(), "critic/score/std": step.std(ddof=1), "critic/score/count": step.size}
        for step in samples
    ]


def written(tmp_path: Path) -> RunFolder:
    """A run of 12 steps with one change that is done and one that failed."""
    folder = RunFolder(path=tmp_path)
    journal, metrics = Journal(folder.events), MetricsWriter(folder.metrics, NoMirror())
    journal.append("run_started", at_seconds=100.0, config={"run": {"steps": 12}}, slots=[0, 1])
    journal.append("warmup_done", at_seconds=110.0)
    for step in range(1, 13):
        row = {
            "critic/score/mean": step / 12,
            "critic/score/std": 0.1,
            "critic/score/count": 64,
            "timing_s/gen": 0.5 + step,
            "timing_s/step": 2.0,
            "timing_s/update_weights": 0.2,
            "transition/sync_counted_bytes": 1_000_000,
            "rollout_corr/logp_diff_max": step * 1e-6,
            "rollout_corr/mean_exp_abs_diff": 1.0001,
            "perf/ledger_bytes/slot_0": 100 + step,
            "perf/ledger_bytes/slot_10": 50,
            "perf/ledger_bytes/slot_2": 60,
        }
        if step == 6:
            row["timing_s/transition"] = 1.5
        metrics.write(step, row)
        journal.append("step_done", at_seconds=110.0 + 2 * step, step=step, metrics=row)
    first: dict[str, Any] = {"transition": 1, "step": 6, "from": "TP2·PP2·DP1", "to": "TP1·PP2·DP2"}
    second: dict[str, Any] = {"transition": 2, "step": 9, "from": "a", "to": "b"}
    journal.append("transition_started", reason="scripted before step 6", **first)
    journal.append(
        "transition_done",
        transition=1,
        state_version=7,
        seconds={"move": 1.0, "quiesce": 0.5},
        pause_seconds=1.5,
        planned_bytes=2_000_000,
        counted_bytes=2_000_000,
    )
    journal.append("transition_started", reason="scripted before step 9", **second)
    journal.append("transition_failed", transition=2, reason="a peer did not answer")
    journal.append("run_stopped", at_seconds=140.0, reason="done", steps=12)
    journal.close()
    metrics.close()
    return folder


def test_a_run_summarised(tmp_path: Path) -> None:
    summary = summarise(written(tmp_path).path)
    assert (summary.outcome, summary.steps, summary.planned_steps) == ("done", 12, 12)
    assert (summary.run_seconds, summary.training_seconds) == (40.0, 30.0)
    assert summary.transition_fraction == pytest.approx(1.5 / 30)
    assert summary.phase_seconds == {
        "gen": pytest.approx(7.0),
        "step": pytest.approx(2.0),
        "update_weights": pytest.approx(0.2),
    }
    done, failed = summary.transitions
    assert (done.step, done.before, done.after, done.state_version) == (6, "TP2·PP2·DP1", "TP1·PP2·DP2", 7)
    assert (failed.step, failed.reason) == (9, "a peer did not answer")
    assert summary.peak_ledger_bytes == {"0": 112, "2": 60, "10": 50}
    assert list(summary.peak_ledger_bytes) == ["0", "2", "10"]
    assert summary.parity_max_nats == pytest.approx(1.2e-5)
    assert summary.sync_bytes == 1_000_000


def test_the_text_says_it_all(tmp_path: Path) -> None:
    text = render(summarise(written(tmp_path).path))
    for words in (
        f"run {tmp_path.name}: done, 12 of 12 steps, 40.0 s",
        "reward: 0.250 in the first 5 steps, 0.833 in the last 5: +0.583",
        "before step 6: TP2·PP2·DP1 -> TP1·PP2·DP2\n    scripted before step 6\n",
        "pause 1.500 s (quiesce 0.500, move 1.000)",
        "planned 2,000,000, counted 2,000,000: equal (2.0 MB); state version 7",
        "failed: a peer did not answer",
        "share of run time, pauses alone: 5.00% of the 30.0 s of training",
        "weight sync, mean of a step: 0.200 s, 1,000,000 bytes",
        "max |dlogp| 1.20e-05, mean exp|dlogp| 1.000100",
        "slot 10",
        str(tmp_path / "events.jsonl"),
    ):
        assert words in text


def test_the_gain_is_that_of_the_samples() -> None:
    rng = np.random.default_rng(3)
    samples = [rng.normal(0.1 * step, 0.5, size=rng.integers(20, 60)) for step in range(12)]
    gain = reward_gain(rows_of(samples))
    first, last = np.concatenate(samples[:5]), np.concatenate(samples[-5:])
    error = math.sqrt(first.var(ddof=1) / first.size + last.var(ddof=1) / last.size)
    assert gain is not None
    assert (gain.window_steps, gain.first_reward, gain.last_reward) == (
        5,
        pytest.approx(first.mean()),
        pytest.approx(last.mean()),
    )
    assert gain.error_ratio == pytest.approx((last.mean() - first.mean()) / error)


def test_the_gain_of_means_alone() -> None:
    gain = reward_gain([{"critic/score/mean": value} for value in (0.0, 1.0, 4.0, 5.0)])
    assert gain is not None
    assert (gain.window_steps, gain.first_reward, gain.last_reward) == (2, 0.5, 4.5)
    assert gain.error_ratio == pytest.approx(4 / math.sqrt(0.25 + 0.25))


@pytest.mark.parametrize(("means", "standard_errors"), [([0.0, 0.0, 0.0, 0.0], 0.0), ([0.0, 0.0, 1.0, 1.0], math.inf)])
def test_the_gain_without_spread(means: list[float], standard_errors: float) -> None:
    rows = [{"critic/score/mean": mean, "critic/score/std": 0.0, "critic/score/count": 8} for mean in means]
    gain = reward_gain(rows)
    assert gain is not None
    assert gain.error_ratio == standard_errors


def test_too_few_steps_for_a_gain() -> None:
    assert reward_gain([]) is None
    assert reward_gain([{"critic/score/mean": 1.0}]) is None
    assert reward_gain([{"critic/score/mean": math.nan}] * 4) is None


def test_nothing_known_is_no_error() -> None:
    empty = fold([], [], PLACE)
    assert (empty.outcome, empty.steps, empty.reward, empty.transitions) == ("unfinished", 0, None, ())
    assert render(empty) == "run example: unfinished, 0 steps\n\ntransitions: none\n"


def test_a_change_that_did_not_end() -> None:
    events = [{"kind": "transition_started", "transition": 1, "step": 2, "from": "a", "to": "b", "at_seconds": 1.0}]
    summary = fold(events, [{"training/global_step": 1}], PLACE)
    assert summary.transitions[0].reason == "did not end"
    assert "failed: did not end" in render(summary)


def test_bytes_that_differ_are_shouted() -> None:
    events = [{"kind": "transition_done", "transition": 1, "planned_bytes": 10, "counted_bytes": 9}]
    assert "planned 10, counted 9: NOT EQUAL" in render(fold(events, [], PLACE))


def test_a_folder_without_a_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"events\.jsonl"):
        summarise(tmp_path)


def test_spells_of_plans_and_what_deciding_took() -> None:
    def step(number: int, plan: str, seconds: float, deciding: float) -> dict[str, Any]:
        metrics = {"timing_s/step": seconds, "controller/deciding_s": deciding}
        return {"kind": "step_done", "step": number, "plan_id": plan, "at_seconds": 10.0 * number, "metrics": metrics}

    search = {"kind": "search_done", "processor_seconds": 0.5, "at_seconds": 25.0}
    change = {"transition": "t1", "step": 3, "from": "poor", "to": "better", "pause_seconds": 1.0, "at_seconds": 28.0}
    first = [
        {"kind": "control_started", "at_seconds": 0.0},
        step(1, "a", 9.0, 0.1),
        step(2, "a", 3.0, 0.2),
        {**search, "between_processor_seconds": 1.5},
        {"kind": "decision", "entry": {"is": "Decision"}, "at_seconds": 25.0},
        {"kind": "transition_done", **change},
        step(3, "b", 2.0, 0.3),
    ]
    again = [  # broken off there; resumed from step 2 under the new plan
        {"kind": "resumed", "step": 2, "at_seconds": 100.0},
        {"kind": "control_started", "at_seconds": 101.0},
        {**step(3, "b", 1.0, 0.5), "at_seconds": 111.0},
        {**step(4, "b", 2.0, 0.6), "at_seconds": 121.0},
        {**search, "between_processor_seconds": 1.0, "at_seconds": 121.0},
        {"kind": "control_ended", "seconds": 0.7, "at_seconds": 121.0},
    ]
    summary = fold([*first, *again], [], PLACE)
    assert [(s.first_step, s.last_step, s.median_seconds, s.plan) for s in summary.spells] == [
        (1, 2, 6.0, "poor"),
        (3, 4, 1.5, "better"),
    ]
    decided = summary.deciding
    assert decided is not None
    assert decided.seconds == pytest.approx(0.3 + 0.7)
    assert (decided.decisions_count, decided.searches_count) == (1, 2)
    assert (decided.search_processor_seconds, decided.process_processor_seconds) == (1.0, 2.5)
    text = render(summary)
    assert "  steps 1 to 2    6.000  poor\n  steps 3 to 4    1.500  better\n" in text
    share = 1.0 / summary.training_seconds
    assert f"1 decision; the job waited 1.000 s for it, {share:.3%} of the {summary.training_seconds:.1f} s" in text
    assert "2 searches beside the job took 1.00 s of processor, starting their process 2.50 s" in text


def test_the_share_is_of_training_alone() -> None:
    """Start-up and warm-up before the first step do not count."""
    events = [
        {"kind": "run_started", "at_seconds": 0.0},
        {"kind": "warmup_done", "at_seconds": 50.0},
        {"kind": "step_done", "at_seconds": 92.0, "metrics": {"timing_s/step": 2.0}},
        {"kind": "transition_done", "transition": "t1", "pause_seconds": 1.0, "at_seconds": 95.0},
        {"kind": "run_stopped", "at_seconds": 100.0},
    ]
    summary = fold(events, [], PLACE)
    assert (summary.run_seconds, summary.training_seconds) == (100.0, 10.0)
    assert summary.transition_fraction == pytest.approx(0.1)
