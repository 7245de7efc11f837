"""Tokens/s by cluster: how many slots a run had follows from its rates, their kind from its journal; measured or simulated."""

import math
from pathlib import Path

import polars as pl
import pytest

from nereus.errors import ConfigError, JournalError, NereusError
from nereus.report.cluster_table import UNTOLD, cluster_of, cluster_table, main, runs_or_sample
from nereus.report.compared_run import ComparedRun
from nereus.report.table import read_table
from nereus.runtime.journal import Journal, JsonLines, RunFolder

SECONDS = (2.0, 4.0)
TOKENS = 600.0


def rows(slots: int | None) -> list[dict[str, float]]:
    """Two steps on so many slots; None: the rate of one is not told."""
    made = []
    for step, seconds in enumerate(SECONDS, 1):
        row = {"training/global_step": float(step), "timing_s/step": seconds, "perf/total_num_tokens": TOKENS}
        made.append(row if slots is None else row | {"perf/throughput": TOKENS / seconds / slots})
    return made


def run_folder(path: Path, slots: int, *, kind: str = "cpu", began_seconds: float = 1.8e9, steps: bool = True) -> Path:
    """A run folder whose journal says what its slots are."""
    path.mkdir(parents=True)
    folder = RunFolder(path=path)
    folder.config.write_text("run: {}\n", encoding="utf-8")
    journal, metrics = Journal(folder.events), JsonLines(folder.metrics)
    journal.append("run_started", at_seconds=began_seconds, config={}, slots=slots)
    journal.append("probe", at_seconds=began_seconds, profile={"device": kind})
    for row in rows(slots) if steps else ():
        metrics.append({**row, "transition/count": 0.0})
    journal.close()
    metrics.close()
    return path


def value(table: pl.DataFrame, run: str, metric: str) -> float:
    return table.filter(pl.col("run_id") == run, pl.col("metric") == metric)["value"].item()


@pytest.mark.parametrize(("slots", "cluster"), [(1, "1 slot"), (16, "16 slots"), (None, UNTOLD)])
def test_how_many_slots_follows_from_the_rates(slots: int | None, cluster: str) -> None:
    assert cluster_of(ComparedRun(name="log", path=Path("none/verl.log"), rows=rows(slots), system="verl")) == cluster


def test_runs_by_cluster_measured_and_simulated(tmp_path: Path) -> None:
    small = run_folder(tmp_path / "runs/small", 2)
    large = run_folder(tmp_path / "runs/large", 8, kind="H100", began_seconds=0.0)
    table, source = runs_or_sample([], tmp_path / "runs", tmp_path / "none.parquet")
    assert dict(table.select("run_id", "variant").iter_rows()) == {"small": "2 x cpu", "large": "8 x H100"}
    assert value(table, "small", "run/tokens_per_second") == 2 * TOKENS / sum(SECONDS)
    assert value(table, "small", "run/tokens_per_second_half_width") > 0
    assert (value(table, "small", "run/simulated"), value(table, "large", "run/simulated")) == (0.0, 1.0)
    assert (source.measured, source.sample, set(source.runs)) == (False, False, {"small", "large"})
    assert runs_or_sample([small], tmp_path / "runs", tmp_path / "none.parquet")[1].measured
    again, _ = runs_or_sample([small, small, large], tmp_path, tmp_path / "none.parquet")
    assert set(again["run_id"]) == {"small", "small (2)", "large"}


def test_a_run_that_is_not_done_is_passed_over_unless_it_is_named(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs/whole", 2)
    begun = run_folder(tmp_path / "runs/begun", 2, steps=False)
    (tmp_path / "runs/note.txt").touch()
    table, _ = runs_or_sample([], tmp_path / "runs", tmp_path / "none.parquet")
    assert set(table["run_id"]) == {"whole"}
    with pytest.raises(JournalError, match="holds no steps"):
        runs_or_sample([begun], tmp_path / "runs", tmp_path / "none.parquet")
    with pytest.raises(ConfigError, match="no such file or folder"):
        runs_or_sample([tmp_path / "gone"], tmp_path / "runs", tmp_path / "none.parquet")


def test_a_run_without_tokens_is_refused() -> None:
    bare = [{key: value for key, value in row.items() if "tokens" not in key} for row in rows(2)]
    with pytest.raises(JournalError, match="does not tell tokens and seconds"):
        cluster_table([ComparedRun(name="log", path=Path("log"), rows=bare, system="openrlhf")])


def test_the_sample_where_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = tmp_path / "sample.parquet"
    assert main([str(sample), str(run_folder(tmp_path / "a/one", 2))]) == 0
    table, source = runs_or_sample([], tmp_path / "none", sample)
    assert source.sample
    assert all(run.machine and run.date for run in source.runs.values())
    assert table.equals(read_table(sample)[0])
    monkeypatch.setenv("NEREUS_REQUIRE_MEASURED", "1")
    with pytest.raises(NereusError, match="make run"):
        runs_or_sample([], tmp_path / "none", sample)


def test_one_step_has_no_interval() -> None:
    single = ComparedRun(name="log", path=Path("log"), rows=rows(2)[:1], system="verl")
    table, _ = cluster_table([single])
    assert "run/tokens_per_second_half_width" not in set(table["metric"])
    assert math.isclose(value(table, "log", "run/tokens_per_second"), TOKENS / SECONDS[0])
