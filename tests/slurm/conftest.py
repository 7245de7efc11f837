"""A real Slurm of two nodes on this host. Only `make slurm-test` collects this folder: it needs root and minutes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

LOCAL_CLUSTER = Path(__file__).parents[2] / "scripts" / "slurm" / "local_cluster"
collect_ignore_glob = [] if os.environ.get("NEREUS_SLURM_TEST") else ["test_*.py"]


def local_cluster(*words: str) -> str:
    done = subprocess.run([LOCAL_CLUSTER, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session", autouse=True)
def cluster() -> Iterator[Path]:
    """The folder of the cluster; afterwards nothing of it is left."""
    folder = Path(f"/tmp/nereus-slurm-{os.getpid()}")  # short: it holds a socket
    os.environ["NEREUS_SLURM_DIR"] = str(folder)
    try:
        local_cluster("up", "2", "--install")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        yield folder
    finally:
        local_cluster("down")
        left = subprocess.run(["pgrep", "--full", str(folder)], capture_output=True, text=True, check=False).stdout
        assert not left, left
        assert not folder.exists()
