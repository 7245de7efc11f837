# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # What deciding costs against the size of the fleet, measured
#
# `python -m benchmarks.overhead` times, on one core and in processes of their own: the controller handling an event, the
# planner's search, a transition graph from placement to price, and the simulated world itself. These are wall seconds of
# this project's own code on the machine that the table names; no GPU is involved in any of it.

# %%
from __future__ import annotations

from pathlib import Path

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nereus.report.figure import draw
from nereus.report.table import measured_or_sample

NAME = "overhead"
HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
LINES = {
    ("event", "median_seconds"): "an event, median",
    ("event", "p99_seconds"): "an event, 99 %",
    ("search", "cold_seconds"): "a search, nothing known",
    ("search", "beliefs_seconds"): "a search, warm, other beliefs",
    ("search", "node_seconds"): "a search after a node has left",
    ("price", "seconds"): "a transition graph, to its price",
}
STEP_SECONDS = (10.0, 60.0)
"""What a step of an 8B PPO job takes on such fleets, in the simulated world."""

# %% [markdown]
# ## The numbers

# %%
TABLE, SOURCE = measured_or_sample(HERE.parent / "runs" / NAME / "table.parquet", HERE / "data" / f"{NAME}.parquet")


def series(part: str, metric: str) -> tuple[list[int], list[float]]:
    """GPUs, and a number at each size."""
    rows = TABLE.filter((pl.col("run_id") == f"{NAME}-{part}") & (pl.col("metric") == metric))
    found = sorted((int(variant.split()[0]), value) for variant, value in rows.select("variant", "value").iter_rows())
    return [gpus for gpus, _ in found], [value for _, value in found]


kind = "SAMPLE DATA, not to be quoted; " if SOURCE.sample else ""
machine = next(iter(SOURCE.runs.values())).machine
print(f"{NAME}: {kind}measured: {SOURCE.command}; {machine}")
sizes = series("event", "median_seconds")[0]
print(f"{'milliseconds at':<34} " + " ".join(f"{f'{gpus:,} GPUs':>14}" for gpus in sizes))
for (part, metric), label in LINES.items():
    print(f"{label:<34} " + " ".join(f"{1e3 * value:14.2f}" for value in series(part, metric)[1]))
operations = series("price", "operations_count")[1]
print(f"{'operations of that graph':<34} " + " ".join(f"{value:14,.0f}" for value in operations))
print("the simulator under nereus (experiments/scale.py), one core:")
walls, peaks = series("simulate", "wall_seconds")[1], series("simulate", "memory_bytes")[1]
steps, changes = series("simulate", "steps_count")[1], series("simulate", "changes_count")[1]
for gpus, wall, peak, step, change in zip(
    series("simulate", "wall_seconds")[0], walls, peaks, steps, changes, strict=True
):
    print(f"  up to {gpus:>6,} GPUs: {step:.0f} steps, {change:.0f} changes: {wall:.1f} s, {peak / 2**30:.2f} GiB")

# %% [markdown]
# ## The figure


# %%
def lines(axes: Axes) -> None:
    """Seconds against GPUs."""
    for (part, metric), label in LINES.items():
        axes.plot(*series(part, metric), "o-", markersize=3, label=label)
    axes.axhspan(*STEP_SECONDS, color="0.92", zorder=0)
    axes.text(sizes[0], STEP_SECONDS[0] * 1.1, "a step of such a job (simulated)", fontsize=7, color="0.4")
    axes.set(
        xscale="log", yscale="log", xlabel="GPUs", ylabel="wall seconds", title="Deciding, MEASURED on one CPU core"
    )
    axes.set_xticks(sizes, [f"{gpus:,}" for gpus in sizes])
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def drawn() -> Figure:
    """The figure."""
    figure = Figure(figsize=(7.5, 3.8), layout="constrained")
    lines(figure.subplots())
    return figure


print(draw(drawn, HERE / "figures", NAME, sample=SOURCE.sample))
