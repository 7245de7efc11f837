"""New folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nereus.errors import ConfigError


@contextmanager
def new_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """A draft beside `path` that becomes it when all went well, and is removed otherwise.

    ConfigError when `path` exists and `force` is not set, or where nothing can be written.
    """
    path = path.absolute()
    if path.exists() and not force:
        raise ConfigError("--to", str(path), "expected a new folder: it exists; --force replaces it")
    draft, aside = (path.parent / f".{path.name}.{end}" for end in ("draft", "replaced"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in (draft, aside):
            shutil.rmtree(left, ignore_errors=True)
        draft.mkdir()
    except OSError as error:
        raise ConfigError("--to", str(path), f"expected a folder to write in: {error.strerror}") from error
    try:
        yield draft
        for file in draft.rglob("*"):
            _sync(file)
        _sync(draft)
        if path.exists():
            path.rename(aside)
        draft.rename(path)
        _sync(path.parent)
    except OSError as error:
        raise ConfigError("--to", str(path), f"cannot be written: {error.strerror or error}") from error
    finally:
        for left in (draft, aside):
            shutil.rmtree(left, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
