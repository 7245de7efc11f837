"""`nereus simulate`: a run folder that the other commands read, policies side by side, wrong words in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.cli.main import main

TRACES = Path(__file__).parents[2] / "experiments" / "traces"
JOB = str(TRACES / "ppo_8b.yaml")
SMALL = ["data.prompts_per_step=32", "run.steps=3"]


def test_a_run_folder_that_report_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", JOB, *SMALL, f"run.folder={tmp_path}", "--fleet", "64xa100", "--mean-tokens", "400"]) == 0
    told = capsys.readouterr().out
    assert "step 3/3" in told
    assert "fixed" in told
    (folder,) = tmp_path.iterdir()
    assert main(["report", str(folder)]) == 0
    assert "done, 3 of 3 steps" in capsys.readouterr().out


def test_policies_side_by_side_on_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [JOB, *SMALL, f"run.folder={tmp_path}", "--trace", str(TRACES / "p3_64_grow.json"), "--device", "h100"]
    assert main(["simulate", *words, "--policy", "dp-scaling,restart", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    table = [line.split() for line in first.splitlines() if line.startswith(("policy ", "dp-scaling ", "restart "))]
    assert [row[0] for row in table] == ["policy", "dp-scaling", "restart"]
    assert len(list(tmp_path.iterdir())) == 2
    assert main(["simulate", *words, "--policy", "dp-scaling,restart", "--seed", "3"]) == 0
    again = capsys.readouterr().out
    rows = [
        [line for line in text.splitlines() if line.startswith(("dp-scaling ", "restart "))] for text in (first, again)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["none.yaml"],
        [JOB, "--policy", "nervous"],
        [JOB, "--device", "h1000"],
        [JOB, "--fleet", "2xh100"],
        [JOB, "--fleet", "8xh100", "--trace", str(TRACES / "p3_64_grow.json")],
    ],
)
def test_wrong_words(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [f"run.folder={tmp_path}"] if words else []
    assert main(["simulate", *words, *overrides]) == 2
    assert capsys.readouterr().err.startswith("error: ")
