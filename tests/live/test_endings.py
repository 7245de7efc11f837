"""However a run ends, its folder is consistent and no process outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nereus.cli.load import dump_config
from nereus.config import FleetConfig, PlanConfig, RunConfig
from nereus.errors import SlotFailed
from nereus.runtime.journal import read_journal, read_lines
from nereus.runtime.pool import SlotPool
from tests.live.scene import S, changes, config

JOB = replace(
    config(),
    run=RunConfig(name="ending", seed=1, steps=500),
    fleet=FleetConfig(slots=2, on_loss="stop"),
    plan=PlanConfig(actor_train=S(dp=2), critic_train=S(tp=2), actor_generate=S(dp=2), reference_infer=S(pp=2)),
    changes=changes((3, {"actor_train": S(tp=2)})),
)
WAIT_SECONDS = 200.0
ENGINES_BYTES = 250 << 20  # an idle worker of Ray has a third of it


class Started:
    """`nereus train` on two slots, in a process group of its own, as a shell starts it."""

    def __init__(self, folder: Path) -> None:
        self.token = f"{folder.name}-{os.getpid()}"
        self.folder = folder / JOB.run.name
        self.output = (folder / "output.txt").open("w+b")
        job = folder / "job.yaml"
        job.write_text(dump_config(JOB))
        command = [sys.executable, "-m", "nereus.cli.main", "train", str(job)]
        self.process = subprocess.Popen(
            [*command, f"run.folder={folder}"],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "NEREUS_TEST": self.token},
        )

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    def wait_for(self, words: str) -> None:
        """Until the output holds `words`; AssertionError with the output when the run ends first."""
        deadline = time.monotonic() + WAIT_SECONDS
        while words not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.2)

    def slots(self) -> list[psutil.Process]:
        """The slot processes: Ray's workers with the engines in memory (Ray does not always set a worker's title)."""
        words = [(process, " ".join(process.cmdline())) for process in self.alive()]
        workers = [p for p, line in words if "SlotActor" in line or "default_worker.py" in line]
        return [p for p in workers if p.memory_info().rss > ENGINES_BYTES]

    def alive(self) -> list[psutil.Process]:
        """Every process of the run, wherever it hangs in the process tree."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("NEREUS_TEST") == self.token and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def ended(self) -> int:
        """The exit code, after all processes of the run are gone."""
        code = self.process.wait(WAIT_SECONDS)
        deadline = time.monotonic() + 20.0
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, [p.cmdline() for p in left]
        return code


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    run = Started(tmp_path)
    yield run
    for process in run.alive():
        process.kill()
    run.output.close()


def test_ctrl_c_stops_after_the_step(started: Started) -> None:
    """A signal to the whole process group, as a terminal sends it: the step ends, the folder is whole, exit 130."""
    started.wait_for("step   3/500")
    os.killpg(started.process.pid, signal.SIGINT)
    assert started.ended() == 130
    text = started.text()
    assert "stopping after this step" in text
    assert "Traceback" not in text
    events = read_journal(started.folder / "events.jsonl")
    steps = [e["step"] for e in events if e["kind"] == "step_done"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(read_lines(started.folder / "metrics.jsonl")) == len(steps)
    assert len(list((started.folder / "rollouts").glob("*.npz"))) == len(steps)
    assert [e["kind"] for e in events].count("commit") == 1
    assert (events[-1]["kind"], events[-1]["reason"]) == ("run_stopped", "stopped")
    report = subprocess.run(
        [sys.executable, "-m", "nereus.cli.main", "report", str(started.folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "stopped" in report.stdout


@pytest.mark.skipif(
    os.environ.get("NEREUS_BENCH_CHECKPOINTS", "0") in ("", "0"), reason="a minute of processes: make bench-checkpoints"
)
def test_a_killed_slot_ends_the_run_with_its_name(started: Started) -> None:
    """A slot dies in a step while its peer waits for it: exit 1, the slot named, nothing left behind."""
    started.wait_for("step   1/500")
    victims = started.slots()
    assert len(victims) == 2, started.text()
    victims[0].kill()
    assert started.ended() == 1
    assert "died in" in started.text()
    assert "slot_" in started.text()
    events = read_journal(started.folder / "events.jsonl")
    assert (events[-1]["kind"], events[-1]["reason"]) == ("run_stopped", "failed")


def test_a_killed_driver_leaves_no_process(started: Started) -> None:
    """kill -9 of the driver: its slots and Ray end with it, and the journal is whole up to there."""
    started.wait_for("importing engines")
    deadline = time.monotonic() + WAIT_SECONDS
    while not started.slots():
        assert time.monotonic() < deadline, started.text()
        time.sleep(0.2)
    started.process.kill()
    started.ended()
    assert read_journal(started.folder / "events.jsonl")[0]["kind"] == "run_started"


def fail(slot: object) -> None:
    """What a fault in a slot looks like."""
    raise ValueError(f"a fault in {type(slot).__name__}")


def number(_: object) -> int:
    """The process's number."""
    return os.getpid()


def test_an_exception_in_a_slot_reaches_the_user_with_its_traceback(pool: SlotPool) -> None:
    with pytest.raises(SlotFailed, match=r"slot 1 failed in apply(.|\n)*in fail(.|\n)*ValueError: a fault in Slot"):
        pool.call("apply", {1: (fail,)})
    assert pool.call_all("apply", number) == pool.pids  # nothing else was disturbed
    counts = pool.call_all("group_count")
    assert pool.call_all("align", ((0, 2),), max(counts.values())), "groups can be built"
