"""The folder of a new run."""

from __future__ import annotations

import contextlib
from itertools import count
from pathlib import Path

from nereus.cli.load import dump_config
from nereus.config import Config
from nereus.errors import ConfigError
from nereus.runtime.journal import RunFolder


def create_run_folder(config: Config, parent: Path) -> RunFolder:
    """A new folder in `parent`, named by run.name (then run.name-2, -3, ...), with config.yaml and empty subfolders.

    Raises ConfigError with the key run.folder where nothing can be written.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path=_new(parent, config.run.name))
        folder.config.write_text(dump_config(config), encoding="utf-8")
        for inner in (folder.logs, folder.rollouts, folder.model):
            inner.mkdir()
    except OSError as error:
        raise ConfigError("run.folder", str(parent), f"expected a folder to write in: {error.strerror}") from error
    return folder


def discard_unused(folder: RunFolder) -> None:
    """Take away the folder of a run that never started; one that holds anything more stays."""
    if folder.events.exists():
        return
    with contextlib.suppress(OSError):  # something else is in it: it stays
        for inner in (folder.logs, folder.rollouts, folder.model):
            inner.rmdir()
        folder.config.unlink()
        folder.path.rmdir()


def link_to(folder: RunFolder, link: Path) -> None:
    """Makes `link` lead to the run folder, in place of another link that is there. Raises ConfigError with --link."""
    draft = link.with_name(f".{link.name}")
    try:
        if link.exists() and not link.is_symlink():
            raise ConfigError("--link", str(link), "expected a place for a link: something else is there")
        draft.unlink(missing_ok=True)
        draft.symlink_to(folder.path.absolute())
        draft.replace(link)
    except OSError as error:
        raise ConfigError("--link", str(link), f"expected a place for a link: {error.strerror}") from error


def _new(parent: Path, name: str) -> Path:
    for number in count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("count() does not end")
