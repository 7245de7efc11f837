"""Runs that are stopped, lose a slot in the middle of a save, or die whole in the middle of a change, and go on with
`nereus resume`: minutes of processes.

`make bench-checkpoints` carries them out; `make test` does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from nereus.cli.load import dump_config
from nereus.config import CheckpointConfig, Config, FleetConfig, ModelConfig, PlanConfig, RunConfig, WarmupConfig
from nereus.runtime.checkpoints import newest_good
from nereus.runtime.journal import read_journal
from nereus.runtime.metrics import read_metrics
from tests.live.scene import S, changes, config

pytestmark = pytest.mark.skipif(
    os.environ.get("NEREUS_BENCH_CHECKPOINTS", "0") in ("", "0"), reason="minutes of processes: make bench-checkpoints"
)
WAIT_SECONDS = 300.0
JOB = replace(
    config(),
    run=RunConfig(name="ending", seed=1, steps=12),
    model=ModelConfig(hidden=512, ffn=1536),
    warmup=WarmupConfig(steps=2, samples=8),
    fleet=FleetConfig(slots=2, on_loss="stop"),
    plan=PlanConfig(actor_train=S(dp=2), critic_train=S(tp=2), actor_generate=S(dp=2), reference_infer=S(pp=2)),
    checkpoint=CheckpointConfig(every_steps=1, keep_count=2),
)


def nereus(folder: Path, *words: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Starts the command line; its output goes to a file in `folder`."""
    output = folder / f"{words[0]}.txt"
    with output.open("ab") as file:
        command = [sys.executable, "-m", "nereus.cli.main", *words]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True), output


def trained(
    folder: Path,
    ready: Callable[[Path], bool],
    strike: Callable[[subprocess.Popen[bytes]], None],
    job: Config = JOB,
    *words: str,
) -> str:
    """A run that is struck as soon as it is ready; its output after it has ended."""
    (folder / "job.yaml").write_text(dump_config(job))
    process, output = nereus(folder, "train", str(folder / "job.yaml"), f"run.folder={folder}", *words)
    deadline = time.monotonic() + WAIT_SECONDS
    while not ready(folder / "ending"):
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.002)
    strike(process)
    process.wait(WAIT_SECONDS)
    return output.read_text()


def resumed(folder: Path, *overrides: str) -> str:
    process, output = nereus(folder, "resume", str(folder / "ending"), *overrides)
    assert process.wait(WAIT_SECONDS) == 0, output.read_text()
    return output.read_text()


def events(folder: Path) -> list[Any]:
    return list(read_journal(folder / "ending" / "events.jsonl"))


def slots(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "SlotActor" in " ".join(child.cmdline())]


def kill_a_slot(process: subprocess.Popen[bytes]) -> None:
    slots(process)[1].kill()


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of the driver, of Ray and of every slot at once."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, WAIT_SECONDS)


def half_saved(run: Path) -> bool:
    """Whether a later save is in progress and has begun a file."""
    return (run / "checkpoints" / "step-000003").exists() and any(
        (run / "checkpoints").glob(".step-*.draft/slot-001.safetensors")
    )


def test_a_slot_killed_in_the_middle_of_a_save_then_resumed_on_one_slot(tmp_path: Path) -> None:
    text = trained(tmp_path, half_saved, kill_a_slot)
    assert "what was recorded is in" in text
    last = newest_good(tmp_path / "ending" / "checkpoints")
    assert last.manifest.step >= 3
    drafts = list((tmp_path / "ending" / "checkpoints").glob(".step-*.draft"))
    print("killed while", [d.name for d in drafts], "was written; good:", last.path.name)
    text = resumed(tmp_path, "fleet.slots=1")
    assert f"from {last.path.name}: step {last.manifest.step + 1} of 12 is next, on 1 slots" in text
    assert "TP1·PP1·DP1" in text
    assert "done, 12 of 12 steps" in text
    rows = read_metrics(tmp_path / "ending" / "metrics.jsonl")
    assert [row["training/global_step"] for row in rows] == list(range(1, 13))
    assert newest_good(tmp_path / "ending" / "checkpoints").manifest.step == 12
    assert not list((tmp_path / "ending" / "checkpoints").glob(".step-*")), "drafts are gone"
    assert "nothing is left" in resumed(tmp_path)


def test_a_stopped_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """SIGTERM: saved at the boundary; then more steps than the run was to have, under another plan."""

    def ready(run: Path) -> bool:
        return (
            run.exists()
            and (run / "events.jsonl").exists()
            and any(e["kind"] == "step_done" for e in events(run.parent))
        )

    text = trained(tmp_path, ready, lambda process: process.send_signal(signal.SIGTERM))
    assert "stopping after this step" in text
    done = [e["step"] for e in events(tmp_path) if e["kind"] == "step_done"]
    text = resumed(tmp_path, "run.steps=14", "plan.actor_train={tp: 2, dp: 1}")
    assert f"step {done[-1] + 1} of 14 is next" in text
    steps = [e["step"] for e in events(tmp_path) if e["kind"] == "step_done"]
    assert steps == list(range(1, 15)), "no step is lost and none is done twice"


CHANGING = replace(
    JOB,
    run=RunConfig(name="ending", seed=1, steps=5),
    changes=changes((4, {"actor_train": S(tp=2), "critic_train": S(pp=2)})),
    checkpoint=CheckpointConfig(every_steps=1, keep_count=9),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a change that nothing strikes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "job.yaml").write_text(dump_config(CHANGING))
    process, output = nereus(folder, "train", str(folder / "job.yaml"), f"run.folder={folder}")
    assert process.wait(WAIT_SECONDS) == 0, output.read_text()
    return folder / "ending"


@pytest.mark.parametrize("last_word", ["transition_started", "step_done 3", "commit"])
def test_a_job_killed_in_the_middle_of_a_change_trains_the_same_steps_again(
    last_word: str, undisturbed: Path, tmp_path: Path
) -> None:
    """Nothing is left but the disk: the state at the end is that of the run that nothing struck, bit by bit."""
    kind, _, step = last_word.partition(" ")

    def ready(run: Path) -> bool:
        if not (run / "events.jsonl").exists():
            return False
        return any(e["kind"] == kind and str(e.get("step", "")).endswith(step) for e in events(run.parent))

    trained(tmp_path, ready, kill_all, CHANGING, "--rollouts", str(undisturbed))
    text = resumed(tmp_path, "--rollouts", str(undisturbed))
    print(last_word, "->", next(line for line in text.splitlines() if "resuming" in line))
    assert {e["step"] for e in events(tmp_path) if e["kind"] == "step_done"} == {1, 2, 3, 4, 5}
    found, expected = (newest_good(run / "checkpoints").manifest for run in (tmp_path / "ending", undisturbed))
    assert (found.step, found.digests) == (expected.step, expected.digests)
