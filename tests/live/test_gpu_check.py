"""scripts/gpu_check: without a GPU it says what is missing; with --cpu its steps pass; a step that fails is in the report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def checked(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    done = checked("-m", "scripts.gpu_check", "--report", str(tmp_path / "report.txt"))
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr
    assert "requirements-gpu.txt" in done.stderr
    assert not (tmp_path / "report.txt").exists()


def test_every_step_passes_on_the_cpu(tmp_path: Path) -> None:
    report = tmp_path / "report.txt"
    done = checked("-m", "scripts.gpu_check", "--cpu", "--report", str(report))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    text = report.read_text()
    assert [step for step in STEPS if f"passed  {step}" in text] == list(STEPS)
    assert "to TP2 PP1 DP1" in text
    assert "digests of actor.train, critic.train are those before" in text
    assert "nothing is missing" in text or "missing:" in text  # the doctor's findings


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
