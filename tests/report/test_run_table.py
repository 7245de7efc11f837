"""The table of one run folder: its steps' metrics, when things were, where a change's pause went."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from nereus.errors import JournalError, NereusError
from nereus.report.run_table import main, run_or_sample, run_table
from nereus.report.table import read_table
from nereus.runtime.journal import Journal, JsonLines, RunFolder

STEPS, STEP_SECONDS, PAUSE_SECONDS = 4, 2.0, 0.5


def run_folder(path: Path, changes: tuple[int, ...] = (3,), **started: Any) -> Path:
    """A run folder as a run of four steps leaves it, with a change of plan before each of `changes`."""
    path.mkdir(parents=True)
    folder = RunFolder(path=path)
    folder.config.write_text("run: {}\n", encoding="utf-8")
    journal, metrics = Journal(folder.events), JsonLines(folder.metrics)
    config = {"run": {"seed": 7}, "nereus": {"policy": "nereus"}}
    journal.append("run_started", at_seconds=1000.0, config=config, slots=2, **started)
    journal.append("warmup_done", at_seconds=1010.0, steps=3)
    journal.append("state", at_seconds=1011.0, step=0)
    now = 1012.0
    for step in range(1, STEPS + 1):
        if step in changes:
            now += PAUSE_SECONDS
            parts = {"quiesce": 0.1, "transfer": 0.4}
            told = {"transition": f"t{step}", "step": step, "seconds": parts, "pause_seconds": PAUSE_SECONDS}
            journal.append("transition_done", at_seconds=now, **told)
        now += STEP_SECONDS
        row: dict[str, object] = {
            "training/global_step": float(step),
            "timing_s/step": STEP_SECONDS,
            "timing_s/gen": 0.5,
        }
        row |= {"timing_s/transition": PAUSE_SECONDS * (step in changes), "plan/error/step": 0.1, "actor/loss": 1.0}
        row |= {"plan/error/memory/slot_0": 9.0, "perf/ledger_bytes/slot_0": 9.0}
        journal.append("step_done", at_seconds=now, step=step, metrics=row)
        metrics.append(row)
    journal.append("run_stopped", at_seconds=now, reason="done", steps=STEPS)
    journal.close()
    metrics.close()
    return path


def value(table: pl.DataFrame, metric: str, step: int | None) -> float:
    at = pl.col("step").is_null() if step is None else pl.col("step") == step
    return table.filter(pl.col("metric") == metric, at)["value"].item()


def test_when_things_were(tmp_path: Path) -> None:
    table, source = run_table(run_folder(tmp_path / "one"))
    assert value(table, "timeline/warmed_up_s", None) == 10.0
    assert value(table, "timeline/ready_s", None) == 11.0
    assert value(table, "timeline/begin_s", 1) == 12.0
    assert value(table, "timeline/begin_s", 3) == 12.0 + 2 * STEP_SECONDS + PAUSE_SECONDS
    assert value(table, "timeline/change_begin_s", 3) == 12.0 + 2 * STEP_SECONDS
    assert (source.measured, source.sample, list(source.runs)) == (True, False, ["one"])
    assert source.runs["one"].date == "1970-01-01T00:16:40+00:00"


def test_parts_of_changes_and_only_what_is_drawn(tmp_path: Path) -> None:
    table, _ = run_table(run_folder(tmp_path / "one"))
    assert value(table, "transition_s/transfer", 3) == 0.4
    assert value(table, "timing_s/transition", 3) == PAUSE_SECONDS
    assert set(table["seed"]) == {7}
    names = set(table["metric"])
    assert "plan/error/step" in names
    assert not names & {"actor/loss", "plan/error/memory/slot_0", "perf/ledger_bytes/slot_0", "training/global_step"}


def test_a_simulated_run_is_not_measured(tmp_path: Path) -> None:
    assert not run_table(run_folder(tmp_path / "one", simulated="8xh100"))[1].measured


def test_a_sample_says_so_and_where_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "one.sample.parquet"
    assert main([str(run_folder(tmp_path / "one")), str(path)]) == 0
    table, source = read_table(path)
    assert source.sample
    assert source.measured
    assert source.runs["one"].machine
    assert table.equals(run_table(tmp_path / "one")[0])


def test_what_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = tmp_path / "one.sample.parquet"
    main([str(run_folder(tmp_path / "one")), str(sample)])
    monkeypatch.delenv("NEREUS_REQUIRE_MEASURED", raising=False)
    assert not run_or_sample(tmp_path / "one", sample, asked_for=False)[1].sample
    assert run_or_sample(tmp_path / "none", sample, asked_for=False)[1].sample
    with pytest.raises(JournalError, match="expected a run folder"):
        run_or_sample(tmp_path / "none", sample, asked_for=True)
    monkeypatch.setenv("NEREUS_REQUIRE_MEASURED", "1")
    with pytest.raises(NereusError, match="measure it first: make run"):
        run_or_sample(tmp_path / "none", sample, asked_for=False)


def test_a_run_without_steps(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path)
    folder.config.write_text("run: {}\n", encoding="utf-8")
    Journal(folder.events).append("run_started", at_seconds=1.0, config={}, slots=2)
    with pytest.raises(JournalError, match="no step is done yet"):
        run_table(tmp_path)
