"""Slots that die while a plan changes: in a process of their own, because Ray is one to a process and theirs ends early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_losses_of_slots(tmp_path: Path) -> None:
    """The three tests of alone_losses.py."""
    command = [sys.executable, "-m", "pytest", "tests/live/alone_losses.py", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'alone'}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "4 passed" in done.stdout
