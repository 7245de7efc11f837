"""Point tables: public measurements read as rows that the models can predict, and the rules by which rows are left out.

The tables are CSV files with the columns of the collections that they come from. A rule is a sentence that was written
before the errors of the rows were seen; it is looked at in the order given, and the first that applies is printed.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Literal

from nereus.costs.rates import Rates, rates_of, slower
from nereus.costs.shape import Shape, gpt
from nereus.errors import ConfigError
from nereus.fleet import DEVICES, Device
from nereus.layout import Layout
from nereus.report.accuracy.models import shape_named

Record = Mapping[str, str]
Quantity = float
"""Seconds; of kind "memory" bytes."""
Kind = Literal["train", "decode", "tpot", "prefill", "rl", "memory"]

NO_PREDICTION = "its numbers admit no prediction"
DEVICE_NAMES = {
    "a100-80gb-sxm": "a100",
    "a100-80gb": "a100",
    "a100-40gb-sxm": "a100-40",
    "a100-40gb": "a100-40",
    "a100-80gb-pcie": "a100-pcie",
    "h100-80gb-sxm": "h100",
    "h100-96gb-hbm2e-500w": "h100",
    "h100-80gb-pcie": "h100-pcie",
    "h200-141gb-sxm": "h200",
    "a800-80gb": "a800",
    "h800-80gb": "h800",
    "h20-96gb": "h20",
    "gb200-192gb": "gb200",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One usable row: what was measured (seconds, or bytes of memory), and the terms of its prediction.

    `group` is (source, model, device): what is held out together. `workload` names what the rows of a choice between
    layouts share; rows of one `series` differ in sequence length, `growth_tokens`. `tokens` are those that a slot
    works through.
    """

    kind: Kind
    source: str
    model: str
    device: str
    precision: str
    parameters_count: float
    measured: Quantity
    terms: Mapping[str, float]
    layout: str = ""
    workload: str = ""
    series: str = ""
    growth_tokens: int = 0
    dense: bool = True
    tokens: float = 1.0

    @property
    def group(self) -> tuple[str, str, str]:
        """What is held out together."""
        return (self.source, self.model, self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A row that is not predicted: its kind, its source and the rule."""

    kind: Kind
    source: str
    rule: str


class Unusable(Exception):
    """A rule applies to the row; the message is the rule."""


def read_table(folder: Path, name: str) -> list[Record]:
    """The rows of FOLDER/name, [] where the folder has no such table; what a short row lacks is blank.

    Raises ConfigError when it cannot be read, and for a row with more cells than the table has columns.
    """
    path = folder / name
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            return [_record(row, f"{path}, line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("--points", str(path), f"expected a readable CSV table: {error}") from error


def _record(row: dict[str | None, str | None], place: str) -> Record:
    if None in row:
        raise ConfigError("--points", place, "expected no more cells than columns (a comma that is not quoted?)")
    return {key: (value or "").strip() for key, value in row.items() if key is not None}


def parsed(kind: Kind, records: list[Record], parse: Callable[[Record], Point]) -> tuple[list[Point], list[Skipped]]:
    """Each record as a point, or as skipped with the rule that `parse` raised; equal rows count once."""
    points: list[Point] = []
    skipped: list[Skipped] = []
    seen: set[tuple[object, ...]] = set()
    for record in records:
        source = record.get("source", "")
        try:
            point = parse(record)
            _refuse_nonsense(point)
        except Unusable as rule:
            skipped.append(Skipped(kind=kind, source=source, rule=str(rule)))
            continue
        except (ArithmeticError, ValueError):
            skipped.append(Skipped(kind=kind, source=source, rule=NO_PREDICTION))
            continue
        except KeyError as error:
            skipped.append(Skipped(kind=kind, source=source, rule=f"the table has no column {error.args[0]}"))
            continue
        key = (point.kind, point.source, point.model, point.device, point.measured, tuple(sorted(point.terms.items())))
        if key in seen:
            skipped.append(Skipped(kind=kind, source=source, rule="the same row twice"))
            continue
        seen.add(key)
        points.append(point)
    return points, skipped


def _refuse_nonsense(point: Point) -> None:
    if not (point.measured > 0 and isfinite(point.measured)):
        raise Unusable("what was measured is not above 0")
    if not all(isfinite(value) for value in point.terms.values()):
        raise Unusable("the model does not fit by the memory model")
    share = sum(point.terms.values()) / point.measured
    if not (share > 0 and isfinite(share)):
        raise Unusable(NO_PREDICTION)


def number(record: Record, key: str, default: float | None = None) -> float:
    """The number in a column; nan and inf are none.

    Raises Unusable below 0, and when the column is blank or holds no number and there is no default.
    """
    text = record.get(key, "").replace(",", "")
    try:
        value = float(text)
    except ValueError:
        value = nan
    if value < 0 and isfinite(value):
        raise Unusable(f"column {key} is below 0")
    if isfinite(value):
        return value
    if default is None:
        raise Unusable(f"no number in column {key}")
    return default


def whole(record: Record, key: str, default: int | None = None) -> int:
    """The whole number in a column, as `number`; they are all sizes and degrees. Raises Unusable below 1."""
    value = int(number(record, key, default))
    if value < 1:
        raise Unusable(f"column {key} is below 1")
    return value


def device_of(record: Record) -> Device:
    """The device of a row. Raises Unusable when the fleet's catalogue does not have it."""
    name = record.get("gpu", "").strip().lower()
    known = DEVICE_NAMES.get(name, name)
    if known not in DEVICES:
        raise Unusable("device not in the catalogue")
    return DEVICES[known]


def rates_of_row(record: Record, device: Device) -> Rates:
    """The rates of a row's device. A part that is capped to 500 of 700 W clocks lower by the cube root of its power."""
    rates = rates_of(device)
    return slower(rates, (700 / 500) ** (1 / 3)) if "500w" in record.get("gpu", "").lower() else rates


def shape_of_row(record: Record, position_rows: int = 0) -> Shape:
    """The model of a row: by name, or from its hidden size, layers and heads as a GPT. Raises Unusable."""
    shape = shape_named(record["model"], position_rows)
    if shape is None:
        shape = _from_columns(record)
    if shape is None:
        raise Unusable("model of unknown sizes, or not a transformer of attention and MLPs")
    return shape


def _from_columns(record: Record) -> Shape | None:
    columns = [record.get(name, "") for name in ("hidden", "layers", "heads")]
    if not (record["model"].upper().startswith("GPT-") and all(text.isdecimal() for text in columns)):
        return None
    hidden, layers, heads = (int(text) for text in columns)
    return gpt(layers, hidden, heads, 51200, position_rows=whole(record, "seq", 2048))


def layout_of(shape: Shape, *, tp: int, pp: int, cp: int, dp: int, ep: int) -> Layout:
    """The layout of a row, experts not cut by TP; the last pipeline ranks take the layers that are over.

    Raises Unusable when a pipeline rank has no layer.
    """
    if shape.layers < pp:
        raise Unusable("more pipeline ranks than layers")
    base, more = divmod(shape.layers, pp)
    pipeline = tuple(base + (rank >= pp - more) for rank in range(pp))
    return Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=1 if shape.expert_count else None, pipeline=pipeline)


def refuse_remembered(record: Record) -> None:
    """Rows written from memory are not measurements. Raises Unusable."""
    if "from memory" in f"{record.get('how_obtained', '')} {record.get('notes', '')}".lower():
        raise Unusable("written from memory, not read from its source")
