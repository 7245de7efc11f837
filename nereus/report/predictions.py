"""How well a run's steps, peaks and changes were predicted before they happened: a fold of its journal, and its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any, cast

LAST_STEPS = 10

Event = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionSummary:
    """Median errors as shares of what was measured: |predicted / measured - 1|.

    `prior_share` is of all steps with nothing learnt but the probe, `last_share` of the last `last_steps` as they were
    predicted before they ran, `new_plan_share` of the `new_plans_count` steps that were a plan's first. `inside_share` is the
    part of steps within two stated deviations. `memory_share` is of slots' peaks, with the rows that the steps had;
    `unsafe_peaks_count` of the run's `peaks_count` were above what was held safe. `change_share` is of changes of plan.
    """

    steps: int
    prior_share: float
    last_steps: int
    last_share: float
    new_plans_count: int
    new_plan_share: float
    inside_share: float
    phase_share: Mapping[str, float]
    memory_share: float
    peaks_count: int
    unsafe_peaks_count: int
    change_share: float


def predictions(events: Sequence[Event]) -> PredictionSummary | None:
    """What the journal says of its predictions; None where no step was predicted and measured."""
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = []
    pending: Mapping[str, Any] | None = None
    change_errors: list[float] = []
    for event in cast("Sequence[Mapping[str, Any]]", events):
        if event.get("kind") == "prediction":
            pending = event
        elif event.get("kind") == "observed" and pending is not None and pending["step"] == event["step"]:
            pairs.append((pending, event))
            pending = None
        elif event.get("kind") == "transition_observed":
            change_errors.append(_error(event["predicted_seconds"][0], sum(event["seconds"].values())))
    if not pairs:
        return None
    return _summary(pairs, change_errors)


def _summary(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], change_errors: Sequence[float]
) -> PredictionSummary:
    totals = [sum(measured["seconds"].values()) for _, measured in pairs]
    errors = [_error(said["step_seconds"][0], total) for (said, _), total in zip(pairs, totals, strict=True)]
    prior = [_error(said["prior_seconds"], total) for (said, _), total in zip(pairs, totals, strict=True)]
    new = [error for (said, _), error in zip(pairs, errors, strict=True) if said["is_new"]]
    inside = [
        abs(said["step_seconds"][0] - total) <= 2 * said["step_seconds"][1]
        for (said, _), total in zip(pairs, totals, strict=True)
    ]
    last = pairs[-LAST_STEPS:]
    phases = dict.fromkeys(phase for said, _ in last for phase in said["seconds"])
    return PredictionSummary(
        steps=len(pairs),
        prior_share=_median(prior),
        last_steps=len(last),
        last_share=_median(errors[-LAST_STEPS:]),
        new_plans_count=len(new),
        new_plan_share=_median(new),
        inside_share=sum(inside) / len(inside),
        phase_share={
            phase: _median([_error(s["seconds"][phase][0], m["seconds"][phase]) for s, m in last if _has(s, m, phase)])
            for phase in phases
        },
        memory_share=_median([_error(expected, peak) for expected, _, peak in _peaks(last)]),
        peaks_count=len(_peaks(pairs)),
        unsafe_peaks_count=sum(peak > safe for _, safe, peak in _peaks(pairs)),
        change_share=_median(change_errors),
    )


def _peaks(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[tuple[float, float, float]]:
    """(expected, held safe, measured) bytes of slots' peaks, with the rows that each step turned out to have."""
    found: list[tuple[float, float, float]] = []
    for said, measured in pairs:
        by = measured if "memory_expected_bytes" in measured else said  # of journals from before rows could change
        expected, safe = by["memory_expected_bytes"], by["memory_safe_bytes"]
        found += [
            (expected[slot], safe[slot], peak) for slot, peak in measured["peak_bytes"].items() if slot in expected
        ]
    return found


def _has(said: Mapping[str, Any], measured: Mapping[str, Any], phase: str) -> bool:
    return phase in said["seconds"] and phase in measured["seconds"]


def _error(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1) if measured > 0 else float("nan")


def _median(values: Sequence[float]) -> float:
    known = [value for value in values if isfinite(value)]
    return median(known) if known else float("nan")


def prediction_lines(found: PredictionSummary | None) -> list[str]:
    """The text, line by line; nothing where nothing was predicted."""
    if found is None:
        return []
    lines = [
        "error of the step-time prediction, median of |predicted / measured - 1|",
        f"  before calibration (probe and priors only)  {found.prior_share:6.1%}   of {found.steps} steps",
        f"  calibrated, before each of the last steps   {found.last_share:6.1%}   of {found.last_steps} steps",
    ]
    if found.new_plans_count:
        lines.append(
            f"  first steps of plans not run before         {found.new_plan_share:6.1%}   of {found.new_plans_count}"
        )
    lines.append(f"  within two stated deviations                {found.inside_share:6.1%}   of {found.steps} steps")
    phases = ", ".join(f"{phase} {share:.1%}" for phase, share in found.phase_share.items())
    lines.append(f"  by phase, last steps: {phases}")
    if isfinite(found.memory_share):
        above = f"{found.unsafe_peaks_count} of {found.peaks_count} peaks above what was held safe"
        lines.append(f"  peak memory of a slot, last steps: {found.memory_share:.1%}; {above}")
    if isfinite(found.change_share):
        lines.append(f"  seconds of a change of plan: {found.change_share:.1%}")
    return lines
