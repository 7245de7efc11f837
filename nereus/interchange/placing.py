"""New folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nereus.errors import ConfigError
from nereus.runtime.checkpoints import sync


@contextmanager
def new_folder(path: Path, *, source: Path, force: bool) -> Iterator[Path]:
    """A draft beside `path` that becomes it when all went well, and is removed otherwise.

    ConfigError when `path` exists and `force` is not set, when it is or holds `source`, from which the draft is made, or
    where nothing can be written. The folder that is replaced is not lost: where its successor did not take its place,
    it is put back, after a kill by the next call.
    """
    path = path.absolute()
    draft, aside = (path.parent / f".{path.name}.{end}" for end in ("draft", "replaced"))
    try:
        _put_back(aside, path)
        if path.exists() and not force:
            raise ConfigError("--to", str(path), "expected a new folder: it exists; --force replaces it")
        if source.resolve().is_relative_to(path.resolve()):
            raise ConfigError("--to", str(path), "expected a folder that does not hold the source")
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in (draft, aside):
            _remove(left)
        draft.mkdir()
    except OSError as error:
        raise ConfigError("--to", str(path), f"expected a folder to write in: {error.strerror}") from error
    try:
        yield draft
        for file in draft.rglob("*"):
            sync(file)
        sync(draft)
        if path.exists():
            path.rename(aside)
        draft.rename(path)
        sync(path.parent)
    except OSError as error:
        raise ConfigError("--to", str(path), f"cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # what cannot be put back stays aside
            _remove(draft)
            _put_back(aside, path)
            _remove(aside)


def _put_back(aside: Path, path: Path) -> None:
    """Gives the folder that was set aside its name again, where nothing took its place."""
    if aside.exists() and not path.exists():
        aside.rename(path)


def _remove(path: Path) -> None:
    """Removes a folder, or a file or link of its name."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
