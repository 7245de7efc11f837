"""Predictions beside measurements on the running job: the probe, each step's prediction before it, and what came of it.

Everything it learns goes through the journal and `nereus.observe.after`, so that folding the journal gives the same state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus.config import Config
from nereus.costs.profile import Profile, recorded, resized
from nereus.costs.speeds import is_late
from nereus.errors import PlanOutgrown
from nereus.layout import Plan
from nereus.observe import (
    Expected,
    Observed,
    after,
    by_toll,
    calibrated_tolls,
    expect,
    expected_change,
    expected_seconds,
    fold,
    memory_parts,
    outgrown,
    slow_phases,
    with_memory,
)
from nereus.runtime.changes import Transaction
from nereus.runtime.journal import Journal
from nereus.runtime.phases import StepRecord
from nereus.runtime.pool import SlotPool
from nereus.runtime.probe import Place, Probe, pace, record, supposed_of
from nereus.runtime.slot import Slot
from nereus.transitions.durations import HOST_TOLLS
from nereus.workload import measured_phases

PREDICTED, ERROR = "plan/predicted", "plan/error"


@dataclass(kw_only=True)
class Observer:
    """Mutable: `state` is what is known. `begin` comes first, then `before_step` and `after_step` around every step."""

    config: Config
    pool: SlotPool
    journal: Journal
    sampled: bool = True
    watching: bool = False
    """Whether slots are checked for their speeds."""
    note: Callable[[str], None] = lambda _: None
    """Tells the user what is worth a line."""

    def __post_init__(self) -> None:
        self.state = Observed()
        self._expected: Expected | None = None
        self._numbers: tuple[int, ...] = ()
        self._places: dict[str, Place] = {}
        self._change_metrics: dict[str, float] = {}
        self.told: Mapping[str, Any] | None = None  # of the last step: what was journalled, and its fresh stages

    def begin(self, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        """Goes on from the `earlier` records of the run, and probes the slots unless they have been probed there."""
        self.state = fold(earlier)
        probe = Probe(self.config, self.pool)
        self._places, self._numbers = probe.places(), tuple(self.pool.numbers)
        for known in reversed([each for each in earlier if each.get("kind") == "probe"]):
            profile = recorded(known["profile"])
            if known["places"] == self._places and profile.dtype_bytes == self._supposed().dtype_bytes:
                fields = {"reused_seq": known["seq"], "places": self._places, "profile": profile.record()}
                self._tell("probe", {**fields, "processes": self._processes()})
                return
        found = record(probe, self._places, probe.run(self._places))
        self._tell("probe", {**found, "processes": self._processes()})
        if self.watching and (seconds := probe.seconds_by_slot()):
            self._tell("speeds", {"step": 0, "seconds": seconds, "processes": self._processes()})

    def _processes(self) -> dict[str, str]:
        """Slot -> a name of its process, which stays when numbers change."""
        return {str(slot): f"{found.address}:{found.pid}" for slot, found in sorted(self.pool.contacts.items())}

    def _supposed(self) -> Profile:
        return supposed_of(self.config, self._places)

    def _resize(self) -> None:
        """Slots came or went: what was measured stands, only their number is another. Nothing is timed again."""
        before = self._supposed()
        self._places, self._numbers = Probe(self.config, self.pool).places(), tuple(self.pool.numbers)
        profile = self.state.profile or before
        made = resized(profile, before, self._supposed())
        self._tell("probe", {"places": self._places, "profile": made.record(), "processes": self._processes()})

    def _tell(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Into the journal and into the state, alike."""
        self.journal.append(kind, **fields)
        self.state = after(self.state, {"kind": kind, **json.loads(json.dumps(fields))})

    # -- steps ---------------------------------------------------------------------------------------------------

    def before_step(self, step: int, plan: Plan) -> Expected:
        """What step `step` will take under `plan`; from here on the slots' peaks are those of this step."""
        if tuple(self.pool.numbers) != self._numbers:
            self._resize()
        expected = expect(self.state, self.config, plan, step, sampled=self.sampled)
        self._tell("prediction", expected.record())
        self.pool.call_all("apply", begin_peaks)
        self._expected = expected
        return expected

    def after_step(self, step: StepRecord, plan: Plan) -> None:
        """Learns from the step, and adds `plan/predicted/*` and `plan/error/*` to its metrics.

        A step that ended under another plan or on other slots than it began with says nothing of its prediction.
        """
        expected, self._expected, self.told = self._expected, None, None
        if expected is None or step.batch is None or expected.plan_id != plan.plan_id:
            return
        if tuple(self.pool.numbers) != self._numbers:
            return
        step.metrics |= self._change_metrics
        self._change_metrics = {}
        found = self.pool.call_all("apply", end_peaks)
        early = "interleaved" in step.seconds  # a change's new state stood beside the step's: no peak of the plan's own
        peaks = {} if early else {str(slot): found[slot] for slot in sorted(found)}
        seconds = measured_phases(step.seconds)
        memory = memory_parts(self.config, plan, step.batch.width_tokens)
        expected = with_memory(expected, memory, self.state.margin)
        step.metrics |= compared(expected, seconds, peaks)
        fields = {
            "step": step.step,
            "seconds": seconds,
            "batch": step.batch.record(),
            "peak_bytes": peaks,
            "memory_bytes": memory,
            "memory_expected_bytes": dict(expected.memory_expected),
            "memory_safe_bytes": dict(expected.memory_safe),
        }
        for phase, usual in slow_phases(expected, seconds).items():
            self.journal.append(
                "slow_phase", step=step.step, phase=phase, seconds=seconds[phase], expected_seconds=usual
            )
            self.note(f"step {step.step}: {phase} took {seconds[phase]:.1f} s, {usual:.1f} s were expected")
        self._check_speeds(step.step, expected, sum(seconds.values()))
        self._tell("observed", fields)
        self.told = {**fields, "fresh": expected.fresh}

    def refusal(self, step: int, plan: Plan, width_tokens: int) -> PlanOutgrown | None:
        """Why `plan` may not work on rows so wide in `step`; None where it may."""
        return outgrown(self.state, self.config, plan, step, width_tokens)

    def _check_speeds(self, step: int, expected: Expected, measured_seconds: float) -> None:
        """Has all slots time the same piece where one may have become slow, or fast again."""
        if not self.watching or len(self._numbers) < 2:
            return
        whole = expected.whole
        late = is_late(measured_seconds, whole.mean_seconds, whole.deviation_seconds) and not expected.is_new
        if not self.state.speeds.due(step, late=late):
            return
        started = time.monotonic()
        found = self.pool.call_all("apply", pace, self.config.model)
        seconds = {str(slot): found[slot] for slot in sorted(found)}
        took = time.monotonic() - started
        self._tell(
            "speeds",
            {"step": step, "late": late, "seconds": seconds, "processes": self._processes(), "took_seconds": took},
        )

    # -- changes of plan -----------------------------------------------------------------------------------------

    def changed(self, transaction: Transaction) -> None:
        """Learns from a change that was committed; the next is priced with what was learnt.

        What it was expected to take is worked out here, from the state before it, so that it costs the pause nothing.
        """
        done = transaction.record
        if not done.state_version:
            return
        expected = expected_seconds(self.state, transaction.planned.graph)
        seconds = by_toll({kind: value for kind, value in done.seconds.items() if kind != "plan"})
        for toll, value in by_toll(done.interleaved_seconds).items():
            seconds[toll] = seconds.get(toll, 0.0) + value
        known = {toll: value for toll, value in seconds.items() if toll in expected}
        found = expected_change(self.state, {toll: expected[toll] for toll in known})
        prior = sum(expected[toll] for toll in known)
        self._tell(
            "transition_observed",
            {
                "transition": done.transition,
                "expected_seconds": expected,
                "predicted_seconds": [found.mean_seconds, found.deviation_seconds],
                "prior_seconds": prior,
                "seconds": known,
            },
        )
        total = sum(known.values())
        self._change_metrics = {f"{PREDICTED}/transition_s": found.mean_seconds}
        if total > 0:
            self._change_metrics[f"{ERROR}/transition"] = found.mean_seconds / total - 1
        transaction.job.tolls = calibrated_tolls(self.state, HOST_TOLLS)


def compared(expected: Expected, seconds: Mapping[str, float], peaks: Mapping[str, int]) -> dict[str, float]:
    """Metrics of a prediction beside what was measured; errors are shares of the measurement, above 0 when too high."""
    metrics = {
        f"{PREDICTED}/step_s": expected.whole.mean_seconds,
        f"{PREDICTED}/step_deviation_s": expected.whole.deviation_seconds,
        f"{PREDICTED}/step_prior_s": expected.prior_seconds,
    }
    for phase, prediction in expected.phases.items():
        metrics[f"{PREDICTED}/{phase}_s"] = prediction.mean_seconds
        if seconds.get(phase, 0.0) > 0:
            metrics[f"{ERROR}/{phase}"] = prediction.mean_seconds / seconds[phase] - 1
    measured = sum(seconds.values())
    if measured > 0:
        metrics[f"{ERROR}/step"] = expected.whole.mean_seconds / measured - 1
    for slot, size_bytes in expected.memory_expected.items():
        metrics[f"{PREDICTED}/memory_bytes/slot_{slot}"] = size_bytes
        metrics[f"{PREDICTED}/memory_safe_bytes/slot_{slot}"] = expected.memory_safe[slot]
        if peaks.get(slot, 0) > 0:
            metrics[f"{ERROR}/memory/slot_{slot}"] = size_bytes / peaks[slot] - 1
    return metrics


# -- on a slot ---------------------------------------------------------------------------------------------------------

_KEPT: dict[str, int] = {}
"""Peaks from before the running step, put back after it: the ledger's own are those since the job's start."""


def begin_peaks(slot: Slot) -> None:
    """The ledger's peaks begin anew; the earlier ones are kept."""
    for phase, peak in slot.ledger.peaks.items():
        _KEPT[phase] = max(_KEPT.get(phase, 0), peak)
    slot.ledger.peaks.clear()


def end_peaks(slot: Slot) -> int:
    """The largest peak since `begin_peaks`, in bytes; the ledger has the earlier ones back."""
    found = max(slot.ledger.peaks.values(), default=slot.ledger.total_bytes)
    for phase, peak in _KEPT.items():
        slot.ledger.peaks[phase] = max(slot.ledger.peaks.get(phase, 0), peak)
    _KEPT.clear()
    return found
