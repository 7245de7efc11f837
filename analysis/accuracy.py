# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # The simulated world against published step times
#
# `make bench-published` simulates rows of public tables of RL step times, with systems modelled from their code and pages.
# No row was fitted to: the simulated world's tables are kernel and collective times. The rules by which rows are left out
# stand in `benchmarks/published_steps.py` and were written before errors were seen.
#
# OpenRLHF's rows do not state what decides their time; each is a range over what they leave open.

# %%
from __future__ import annotations

from pathlib import Path
from statistics import median

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nereus.report.figure import draw
from nereus.report.table import measured_or_sample

NAME = "accuracy"
HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
GOAL_SHARE, VERL_GOAL_SHARE = 0.15, 0.20
COLOURS = {"NeMo-RL": "tab:green", "verl": "tab:blue"}

# %% [markdown]
# ## The numbers

# %%
TABLE, SOURCE = measured_or_sample(HERE.parent / "runs" / NAME / "table.parquet", HERE / "data" / f"{NAME}.parquet")


def rows_of(part: str) -> dict[str, dict[str, float]]:
    """Row -> metric -> value, of a system or of another part of the benchmark."""
    found: dict[str, dict[str, float]] = {}
    chosen = TABLE.filter(pl.col("run_id") == f"{NAME}-{part}").select("variant", "metric", "value")
    for variant, metric, value in chosen.iter_rows():
        found.setdefault(variant, {})[metric] = value
    return found


SYSTEMS = {system: rows_of(system) for system in COLOURS}
OPEN = rows_of("OpenRLHF")


def errors(*systems: str, off: bool = True) -> list[float]:
    """|simulated / published - 1|; without `off` of synchronous rows only."""
    return [
        abs(row["simulated/step_seconds"] / row["published/step_seconds"] - 1)
        for system in systems
        for row in SYSTEMS[system].values()
        if off or not row["one_step_off"]
    ]


kind = "SAMPLE DATA, not to be quoted; " if SOURCE.sample else ""
print(f"{NAME}: {kind}simulated beside published figures: {SOURCE.command}")
for label, found, goal in (
    ("synchronous rows", errors(*COLOURS, off=False), GOAL_SHARE),
    ("with one step off", errors(*COLOURS), GOAL_SHARE),
    ("verl, stated configuration", errors("verl"), VERL_GOAL_SHARE),
):
    met = "met" if median(found) <= goal else "MISSED"
    print(f"median error, {label}: {median(found):.1%} of {len(found)} rows (goal: at most {goal:.0%}: {met})")
for label, row in rows_of("order").items():
    print(f"rank order of pairs, {label}: {row['pairs_right_count']:.0f} of {row['pairs_count']:.0f}")
inside = 0
for label, row in OPEN.items():
    low, high, published = (row[f"{name}_seconds"] for name in ("simulated/least", "simulated/most", "published/step"))
    inside += low <= published <= high
    print(f"OpenRLHF {label}: {low:.0f} to {high:.0f} s simulated, over what the row leaves open")
print(f"OpenRLHF: {inside} of {len(OPEN)} published times lie in their range")
for label, row in rows_of("left out").items():
    print(f"left out: {row['rows_count']:.0f} of {label}")

# %% [markdown]
# ## The figure


# %%
def compared(axes: Axes) -> None:
    """Simulated against published seconds."""
    for system, rows in SYSTEMS.items():
        for off, marker in ((0.0, "o"), (1.0, "^")):
            chosen = [row for row in rows.values() if row["one_step_off"] == off]
            pairs = [(row["published/step_seconds"], row["simulated/step_seconds"]) for row in chosen]
            if pairs:
                label = f"{system}, one step off" if off else system
                axes.plot(*zip(*pairs, strict=True), marker, color=COLOURS[system], markersize=4, label=label)
    for index, row in enumerate(OPEN.values()):
        low, high, published = (row[f"{n}_seconds"] for n in ("simulated/least", "simulated/most", "published/step"))
        axes.plot([published] * 2, [low, high], color="tab:red", label=None if index else "OpenRLHF, range of choices")
    published = [row["published/step_seconds"] for rows in (*SYSTEMS.values(), OPEN) for row in rows.values()]
    ends = [0.7 * min(published), 1.4 * max(published)]
    axes.plot(ends, ends, color="0.3", linewidth=1)
    axes.fill_between(ends, [0.85 * e for e in ends], [1.15 * e for e in ends], color="0.9", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="published seconds a step", ylabel="SIMULATED seconds a step")
    axes.set_title("Published and simulated RL steps. Grey: within 15 %")
    axes.legend(fontsize=7)


def drawn() -> Figure:
    """The figure."""
    figure = Figure(figsize=(5.6, 5.0), layout="constrained")
    compared(figure.subplots())
    return figure


print(draw(drawn, HERE / "figures", NAME, sample=SOURCE.sample))
