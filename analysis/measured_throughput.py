# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Throughput by cluster, of runs
#
# How many tokens a second did each run make, on which cluster? The runs are what `nereus compare` takes: run folders, offline W&B
# runs, logs of verl and OpenRLHF. They are the arguments, or `NEREUS_RUNS` (separated as in PATH), or all run folders in `runs/`:
#
#     .venv/bin/python analysis/measured_throughput.py runs/quickstart verl.log
#
# A hatched bar is a run that was simulated. What may not be concluded: runs are put side by side by cluster alone; whether they
# did the same work (model, lengths, batch) is the reader's to know. Without runs the small sample in `analysis/data/` is drawn,
# and marked; `NEREUS_REQUIRE_MEASURED=1` refuses it.

# %%
from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nereus.report.cluster_table import HALF_WIDTH, RATE, SIMULATED, STEPS, runs_or_sample
from nereus.report.figure import mark_sample, save, style

NAME = "measured_throughput"
HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
GIVEN = sys.argv[1:] if "__file__" in globals() else []
GIVEN = GIVEN or [word for word in os.environ.get("NEREUS_RUNS", "").split(os.pathsep) if word]
COLOURS = {"nereus": "tab:blue", "verl": "tab:orange", "openrlhf": "tab:red"}
OTHER_COLOUR = "0.6"

# %% [markdown]
# ## The numbers

# %%
TABLE, SOURCE = runs_or_sample(list(map(Path, GIVEN)), HERE.parent / "runs", HERE / "data" / f"{NAME}.sample.parquet")
VALUES = {(run, metric): value for run, metric, value in TABLE.select("run_id", "metric", "value").iter_rows()}
SYSTEMS = dict(TABLE.select("run_id", "system").iter_rows())


def size(cluster: str) -> tuple[int, str]:
    """By count, then by kind; a cluster that is not told comes last."""
    found = re.match(r"\d+", cluster)
    return (int(found[0]) if found else sys.maxsize, cluster)


CLUSTERS = {
    cluster: TABLE.filter(pl.col("variant") == cluster)["run_id"].unique(maintain_order=True).to_list()
    for cluster in sorted(TABLE["variant"].unique(), key=size)
}


def mark(run: str) -> str:
    """Whether the run took place."""
    return "simulated" if VALUES[run, SIMULATED] else "measured"


note = "SAMPLE DATA, not to be quoted: " if SOURCE.sample else ""
print(f"{NAME}: {note}{len(SYSTEMS)} runs on {len(CLUSTERS)} clusters")
print(f"{'cluster':<28} {'run':<28} {'system':<10} {'':<10} {'steps':>5} {'tokens/s':>12} {'95 % ±':>10}")
for cluster, names in CLUSTERS.items():
    for run in names:
        sure = VALUES.get((run, HALF_WIDTH))
        print(
            f"{cluster:<28} {run:<28} {SYSTEMS[run]:<10} {mark(run):<10} {VALUES[run, STEPS]:5.0f} {VALUES[run, RATE]:12,.1f} "
            f"{'-' if sure is None else f'{sure:,.1f}':>10}"
        )

# %% [markdown]
# ## The figure


# %%
def bars(axes: Axes, cluster: str) -> None:
    """A bar for each run on the cluster, with its 95 % interval; hatched where no step of it took place."""
    for place, run in enumerate(CLUSTERS[cluster]):
        axes.bar(
            [place], [VALUES[run, RATE]], yerr=VALUES.get((run, HALF_WIDTH)), width=0.7, capsize=3, edgecolor="white",
            color=COLOURS.get(SYSTEMS[run], OTHER_COLOUR), hatch="//" if VALUES[run, SIMULATED] else "",
        )  # fmt: skip
    names = [f"{run}\n({mark(run)})" for run in CLUSTERS[cluster]]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=7)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(bottom=0)
    axes.grid(visible=False, axis="x")
    axes.set_title(cluster)


def drawn() -> Figure:
    """The figure: a panel for each cluster, as wide as it has runs."""
    counts = [len(names) for names in CLUSTERS.values()]
    figure = Figure(figsize=(min(2.5 + 1.0 * sum(counts), 24), 4.6), layout="constrained")
    panels = figure.subplots(1, len(CLUSTERS), width_ratios=counts, sharey=True, squeeze=False)[0]
    for axes, cluster in zip(panels, CLUSTERS, strict=True):
        bars(axes, cluster)
    panels[0].set_ylabel("tokens/s")
    kinds = [Patch(color=COLOURS.get(system, OTHER_COLOUR), label=system) for system in dict.fromkeys(SYSTEMS.values())]
    if any(VALUES[run, SIMULATED] for run in SYSTEMS):
        kinds.append(Patch(facecolor="0.8", edgecolor="white", hatch="//", label="simulated: no step took place"))
    panels[-1].legend(handles=kinds, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle("Throughput by cluster, with 95 % intervals from the steps of each run", fontsize=9)
    if SOURCE.sample:
        mark_sample(figure)
    return figure


with style():
    for path in save(drawn(), HERE / "figures", NAME):
        print(f"figure: {path}")
