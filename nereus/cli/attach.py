"""Whether a run whose driver died can go on where its slots are, and what of its configuration must stay then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nereus.attaching import last_stand
from nereus.cli.load import load_config
from nereus.config import Config
from nereus.controller import fits
from nereus.errors import ConfigError, InfeasiblePlan, JournalError
from nereus.runtime.attachment import Attaching, Attachment, read
from nereus.runtime.control import SILENT_SECONDS, STATUS_SECONDS, Touch, ask_each
from nereus.runtime.journal import RunFolder
from nereus.survivors import surviving_plan

Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """Slots that cannot be taken over, as far as they are known, and why."""

    attachment: Attachment | None
    why: str


def left_slots(folder: RunFolder, wanted: Config, events: Events) -> Attaching | Left:
    """What a dead driver left of slots. `wanted` has the overrides."""
    try:
        attachment = read(folder.slots)
    except JournalError as error:
        return Left(attachment=None, why=str(error))
    if not wanted.fleet.reattach_seconds:
        return Left(attachment=attachment, why="fleet.reattach_seconds = 0")
    answers = ask_each(attachment.contacts, {"ask": "status"}, SILENT_SECONDS)
    lost = tuple(slot for slot, told in answers.items() if told is None)
    if len(lost) == len(answers):
        return Left(attachment=attachment, why="none of them answers")
    if lost and wanted.fleet.on_loss == "stop":
        return Left(attachment=attachment, why=f"slots {', '.join(map(str, lost))} are lost, fleet.on_loss = stop")
    stand = last_stand(events)
    if isinstance(stand, str):
        return Left(attachment=attachment, why=stand)
    before = load_config(folder.resumed if folder.resumed.is_file() else folder.config, [])
    fleet = replace(before.fleet, slots=len(attachment.slots))
    before = replace(before, fleet=fleet)
    try:
        plan = surviving_plan(before, stand.plan, lost)[1] if lost else stand.plan
    except InfeasiblePlan as error:
        return Left(attachment=attachment, why=str(error))
    return Attaching(attachment=attachment, lost_slots=lost, stand=stand, before=before, plan=plan)


def fitting(config: Config, attaching: Attaching) -> Config:
    """The configuration without changes for more slots than live. ConfigError where it asks for what they cannot do."""
    instead = "with fleet.reattach_seconds=0 the run goes on from its newest checkpoint, on new slots"
    live, limit_seconds = attaching.slot_count, attaching.before.fleet.reattach_seconds
    if config.fleet.slots != live:
        expected = f"expected {live}, the slots of this run that live (fleet.schedule changes them later); {instead}"
        raise ConfigError("fleet.slots", config.fleet.slots, expected)
    if config.fleet.reattach_seconds != limit_seconds:
        expected = f"expected {limit_seconds}, with which its live slots were started; {instead}"
        raise ConfigError("fleet.reattach_seconds", config.fleet.reattach_seconds, expected)
    return replace(config, changes=tuple(change for change in config.changes if fits(change, live)))


def end_slots(folder: RunFolder, left: Left) -> None:
    """Slots that are of no use any more give their places back, and the file that names them goes."""
    if left.attachment is not None:
        ask_each(left.attachment.contacts, {"ask": "end"}, STATUS_SECONDS)
    folder.slots.unlink(missing_ok=True)


@contextmanager
def in_touch(attaching: Attaching) -> Iterator[None]:
    """While inside live slots hear of this driver, also before it has imported what it needs to take them over."""
    contacts = tuple(attaching.attachment.contacts.values())
    touch = Touch(lambda: contacts, attaching.before.fleet.reattach_seconds)
    try:
        yield
    finally:
        touch.close()
