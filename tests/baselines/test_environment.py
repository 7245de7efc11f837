"""Without a package index the check is skipped with the reason; nothing half-made is taken for whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baselines.verl import environment
from baselines.verl.environment import EnvironmentFailed, IndexOutOfReach, interpreter

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip with an index that does not answer, and an environment in tmp_path."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(environment, "FOLDER", tmp_path / "env")


@pytest.mark.usefixtures("nowhere")
def test_an_index_out_of_reach(tmp_path: Path) -> None:
    with pytest.raises(IndexOutOfReach, match="the package index is out of reach"):
        interpreter()
    assert not (tmp_path / "env/finished").exists()


@pytest.mark.usefixtures("nowhere")
def test_another_failure_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "requirements.txt").write_text("not a requirement\n", encoding="utf-8")
    monkeypatch.setattr(environment, "REQUIREMENTS", tmp_path / "requirements.txt")
    with pytest.raises(EnvironmentFailed, match="pip"):
        interpreter()


@pytest.mark.parametrize("name", ["check", "parity"])
@pytest.mark.usefixtures("nowhere")
def test_the_check_says_so_and_passes(tmp_path: Path, name: str) -> None:
    program = (
        f"import sys; from pathlib import Path; from baselines.verl import {name}, environment;"
        f"environment.FOLDER = Path(sys.argv[1]); sys.exit({name}.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "env")], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "skipped: the package index is out of reach" in done.stdout


@pytest.mark.parametrize(("system", "version"), [("verl", "0.9.1"), ("openrlhf", "0.11.2")])
def test_pins(system: str, version: str) -> None:
    lines = (ROOT / "baselines" / system / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins[system] == version
    ours = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line)
    assert pins["torch"] == ours["torch"]
