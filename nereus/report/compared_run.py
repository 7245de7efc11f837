"""Runs to compare, from wherever their metrics are: run folders, offline W&B folders, logs of verl and OpenRLHF."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nereus.errors import ConfigError, JournalError
from nereus.report.peers.naming import PeerLog
from nereus.report.peers.reading import placed_as_seen, read_peer_log
from nereus.report.record import RUN, read_run
from nereus.report.summary import Row
from nereus.report.wandb_folder import find_wandb_file, read_wandb, wandb_files
from nereus.runtime.journal import RunFolder, read_lines
from nereus.runtime.metrics import STEP, read_metrics

OWN_METRIC = "transition/count"
"""No other system has it: metrics.jsonl of Nereus are told apart from logs of verl by it."""
LATEST_SIMULATED_SECONDS = 1e8
"""Simulated time counts from 0, the clock of a real run from 1970."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """A run to compare: its rows, one a step, in order.

    `system` carried it out. `simulated`: no step of it took place. `torn`: its file ends within a record, which is left
    out. `unplaced`: metrics of another system that are in no row.
    """

    name: str
    path: Path
    rows: Sequence[Row]
    torn: bool = False
    system: str = "nereus"
    simulated: bool = False
    unplaced: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """What every series of it is marked with."""
        return "simulated" if self.simulated else "measured"


def load_runs(path: Path) -> tuple[ComparedRun, ...]:
    """The run in `path`, or all that lie in that folder: run folders, or W&B run folders. Raises as `load_run`."""
    if path.is_dir() and not RunFolder(path=path).is_run():
        folders = [child for child in sorted(path.iterdir()) if RunFolder(path=child).is_run()]
        files = [] if folders else wandb_files(path)
        if folders or len(files) > 1:
            return tuple(load_run(each) for each in folders or files)
    return (load_run(path),)


def load_run(path: Path) -> ComparedRun:
    """The run in `path`: a run folder or its metrics.jsonl, a W&B run folder or its `.wandb` file, a log of verl or OpenRLHF.

    Raises ConfigError where no run is, JournalError where its files are damaged or hold no step.
    """
    if not path.exists():
        raise ConfigError("RUN", str(path), "there is no such file or folder")
    folder = RunFolder(path=path if path.is_dir() else path.parent)
    if folder.is_run() and path in (folder.path, folder.metrics):
        run = _of_folder(folder)
    elif (file := find_wandb_file(path)) is not None:
        run = _of_wandb(file)
    else:
        run = _of_log(path)
    rows = [row for row in run.rows if math.isfinite(row.get(STEP, math.nan))]
    if not rows:
        cut = " (it ends in the middle of a record)" if run.torn else ""
        raise JournalError(f"{run.path}: holds no steps{cut}: nothing to compare")
    return replace(run, rows=rows)


def named(runs: Sequence[ComparedRun], names: Sequence[str] | None) -> tuple[ComparedRun, ...]:
    """`runs` under the `names` given, else their own, numbered where they repeat.

    Raises ConfigError when names are not one for each run and all different.
    """
    if names is not None:
        if len(names) != len(runs) or len(set(names)) != len(names) or not all(names):
            raise ConfigError("--names", ",".join(names), f"expected {len(runs)} different names, as a,b")
        return tuple(replace(run, name=name) for run, name in zip(runs, names, strict=True))
    own = [run.name for run in runs]
    numbers = [own[:index].count(name) + 1 for index, name in enumerate(own)]
    return tuple(
        replace(run, name=run.name if number == 1 else f"{run.name} ({number})")
        for run, number in zip(runs, numbers, strict=True)
    )


def _of_folder(folder: RunFolder) -> ComparedRun:
    rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
    name, system = folder.path.resolve().name, "nereus"
    if (folder.path / RUN).is_file():
        run = read_run(folder.path)
        name, system = run.variant or name, run.system
    events = read_lines(folder.events)
    began = events[0].get("at_seconds") if events else None
    simulated = isinstance(began, int | float) and began < LATEST_SIMULATED_SECONDS
    return ComparedRun(name=name, path=folder.metrics, rows=rows, system=system, simulated=simulated)


def _of_wandb(file: Path) -> ComparedRun:
    logged = read_wandb(file)
    system, simulated = logged.settings.get("system"), logged.settings.get("simulated") is True
    run = ComparedRun(name=logged.name, path=file, rows=logged.rows, torn=logged.torn, simulated=simulated)
    if isinstance(system, str):  # Nereus's own mirror, or what compare has written: our names already
        return replace(run, system=system)
    if any(OWN_METRIC in row for row in logged.rows) or (log := placed_as_seen(file, logged.rows)) is None:
        return run
    return _of_peer(log, run)


def _of_log(path: Path) -> ComparedRun:
    run = ComparedRun(name=path.resolve().stem, path=path, rows=())
    if path.is_file() and path.suffix == ".jsonl":
        records = read_lines(path)
        if any(OWN_METRIC in record for record in records):
            return replace(run, rows=read_metrics(path))
    if path.is_file() and (log := read_peer_log(path)) is not None:
        return _of_peer(log, run)
    expected = (
        "expected a run folder (config.yaml and events.jsonl) or a W&B run folder (a .wandb file),"
        " a metrics.jsonl, or a log of verl or OpenRLHF"
    )
    raise ConfigError("RUN", str(path), expected)


def _of_peer(log: PeerLog, run: ComparedRun) -> ComparedRun:
    """A run of which another system's log is all there is: it took place."""
    return replace(run, rows=log.rows, system=log.system, unplaced=(*log.unplaced, *log.unknown))
