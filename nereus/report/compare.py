"""Runs side by side: what their metrics say, as a table with ratios to the first of its mark and to each baseline.

Everything is taken from the metrics of the steps, under verl's names, so that a local run folder and a W&B run give the
same numbers, and runs of other systems have their place. Ratios are taken between measured runs and between simulated ones,
never across: the one would be presented as the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from nereus.report.compare_statistics import (
    mean,
    mean_half_width,
    ratio_of_means_half_width,
    ratio_of_sums_half_width,
)
from nereus.report.compared_run import ComparedRun
from nereus.report.summary import PARITY_MAX, PAUSE_SECONDS, PHASE_PREFIX, REWARD_MEAN, STEP_SECONDS, reward_gain
from nereus.runtime.metrics import STEP

TOKENS, CHANGES = "perf/total_num_tokens", "transition/count"
OTHER = "other"
PHASE_ORDER = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "make_experience",
    "update_critic",
    "update_actor",
    "ppo_train",
    "update_weights",
)
"""`make_experience` and `ppo_train` are OpenRLHF's: from reward to adv, and both updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of the table: the number of each run by its name (NaN where it has none), and how it is written.

    `text` says what it is, with its unit. `ratios`: a ratio to the first run has a meaning. `half_widths`: of the 95 %
    confidence intervals, where there are any.
    """

    text: str
    by_run: Mapping[str, float]
    write: Callable[[float], str]
    ratios: bool = True
    half_widths: Mapping[str, float] = field(default_factory=dict[str, float])


def phase_seconds(run: ComparedRun) -> dict[str, float]:
    """Mean seconds a step of every phase; of all of a step's time, whatever no phase has is `other`.

    A step without a phase counts as 0 for it, so the phases and `other` add up to `mean_step_seconds`. What verl tells of
    parts of a phase (timing_s/agent_loop/...) is left out.
    """
    keys = {key for row in run.rows for key in row if key.startswith(PHASE_PREFIX)}
    known = {key for key in keys if "/" not in key.removeprefix(PHASE_PREFIX)} - {STEP_SECONDS, PAUSE_SECONDS}
    order = {f"{PHASE_PREFIX}{phase}": place for place, phase in enumerate(PHASE_ORDER)}
    phases = {
        key.removeprefix(PHASE_PREFIX): sum(_column(run, key)) / len(run.rows)
        for key in sorted(known, key=lambda key: (order.get(key, len(order)), key))
    }
    whole = mean_step_seconds(run)
    return {**phases, OTHER: max(0.0, whole - sum(phases.values()))} if math.isfinite(whole) else phases


def mean_step_seconds(run: ComparedRun) -> float:
    """Mean seconds of a step, without the pause of a change before it; NaN where no step tells."""
    return mean(step_seconds(run))


def step_seconds(run: ComparedRun) -> list[float]:
    """The seconds of every step that tells them."""
    return _column(run, STEP_SECONDS)


def step_ends(run: ComparedRun) -> dict[int, float]:
    """Seconds from the first step's beginning to the end of each, pauses included; none if a step does not tell its own."""
    seconds = [row.get(STEP_SECONDS, math.nan) + row.get(PAUSE_SECONDS, 0.0) for row in run.rows]
    if not all(map(math.isfinite, seconds)):
        return {}
    return dict(zip((int(row[STEP]) for row in run.rows), accumulate(seconds), strict=True))


def pauses(run: ComparedRun) -> dict[int, float]:
    """The pause in seconds of the change before each step that had one, by step."""
    return {int(row[STEP]): row[PAUSE_SECONDS] for row in run.rows if row.get(PAUSE_SECONDS, 0.0) > 0.0}


def rewards(run: ComparedRun) -> dict[int, float]:
    """The mean reward of every step that tells it, by step."""
    known = {int(row[STEP]): row.get(REWARD_MEAN, math.nan) for row in run.rows}
    return {step: reward for step, reward in known.items() if math.isfinite(reward)}


def lines(runs: Sequence[ComparedRun]) -> tuple[Line, ...]:
    """The table of `runs`, whose names differ: a phase that no run has, and a number that no run tells, has no line."""
    phases = {run.name: phase_seconds(run) for run in runs}
    names = dict.fromkeys(name for by_name in phases.values() for name in by_name if name != OTHER)
    sure = _each(runs, lambda run: mean_half_width(step_seconds(run)))
    table = [
        Line(text="steps", by_run=_each(runs, lambda run: len(run.rows)), write=_whole, ratios=False),
        Line(text="seconds a step", by_run=_each(runs, mean_step_seconds), write=_fixed, half_widths=sure),
    ]
    for name in (*names, OTHER):
        by_run = {run: by_name.get(name, math.nan) for run, by_name in phases.items()}
        table.append(Line(text=f"  {name}", by_run=by_run, write=_fixed))
    table.append(
        Line(
            text="tokens/s",
            by_run=_each(runs, tokens_per_second),
            write=_three,
            half_widths=_each(runs, tokens_half_width),
        )
    )
    table += [*_reward_lines(runs), *_transition_lines(runs)]
    parity = _each(runs, lambda run: max(_column(run, PARITY_MAX), default=math.nan))
    table.append(Line(text="parity, max |dlogp|", by_run=parity, write=lambda value: f"{value:.2e}", ratios=False))
    table += _baseline_lines(runs)
    return tuple(line for line in table if any(map(math.isfinite, line.by_run.values())))


def cells(runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    """The table as text, row by row: names, marks, then the numbers of each run, with the ratio to the first of its mark."""
    rows = [("", *(run.name for run in runs)), ("", *(f"{run.system}, {run.mark}" for run in runs))]
    firsts = {run.mark: run for run in reversed(runs)}
    for line in lines(runs):
        rows.append((line.text, *(_cell(line, run, firsts[run.mark]) for run in runs)))
    return rows


def notes(runs: Sequence[ComparedRun]) -> list[str]:
    """What a reader of the table must know."""
    text = [f"{run.name}: {run.path} ends in the middle of a record, which is left out" for run in runs if run.torn]
    if any(line.half_widths for line in lines(runs)):
        text.append("±: 95 % confidence, from the steps of each run")
    marks = {run.mark for run in runs}
    if len(marks) > 1:
        text.append("no ratio is taken between a measured and a simulated run")
    if "simulated" in marks:
        text.append("simulated: the figures of a model, no step of these runs took place")
    for run in runs:
        if run.unplaced:
            text.append(f"{run.name}: metrics without a column here: {', '.join(run.unplaced)}")
    return text


def render(runs: Sequence[ComparedRun]) -> str:
    """The table as text, and its notes."""
    rows = cells(runs)
    widths = [max(len(row[column]) for row in rows) for column in range(len(runs) + 1)]
    return "\n".join([*(_aligned(row, widths) for row in rows), *notes(runs)]) + "\n"


def tokens_per_second(run: ComparedRun) -> float:
    """All tokens over all seconds of the steps that tell both; pauses are not in it."""
    tokens, seconds = _tokens_and_seconds(run)
    return sum(tokens) / sum(seconds) if sum(seconds) > 0 else math.nan


def tokens_half_width(run: ComparedRun) -> float:
    """Of the 95 % confidence interval of `tokens_per_second`."""
    return ratio_of_sums_half_width(*_tokens_and_seconds(run))


def _baseline_lines(runs: Sequence[ComparedRun]) -> list[Line]:
    """For every run of another system, how many of its steps a run of the same mark does in the time of one."""
    made: list[Line] = []
    for baseline in (run for run in runs if run.system != "nereus"):
        alike = {run.name: run for run in runs if run.mark == baseline.mark and run.name != baseline.name}
        theirs = step_seconds(baseline)
        ratios = _each(runs, lambda run: mean(theirs) / mean_step_seconds(run) if run.name in alike else math.nan)  # noqa: B023
        sure = {name: ratio_of_means_half_width(theirs, step_seconds(run)) for name, run in alike.items()}
        text = f"as fast as {baseline.name}"
        made.append(Line(text=text, by_run=ratios, write=lambda x: f"{x:.2f}x", ratios=False, half_widths=sure))
    return made


def _reward_lines(runs: Sequence[ComparedRun]) -> list[Line]:
    """The mean reward of the first and of the last steps; how many they are follows from a run's length."""
    gains = {run.name: reward_gain(run.rows) for run in runs}
    windows = [gain.window_steps for gain in gains.values() if gain is not None]
    steps = "/".join(map(str, windows[:1] if len(set(windows)) == 1 else windows))
    steps += " step" if steps == "1" else " steps"
    first = {run: math.nan if gain is None else gain.first_reward for run, gain in gains.items()}
    last = {run: math.nan if gain is None else gain.last_reward for run, gain in gains.items()}
    told = {run.name: list(rewards(run).values()) for run in runs}
    count = {run: 0 if gain is None else gain.window_steps for run, gain in gains.items()}
    sure_first = {run: mean_half_width(each[: count[run]]) for run, each in told.items()}
    sure_last = {run: mean_half_width(each[len(each) - count[run] :]) for run, each in told.items()}
    return [
        Line(text=f"reward, first {steps}", by_run=first, write=_fixed, ratios=False, half_widths=sure_first),
        Line(text=f"reward, last {steps}", by_run=last, write=_fixed, ratios=False, half_widths=sure_last),
    ]


def _transition_lines(runs: Sequence[ComparedRun]) -> list[Line]:
    """How often the layout changed and how long the job stood still for it, also as a share of steps and pauses."""
    counts = _each(runs, lambda run: max(_column(run, CHANGES), default=math.nan))
    shares = _each(runs, _pause_fraction)
    return [
        Line(text="transitions", by_run=counts, write=_whole, ratios=False),
        Line(text="  pause, seconds", by_run=_each(runs, _pause_seconds), write=_fixed),
        Line(text="  pause, share of time", by_run=shares, write=lambda value: f"{value:.2%}", ratios=False),
    ]


def _pause_seconds(run: ComparedRun) -> float:
    """Seconds of all pauses; NaN for a system that does not tell of any."""
    return sum(pauses(run).values()) if _column(run, PAUSE_SECONDS) else math.nan


def _pause_fraction(run: ComparedRun) -> float:
    paused_seconds, step_seconds = _pause_seconds(run), sum(_column(run, STEP_SECONDS))
    whole_seconds = paused_seconds + step_seconds
    return paused_seconds / whole_seconds if whole_seconds > 0 else math.nan


def _tokens_and_seconds(run: ComparedRun) -> tuple[list[float], list[float]]:
    told = [row for row in run.rows if math.isfinite(row.get(TOKENS, math.nan) + row.get(STEP_SECONDS, math.nan))]
    return [row[TOKENS] for row in told], [row[STEP_SECONDS] for row in told]


def _each(runs: Sequence[ComparedRun], number: Callable[[ComparedRun], float]) -> dict[str, float]:
    return {run.name: number(run) for run in runs}


def _cell(line: Line, run: ComparedRun, first: ComparedRun) -> str:
    value, of_first = line.by_run[run.name], line.by_run[first.name]
    if not math.isfinite(value):
        return "-"
    half_width = line.half_widths.get(run.name, math.nan)
    text = line.write(value) + (f" ±{line.write(half_width)}" if math.isfinite(half_width) else "")
    if run.name == first.name or not line.ratios or not math.isfinite(of_first) or of_first == 0:
        return text
    return f"{text} ({value / of_first:.2f}x)"


def _fixed(value: float) -> str:
    return f"{value:.3f}"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _column(run: ComparedRun, key: str) -> list[float]:
    return [row[key] for row in run.rows if math.isfinite(row.get(key, math.nan))]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *cells = row
    right = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
    return "  ".join([f"{name:<{widths[0]}}", *right]).rstrip()
