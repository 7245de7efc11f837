"""Logs of verl and OpenRLHF as they write them: console, verl's file logger, and what is exported from W&B (CSV, JSON lines).

Which system wrote a file is seen from its lines. Rows come out under its own names; `naming` has ours.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nereus.errors import JournalError
from nereus.report.peers.names import OPENRLHF, VERL
from nereus.report.peers.naming import Naming, PeerLog, placed
from nereus.report.summary import Row

COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # Ray's, around the name of the process that printed a line
VERL_STEP = re.compile(r"(?:^|\s)step:(\d+) - (.*)$")
OPENRLHF_STEP = re.compile(r"Global step (\d+): (\{.*\})\s*$")
NUMPY = re.compile(r"np\.\w+\((.*)\)")  # how numpy writes a scalar
OF_WANDB = "train/"  # what OpenRLHF's W&B logger puts before every name


def read_peer_log(path: Path) -> PeerLog | None:
    """The steps in the log `path`; None where it is no log of verl or OpenRLHF. Raises JournalError where it is damaged."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from error
    for rows, naming in ((_verl_console, VERL), (_verl_file, VERL), (_openrlhf_console, OPENRLHF)):
        if found := list(rows(path, text)):
            return placed(path, found, _checked(path, naming, found))
    exported = list(_exported(path, text))
    return placed_as_seen(path, exported) if exported else None


def placed_as_seen(path: Path, rows: Iterable[Row]) -> PeerLog | None:
    """Rows of a W&B run of another system; None where they are no such system's."""
    known = list(rows)
    names = {name for row in known for name in row}
    if "train/global_step" in names:
        stripped = [
            {name.removeprefix(OF_WANDB): value for name, value in row.items() if name.startswith(OF_WANDB)}
            for row in known
        ]
        return placed(path, stripped, _checked(path, OPENRLHF, stripped))
    return placed(path, known, VERL) if VERL.step in names else None


def _checked(path: Path, naming: Naming, rows: Iterable[Row]) -> Naming:
    """`naming`. Raises JournalError for OpenRLHF's logs of before it timed its phases: nothing could be compared."""
    if naming is OPENRLHF and not any("timing/step_total" in row for row in rows):
        raise JournalError(
            f"{path}: no step says timing/step_total: expected a log of OpenRLHF {naming.version} or later"
        )
    return naming


def _verl_console(path: Path, text: str) -> Iterator[Row]:
    """Lines such as `step:1 - actor/entropy:0.5 - ...` (utils/logger/aggregate_logger.py)."""
    del path
    for line in text.splitlines():
        if "step:" in line and (match := VERL_STEP.search(COLOUR.sub("", line))):
            parts = [part.rpartition(":") for part in match[2].split(" - ")]
            row = {name: number(value) for name, _, value in parts if name}
            if row:
                yield {VERL.step: float(match[1]), **row}


def _verl_file(path: Path, text: str) -> Iterator[Row]:
    """Lines such as {"step": 1, "data": {...}} (FileLogger in utils/tracking.py)."""
    for record in _records(path, text):
        if isinstance(data := record.get("data"), Mapping) and isinstance(record.get("step"), int):
            yield {VERL.step: float(record["step"]), **_numbers(data)}


def _openrlhf_console(path: Path, text: str) -> Iterator[Row]:
    """Lines such as `INFO ... Global step 1: {'policy_loss': 0.5, ...}` (trainer/ppo_trainer.py fit)."""
    for line_number, line in enumerate(text.splitlines(), start=1):
        if "Global step " in line and (match := OPENRLHF_STEP.search(COLOUR.sub("", line))):
            written = re.sub(r"\b(nan|-?inf)\b", "None", NUMPY.sub(r"\1", match[2]))
            try:
                data = ast.literal_eval(written)
            except (ValueError, SyntaxError) as error:
                raise JournalError(f"{path}: line {line_number}: expected a step's metrics: {error}") from error
            yield {OPENRLHF.step: float(match[1]), **_numbers(data)}


def _exported(path: Path, text: str) -> Iterator[Row]:
    """The history of a W&B run, as its export to CSV or `scan_history` written as JSON lines have it."""
    if path.suffix == ".csv":
        for record in csv.DictReader(text.splitlines()):
            yield {
                name: number(value)
                for name, value in record.items()
                if name and value and not math.isnan(number(value))
            }
    else:
        yield from map(_numbers, _records(path, text))


def _records(path: Path, text: str) -> Iterator[Mapping[str, Any]]:
    """The objects of JSON lines; none where the first line is none. A torn last line is left out."""
    lines = text.splitlines()
    for line_number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if line_number == 1 or line_number == len(lines):
                return
            raise JournalError(f"{path}: line {line_number}: expected JSON: {error}") from error
        if not isinstance(record, Mapping):
            return
        yield record


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a record; null is NaN, as in metrics.jsonl; what is no number, or W&B's own, is left out."""
    return {
        name: math.nan if value is None else float(value)
        for name, value in record.items()
        if (value is None or isinstance(value, int | float)) and not name.startswith("_")
    }


def number(text: str) -> float:
    """The number that a log writes as `text`; NaN where it is none."""
    match = NUMPY.fullmatch(text)
    try:
        return float(match[1] if match else text)
    except ValueError:
        return math.nan
