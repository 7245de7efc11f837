"""The figure of compared runs: the mean step by phase as stacked bars, and the rewards with the changes marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nereus.report.compare import OTHER, PHASE_ORDER, ComparedRun, pauses, phase_seconds, rewards
from nereus.report.figure import save, style

NAME = "compare"
PHASE_COLOURS: dict[str, str] = dict(
    zip(PHASE_ORDER, ("C0", "C5", "C1", "C2", "C9", "C7", "C4", "C3", "C8"), strict=True)
)
UNKNOWN_COLOUR, OTHER_COLOUR, PAUSE_COLOUR = "C6", "0.8", "0.25"
LINES = ("-", "--", ":", "-.")
LEAST_SHARE = 0.01  # a phase that takes less of the longest step is drawn as part of `other`


def draw(runs: Sequence[ComparedRun], folder: Path) -> Path:
    """Draws compare.png in `folder`, which is made where it is not there; equal runs give equal bytes."""
    with style():
        figure = Figure(figsize=(9.5, 1.8 + max(2.2, 0.45 * len(runs))), layout="constrained")
        bars, curves = figure.subplots(1, 2)
        _draw_phases(bars, runs)
        _draw_rewards(curves, runs)
        (path,) = save(figure, folder, NAME, kinds=("png",))
    return path


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
    axes.set_yticks(places, [run.name for run in runs])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_title("Mean step by phase")
    axes.set_xlabel("seconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, fontsize=8)


def _part_seconds(name: str, run: ComparedRun, by_name: dict[str, float], shown: Sequence[str]) -> float:
    if name == OTHER:
        return sum(seconds for phase, seconds in by_name.items() if phase not in shown)
    if name in shown:
        return by_name.get(name, 0.0)
    return sum(pauses(run).values()) / len(run.rows)


def _draw_rewards(axes: Axes, runs: Sequence[ComparedRun]) -> None:
    """One curve a run; a triangle stands at the first step in another layout."""
    marked = False
    for index, run in enumerate(runs):
        known = rewards(run)
        colour = f"C{index}"
        axes.plot(
            list(known), list(known.values()), LINES[index % len(LINES)], color=colour, label=run.name,
            linewidth=max(1.2, 3.0 - 0.8 * index), marker="o", markersize=2.5,
        )  # fmt: skip
        at = [step for step in pauses(run) if not math.isnan(known.get(step, math.nan))]
        marked = marked or bool(at)
        axes.plot(at, [known[step] for step in at], "^", color=colour, markersize=8, markeredgecolor="black")
    if marked:
        axes.plot([], [], "^", color="white", markersize=8, markeredgecolor="black", label="layout changed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Mean reward")
    axes.set_xlabel("step")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, fontsize=8)
