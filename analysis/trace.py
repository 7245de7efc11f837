# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Fleets whose nodes come and go: nereus beside dp-scaling, fixed, restart and the oracle, simulated
#
# `nereus experiment run trace` plays three public traces of nodes under two curves of response lengths, with three seeds each.
# Average step latency is all the time of a run over its steps: steps, changes, waiting, and steps done again after a loss. A
# reduction is 1 - nereus / baseline; intervals are of Student's t over seeds (each seed's mean over both curves).
# The oracle knows the future and pays for changes as the simulated world charges them; to the ceiling changes are free.
#
# What may not be concluded: no GPU ran anything here. The paper's 27.7 % below dp-scaling from a usual recipe is the only number known of
# it (from its abstract); its traces, cluster, lengths and settings are not.

# %%
from __future__ import annotations

import os
from math import inf, sqrt
from pathlib import Path

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import t as student

from nereus.report.figure import draw
from nereus.report.table import measured_or_sample

NAME = "trace"
HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
PAPER = 0.277
STEPS = 40
BASELINES = {
    "dp-scaling": "dp-scaling: DP divides, live, all else frozen",
    "dp-scaling-any": "  any DP",
    "dp-scaling-free": "  DP divides, micro-batch free",
    "dp-scaling-any-free": "  any DP, micro-batch free",
    "restart": "  DP divides, by restart",
    "fixed": "fixed",
    "best-dp-scaling": "from the best layout: DP divides",
    "best-dp-scaling-any-free": "  best layout, any DP, micro-batch free",
}
"""Configurations that nereus is compared with; those from the best layout with nereus from there."""
ABLATIONS = {
    "nereus-uncalibrated": "no calibration",
    "nereus-unpriced": "no price",
    "nereus-hasty": "no hysteresis",
    "nereus-storage": "weights through storage",
    "nereus-restart": "restart instead of live",
}
FREEDOMS = {
    "dp-scaling": "dp-scaling",
    "nereus-shares": "+ DP shares",
    "nereus-micro-batch": "+ micro-batch",
    "nereus-engines": "+ generation TP",
    "nereus": "+ trainer TP, PP",
}
COLOURS = ("tab:blue", "tab:cyan", "tab:orange")

# %% [markdown]
# ## The numbers

# %%
EXPERIMENT = os.environ.get("NEREUS_EXPERIMENT", NAME)  # trace_full has ten seeds
TABLE, SOURCE = measured_or_sample(
    HERE.parent / "runs" / EXPERIMENT / "table.parquet", HERE / "data" / f"{EXPERIMENT}.parquet"
)
Cell = tuple[str, str, str, int]  # configuration, place, curve, seed


def latencies() -> dict[Cell, float]:
    """Seconds of a whole run over its steps; infinite for a run that stands still."""
    whole = TABLE.filter(pl.col("step").is_null() & pl.col("metric").is_in(["run/steps_count", "run/seconds"]))
    rows = whole.pivot("metric", index=["variant", "seed"], values="value")
    found: dict[Cell, float] = {}
    for variant, seed, steps, seconds in rows.select("variant", "seed", "run/steps_count", "run/seconds").iter_rows():
        name, place, curve = variant.rsplit("-", 2)
        found[name, place, curve, seed] = seconds / steps if steps == STEPS else inf
    sums = (
        TABLE.filter(pl.col("metric").str.starts_with("hindsight/"))
        .group_by("variant", "seed", "metric")
        .agg(pl.col("value").sum())
    )
    for variant, seed, metric, seconds in sums.iter_rows():
        _, place, curve = variant.rsplit("-", 2)
        name = metric.removeprefix("hindsight/").removesuffix("_seconds")
        found[name, place, curve, seed] = seconds / STEPS
    return found


LATENCY = latencies()
PLACES = list(dict.fromkeys(place for _, place, _, _ in LATENCY))
CURVES = list(dict.fromkeys(curve for _, _, curve, _ in LATENCY))
SEEDS = sorted({seed for *_, seed in LATENCY})


def reductions(ours: str, other: str, place: str, curves: list[str]) -> list[float]:
    """By seed: the mean over curves of 1 - ours / other, of those in which the other goes on."""
    found: list[float] = []
    for seed in SEEDS:
        pairs = [(LATENCY.get((ours, place, c, seed), inf), LATENCY.get((other, place, c, seed), inf)) for c in curves]
        known = [1 - mine / theirs for mine, theirs in pairs if mine < inf and theirs < inf]
        if known:
            found.append(sum(known) / len(known))
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of the 95 % interval of the mean."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, inf
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean, float(student.ppf(0.975, len(values) - 1)) * deviation / sqrt(len(values))


def pair(baseline: str) -> tuple[str, str]:
    """Which nereus and which oracle a baseline is compared with: those that start as it does."""
    return ("best-nereus", "best_start") if baseline.startswith("best-") else ("nereus", "oracle")


def still(name: str, place: str) -> int:
    """In how many runs a configuration stands still."""
    return sum(value == inf for (n, p, *_), value in LATENCY.items() if (n, p) == (name, place))


def cell(baseline: str, place: str) -> str:
    """nereus' reduction with its interval, then the oracle's and the ceiling's."""
    ours, oracle = pair(baseline)
    found = reductions(ours, baseline, place, CURVES)
    if not found:
        return "stands still"
    mean, half = interval(found)
    known = [reductions(name, baseline, place, CURVES) for name in (oracle, "ceiling")]
    best, free = (f"{interval(each)[0]:5.1%}" if each else "    -" for each in known)
    stood = f", stands still in {still(baseline, place)}" if still(baseline, place) else ""
    return f"{mean:6.1%} ± {half:5.1%} ({best}, {free}){stood}"


kind = "SAMPLE DATA, not to be quoted; " if SOURCE.sample else ""
print(f"{EXPERIMENT}: {kind}simulated, {len(SOURCE.runs)} runs: {SOURCE.command}")
print(
    "reduction of average step latency by nereus, mean over seeds and curves ± 95 %; (by the oracle, by the ceiling; -: not run)"
)
for place in PLACES:
    print(f"\n{place}:")
    for baseline, label in BASELINES.items():
        print(f"  {label:<46} {cell(baseline, place)}")
headline = [interval(reductions("nereus", "dp-scaling", place, CURVES)) for place in PLACES]
print(
    f"\nagainst dp-scaling from a usual recipe: {', '.join(f'{mean:.1%} ± {half:.1%}' for mean, half in headline)}; "
    f"paper: {PAPER:.1%} (its traces and cluster are not known)"
)

# %% [markdown]
# ## Every scenario: seconds a step all in, how far from the oracle, and the worst one


# %%
def mean_latency(name: str, place: str, curve: str) -> float:
    """Over seeds."""
    return sum(LATENCY.get((name, place, curve, seed), inf) for seed in SEEDS) / len(SEEDS)


def worst() -> tuple[float, str]:
    """By how much nereus is behind a baseline at most in the mean over seeds of a scenario, and where."""
    found = [
        (
            mean_latency(pair(other)[0], place, curve) / mean_latency(other, place, curve) - 1,
            f"{other}, {place} {curve}",
        )
        for place in PLACES
        for curve in CURVES
        for other in BASELINES
        if mean_latency(other, place, curve) < inf
    ]
    return max(found)


print(f"{'scenario':<14} {'nereus':>8} {'oracle':>8} {'ceiling':>8} {'dp-scaling':>11} {'behind the oracle':>18}")
for place in PLACES:
    for curve in CURVES:
        ours, best, free, base = (
            mean_latency(name, place, curve) for name in ("nereus", "oracle", "ceiling", "dp-scaling")
        )
        behind = f"{(ours - best) / base:17.1%} of dp-scaling" if best < inf else f"{'not run':>18}"
        print(f"{place + ' ' + curve:<14} {ours:8.1f} {best:8.1f} {free:8.1f} {base:11.1f} {behind}")
excess, where = worst()
print(f"worst scenario: nereus takes {excess:+.1%} of the time of {where}")

# %% [markdown]
# ## Where the gain comes from, one freedom at a time, and what leaving a part out costs


# %%
def parts() -> list[tuple[str, str]]:
    """Scenarios in which freedoms and ablations ran."""
    return [(place, curve) for place in PLACES for curve in CURVES if mean_latency("nereus-shares", place, curve) < inf]


for place, curve in parts():
    base = mean_latency("dp-scaling", place, curve)
    steps = [f"{label} {mean_latency(name, place, curve) / base - 1:+.1%}" for name, label in FREEDOMS.items()]
    print(f"{place} {curve}, over dp-scaling: {'; '.join(steps[1:])}")
    ours = mean_latency("nereus", place, curve)
    lost = [f"{label} {mean_latency(name, place, curve) / ours - 1:+.1%}" for name, label in ABLATIONS.items()]
    print(f"{place} {curve}, over nereus: {'; '.join(lost)}")

# %% [markdown]
# ## The figure


# %%
def panel(axes: Axes) -> None:
    """A group of bars for each baseline; dashes are the oracle's."""
    for index, place in enumerate(PLACES):
        for at, baseline in enumerate(BASELINES):
            found = reductions(pair(baseline)[0], baseline, place, CURVES)
            if not found:
                continue
            mean, half = interval(found)
            spot = at + (index - 1) * 0.26
            label = place if not at else None
            axes.bar(spot, 100 * mean, 0.24, yerr=100 * half, color=COLOURS[index], label=label, error_kw={"lw": 0.8})
            if best := reductions(pair(baseline)[1], baseline, place, CURVES):
                height = 100 * interval(best)[0]
                axes.plot([spot - 0.12, spot + 0.12], [height] * 2, color="0.2", linewidth=1.5)
    axes.axhline(100 * PAPER, color="tab:red", linewidth=1, linestyle="--", label="paper, against dp-scaling: 27.7 %")
    axes.axhline(0, color="0.3", linewidth=0.8)
    names = [label.strip().replace(": ", ":\n").replace(", ", ",\n") for label in BASELINES.values()]
    axes.set_xticks(range(len(names)), names, fontsize=6)
    axes.set(ylabel="reduction of average step latency (%)", title="nereus; black dashes: the oracle")
    axes.legend(fontsize=7, ncols=2)


def ladder(axes: Axes) -> None:
    """Latency over dp-scaling's as freedoms are added."""
    for (place, curve), marker in zip(parts(), "osD^", strict=False):
        base = mean_latency("dp-scaling", place, curve)
        values = [100 * mean_latency(name, place, curve) / base for name in FREEDOMS]
        colour = COLOURS[PLACES.index(place)]
        axes.plot(range(len(FREEDOMS)), values, marker=marker, color=colour, label=f"{place} {curve}")
        best = 100 * mean_latency("oracle", place, curve) / base
        axes.axhline(best, color=colour, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(FREEDOMS)), list(FREEDOMS.values()), fontsize=6, rotation=20)
    axes.set(ylabel="average step latency (% of dp-scaling's)", title="One freedom at a time; dotted: the oracle")
    if parts():
        axes.legend(fontsize=7)


def drawn() -> Figure:
    """The figure."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.4, 1))
    panel(left)
    ladder(right)
    figure.suptitle("8B PPO on traces of nodes that come and go, SIMULATED; bars: mean ± 95 % over seeds", fontsize=9)
    return figure


print(draw(drawn, HERE / "figures", EXPERIMENT, sample=SOURCE.sample))
