"""How another driver finds the slots of a run once its own is gone: a private file of the run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from nereus.attaching import Stand
from nereus.checkpoint import Manifest, model_section
from nereus.config import Config
from nereus.errors import JournalError
from nereus.layout import Plan
from nereus.resumption import plan_section
from nereus.runtime.control import Contact


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """Slots outlive their driver for `limit_seconds`; the file in `path` says where they are."""

    path: Path
    limit_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSlot:
    """A slot: its actor's name, how its control thread is asked, its host (an index of `nodes`), its log."""

    actor: str
    contact: Contact
    host_index: int
    log: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachment:
    """The slots by number in the Ray cluster at `cluster`, whose actors are in `namespace`; `nodes` by host.

    `started_count` counts the slot processes so far. `host_memory` is the run's folder there, "" for none.
    """

    cluster: str
    namespace: str
    nodes: tuple[str, ...]
    several_hosts: bool
    started_count: int
    host_memory: str
    slots: Mapping[int, LiveSlot]

    @property
    def contacts(self) -> dict[int, Contact]:
        """How each slot is asked."""
        return {number: slot.contact for number, slot in self.slots.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Attaching:
    """What is taken over: slots, those of them that are dead, what stands by the journal, under what it came about.

    `plan` is what goes on: that which stands, or cut anew without the lost slots, under the numbers of those that live.
    """

    attachment: Attachment
    lost_slots: tuple[int, ...]
    stand: Stand
    before: Config
    plan: Plan

    @property
    def slot_count(self) -> int:
        """How many slots live."""
        return len(self.attachment.slots) - len(self.lost_slots)

    @property
    def manifest(self) -> Manifest:
        """What stands, in the words of a checkpoint without files; under the plan that goes on."""
        stand, before = self.stand, self.before
        return Manifest(
            run_id=before.run.name,
            step=stand.step,
            state_version=stand.state_version,
            model=model_section(before.model),
            plan=plan_section(self.plan),
            plan_text=str(self.plan),
            seed=before.run.seed,
            data_position=stand.data_position,
            kl_coef=stand.kl_coef,
            optimizer_steps=stand.optimizer_steps,
            files=(),
        )


def write(path: Path, attachment: Attachment) -> None:
    """Puts the file there whole, readable by its owner alone and on the disk. JournalError where that fails."""
    draft = path.with_suffix(".draft")
    try:
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(attachment), file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise JournalError(f"{path}: cannot be written: {error.strerror or error}") from error


def read(path: Path) -> Attachment:
    """What the file says. JournalError when it is not one of `write`."""
    try:
        found = json.loads(path.read_bytes())
        slots = {int(n): LiveSlot(**{**s, "contact": Contact(**s["contact"])}) for n, s in found["slots"].items()}
        return Attachment(**{**found, "nodes": tuple(found["nodes"]), "slots": slots})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(f"{path}: does not say where the slots are: {error}") from error
