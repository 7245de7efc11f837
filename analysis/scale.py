# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # 1,000 steps of 8B PPO on up to 1,024 GPUs: transitions and their share of the run, simulated
#
# `nereus experiment run scale` drives the real controller over a simulated fleet (Bamboo's trace of GCP A100 spot instances,
# scaled) whose responses grow. The same run is made with the operations of a change in three places, because no GPU has run
# one: where the real world on CPU has run them ("as measured on CPU"), with engines and groups built ahead by standby
# processes where memory allows, and with everything while the job waits. A fourth run gives no notice of losses.
#
# The paper's abstract says six or so transitions and 0.079 % of run time. Its trace, settings and plots were not seen, so ours
# is beside it, not the same quantity.

# %%
from __future__ import annotations

from pathlib import Path

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nereus.report.figure import draw
from nereus.report.table import measured_or_sample

NAME = "scale"
HERE = Path(__file__).parent if "__file__" in globals() else Path.cwd()
PAPER_SHARE = 0.00079
VARIANTS = {
    "measured": "as measured on CPU",
    "standby": "standby processes",
    "pause": "everything in the pause",
    "unannounced": "as measured, no notice of losses",
}
COLOURS = ("tab:blue", "tab:green", "tab:orange", "tab:red")

# %% [markdown]
# ## The numbers

# %%
TABLE, SOURCE = measured_or_sample(HERE.parent / "runs" / NAME / "table.parquet", HERE / "data" / f"{NAME}.parquet")


def of_run(variant: str, metric: str) -> float:
    """A number of the whole run."""
    rows = TABLE.filter((pl.col("variant") == variant) & (pl.col("metric") == metric) & pl.col("step").is_null())
    return float(rows["value"].item())


def of_steps(variant: str, metric: str) -> tuple[list[int], list[float]]:
    """Steps, and a metric of each that has it."""
    rows = TABLE.filter((pl.col("variant") == variant) & (pl.col("metric") == metric) & pl.col("step").is_not_null())
    rows = rows.sort("step")
    return rows["step"].to_list(), rows["value"].to_list()


def restarts(variant: str) -> list[int]:
    """Steps before which the state came from a checkpoint."""
    return of_steps(variant, "transition_s/restore")[0]


def transitions(variant: str) -> list[int]:
    """Steps before which a transition ended."""
    return of_steps(variant, "transition/failed")[0]


kind = "SAMPLE DATA, not to be quoted; " if SOURCE.sample else ""
print(f"{NAME}: {kind}simulated, {len(SOURCE.runs)} runs: {SOURCE.command}")
print(
    f"{'operations':<34} {'steps':>6} {'hours':>6} {'transitions':>11} {'restores':>8} {'s each':>7} {'share of run time':>18}"
)
for variant, label in VARIANTS.items():
    share, count = of_run(variant, "run/transition_fraction"), of_run(variant, "run/transitions_count")
    seconds = of_run(variant, "run/training_seconds")
    each = share * seconds / count if count else 0.0
    print(
        f"{label:<34} {of_run(variant, 'run/steps_count'):6.0f} {seconds / 3600:6.2f} {count:11.0f} "
        f"{of_run(variant, 'run/restores_count'):8.0f} {each:7.1f} {share:18.3%}"
    )
print(f"{'paper (abstract)':<34} {'1000':>6} {'':>6} {'~6':>11} {'':>8} {'':>7} {PAPER_SHARE:18.3%}")

# %% [markdown]
# ## The figure


# %%
def fleet(axes: Axes) -> None:
    """The fleet, what the plan uses of it, and where it changed."""
    axes.step(*of_steps("measured", "fleet/slots"), where="post", color="0.6", label="GPUs there")
    axes.step(
        *of_steps("measured", "plan/slots"), where="post", color="tab:blue", linewidth=1, label="GPUs in the plan"
    )
    top = max(of_steps("measured", "fleet/slots")[1])
    restored = set(restarts("measured"))
    live = [step for step in transitions("measured") if step not in restored]
    axes.plot(live, [1.06 * top] * len(live), "v", color="tab:green", label="live transition")
    axes.plot(sorted(restored), [1.06 * top] * len(restored), "x", color="tab:red", label="from a checkpoint")
    axes.set(title="The fleet, operations as measured on CPU", xlabel="step", ylabel="GPUs", ylim=(0, 1.15 * top))
    axes.legend(fontsize=7, ncols=4, loc="lower right")


def shares(axes: Axes) -> None:
    """The share of run time, three ways and without notice."""
    for place, (variant, label) in enumerate(VARIANTS.items()):
        share = of_run(variant, "run/transition_fraction")
        axes.barh(place, 100 * share, color=COLOURS[place])
        count = of_run(variant, "run/transitions_count")
        axes.text(100 * share * 1.1, place, f"{share:.3%}, {count:.0f} transitions", va="center", fontsize=7)
        axes.text(0.0115, place, label, va="center", fontsize=7, color="white")
    axes.axvline(100 * PAPER_SHARE, color="0.2", linewidth=1, linestyle="--")
    axes.text(100 * PAPER_SHARE * 1.06, -0.85, "paper's abstract: 0.079 %, about 6 transitions", fontsize=7)
    axes.set_xscale("log")
    axes.set(title="Transitions' share of run time", xlabel="% of run time", xlim=(0.01, 60), ylim=(4.0, -1.1))
    axes.set_yticks([])


def drawn() -> Figure:
    """The figure."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    fleet(left)
    shares(right)
    figure.suptitle("1,000 steps of 8B PPO on up to 1,024 A100, SIMULATED", fontsize=9)
    return figure


print(draw(drawn, HERE / "figures", NAME, sample=SOURCE.sample))
