"""What the simulated world is given: where it writes, whom it tells, who searches, what delays there are around steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nereus.control.records import Search, SearchDone
from nereus.events import ChangePlan
from nereus.sim.changes import SimChange
from nereus.sim.transit import Transit


class Log(Protocol):
    """Where events are written; `nereus.runtime.journal.Journal` is one."""

    def append(self, kind: str, *, sync: bool = False, at_seconds: float | None = None, **fields: object) -> int:
        """Writes an event."""
        ...


class Metrics(Protocol):
    """Where a step's metrics are written; `nereus.runtime.metrics.MetricsWriter` is one."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a row."""
        ...


class Shown(Protocol):
    """Who is told; a `nereus.report.display.Display` is one."""

    def step(self, metrics: Mapping[str, float], layout: str) -> None:
        """A step is done."""
        ...

    def transition(self, record: Mapping[str, object]) -> None:
        """A change is done or failed."""
        ...

    def note(self, text: str) -> None:
        """A line that stays."""
        ...


Searcher = Callable[[Search, float], SearchDone]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """Seconds and rates of what happens around steps: noticing a loss, restarting, storage, searching, notices."""

    detect_seconds: float = 15.0
    restart_seconds: float = 75.0
    storage_bytes_per_second: float = 2e9
    search_seconds: float = 0.5
    notice_seconds: float = 0.0


@dataclass(kw_only=True)
class ChangeUnderWay:
    """A change of plan under way: the command, what the journal says of it, the graph and its Transit, slots lost meanwhile."""

    command: ChangePlan
    facts: dict[str, Any]
    planned: SimChange | None = None
    transit: Transit | None = None
    refused: str = ""
    lost_slots: frozenset[int] = frozenset()
