"""Runs side by side: what their metrics say, as a table with ratios to the first and as a figure.

Everything is taken from the metrics of the steps, under verl's names, so that a local run folder and a W&B run give the
same numbers, and runs of other systems have their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nereus.errors import ConfigError, JournalError
from nereus.report.summary import (
    PARITY_MAX,
    PAUSE_SECONDS,
    PHASE_PREFIX,
    REWARD_MEAN,
    STEP_SECONDS,
    Row,
    reward_gain,
)
from nereus.report.wandb_folder import find_wandb_file, read_wandb
from nereus.runtime.journal import RunFolder
from nereus.runtime.metrics import STEP, read_metrics

TOKENS, CHANGES = "perf/total_num_tokens", "transition/count"
OTHER = "other"
PHASE_ORDER = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """A run to compare: its rows, one a step, in order. `torn`: its file ends within a record, which is left out."""

    name: str
    path: Path
    rows: Sequence[Row]
    torn: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of the table: the number of each run by its name (NaN where it has none), and how it is written.

    `text` says what it is, with its unit. `ratios`: a ratio to the first run has a meaning.
    """

    text: str
    by_run: Mapping[str, float]
    write: Callable[[float], str]
    ratios: bool = True


def load_run(path: Path) -> ComparedRun:
    """The run in `path`: a local run folder, an offline W&B run folder, or its `.wandb` file.

    Raises ConfigError where no run is, JournalError where its files are damaged or hold no step.
    """
    if not path.exists():
        raise ConfigError("RUN", str(path), "there is no such file or folder")
    if RunFolder(path=path).is_run():
        metrics = RunFolder(path=path).metrics
        run = ComparedRun(
            name=path.resolve().name, path=metrics, rows=read_metrics(metrics) if metrics.exists() else []
        )
    elif (file := find_wandb_file(path)) is not None:
        logged = read_wandb(file)
        run = ComparedRun(name=logged.name, path=file, rows=logged.rows, torn=logged.torn)
    else:
        expected = "expected a run folder (config.yaml and events.jsonl) or a W&B run folder (a .wandb file)"
        raise ConfigError("RUN", str(path), expected)
    rows = [row for row in run.rows if math.isfinite(row.get(STEP, math.nan))]
    if not rows:
        cut = " (it ends in the middle of a record)" if run.torn else ""
        raise JournalError(f"{run.path}: holds no steps{cut}: nothing to compare")
    return replace(run, rows=rows)


def named(runs: Sequence[ComparedRun], names: Sequence[str] | None) -> tuple[ComparedRun, ...]:
    """`runs` under the `names` given, else their own, numbered where they repeat.

    Raises ConfigError when names are not one for each run and all different.
    """
    if names is not None:
        if len(names) != len(runs) or len(set(names)) != len(names) or not all(names):
            raise ConfigError("--names", ",".join(names), f"expected {len(runs)} different names, as a,b")
        return tuple(replace(run, name=name) for run, name in zip(runs, names, strict=True))
    own = [run.name for run in runs]
    numbers = [own[:index].count(name) + 1 for index, name in enumerate(own)]
    return tuple(
        replace(run, name=run.name if number == 1 else f"{run.name} ({number})")
        for run, number in zip(runs, numbers, strict=True)
    )


def phase_seconds(run: ComparedRun) -> dict[str, float]:
    """Mean seconds a step of every phase; of all of a step's time, whatever no phase has is `other`.

    A step without a phase counts as 0 for it, so the phases and `other` add up to `mean_step_seconds`.
    """
    keys = {key for row in run.rows for key in row if key.startswith(PHASE_PREFIX)}
    known = keys - {STEP_SECONDS, PAUSE_SECONDS}
    order = {f"{PHASE_PREFIX}{phase}": place for place, phase in enumerate(PHASE_ORDER)}
    phases = {
        key.removeprefix(PHASE_PREFIX): sum(_column(run, key)) / len(run.rows)
        for key in sorted(known, key=lambda key: (order.get(key, len(order)), key))
    }
    whole = mean_step_seconds(run)
    return {**phases, OTHER: max(0.0, whole - sum(phases.values()))} if math.isfinite(whole) else phases


def mean_step_seconds(run: ComparedRun) -> float:
    """Mean seconds of a step, without the pause of a change before it; NaN where no step tells."""
    return _mean(_column(run, STEP_SECONDS))


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
    table = [
        Line(text="steps", by_run=_each(runs, lambda run: len(run.rows)), write=_whole, ratios=False),
        Line(text="seconds a step", by_run=_each(runs, mean_step_seconds), write=_fixed),
    ]
    for name in (*names, OTHER):
        by_run = {run: by_name.get(name, math.nan) for run, by_name in phases.items()}
        table.append(Line(text=f"  {name}", by_run=by_run, write=_fixed))
    table.append(Line(text="tokens/s", by_run=_each(runs, _tokens_per_second), write=_three))
    table += [*_reward_lines(runs), *_transition_lines(runs)]
    parity = _each(runs, lambda run: max(_column(run, PARITY_MAX), default=math.nan))
    table.append(Line(text="parity, max |dlogp|", by_run=parity, write=lambda value: f"{value:.2e}", ratios=False))
    return tuple(line for line in table if any(map(math.isfinite, line.by_run.values())))


def render(runs: Sequence[ComparedRun]) -> str:
    """The table as text: numbers of each run, after the first with the ratio to the first."""
    rows = [("", *(run.name for run in runs))]
    for line in lines(runs):
        rows.append((line.text, *(_cell(line, run.name, runs[0].name) for run in runs)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(runs) + 1)]
    text = [_aligned(row, widths) for row in rows]
    text += [f"{run.name}: {run.path} ends in the middle of a record, which is left out" for run in runs if run.torn]
    return "\n".join(text) + "\n"


def _reward_lines(runs: Sequence[ComparedRun]) -> list[Line]:
    """The mean reward of the first and of the last steps; how many they are follows from a run's length."""
    gains = {run.name: reward_gain(run.rows) for run in runs}
    windows = [gain.window_steps for gain in gains.values() if gain is not None]
    steps = "/".join(map(str, windows[:1] if len(set(windows)) == 1 else windows))
    steps += " step" if steps == "1" else " steps"
    first = {run: math.nan if gain is None else gain.first_reward for run, gain in gains.items()}
    last = {run: math.nan if gain is None else gain.last_reward for run, gain in gains.items()}
    return [
        Line(text=f"reward, first {steps}", by_run=first, write=_fixed, ratios=False),
        Line(text=f"reward, last {steps}", by_run=last, write=_fixed, ratios=False),
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


def _tokens_per_second(run: ComparedRun) -> float:
    """All tokens over all seconds of the steps that tell both; pauses are not in it."""
    told = [row for row in run.rows if math.isfinite(row.get(TOKENS, math.nan) + row.get(STEP_SECONDS, math.nan))]
    seconds = sum(row[STEP_SECONDS] for row in told)
    return sum(row[TOKENS] for row in told) / seconds if seconds > 0 else math.nan


def _each(runs: Sequence[ComparedRun], number: Callable[[ComparedRun], float]) -> dict[str, float]:
    return {run.name: number(run) for run in runs}


def _cell(line: Line, name: str, first_name: str) -> str:
    value, first = line.by_run[name], line.by_run[first_name]
    if not math.isfinite(value):
        return "-"
    if name == first_name or not line.ratios or not math.isfinite(first) or first == 0:
        return line.write(value)
    return f"{line.write(value)} ({value / first:.2f}x)"


def _fixed(value: float) -> str:
    return f"{value:.3f}"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _column(run: ComparedRun, key: str) -> list[float]:
    return [row[key] for row in run.rows if math.isfinite(row.get(key, math.nan))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    name, *cells = row
    right = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
    return "  ".join([f"{name:<{widths[0]}}", *right]).rstrip()
