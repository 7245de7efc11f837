# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # The quickstart with live changes of layout, and without
#
# `nereus experiment run quickstart_pair` carries the quickstart out in two variants, each with two seeds: `live` changes
# its layout twice while it trains, `fixed` keeps the first. The table of `nereus experiment collect quickstart_pair` says:
# what does a step cost in each layout, what does the change itself cost, and is the reward the same?
#
# Without a collected table the small sample in `analysis/data/` is drawn, and marked; `NEREUS_REQUIRE_MEASURED=1`
# refuses it. Run this file as a script (`make analysis`) or open it as a notebook (jupytext).

# %%
from __future__ import annotations

from pathlib import Path

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nereus.report.figure import draw
from nereus.report.table import measured_or_sample

NAME = "quickstart_pair"
HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
VARIANTS = ("live", "fixed")
LINES = {  # where the two are equal, the broken line lies on the broad one
    "live": {"color": "tab:blue", "linewidth": 3.5, "alpha": 0.55, "solid_capstyle": "round"},
    "fixed": {"color": "tab:orange", "linewidth": 1.3, "linestyle": "--", "marker": "o", "markersize": 3},
}
LAST_STEPS = 5

STEP, PAUSE, REWARD, TRAINING = "timing_s/step", "timing_s/transition", "critic/score/mean", "run/training_seconds"
PHASES = {  # in the order of a step
    "update_weights": "weight sync",
    "gen": "generation",
    "old_log_prob": "actor log-probs",
    "ref": "reference",
    "values": "critic values",
    "update_critic": "critic update",
    "update_actor": "actor update",
}
PHASE_COLOURS = ("tab:purple", "tab:blue", "tab:cyan", "tab:green", "tab:olive", "tab:orange", "tab:red")

# %% [markdown]
# ## The numbers
#
# A row is one number of one run: `run_id`, `variant`, `seed`, `step`, `metric`, `value`.

# %%
TABLE, SOURCE = measured_or_sample(
    HERE.parent / "runs" / NAME / "table.parquet", HERE / "data" / f"{NAME}.sample.parquet"
)


def of(metric: str, variant: str) -> pl.DataFrame:
    """step, and of `metric` over the seeds of `variant`: mean, low, high."""
    rows = TABLE.filter(pl.col("metric") == metric, pl.col("variant") == variant, pl.col("step").is_not_null())
    value = pl.col("value")
    return rows.group_by("step").agg(mean=value.mean(), low=value.min(), high=value.max()).sort("step")


def mean_of(metric: str, variant: str, first_step: int, last_step: int) -> float:
    """The mean of `metric` over seeds and over the steps from `first_step` to `last_step`."""
    rows = of(metric, variant).filter(pl.col("step").is_between(first_step, last_step))
    return rows.select(pl.col("mean").mean()).item()


def largest_difference(metric: str) -> float:
    """How far `metric` of the live run is from that of the fixed one with the same seed, at most."""
    rows = TABLE.filter(pl.col("metric") == metric).pivot(on="variant", index=["seed", "step"], values="value")
    return rows.select((pl.col("live") - pl.col("fixed")).abs().max()).item()


def layout(step: int) -> str:
    """The actor's layout in a step of the live runs, such as `TP2·PP2·DP1, gen 2xTP2`."""
    rows = TABLE.filter(pl.col("variant") == "live", pl.col("step") == step, pl.col("metric").str.starts_with("plan/"))
    at = dict(rows.select(pl.col("metric").str.strip_prefix("plan/"), pl.col("value").cast(pl.Int64)).iter_rows())
    return f"TP{at['tp']}·PP{at['pp']}·DP{at['dp']}, gen {at['gen_dp']}xTP{at['gen_tp']}"


assert set(TABLE["variant"]) == set(VARIANTS), f"expected runs of {VARIANTS}, found {set(TABLE['variant'])}"
STEPS = TABLE.select(pl.col("step").max()).item()
CHANGES = of(PAUSE, "live").filter(pl.col("mean") > 0)["step"].to_list()
assert CHANGES, "expected changes of layout in the live runs"

# %% [markdown]
# ## Before and after
#
# The windows are the same steps in both variants: those before the first change, and those from the last change on. So
# `fixed` shows what other than the layout differs between them.

# %%
PARTS = {"before": (1, CHANGES[0] - 1), "after": (CHANGES[-1], STEPS)}


def summary(variant: str) -> dict[str, object]:
    """A line of the printed table."""
    rows = TABLE.filter(pl.col("variant") == variant)
    seeds = rows["seed"].n_unique()
    pause_seconds = rows.filter(pl.col("metric") == PAUSE).select(pl.col("value").sum()).item() / seeds
    whole_seconds = rows.filter(pl.col("metric") == TRAINING).select(pl.col("value").mean()).item()
    steps = {
        f"step s, {part} ({first}-{last})": mean_of(STEP, variant, first, last) for part, (first, last) in PARTS.items()
    }
    return {
        "variant": variant,
        "seeds": seeds,
        **steps,
        f"reward ({STEPS - LAST_STEPS + 1}-{STEPS})": mean_of(REWARD, variant, STEPS - LAST_STEPS + 1, STEPS),
        "pause s": pause_seconds,
        "pause %": 100 * pause_seconds / whole_seconds,
    }


with pl.Config(tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True, float_precision=3, tbl_width_chars=120):
    kind = "SAMPLE DATA, not to be quoted" if SOURCE.sample else "measured"
    print(f"{NAME}: {kind}, {len(SOURCE.runs)} runs: {SOURCE.command}")
    print(pl.DataFrame([summary(variant) for variant in VARIANTS]))

# %% [markdown]
# ## The figure


# %%
def over_steps(axes: Axes, metric: str) -> None:
    """The mean over seeds, and the range of the seeds, over steps."""
    for variant, look in LINES.items():
        line = of(metric, variant)
        axes.plot(line["step"], line["mean"], label=variant, **look)
        axes.fill_between(line["step"], line["low"], line["high"], color=look["color"], alpha=0.15, linewidth=0)
    for step in CHANGES:
        axes.axvline(step - 0.5, color="0.35", linestyle="--", linewidth=1)
    axes.set_xlim(0.5, STEPS + 0.5)
    axes.set_xlabel("PPO step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def name_layouts(axes: Axes) -> None:
    """The live runs' layouts, above the steps that they hold in."""
    for first, end in zip([1, *CHANGES], [*CHANGES, STEPS + 1], strict=True):
        text = layout(first).replace(", ", "\n")
        axes.text(
            (first + end - 1) / 2, 0.985, text, transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=7
        )
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)


def by_phase(axes: Axes) -> None:
    """A bar for each variant and window: the mean seconds of a step's phases."""
    bars = [(variant, part) for part in PARTS for variant in VARIANTS]
    names = [f"{variant}, {part}" for variant, part in bars]
    left = [0.0] * len(bars)
    for (phase, label), colour in zip(PHASES.items(), PHASE_COLOURS, strict=True):
        seconds = [mean_of(f"timing_s/{phase}", variant, *PARTS[part]) for variant, part in bars]
        axes.barh(names, seconds, left=left, color=colour, label=label, height=0.65)
        left = [start + length for start, length in zip(left, seconds, strict=True)]
    whole = [mean_of(STEP, variant, *PARTS[part]) for variant, part in bars]
    axes.barh(
        names, [a - b for a, b in zip(whole, left, strict=True)], left=left, color="0.75", label="other", height=0.65
    )
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds a step, mean of steps and seeds")


def drawn() -> Figure:
    """The figure."""
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
    seconds, reward = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    phases = figure.add_subplot(grid[1, :])
    over_steps(seconds, STEP)
    name_layouts(seconds)
    paused = of(PAUSE, "live").filter(pl.col("mean") > 0).select("step", "mean")
    pauses = ", ".join(f"{mean:.2f} s before step {step}" for step, mean in paused.iter_rows())
    seconds.set(title="Time of a step (without the pause of a change)", ylabel="seconds")
    seconds.legend(loc="lower left")
    over_steps(reward, REWARD)
    difference = largest_difference(REWARD)
    words = f"differ by at most {difference:.2g}" if difference else "are equal at every step"
    reward.set(title=f"Reward (live and fixed {words})", ylabel="mean score of a batch (0 to 1)")
    reward.legend(loc="upper left")
    by_phase(phases)
    steps = ", ".join(f"{part}: steps {first} to {last}" for part, (first, last) in PARTS.items())
    phases.set(title=f"Time of a step by phase ({steps})")
    phases.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    seeds = ", ".join(map(str, TABLE["seed"].unique().sort()))
    head = f"Quickstart with live changes of layout and without (seeds {seeds}: mean and range)"
    figure.suptitle(f"{head}. Grey lines: changes, pauses {pauses}", fontsize=9)
    return figure


print(draw(drawn, HERE / "figures", NAME, sample=SOURCE.sample))
