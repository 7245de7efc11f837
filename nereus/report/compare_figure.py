"""The figure of compared runs: phases, tokens/s, seconds of steps, pauses for changes, reward by steps and by time.

Every series says whether it was measured or simulated; simulated bars are hatched, simulated curves thin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nereus.report.compare import (
    OTHER,
    PHASE_ORDER,
    pauses,
    phase_seconds,
    rewards,
    step_ends,
    tokens_half_width,
    tokens_per_second,
)
from nereus.report.compared_run import ComparedRun
from nereus.report.figure import save, style
from nereus.report.summary import STEP_SECONDS
from nereus.runtime.metrics import STEP

NAME = "compare"
PHASE_COLOURS: dict[str, str] = dict(
    zip(PHASE_ORDER, ("C0", "C5", "C1", "C2", "C9", "C7", "tab:olive", "C4", "C3", "tab:cyan", "C8"), strict=True)
)
UNKNOWN_COLOUR, OTHER_COLOUR, PAUSE_COLOUR = "C6", "0.8", "0.25"
LINES = ("-", "--", ":", "-.")
LABEL_WIDTH = 24  # of a run's name beside its bar, in characters
LEAST_SHARE = 0.01  # a phase that takes less of the longest step is drawn as part of `other`


def draw(runs: Sequence[ComparedRun], folder: Path) -> Path:
    """Draws compare.png in `folder`, which is made where it is not there; equal runs give equal bytes."""
    with style():
        bars_inches = max(2.4, 0.5 * len(runs))
        legend_inches = 0.25 * (len(runs) + 1) // 2
        figure = Figure(figsize=(11.0, 2.6 + bars_inches + 2 * 2.6 + legend_inches), layout="constrained")
        axes = figure.subplots(3, 2, height_ratios=[bars_inches, 2.6, 2.6])
        _draw_phases(axes[0, 0], runs)
        _draw_throughput(axes[0, 1], runs)
        _draw_seconds(axes[1, 0], runs)
        _draw_pauses(axes[1, 1], runs)
        _draw_rewards(axes[2, 0], runs, "step")
        _draw_rewards(axes[2, 1], runs, "minutes")
        series = axes[1, 0].get_legend_handles_labels()
        figure.legend(*series, loc="outside lower center", ncols=2, fontsize=8)
        (path,) = save(figure, folder, NAME, kinds=("png",))
    return path


def label(run: ComparedRun) -> str:
    """The name of a series: the run's, and its mark."""
    return f"{run.name} ({run.mark})"


def _draw_phases(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    """One bar a run: the phases of its mean step, then the pauses for changes as spread over its steps."""
    phases = [phase_seconds(run) for run in runs]
    longest_seconds = max(sum(by_name.values()) for by_name in phases)
    shown = [
        name
        for name in dict.fromkeys(name for by_name in phases for name in by_name)
        if name != OTHER and max(by_name.get(name, 0.0) for by_name in phases) >= LEAST_SHARE * longest_seconds
    ]
    parts = [(name, PHASE_COLOURS.get(name, UNKNOWN_COLOUR), "") for name in shown]
    parts += [(OTHER, OTHER_COLOUR, ""), ("pause for changes", PAUSE_COLOUR, "")]
    places, left = range(len(runs)), [0.0] * len(runs)
    for name, colour, hatch in parts:
        seconds = [_part_seconds(name, run, by_name, shown) for run, by_name in zip(runs, phases, strict=True)]
        if max(seconds) > 0.0:
            axes.barh(places, seconds, left=left, label=name, color=colour, hatch=hatch, height=0.6)
        left = [start + more for start, more in zip(left, seconds, strict=True)]
    for place, (run, whole) in enumerate(zip(runs, left, strict=True)):
        if run.simulated and whole > 0.0:
            axes.barh([place], [whole], color="none", edgecolor="white", hatch="//", height=0.6)
    _rows(axes, runs)
    axes.set_title("Mean step by phase (hatched: simulated)")
    axes.set_xlabel("seconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, fontsize=8)


def _part_seconds(name: str, run: ComparedRun, by_name: dict[str, float], shown: Sequence[str]) -> float:
    if name == OTHER:
        return sum(seconds for phase, seconds in by_name.items() if phase not in shown)
    if name in shown:
        return by_name.get(name, 0.0)
    return sum(pauses(run).values()) / len(run.rows)


def _rows(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    axes.set_yticks(range(len(runs)), ["\n".join(wrap(label(run), LABEL_WIDTH)) for run in runs], fontsize=8)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def _draw_throughput(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    """One bar a run with its 95 % confidence interval; the axis is logarithmic where runs are more than ten apart."""
    rates = [tokens_per_second(run) for run in runs]
    known = [rate for rate in rates if math.isfinite(rate)]
    for place, (run, rate) in enumerate(zip(runs, rates, strict=True)):
        half_width = tokens_half_width(run)
        if math.isfinite(rate):
            sure = half_width if math.isfinite(half_width) else None
            hatch = "//" if run.simulated else ""
            axes.barh(
                [place], [rate], xerr=sure, color=f"C{place}", edgecolor="white", hatch=hatch, height=0.6, capsize=3
            )
    if known and max(known) > 10 * min(known):
        axes.set_xscale("log")
    _rows(axes, runs)
    axes.set_yticklabels([])  # those of the bars to the left
    axes.set_title("Throughput, 95 % confidence (hatched: simulated)")
    axes.set_xlabel("tokens/s")


def _draw_seconds(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    """The seconds of every step; a triangle stands at the first step in another layout."""
    shortest, longest = math.inf, 0.0
    for index, run in enumerate(runs):
        known = {
            int(row[STEP]): row[STEP_SECONDS] for row in run.rows if math.isfinite(row.get(STEP_SECONDS, math.nan))
        }
        _curve(axes, run, index, {step: float(step) for step in known}, known, pauses(run))
        shortest, longest = min(shortest, *known.values(), math.inf), max(longest, *known.values(), 0.0)
    if longest > 10 * shortest > 0:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Seconds a step (triangle: first in another layout)")
    axes.set_xlabel("step")


def _draw_pauses(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    """One bar a change: how long the job stood still before that step."""
    bars = [(index, step, seconds) for index, run in enumerate(runs) for step, seconds in pauses(run).items()]
    for place, (index, _, seconds) in enumerate(bars):
        axes.bar([place], [seconds], color=f"C{index}", width=0.6)
    axes.set_xticks(range(len(bars)), [f"step {step}" for _, step, _ in bars], fontsize=7)
    axes.grid(visible=False, axis="x")
    axes.set_title("Pauses of transitions" if bars else "Pauses of transitions: none")
    axes.set_ylabel("pause, seconds")


def _draw_rewards(axes: Axes, runs: Sequence[ComparedRun], against: str) -> None:
    """One curve a run, against its steps or against minutes since its first step began, pauses included."""
    for index, run in enumerate(runs):
        known = rewards(run)
        ends = step_ends(run)
        if against == "step":
            _curve(axes, run, index, {step: float(step) for step in known}, known, pauses(run))
        elif ends:
            _curve(axes, run, index, {step: ends[step] / 60 for step in known}, known, pauses(run))
    if against == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Mean reward by steps" if against == "step" else "Mean reward by time")
    axes.set_xlabel(against)


def _curve(
    axes: Axes,
    run: ComparedRun,
    index: int,
    across: Mapping[int, float],
    values: Mapping[int, float],
    marked: Mapping[int, float],
) -> None:
    """`values` by step at the places `across`, with triangles at the steps of `marked`."""
    colour, steps = f"C{index}", list(values)
    axes.plot(
        [across[step] for step in steps], [values[step] for step in steps], LINES[index % len(LINES)], color=colour,
        label=label(run), linewidth=1.0 if run.simulated else 1.8, marker="o", markersize=2.5,
    )  # fmt: skip
    at = [step for step in marked if step in values]
    axes.plot(
        [across[step] for step in at],
        [values[step] for step in at],
        "^",
        color=colour,
        markersize=8,
        markeredgecolor="black",
    )
