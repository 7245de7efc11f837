"""Fits of the factors of nereus.costs.coefficients to points, kind after kind, and fits that leave a group out.

Each stage minimises a robust sum of squared log errors, every group of rows weighing as the root of its size, with a
normal prior of the log factors around 0. Later stages hold the factors of earlier ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from nereus.costs.coefficients import Kind, factor_names
from nereus.report.accuracy.points import Point

Vector = npt.NDArray[np.float64]
Group = tuple[str, str, str]
SCALE = 0.08
"""Log error at which the robust loss turns from square to linear."""
WIDE, NARROW = 0.5, 0.3
"""Prior deviation of a term's log factor, and of a device's or precision's on top of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One fit: its name and which points it takes."""

    name: str
    takes: Callable[[Point], bool]


STAGES = (
    Stage(name="dense training", takes=lambda p: p.kind == "train" and p.dense and p.precision == "bf16"),
    Stage(
        name="fp8 and expert training", takes=lambda p: p.kind == "train" and not (p.dense and p.precision == "bf16")
    ),
    Stage(name="decode", takes=lambda p: p.kind == "decode"),
    Stage(name="RL steps", takes=lambda p: p.kind == "rl"),
)


def kind_of(point: Point) -> Kind:
    """Which coefficients a point's terms have."""
    return "rl" if point.kind == "rl" else "train" if point.kind == "train" else "generate"


def names_of(point: Point, term: str) -> tuple[str, ...]:
    """The factors of a point's term."""
    return factor_names(term, point.device, point.precision, kind_of(point))


def _deviation(name: str) -> float:
    return NARROW if "@" in name or name.startswith("fp8") else WIDE


@dataclass(kw_only=True)
class Fitter:
    """Fits of one set of points; what a left-out group does not touch is fitted once.

    `factors(group)` are the factors fitted without that group (None: with all).
    """

    points: Sequence[Point]
    _kept: dict[tuple[int, Group | None], dict[str, float]] = field(default_factory=dict)

    def factors(self, without: Group | None = None) -> dict[str, float]:
        """Factor -> value, over all stages."""
        if without is not None and (0, None) not in self._kept:
            self.factors()  # the start of what follows
        fixed: dict[str, float] = {}
        touched: Group | None = None
        for index, stage in enumerate(STAGES):
            points = [point for point in self.points if stage.takes(point)]
            if without is not None and any(point.group == without for point in points):
                touched = without
            rest = [point for point in points if point.group != touched]
            fixed |= self.kept((index, touched), rest, fixed)
        return {name: exp(value) for name, value in fixed.items()}

    def kept(
        self, key: tuple[int, Group | None], points: Sequence[Point], fixed: Mapping[str, float]
    ) -> dict[str, float]:
        """Log factors of one stage, fitted once for each (stage, what is left out)."""
        if key not in self._kept:
            near = self._kept.get((key[0], None), {})
            self._kept[key] = fit(points, fixed, near) if points else {}
        return self._kept[key]


def fit(points: Sequence[Point], fixed: Mapping[str, float], near: Mapping[str, float]) -> dict[str, float]:
    """Log factors that the points exercise and that are not `fixed`; the search starts at those of `near`."""
    entries = [
        (row, seconds / point.measured, names_of(point, term))
        for row, point in enumerate(points)
        for term, seconds in point.terms.items()
        if seconds > 0
    ]
    names = sorted({name for _, _, each in entries for name in each} - set(fixed))
    place = {name: index for index, name in enumerate(names)}
    rows = np.array([row for row, _, _ in entries])
    values = np.array([value * exp(sum(fixed.get(name, 0.0) for name in each)) for _, value, each in entries])
    width = max(len(each) for _, _, each in entries)
    columns = np.full((len(entries), width), len(names))
    for index, (_, _, each) in enumerate(entries):
        free = [place[name] for name in each if name in place]
        columns[index, : len(free)] = free
    weights = _weights(points)
    spread = np.array([_deviation(name) for name in names])
    begin = np.array([near.get(name, 0.0) for name in names])

    def parts(z: Vector) -> tuple[Vector, Vector]:
        share = values * np.exp(np.append(z, 0.0)[columns].sum(axis=1))
        return share, np.bincount(rows, share, minlength=len(points)).astype(np.float64)

    def residuals(z: Vector) -> Vector:
        r = weights * np.log(parts(z)[1]) / SCALE
        return np.concatenate([np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r * r) - 1)), z / spread])

    def slopes(z: Vector) -> Vector:
        share, total = parts(z)
        matrix = np.zeros((len(points), len(names) + 1))
        for k in range(width):
            np.add.at(matrix, (rows, columns[:, k]), share)
        r = weights * np.log(total) / SCALE
        u = np.sqrt(1 + r * r)
        y = np.sqrt(2 * (u - 1))
        outer = np.where(y > 1e-9, np.abs(r) / (u * np.maximum(y, 1e-9)), 1.0)
        inner = (outer * weights / SCALE / total)[:, None] * matrix[:, :-1]
        return np.vstack([inner, np.diag(1 / spread)])

    solved = least_squares(residuals, begin, slopes)  # pyright: ignore[reportArgumentType]
    return dict(zip(names, map(float, solved.x), strict=True))


def _weights(points: Sequence[Point]) -> Vector:
    """One over the root of the group's size, of mean square 1."""
    count = Counter(point.group for point in points)
    weights = np.array([count[point.group] ** -0.5 for point in points])
    return weights / np.sqrt(np.mean(weights**2))


def fit_without_source(fitter: Fitter, source: str) -> dict[str, float]:
    """Factor -> value of a fit that saw no row of this source (kept on the fitter, as a group of that name)."""
    key: Group = (source, "*", "*")
    fixed: dict[str, float] = {}
    touched = False
    for index, stage in enumerate(STAGES):
        points = [point for point in fitter.points if stage.takes(point)]
        touched = touched or any(point.source == source for point in points)
        rest = [point for point in points if point.source != source]
        fixed |= fitter.kept((index, key if touched else None), rest, fixed)
    return {name: exp(value) for name, value in fixed.items()}
