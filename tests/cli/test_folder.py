"""The folder of a run: config.yaml and subfolders, names that do not clash, unwritable parents told."""

from pathlib import Path

import pytest

from nereus.cli.folder import create_run_folder, discard_unused
from nereus.cli.load import load_config
from nereus.config import Config, RunConfig
from nereus.errors import ConfigError
from nereus.runtime.journal import Journal


def test_a_folder_with_its_config(tmp_path: Path) -> None:
    config = Config(run=RunConfig(name="try", steps=7))
    folder = create_run_folder(config, tmp_path / "deep" / "runs")
    assert folder.path == tmp_path / "deep" / "runs" / "try"
    assert load_config(folder.config, []) == config
    assert folder.logs.is_dir()
    assert folder.rollouts.is_dir()
    assert folder.model.is_dir()


def test_names_that_clash_are_numbered(tmp_path: Path) -> None:
    assert [create_run_folder(Config(), tmp_path).path.name for _ in range(3)] == ["run", "run-2", "run-3"]


@pytest.mark.parametrize("inner", ["", "below"])
def test_an_unwritable_parent(tmp_path: Path, inner: str) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected a folder to write in") as caught:
        create_run_folder(Config(), tmp_path / "file" / inner)
    assert caught.value.key == "run.folder"


def test_discard_only_what_never_ran(tmp_path: Path) -> None:
    unused, used, touched = (create_run_folder(Config(), tmp_path) for _ in range(3))
    Journal(used.events).append("run_started")
    (touched.path / "mine.txt").write_text("", encoding="utf-8")
    for folder in (unused, used, touched):
        discard_unused(folder)
    assert not unused.path.exists()
    assert used.is_run()
    assert (touched.path / "mine.txt").exists()
