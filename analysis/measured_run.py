# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # One measured run
#
# What did each step take, and what changed when the plan changed? Where did a change's pause go? How well was each step
# predicted before it ran? When did everything happen?
#
# The run folder is the first argument, or `NEREUS_RUN`, or `runs/quickstart` where `make run` has left it:
#
#     .venv/bin/python analysis/measured_run.py runs/quickstart
#
# Without one the small sample in `analysis/data/` is drawn, and marked; `NEREUS_REQUIRE_MEASURED=1` refuses it.

# %%
from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from statistics import median

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nereus.report.figure import draw
from nereus.report.run_table import run_or_sample

NAME = "measured_run"
HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
GIVEN = sys.argv[1] if "__file__" in globals() and len(sys.argv) > 1 else os.environ.get("NEREUS_RUN", "")
PHASES = {  # in the order of a step
    "update_weights": "weight sync",
    "gen": "generation",
    "old_log_prob": "actor log-probs",
    "ref": "reference",
    "values": "critic values",
    "update_critic": "critic update",
    "update_actor": "actor update",
}
COLOURS = ("tab:purple", "tab:blue", "tab:cyan", "tab:green", "tab:olive", "tab:orange", "tab:red")
CHANGE = {"color": "black", "linestyle": "--", "linewidth": 0.9}
FEW_SECONDS = 0.02

# %% [markdown]
# ## The numbers
#
# A row is one number of one step: `step`, `metric`, `value`; rows without a step are of the whole run.

# %%
TABLE, SOURCE = run_or_sample(
    Path(GIVEN) if GIVEN else HERE.parent / "runs/quickstart",
    HERE / "data" / f"{NAME}.sample.parquet",
    asked_for=bool(GIVEN),
)
KIND = "SAMPLE DATA, not to be quoted" if SOURCE.sample else "measured" if SOURCE.measured else "simulated"
(RUN,) = SOURCE.runs


def column(metric: str) -> dict[int, float]:
    """The metric by step."""
    rows = TABLE.filter(pl.col("metric") == metric, pl.col("step").is_not_null()).sort("step")
    return {step: value for step, value in rows.select("step", "value").iter_rows() if math.isfinite(value)}


def of_run(metric: str, default: float = 0.0) -> float:
    """A number of the whole run."""
    rows = TABLE.filter(pl.col("metric") == metric, pl.col("step").is_null())
    return rows["value"].item() if rows.height else default


STEP_SECONDS = column("timing_s/step")
PAUSES = {step: seconds for step, seconds in column("timing_s/transition").items() if seconds > 0}
STEPS = tuple(STEP_SECONDS)
SPANS = [
    (first, end - 1)
    for first, end in zip([STEPS[0], *PAUSES], [*PAUSES, STEPS[-1] + 1], strict=True)
    if end > first
]  # fmt: skip
"""The first and the last step of each plan."""


def layout(step: int) -> str:
    """The actor's layout in a step, such as `TP2·PP2·DP1, gen 2xTP2`."""
    at = {key: column(f"plan/{key}").get(step, math.nan) for key in ("tp", "pp", "dp", "gen_dp", "gen_tp")}
    if any(math.isnan(value) for value in at.values()):
        return "?"
    return "TP{tp:.0f}·PP{pp:.0f}·DP{dp:.0f}, gen {gen_dp:.0f}xTP{gen_tp:.0f}".format(**at)


def error_share(first: int, last: int) -> float:
    """The median of |predicted / measured - 1| over these steps."""
    errors = [abs(value) for step, value in column("plan/error/step").items() if first <= step <= last]
    return median(errors) if errors else math.nan


# %%
def span_row(first: int, last: int) -> dict[str, object]:
    """A line of the printed table: what one plan was like."""
    seconds = pl.Series([STEP_SECONDS[step] for step in STEPS if first <= step <= last])
    return {
        "steps": f"{first}-{last}",
        "actor": layout(first),
        "step s, median": seconds.median(),
        "pause before, s": PAUSES.get(first, 0.0),
        "prediction error, median": error_share(first, last),
    }


with pl.Config(tbl_hide_dataframe_shape=True, tbl_hide_column_data_types=True, float_precision=3, tbl_width_chars=140):
    print(f"{NAME}: {KIND}, run {RUN}: {SOURCE.command}")
    print(pl.DataFrame([span_row(*span) for span in SPANS]))
whole = of_run("run/training_seconds", sum(STEP_SECONDS.values()) + sum(PAUSES.values()))
print(f"pauses: {sum(PAUSES.values()):.3f} s of {whole:.1f} s of training ({sum(PAUSES.values()) / whole:.2%})")

# %% [markdown]
# ## The figures


# %%
def mark_changes(axes: Axes) -> None:
    """Lines where the plan changes, and an axis of whole steps."""
    for step in PAUSES:
        axes.axvline(step - 0.5, **CHANGE)
    axes.set_xlim(STEPS[0] - 0.5, STEPS[-1] + 0.5)
    axes.set_xlabel("PPO step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_steps(axes: Axes) -> None:
    """Seconds of each step by phase; the plans above; the pauses as bars of their own, before the step."""
    bottom = [0.0] * len(STEPS)
    for (phase, label), colour in zip(PHASES.items(), COLOURS, strict=True):
        known = column(f"timing_s/{phase}")
        seconds = [known.get(step, 0.0) for step in STEPS]
        axes.bar(STEPS, seconds, bottom=bottom, width=0.8, color=colour, label=label)
        bottom = [below + value for below, value in zip(bottom, seconds, strict=True)]
    rest = [max(STEP_SECONDS[step] - below, 0.0) for step, below in zip(STEPS, bottom, strict=True)]
    axes.bar(STEPS, rest, bottom=bottom, width=0.8, color="0.75", label="other")
    places = [step - 0.5 for step in PAUSES]
    axes.bar(places, list(PAUSES.values()), width=0.25, color="black", label="pause of a change", zorder=3)
    mark_changes(axes)
    axes.set_ylim(0, max(*STEP_SECONDS.values(), *PAUSES.values(), 0.0) * 1.3)
    for first, last in SPANS:
        text = layout(first).replace(", ", "\n")
        axes.text(
            (first + last) / 2, 0.98, text, transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=7
        )
    axes.set(title="Step latency, by phase (above: the actor's layout)", ylabel="seconds")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)


def draw_changes(axes: Axes) -> None:
    """Where each change's pause went; parts below a fiftieth of a second are one."""
    parts = {
        metric.removeprefix("transition_s/"): column(metric)
        for metric in TABLE["metric"].unique().sort()
        if metric.startswith("transition_s/")
    }
    shown = [part for part, known in parts.items() if max(known.get(step, 0.0) for step in PAUSES) >= FEW_SECONDS]
    shown.sort(key=lambda part: -sum(parts[part].values()))
    names = [f"before step {step}" for step in PAUSES]
    left = [0.0] * len(names)
    for number, part in enumerate([*shown, "others"]):
        one = {step: parts[part].get(step, 0.0) for step in PAUSES} if part in parts else None
        seconds = list(one.values()) if one else [PAUSES[s] - a for s, a in zip(PAUSES, left, strict=True)]
        colour = "0.75" if one is None else f"C{number}"
        axes.barh(names, [max(value, 0.0) for value in seconds], left=left, height=0.55, color=colour, label=part)
        left = [start + value for start, value in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(title="Changes of plan: the pause by operation", xlabel="seconds")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)


def draw_predictions(axes: Axes) -> None:
    """Each step as predicted before it ran, with two deviations, beside what it took."""
    predicted, deviation = column("plan/predicted/step_s"), column("plan/predicted/step_deviation_s")
    steps = [step for step in STEPS if step in predicted]
    middle = [predicted[step] for step in steps]
    low = [predicted[step] - 2 * deviation.get(step, 0.0) for step in steps]
    high = [predicted[step] + 2 * deviation.get(step, 0.0) for step in steps]
    axes.fill_between(steps, low, high, color="tab:orange", alpha=0.2, linewidth=0, label="two deviations")
    axes.plot(steps, middle, color="tab:orange", label="predicted")
    axes.plot(STEPS, list(STEP_SECONDS.values()), "o", markersize=3, color="tab:blue", label="took")
    mark_changes(axes)
    axes.set_ylim(bottom=0)
    error = error_share(STEPS[0], STEPS[-1])
    axes.set(title=f"Prediction of each step before it ran (median error {error:.0%})", ylabel="seconds")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)


def draw_timeline(axes: Axes) -> None:
    """When each phase ran, a row a phase; phases follow each other from the step's begin on."""
    at = column("timeline/begin_s")
    first = min(at.values(), default=0.0)
    for number, (phase, colour) in enumerate(zip(PHASES, COLOURS, strict=True)):
        seconds = column(f"timing_s/{phase}")
        axes.broken_barh([(at[s], seconds.get(s, 0.0)) for s in at], (number - 0.4, 0.8), color=colour, linewidth=0)
        at = {step: begin + seconds.get(step, 0.0) for step, begin in at.items()}
    pauses = [(begin, PAUSES.get(step, 0.0)) for step, begin in column("timeline/change_begin_s").items()]
    axes.broken_barh(pauses, (len(PHASES) - 0.4, 0.8), color="black", linewidth=0)
    axes.set_yticks(range(len(PHASES) + 1), [*PHASES.values(), "change of plan"], fontsize=7)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    ready = of_run("timeline/ready_s", first)
    axes.set_xlim(left=ready)
    start = f"start and probe until {of_run('timeline/probed_s'):.0f} s, warm-up until {of_run('timeline/warmed_up_s'):.0f} s"
    axes.set(title=f"Timeline of the PPO steps ({start})", xlabel="seconds since the run began")


def drawn() -> Figure:
    """The figure."""
    figure = Figure(figsize=(11, 11.5), layout="constrained")
    rows = figure.add_gridspec(4, 1, height_ratios=(1.4, 0.45 + 0.25 * len(PAUSES), 1, 1.1))
    draw_steps(figure.add_subplot(rows[0]))
    changes = figure.add_subplot(rows[1])
    if PAUSES:
        draw_changes(changes)
    else:
        changes.set_axis_off()
        changes.text(0.5, 0.5, "no change of plan in this run", ha="center", va="center")
    draw_predictions(figure.add_subplot(rows[2]))
    draw_timeline(figure.add_subplot(rows[3]))
    figure.suptitle(f"Run {RUN} ({KIND}). Broken lines: changes of plan", fontsize=9)
    return figure


print(draw(drawn, HERE / "figures", NAME, sample=SOURCE.sample))
