"""`nereus accuracy --points DIR [--fit] [--json]`: errors of the cost and memory models on tables of public measurements."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nereus.errors import ConfigError

if TYPE_CHECKING:  # numpy and scipy are not loaded for --help
    from nereus.report.accuracy.points import Point, Skipped

DONE = 0
TARGET_DEVICES = ("a100", "a100-40", "h100")
RATES = (
    "as shipped, fitted to the tables of aiconfigurator-core 0.12 (nereus.costs.rates); installed tables are not read"
)
SIZES = ((3e9, "below 3B"), (15e9, "3B to 15B"), (80e9, "15B to 80B"), (float("inf"), "above 80B"))


def add_accuracy(parser: ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument(
        "--points", required=True, metavar="DIR", help="a folder with train_points.csv, decode_points.csv, ..."
    )
    parser.add_argument("--fit", action="store_true", help="fit the factors to these tables and print held-out errors")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def accuracy(arguments: Namespace) -> int:
    """Prints the errors; exit code 0 whatever they are. Raises ConfigError for a folder without tables."""
    from nereus.report.accuracy.errors import fitted_groups, load_points, score  # scipy takes half a second

    folder = Path(arguments.points)
    if not folder.is_dir():
        raise ConfigError("--points", arguments.points, "expected a folder of point tables (*_points.csv)")
    points, skipped = load_points(folder)
    if not points:
        raise ConfigError("--points", arguments.points, "no usable row; expected tables such as train_points.csv")
    scored = score(points, fitted_groups())
    summary = _summary(scored, points, skipped)
    if arguments.fit:
        summary["fit"] = _fit(points)
    print(json.dumps(summary, indent=1) if arguments.json else _text(summary), end="\n" if arguments.json else "")
    return DONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A bound of the project: which rows, which statistic of them, at most how much (a share, or a ratio).

    `missing` is the verdict where there is no such statistic.
    """

    name: str
    value_share: float | None
    bound_share: float
    missing: str = "no rows"

    @property
    def verdict(self) -> str:
        """Met, missed, or why there is no value."""
        if self.value_share is None:
            return self.missing
        return "met" if self.value_share <= self.bound_share else f"missed by {self.value_share - self.bound_share:.3f}"


def _summary(scored: Sequence, points: Sequence[Point], skipped: Sequence[Skipped]) -> dict:
    from nereus.costs.coefficients import FACTORS, FORMS_TRIED
    from nereus.report.accuracy.errors import choices, growths

    picked, series = choices(scored), growths(scored)
    tables = {
        "kind": _table(scored, lambda p: p.kind),
        "kind, precision and experts": _table(scored, _flavour),
        "source": _table(scored, lambda p: f"{p.kind}: {p.source}"),
        "device": _table(scored, lambda p: f"{p.kind}: {p.device}"),
        "group": _table(scored, lambda p: f"{p.kind}: {' | '.join(p.group)}"),
        "model size": _table(scored, lambda p: f"{p.kind}: {_size(p)}"),
    }
    rules = Counter((row.kind, row.rule) for row in skipped)
    return {
        "rates": RATES,
        "usable_rows": len(points),
        "skipped_rows": len(skipped),
        "fitted_factors": len(FACTORS),
        "forms_tried": FORMS_TRIED,
        "targets": [
            {"name": t.name, "value": t.value_share, "bound": t.bound_share, "verdict": t.verdict}
            for t in _targets(scored, picked, series)
        ],
        "errors": tables,
        "choices": [asdict(each) for each in picked],
        "growth": [asdict(each) for each in series],
        "skipped": [{"kind": kind, "rule": rule, "rows": count} for (kind, rule), count in rules.most_common()],
    }


def _flavour(point: Point) -> str:
    return f"{point.kind}: {'dense' if point.dense else 'experts'} {point.precision}"


def _size(point: Point) -> str:
    return next(name for bound, name in SIZES if point.parameters_count < bound)


def _table(scored: Sequence, key: Callable[[Point], str]) -> list[dict]:
    from nereus.report.accuracy.errors import spread

    rows: list[dict] = []
    for name in dict.fromkeys(key(each.point) for each in scored):
        among = [each for each in scored if key(each.point) == name]
        cold = spread(each.cold_share for each in among if each.cold_share is not None)
        warm = spread(each.warm_share for each in among if each.warm_share is not None)
        shipped = spread(each.shipped_share for each in among)
        rows.append(
            {
                "name": name,
                "rows": len(among),
                "groups": len({each.point.group for each in among}),
                "cold": None if cold is None else asdict(cold),
                "warm": None if warm is None else asdict(warm),
                "shipped": None if shipped is None else asdict(shipped),
            }
        )
    return rows


def _targets(scored: Sequence, picked: Sequence, series: Sequence) -> list[Target]:
    """The bounds of issue 6, over the rows that each is about."""
    from nereus.report.accuracy.errors import spread, too_low_share

    def of(kind: str, attribute: str, figure: str) -> float | None:
        taken = [each for each in scored if each.point.kind == kind and (kind != "train" or _in_target(each.point))]
        found = spread(share for each in taken if (share := getattr(each, attribute)) is not None)
        return None if found is None else getattr(found, figure)

    bounds = (
        ("cold training, dense bf16, A100/H100: median", of("train", "cold_share", "median_share"), 0.12),
        ("cold training, dense bf16, A100/H100: p90", of("train", "cold_share", "p90_share"), 0.28),
        ("cold decode, time per token: median", of("decode", "cold_share", "median_share"), 0.12),
        ("cold decode, TPOT alone: median", of("tpot", "cold_share", "median_share"), 0.12),
        ("cold RL step: median", of("rl", "cold_share", "median_share"), 0.20),
        ("memory: mean", of("memory", "shipped_share", "mean_share"), 0.04),
        ("memory with margin: rows more than 2 % too low", too_low_share(scored), 0.05),
        ("warm training, dense bf16, A100/H100: median", of("train", "warm_share", "median_share"), 0.06),
        ("warm decode: median", of("decode", "warm_share", "median_share"), 0.07),
        ("warm RL step: median", of("rl", "warm_share", "median_share"), 0.10),
        *_choice_bounds(picked),
    )
    return [
        *(Target(name=name, value_share=value, bound_share=bound) for name, value, bound in bounds),
        _growth(series),
    ]


def _in_target(point: Point) -> bool:
    return point.dense and point.precision == "bf16" and point.device in TARGET_DEVICES


def _choice_bounds(picked: Sequence) -> tuple[tuple[str, float | None, float], ...]:
    regrets = [each.regret_ratio for each in picked]
    mean = sum(regrets) / len(regrets) if regrets else None
    return (
        ("choice of layout, time over best: mean", mean, 1.04),
        ("choice of layout, time over best: worst", max(regrets, default=None), 1.15),
    )


def _growth(series: Sequence) -> Target:
    """The worst error along NeMo's series; none, and missed, when a prediction does not rise where the series does."""
    longest = [each for each in series if "long-sequence" in each.name]
    name, missing = "sequence growth (NeMo, 4k to 1M tokens): worst", "no rows"
    worst = max((each.worst_share for each in longest), default=None)
    if not all(each.monotone for each in longest):
        worst, missing = None, "missed: the prediction does not rise with the sequence"
    return Target(name=name, value_share=worst, bound_share=0.15, missing=missing)


def _fit(points: Sequence[Point]) -> dict:
    """The factors fitted to these points, and held-out errors by group and by whole source."""
    from nereus.report.accuracy.errors import predicted, spread
    from nereus.report.accuracy.refit import STAGES, Fitter, fit_without_source

    fitter = Fitter(points=[p for p in points if p.kind not in ("memory", "tpot", "prefill")])
    factors = fitter.factors()
    held: list[dict] = []
    for stage in STAGES:
        taken = [point for point in fitter.points if stage.takes(point)]
        if not taken:
            continue
        by_group = spread(predicted(p, fitter.factors(without=p.group)) / p.measured - 1 for p in taken)
        by_source = spread(predicted(p, fit_without_source(fitter, p.source)) / p.measured - 1 for p in taken)
        inside = spread(predicted(p, factors) / p.measured - 1 for p in taken)
        held.append(
            {
                "stage": stage.name,
                "seen": asdict(inside) if inside else None,
                "without_group": asdict(by_group) if by_group else None,
                "without_source": asdict(by_source) if by_source else None,
            }
        )
    groups = sorted({point.group for point in fitter.points})
    return {"factors": {name: round(value, 3) for name, value in factors.items()}, "held_out": held, "groups": groups}


def _text(summary: dict) -> str:
    rows = f"{summary['usable_rows']} rows predicted, {summary['skipped_rows']} skipped"
    forms = ", ".join(f"{name} {count}" for name, count in summary["forms_tried"].items())
    lines = [
        f"{rows}; {summary['fitted_factors']} fitted factors; forms tried: {forms}",
        f"device rates: {summary['rates']}",
        "",
        "targets",
        *(_target_line(each) for each in summary["targets"]),
    ]
    for name, rows in summary["errors"].items():
        lines += [
            "",
            f"errors by {name}: rows, groups; cold median, mean, p90, worst, bias; warm median; as shipped median",
        ]
        lines += [_error_line(row) for row in rows]
    lines += ["", "choice of layout: layouts, time over best, rank correlation"]
    lines += [
        f"  {c['name']:<72} {c['layout_count']:>4} {c['regret_ratio']:7.3f} {c['rank_ratio']:6.2f}"
        for c in summary["choices"]
    ]
    lines += ["", "growing sequences: rows, worst cold error, monotone"]
    lines += [
        f"  {g['name']:<72} {g['count']:>4} {g['worst_share']:7.1%} {'yes' if g['monotone'] else 'no':>4}"
        for g in summary["growth"]
    ]
    lines += ["", "skipped, by rule"]
    lines += [f"  {row['rows']:>4} {row['kind']:<7} {row['rule']}" for row in summary["skipped"]]
    if "fit" in summary:
        lines += ["", *_fit_lines(summary["fit"])]
    return "\n".join(lines) + "\n"


def _target_line(target: dict) -> str:
    value = "-" if target["value"] is None else f"{target['value']:.3f}"
    return f"  {target['name']:<56} {value:>7} (at most {target['bound']:.2f})  {target['verdict']}"


def _error_line(row: dict) -> str:
    head = f"  {row['name'][:66]:<66} {row['rows']:>4} {row['groups']:>3} "
    cold, warm = row["cold"], row["warm"]
    figures = "      -" * 5
    if cold is not None:
        names = ("median_share", "mean_share", "p90_share", "worst_share", "bias_share")
        figures = "".join(f"{cold[name]:7.1%}" for name in names)
    return f"{head}{figures} {_percent(warm)} {_percent(row['shipped'])}"


def _percent(statistics: dict | None) -> str:
    return "      -" if statistics is None else f"{statistics['median_share']:7.1%}"


def _fit_lines(fit: dict) -> Iterable[str]:
    from nereus.costs.coefficients import FACTORS

    yield "fitted to these tables: median and p90 of errors with all rows seen, without the group, without the source"
    for stage in fit["held_out"]:
        parts = (stage[name] for name in ("seen", "without_group", "without_source"))
        figures = "  ".join(f"{part['median_share']:6.1%} {part['p90_share']:6.1%}" for part in parts if part)
        yield f"  {stage['stage']:<26} {figures}"
    yield ""
    yield "factors (shipped in nereus.costs.coefficients; here fitted anew)"
    for name, value in fit["factors"].items():
        shipped = FACTORS.get(name)
        yield f"  {name:<20} {value:8.3f}   shipped {'-' if shipped is None else f'{shipped:.3f}'}"
