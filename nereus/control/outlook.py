"""What a running job believes of its plans: the calibrated terms of `nereus.observe`, and the memory of `nereus.memory`.

A step is the sum of its phases, a phase the sum of terms times coefficients. Phases of one kind share coefficients, kinds
share none. So the deviation of a saving follows from the difference of both plans' terms: what they share cancels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt

from nereus.config import Config
from nereus.control.records import Candidate, Estimate, Misfit, StepMeasured
from nereus.costs.calibrate import Calibration, Margin, moments
from nereus.costs.profile import Profile
from nereus.costs.training import Terms
from nereus.forecast import first_passing, trend
from nereus.layout import Plan
from nereus.observe import Observed, after, memory_parts
from nereus.workload import (
    PHASE_KINDS,
    WIDTH_MULTIPLE_TOKENS,
    PhaseKind,
    StepBatch,
    largest_batch,
    step_terms,
)

LEAST_NOISE_SHARE = 0.03
RECENT_STEPS = 8
"""A plan has to fit the widest batch of so many steps."""
AHEAD_STEPS = 64
KEPT_STEPS = 40


KEPT_TERMS = 64
Question = tuple[str, StepBatch, tuple[str, ...], Profile]
"""What terms follow from: a plan, a batch, the stages that are new, the slots' profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepObserved(StepMeasured):
    """A step with all that was measured of it: seconds by phase, its batch, the peak of every slot by number.

    `fresh` names the stages whose engines ran for the first time under `plan_id`. `profile` is what is known of the
    slots where that is new since the last step.
    """

    plan_id: str
    phase_seconds: Mapping[str, float]
    batch: StepBatch
    peak_bytes: Mapping[str, int]
    fresh: tuple[str, ...] = ()
    profile: Profile | None = None


@dataclass(frozen=True, kw_only=True)
class JobOutlook:
    """The Outlook of a job on slots: a value. `recent_tokens` are (step, padded tokens of a row) of the last steps.

    What follows from the fields is remembered: `known` and `parts` in all values alike, `lacking` in each its own.
    """

    config: Config
    state: Observed
    plans: Mapping[str, Plan]
    recent_tokens: tuple[tuple[int, int], ...] = ()
    known: dict[Question, Mapping[str, Terms]] = field(
        default_factory=dict["Question", Mapping[str, Terms]], repr=False, compare=False
    )
    lacking: dict[tuple[str, int], str | None] = field(
        default_factory=dict[tuple[str, int], str | None], repr=False, compare=False
    )
    parts: dict[tuple[str, int], Mapping[str, Mapping[str, float]]] = field(
        default_factory=dict[tuple[str, int], Mapping[str, Mapping[str, float]]], repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, object]:
        """Without what can be worked out again."""
        kept: dict[str, object] = {name: getattr(self, name) for name in ("config", "state", "plans", "recent_tokens")}
        return {**kept, "known": {}, "parts": {}, "lacking": {}}

    # -- Outlook ------------------------------------------------------------------------------------------------------

    def met(self, candidates: tuple[Candidate, ...]) -> JobOutlook:
        """The same, knowing also these plans."""
        return replace(self, plans={**self.plans, **{each.plan_id: each.plan for each in candidates}})

    def observe(self, finished: StepMeasured, plan_id: str, *, ratio: float, noise_share: float) -> JobOutlook:
        """Learns from every phase of the step what the plan's own ratio leaves. TypeError for a step without phases."""
        step = _observed(finished)
        noise = max(noise_share, LEAST_NOISE_SHARE)
        state = self.state
        if step.profile is not None:
            state = after(state, {"kind": "probe", "profile": step.profile.record()})
        calibrations = {
            kind: replace(each, prior=replace(each.prior, noise_share=noise))
            for kind, each in state.calibrations.items()
        }
        state = replace(state, batch=step.batch, calibrations=calibrations)
        told = self._prediction(state, plan_id, step)
        state = after(state, {"kind": "prediction", **told})
        measured = {
            "kind": "observed",
            "step": step.step,
            "seconds": {phase: seconds / ratio for phase, seconds in step.phase_seconds.items()},
            "batch": step.batch.record(),
            "peak_bytes": dict(step.peak_bytes),
        }
        recent_tokens = (*self.recent_tokens, (step.step, step.batch.width_tokens))[-KEPT_STEPS:]
        return replace(self, state=after(state, measured), recent_tokens=recent_tokens, lacking={})

    def _prediction(self, state: Observed, plan_id: str, step: StepObserved) -> dict[str, object]:
        """What of a prediction `nereus.observe` learns from, with the batch that the step had."""
        key = (plan_id, self._longest_tokens())
        if key not in self.parts:
            self.parts[key] = memory_parts(self.config, self.plans[plan_id])
        return {
            "step": step.step,
            "plan_id": plan_id,
            "is_new": True,  # the scatter of whole steps is the policy's to learn
            "stages": {},
            "terms": self._terms_of(state, plan_id, step.batch, step.fresh),
            "memory_bytes": self.parts[key],
        }

    def expected(self, finished: StepMeasured, plan_id: str) -> Estimate:
        """What this very step would have taken under `plan_id`, with its first uses if it is the plan that ran."""
        step = _observed(finished)
        fresh = step.fresh if plan_id == step.plan_id else ()
        return self._sum(self._terms_of(self.state, plan_id, step.batch, fresh))

    def step(self, plan_id: str) -> Estimate:
        """A step to come, of a batch like the last one."""
        return self._sum(self.terms(plan_id))

    def saving(self, old_id: str, new_id: str, old_ratio: float, new_ratio: float) -> Estimate:
        """A step's old_ratio x old - new_ratio x new, from the difference of their terms."""
        old, new = self.terms(old_id), self.terms(new_id)
        shared: dict[str, dict[str, float]] = {}
        for phase in {**old, **new}:
            one, other = old.get(phase, {}), new.get(phase, {})
            names = {**one, **other}
            shared[phase] = {n: old_ratio * one.get(n, 0.0) - new_ratio * other.get(n, 0.0) for n in names}
        return self._sum(shared)

    def misfit(self, plan_id: str) -> Misfit | None:
        """When the slots' budget will not hold the plan: at the longest rows allowed never, now, or as rows grow."""
        longest = self._longest_tokens()
        if self._excess(plan_id, longest) is None:
            return None
        recent = [width for _, width in self.recent_tokens[-RECENT_STEPS:]]
        now = min(longest, max(recent, default=longest))
        reason = self._excess(plan_id, now)
        if reason is not None:
            return Misfit(within_steps=0, reason=reason)
        line = trend([(step, float(width)) for step, width in self.recent_tokens])
        if line is None:
            return None
        room = now
        while self._excess(plan_id, room + WIDTH_MULTIPLE_TOKENS) is None:
            room += WIDTH_MULTIPLE_TOKENS
        passing = first_passing(line, float(room), steps=AHEAD_STEPS)
        if passing is None:
            return None
        reason = self._excess(plan_id, room + WIDTH_MULTIPLE_TOKENS)
        return Misfit(within_steps=passing.in_steps, reason=f"with rows of more than {room} tokens {reason}")

    # -- what follows -------------------------------------------------------------------------------------------------

    def terms(self, plan_id: str) -> Mapping[str, Terms]:
        """Phase -> terms of a step to come under a known plan, first uses left out."""
        return self._terms_of(self.state, plan_id, self.state.batch or largest_batch(self.config), ())

    def _terms_of(self, state: Observed, plan_id: str, batch: StepBatch, fresh: tuple[str, ...]) -> Mapping[str, Terms]:
        assert state.profile is not None, "no probe record was seen: nothing is known of the slots"
        key = (plan_id, batch, fresh, state.profile)
        if key not in self.known:
            if len(self.known) >= KEPT_TERMS:
                self.known.clear()
            self.known[key] = step_terms(self.config, self.plans[plan_id], batch, state.profile, fresh)
        return self.known[key]

    def _sum(self, phases: Mapping[str, Terms]) -> Estimate:
        return believed(self.state.calibrations, phases)

    def _longest_tokens(self) -> int:
        return largest_batch(self.config).width_tokens

    def _excess(self, plan_id: str, width_tokens: int) -> str | None:
        """What a slot lacks when rows are so wide, or None; with the margin that was learnt."""
        key = (plan_id, width_tokens)
        if key not in self.lacking:
            self.lacking[key] = self._judged(plan_id, width_tokens)
        return self.lacking[key]

    def _judged(self, plan_id: str, width_tokens: int) -> str | None:
        budget = self.config.fleet.slot_budget_bytes
        needs = safe_bytes(self.config, self.state.margin, self.plans[plan_id], width_tokens, self.parts)
        slot, needed = max(needs.items(), key=lambda item: item[1])
        if needed <= budget:
            return None
        return f"slot {slot} is expected to need {needed:,.0f} bytes of its budget of {budget:,}"


def believed(calibrations: Mapping[PhaseKind, Calibration], phases: Mapping[str, Terms]) -> Estimate:
    """The sum of phases with what is not known of it, without noise; terms below 0 are a difference's."""
    summed: dict[PhaseKind, dict[str, float]] = {}
    for phase, terms in phases.items():
        total = summed.setdefault(PHASE_KINDS[phase], {})
        for name, seconds in terms.items():
            total[name] = total.get(name, 0.0) + seconds
    mean = variance = 0.0
    for kind, terms in summed.items():
        kind_mean, kind_variance = moments(calibrations[kind], terms)
        mean += kind_mean
        variance += kind_variance
    return Estimate(mean_seconds=mean, deviation_seconds=sqrt(variance))


def safe_bytes(
    config: Config,
    margin: Margin,
    plan: Plan,
    width_tokens: int,
    parts: dict[tuple[str, int], Mapping[str, Mapping[str, float]]],
) -> dict[str, float]:
    """Slot -> bytes that it must have room for under `plan` when rows are `width_tokens` wide; `parts` remembers."""
    key = (plan.plan_id, width_tokens)
    if key not in parts:
        response = max(1, width_tokens - config.data.max_prompt_tokens)
        parts[key] = memory_parts(replace(config, data=replace(config.data, max_response_tokens=response)), plan)
    return {slot: margin.safe_bytes(each) for slot, each in parts[key].items()}


def _observed(step: StepMeasured) -> StepObserved:
    if not isinstance(step, StepObserved):
        raise TypeError("the job's outlook needs StepObserved: seconds by phase and the batch, not the step's alone")
    return step
