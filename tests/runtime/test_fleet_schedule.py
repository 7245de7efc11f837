"""What a stated schedule makes of the fleet: who is started, who leaves, and whom nobody has wanted yet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

from nereus.config import Config, FleetConfig, FleetStepConfig
from nereus.runtime.fleet_schedule import FleetSchedule, SlotsArrived, SlotsLeaving
from nereus.runtime.pool import SlotPool


@dataclass
class CountedPool:
    """The counts of a pool, without processes."""

    numbers: tuple[int, ...] = (0, 1, 2, 3)
    starting: int = 0
    ready: bool = True
    calls: list[tuple[str, int]] = field(default_factory=list)

    @property
    def waiting_count(self) -> int:
        return self.starting

    def start_more(self, count: int) -> None:
        self.calls.append(("start", count))
        self.starting += count

    def dismiss(self, count: int) -> None:
        self.calls.append(("dismiss", count))
        self.starting -= count

    def arrived(self) -> int:
        return self.starting if self.ready else 0


def told(schedule: FleetSchedule, step: int) -> list[object]:
    """The news before a step, without their time."""
    return [replace(news, at_seconds=0.0) for news in schedule.before(step)]


def scheduled(pool: CountedPool, *slots: tuple[int, int]) -> FleetSchedule:
    changes = tuple(FleetStepConfig(step=step, slots=count) for step, count in slots)
    return FleetSchedule(Config(fleet=FleetConfig(slots=4, schedule=changes)), cast("SlotPool", pool))


def test_the_last_slots_leave_and_new_ones_are_told_once_they_are_there() -> None:
    pool = CountedPool()
    schedule = scheduled(pool, (3, 2), (5, 4))
    assert told(schedule, 2) == []
    assert told(schedule, 3) == [SlotsLeaving(at_seconds=0.0, slots=(2, 3))]
    pool.numbers, pool.ready = (0, 1), False
    assert told(schedule, 5) == []
    pool.ready = True
    assert told(schedule, 6) == [SlotsArrived(at_seconds=0.0, slots=2)]
    pool.numbers, pool.starting = (0, 1, 2, 3), 0
    assert told(schedule, 7) == []
    assert pool.calls == [("start", 2)]


def test_slots_that_no_plan_has_taken_go_first() -> None:
    pool = CountedPool(numbers=(0, 1, 2), starting=1)
    schedule = scheduled(pool, (4, 3), (6, 4), (8, 1))
    assert told(schedule, 4) == [SlotsArrived(at_seconds=0.0, slots=0)]
    assert told(schedule, 6) == [SlotsArrived(at_seconds=0.0, slots=1)]
    assert told(schedule, 8) == [SlotsArrived(at_seconds=0.0, slots=0), SlotsLeaving(at_seconds=0.0, slots=(1, 2))]
    assert pool.calls == [("dismiss", 1), ("start", 1), ("dismiss", 1)]
