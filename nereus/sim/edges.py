"""What the simulated world is given: where it writes, whom it tells, who searches, what delays there are around steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nereus.config import Config
from nereus.control.records import Search, SearchDone
from nereus.costs.shape import shape_of
from nereus.events import ChangePlan
from nereus.sim.changes import Asked, SimChange
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


STATE_BYTES = 18.0
"""Of a checkpoint, for each parameter of actor and critic: weights, masters, moments."""


def state_bytes(config: Config) -> float:
    """The job's state in a checkpoint."""
    models = 2.0 if config.algorithm.adv_estimator == "gae" else 1.0
    return STATE_BYTES * models * shape_of(config.model).parameters_count


Searcher = Callable[[Search, float], SearchDone]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """Seconds and rates of what happens around steps: noticing a loss, restarting, storage, searching, notices."""

    detect_seconds: float = 15.0
    restart_seconds: float = 75.0
    storage_bytes_per_second: float = 2e9
    search_seconds: float = 0.5
    notice_seconds: float = 0.0

    def stored(self, config: Config, nodes: int) -> float:
        """Seconds of the job's state to or from storage, by all nodes at once."""
        return state_bytes(config) / (self.storage_bytes_per_second * nodes)

    def restart(
        self, config: Config, nodes: int, engine_seconds: float, spread: float, *, processes: bool = True
    ) -> float:
        """Seconds of processes anew (if they are to be), the state read by all nodes at once, engines built."""
        started = self.restart_seconds if processes else 0.0
        return spread * (started + engine_seconds) + self.stored(config, nodes)


@dataclass(kw_only=True)
class ChangeUnderWay:
    """A change of plan under way: the command, what the journal says of it, graph and Transit, slots lost meanwhile.

    `asked` is what the graph was asked for.
    """

    command: ChangePlan
    facts: dict[str, Any]
    asked: Asked | None = None
    planned: SimChange | None = None
    transit: Transit | None = None
    refused: str = ""
    lost_slots: frozenset[int] = frozenset()
