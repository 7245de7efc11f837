# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # When adapting pays: the gain over dp-scaling as one thing at a time is made stronger or weaker, simulated
#
# `nereus experiment run sensitivity` runs nereus and dp-scaling (a usual recipe whose replicas follow the fleet) in one scene:
# 8B PPO on a trace of 64 H100 whose responses grow. The gain is by how much less a step takes on average, everything counted:
# transitions, restarts, lost steps. Both seeds are shown. The truth is varied, the controller's prior is not.
#
# The paper's abstract says 27.7 % less step latency than DP scaling; its traces and recipe were not seen.

# %%
from __future__ import annotations

from pathlib import Path

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nereus.report.figure import draw
from nereus.report.table import measured_or_sample

NAME = "sensitivity"
HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
PAPER_GAIN = 0.277
OURS, OTHER, SETTLED = "nereus", "dp-scaling", "settled-plan"
PANELS = {
    "noise": "noise of the truth, times",
    "link": "links, times what is believed",
    "pace": "time between fleet changes, times",
    "steps": "steps of the job",
}

# %% [markdown]
# ## The numbers

# %%
TABLE, SOURCE = measured_or_sample(HERE.parent / "runs" / NAME / "table.parquet", HERE / "data" / f"{NAME}.parquet")
WHOLE = round(max(TABLE.filter(pl.col("metric") == "run/steps_count")["value"].to_list()))


def latencies() -> dict[tuple[str, str, int], float]:
    """(scene, policy, seed) -> seconds of the whole run for each step; without runs that did not end."""
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    rows = TABLE.filter(pl.col("step").is_null()).select("variant", "seed", "metric", "value")
    for variant, seed, metric, value in rows.iter_rows():
        scene, number, policy = variant.split("-", 2)
        found.setdefault((f"{scene}-{number}", policy, seed), {})[metric] = value
    return {key: run["run/seconds"] / run["run/steps_count"] for key, run in found.items() if ended(key[0], run)}


def ended(scene: str, run: dict[str, float]) -> bool:
    """Whether a run did all its steps: one whose plans overflow again and again, or whose fleet never comes back, does not."""
    name, number = scene.split("-")
    return run["run/steps_count"] == (float(number) if name == "steps" else WHOLE)


LATENCY = latencies()
SEEDS = sorted(set(TABLE["seed"]))
SCENES = list(dict.fromkeys(variant.rsplit("-", 1)[0] for variant in TABLE["variant"] if variant.endswith(f"-{OURS}")))
RUNS = {(variant, seed) for variant, seed in TABLE.select("variant", "seed").unique().iter_rows()}
LOST = sorted(f"{v}, seed {s}" for v, s in RUNS if ("-".join(v.split("-")[:2]), v.split("-", 2)[2], s) not in LATENCY)


def gains(scene: str, other: str = OTHER) -> list[float]:
    """By how much less nereus takes a step, seed by seed."""
    pairs = [(LATENCY.get((scene, OURS, seed)), LATENCY.get((scene, other, seed))) for seed in SEEDS]
    return [1 - ours / theirs for ours, theirs in pairs if ours is not None and theirs is not None]


def average(found: list[float]) -> float:
    """The mean; NaN where no seed of both policies ended."""
    return sum(found) / len(found) if found else float("nan")


def points(name: str) -> list[tuple[float, list[float]]]:
    """What was varied, ascending, with the gains; the scene itself among them."""
    itself = (float(WHOLE) if name == "steps" else 1.0, gains("same-1"))
    varied = [(float(s.partition("-")[2]), gains(s)) for s in SCENES if s.partition("-")[0] == name]
    return sorted([itself, *varied])


kind = "SAMPLE DATA, not to be quoted; " if SOURCE.sample else ""
print(f"{NAME}: {kind}simulated, {len(SOURCE.runs)} runs: {SOURCE.command}")
print(f"gain of nereus over dp-scaling, mean of {len(SEEDS)} seeds (least to most); paper, abstract: {PAPER_GAIN:.1%}")
VARIED = {name: label for name, label in PANELS.items() if sum(bool(found) for _, found in points(name)) > 1}
for name, label in VARIED.items():
    print(label)
    for value, found in points(name):
        mean = average(found)
        spread = f"({min(found):+.1%} to {max(found):+.1%})" if found else ""
        print(f"  {value:>7g}  {mean:+7.1%}  {spread}")
for other, words in (
    (OTHER, "dp-scaling, which keeps the recipe's plan"),
    (SETTLED, "the plan on which searches settle"),
):
    if gains("steady-1", other):
        print(f"steady fleet, lengths that stay: {average(gains('steady-1', other)):+.1%} beside {words}")
print("runs that did not do all their steps, and count nowhere:", "; ".join(LOST) or "none")

# %% [markdown]
# ## Where adapting does not pay
#
# A gain at or below 0 is such a place; so is a job that ends before the change has been repaid.

# %%
WITHOUT = [(scene, min(found)) for scene in SCENES if (found := gains(scene)) and min(found) <= 0.01]
print(
    "scenes in which a seed gains 1 % or less:",
    ", ".join(f"{scene} ({gain:+.1%})" for scene, gain in WITHOUT) or "none",
)

# %% [markdown]
# ## The figure


# %%
def panel(axes: Axes, name: str) -> None:
    """One thing varied."""
    found = points(name)
    at = [value or 0.125 * min(v for v, _ in found if v) for value, _ in found]
    axes.plot(at, [100 * average(each) for _, each in found], "-", color="tab:blue")
    for place, (_, each) in zip(at, found, strict=True):
        axes.plot([place] * len(each), [100 * gain for gain in each], ".", color="tab:blue")
    axes.axhline(0.0, color="0.3", linewidth=1)
    axes.axhline(100 * PAPER_GAIN, color="0.5", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_xticks(at, [f"{value:g}" for value, _ in found], fontsize=7)
    axes.minorticks_off()
    axes.set_title(PANELS[name], fontsize=8)


def drawn() -> Figure:
    """The figure."""
    figure = Figure(figsize=(9.5, 2.9), layout="constrained")
    every = figure.subplots(1, len(VARIED), sharey=True, squeeze=False)[0]
    for axes, name in zip(every, VARIED, strict=True):
        panel(axes, name)
    every[0].set_ylabel("less seconds a step, %")
    figure.suptitle(
        "8B PPO on a trace of 64 H100, SIMULATED: gain of nereus over dp-scaling. Dashed: the paper's abstract, 27.7 %",
        fontsize=9,
    )
    return figure


print(draw(drawn, HERE / "figures", NAME, sample=SOURCE.sample))
