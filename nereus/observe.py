"""What is known of the running job: a fold of its journal into calibrations, a memory margin, tolls, the next step's batch.

  probe                  the profile of the slots: from it come the terms, and the priors of their coefficients
  prediction             what the next step was expected to take, with the terms it was made of
  observed               what the step took, phase by phase, its batch, its slots' peaks and what shapes say of them
  transition_observed    what a change was expected to take and what it took, by kind of operation
  resumed, recovered     the engines are new ones

`expect` says what a step will take before it runs, from the state before it; `after` takes one journal record. Nothing
else changes the state, so folding a journal again gives the same state, and the same predictions, to the bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import hypot
from typing import Any, cast

from nereus.config import Config
from nereus.costs.calibrate import (
    OVERHEAD,
    STATE,
    Calibration,
    Factor,
    Margin,
    Prediction,
    Prior,
    margin,
    observe,
    observe_peak,
    predict,
    start,
)
from nereus.costs.coefficients import EAGER_KEPT_SHARE, eager_prior, prior_for
from nereus.costs.profile import Profile, recorded
from nereus.costs.speeds import Speeds
from nereus.costs.training import Terms
from nereus.errors import PlanOutgrown
from nereus.layout import Plan
from nereus.lengths import limit_row_tokens
from nereus.memory import plan_peaks
from nereus.transitions.durations import Tolls
from nereus.transitions.graph import MOVES, TransitionGraph
from nereus.workload import (
    PHASE_KINDS,
    PhaseKind,
    StepBatch,
    largest_batch,
    recorded_batch,
    step_terms,
)

KIND_TERMS: dict[PhaseKind, tuple[str, ...]] = {
    "sync": ("sync", "sync_tensors", "call", "first_use"),
    "gen": (
        *("prefill", "decode_gemm", "decode_experts", "decode_cache", "decode_tp", "decode_launch"),
        *("engine_step", "engine_token", "call", "first_use"),
    ),
    "infer": (
        *("gemm", "experts", "attention", "memory", "launch", "host", "head", "tp", "cp", "ep", "pp", "bubble"),
        *("step", "call", "first_use"),
    ),
    "train": (
        *("gemm", "experts", "attention", "memory", "launch", "host", "recompute", "head", "tp", "cp", "ep", "pp"),
        *("bubble", "dp", "optimizer", "step", "call", "first_use"),
    ),
    "rest": ("step_framework", "sample_framework"),
}
"""The terms whose coefficients are calibrated together: those of one kind of phase."""
FIRST_NOISE_SHARE, NOISE_KEPT_SHARE, MOST_SURPRISE_SHARE = 0.03, 0.85, 0.5
"""What slows all phases of a step at once, as a share of it: before any was measured; how much of it stays at each further
step; and the largest surprise that counts."""
TOLL_FIELDS = {
    "quiesce": "quiesce_seconds",
    "allocate": "allocate_seconds",
    "release": "release_seconds",
    "build_groups": "group_seconds",
    "destroy_groups": "destroy_group_seconds",
    "activate": "activate_seconds",
    "commit": "commit_seconds",
}
"""Kind of operation -> the field of Tolls that is its price."""
RATE = "rate"
"""What moves bytes, of whatever kind: what it takes over what was expected corrects `Tolls.rate_share`."""
REMEMBERED = frozenset({"build_engine"})
"""Kinds whose seconds the job remembers itself, engine by engine: nothing is learnt on top of that."""
REMEMBERED_SHARE = 0.3
DRIVER_SECONDS = {"wait": 0.05, "sync": 0.05}
"""Parts of a pause that are no operation of the graph: between stretches, and the next weight sync's plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A step's prediction before it runs.

    `prior_seconds` is the step's without anything learnt; `fresh` are the stages whose engines have not run yet, `is_new` a
    plan that has not. `memory` is slot -> part -> bytes that shapes say; `memory_expected` and `memory_safe` are with what
    was learnt of them.
    """

    step: int
    plan_id: str
    is_new: bool
    stages: Mapping[str, str]
    fresh: tuple[str, ...]
    terms: Mapping[str, Terms]
    phases: Mapping[str, Prediction]
    whole: Prediction
    prior_seconds: float
    memory: Mapping[str, Mapping[str, float]]
    memory_expected: Mapping[str, float]
    memory_safe: Mapping[str, float]

    def record(self) -> dict[str, Any]:
        """As the journal holds it."""
        return {
            "step": self.step,
            "plan_id": self.plan_id,
            "is_new": self.is_new,
            "stages": dict(self.stages),
            "fresh": list(self.fresh),
            "terms": {phase: dict(terms) for phase, terms in self.terms.items()},
            "seconds": {phase: [p.mean_seconds, p.deviation_seconds] for phase, p in self.phases.items()},
            "step_seconds": [self.whole.mean_seconds, self.whole.deviation_seconds],
            "prior_seconds": self.prior_seconds,
            "memory_bytes": {slot: dict(parts) for slot, parts in self.memory.items()},
            "memory_expected_bytes": dict(self.memory_expected),
            "memory_safe_bytes": dict(self.memory_safe),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The state. `ran` is stage -> the cut that its present engine ran under; `plans` are those that ran.

    `noise_share` is how far whole steps of plans that ran fall from their predictions, `carried` the width in tokens of the
    widest rows that each has worked on within slots' budgets of `budget_bytes`. `batch` is that of step `last_step`. `pending`
    is the prediction of the step under way, as the journal has it.
    """

    profile: Profile | None = None
    speeds: Speeds = field(default_factory=Speeds)
    calibrations: Mapping[PhaseKind, Calibration] = field(default_factory=dict[PhaseKind, Calibration])
    margin: Margin = field(default_factory=margin)
    tolls: Mapping[str, Factor] = field(default_factory=dict[str, Factor])
    noise_share: float = FIRST_NOISE_SHARE
    batch: StepBatch | None = None
    last_step: int = 0
    ran: Mapping[str, str] = field(default_factory=dict[str, str])
    plans: tuple[str, ...] = ()
    carried: Mapping[str, int] = field(default_factory=dict[str, int])
    budget_bytes: int = 0
    pending: Mapping[str, Any] | None = None


def fold(records: Iterable[Mapping[str, Any]]) -> Observed:
    """The state after these records of a journal."""
    state = Observed()
    for record in records:
        state = after(state, record)
    return state


def after(state: Observed, record: Mapping[str, Any]) -> Observed:
    """The state after one more record; records of other kinds change nothing."""
    match record.get("kind"):
        case "probe":
            return _probed(state, recorded(record["profile"]), record.get("processes", {}))
        case "speeds":
            return _checked(state, record)
        case "run_started" | "resumed":
            return _begun(state, record)
        case "recovered":
            return replace(state, ran={}, pending=None)
        case "prediction":
            return replace(state, pending=record)
        case "observed":
            return _stepped(state, record)
        case "transition_observed":
            return _changed(state, record)
        case _:
            return state


def _begun(state: Observed, record: Mapping[str, Any]) -> Observed:
    """A run begins or goes on, maybe with a smaller budget: what was carried within a larger one says nothing then."""
    budget_bytes = record.get("config", {}).get("fleet", {}).get("slot_budget_bytes", 0)
    carried: Mapping[str, int] = {} if budget_bytes < state.budget_bytes else state.carried
    return replace(state, ran={}, pending=None, carried=carried, budget_bytes=budget_bytes)


def prior_of(kind: PhaseKind, profile: Profile) -> Prior:
    """What is believed of a kind's coefficients: eager processes on a CPU, or RL systems on a device of the catalogue."""
    terms = KIND_TERMS[kind]
    if profile.device == "cpu":
        return eager_prior(terms)
    precision = "bf16"
    return replace(prior_for(terms, profile.device, precision, "rl"), kept_share=EAGER_KEPT_SHARE)


def _probed(state: Observed, profile: Profile, processes: Mapping[str, str]) -> Observed:
    """Calibrations start anew on another kind of slot; on the same kind what was learnt is kept."""
    if processes:  # those that are there now, whatever their numbers were
        profile = replace(profile, slow=state.speeds.slow(_numbered(processes)))
    known = state.profile
    if known is not None and (known.device, known.dtype_bytes) == (profile.device, profile.dtype_bytes):
        return replace(state, profile=profile)
    calibrations = {kind: start(prior_of(kind, profile)) for kind in KIND_TERMS}
    return replace(state, profile=profile, calibrations=calibrations, pending=None)


def _checked(state: Observed, record: Mapping[str, Any]) -> Observed:
    """The slots' speeds after a check. Where one is told anew, the step before it is measured against no prediction."""
    processes = _numbered(record["processes"])
    seconds = {processes[int(slot)]: each for slot, each in record["seconds"].items()}
    speeds = state.speeds.observe(seconds, record["step"], late=record.get("late", False))
    slow = speeds.slow(processes)
    if state.profile is None or slow == state.profile.slow:
        return replace(state, speeds=speeds)
    return replace(state, speeds=speeds, profile=replace(state.profile, slow=slow), pending=None)


def _numbered(processes: Mapping[str, str]) -> dict[int, str]:
    return {int(slot): name for slot, name in processes.items()}


# -- steps -------------------------------------------------------------------------------------------------------------


def expect(state: Observed, config: Config, plan: Plan, step: int, *, sampled: bool = True) -> Expected:
    """What step `step` under `plan` will take. ValueError before a profile is known."""
    profile = state.profile
    if profile is None:
        raise ValueError("no probe record was seen: nothing is known of the slots")
    batch = replace(state.batch or largest_batch(config, step), sampled=sampled)
    stages = {name: _cut(stage) for name, stage in plan.stages()}
    fresh = tuple(name for name in stages if state.ran.get(name) != stages[name])
    terms = step_terms(config, plan, batch, profile, fresh)
    phases = {phase: predict(state.calibrations[PHASE_KINDS[phase]], each) for phase, each in terms.items()}
    priors: dict[PhaseKind, Calibration] = {
        kind: start(calibration.prior) for kind, calibration in state.calibrations.items()
    }
    expected = Expected(
        step=step,
        plan_id=plan.plan_id,
        is_new=plan.plan_id not in state.plans,
        stages=stages,
        fresh=fresh,
        terms=terms,
        phases=phases,
        whole=whole_step(state.calibrations, terms, state.noise_share),
        prior_seconds=whole_step(priors, terms).mean_seconds,
        memory={},
        memory_expected={},
        memory_safe={},
    )
    memory = memory_parts(config, plan, limit_row_tokens(config.data, step))
    return with_memory(expected, memory, state.margin)


def with_memory(expected: Expected, memory: Mapping[str, Mapping[str, float]], learnt: Margin) -> Expected:
    """The same with peaks for the rows that the step turned out to have."""
    judge = learnt.unseen_bytes if expected.is_new else learnt.safe_bytes
    return replace(
        expected,
        memory=memory,
        memory_expected={slot: learnt.expected_bytes(size) for slot, size in memory.items()},
        memory_safe={slot: judge(size) for slot, size in memory.items()},
    )


SLOW_RATIO, SLOW_SECONDS = 3.0, 0.5
"""A phase is worth a word when it took so many times its prediction, with two deviations, and so much more."""


def slow_phases(expected: Expected, seconds: Mapping[str, float]) -> dict[str, float]:
    """Phase -> seconds that were expected, of those that took far longer. None where an engine worked for the first time."""
    if expected.fresh:
        return {}
    found: dict[str, float] = {}
    for phase, prediction in expected.phases.items():
        limit = SLOW_RATIO * (prediction.mean_seconds + 2 * prediction.deviation_seconds)
        if seconds.get(phase, 0.0) > limit + SLOW_SECONDS:
            found[phase] = prediction.mean_seconds
    return found


def memory_parts(config: Config, plan: Plan, width_tokens: int) -> dict[str, dict[str, float]]:
    """Slot -> part -> bytes of its predicted peak with rows of so many tokens, before any margin."""
    found: dict[str, dict[str, float]] = {}
    for peak in plan_peaks(config, plan, width_tokens):
        overhead = float(peak.components.get("overhead", 0))
        found[str(peak.slot)] = {OVERHEAD: overhead, STATE: peak.total_bytes - overhead}
    return found


def outgrown(state: Observed, config: Config, plan: Plan, step: int, width_tokens: int) -> PlanOutgrown | None:
    """Why `plan` may not work on the rows that step `step` has; None where it may.

    Rows that it has carried before are no question. Wider ones are judged by the expected peak and what a measured one was
    above that at most.
    """
    if width_tokens <= state.carried.get(plan.plan_id, 0):
        return None
    budget, missed = config.fleet.slot_budget_bytes, state.margin.largest_bytes
    peaks = plan_peaks(config, plan, width_tokens)
    parts = memory_parts(config, plan, width_tokens)
    needed = {peak.slot: state.margin.expected_bytes(parts[str(peak.slot)]) + missed for peak in peaks}
    worst = max(peaks, key=lambda peak: needed[peak.slot])
    if needed[worst.slot] <= budget:
        return None
    needs = f"{needed[worst.slot]:,.0f} bytes in {worst.phase} ({worst.largest_parts})"
    return PlanOutgrown(step, str(plan), width_tokens, worst.slot, needs, budget)


def whole_step(
    calibrations: Mapping[PhaseKind, Calibration], phases: Mapping[str, Terms], noise_share: float = FIRST_NOISE_SHARE
) -> Prediction:
    """The step as the sum of its phases; what phases of one kind do not know, they do not know together."""
    summed: dict[PhaseKind, dict[str, float]] = {}
    for phase, terms in phases.items():
        total = summed.setdefault(PHASE_KINDS[phase], {})
        for name, seconds in terms.items():
            total[name] = total.get(name, 0.0) + seconds
    parts = [predict(calibrations[kind], terms) for kind, terms in summed.items()]
    mean = sum(part.mean_seconds for part in parts)
    return Prediction(
        mean_seconds=mean, deviation_seconds=hypot(noise_share * mean, *(part.deviation_seconds for part in parts))
    )


def _cut(stage: object) -> str:
    """A short name of how and where a stage is cut."""
    return hashlib.sha256(repr(stage).encode()).hexdigest()[:10]


def _stepped(state: Observed, record: Mapping[str, Any]) -> Observed:
    """One step measured. Without a prediction of the same step (a torn journal) only its batch is learnt."""
    batch = recorded_batch(record["batch"]) if record.get("batch") else state.batch
    pending = state.pending
    if pending is None or pending["step"] != record["step"] or state.profile is None:
        return replace(state, batch=batch, last_step=record["step"], pending=None)
    calibrations = dict(state.calibrations)
    measured_seconds = {phase: seconds for phase, seconds in record["seconds"].items() if phase in pending["terms"]}
    for phase, seconds in measured_seconds.items():
        if seconds > 0:
            kind = PHASE_KINDS[phase]
            calibrations[kind] = observe(calibrations[kind], pending["terms"][phase], seconds)
    learnt, unseen = state.margin, pending["plan_id"] not in state.carried
    for slot, measured in record.get("peak_bytes", {}).items():
        parts = (record.get("memory_bytes") or pending["memory_bytes"]).get(slot)
        if parts and measured > 0:
            learnt = observe_peak(learnt, parts, measured, unseen=unseen)
    return replace(
        state,
        calibrations=calibrations,
        margin=learnt,
        noise_share=_noise(state, pending, sum(measured_seconds.values())),
        batch=batch,
        last_step=record["step"],
        ran=dict(cast("Mapping[str, str]", pending["stages"])),
        plans=tuple(dict.fromkeys((*state.plans, pending["plan_id"]))),
        carried=_carried(state, pending["plan_id"], batch),
        pending=None,
    )


def _carried(state: Observed, plan_id: str, batch: StepBatch | None) -> Mapping[str, int]:
    width = 0 if batch is None else batch.width_tokens
    return {**state.carried, plan_id: max(width, state.carried.get(plan_id, 0))}


def _noise(state: Observed, pending: Mapping[str, Any], measured_seconds: float) -> float:
    """The scatter of whole steps after one more; a plan's first step says nothing of it."""
    if pending["is_new"] or measured_seconds <= 0:
        return state.noise_share
    surprise = min(MOST_SURPRISE_SHARE, abs(pending["step_seconds"][0] / measured_seconds - 1))
    return hypot(NOISE_KEPT_SHARE**0.5 * state.noise_share, (1 - NOISE_KEPT_SHARE) ** 0.5 * surprise)


# -- transitions -------------------------------------------------------------------------------------------------------


def toll_of(kind: str) -> str:
    """The toll that an operation's kind is priced by: its own, or what all that move bytes share."""
    return RATE if kind in MOVES or kind == "copy" else kind


def by_toll(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind of operation, added up by toll."""
    found: dict[str, float] = {}
    for kind, value in seconds.items():
        found[toll_of(kind)] = found.get(toll_of(kind), 0.0) + value
    return found


def expected_seconds(state: Observed, graph: TransitionGraph) -> dict[str, float]:
    """Seconds of a graph's operations by toll, of the slot that has most of it, as the prior tolls would have them.

    The graph was priced with `calibrated_tolls(state)`: what those learnt is taken out again.
    """
    by_slot: dict[str, dict[int, float]] = {}
    for operation in graph.operations:
        lanes = by_slot.setdefault(toll_of(operation.kind), {})
        for lane in {lane for lane in operation.lanes if lane >= 0}:
            lanes[lane] = lanes.get(lane, 0.0) + operation.seconds
    found = dict(DRIVER_SECONDS)
    for toll, lanes in by_slot.items():
        seconds = max(lanes.values(), default=0.0)
        learnt = state.tolls.get(toll)
        if learnt is not None and (toll in TOLL_FIELDS or toll in (RATE, "verify")):
            seconds /= learnt.ratio
        if seconds > 0:
            found[toll] = seconds
    return found


def expected_change(state: Observed, expected: Mapping[str, float]) -> Prediction:
    """Seconds of a change whose parts by toll take `expected` seconds under the prior tolls."""
    parts = [_factor(state, toll).predict(seconds) for toll, seconds in expected.items()]
    return Prediction(
        mean_seconds=sum(part.mean_seconds for part in parts),
        deviation_seconds=hypot(*(part.deviation_seconds for part in parts)),
    )


def _factor(state: Observed, toll: str) -> Factor:
    return Factor(variance_ratio=REMEMBERED_SHARE**2) if toll in REMEMBERED else state.tolls.get(toll, Factor())


def _changed(state: Observed, record: Mapping[str, Any]) -> Observed:
    tolls = dict(state.tolls)
    for toll, seconds in record["seconds"].items():
        expected = record["expected_seconds"].get(toll, 0.0)
        if expected > 0 and seconds > 0 and toll not in REMEMBERED:
            tolls[toll] = tolls.get(toll, Factor()).observe(expected, seconds)
    return replace(state, tolls=tolls)


def calibrated_tolls(state: Observed, prior: Tolls | None = None) -> Tolls:
    """The prior tolls, corrected kind by kind by the changes that were measured; kinds that were not keep theirs."""
    prior = prior or Tolls()
    values: dict[str, Any] = {}
    deviations = dict(prior.deviation_share)
    for toll, factor in state.tolls.items():
        if toll in TOLL_FIELDS:
            values[TOLL_FIELDS[toll]] = getattr(prior, TOLL_FIELDS[toll]) * factor.ratio
        elif toll == "verify":
            values["digest_share"] = prior.digest_share / factor.ratio
        elif toll == RATE:
            values["rate_share"] = prior.rate_share / factor.ratio
        deviations[toll] = factor.deviation_share
    return replace(prior, **values, deviation_share=deviations)
