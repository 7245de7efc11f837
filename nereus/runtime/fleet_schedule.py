"""Slots that leave and come back at steps of the configuration, as a spot market or a scheduler would have it.

A slot that leaves is announced before the step that runs without it, so that its state can be moved off it first. One that
comes back is started beside the steps; once its engines are imported it waits, in no world, for a plan that wants it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from nereus.config import Config
from nereus.errors import NereusError
from nereus.layout import Plan
from nereus.runtime.pool import SlotPool


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsLeaving:
    """These slots of the pool leave before the next step."""

    at_seconds: float
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsArrived:
    """So many slot processes wait to join the world, those of earlier news included."""

    at_seconds: float
    slots: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaunch:
    """Save what stands unless `torn`, end every slot process, and resume from the newest checkpoint under `plan`."""

    slots: int
    plan: Plan
    torn: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspend:
    """No plan is left without the slots that leave before `step`: the job stands still as it is until they are back."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsStay:
    """The slots that were about to leave are back, with all that they held."""

    at_seconds: float


class FleetSchedule:
    """What `fleet.schedule` makes of the fleet of a pool."""

    def __init__(self, config: Config, pool: SlotPool) -> None:
        self._schedule = config.fleet.schedule
        self._wanted = {each.step: each.slots for each in config.fleet.schedule}
        self._pool = pool

    def away_seconds(self, step: int, pace_seconds: float) -> float:
        """How long the slots are away that leave before `step`, where no step goes on meanwhile.

        That is what the schedule states; else its steps until they are back pass at the job's pace. NereusError where
        they never are.
        """
        present = len(self._pool.numbers)
        for each in self._schedule:
            if each.step > step and each.slots >= present:
                return (each.step - step) * pace_seconds if each.away_seconds is None else each.away_seconds
        raise NereusError(
            f"no plan is left for the slots that stay after step {step - 1}, and fleet.schedule gives none back"
        )

    def before(self, step: int) -> tuple[SlotsLeaving | SlotsArrived, ...]:
        """What happens to the fleet before `step`, with the last step's world still standing."""
        present, waiting = len(self._pool.numbers), self._pool.waiting_count
        wanted = self._wanted.get(step, present + waiting)
        dismissed = min(max(present + waiting - wanted, 0), waiting)
        if wanted > present + waiting:
            self._pool.start_more(wanted - present - waiting)
        if dismissed:
            self._pool.dismiss(dismissed)
        count, at = self._pool.arrived(), time.time()
        news = (SlotsArrived(at_seconds=at, slots=count),) if count or dismissed else ()
        return (*news, SlotsLeaving(at_seconds=at, slots=self._pool.numbers[wanted:])) if wanted < present else news
