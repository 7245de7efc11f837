"""Tokens/s of runs by the cluster that each ran on: the table behind the bars of analysis/measured_throughput.py.

A row is a number of a whole run, as in `nereus.report.table`; `variant` is the cluster: how many GPUs or slots, and their
kind where the run's journal tells it. Runs may be whatever `nereus compare` takes. A sample is written by

    python -m nereus.report.cluster_table FILE RUN ...
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import polars as pl

from nereus.errors import JournalError, NereusError
from nereus.report.compare import TOKENS, tokens_half_width, tokens_per_second
from nereus.report.compared_run import ComparedRun, load_run, load_runs, named
from nereus.report.record import PROVENANCE, Provenance, provenance_of, read_provenance
from nereus.report.summary import STEP_SECONDS
from nereus.report.table import REQUIRE_MEASURED, SCHEMA, Row, Source, read_table, write_table
from nereus.runtime.journal import RunFolder, read_lines

RATE, HALF_WIDTH, STEPS, SIMULATED = (
    "run/tokens_per_second",
    "run/tokens_per_second_half_width",
    "run/steps_count",
    "run/simulated",
)
TOKENS_OF_A_DEVICE = "perf/throughput"
"""Tokens/s of one GPU, under verl's name: with tokens and seconds it says how many there are."""
UNTOLD = "a cluster that is not told"


def cluster_table(runs: Sequence[ComparedRun], *, sample: bool = False) -> tuple[pl.DataFrame, Source]:
    """The table of runs whose names differ, and its source: measured where none of them is simulated.

    Raises JournalError for a run that does not tell its tokens and seconds.
    """
    rows = [row for run in runs for row in _rows(run)]
    source = Source(
        command=f"run folders {', '.join(run.name for run in runs)}",
        measured=not any(run.simulated for run in runs),
        sample=sample,
        runs={run.name: _provenance(run) for run in runs},
    )
    return pl.DataFrame(rows, schema=SCHEMA, orient="row", strict=True), source


def runs_or_sample(given: Sequence[Path], folder: Path, sample: Path) -> tuple[pl.DataFrame, Source]:
    """The table of the runs that are `given`; of those in `folder`, where none is and it has some; else the sample that ships.

    In `folder` a run that no step is done of is passed over. Raises ConfigError or JournalError where what is given is no
    run, NereusError when it is a sample and the environment has NEREUS_REQUIRE_MEASURED=1.
    """
    found = [run for path in given for run in load_runs(path)] if given else list(_complete(folder))
    if found:
        return cluster_table(named(found, None))
    if os.environ.get(REQUIRE_MEASURED, "0") not in ("", "0"):
        raise NereusError(f"{sample}: is sample data, and {REQUIRE_MEASURED} is set; measure it first: make run")
    return read_table(sample)


def cluster_of(run: ComparedRun) -> str:
    """The run's cluster: "4 x cpu", "16 slots" where their kind is not told, or UNTOLD."""
    told = [
        row[TOKENS] / (row[STEP_SECONDS] * row[TOKENS_OF_A_DEVICE])
        for row in run.rows
        if all(row.get(key, math.nan) > 0 for key in (TOKENS, STEP_SECONDS, TOKENS_OF_A_DEVICE))
    ]
    if not told:
        return UNTOLD
    count, kind = round(median(told)), _kind(run)
    return f"{count} x {kind}" if kind else f"{count} slot{'s' * (count > 1)}"


def _complete(folder: Path) -> Iterator[ComparedRun]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if RunFolder(path=path).is_run():
            try:
                run = load_run(path)
            except JournalError:
                continue
            if math.isfinite(tokens_per_second(run)):
                yield run


def _kind(run: ComparedRun) -> str:
    """What the run's journal says its slots are, the last time it was probed; empty for another source or a run without."""
    folder = RunFolder(path=run.path.parent)
    records: list[Any] = list(read_lines(folder.events)) if folder.is_run() else []
    kinds = [record["profile"]["device"] for record in records if record.get("kind") == "probe" and "profile" in record]
    return str(kinds[-1]) if kinds else ""


def _rows(run: ComparedRun) -> Iterator[Row]:
    rate, half_width = tokens_per_second(run), tokens_half_width(run)
    if not math.isfinite(rate):
        raise JournalError(f"{run.path}: does not tell tokens and seconds ({TOKENS}, {STEP_SECONDS}) of its steps")
    head = (run.name, "", cluster_of(run), run.system, 0, None)
    yield (*head, RATE, rate)
    if math.isfinite(half_width):
        yield (*head, HALF_WIDTH, half_width)
    yield (*head, STEPS, float(len(run.rows)))
    yield (*head, SIMULATED, float(run.simulated))


def _provenance(run: ComparedRun) -> Provenance:
    folder = run.path.parent
    if (folder / PROVENANCE).is_file():
        return read_provenance(folder)
    return Provenance(command=f"run {run.name}", commit="", versions={}, machine="", date="")


def main(words: Sequence[str]) -> int:
    """Writes the table of the runs `words[1:]`, as a sample, to `words[0]`; to be run where they took place."""
    path, *given = map(Path, words)
    table, source = cluster_table(named([run for each in given for run in load_runs(each)], None), sample=True)
    here = provenance_of(source.command)
    runs = {
        name: replace(known, versions=here.versions, machine=here.machine, date=here.date, commit=here.commit)
        for name, known in source.runs.items()
    }
    write_table(table, replace(source, runs=runs), path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
