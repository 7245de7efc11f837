# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 8B PPO over clusters: Nereus beside verl and OpenRLHF, simulated
#
# `nereus experiment run throughput` times every system in the simulated world: the same kernels, links and random lengths;
# what differs is what each system does (`nereus/sim/rivals/sources.json` says from where that is known). The fleet stays, so
# Nereus is the plan on which it settles: measured steps correct its cost model, and it searches again until no new plan comes
# (what changes cost is not counted). "Before it ran" is its first plan. Ratios are tokens/s of Nereus over those of the other.
#
# What may not be concluded: no GPU ran anything here. The published ranges are from an abstract whose clusters, lengths and
# baselines' settings are not known, so they are printed beside ours, not as the same quantity.

# %%
from __future__ import annotations

from pathlib import Path

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nereus.report.figure import draw
from nereus.report.table import measured_or_sample

NAME = "throughput"
HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
PUBLISHED = {"verl": (1.10, 1.47), "openrlhf": (2.14, 7.27)}
OTHERS = {
    "nereus-best-plan": "Nereus, before it ran",
    "verl-default": "verl, default",
    "verl-tuned": "verl, tuned",
    "openrlhf-default": "OpenRLHF, default (colocated)",
    "openrlhf-default_apart": "OpenRLHF, default (apart)",
    "openrlhf-tuned": "OpenRLHF, tuned",
}
COLOURS = ("0.6", "tab:blue", "tab:cyan", "tab:red", "tab:orange", "tab:olive")
OURS = "nereus-settled-plan"
STEP, FREE = "timing_s/step", "perf/time_per_step_free_handover"
PHASES = ("update_weights", "gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "reward")

# %% [markdown]
# ## The numbers

# %%
TABLE, SOURCE = measured_or_sample(HERE.parent / "runs" / NAME / "table.parquet", HERE / "data" / f"{NAME}.parquet")


def means() -> dict[tuple[str, str, str, str], float]:
    """(configuration, fleet, lengths, metric) -> mean over steps."""
    rows = TABLE.filter(pl.col("step").is_not_null()).group_by("variant", "metric").agg(pl.col("value").mean())
    found: dict[tuple[str, str, str, str], float] = {}
    for variant, metric, value in rows.iter_rows():
        head, fleet, lengths = variant.rsplit("-", 2)
        found[head, fleet, lengths, metric] = value
    return found


MEANS = means()
CLUSTERS = sorted(
    {(fleet, lengths) for _, fleet, lengths, _ in MEANS},
    key=lambda each: (each[1], each[0].lstrip("0123456789"), int(each[0].partition("x")[0])),
)


def ratio(other: str, fleet: str, lengths: str) -> tuple[float, float] | None:
    """Times that the other takes over Nereus': as its handling of weights was published, and if that were free; None: does not fit."""
    ours = MEANS.get((OURS, fleet, lengths, STEP))
    theirs, free = (MEANS.get((other, fleet, lengths, metric)) for metric in (STEP, FREE))
    own_free = MEANS.get((OURS, fleet, lengths, FREE))
    if ours is None or theirs is None or free is None or own_free is None:
        return None
    return theirs / ours, free / own_free


def openrlhf_band(fleet: str, lengths: str) -> tuple[float, float] | None:
    """The lowest and the highest ratio over OpenRLHF's options: published rows do not state them, so a ratio is no number alone."""
    ratios = [ratio(other, fleet, lengths) for other in OTHERS if other.startswith("openrlhf")]
    known = [pair[0] for pair in ratios if pair is not None]
    return (min(known), max(known)) if known else None


def drivers(other: str, fleet: str, lengths: str) -> str:
    """The phases in which the other takes most longer, in seconds."""
    lost = {
        phase: MEANS[other, fleet, lengths, f"timing_s/{phase}"] - MEANS[OURS, fleet, lengths, f"timing_s/{phase}"]
        for phase in PHASES
    }
    largest = sorted(lost, key=lambda phase: -lost[phase])[:3]
    return ", ".join(f"{phase} {lost[phase]:+.1f}" for phase in largest)


def cell(other: str, fleet: str, lengths: str) -> str:
    """A ratio with the lower one where handing weights over is free."""
    found = ratio(other, fleet, lengths)
    return "does not fit" if found is None else f"{found[0]:.2f} ({found[1]:.2f})"


kind = "SAMPLE DATA, not to be quoted; " if SOURCE.sample else ""
print(f"{NAME}: {kind}simulated, {len(SOURCE.runs)} runs: {SOURCE.command}")
print("times that a step takes over Nereus' settled plan; in brackets if handing weights over were free for all")
head = "  ".join(f"{name:<22}" for name in OTHERS)
print(f"{'cluster':<22} {'lengths':<7} {'Nereus s':>9}  {head}  openrlhf, over its options")
for fleet, lengths in CLUSTERS:
    ours = MEANS.get((OURS, fleet, lengths, STEP))
    told = "does not fit" if ours is None else f"{ours:9.1f}"
    cells = "  ".join(f"{cell(o, fleet, lengths):<22}" for o in OTHERS)
    band = openrlhf_band(fleet, lengths)
    print(
        f"{fleet:<22} {lengths:<7} {told:>9}  {cells}  "
        + ("does not fit" if band is None else f"{band[0]:.2f} to {band[1]:.2f}")
    )

# %% [markdown]
# ## Ranges, beside the published ones, and what makes the largest


# %%
def known(other: str) -> list[tuple[float, str, str]]:
    """(ratio, fleet, lengths) of the clusters on which both run."""
    found = ((ratio(other, fleet, lengths), fleet, lengths) for fleet, lengths in CLUSTERS)
    return [(pair[0], fleet, lengths) for pair, fleet, lengths in found if pair is not None]


for other, label in OTHERS.items():
    ratios = known(other)
    if not ratios:
        continue
    low, high = min(ratios), max(ratios)
    middle = sorted(each[0] for each in ratios)[len(ratios) // 2]
    published = PUBLISHED.get(other.partition("-")[0])
    beside = f" (published: {published[0]} to {published[1]})" if published else ""
    print(
        f"{label:<30} {low[0]:.2f} to {high[0]:.2f}, median {middle:.2f}{beside}; "
        f"largest on {high[1]} {high[2]}: {drivers(other, high[1], high[2])} s"
    )

# %% [markdown]
# ## The figure


# %%
def panel(axes: Axes, lengths: str) -> None:
    """A group of bars for each cluster."""
    fleets = [fleet for fleet, other in CLUSTERS if other == lengths]
    for low, high in PUBLISHED.values():
        axes.axhspan(low, high, color="0.85", zorder=0)
    for index, other in enumerate(OTHERS):
        pairs = [ratio(other, fleet, lengths) for fleet in fleets]
        at = [place + (index - 2.5) * 0.14 for place, pair in enumerate(pairs) if pair is not None]
        heights = [pair[0] for pair in pairs if pair is not None]
        axes.bar(at, heights, width=0.13, color=COLOURS[index], label=OTHERS[other])
    bands = [(place, openrlhf_band(fleet, lengths)) for place, fleet in enumerate(fleets)]
    known = [(place, band) for place, band in bands if band is not None]
    axes.vlines(
        [place + 0.45 for place, _ in known],
        [low for _, (low, _) in known],
        [high for _, (_, high) in known],
        color="black",
        linewidth=1.5,
        label="OpenRLHF, over its options",
    )
    axes.axhline(1.0, color="0.3", linewidth=1)
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    axes.set_xticks(range(len(fleets)), fleets, rotation=35, ha="right", fontsize=7)
    axes.set(title=f"{lengths.capitalize()} responses", ylabel="seconds a step over Nereus'")


def drawn() -> Figure:
    """The figure."""
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    above, below = figure.subplots(2, 1)
    panel(above, "short")
    panel(below, "long")
    above.legend(ncols=3, fontsize=7, loc="upper left")
    figure.suptitle(
        "8B PPO, SIMULATED: other systems over Nereus' settled plan. Grey: published ranges (verl 1.10-1.47, OpenRLHF 2.14-7.27)",
        fontsize=9,
    )
    return figure


print(draw(drawn, HERE / "figures", NAME, sample=SOURCE.sample))
