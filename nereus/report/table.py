"""The table of an experiment: one row for every number of its runs, with where the numbers come from.

A row is (run, step, metric, value). Rows without a step are of the whole run: `run/...`. Metrics of a step are those of
`metrics.jsonl`; `transition_s/PART` and `transition/failed`, from the journal, are of the change before that step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import polars as pl

from nereus.errors import ConfigError, JournalError, NereusError
from nereus.experiment import Run
from nereus.report.record import Provenance, read_provenance, structured
from nereus.report.summary import Summary, fold
from nereus.runtime.journal import RunFolder, read_journal
from nereus.runtime.metrics import STEP, read_metrics

SCHEMA = pl.Schema(
    {
        "run_id": pl.String,
        "experiment": pl.String,
        "variant": pl.String,
        "system": pl.String,
        "seed": pl.Int64,
        "step": pl.Int64,  # null: of the whole run
        "metric": pl.String,
        "value": pl.Float64,
    }
)
KEY = ("run_id", "step", "metric")
METADATA = "nereus"  # the key of the parquet file's metadata
REQUIRE_MEASURED = "NEREUS_REQUIRE_MEASURED"

Row = tuple[str, str, str, str, int, int | None, str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a table's numbers come from; written into its file.

    `measured`: taken from runs that took place, not simulated. `sample`: shipped to show the figure, not to be quoted.
    `runs`: the provenance of each run by its id.
    """

    command: str
    measured: bool
    sample: bool
    runs: dict[str, Provenance]


def collected(runs: Sequence[tuple[Run, Path]], metrics: Sequence[str] | None = None) -> pl.DataFrame:
    """The table of finished runs and their folders; of steps only what the patterns `metrics` match, if given. JournalError for a record that is not whole."""
    rows = [row for run, folder in runs for row in _rows(run, folder) if _wanted(row, metrics)]
    table = pl.DataFrame(rows, schema=SCHEMA, orient="row", strict=True)
    if table.select(KEY).is_duplicated().any():
        twice = table.filter(table.select(KEY).is_duplicated()).row(0)
        raise JournalError(f"run {twice[0]}: step {twice[5]} has {twice[6]} twice")
    return table


def source_of(runs: Sequence[tuple[Run, Path]], *, command: str, sample: bool) -> Source:
    """The source of a table of these runs."""
    known = {run.run_id: read_provenance(folder) for run, folder in runs}
    measured = all(run.scene is None for run, _ in runs)
    return Source(command=command, measured=measured, sample=sample, runs=known)


def write_table(table: pl.DataFrame, source: Source, path: Path) -> None:
    """Writes `table` with its source; equal tables give equal bytes. The file appears whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        table.write_parquet(beside, metadata={METADATA: json.dumps(_packed(source))})
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise ConfigError("--out", str(path), f"expected a file to write: {error.strerror}") from error


def _packed(source: Source) -> dict[str, Any]:
    """As the file holds it: what runs have in common but for their dates once, in `made`; a run is (which of these, date)."""
    made: list[dict[str, Any]] = []
    runs: dict[str, tuple[int, str]] = {}
    for name, provenance in source.runs.items():
        shared = asdict(provenance)
        date = shared.pop("date")
        if shared not in made:
            made.append(shared)
        runs[name] = made.index(shared), date
    return asdict(source) | {"made": made, "runs": runs}


def _unpacked(raw: dict[str, Any]) -> dict[str, Any]:
    """A Source's fields; the first tables have every run's provenance whole."""
    if "made" not in raw:
        return raw
    made = raw.pop("made")
    return raw | {"runs": {name: made[which] | {"date": date} for name, (which, date) in raw["runs"].items()}}


def read_table(path: Path) -> tuple[pl.DataFrame, Source]:
    """The table in `path` and its source. Raises JournalError when it is not what `write_table` writes."""
    try:
        table = pl.read_parquet(path)
        source = structured(Source, _unpacked(json.loads(pl.read_parquet_metadata(path)[METADATA])))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise JournalError(f"{path}: cannot be read as parquet: {error}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise JournalError(f"{path}: does not say where it comes from: {error}; collect it again") from error
    if table.schema != SCHEMA:
        raise JournalError(f"{path}: has the columns {dict(table.schema)}; collect it again")
    return table, source


def measured_or_sample(measured: Path, sample: Path) -> tuple[pl.DataFrame, Source]:
    """The table in `measured` where there is one, else the sample that ships.

    Raises NereusError when it is a sample and the environment has NEREUS_REQUIRE_MEASURED=1.
    """
    path = measured if measured.is_file() else sample
    table, source = read_table(path)
    if os.environ.get(REQUIRE_MEASURED, "0") not in ("", "0") and (source.sample or not source.measured):
        raise NereusError(
            f"{path}: is sample data, and {REQUIRE_MEASURED} is set; measure it first: "
            f"make experiments EXPERIMENT={measured.parent.name}"
        )
    return table, source


def _wanted(row: Row, metrics: Sequence[str] | None) -> bool:
    return metrics is None or row[5] is None or any(fnmatchcase(row[6], pattern) for pattern in metrics)


def _rows(run: Run, folder: Path) -> Iterator[Row]:
    record = RunFolder(path=folder)
    metrics = read_metrics(record.metrics)
    steps = [row.get(STEP, math.nan) for row in metrics]
    last = run.workload.steps if run.scene is None else len(steps)  # a simulated run may stand still for ever
    if steps != list(range(1, last + 1)):
        raise JournalError(f"{record.metrics}: expected the steps 1 to {last}, found {steps}")
    summary = fold(read_journal(record.events), metrics, folder)
    head = (run.run_id, run.experiment, run.variant, run.system, run.seed)
    for metric, value in _of_run(summary).items():
        yield (*head, None, metric, value)
    for row, step in zip(metrics, range(1, len(metrics) + 1), strict=True):
        for metric, value in sorted({**row, **_of_transitions(summary, step)}.items()):
            if metric != STEP:
                yield (*head, step, metric, float(value))


def _of_run(summary: Summary) -> Mapping[str, float]:
    return {
        "run/seconds": summary.run_seconds,
        "run/training_seconds": summary.training_seconds,
        "run/transition_fraction": summary.transition_fraction,
        "run/transitions_count": float(len(summary.transitions)),
        "run/restores_count": float(sum("restore" in entry.seconds for entry in summary.transitions)),
        "run/steps_count": float(summary.steps),
    }


def _of_transitions(summary: Summary, step: int) -> Mapping[str, float]:
    known: dict[str, float] = {}
    for entry in summary.transitions:
        if entry.step == step:
            known |= {f"transition_s/{part}": seconds for part, seconds in entry.seconds.items()}
            known["transition/failed"] = float(bool(entry.reason))
    return known
