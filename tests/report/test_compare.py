"""Runs side by side: arithmetic by hand, a W&B run gives the numbers of its metrics.jsonl, errors say what is wrong."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nereus.cli.main import main
from nereus.config import Config, LoggerConfig, RunConfig
from nereus.errors import ConfigError, JournalError
from nereus.report.compare import lines, phase_seconds, render
from nereus.report.compare_figure import draw
from nereus.report.compared_run import ComparedRun, load_run, named
from nereus.report.wandb_folder import BLOCK_BYTES, find_wandb_file, read_wandb
from nereus.runtime.journal import Journal, RunFolder
from nereus.runtime.metrics import open_metrics

PNG = b"\x89PNG\r\n\x1a\n"


def row(step: int, **more: float) -> dict[str, float]:
    told = {
        "training/global_step": step,
        "timing_s/gen": 0.5,
        "timing_s/update_actor": 1.0,
        "timing_s/step": 2.0,
        "timing_s/transition": 0.0,
        "transition/count": 0.0,
        "perf/total_num_tokens": 300.0,
        "critic/score/mean": step / 10,
        "critic/score/std": 0.1,
        "critic/score/count": 8,
        "rollout_corr/logp_diff_max": step * 1e-6,
    }
    return told | {key.replace("__", "/"): value for key, value in more.items()}


def compared(name: str, *rows: Mapping[str, float]) -> ComparedRun:
    return ComparedRun(name=name, path=Path(name), rows=rows)


FIXED = compared("fixed", row(1), row(2), row(3), row(4))
LIVE = compared(
    "live",
    row(1),
    row(2),
    row(3, timing_s__transition=2.0, transition__count=1.0, timing_s__step=1.0, timing_s__gen=0.2),
    row(4, timing_s__step=1.0, transition__count=1.0, timing_s__update_actor=0.5),
)


def recorded(path: Path, *rows: Mapping[str, float], mode: str = "offline") -> Path:
    """A run folder as a run leaves it, its W&B run included."""
    path.mkdir(parents=True)
    folder = RunFolder(path=path)
    folder.config.write_text("run: {}\n", encoding="utf-8")
    Journal(folder.events).append("run_started", config={})
    config = Config(run=RunConfig(name=path.name), logger=LoggerConfig(wandb=mode))
    metrics = open_metrics(config, folder, pytest.fail)
    for each in rows:
        metrics.write(int(each["training/global_step"]), each)
    metrics.close()
    return path


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that W&B records over more than a block of its file, with values that JSON cannot hold."""
    many = {f"perf__extra_{number}": number / 3 for number in range(400)}
    more: dict[str, Any] = {"actor__pg_loss": math.nan, "actor__ratio": math.inf, **many}
    rows = [dict(each) | row(int(each["training/global_step"]), **more) | dict(each) for each in LIVE.rows]
    return recorded(tmp_path_factory.mktemp("runs") / "live", *rows)


def numbers(*runs: ComparedRun) -> dict[str, dict[str, float]]:
    return {line.text.strip(): dict(line.by_run) for line in lines(runs)}


def test_arithmetic() -> None:
    found = numbers(FIXED, LIVE)
    assert found["seconds a step"] == {"fixed": 2.0, "live": 1.5}
    assert found["gen"] == pytest.approx({"fixed": 0.5, "live": 0.425})
    assert found["update_actor"] == pytest.approx({"fixed": 1.0, "live": 0.875})
    assert found["other"] == pytest.approx({"fixed": 0.5, "live": 0.2})
    assert found["tokens/s"] == {"fixed": 150.0, "live": 200.0}
    assert found["reward, first 2 steps"] == pytest.approx({"fixed": 0.15, "live": 0.15})
    assert found["reward, last 2 steps"] == pytest.approx({"fixed": 0.35, "live": 0.35})
    assert found["transitions"] == {"fixed": 0.0, "live": 1.0}
    assert found["pause, seconds"] == {"fixed": 0.0, "live": 2.0}
    assert found["pause, share of time"] == {"fixed": 0.0, "live": 0.25}
    assert found["parity, max |dlogp|"] == {"fixed": 4e-6, "live": 4e-6}


def test_the_table() -> None:
    text = render([FIXED, LIVE])
    cells = {line[:24].strip(): line[24:].split() for line in text.splitlines()}
    assert cells["seconds a step"] == ["2.000", "±0.000", "1.500", "±0.919", "(0.75x)"], "3.182 sqrt(1/3) / sqrt(4)"
    assert cells["pause, seconds"] == ["0.000", "2.000"], "no ratio to nothing"
    assert cells["reward, last 2 steps"] == ["0.350", "±0.635", "0.350", "±0.635"], "12.706 times 0.05"
    assert not [line for line in text.splitlines() if len(line) > 100]


def test_a_run_of_another_system_and_a_short_one() -> None:
    verl = compared("verl", {"training/global_step": 1.0, "timing_s/step": 4.0, "timing_s/testing": 1.0})
    found = numbers(FIXED, verl)
    assert found["testing"]["verl"] == 1.0
    assert math.isnan(found["transitions"]["verl"])
    assert math.isnan(found["gen"]["verl"])
    assert phase_seconds(verl) == {"testing": 1.0, "other": 3.0}
    assert "-" in render([FIXED, verl])
    assert "reward" not in render([compared("a", {"training/global_step": 1.0}), verl])


def test_a_phase_that_some_steps_lack() -> None:
    run = compared("now and then", row(1, timing_s__testing=1.5), row(2))
    assert phase_seconds(run)["testing"] == 0.75, "so that phases add up to the mean step"


def test_wandb_gives_the_numbers_of_the_run_folder(live: Path) -> None:
    local, logged = load_run(live), load_run(next(live.glob("wandb/offline-run-*")))
    assert logged.path.stat().st_size > BLOCK_BYTES, "records are cut at the blocks of the file"
    assert [set(each) for each in logged.rows] == [set(each) for each in local.rows]
    for ours, theirs in zip(local.rows, logged.rows, strict=True):
        assert {key: value for key, value in ours.items() if math.isfinite(value)} == {
            key: value for key, value in theirs.items() if math.isfinite(value)
        }
    assert math.isnan(logged.rows[0]["actor/pg_loss"])
    assert math.isnan(logged.rows[0]["actor/ratio"])
    assert local.name == logged.name == "live"
    left, right = named([local, logged], ["a", "b"])
    for line in lines([left, right]):
        assert line.by_run["a"] == line.by_run["b"], line.text
    (file,) = live.glob("wandb/offline-run-*/*.wandb")
    for place in (file, file.parent, live / "wandb"):
        assert find_wandb_file(place) == file
    assert load_run(live).path.name == "metrics.jsonl"


def test_the_command(live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = recorded(tmp_path / "runs/fixed", *FIXED.rows, mode="off")
    (logged,) = live.glob("wandb/offline-run-*")
    words = ["compare", str(fixed), str(live), str(logged), "--out", str(tmp_path / "new/figures")]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert first.splitlines()[0].split() == ["fixed", "live", "live", "(2)"]
    figure = tmp_path / "new/figures/compare.png"
    assert f"figure: {figure}" in first
    drawn = figure.read_bytes()
    assert drawn.startswith(PNG)
    assert main([*words, "--names", "a,b,c"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["a", "b", "c"]
    assert figure.read_bytes() != drawn, "other names, another figure"
    assert main(words) == 0
    assert figure.read_bytes() == drawn, "the same bytes"


def test_the_figure_of_many_runs_of_all_kinds(tmp_path: Path) -> None:
    verl = compared("verl", {"training/global_step": 1.0, "timing_s/step": 4.0})
    silent = compared("silent", {"training/global_step": 1.0})
    runs = [FIXED, LIVE, verl, silent, *(compared(f"run {number}", *FIXED.rows) for number in range(8))]
    assert draw(runs, tmp_path).read_bytes().startswith(PNG)


def test_what_is_no_run(tmp_path: Path, live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["compare", str(live), str(tmp_path / "empty")]) == 2
    assert "expected a run folder (config.yaml and events.jsonl) or a W&B run folder" in capsys.readouterr().err
    assert main(["compare", str(live), str(tmp_path / "nowhere")]) == 2
    assert "there is no such file or folder" in capsys.readouterr().err
    assert main(["compare", str(live)]) == 2
    assert "expected at least two runs" in capsys.readouterr().err
    for names in ("a", "a,a", "a,", "a,b,c"):
        assert main(["compare", str(live), str(live), "--names", names]) == 2
        assert "expected 2 different names" in capsys.readouterr().err
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert main(["compare", str(live), str(live), "--out", str(tmp_path / "file")]) == 2
    assert "--out" in capsys.readouterr().err
    no_steps = recorded(tmp_path / "none", mode="off")
    assert main(["compare", str(live), str(no_steps)]) == 1
    assert "metrics.jsonl: holds no steps: nothing to compare" in capsys.readouterr().err


def test_several_wandb_runs_in_one_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"wandb/offline-run-{name}").mkdir(parents=True)
        (tmp_path / f"wandb/offline-run-{name}/run-{name}.wandb").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"several W&B runs, expected one of wandb/offline-run-a/run-a\.wandb, "):
        load_run(tmp_path)


def test_a_torn_or_damaged_wandb_file(tmp_path: Path, live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (whole,) = live.glob("wandb/offline-run-*/*.wandb")
    data, file = whole.read_bytes(), tmp_path / "run-x.wandb"
    file.write_bytes(data[: len(data) * 3 // 4])
    torn = read_wandb(file)
    assert torn.torn
    assert 0 < len(torn.rows) < 4
    assert torn.rows[0]["perf/extra_9"] == read_wandb(whole).rows[0]["perf/extra_9"] == 3.0
    assert main(["compare", str(live), str(file), "--out", str(tmp_path)]) == 0
    assert "run-x.wandb ends in the middle of a record, which is left out" in capsys.readouterr().out
    file.write_bytes(data[:600])
    with pytest.raises(JournalError, match="holds no steps \\(it ends in the middle of a record\\)"):
        load_run(file)
    file.write_bytes(data[:2000] + bytes([data[2000] ^ 1]) + data[2001:])
    with pytest.raises(JournalError, match="is damaged at byte"):
        load_run(file)
    file.write_bytes(b"something else")
    with pytest.raises(JournalError, match="expected a W&B file"):
        load_run(file)
    file.write_bytes(b"")
    with pytest.raises(JournalError, match="expected a W&B file"):
        load_run(file)


def test_every_cut_of_a_wandb_file_is_whole_or_torn(tmp_path: Path, live: Path) -> None:
    (whole,) = live.glob("wandb/offline-run-*/*.wandb")
    data, file, steps = whole.read_bytes(), tmp_path / "run-x.wandb", 0
    for size_bytes in (*range(7, len(data), 997), len(data)):
        file.write_bytes(data[:size_bytes])
        rows = read_wandb(file).rows
        assert len(rows) >= steps
        steps = len(rows)
    assert steps == 4
