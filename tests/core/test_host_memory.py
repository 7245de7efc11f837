"""A run's folder in host memory: whose it is, what goes when, and where it is when memory has no room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nereus.errors import TransferFailed
from nereus.runtime import host_memory
from nereus.runtime.host_memory import OWNER, HostMemory


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "memory"
    found.mkdir()
    monkeypatch.setattr(host_memory, "PLACES", (found,))
    return found


def test_snapshots_go_alone_and_everything_at_the_end(place: Path, tmp_path: Path) -> None:
    host = HostMemory(tmp_path / "disk")
    assert not list(place.iterdir()), "made when it is first asked for"
    kept = [host.offloaded, host.progress]
    dropped = [host.snapshots("snapshot"), host.snapshots("checkpoint")]
    for folder in (*kept, *dropped):
        folder.mkdir()
    host.drop_snapshots()
    assert [folder.is_dir() for folder in (*kept, *dropped)] == [True, True, False, False]
    host.close()
    host.close()
    assert not list(place.iterdir())


def test_what_a_killed_driver_left_goes_and_what_a_live_one_has_stays(place: Path) -> None:
    live = HostMemory(None)
    live.offloaded.mkdir()
    words = f"""
import os
from pathlib import Path
from nereus.runtime import host_memory
host_memory.PLACES = (Path({str(place)!r}),)
host = host_memory.HostMemory(None)
host.offloaded.mkdir()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", words], check=True, timeout=60)
    assert len(list(place.glob(f"*/{OWNER}"))) == 2
    other = HostMemory(None)
    assert other.folder.is_dir()
    assert {folder.parent for folder in place.glob(f"*/{OWNER}")} == {live.folder, other.folder}
    assert live.offloaded.is_dir()
    live.close()
    other.close()


def test_the_next_place_is_taken_and_without_any_the_reason_is_told(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "missing"
    monkeypatch.setattr(host_memory, "PLACES", (missing, place))
    host = HostMemory(None)
    assert host.folder.parent == place
    host.close()
    monkeypatch.setattr(host_memory, "PLACES", (missing,))
    with pytest.raises(TransferFailed, match=r"missing: No such file or directory\): free some room"):
        HostMemory(None).folder  # noqa: B018
