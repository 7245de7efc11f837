"""What a running job believes of its plans: the calibrated terms of `nereus.observe`, and the memory of `nereus.memory`.

A step is the sum of its phases, a phase the sum of terms times coefficients. Phases of one kind share coefficients, kinds
share none. So the deviation of a saving follows from the difference of both plans' terms: what they share cancels.

How wide rows will be is known in part. The limit of a response by step is the configuration's: rows are supposed to grow
by as many tokens as it rises, at that step, and never beyond it. What they grow by on their own is the trend of measured
widths, the schedule's part taken out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, sqrt

from nereus.config import Config
from nereus.control.records import Candidate, Estimate, Misfit, StepMeasured
from nereus.costs.calibrate import Calibration, moments
from nereus.costs.profile import Profile
from nereus.costs.training import Terms
from nereus.forecast import Trend, first_passing, trend
from nereus.layout import Plan
from nereus.lengths import WIDTH_MULTIPLE_TOKENS, limit_row_tokens
from nereus.observe import Observed, after, memory_parts
from nereus.workload import (
    PHASE_KINDS,
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
KEPT_PLANS = 128
"""So many plans that were met or ran last are remembered."""


KEPT_TERMS = 64
Question = tuple[str, StepBatch, tuple[str, ...], Profile]
"""What terms follow from: a plan, a batch, the stages that are new, the slots' profile."""
Parts = dict[tuple[str, int], dict[str, dict[str, float]]]
"""(plan, width of rows) -> slot -> part -> bytes."""


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
    parts: Parts = field(
        default_factory=dict[tuple[str, int], "dict[str, dict[str, float]]"], repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, object]:
        """Without what can be worked out again."""
        kept: dict[str, object] = {name: getattr(self, name) for name in ("config", "state", "plans", "recent_tokens")}
        return {**kept, "known": {}, "parts": {}, "lacking": {}}

    # -- Outlook ------------------------------------------------------------------------------------------------------

    def met(self, candidates: tuple[Candidate, ...]) -> JobOutlook:
        """The same, knowing also these plans."""
        met = {each.plan_id: each.plan for each in candidates}
        before = {name: plan for name, plan in self.plans.items() if name not in met}
        return replace(self, plans=dict([*before.items(), *met.items()][-KEPT_PLANS:]))

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
        measured: dict[str, object] = {
            "kind": "observed",
            "step": step.step,
            "seconds": {phase: seconds / ratio for phase, seconds in step.phase_seconds.items()},
            "batch": step.batch.record(),
            "peak_bytes": dict(step.peak_bytes),
        }
        plans = {name: plan for name, plan in self.plans.items() if name != plan_id}
        plans[plan_id] = self.plans[plan_id]  # the present one is forgotten last
        return replace(self, state=after(state, measured), plans=plans).met_rows(step.step, step.batch.width_tokens)

    def met_rows(self, step: int, width_tokens: int) -> JobOutlook:
        """The same, knowing also that rows of step `step` are so wide."""
        return replace(self, recent_tokens=(*self.recent_tokens, (step, width_tokens))[-KEPT_STEPS:], lacking={})

    def overflowed(self, plan_id: str, used_bytes: int) -> JobOutlook:  # noqa: ARG002 - the protocol's
        """The same: peaks of slots come with their steps, and a slot that overflows is lost before it tells one."""
        return self

    def _prediction(self, state: Observed, plan_id: str, step: StepObserved) -> dict[str, object]:
        """What of a prediction `nereus.observe` learns from, with the batch that the step had."""
        plan, width = self.plans[plan_id], step.batch.width_tokens
        return {
            "step": step.step,
            "plan_id": plan_id,
            "is_new": True,  # the scatter of whole steps is the policy's to learn
            "stages": {},
            "terms": self._terms_of(state, plan_id, step.batch, step.fresh),
            "memory_bytes": parts_of(self.config, plan, plan_id, width, self.parts),
        }

    def expected(self, finished: StepMeasured, plan_id: str) -> Estimate:
        """What this very step would have taken under `plan_id`, with its first uses if it is the plan that ran."""
        step = _observed(finished)
        fresh = step.fresh if plan_id == step.plan_id else ()
        state = replace(self.state, profile=step.profile or self.state.profile)
        return self._sum(self._terms_of(state, plan_id, step.batch, fresh))

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

    def misfit(self, plan_id: str, step: int) -> Misfit | None:
        """When the budget will not hold the plan from step `step` on: never, at once, or as rows grow.

        Nothing is foreseen before rows were measured: the world refuses a step whose rows turn out too wide.
        """
        return self.foreseen(self.plans[plan_id], plan_id, step) if self._rows() else None

    def foreseen(self, plan: Plan, plan_id: str, step: int) -> Misfit | None:
        """The same of any plan; without a measurement rows are as wide as they may be."""
        if self._excess(plan, plan_id, self._widest_tokens(step)) is None:
            return None
        scheduled = self._scheduled(plan, plan_id, step)
        if scheduled is not None and scheduled.within_steps <= 1:
            return scheduled
        grown = self._grown(plan, plan_id, step)
        return min((each for each in (scheduled, grown) if each), key=lambda each: each.within_steps, default=None)

    def supposed_tokens(self, step: int) -> int:
        """The width of the rows of a step to come, without what they grow by on their own."""
        limit = self._limit_tokens(step)
        recent = self._rows()[-RECENT_STEPS:]
        if not recent:
            return limit
        return min(limit, max(width + max(0, limit - self._limit_tokens(at)) for at, width in recent))

    def coming_tokens(self, step: int, steps: int) -> int:
        """The widest rows that are to be expected within so many steps from `step` on, their own growth included."""
        last = step + max(1, min(steps, self._steps_ahead(step))) - 1
        at_limits = [at for at in self._new_limits(step) if at <= last]
        line = self._line(step)
        grown = 0.0 if line is None else line.at(max(0, last - line.last_step))[0]
        most = max(self._limit_tokens(at) for at in at_limits)
        return max(min(most, ceil(grown)), *(self.supposed_tokens(at) for at in at_limits))

    def _line(self, step: int) -> Trend | None:
        """The trend of rows as wide as they would be at the limit of step `step`."""
        now = self._limit_tokens(step)
        return trend([(at, float(width + max(0, now - self._limit_tokens(at)))) for at, width in self._rows()])

    def _scheduled(self, plan: Plan, plan_id: str, step: int) -> Misfit | None:
        """When the rows that are there now, and what the limit lets them grow by, are too wide."""
        for at in self._new_limits(step):
            width = self.supposed_tokens(at)
            if (reason := self._excess(plan, plan_id, width)) is not None:
                return Misfit(within_steps=at - step, reason=f"with rows of {width} tokens {reason}")
        return None

    def _grown(self, plan: Plan, plan_id: str, step: int) -> Misfit | None:
        """When rows that grow on their own will be too wide; at the earliest after `step`, as it is not certain."""
        now, most = self._limit_tokens(step), self._widest_tokens(step)
        line = self._line(step)
        if line is None:
            return None
        room = self._room_tokens(plan, plan_id, self.supposed_tokens(step), most)

        def bound(after_last: int) -> float:
            limit = self._limit_tokens(line.last_step + after_last)
            return room - max(0, limit - now) if limit > room else float("inf")

        passing = first_passing(line, bound, steps=self._steps_ahead(step))
        if passing is None:
            return None
        reason = self._excess(plan, plan_id, room + WIDTH_MULTIPLE_TOKENS)
        within = max(1, line.last_step + passing.in_steps - step)
        return Misfit(within_steps=within, reason=f"with rows of more than {room} tokens {reason}")

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

    def _rows(self) -> tuple[tuple[int, int], ...]:
        """(step, width) of the rows that are known; after a resumption those of the last step before it."""
        batch = self.state.batch
        return self.recent_tokens or (() if batch is None else ((self.state.last_step, batch.width_tokens),))

    def _limit_tokens(self, step: int) -> int:
        return limit_row_tokens(self.config.data, step)

    def _room_tokens(self, plan: Plan, plan_id: str, least: int, most: int) -> int:
        """The widest rows that the plan holds, between some that it does and some that it does not."""
        low, high = least // WIDTH_MULTIPLE_TOKENS, most // WIDTH_MULTIPLE_TOKENS
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._excess(plan, plan_id, middle * WIDTH_MULTIPLE_TOKENS) is None
            low, high = (middle, high) if fits else (low, middle)
        return low * WIDTH_MULTIPLE_TOKENS

    def _new_limits(self, step: int) -> list[int]:
        """Step `step` and those after it from which on another limit holds."""
        end = step + self._steps_ahead(step)
        return [step, *(each.step for each in self.config.data.response_schedule if step < each.step < end)]

    def _steps_ahead(self, step: int) -> int:
        """How many steps are looked at: those that are left of the run, this one at least."""
        return max(1, min(AHEAD_STEPS, self.config.run.steps - step + 1))

    def _widest_tokens(self, step: int) -> int:
        """The widest rows that any of those steps may have."""
        return max(self._limit_tokens(at) for at in self._new_limits(step))

    def _excess(self, plan: Plan, plan_id: str, width_tokens: int) -> str | None:
        """What a slot lacks when rows are so wide, or None; with the margin that was learnt.

        Rows that the plan has carried before are no question.
        """
        if width_tokens <= self.state.carried.get(plan_id, 0):
            return None
        key = (plan_id, width_tokens)
        if key not in self.lacking:
            self.lacking[key] = self._judged(plan, plan_id, width_tokens)
        return self.lacking[key]

    def _judged(self, plan: Plan, plan_id: str, width_tokens: int) -> str | None:
        budget = self.config.fleet.slot_budget_bytes
        parts = parts_of(self.config, plan, plan_id, width_tokens, self.parts)
        learnt = self.state.margin
        judge = learnt.safe_bytes if plan_id in self.state.carried else learnt.unseen_bytes
        needs = {slot: judge(each) for slot, each in parts.items()}
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


def parts_of(
    config: Config, plan: Plan, plan_id: str, width_tokens: int, known: Parts
) -> Mapping[str, dict[str, float]]:
    """`memory_parts`, remembered in `known`."""
    key = (plan_id, width_tokens)
    if key not in known:
        known[key] = memory_parts(config, plan, width_tokens)
    return known[key]


def _observed(step: StepMeasured) -> StepObserved:
    if not isinstance(step, StepObserved):
        raise TypeError("the job's outlook needs StepObserved: seconds by phase and the batch, not the step's alone")
    return step
