"""The spells of a run under one plan each, and how long their steps took: a fold of the journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

Event = Mapping[str, Any]
STEP_SECONDS = "timing_s/step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spell:
    """Steps one after the other under one plan; `plan` is its text, "" where the journal has none."""

    first_step: int
    last_step: int
    median_seconds: float
    plan: str


def spells(events: Sequence[Event]) -> tuple[Spell, ...]:
    """In order; of a step that was done twice the last counts."""
    rows: dict[int, tuple[str, str, float]] = {}
    text = next(
        (str(event["from"]) for event in events if event.get("kind") == "transition_done" and "from" in event), ""
    )
    for event in events:
        match event.get("kind"):
            case "transition_done":
                text = str(event.get("to", ""))
            case "recovered":
                text = str(event.get("plan_text", ""))
            case "step_done" if "plan_id" in event:
                step, seconds = int(event["step"]), float(event["metrics"].get(STEP_SECONDS, "nan"))
                rows = {known: row for known, row in rows.items() if known < step}
                rows[step] = (str(event["plan_id"]), text, seconds)
            case _:
                pass
    found: list[list[int]] = []
    for step in sorted(rows):
        if found and rows[found[-1][-1]][0] == rows[step][0]:
            found[-1].append(step)
        else:
            found.append([step])
    return tuple(_spell(steps, rows) for steps in found)


def _spell(steps: Sequence[int], rows: Mapping[int, tuple[str, str, float]]) -> Spell:
    seconds = [rows[step][2] for step in steps if isfinite(rows[step][2])]
    middle = median(seconds) if seconds else float("nan")
    return Spell(first_step=steps[0], last_step=steps[-1], median_seconds=middle, plan=rows[steps[-1]][1])


def spell_lines(found: Sequence[Spell]) -> list[str]:
    """The text; none for a run that kept its plan."""
    if len(found) < 2:
        return []
    spans = [f"{spell.first_step} to {spell.last_step}" for spell in found]
    width = max(map(len, spans))
    rows = (f"  steps {span:<{width}}  {s.median_seconds:7.3f}  {s.plan}" for span, s in zip(spans, found, strict=True))
    return ["seconds of a step under each plan, medians", *(row.rstrip() for row in rows)]
