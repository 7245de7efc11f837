"""Errors of the cost and memory models on point tables: cold, warm, by choice of layout, along growing sequences.

Cold: nothing of the row's group (source, model, device) was seen. For groups that the shipped factors were fitted to
(fitted_groups.json) they are fitted again without the group; for all others the shipped factors are cold as they are.
Warm: the cold prior and one row of the group, by nereus.costs.calibrate; the mean over which row. Choice: among rows of one
workload under at least four layouts, the time of the one predicted fastest over the fastest.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nereus.costs.calibrate import observe, start
from nereus.costs.coefficients import FACTORS, coefficient, prior_for
from nereus.costs.footprint import MARGIN
from nereus.report.accuracy.decode import decode_point, tpot_point
from nereus.report.accuracy.memory import memory_point
from nereus.report.accuracy.points import Kind, Point, Skipped, parsed, read_table
from nereus.report.accuracy.refit import Fitter, Group, kind_of
from nereus.report.accuracy.rl import perf_point, rl_step_point
from nereus.report.accuracy.train import train_point

LEAST_GROUPS = 5
"""Other groups of a kind that a fit without one group needs."""
TABLES = (
    ("train", "train_points.csv", train_point),
    ("decode", "decode_points.csv", decode_point),
    ("tpot", "decode_points.csv", tpot_point),
    ("rl", "perf_points.csv", perf_point),
    ("rl", "rl_step_points.csv", rl_step_point),
    ("memory", "memory_points.csv", memory_point),
)
LEAST_LAYOUTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A point with its errors: predicted over measured less 1 with the shipped factors and cold; warm is a mean of
    absolutes.

    `cold_share` is None for a group that was fitted to and cannot be fitted without; `warm_share` for a group of one
    row.
    """

    point: Point
    shipped_share: float
    cold_share: float | None
    warm_share: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Statistics of absolute errors, and the median signed error, as shares."""

    count: int
    median_share: float
    mean_share: float
    p90_share: float
    worst_share: float
    bias_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One workload under several layouts: the time of the layout picked over the best, and the rank correlation."""

    name: str
    layout_count: int
    regret_ratio: float
    rank_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Rows that differ in sequence length: the worst error, and whether seconds a token are predicted to rise."""

    name: str
    count: int
    worst_share: float
    monotone: bool


def load_points(folder: Path) -> tuple[list[Point], list[Skipped]]:
    """All tables' points and what was skipped."""
    points: list[Point] = []
    skipped: list[Skipped] = []
    for kind, name, parse in TABLES:
        usable, left = parsed(kind, read_table(folder, name), parse)  # pyright: ignore[reportArgumentType]
        known = {_step(point) for point in points if point.kind == "rl"}
        if name.startswith("rl_step"):
            double = [point for point in usable if _step(point) in known]
            left += [Skipped(kind="rl", source=point.source, rule="in both RL tables") for point in double]
            usable = [point for point in usable if _step(point) not in known]
        points += usable
        skipped += [row for row in left if row.kind != "tpot"]
    return points, skipped


def _step(point: Point) -> tuple[str, float, float]:
    return (point.device, point.measured, point.parameters_count)


def fitted_groups() -> frozenset[Group]:
    """The groups that the shipped factors were fitted to."""
    text = (files("nereus.report.accuracy") / "fitted_groups.json").read_text()
    return frozenset((source, model, device) for source, model, device in json.loads(text))


def predicted(point: Point, factors: Mapping[str, float]) -> float:
    """The sum of coefficient x term; memory has no coefficients."""
    if point.kind == "memory":
        return sum(point.terms.values())
    kind = kind_of(point)
    return sum(
        coefficient(term, point.device, point.precision, kind, factors) * seconds
        for term, seconds in point.terms.items()
    )


def score(points: Sequence[Point], fitted: frozenset[Group]) -> list[Scored]:
    """Every point with its errors."""
    by_group: dict[tuple[Kind, Group], list[Point]] = defaultdict(list)
    for point in points:
        by_group[point.kind, point.group].append(point)
    fitter = Fitter(points=[point for point in points if point.kind not in ("memory", "tpot", "prefill")])
    scored: list[Scored] = []
    for (kind, group), rows in by_group.items():
        factors = _cold_factors(kind, group, by_group, fitted, fitter)
        warm = warm_shares(rows, factors) if factors is not None and kind != "memory" else [None] * len(rows)
        for point, share in zip(rows, warm, strict=True):
            scored.append(
                Scored(
                    point=point,
                    shipped_share=predicted(point, FACTORS) / point.measured - 1,
                    cold_share=None if factors is None else predicted(point, factors) / point.measured - 1,
                    warm_share=share,
                )
            )
    return scored


def _cold_factors(
    kind: Kind,
    group: Group,
    by_group: Mapping[tuple[Kind, Group], object],
    fitted: frozenset[Group],
    fitter: Fitter,
) -> Mapping[str, float] | None:
    if group not in fitted or kind == "memory":
        return FACTORS
    others = sum(each == kind for each, _ in by_group) - 1
    return fitter.factors(without=group) if others >= LEAST_GROUPS or kind == "tpot" else None


def warm_shares(rows: Sequence[Point], factors: Mapping[str, float]) -> list[float | None]:
    """Each row's mean absolute error over the calibrations on one other row of its group; None for a single row."""
    if len(rows) < 2:
        return [None] * len(rows)
    terms = sorted({term for row in rows for term in row.terms})
    priors = {
        precision: prior_for(terms, rows[0].device, precision, kind_of(rows[0]), factors)
        for precision in {row.precision for row in rows}
    }
    design = np.array(
        [
            [priors[row.precision].means[term] * row.terms.get(term, 0.0) / row.measured for term in terms]
            for row in rows
        ]
    )
    table = np.full((len(rows), len(rows)), np.nan)
    for i, seen in enumerate(rows):
        state = observe(start(priors[seen.precision]), seen.terms, seen.measured)
        table[i] = np.abs(design @ np.array(state.mean_shares) - 1)
        table[i, i] = np.nan
    return [float(value) for value in np.nanmean(table, axis=0)]


def spread(shares: Iterable[float]) -> Spread | None:
    """Statistics of signed errors; None of none."""
    values = np.array(list(shares))
    if not len(values):
        return None
    sizes = np.abs(values)
    return Spread(
        count=len(values),
        median_share=float(np.median(sizes)),
        mean_share=float(np.mean(sizes)),
        p90_share=float(np.quantile(sizes, 0.9)),
        worst_share=float(np.max(sizes)),
        bias_share=float(np.median(values)),
    )


def choices(scored: Sequence[Scored]) -> list[Choice]:
    """Workloads of one source, model and device under at least four layouts."""
    groups: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for each in scored:
        if each.point.kind == "train" and each.cold_share is not None:
            groups[(*each.point.group, each.point.workload)].append(each)
    found: list[Choice] = []
    for name, rows in groups.items():
        if len({row.point.layout for row in rows}) < LEAST_LAYOUTS:
            continue
        measured = np.array([row.point.measured for row in rows])
        expected = np.array([row.point.measured * (1 + (row.cold_share or 0.0)) for row in rows])
        found.append(
            Choice(
                name=f"{name[1]} on {name[2]}, {name[0]}",
                layout_count=len(rows),
                regret_ratio=float(measured[np.argmin(expected)] / measured.min()),
                rank_ratio=float(np.corrcoef(_ranks(measured), _ranks(expected))[0, 1]),
            )
        )
    return found


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable")


def growths(scored: Sequence[Scored]) -> list[Growth]:
    """Series of at least four sequence lengths."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for each in scored:
        if each.point.kind == "train" and each.cold_share is not None:
            groups[each.point.series].append(each)
    found: list[Growth] = []
    for name, rows in groups.items():
        if len({row.point.growth_tokens for row in rows}) < LEAST_LAYOUTS:
            continue
        ordered = sorted(rows, key=lambda row: row.point.growth_tokens)
        measured = np.array([row.point.measured / row.point.tokens for row in ordered])
        expected = measured * np.array([1 + (row.cold_share or 0.0) for row in ordered])
        rising = np.diff(measured) > 0
        found.append(
            Growth(
                name=name,
                count=len(rows),
                worst_share=max(abs(row.cold_share or 0.0) for row in rows),
                monotone=bool(np.all(np.diff(expected)[rising] > 0)),
            )
        )
    return found


def too_low_share(scored: Sequence[Scored]) -> float | None:
    """The share of memory rows whose prediction with the margin is more than 2 % too low; None without rows."""
    rows = [each for each in scored if each.point.kind == "memory"]
    low = [each for each in rows if (1 + each.shipped_share) * (1 + MARGIN) < 0.98]
    return len(low) / len(rows) if rows else None
