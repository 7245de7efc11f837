"""The controller's decisions made again from what it was told, beside those that a journal holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus.config import Config
from nereus.control.controller import AdaptiveController, Record
from nereus.control.outset import controller_of, fleet_controller
from nereus.control.written import event_of, fleet_of, plan_of, written
from nereus.errors import InvalidEvent, JournalError
from nereus.observe import fold
from nereus.report.record import structured

TOLD = "told"
MADE = {"commanded": "command", "decision": "entry"}
"""Kinds of what a controller makes, and the field that holds it."""
Journal = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A command or a decision: the line of the journal that the controller was told before it, its kind and content."""

    after_id: int
    kind: str
    content: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first place where what is made again is another: None where one side has nothing."""

    after_id: int
    recorded: Made | None
    again: Made | None

    def __str__(self) -> str:
        return f"after line {self.after_id}:\n  recorded  {_text(self.recorded)}\n  again     {_text(self.again)}"


def _text(made: Made | None) -> str:
    return "nothing" if made is None else f"{made.kind} {json.dumps(made.content, sort_keys=True)[:2000]}"


def made_again(records: Journal) -> list[Made]:
    """Every command and decision, from the events alone; what the journal says of them is not looked at.

    An event that cannot be true ends the list with what the controller said of it. JournalError where the journal is not
    that of a run with a controller.
    """
    config: Config | None = None
    controller: AdaptiveController | None = None
    found: list[Made] = []
    for index, record in enumerate(records):
        match record["kind"]:
            case "run_started" | "resumed":
                config = _config(record)
            case "control_started":
                if config is None:
                    raise JournalError("the journal has no run_started before control_started")
                plan, fleet = plan_of(record["plan"]), fleet_of(record["fleet"])
                if "inventory" in record:  # a simulated fleet
                    inventory = fleet_of(record["inventory"])
                    controller = fleet_controller(record["policy"], config, plan, fleet, inventory)
                else:
                    controller = controller_of(config, plan, fleet, fold(records[:index]))
            case "told":
                if controller is None:
                    raise JournalError(f"line {record['seq']}: an event was told before any control_started")
                try:
                    found += _handled(controller, record)
                except InvalidEvent as error:  # only where the events are not the run's own
                    return [*found, Made(after_id=record["seq"], kind="refused", content=str(error))]
            case _:
                continue
    if controller is None and (config is None or config.nereus.policy == "script"):
        raise JournalError("the run has no controller to replay: its nereus.policy is script")
    return found


def _handled(controller: AdaptiveController, record: Mapping[str, Any]) -> Iterable[Made]:
    for command in controller.handle(event_of(record["event"])):
        kind, content = ("decision", command.entry) if isinstance(command, Record) else ("commanded", command)
        yield Made(after_id=record["seq"], kind=kind, content=json.loads(json.dumps(written(content))))


def recorded(records: Journal) -> list[Made]:
    """Every command and decision that the journal holds."""
    found: list[Made] = []
    seq = 0
    for record in records:
        if record["kind"] == TOLD:
            seq = record["seq"]
        elif record["kind"] in MADE:
            found.append(Made(after_id=seq, kind=record["kind"], content=record[MADE[record["kind"]]]))
    return found


def first_difference(records: Journal) -> Difference | None:
    """Where the decisions made again differ from the recorded ones; None where all are equal.

    A journal may end before what followed from its last event was written down.
    """
    before, again = recorded(records), made_again(records)
    for one, other in zip(before, again, strict=False):
        if one != other:
            return Difference(after_id=min(one.after_id, other.after_id), recorded=one, again=other)
    if len(before) > len(again):
        return Difference(after_id=before[len(again)].after_id, recorded=before[len(again)], again=None)
    last = max((record["seq"] for record in records if record["kind"] == TOLD), default=0)
    if len(again) > len(before) and again[len(before)].after_id != last:
        return Difference(after_id=again[len(before)].after_id, recorded=None, again=again[len(before)])
    return None


def _config(record: Mapping[str, Any]) -> Config:
    try:
        return structured(Config, record["config"])
    except ValueError as error:
        raise JournalError(f"line {record['seq']}: the configuration cannot be read: {error}") from error
