"""A job of a real Slurm, as the tests of this folder wait for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from nereus.cli.main import main
from nereus.cli.slurm import Standing

WAIT_SECONDS = 240.0
SETTLE_SECONDS = 3.0


@dataclass(kw_only=True)
class Job:
    """A submitted job."""

    number: str
    folder: Path  # of the submission
    started: float = field(default_factory=time.monotonic)

    def output(self) -> str:
        path = self.folder / "job.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def shown(self) -> str:
        """What Slurm says of it."""
        done = subprocess.run(["scontrol", "show", "job", self.number], capture_output=True, text=True, check=True)
        return done.stdout

    def about(self, key: str) -> str:
        shown = self.shown()
        found = re.search(rf"\b{key}=(\S+)", shown)
        assert found, shown
        return found[1]

    def wait_for(self, pattern: str, since: int = 0) -> int:
        """Until its output has the pattern after character `since`; the place of the match's end."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (found := re.search(pattern, self.output()[since:])) is None:
            assert not Standing(state=self.about("JobState")).ended, self.output() + self.shown()
            assert time.monotonic() < deadline, self.output() + self.shown()
            time.sleep(0.2)
        return since + found.end()

    def wait_for_requeue(self, times: int) -> None:
        """Until it waits for its allocation again, for the so many-th time; then it need not wait longer.

        Slurm holds a requeued job back for two minutes because the end of the allocation before may still be reported, and
        would then count as the next one's: here all of that one has to be gone instead, for SETTLE_SECONDS.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while (self.about("JobState"), self.about("Restarts")) != ("PENDING", str(times)) or self.alive():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.2)
        time.sleep(SETTLE_SECONDS)
        scontrol("update", f"JobId={self.number}", "StartTime=now")

    def ended(self) -> str:
        """The job's state at its end, when none of its processes is left."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not Standing(state=(state := self.about("JobState"))).ended:
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
            if process.name() == "slurmstepd":  # "slurmstepd: [2.batch]", which reports how the step ended
                return f"[{self.number}." in " ".join(process.cmdline())
            inside = process.environ().get("SLURM_CONF") == os.environ["SLURM_CONF"]
            mine = process.environ().get("SLURM_JOB_ID") == self.number
            return inside and mine and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def submit(capsys: pytest.CaptureFixture[str], *words: str) -> Job:
    capsys.readouterr()
    assert main(["submit", *words]) == 0, capsys.readouterr().err
    found = re.search(r"job (\d+): (?s:.)*written +(\S+)", capsys.readouterr().out)
    assert found
    job = Job(number=found[1], folder=Path(found[2]))
    assert json.loads((job.folder / "submission.json").read_text())["job"] == job.number
    return job


def scontrol(*words: str) -> None:
    done = subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (words, done.stdout + done.stderr)
