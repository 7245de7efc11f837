"""What came of a run: a fold of its journal and metrics, and its text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from nereus.report.deciding import Deciding, deciding, deciding_lines
from nereus.report.display import bytes_text, change_text, in_order
from nereus.report.predictions import PredictionSummary, prediction_lines, predictions
from nereus.report.spells import Spell, spell_lines, spells
from nereus.runtime.journal import RunFolder, read_journal
from nereus.runtime.metrics import read_metrics

WINDOW_STEPS = 5
REWARD_MEAN, REWARD_STD, REWARD_COUNT = "critic/score/mean", "critic/score/std", "critic/score/count"
STEP_SECONDS, SYNC_SECONDS, PAUSE_SECONDS = "timing_s/step", "timing_s/update_weights", "timing_s/transition"
PHASE_PREFIX = "timing_s/"
SYNC_BYTES = "transition/sync_counted_bytes"
PARITY_MAX, PARITY_MEAN_EXP = "rollout_corr/logp_diff_max", "rollout_corr/mean_exp_abs_diff"
REWARD_SHUFFLED = "critic/score/shuffled_mean"
PEAK_PREFIX = "perf/ledger_bytes/slot_"  # followed by the slot
RESUMED = "resumed"
TERMINAL = ("transition_done", "transition_failed")

Row = Mapping[str, float]
Event = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardGain:
    """Mean reward of the first and the last `window_steps` steps; `error_ratio`: last - first in standard errors (may be inf).

    The standard error is that of a difference of two means: in each window the variance of all its samples (within
    and between its steps) over their count. Without stds and counts it is the variance of the step means over steps.
    """

    window_steps: int
    first_reward: float
    last_reward: float
    error_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CarryingStep:
    """The step that carried a change's interleaved work: its seconds beside the mean of its neighbours in its layout."""

    step: int
    step_seconds: float
    neighbour_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionSummary:
    """One change of layout: what it cost, part by part in the pause, interleaved with the step before, and outside.

    `why` says what it was for; `reason` why it failed, "" when it did not.
    """

    transition: str
    step: int
    before: str
    after: str
    pause_seconds: float
    seconds: Mapping[str, float]
    interleaved_seconds: Mapping[str, float]
    outside_seconds: Mapping[str, float]
    carrying_step: CarryingStep | None
    planned_bytes: int
    counted_bytes: int
    state_version: int
    reason: str
    why: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A run's outcome. NaN and empty mappings stand for what its records do not say.

    `training_seconds` runs from the beginning of the first step to the last event, without the time between an end
    and the next step of the resumed run; `transition_fraction` is the share of it that transitions stopped the job
    for, `changing_fraction` that with their interleaved work.
    `resumed_steps` are the steps after which the run was resumed.
    """

    folder: Path
    outcome: str
    steps: int
    planned_steps: int
    reward: RewardGain | None
    shuffled_reward: float
    phase_seconds: Mapping[str, float]
    transitions: tuple[TransitionSummary, ...]
    run_seconds: float
    training_seconds: float
    transition_fraction: float
    changing_fraction: float
    sync_seconds: float
    sync_bytes: float
    parity_max_nats: float
    mean_exp_abs: float
    peak_ledger_bytes: Mapping[str, int]
    resumed_steps: tuple[int, ...] = ()
    predicted: PredictionSummary | None = None
    deciding: Deciding | None = None
    spells: tuple[Spell, ...] = ()


def summarise(folder: Path) -> Summary:
    """The summary of the run in `folder`. Raises JournalError when its records cannot be read; absent metrics are none."""
    run = RunFolder(path=folder)
    metrics = read_metrics(run.metrics) if run.metrics.is_file() else []
    return fold(read_journal(run.events), metrics, folder)


def fold(events: Sequence[Event], metrics: Sequence[Row], folder: Path) -> Summary:
    """The summary that `events` and `metrics` (one row a step, in order) tell: pure."""
    stopped = _last(_since_resumed(events), "run_stopped")
    transitions = tuple(_transitions(events, metrics))
    training_seconds = seconds_of_training(events)
    paused_seconds = sum(_known(entry.pause_seconds for entry in transitions))
    changing_seconds = paused_seconds + sum(sum(entry.interleaved_seconds.values()) for entry in transitions)
    return Summary(
        folder=folder,
        outcome=str(stopped.get("reason", "unknown")) if stopped else "unfinished",
        steps=len(metrics),
        planned_steps=_planned_steps(events),
        reward=reward_gain(metrics),
        shuffled_reward=_mean(_column(metrics, REWARD_SHUFFLED)),
        phase_seconds=_phase_seconds(metrics),
        transitions=transitions,
        run_seconds=_end(events) - _at(_last(events, "run_started")) - _away_seconds(events),
        training_seconds=training_seconds,
        transition_fraction=paused_seconds / training_seconds if training_seconds > 0 else math.nan,
        changing_fraction=changing_seconds / training_seconds if training_seconds > 0 else math.nan,
        sync_seconds=_mean(_column(metrics, SYNC_SECONDS)),
        sync_bytes=_mean(_column(metrics, SYNC_BYTES)),
        parity_max_nats=max(_column(metrics, PARITY_MAX), default=math.nan),
        mean_exp_abs=_mean(_column(metrics, PARITY_MEAN_EXP)),
        peak_ledger_bytes=_peaks(metrics),
        resumed_steps=tuple(_count(event.get("step")) for event in events if event.get("kind") == RESUMED),
        predicted=predictions(events),
        deciding=deciding(events),
        spells=spells(events),
    )


def seconds_of_training(events: Sequence[Event]) -> float:
    """From the beginning of the first step to the last event, less what lay between an end and the next step."""
    return _end(events) - _training_start(events) - _idle_seconds(events)


def reward_gain(metrics: Sequence[Row]) -> RewardGain | None:
    """The gain from the first WINDOW_STEPS steps to the last (fewer when the windows would overlap); None below two."""
    rows = [row for row in metrics if math.isfinite(row.get(REWARD_MEAN, math.nan))]
    window = min(WINDOW_STEPS, len(rows) // 2)
    if window == 0:
        return None
    first, first_variance = _mean_and_variance(rows[:window])
    last, last_variance = _mean_and_variance(rows[-window:])
    error = math.sqrt(first_variance + last_variance)
    if error > 0:
        error_ratio = (last - first) / error
    else:
        error_ratio = 0.0 if last == first else math.copysign(math.inf, last - first)
    return RewardGain(window_steps=window, first_reward=first, last_reward=last, error_ratio=error_ratio)


def render(summary: Summary) -> str:
    """The text of `summary`, for people."""
    blocks = [_head(summary), _phases(summary), spell_lines(summary.spells), _moves(summary)]
    blocks += [deciding_lines(summary.deciding, summary.training_seconds), _sync(summary), _memory(summary)]
    blocks += [prediction_lines(summary.predicted), _places(summary)]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _mean_and_variance(rows: Sequence[Row]) -> tuple[float, float]:
    """The mean reward of `rows` and the variance of that mean (NaN for one step without std and count)."""
    means = [row[REWARD_MEAN] for row in rows]
    counts = [row.get(REWARD_COUNT, math.nan) for row in rows]
    stds = [row.get(REWARD_STD, math.nan) for row in rows]
    total = sum(counts)
    if all(map(math.isfinite, [*counts, *stds])) and total > 1:
        mean = sum(count * value for count, value in zip(counts, means, strict=True)) / total
        within = sum((count - 1) * std**2 for count, std in zip(counts, stds, strict=True))
        between = sum(count * (value - mean) ** 2 for count, value in zip(counts, means, strict=True))
        return mean, (within + between) / (total - 1) / total
    mean = _mean(means)
    if len(means) < 2:
        return mean, math.nan
    return mean, sum((value - mean) ** 2 for value in means) / (len(means) - 1) / len(means)


def _transitions(events: Sequence[Event], metrics: Sequence[Row]) -> Iterable[TransitionSummary]:
    """The transitions in the order of their end; what their end does not say is taken from their start."""
    begun = {str(event.get("transition")): event for event in events if event.get("kind") == "transition_started"}
    changed = [_count(event.get("step")) for event in begun.values()]
    for event in events:
        if event.get("kind") in TERMINAL:
            name = str(event.get("transition"))
            known = {**begun.pop(name, {}), **event}
            made = _transition(name, known, str(event.get("reason", "")))
            why = str(known["reason"]) if "reason" in known and "reason" not in event else ""
            yield replace(made, carrying_step=_carrying(metrics, changed, made.step), why=why)
    for name, event in begun.items():
        yield _transition(name, event, "did not end")


def _parts(known: Event, name: str) -> dict[str, float]:
    seconds = known.get(name)
    return {str(part): _number(value) for part, value in seconds.items()} if isinstance(seconds, Mapping) else {}


def _carrying(metrics: Sequence[Row], changes: Sequence[int], step: int) -> CarryingStep | None:
    """The step before a change, beside the two before it, unless these had changes of their own."""
    seconds = {_count(row.get("training/global_step")): _number(row.get(STEP_SECONDS)) for row in metrics}
    neighbours = [s for s in (step - 2, step - 3) if s in seconds and s not in changes and s + 1 not in changes]
    if step - 1 not in seconds or not neighbours:
        return None
    mean = sum(seconds[s] for s in neighbours) / len(neighbours)
    return CarryingStep(step=step - 1, step_seconds=seconds[step - 1], neighbour_seconds=mean)


def _transition(name: str, known: Event, reason: str) -> TransitionSummary:
    parts = _parts(known, "seconds")
    pause = _number(known.get("pause_seconds"))
    return TransitionSummary(
        transition=name,
        step=_count(known.get("step")),
        before=str(known.get("from", "")),
        after=str(known.get("to", "")),
        pause_seconds=pause if math.isfinite(pause) or not parts else sum(parts.values()),
        seconds=parts,
        interleaved_seconds=_parts(known, "interleaved_seconds"),
        outside_seconds=_parts(known, "outside_seconds"),
        carrying_step=None,
        planned_bytes=_count(known.get("planned_bytes")),
        counted_bytes=_count(known.get("counted_bytes")),
        state_version=_count(known.get("state_version")),
        reason=reason,
    )


def _phase_seconds(metrics: Sequence[Row]) -> dict[str, float]:
    """Mean seconds of every phase over the steps that have it, in the order of first sight; changes are not phases."""
    keys = dict.fromkeys(key for row in metrics for key in row if key.startswith(PHASE_PREFIX) and key != PAUSE_SECONDS)
    return {key.removeprefix(PHASE_PREFIX): _mean(_column(metrics, key)) for key in keys}


def _peaks(metrics: Sequence[Row]) -> dict[str, int]:
    """The largest ledger of every slot, in bytes, by the slot's number."""
    keys = {key for row in metrics for key in row if key.startswith(PEAK_PREFIX)}
    peaks = {key.removeprefix(PEAK_PREFIX): max(_column(metrics, key), default=math.nan) for key in keys}
    known = {slot: int(peak) for slot, peak in peaks.items() if math.isfinite(peak)}
    return dict(sorted(known.items(), key=lambda entry: (len(entry[0]), entry[0])))


def _since_resumed(events: Sequence[Event]) -> Sequence[Event]:
    """The events from the last resumption on; all where there was none."""
    places = [index for index, event in enumerate(events) if event.get("kind") == RESUMED]
    return events[places[-1] :] if places else events


def _away_seconds(events: Sequence[Event]) -> float:
    """How long the run stood between an end and its resumption."""
    pairs = pairwise(events)
    return sum(_known(_at(after) - _at(before) for before, after in pairs if after.get("kind") == RESUMED))


def _idle_seconds(events: Sequence[Event]) -> float:
    """From the last event before each resumption to the beginning of the next step, or to the end."""
    total, ended = 0.0, math.nan
    for before, event in pairwise(events):
        if event.get("kind") == RESUMED and not math.isfinite(ended):
            ended = _at(before)
        elif event.get("kind") == "step_done" and math.isfinite(ended):
            total, ended = total + _training_start([event]) - ended, math.nan
    return total + (_end(events) - ended if math.isfinite(ended) else 0.0)


def _planned_steps(events: Sequence[Event]) -> int:
    """`run.steps` of the last config that is told; 0 when none is."""
    started = next((event for event in reversed(events) if event.get("kind") in ("run_started", RESUMED)), None)
    config = started.get("config") if started else None
    run = config.get("run") if isinstance(config, Mapping) else None
    return _count(run.get("steps")) if isinstance(run, Mapping) else 0


def _training_start(events: Sequence[Event]) -> float:
    """When the first step began, in seconds since the epoch: a share of the time before it would look too good."""
    first = next((event for event in events if event.get("kind") == "step_done"), None)
    metrics = first.get("metrics") if first else None
    seconds = _number(metrics.get(STEP_SECONDS)) if isinstance(metrics, Mapping) else math.nan
    return _at(first) - seconds


def _end(events: Sequence[Event]) -> float:
    return _at(events[-1]) if events else math.nan


def _at(event: Event | None) -> float:
    return _number(event.get("at_seconds")) if event else math.nan


def _last(events: Sequence[Event], kind: str) -> Event | None:
    return next((event for event in reversed(events) if event.get("kind") == kind), None)


def _column(metrics: Sequence[Row], key: str) -> list[float]:
    return _known(row.get(key, math.nan) for row in metrics)


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _count(value: object) -> int:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0


def _head(summary: Summary) -> list[str]:
    planned = f" of {summary.planned_steps}" if summary.planned_steps else ""
    took = f", {summary.run_seconds:.1f} s" if math.isfinite(summary.run_seconds) else ""
    lines = [f"run {summary.folder.name}: {summary.outcome}, {summary.steps}{planned} steps{took}"]
    if summary.resumed_steps:
        lines.append(f"resumed after step {', '.join(map(str, summary.resumed_steps))}; steps done twice count once")
    if summary.reward is not None:
        gain = summary.reward
        lines.append(
            f"reward: {gain.first_reward:.3f} in the first {gain.window_steps} steps, {gain.last_reward:.3f} in the last "
            f"{gain.window_steps}: {gain.last_reward - gain.first_reward:+.3f}, {gain.error_ratio:+.1f} standard errors"
        )
    if math.isfinite(summary.shuffled_reward):
        lines.append(f"reward of the same responses on another sample's prompt: {summary.shuffled_reward:.3f}")
    return lines


def _phases(summary: Summary) -> list[str]:
    if not summary.phase_seconds:
        return []
    rows = [(name, f"{seconds:.3f}") for name, seconds in summary.phase_seconds.items()]
    return ["mean seconds of a step's phases", *_aligned(rows)]


def _moves(summary: Summary) -> list[str]:
    if not summary.transitions:
        return ["transitions: none"]
    lines = ["transitions"]
    for entry in summary.transitions:
        lines.append(f"  before step {entry.step}: {change_text(entry.before, entry.after)}")
        if entry.reason:
            lines.append(f"    failed: {entry.reason}")
            continue
        lines += [f"    {entry.why}"] if entry.why else []
        parts = ", ".join(f"{part} {entry.seconds[part]:.3f}" for part in in_order(entry.seconds))
        lines.append(f"    pause {entry.pause_seconds:.3f} s{f' ({parts})' if parts else ''}")
        same = "equal" if entry.planned_bytes == entry.counted_bytes else "NOT EQUAL"
        for place, taken in (("interleaved", entry.interleaved_seconds), ("outside", entry.outside_seconds)):
            if taken:
                each = ", ".join(f"{part} {taken[part]:.3f}" for part in in_order(taken))
                lines.append(f"    {place} {sum(taken.values()):.3f} s ({each})")
        if (carried := entry.carrying_step) is not None and entry.interleaved_seconds:
            beside = f"{carried.neighbour_seconds:.3f} s of its neighbours"
            lines.append(
                f"    step {carried.step}, which carried the interleaved work: {carried.step_seconds:.3f} s, {beside}"
            )
        counts = f"planned {entry.planned_bytes:,}, counted {entry.counted_bytes:,}: {same}"
        lines.append(f"    bytes {counts} ({bytes_text(entry.counted_bytes)}); state version {entry.state_version}")
    if math.isfinite(summary.transition_fraction):
        share = f"{summary.transition_fraction:.2%} of the {summary.training_seconds:.1f} s of training"
        lines.append(f"  share of run time, pauses alone: {share}")
        lines.append(f"  share of run time, pauses and interleaved work: {summary.changing_fraction:.2%}")
    return lines


def _sync(summary: Summary) -> list[str]:
    lines = []
    if math.isfinite(summary.sync_seconds):
        moved = f", {summary.sync_bytes:,.0f} bytes" if math.isfinite(summary.sync_bytes) else ""
        lines.append(f"weight sync, mean of a step: {summary.sync_seconds:.3f} s{moved}")
    if math.isfinite(summary.parity_max_nats):
        mean = f", mean exp|dlogp| {summary.mean_exp_abs:.6f}" if math.isfinite(summary.mean_exp_abs) else ""
        lines.append(f"parity of trainer and vLLM: max |dlogp| {summary.parity_max_nats:.2e}{mean}")
    return lines


def _memory(summary: Summary) -> list[str]:
    if not summary.peak_ledger_bytes:
        return []
    rows = [(f"slot {slot}", f"{peak:,}") for slot, peak in summary.peak_ledger_bytes.items()]
    return ["peak ledger bytes", *_aligned(rows)]


def _places(summary: Summary) -> list[str]:
    run = RunFolder(path=summary.folder)
    places = [("config", run.config), ("journal", run.events), ("metrics", run.metrics), ("logs", run.logs)]
    places += [("resumed", run.resumed), ("checkpoints", run.checkpoints)]
    places += [("rollouts", run.rollouts), ("model", run.model), ("wandb", run.path / "wandb")]
    found = [(name, str(path)) for name, path in places if path.exists()]
    width = max((len(name) for name, _ in found), default=0)
    return ["written to", *(f"  {name:<{width}}  {path}" for name, path in found)] if found else []


def _aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Names to the left, numbers to the right."""
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"  {name:<{name_width}}  {value:>{value_width}}" for name, value in rows]
