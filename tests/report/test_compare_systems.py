"""Compared runs of several systems: marks, confidence intervals, ratios to each baseline, folders of runs, page and W&B."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.cli.main import main
from nereus.config import Config, RunConfig
from nereus.experiment import Run, Scene
from nereus.report.compare import lines, phase_seconds, render, step_ends
from nereus.report.compare_page import page
from nereus.report.compare_statistics import mean_half_width, ratio_of_means_half_width, ratio_of_sums_half_width
from nereus.report.compared_run import ComparedRun, load_run, load_runs
from nereus.report.record import provenance_of, write_record
from nereus.runtime.journal import Journal, RunFolder
from nereus.runtime.metrics import open_metrics


def run(name: str, seconds: list[float], system: str = "nereus", *, simulated: bool = False) -> ComparedRun:
    rows = [
        {
            "training/global_step": float(step),
            "timing_s/step": each,
            "timing_s/gen": each / 2,
            "timing_s/agent_loop/slowest": 100.0,
            "perf/total_num_tokens": 100.0,
            "critic/score/mean": step / 10,
        }
        for step, each in enumerate(seconds, start=1)
    ]
    return ComparedRun(name=name, path=Path(name), rows=rows, system=system, simulated=simulated)


OURS = run("ours", [1.0, 1.2, 0.8, 1.0])
VERL = run("theirs", [2.0, 2.2, 1.8, 2.0], "verl")
PAPER = run("paper", [4.0, 4.2, 3.8, 4.0], "openrlhf", simulated=True)


def folder(path: Path, made: Run | None = None, *, at_seconds: float = 1.8e9) -> Path:
    """A run folder with three steps, of which the journal begins at `at_seconds`."""
    path.mkdir(parents=True)
    record = RunFolder(path=path)
    record.config.write_text("run: {}\n", encoding="utf-8")
    Journal(record.events).append("run_started", config={}, at_seconds=at_seconds)
    metrics = open_metrics(Config(run=RunConfig(name=path.name)), record, pytest.fail)
    for step in (1, 2, 3):
        metrics.write(step, {"timing_s/step": float(step), "transition/count": 0.0})
    metrics.close()
    if made is not None:
        write_record(path, made, provenance_of("test"))
    return path


def test_ratios_to_each_baseline() -> None:
    found = {line.text: line for line in lines([OURS, VERL, replace(PAPER, simulated=False)])}
    line = found["as fast as theirs"]
    assert line.by_run["ours"] == pytest.approx(2.0)
    assert line.by_run["paper"] == pytest.approx(0.5)
    assert math.isnan(line.by_run["theirs"])
    variance = statistics.variance([1.0, 1.2, 0.8, 1.0]) / 4
    assert line.half_widths["ours"] == pytest.approx(3.182446 * 2.0 * math.sqrt(variance / 1**2 + variance / 2**2))
    assert found["as fast as paper"].by_run["ours"] == pytest.approx(4.0)


def test_no_ratio_between_measured_and_simulated() -> None:
    text = render([OURS, VERL, PAPER])
    assert text.splitlines()[1].split() == ["nereus,", "measured", "verl,", "measured", "openrlhf,", "simulated"]
    rows = {line[:24].strip(): line for line in text.splitlines()}
    assert rows["seconds a step"].count("x)") == 1, "theirs to ours; paper has none"
    assert "as fast as paper" not in text, "nothing else is simulated"
    assert "no ratio is taken between a measured and a simulated run" in text
    assert "simulated: the figures of a model" in text
    assert "simulated" not in render([OURS, VERL])
    both = render([run("own", [2.0, 2.1], simulated=True), PAPER])
    assert "as fast as paper" in both
    assert "no ratio is taken" not in both


def test_parts_of_phases_are_no_phases() -> None:
    assert phase_seconds(OURS) == pytest.approx({"gen": 0.5, "other": 0.5})


def test_when_steps_end() -> None:
    rows = [dict(row) for row in OURS.rows]
    rows[2]["timing_s/transition"] = 5.0
    assert step_ends(replace(OURS, rows=rows)) == pytest.approx({1: 1.0, 2: 2.2, 3: 8.0, 4: 9.0})
    del rows[1]["timing_s/step"]
    assert step_ends(replace(OURS, rows=rows)) == {}


def test_half_widths_by_hand() -> None:
    assert mean_half_width([1.0, 3.0]) == pytest.approx(12.7062 * 1.0, rel=1e-4)
    assert math.isnan(mean_half_width([1.0]))
    assert math.isnan(ratio_of_means_half_width([1.0], [1.0, 2.0]))
    assert ratio_of_sums_half_width([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == pytest.approx(0.0, abs=1e-12)


@given(st.lists(st.floats(0.1, 100.0), min_size=2, max_size=20), st.floats(0.01, 100.0))
def test_half_widths_scale(values: list[float], factor: float) -> None:
    scaled = [factor * value for value in values]
    assert mean_half_width(scaled) == pytest.approx(factor * mean_half_width(values), rel=1e-6, abs=1e-9)
    ones = [1.0] * len(values)
    assert ratio_of_sums_half_width(values, ones) == pytest.approx(mean_half_width(values), rel=1e-6, abs=1e-9)


def test_whether_a_folder_was_simulated(tmp_path: Path) -> None:
    scene = Scene(fleet="8xh100")
    made = Run(experiment="e", variant="verl-tuned", system="verl", scene=scene)
    simulated = load_run(folder(tmp_path / "a", made, at_seconds=0.0))
    assert (simulated.name, simulated.system, simulated.mark) == ("verl-tuned", "verl", "simulated")
    measured = load_run(folder(tmp_path / "b"))
    assert (measured.name, measured.system, measured.mark) == ("b", "nereus", "measured")
    assert load_run(tmp_path / "b/metrics.jsonl").rows == measured.rows
    copied = tmp_path / "c.jsonl"
    copied.write_bytes((tmp_path / "b/metrics.jsonl").read_bytes())
    assert load_run(copied).system == "nereus", "not taken for verl's, whose names these are"
    assert [each.name for each in load_runs(tmp_path)] == ["verl-tuned", "b"]


def test_the_page(tmp_path: Path) -> None:
    figure = tmp_path / "compare.png"
    figure.write_bytes(b"png")
    text = page([OURS, replace(PAPER, name="<paper>")], figure)
    assert "&lt;paper&gt;" in text
    assert "<paper>" not in text
    assert "openrlhf, simulated" in text
    assert "data:image/png;base64,cG5n" in text


def test_by_way_of_wandb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Run(experiment="e", variant="verl-tuned", system="verl", scene=Scene(fleet="8xh100"))
    runs = [str(folder(tmp_path / "b")), str(folder(tmp_path / "a", made, at_seconds=0.0))]
    words = ["--out", str(tmp_path / "out")]
    assert main(["compare", *runs, *words, "--html", "--wandb", str(tmp_path / "w"), "--group", "job"]) == 0
    direct = capsys.readouterr().out
    assert (tmp_path / "out/compare.html").is_file()
    written = [Path(line.removeprefix("W&B, offline: ")) for line in direct.splitlines() if "offline" in line]
    assert len(written) == 2
    assert main(["compare", *map(str, written), *words]) == 0
    table = direct[: direct.index("\n\n")]
    assert capsys.readouterr().out.startswith(table), "the same from W&B's files"
    assert {each.name for each in load_runs(tmp_path / "w")} == {"b", "verl-tuned"}


def test_json_is_not_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.jsonl").write_text(json.dumps({"loss": 1.0}) + "\n", encoding="utf-8")
    assert main(["compare", str(tmp_path / "other.jsonl"), str(tmp_path / "other.jsonl")]) == 2
    assert "or a log of verl or OpenRLHF" in capsys.readouterr().err
