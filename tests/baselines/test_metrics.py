"""Logs of verl and OpenRLHF as our rows: every metric of what their own logging code wrote is placed, or named as unplaced.

`samples` has what `baselines/*/sample.py` wrote in each system's own environment.
"""

import csv
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from baselines.openrlhf import metrics as openrlhf
from baselines.verl import metrics as verl
from nereus.cli.main import main
from nereus.errors import ConfigError, JournalError
from nereus.report.compared_run import load_run
from nereus.report.peers.names import OPENRLHF, VERL
from nereus.report.peers.reading import number, read_peer_log
from nereus.report.wandb_folder import read_wandb
from nereus.runtime.metrics import STEP, read_metrics

SAMPLES = Path(__file__).with_name("samples")
VERL_CONSOLE, VERL_FILE = SAMPLES / "verl-0.9.1/console.log", SAMPLES / "verl-0.9.1/file.jsonl"
OPENRLHF_CONSOLE, OPENRLHF_WANDB = SAMPLES / "openrlhf-0.11.2/console.log", SAMPLES / "openrlhf-0.11.2/run.wandb"


def same(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    return ours.keys() == theirs.keys() and all(
        math.isclose(ours[name], theirs[name], rel_tol=1e-9) or (math.isnan(ours[name]) and math.isnan(theirs[name]))
        for name in ours
    )


@pytest.mark.parametrize("path", [VERL_CONSOLE, VERL_FILE], ids=lambda path: path.name)
def test_every_metric_of_verl_is_placed(path: Path) -> None:
    log = verl.read(path)
    assert (log.system, log.version) == ("verl", "0.9.1")
    assert log.unknown == ()
    assert log.unplaced == {}
    assert [row[STEP] for row in log.rows] == [1.0, 2.0, 3.0]
    names = {name for line in VERL_FILE.read_text().splitlines() for name in json.loads(line)["data"]}
    assert len(names) > 80
    assert len(log.rows[0]) == len(names), "nothing is lost, and no two metrics have one column"
    for row in log.rows:
        assert row["timing_s/step"] >= row["timing_s/gen"] + row["timing_s/update_actor"]
        assert row["perf/throughput"] == pytest.approx(row["perf/total_num_tokens"] / row["timing_s/step"] / 8)


def test_verl_s_console_and_file_say_the_same() -> None:
    for ours, theirs in zip(verl.read(VERL_CONSOLE).rows, verl.read(VERL_FILE).rows, strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("path", [OPENRLHF_CONSOLE, OPENRLHF_WANDB], ids=lambda path: path.name)
def test_every_metric_of_openrlhf_is_placed_or_named(path: Path) -> None:
    log = openrlhf.read(path)
    assert (log.system, log.unknown) == ("openrlhf", ())
    assert [row[STEP] for row in log.rows] == [1.0, 2.0, 3.0]
    written = {name.removeprefix("train/") for row in read_wandb(OPENRLHF_WANDB).rows for name in row}
    assert len(written) > 25
    assert written <= {*OPENRLHF.renamed, *OPENRLHF.unplaced, OPENRLHF.step}
    texts = {name for name in written if name.startswith("generated_samples/")}  # a table, which only W&B is given
    assert set(log.unplaced) == (written & set(OPENRLHF.unplaced)) - (texts if path == OPENRLHF_CONSOLE else set())
    assert all(log.unplaced.values()), "the reason is given"
    columns = {column for name, column in OPENRLHF.renamed.items() if name in written}
    for row in log.rows:
        assert columns <= row.keys()
        phases = ("gen", "make_experience", "ppo_train", "update_weights")
        assert row["timing_s/step"] == pytest.approx(sum(row[f"timing_s/{phase}"] for phase in phases))
        assert row["critic/score/count"] == 8
        assert 2 <= row["response_length/mean"] <= 12
        assert row["prompt_length/mean"] == pytest.approx(5.0)
        assert row["perf/total_num_tokens"] == pytest.approx(8 * (5 + row["response_length/mean"]))


def test_openrlhf_s_console_and_wandb_say_the_same() -> None:
    for ours, theirs in zip(openrlhf.read(OPENRLHF_CONSOLE).rows, openrlhf.read(OPENRLHF_WANDB).rows, strict=True):
        assert same(ours, theirs)


def test_a_console_of_a_ray_job(tmp_path: Path) -> None:
    """Ray puts a coloured name before each line of a worker, and other lines stand between."""
    for path, read in ((VERL_CONSOLE, verl.read), (OPENRLHF_CONSOLE, openrlhf.read)):
        lines = [
            f"\x1b[36m(Worker pid=17, ip=10.0.0.1)\x1b[0m {line}\nGlobal step: no"
            for line in path.read_text().splitlines()
        ]
        (tmp_path / "job.log").write_text("\n".join(["Started a local Ray instance.", *lines]))
        for ours, theirs in zip(read(tmp_path / "job.log").rows, read(path).rows, strict=True):
            assert same(ours, theirs)


def test_exports_from_wandb(tmp_path: Path) -> None:
    for name, path, read in (("verl", VERL_FILE, verl.read), ("openrlhf", OPENRLHF_WANDB, openrlhf.read)):
        rows = (
            [json.loads(line)["data"] for line in path.read_text().splitlines()]
            if name == "verl"
            else read_wandb(path).rows
        )
        lines, table = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.csv"
        lines.write_text(
            "".join(json.dumps({"_step": at, "_runtime": 3.5, **row}) + "\n" for at, row in enumerate(rows))
        )
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["", "Name", *dict.fromkeys(key for row in rows for key in row)])
            writer.writeheader()
            writer.writerows({"": at, "Name": name, **row} for at, row in enumerate(rows))
        for exported in (lines, table):
            for ours, theirs in zip(read(exported).rows, read(path).rows, strict=True):
                assert same(ours, {key: value for key, value in theirs.items() if key in ours})
                assert len(ours) > 20


def test_an_unknown_metric_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = VERL_CONSOLE.read_text().replace("actor/entropy:", "actor/surprise:")
    (tmp_path / "new.log").write_text(text)
    log = verl.read(tmp_path / "new.log")
    assert log.unknown == ("actor/surprise",)
    assert "actor/entropy" not in log.rows[0]
    run = load_run(tmp_path / "new.log")
    assert (run.system, run.mark, run.unplaced) == ("verl", "measured", ("actor/surprise",))


def test_older_names_of_verl() -> None:
    assert VERL.place("timing_s/param_sync") == "timing_s/update_weights"
    assert VERL.place("actor/reward_kl_penalty") == "actor/ref_kl"
    assert VERL.place("actor/no_such_metric") is None


def test_openrlhf_before_it_had_timings(tmp_path: Path) -> None:
    text = re.sub(r", 'timing/\w+': [\d.e-]+", "", OPENRLHF_CONSOLE.read_text())
    (tmp_path / "old.log").write_text(text)
    with pytest.raises(
        JournalError, match=r"no step says timing/step_total: expected a log of OpenRLHF 0\.10 or later"
    ):
        openrlhf.read(tmp_path / "old.log")


def test_a_step_told_twice_and_a_torn_line(tmp_path: Path) -> None:
    first, *_, last = VERL_CONSOLE.read_text().splitlines()
    again = first.replace("training/epoch:0", "training/epoch:1")
    (tmp_path / "twice.log").write_text(f"{first}\n{last}\n{again}")
    rows = verl.read(tmp_path / "twice.log").rows
    assert [(row[STEP], row["training/epoch"]) for row in rows] == [(1.0, 1.0), (3.0, 0.0)]
    whole = VERL_FILE.read_text()
    (tmp_path / "torn.jsonl").write_text(whole[: len(whole) - 200])
    assert len(verl.read(tmp_path / "torn.jsonl").rows) == 2


def test_numbers() -> None:
    assert [number(text) for text in ("1e-06", "np.int32(2)", "np.float64(0.5)", "inf")] == [1e-6, 2.0, 0.5, math.inf]
    assert math.isnan(number("nan"))
    assert math.isnan(number("none"))


def test_what_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("step by step\nGlobal step\n")
    assert read_peer_log(tmp_path / "x.log") is None
    for path, words in ((tmp_path / "x.log", "expected a log of verl"), (tmp_path / "y", "there is no such file")):
        with pytest.raises(ConfigError, match=words):
            verl.read(path)
    with pytest.raises(ConfigError, match="expected a log of verl"):
        verl.read(OPENRLHF_CONSOLE)


def test_metrics_jsonl_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from baselines.logs import convert

    out = tmp_path / "metrics.jsonl"
    assert convert(OPENRLHF, [str(OPENRLHF_CONSOLE), "--out", str(out)]) == 0
    assert "not in it: reward (the rollout's own statistic" in capsys.readouterr().out
    for ours, theirs in zip(read_metrics(out), openrlhf.read(OPENRLHF_CONSOLE).rows, strict=True):
        assert same(ours, theirs)
    words = ["compare", str(VERL_CONSOLE), str(OPENRLHF_WANDB), "--names", "a,b", "--out", str(tmp_path)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[1].split() == ["verl,", "measured", "openrlhf,", "measured"]
    assert "b: metrics without a column here: " in text
    assert "as fast as a" in text
