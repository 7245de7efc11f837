"""Readers of the public trace formats: who was there when, and how long responses were.

Availability, told apart by their content:
  JSON lines [milliseconds, add | remove | no-op | migration, {"nodes": [...]}]     Parcae (MIT)
  a JSON list of {"Time": seconds, "GPUs": count}                        Sailor (MIT)
  rows `milliseconds,add|remove,node`                                    Bamboo's AWS traces (MIT)
  rows `date, time, count`: samples                                      Bamboo's Google Cloud trace (MIT)
  rows `time,count`: step points, with or without a header               Bamboo, Parcae; the unit has to be told
Lengths:
  `train_step,mean_response_length`, with a `model` column in front where a figure shows several
  verl's logs with `step` and `response_length/mean`
  requests: `prompt` and `output` tokens under the names that each source gives them
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from nereus.errors import ConfigError
from nereus.sim.traces import Availability, LengthCurve, step_function

SECONDS_PER_UNIT = {"seconds": 1.0, "milliseconds": 1e-3, "hours": 3_600.0}
NO_CHANGE = ("no-op", "migration")
"""What Parcae writes for minutes in which nobody came or went."""
REQUEST_COLUMNS = (
    ("ContextTokens", "GeneratedTokens"),  # Azure (CC-BY-4.0)
    ("input_length", "output_length"),  # Mooncake (Apache-2.0)
    ("num_prefill_tokens", "num_decode_tokens"),  # Vidur (MIT)
    ("input_tokens", "output_tokens"),  # LLMServingSim (MIT)
)


def read_availability(path: Path, unit: str | None = None) -> Availability:
    """The availability in a public file. `unit` is that of plain step points: seconds unless told.

    ConfigError that names the file, and the line where it is a line, for what is in none of the formats.
    """
    if unit is not None and unit not in SECONDS_PER_UNIT:
        raise ConfigError("unit", unit, f"expected one of {', '.join(SECONDS_PER_UNIT)}")
    text = _text(path)
    start = text.lstrip()[:1]
    if start == "[":
        found = _json_points(path, text)
    else:
        rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
        found = _rows_points(path, rows, SECONDS_PER_UNIT[unit or "seconds"])
    points, until = found
    return step_function(path.stem, points, until)


Points = tuple[list[tuple[float, int]], float | None]


def _json_points(path: Path, text: str) -> Points:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, list) and whole and isinstance(whole[0], dict):
        try:
            return [(float(sample["Time"]), int(sample["GPUs"])) for sample in whole], None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError("trace", str(path), f'entries with "Time" and "GPUs": {error!r}') from error
    return _named_events(path, _json_events(path, text))


def _json_events(path: Path, text: str) -> Iterator[tuple[int, float, str, Sequence[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            milliseconds, operation, facts = json.loads(line)
            yield number, float(milliseconds) / 1e3, str(operation), [str(node) for node in facts["nodes"]]
            yield number, (float(milliseconds) + float(facts.get("duration", 0))) / 1e3, NO_CHANGE[0], ()
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError("trace", f"{path}:{number}", f"[ms, operation, {{nodes}}]: {error!r}") from error


def _named_events(path: Path, events: Iterator[tuple[int, float, str, Sequence[str]]]) -> Points:
    """Counts after each event over named instances; an instance is added once and removed once at a time."""
    present: set[str] = set()
    points: list[tuple[float, int]] = []
    for number, seconds, operation, names in events:
        if operation == "add":
            present.update(names)
        elif operation == "remove":
            if not present.issuperset(names):
                strange = min(set(names) - present)
                raise ConfigError("trace", f"{path}:{number}", f"to remove what is there; {strange} is not")
            present.difference_update(names)
        elif operation not in NO_CHANGE:
            raise ConfigError("trace", f"{path}:{number}", f"add, remove, no-op or migration, not {operation}")
        points.append((seconds, len(present)))
    return points, None


def _rows_points(path: Path, rows: list[list[str]], seconds_per_unit: float) -> Points:
    if not rows:
        raise ConfigError("trace", str(path), "at least one row")
    header = not _is_number(rows[0][0]) and not _is_date(rows[0][0])
    body = rows[1:] if header else rows
    width = {len(row) for row in body}
    if width == {3} and _is_date(body[0][0]):
        return [(_moment(path, number, row), int(row[2])) for number, row in enumerate(body, 1)], None
    if width == {3} and body[0][1] in ("add", "remove"):
        events = ((number, float(row[0]) / 1e3, row[1], [row[2]]) for number, row in enumerate(body, 1))
        return _named_events(path, events)
    if width == {2}:
        try:
            return [(float(row[0]) * seconds_per_unit, int(row[1])) for row in body], None
        except ValueError as error:
            raise ConfigError("trace", str(path), f"rows `time,count`: {error}") from error
    raise ConfigError("trace", str(path), f"one of the known formats; its rows have {sorted(width)} columns")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_date(text: str) -> bool:
    return len(text) == 10 and text[4:5] == "-" and text[7:8] == "-"


def _moment(path: Path, number: int, row: list[str]) -> float:
    try:
        return datetime.fromisoformat(f"{row[0]}T{row[1]}+00:00").timestamp()
    except ValueError as error:
        raise ConfigError("trace", f"{path}:{number}", f"`date, time, count`: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("trace", str(path), f"a readable file: {error.strerror}") from error


def read_lengths(path: Path, model: str = "") -> LengthCurve:
    """The mean response length over steps in a public file; `model` chooses among several."""
    rows = list(csv.DictReader(_text(path).splitlines()))
    columns = list(rows[0]) if rows else []
    for step, mean in (("train_step", "mean_response_length"), ("step", "response_length/mean")):
        if step in columns and mean in columns:
            chosen = _of_model(path, rows, model) if "model" in columns else rows
            points = {int(float(row[step])): float(row[mean]) for row in chosen if row[mean]}
            ordered = sorted(points)
            return LengthCurve(
                name=f"{path.stem}{f':{model}' if model else ''}",
                at_steps=tuple(ordered),
                mean_tokens=tuple(points[at] for at in ordered),
            )
    raise ConfigError("lengths", str(path), "columns train_step,mean_response_length or step,response_length/mean")


def _of_model(path: Path, rows: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    names = sorted({row["model"] for row in rows})
    if model not in names:
        raise ConfigError("lengths", f"{path}:{model}", f"one of the models {', '.join(names)}, as FILE:MODEL")
    return [row for row in rows if row["model"] == model]


def read_requests(path: Path) -> tuple[tuple[int, int], ...]:
    """(prompt tokens, output tokens) of every request in a public trace."""
    rows = list(csv.DictReader(_text(path).splitlines()))
    for prompt, output in REQUEST_COLUMNS:
        if rows and prompt in rows[0] and output in rows[0]:
            return tuple((int(row[prompt]), int(row[output])) for row in rows)
    raise ConfigError(
        "requests", str(path), f"columns of one of {', '.join('/'.join(pair) for pair in REQUEST_COLUMNS)}"
    )
