"""The table of a benchmark, in the form of an experiment's, for a figure of analysis/."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import polars as pl

from nereus.report.record import provenance_of
from nereus.report.table import SCHEMA, Source, write_table

Number = tuple[str, str, str, float]
"""Part of the benchmark, what was looked at (such as 64 slots), metric, value."""


def write_numbers(path: Path, experiment: str, numbers: Iterable[Number], *, command: str, measured: bool) -> None:
    """Writes the table with its source; a part of the benchmark is a run of its own."""
    rows = [
        (f"{experiment}-{part}", experiment, variant, "nereus", 1, None, metric, float(value))
        for part, variant, metric, value in numbers
    ]
    table = pl.DataFrame(rows, schema=SCHEMA, orient="row", strict=True)
    known = provenance_of(command)
    runs = dict.fromkeys(sorted({row[0] for row in rows}), known)
    write_table(table, Source(command=command, measured=measured, sample=False, runs=runs), path)
