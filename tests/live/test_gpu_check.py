"""scripts/gpu_check: without a GPU it says what is missing; its steps pass on the CPU; a step that fails is in the report.

The whole command, with slots of its own, is for `make bench-gpu-check`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nereus.runtime.pool import SlotPool
from scripts.gpu_check import job
from scripts.gpu_check.__main__ import carried_out, main
from scripts.gpu_check.job import Check

ROOT = Path(__file__).parents[2]
STEPS = (
    "fabric",
    "digests on the device",
    "pinned staging",
    "engines and an optimizer step",
    "live change there and back",
    "sampling beside the trainer",
)
BROKEN = """
import sys
from scripts.gpu_check import __main__ as subject, job
job.LOGP_NATS = -1.0
sys.exit(subject.main(sys.argv[1:]))
"""

whole = pytest.mark.skipif(
    os.environ.get("NEREUS_BENCH_GPU_CHECK", "0") in ("", "0"), reason="a minute of processes: make bench-gpu-check"
)


def checked(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--report", str(tmp_path / "report.txt")]) == 2
    told = capsys.readouterr().err
    assert "sees no GPU" in told
    assert "requirements-gpu.txt" in told
    assert not (tmp_path / "report.txt").exists()


def test_steps_on_the_slots_of_other_tests(pool: SlotPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step passes; then the last one fails where log-probabilities may not differ at all, and that is told."""
    check, told = Check(pool, tmp_path), list[str]()
    assert carried_out(check.checks(), told.append), told
    text = "\n".join(told)
    assert [step for step in STEPS if f"passed  {step}" in text] == list(STEPS)
    assert "to TP4 PP1 DP1" in text
    assert "digests of actor.train, critic.train are those before" in text
    told.clear()
    monkeypatch.setattr(job, "LOGP_NATS", -1.0)
    last = STEPS[-1]
    assert not carried_out({"fabric": check.fabric, last: check.compare}, told.append)
    text = "\n".join(told)
    assert "passed  fabric" in text
    assert f"FAILED  {last}" in text
    assert "log-probabilities differ" in text


@whole
def test_every_step_passes_on_the_cpu(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    done = checked("-m", "scripts.gpu_check", "--cpu", "--report", str(report))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    text = report.read_text()
    assert [step for step in STEPS if f"passed  {step}" in text] == list(STEPS)
    assert "to TP2 PP1 DP1" in text
    assert "digests of actor.train, critic.train are those before" in text
    assert "nothing is missing" in text or "missing:" in text  # the doctor's findings


@whole
def test_a_step_that_fails_is_told_on_one_slot(tmp_path: Path) -> None:
    """One slot stands for one GPU: the change is of how the optimizer is kept."""
    report = tmp_path / "report.txt"
    done = checked("-c", BROKEN, "--cpu", "--slots", "1", "--report", str(report))
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-2000:]
    text = report.read_text()
    assert "FAILED  sampling beside the trainer" in text
    assert "log-probabilities differ" in text
    assert "optimizer sharded: False" in text
    assert "passed  live change there and back" in text
