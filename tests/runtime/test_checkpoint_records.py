"""The records of a run that was resumed read as those of one run: steps done again count once, time away not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.config import Config, LoggerConfig, RunConfig
from nereus.errors import JournalError
from nereus.report.summary import render, summarise
from nereus.runtime.journal import Journal, RunFolder, is_being_written
from nereus.runtime.metrics import MetricsWriter, NoMirror, open_metrics, read_metrics

STEP = "training/global_step"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=6))
def test_the_last_row_of_a_step_counts_and_nothing_of_an_abandoned_history(tmp_path_factory, legs) -> None:
    """Legs of a run: each goes back by some steps to a checkpoint and does some steps."""
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    writer = MetricsWriter(path, NoMirror())
    expected: list[tuple[float, float]] = []
    for leg, (back, steps) in enumerate(legs):
        del expected[max(len(expected) - back, 0) :]
        for _ in range(steps):
            expected.append((len(expected) + 1, float(leg)))
            writer.write(len(expected), {"leg": float(leg)})
    writer.close()
    assert [(row[STEP], row["leg"]) for row in read_metrics(path)] == expected


def test_the_summary_of_a_resumed_run(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path)
    journal, metrics = Journal(folder.events), MetricsWriter(folder.metrics, NoMirror())

    def step(number: int, at_seconds: float) -> None:
        row = {"timing_s/step": 2.0}
        metrics.write(number, row)
        journal.append("step_done", at_seconds=at_seconds, step=number, metrics=row)

    journal.append("run_started", at_seconds=100.0, config={"run": {"steps": 3}})
    for number in (1, 2, 3):
        step(number, 110.0 + 2 * number)
    journal.append("run_stopped", at_seconds=117.0, reason="failed")
    journal.append("resumed", at_seconds=1000.0, step=2, config={"run": {"steps": 5}})
    unfinished = summarise(tmp_path)
    assert unfinished.outcome == "unfinished", "what ended before does not say how this goes"
    assert unfinished.training_seconds == 7.0
    for number in (3, 4, 5):
        step(number, 1020.0 + 2 * number)
    journal.append("run_stopped", at_seconds=1031.0, reason="done")
    summary = summarise(tmp_path)
    assert (summary.outcome, summary.steps, summary.planned_steps, summary.resumed_steps) == ("done", 5, 5, (2,))
    assert summary.run_seconds == (117 - 100) + (1031 - 1000)
    assert summary.training_seconds == (117 - 110) + (1031 - 1024)
    assert "done, 5 of 5 steps, 48.0 s\nresumed after step 2; steps done twice count once" in render(summary)
    journal.close()
    metrics.close()


CLAIM = """
import sys
from pathlib import Path
from nereus.errors import JournalError
from nereus.runtime.journal import Journal, is_being_written
path = Path(sys.argv[1])
assert is_being_written(path)
try:
    Journal(path).claim()
except JournalError as error:
    print(error)
"""


def test_one_process_at_a_time_writes_a_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    journal.append("run_started")
    assert not is_being_written(path)
    journal.claim()
    told = subprocess.run([sys.executable, "-c", CLAIM, str(path)], capture_output=True, text=True, check=True).stdout
    assert "events.jsonl: another process is writing this run" in told
    journal.close()
    assert not is_being_written(path)
    other = Journal(path)
    other.claim()
    with pytest.raises(JournalError, match="another process"):
        Journal(path).claim()
    other.close()


def test_a_resumed_run_goes_on_under_its_wandb_id(tmp_path: Path) -> None:
    config = Config(run=RunConfig(name="again"), logger=LoggerConfig(wandb="offline"))
    notes: list[str] = []
    for step in (1, 2):
        metrics = open_metrics(config, RunFolder(path=tmp_path), notes.append)
        metrics.write(step, {"critic/score/mean": 0.5})
        metrics.close()
    found = sorted(path.name.split("-")[3] for path in tmp_path.glob("wandb/offline-run-*"))
    assert len(set(found)) == 1, found
    assert notes == []
