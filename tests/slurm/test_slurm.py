"""Runs as jobs of a real Slurm: two nodes give what one machine gives, and however a job ends its folder is whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from nereus.cli.load import dump_config
from nereus.cli.main import main
from nereus.config import FleetConfig, PlanConfig, RunConfig
from nereus.report.summary import Summary, summarise
from nereus.runtime.journal import read_journal, read_lines
from tests.live.scene import S, changes, config
from tests.slurm.conftest import local_cluster

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
)
WAIT_SECONDS = 240.0


@dataclass(kw_only=True)
class Job:
    """A submitted job."""

    number: str
    folder: Path  # of the submission
    started: float = field(default_factory=time.monotonic)

    def output(self) -> str:
        path = self.folder / "job.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def about(self, key: str) -> str:
        done = subprocess.run(["scontrol", "show", "job", self.number], capture_output=True, text=True, check=True)
        found = re.search(rf"\b{key}=(\S+)", done.stdout)
        assert found, done.stdout
        return found[1]

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while words not in self.output():
            assert self.about("JobState") in ("PENDING", "RUNNING"), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)

    def ended(self) -> str:
        """The job's state at its end, when none of its processes is left."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (state := self.about("JobState")) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)
        deadline = time.monotonic() + 20.0
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, [process.cmdline() for process in left]
        assert not list(Path("/tmp").glob(f"nereus-{self.number}-*"))
        print(f"job {self.number}: {state} after {time.monotonic() - self.started:.0f} s")
        return state

    def alive(self) -> list[psutil.Process]:
        """Every process of the job, wherever it hangs in the process tree."""
        return [process for process in psutil.process_iter() if self.owns(process)]

    def owns(self, process: psutil.Process) -> bool:
        try:
            inside = process.environ().get("SLURM_CONF") == os.environ["SLURM_CONF"]
            mine = process.environ().get("SLURM_JOB_ID") == self.number
            return inside and mine and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def submit(capsys: pytest.CaptureFixture[str], *words: str) -> Job:
    assert main(["submit", *words]) == 0, capsys.readouterr().err
    found = re.search(r"job (\d+): (?s:.)*written +(\S+)", capsys.readouterr().out)
    assert found
    job = Job(number=found[1], folder=Path(found[2]))
    assert json.loads((job.folder / "slurm_job.json").read_text())["job"] == job.number
    return job


@pytest.fixture
def long_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Job]:
    """A job on a slot of each of two nodes, in the middle of its run, after its change of layout."""
    path = tmp_path / "long.yaml"
    path.write_text(dump_config(LONG))
    job = submit(capsys, str(path), f"run.folder={tmp_path}", "--nodes=2")
    try:
        job.wait_for("step   3/500")
        yield job
    finally:
        subprocess.run(["scancel", "--quiet", job.number], check=False)


def test_two_nodes_do_what_one_machine_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripted changes on two nodes of two slots and here: the same changes, bytes and rewards."""
    job = submit(capsys, SCRIPTED, "--nodes=2", "--slots-per-node=2", f"run.folder={tmp_path}/there", *SHORT)
    assert job.ended() == "COMPLETED", job.output()
    assert "scripted: done, 4 of 4 steps" in job.output()
    assert [(job.folder / f"ray-n{n}.log").exists() for n in (1, 2)] == [True, True]
    command = [sys.executable, "-m", "nereus.cli.main", "train", SCRIPTED, f"run.folder={tmp_path}/here", *SHORT]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    there, here = (tmp_path / place / "scripted" for place in ("there", "here"))
    assert moved(summarise(there)) == moved(summarise(here))
    assert len(moved(summarise(there))) == 2
    rewards = [[line["critic/score/mean"] for line in read_lines(run / "metrics.jsonl")] for run in (there, here)]
    print("rewards", rewards)
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)


def moved(summary: Summary) -> list[tuple[str, str, int]]:
    """The changes of a run: from what, to what, with how many bytes on the wire, which are those that were planned."""
    assert all(each.planned_bytes == each.counted_bytes for each in summary.transitions)
    return [(each.before, each.after, each.counted_bytes) for each in summary.transitions]


def test_a_job_that_is_told_to_stop_stops_after_the_step(long_job: Job, tmp_path: Path) -> None:
    subprocess.run(["scancel", "--batch", "--signal=TERM", long_job.number], check=True)
    assert long_job.ended() == "FAILED"
    assert long_job.about("ExitCode") == "130:0"
    assert "Traceback" not in long_job.output()
    events, steps = record(tmp_path / "long")
    assert len(list((tmp_path / "long" / "rollouts").glob("*.npz"))) == steps
    assert (events[-1]["kind"], events[-1]["reason"]) == ("run_stopped", "stopped")


def test_a_cancelled_job_leaves_a_whole_folder(long_job: Job, tmp_path: Path) -> None:
    """A plain scancel takes Ray away under the driver: what was recorded before is readable, nothing is running."""
    subprocess.run(["scancel", long_job.number], check=True)
    assert long_job.ended() == "CANCELLED"
    events, _ = record(tmp_path / "long")
    print("last event", events[-1])
    assert summarise(tmp_path / "long").steps >= 3


def record(run: Path) -> tuple[list[dict[str, object]], int]:
    """The journal and the count of steps, which the metrics have too."""
    events = read_journal(run / "events.jsonl")
    steps = [event["step"] for event in events if event["kind"] == "step_done"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(read_lines(run / "metrics.jsonl")) == len(steps)
    assert [event["kind"] for event in events].count("commit") == 1
    return events, len(steps)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--partition=fast"], ["--partition = 'fast'", "Invalid partition name", "main (2 nodes with gpu:8)"]),
        (["--gpus-per-node=16"], ["--gpus-per-node = 16", "configuration is not available", "main (2 nodes with gpu:8)"]),
        (["--nodes=3"], ["--nodes = 3", "more nodes than a partition has", "main (2 nodes with gpu:8)"]),
        (["--time=soon"], ["Invalid --time specification"]),
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


def test_a_dry_run_prints_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", SCRIPTED, "--dry-run", "--nodes=2", "--gpus-per-node=2", f"run.folder={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    folder = tmp_path / "submissions" / "scripted"
    assert printed.startswith(f"# {folder}/config.yaml\n# {folder}/nereus.sbatch\n#!/usr/bin/env bash\n#SBATCH")
    assert "#SBATCH --gpus-per-node=2\n" in printed
    assert not re.findall(r"@[A-Z_]+@", printed)
    subprocess.run(["bash", "-n", folder / "nereus.sbatch"], check=True)


def test_up_again_changes_nothing(cluster: Path) -> None:
    configuration = (cluster / "slurm.conf").read_text()
    assert "is up already" in local_cluster("up", "2")
    assert (cluster / "slurm.conf").read_text() == configuration
    assert local_cluster("status").count("gpu:8") == 2
