"""How another system's metrics are called here: what is the same, what has another name, what has no column.

Nereus has verl's names for its own metrics; a system's `Naming` says for each of its names where it goes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nereus.report.summary import Row
from nereus.runtime.metrics import STEP


@dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """The names of `system` from `version` on.

    `step`: its name of the number of a step. `same`: patterns of names that mean here what they mean there. `renamed`:
    its name -> ours. `unplaced`: names that have no column here -> why. `derive`: more columns, from its row.
    """

    system: str
    version: str
    step: str
    same: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    unplaced: Mapping[str, str] = field(default_factory=dict[str, str])
    derive: Callable[[Row], Mapping[str, float]] = lambda _: {}

    def place(self, name: str) -> str | None:
        """Our name of the metric `name`; None where it has no column, whether that is known or not."""
        if name == self.step:
            return STEP
        if name in self.renamed:
            return self.renamed[name]
        return name if any(re.fullmatch(pattern, name) for pattern in self.same) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLog:
    """What a log of another system says: our rows, one a step, and its metrics that are in none of them.

    `unplaced`: metrics known to have no column -> why. `unknown`: metrics that the naming does not know.
    """

    path: Path
    system: str
    version: str
    rows: tuple[dict[str, float], ...]
    unplaced: Mapping[str, str]
    unknown: tuple[str, ...]


def placed(path: Path, rows: Iterable[Row], naming: Naming) -> PeerLog:
    """The rows of a log under our names; of a step that is told twice the later row counts, as after a resumption."""
    by_step: dict[float, dict[str, float]] = {}
    unplaced: dict[str, str] = {}
    unknown: dict[str, None] = {}
    for row in rows:
        ours: dict[str, float] = {}
        for name, value in row.items():
            if (column := naming.place(name)) is not None:
                ours[column] = value
            elif name in naming.unplaced:
                unplaced[name] = naming.unplaced[name]
            else:
                unknown[name] = None
        if (
            math.isfinite(step := ours.get(STEP, math.nan)) and len(ours) > 1
        ):  # W&B tells a table of texts before step 1
            by_step[step] = {**naming.derive(row), **ours}
    return PeerLog(
        path=path,
        system=naming.system,
        version=naming.version,
        rows=tuple(by_step[step] for step in sorted(by_step)),
        unplaced=unplaced,
        unknown=tuple(unknown),
    )


def told(row: Row, names: Sequence[str]) -> bool:
    """Whether `row` has a finite number under each of `names`."""
    return all(math.isfinite(row.get(name, math.nan)) for name in names)
