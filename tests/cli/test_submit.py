"""What `nereus submit` writes: the parts of a submission and the scripts, and what `nereus jobs` makes of them, without Slurm."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from nereus.cli.batch import Ending, run_script
from nereus.cli.jobs import collect_words, status_lines, to_cancel
from nereus.cli.main import main
from nereus.cli.slurm import Request, Standing
from nereus.cli.submission import LINK, Part, Submission, read_submission, write_submission
from nereus.cli.submitted import words_for
from nereus.errors import JournalError, NereusError

ROOT = Path(__file__).parents[2]
ONE = Submission(
    name="q", kind="nereus", parts=(Part(name="q", words=("train", "/x/config.yaml")),), where="/w", job="5"
)
GRID = Submission(
    name="throughput",
    kind="sim",
    parts=tuple(Part(name=f"r{i}", words=("experiment", "run", "throughput", "--only", f"r{i}")) for i in range(3)),
    where="/w",
    experiment="throughput",
    overrides=("run.steps=2",),
    job="7",
    then_job="8",
)
ENDING = Ending(notice_seconds=120, requeued=True)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the experiments and analyses of the checkout, and nothing else."""
    for name in ("experiments", "analysis"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


def submit(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["submit", *words, "--dry-run"])
    told = capsys.readouterr()
    return code, told.out + told.err


def directives(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def test_a_submission_is_read_as_it_was_written(tmp_path: Path) -> None:
    for submission in (ONE, GRID):
        write_submission(tmp_path, submission)
        assert read_submission(tmp_path) == submission
    (tmp_path / "submission.json").write_text('{"name": "x"}')
    with pytest.raises(JournalError, match="is no submission"):
        read_submission(tmp_path)


def test_the_script_of_a_run_asks_for_the_notice_and_may_be_requeued(tmp_path: Path) -> None:
    request = Request(nodes=2, slots_per_node=4, gpu_count=4, partition="gpu", time_limit="2:00:00")
    text = run_script(ONE, request, tmp_path / "a b%", ENDING, 30.0, "/env/bin/python")
    wanted = {
        *("--nodes=2", "--cpus-per-task=4", "--gpus-per-node=4", "--partition=gpu", "--time=2:00:00", "--requeue"),
        *("--signal=B:USR1@120", "--open-mode=append", "--chdir=/w", f"--output={tmp_path}/a b%%/job.out"),
    }
    assert wanted <= set(directives(text))
    assert not re.findall(r"@[A-Z_]+@", text)
    assert "ray=/env/bin/ray\n" in text
    assert f"folder='{tmp_path}/a b%' #" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    held = run_script(ONE, request, tmp_path, replace(ENDING, requeued=False), 30.0, "/env/bin/python")
    assert "--no-requeue" in directives(held)
    assert "\nrequeue=\n" in held


def test_another_systems_job_has_whole_nodes_and_their_ray(tmp_path: Path) -> None:
    request = Request(nodes=2, slots_per_node=8, gpu_count=8, whole_nodes=True)
    ending = Ending(notice_seconds=90, requeued=False)
    text = run_script(replace(ONE, kind="verl"), request, tmp_path, ending, 30.0, "/verl/bin/python")
    assert {"--exclusive", "--no-requeue", "--gpus-per-node=8"} <= set(directives(text))
    assert not [each for each in directives(text) if each.startswith(("--signal", "--cpus-per-task"))]
    assert "--num-gpus=$gpus" in text
    assert '"slot"' not in text
    assert "package=verl\n" in text


def test_simulated_runs_are_an_array_with_a_job_after_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    variants = ("verl-tuned-8xa100-short", "nereus-settled-plan-8xa100-short")
    words = [word for variant in variants for word in ("--only", variant)]
    code, told = submit(capsys, "throughput", *words, "--time", "30")
    assert code == 0, told
    folder = tmp_path / "runs/throughput/submissions/throughput"
    script, then = (folder / "job.sbatch").read_text(), (folder / "then.sbatch").read_text()
    assert {"--array=0-1", f"--output={folder}/%a/job.out", "--cpus-per-task=1", "--time=30"} <= set(directives(script))
    assert f"folder={folder}/$SLURM_ARRAY_TASK_ID\n" in script
    assert "experiment collect throughput --only verl-tuned-8xa100-short --only nereus-settled-plan" in then
    assert "analysis/throughput.py\n" in then
    for text in (script, then):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    written = read_submission(folder)
    assert written.is_array
    assert {part.name for part in written.parts} == {part.words[4] for part in written.parts}
    for index, part in enumerate(written.parts):
        assert part.run == f"runs/throughput/{part.name}"
        assert (
            part.name in (folder / str(index) / "run.json").read_text()
            or (folder / str(index) / "config.yaml").is_file()
        )


@pytest.mark.parametrize(("stated", "has"), [("", False), ("make figures", True)])
def test_the_job_after_the_runs_is_as_stated(
    stated: str, has: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, told = submit(capsys, "throughput", "--only", "verl-tuned-8xa100-short", "--then", stated)
    assert code == 0, told
    then = tmp_path / "runs/throughput/submissions/throughput/then.sbatch"
    assert then.exists() == has
    assert not has or then.read_text().endswith("\nmake figures\n")


def test_verls_job_runs_verls_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, told = submit(capsys, "ppo_8b-16gpus", "--system", "verl", "run.steps=1", "--python", "/verl/bin/python")
    assert code == 0, told
    folder = next((tmp_path / "runs/ppo_8b/submissions").iterdir())
    words = read_submission(folder).parts[0].words
    assert words[:3] == ("/verl/bin/python", "-m", "verl.trainer.main_ppo")
    assert f"data.train_files={folder}/prompts/train.parquet" in words
    assert (folder / "prompts/train.parquet").is_file()
    script = (folder / "job.sbatch").read_text()
    assert {"--nodes=2", "--gpus-per-node=8"} <= set(directives(script))
    assert "ray=/verl/bin/ray\n" in script


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["throughput", "--system", "nereus"], "--system = 'nereus': expected sim"),
        (["nowhere"], "CONFIG_OR_EXPERIMENT = 'nowhere': expected a configuration file, an experiment"),
        (["ppo_8b", "--system", "verl"], "expected runs with equal fleet.slots"),
        (["experiments/scripted.yaml", "--system", "sim"], "--system = 'sim': expected an experiment whose runs"),
        (["experiments/scripted.yaml", "--only", "x"], "--only = 'x': expected an experiment"),
        (["experiments/scripted.yaml", "--system", "verl", "changes=[]"], "workload.model_path"),
        (["experiments/scripted.yaml", "--time", "soon"], "--time = 'soon': expected minutes"),
        (["experiments/scripted.yaml", "--time", "1:00"], "--time = '1:00': expected more than --notice-seconds = 90"),
        (["experiments/scripted.yaml", "--notice-seconds", "0"], "--notice-seconds = 0: expected 1 to 65535"),
        (["throughput", "--nodes", "2"], "--nodes = 2: expected 1, as the run of sim says"),
        (["ppo_8b-8gpus", "--gpus-per-node", "4"], "--gpus-per-node = 4: expected 8, as the run of verl says"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, told = submit(capsys, *words)
    assert code in (1, 2)
    assert said in told
    assert not list(tmp_path.glob("runs/**/submissions/*"))


def test_a_system_whose_command_line_is_not_there_is_named(tmp_path: Path) -> None:
    from nereus.cli.systems import _module

    with pytest.raises(NereusError, match=r"baselines/nosuch/command\.py is not there: nosuch cannot be submitted"):
        _module("nosuch", "command")


def test_a_requeued_run_goes_on_where_it_has_a_checkpoint(tmp_path: Path) -> None:
    part, link, run = ONE.parts[0], tmp_path / LINK, tmp_path / "runs" / "q"
    first = ("train", "/x/config.yaml", "--link", str(link))
    assert words_for(part, link, requeued=False) == (first, "")
    assert words_for(part, link, requeued=True) == (first, "")
    run.mkdir(parents=True)
    link.symlink_to(run)
    words, said = words_for(part, link, requeued=True)
    assert words == first
    assert "no checkpoint yet" in said
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "latest").write_text("step-000003\n")
    assert words_for(part, link, requeued=True) == (("resume", str(run)), f"requeued: {run} goes on")
    assert words_for(part, link, requeued=False)[0] == first


def test_the_status_of_a_job_is_slurms_word_and_else_its_last(tmp_path: Path) -> None:
    assert status_lines(tmp_path, ONE, {}) == [f"{tmp_path.name}: job 5 unknown to Slurm"]
    (tmp_path / "exit_code").write_text("130\n")
    assert status_lines(tmp_path, ONE, {}) == [f"{tmp_path.name}: job 5 stopped"]
    told = {"5": Standing(state="PENDING", reason="BeginTime")}
    assert status_lines(tmp_path, ONE, told) == [f"{tmp_path.name}: job 5 PENDING (BeginTime)"]
    told = {"5": Standing(state="FAILED")}
    assert status_lines(tmp_path, ONE, told) == [f"{tmp_path.name}: job 5 FAILED, stopped"]


def test_the_parts_of_an_array_are_counted_and_failures_named(tmp_path: Path) -> None:
    told = {
        "7_0": Standing(state="COMPLETED"),
        "7_1": Standing(state="FAILED"),
        "7_2": Standing(state="COMPLETED"),
        "8": Standing(state="PENDING", reason="Dependency"),
    }
    head, failed, then = status_lines(tmp_path, GRID, told)
    assert head.endswith("job 7, 3 runs: 2 COMPLETED, 1 FAILED")
    assert failed.split() == ["failed", "r1:", f"{tmp_path}/1/job.out"]
    assert then.split() == ["then", "job", "8", "PENDING", "(Dependency)"]


def test_only_a_running_run_of_nereus_is_told_to_stop() -> None:
    told = {"5": Standing(state="RUNNING"), "6": Standing(state="PENDING")}
    after = replace(ONE, then_job="6")
    assert to_cancel(after, ["5", "6"], told, at_once=False) == (["5"], ["6"])
    assert to_cancel(after, ["5", "6"], told, at_once=True) == ([], ["5", "6"])
    assert to_cancel(replace(after, kind="verl"), ["5", "6"], told, at_once=False) == ([], ["5", "6"])


def test_what_is_collected(tmp_path: Path) -> None:
    assert collect_words(tmp_path, GRID) == ["experiment", "collect", "throughput", "run.steps=2"]
    with pytest.raises(NereusError, match="its run has not begun"):
        collect_words(tmp_path, ONE)


def test_jobs_names_what_there_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "submissions" / "q"
    folder.mkdir(parents=True)
    write_submission(folder, ONE)
    assert main(["jobs", "status"]) == 0
    assert capsys.readouterr().out == "q: job 5 unknown to Slurm\n"
    assert main(["jobs", "status", "nothing"]) == 2
    assert "NAME = 'nothing': expected one submission: q" in capsys.readouterr().err
    assert main(["jobs", "cancel"]) == 2
    assert "expected a submission: q" in capsys.readouterr().err
