"""The table of one run folder, as `nereus.report.table` has it of an experiment: for the figures of a single run.

Beside the steps' metrics and the parts of changes it has when things were, in seconds since the run's journal began:
`timeline/begin_s` of a step and `timeline/change_begin_s` of the pause before it; of the whole run `timeline/PART_s`, the end of
each part before the first step. A sample is written by

    python -m nereus.report.run_table RUN FILE
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import polars as pl

from nereus.errors import JournalError, NereusError
from nereus.report.record import PROVENANCE, Provenance, provenance_of, read_provenance
from nereus.report.summary import fold
from nereus.report.table import REQUIRE_MEASURED, SCHEMA, Row, Source, read_table, write_table
from nereus.runtime.journal import RunFolder, read_journal
from nereus.runtime.metrics import STEP, read_metrics

DRAWN = ("timing_s/", "plan/", "critic/score/mean", "perf/total_num_tokens", "transition")
LEFT_OUT = ("memory",)
BEFORE_STEPS = {"probe": "probed", "warmup_done": "warmed_up", "state": "ready"}
Event = Mapping[str, Any]


def run_table(folder: Path, *, sample: bool = False) -> tuple[pl.DataFrame, Source]:
    """The table of the run in `folder` and its source, measured or simulated as its journal says.

    Raises JournalError where it is no run folder, no step is done, or its records are not whole.
    """
    record = RunFolder(path=folder)
    if not record.is_run():
        raise JournalError(f"{folder}: expected a run folder (one with config.yaml and events.jsonl)")
    events = cast("list[Event]", list(read_journal(record.events)))
    metrics = read_metrics(record.metrics) if record.metrics.is_file() else []
    if not metrics:
        raise JournalError(f"{record.metrics}: no step is done yet")
    rows = list(_rows(folder, events, metrics))
    table = pl.DataFrame(rows, schema=SCHEMA, orient="row", strict=True)
    simulated = any(event.get("simulated") for event in events if event.get("kind") == "run_started")
    known = read_provenance(folder) if (folder / PROVENANCE).is_file() else _dated(folder, events)
    name = folder.resolve().name
    source = Source(command=f"run folder {name}", measured=not simulated, sample=sample, runs={name: known})
    return table, source


def run_or_sample(folder: Path, sample: Path, *, asked_for: bool) -> tuple[pl.DataFrame, Source]:
    """The table of the run in `folder` where there is one, else the sample that ships.

    `asked_for`: the folder was named, so that JournalError where it is none. Raises NereusError when it is a sample and the
    environment has NEREUS_REQUIRE_MEASURED=1.
    """
    if asked_for or RunFolder(path=folder).is_run():
        return run_table(folder)
    if os.environ.get(REQUIRE_MEASURED, "0") not in ("", "0"):
        raise NereusError(f"{sample}: is sample data, and {REQUIRE_MEASURED} is set; measure it first: make run")
    return read_table(sample)


def _rows(folder: Path, events: Sequence[Event], metrics: Sequence[Mapping[str, float]]) -> Iterator[Row]:
    config = next((event.get("config") for event in events if event.get("kind") == "run_started"), None) or {}
    policy = str(config.get("nereus", {}).get("policy", ""))
    head = (folder.resolve().name, "", policy, "nereus", int(config.get("run", {}).get("seed", 0)))
    summary = fold(events, metrics, folder)
    began = float(events[0]["at_seconds"]) if events else 0.0
    yield (*head, None, "run/training_seconds", summary.training_seconds)
    for event in events:
        if event.get("kind") in BEFORE_STEPS:
            yield (*head, None, f"timeline/{BEFORE_STEPS[event['kind']]}_s", float(event["at_seconds"]) - began)
    more = _by_step(events, began)
    for row in metrics:
        step = int(row[STEP])
        for metric, value in sorted({**row, **more.get(step, {})}.items()):
            if metric.startswith((*DRAWN, "timeline/")) and not any(word in metric for word in LEFT_OUT):
                yield (*head, step, metric, float(value))


def _by_step(events: Sequence[Event], began: float) -> dict[int, dict[str, float]]:
    """What the journal says of each step and of the change before it; of a step done twice the last counts."""
    found: dict[int, dict[str, float]] = {}
    for event in events:
        at = float(event.get("at_seconds", began)) - began
        match event.get("kind"):
            case "step_done":
                seconds = float(event["metrics"].get("timing_s/step", 0.0))
                found.setdefault(int(event["step"]), {})["timeline/begin_s"] = at - seconds
            case "transition_done":
                row = found.setdefault(int(event["step"]), {})
                row |= {f"transition_s/{part}": float(seconds) for part, seconds in event["seconds"].items()}
                row["timeline/change_begin_s"] = at - float(event.get("pause_seconds", 0.0))
    return found


def _dated(folder: Path, events: Sequence[Event]) -> Provenance:
    """Of a run that `nereus train` made without an experiment, which notes no more than when it began."""
    began = datetime.fromtimestamp(float(events[0]["at_seconds"]), UTC) if events else None
    date = began.isoformat(timespec="seconds") if began else ""
    return Provenance(
        command=f"nereus train {folder.resolve().name}/config.yaml", commit="", versions={}, machine="", date=date
    )


def main(words: Sequence[str]) -> int:
    """Writes the table of the run folder `words[0]`, as a sample, to `words[1]`; to be run where that run took place."""
    folder, path = map(Path, words)
    table, source = run_table(folder, sample=True)
    here = provenance_of(source.command)
    runs = {name: replace(known, versions=here.versions, machine=here.machine) for name, known in source.runs.items()}
    write_table(table, replace(source, runs=runs), path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
