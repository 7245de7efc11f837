"""Runs as jobs of a real Slurm: two nodes give what one machine gives, and however a job ends its run can go on."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nereus.cli.load import dump_config
from nereus.cli.main import main
from nereus.cli.resume import resumed_run
from nereus.cli.slurm import seconds_of
from nereus.config import CheckpointConfig, FleetConfig, PlanConfig, RunConfig
from nereus.report.summary import Summary, summarise
from nereus.runtime.journal import read_journal, read_lines
from tests.live.scene import S, changes, config
from tests.slurm.conftest import local_cluster
from tests.slurm.job import Job, scontrol, submit

ROOT = Path(__file__).parents[2]
SCRIPTED = "experiments/scripted.yaml"
CHANGES = (
    "[{step: 2, plan: {actor_train: {pp: 2, dp: 2, micro_batch: 16}, critic_train: {dp: 4, micro_batch: 16}, "
    "actor_generate: {dp: 4}}}, {step: 4, plan: {actor_train: {dp: 4, micro_batch: 16}}}]"
)
SHORT = ["run.steps=4", "warmup.steps=20", f"changes={CHANGES}"]  # its changes, earlier, and less warm-up
LONG = replace(
    config(),
    run=RunConfig(name="long", seed=1, steps=500),
    fleet=FleetConfig(slots=2),
    plan=PlanConfig(actor_train=S(dp=2), critic_train=S(tp=2), actor_generate=S(dp=2), reference_infer=S(pp=2)),
    changes=changes((2, {"actor_train": S(tp=2)})),
    checkpoint=CheckpointConfig(every_steps=2),
)
STEP = r"step +\d+/500"


@pytest.fixture
def long_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Job]:
    """A job on a slot of each of two nodes, in the middle of its run, after its change of layout and a checkpoint."""
    path = tmp_path / "long.yaml"
    path.write_text(dump_config(LONG))
    job = submit(capsys, str(path), f"run.folder={tmp_path}", "--nodes=2", "--time=30")
    try:
        job.wait_for("step +5/500")
        yield job
    finally:
        subprocess.run(["scancel", "--quiet", job.number], check=False)
        subprocess.run(["scontrol", "update", "NodeName=n2", "State=RESUME"], capture_output=True, check=False)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkout's experiments and analyses, whose runs and figures stay there."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis" / "throughput.py").symlink_to(ROOT / "analysis" / "throughput.py")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_nodes_do_what_one_machine_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripted changes on two nodes of two slots and here: the same changes, bytes and rewards."""
    job = submit(capsys, SCRIPTED, "--nodes=2", "--slots-per-node=2", f"run.folder={tmp_path}/there", *SHORT)
    assert job.ended() == "COMPLETED", job.output()
    assert "scripted: done, 4 of 4 steps" in job.output()
    assert [(job.folder / f"ray-n{n}.log").exists() for n in (1, 2)] == [True, True]
    command = [sys.executable, "-m", "nereus.cli.main", "train", SCRIPTED, f"run.folder={tmp_path}/here", *SHORT]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    there, here = (tmp_path / place / "scripted" for place in ("there", "here"))
    assert (job.folder / "run").resolve() == there
    assert moved(summarise(there)) == moved(summarise(here))
    assert len(moved(summarise(there))) == 2
    rewards = [[line["critic/score/mean"] for line in read_lines(run / "metrics.jsonl")] for run in (there, here)]
    print("rewards", rewards)
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)


def moved(summary: Summary) -> list[tuple[str, str, int]]:
    """The changes of a run: from what, to what, with how many bytes on the wire, which are those that were planned."""
    assert all(each.planned_bytes == each.counted_bytes for each in summary.transitions)
    return [(each.before, each.after, each.counted_bytes) for each in summary.transitions]


def test_a_job_goes_on_after_preemption_a_lost_node_and_its_time_limit(
    long_job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three ends, three allocations more; the last is told to stop. Where there was notice no step is lost."""
    run = tmp_path / "long"
    urgent = [
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=:",
    ]
    subprocess.run(urgent, check=True, capture_output=True)
    goes_on(long_job, 1)
    scontrol("update", "NodeName=n2", "State=DOWN", "Reason=test")
    goes_on(long_job, 2, node="n2")
    spent_seconds = seconds_of(long_job.about("RunTime"))
    assert spent_seconds is not None
    scontrol("update", f"JobId={long_job.number}", f"TimeLimit={int(spent_seconds / 60) + 2}")  # notice within 30 s
    goes_on(long_job, 3)
    assert main(["jobs", "status", long_job.number, "--runs", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert re.search(rf"long: job {long_job.number} RUNNING on n\[1-2\]\n +run +{run}: step \d+ of 500, under way", told), told  # fmt: skip
    assert main(["jobs", "cancel", "long", "--runs", str(tmp_path)]) == 0
    assert "told to save and stop after the step" in capsys.readouterr().out
    assert long_job.ended() == "FAILED"
    assert long_job.about("ExitCode") == "130:0"
    ends(run)
    assert resumable_step(run) == summarise(run).steps


def goes_on(job: Job, times: int, node: str = "") -> None:
    """The job is requeued, and its run does another step from a checkpoint."""
    since = len(job.output())
    job.wait_for_requeue(times)
    if node:
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], capture_output=True, check=False)
    scontrol("update", f"JobId={job.number}", "TimeLimit=30")
    since = job.wait_for(r"resuming \S+ from step-\d+", since)
    print(f"allocation {times + 1}: step after {time.monotonic() - job.started:.0f} s")
    job.wait_for(STEP, since)


def ends(run: Path) -> None:
    """Each resumption begins where a checkpoint was; the one after the notice, and the stop, after the last step done."""
    events = read_journal(run / "events.jsonl")
    resumed = [index for index, event in enumerate(events) if event["kind"] == "resumed"]
    assert len(resumed) == 3
    saved = {event["step"] for event in events if event["kind"] == "checkpoint_saved"}
    assert {events[index]["step"] for index in resumed} <= saved
    before = events[: resumed[2]]
    assert (before[-1]["kind"], before[-1]["reason"]) == ("run_stopped", "stopped")
    assert [event["step"] for event in before if event["kind"] == "step_done"][-1] == events[resumed[2]]["step"]
    assert (events[-1]["kind"], events[-1]["reason"]) == ("run_stopped", "stopped")
    print("resumed after steps", [events[index]["step"] for index in resumed])


def resumable_step(run: Path) -> int:
    """The step of the checkpoint from which `nereus resume` would go on."""
    return resumed_run(Namespace(words=[str(run)], rollouts=None)).resumption.manifest.step


def test_a_cancelled_job_leaves_a_whole_folder_that_resumes(
    long_job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plain scancel takes Ray away under the driver: what was recorded before is readable, nothing is running."""
    assert main(["jobs", "cancel", long_job.number, "--now", "--runs", str(tmp_path)]) == 0
    assert long_job.ended() == "CANCELLED"
    run = tmp_path / "long"
    events = read_journal(run / "events.jsonl")
    steps = [event["step"] for event in events if event["kind"] == "step_done"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(read_lines(run / "metrics.jsonl")) == len(steps)
    assert [event["kind"] for event in events].count("commit") == 1
    assert resumable_step(run) >= 4
    capsys.readouterr()
    assert main(["jobs", "collect", "long", "--runs", str(tmp_path)]) == 0
    assert f"of {LONG.run.steps} steps" in capsys.readouterr().out


def test_an_array_of_simulated_runs_is_followed_by_its_figure(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("nereus-best-plan", "nereus-settled-plan", "verl-tuned", "openrlhf-tuned")
    words = [w for name in chosen for lengths in ("short", "long") for w in ("--only", f"{name}-8xa100-{lengths}")]
    job = submit(capsys, "throughput", "--system", "sim", *words)
    then = Job(number=re.findall(r'"then_job": "(\d+)"', (job.folder / "submission.json").read_text())[0], folder=job.folder)  # fmt: skip
    assert then.ended() == "COMPLETED", (job.folder / "then.out").read_text()
    assert main(["jobs", "status", "throughput"]) == 0
    told = capsys.readouterr().out
    assert f"throughput: job {job.number}, 8 runs: 8 COMPLETED\n  then      job {then.number} COMPLETED" in told
    assert (elsewhere / "analysis/figures/throughput.png").stat().st_size > 10_000
    output = (job.folder / "then.out").read_text()
    print(output)
    assert "8 of 8 runs" in output
    assert re.search(r"^8xa100 +short +[\d.]+", output, re.MULTILINE)
    assert main(["submit", "throughput", *words]) == 2
    assert "expected runs to do: all are finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--partition=fast"], ["--partition = 'fast'", "no such partition", "main (2 nodes with gpu:8)"]),
        (["--gpus-per-node=16"], ["--gpus-per-node = 16", "more GPUs than a node has", "main (2 nodes with gpu:8)"]),
        (["--nodes=3"], ["--nodes = 3", "more nodes than a partition has", "main (2 nodes with gpu:8)"]),
        (["--partition=short", "--time=1:00:00"], ["--time = '1:00:00'", "short (2 nodes with gpu:8, at most 30:00)"]),
        (["--time=soon"], ["--time = 'soon'"]),
        (["--nodes=2", "--slots-per-node=1"], ["--slots-per-node = 1", "expected at least 2"]),
        (["--gpus-per-node=1"], ["--gpus-per-node = 1", "a GPU for each slot"]),
        (["plan.actor_train.tp=3"], ["plan.actor_train.tp = 3"]),
    ],
)  # fmt: skip
def test_what_slurm_cannot_give_is_refused_with_the_reason(
    words: list[str], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", SCRIPTED, f"run.folder={tmp_path}", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert [word for word in said if word not in error] == [], error
    assert not list(tmp_path.glob("submissions/*"))


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SBATCH_CONSTRAINT", "fast", "Slurm refused it: Batch job submission failed: Invalid feature specification"),
        ("SBATCH_TIMELIMIT", "60", "Slurm would never start it: PartitionTimeLimit"),
    ],
)
def test_what_only_slurm_knows_is_told_with_its_reason(
    variable: str, value: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, value)
    assert main(["submit", SCRIPTED, f"run.folder={tmp_path}", "--partition=short"]) in (1, 2)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("submissions/*"))
    waiting = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout
    assert not waiting


def test_what_a_node_lacks_is_named(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = submit(capsys, "ppo_8b-8gpus", "run.steps=1", "--python=/nowhere/bin/python")
    assert job.ended() == "FAILED"
    assert "missing on n1: /nowhere/bin/ray" in job.output()


def test_a_dry_run_prints_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", SCRIPTED, "--dry-run", "--nodes=2", "--gpus-per-node=2", f"run.folder={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    folder = tmp_path / "submissions" / "scripted"
    assert printed.startswith(f"# {folder}/config.yaml\n# {folder}/job.sbatch\n#!/usr/bin/env bash\n#SBATCH")
    assert "#SBATCH --gpus-per-node=2\n" in printed
    assert not re.findall(r"@[A-Z_]+@", printed)
    subprocess.run(["bash", "-n", folder / "job.sbatch"], check=True)


def test_up_again_changes_nothing(cluster: Path) -> None:
    configuration = (cluster / "slurm.conf").read_text()
    assert "is up already" in local_cluster("up", "2")
    assert (cluster / "slurm.conf").read_text() == configuration
    assert local_cluster("status").count("gpu:8") == 2
