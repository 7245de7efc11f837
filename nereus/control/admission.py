"""Admission: whether a change of plan is worth its price, or forced; a pure function of what is believed, with all its numbers.

A candidate's gain over its horizon is horizon x saving - price. Its deviation is joint: what both plans' predictions
share cancels, each plan's own ratio and the price's deviation come on top. Decisions are made on the lower bound,
mean - caution x deviation.

Hysteresis is ski rental on the regret of staying: the seconds that the nearest candidate surely (by its lower bound) would
have saved since the last change, at each step with what is then believed; a step in which it would have lost takes off.
With trust t in (0, 1], a change whose lower bound of the gain is positive waits until the regret reaches t x price; one
that the horizon does not promise, until price / t.

For one spell in which the same plans stay better (until the next change or the end of the run), let S be what staying
loses in it and P the price: hindsight pays min(S, P), this rule at most (1 + 1/t) x min(S, P) whatever the horizon said, and
at most (1 + t) x min(S, P) where it was right; plus one step's saving and the error of the predictions (savings that are not
sure do not count). It is algorithm 2 of Purohit, Svitkina and Kumar, "Improving Online Algorithms via ML Predictions"
(NeurIPS 2018, section 2.2); with t = 1 it is the break-even rule, twice the best of Karlin et al., "Competitive snoopy
caching" (1988). The first t x price of regret also is evidence: a saving that noise made does not last that long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil, hypot
from typing import Literal

from nereus.control.horizon import Horizon
from nereus.control.probation import Offsets
from nereus.control.records import Candidate, Estimate, Outlook

Reason = Literal[
    "no candidate",
    "evidence",
    "probation",
    "frozen",
    "max transitions",
    "denied",
    "failed",
    "saving",
    "price",
    "regret",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Caution:
    """How admission weighs what it does not know; the defaults were tuned on traces that no figure reports.

    `caution_ratio` deviations are taken off a mean. `trust_share` is t above. No change that is not forced before
    `least_steps` measured steps, nor in the `probation_steps` after a change; both become more until the mean of so
    many steps has at most a deviation of `evidence_share`. `lead_steps` before a plan stops fitting the change is
    forced, and a candidate that does not fit for so long is taken only if no other is there.
    """

    caution_ratio: float = 1.0
    trust_share: float = 0.5
    least_steps: int = 3
    probation_steps: int = 4
    lead_steps: int = 3
    evidence_share: float = 0.05

    def wanted_steps(self, least_steps: int, noise_share: float) -> int:
        """How many steps give evidence at this noise."""
        return max(least_steps, ceil((noise_share / self.evidence_share) ** 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """A candidate against the present plan, in numbers.

    `ratio` is its measured over predicted seconds as believed (already in `step_seconds`), `ratio_deviation_share` the
    deviation of that. `horizon_steps` is cut where the candidate stops fitting, `remaining_gain_seconds` is the lower
    bound of the gain over all remaining steps.
    """

    plan_id: str
    step_seconds: float
    step_deviation_seconds: float
    ratio: float
    ratio_deviation_share: float
    saving_seconds: float
    saving_deviation_seconds: float
    price_seconds: float
    price_deviation_seconds: float
    price_bound_seconds: float
    horizon_steps: float
    gain_seconds: float
    gain_deviation_seconds: float
    least_gain_seconds: float
    remaining_gain_seconds: float
    fits_steps: int | None = None
    barred: str = ""

    def sure_saving(self, caution: Caution) -> float:
        """Lower bound of the seconds that it saves a step."""
        return self.saving_seconds - caution.caution_ratio * self.saving_deviation_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """The change is worth it; `promised` says whether by its horizon, or by regret alone."""

    chosen: Weighed
    promised: bool
    regret_seconds: float
    threshold_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Forced:
    """The present plan cannot go on, for this reason; this is the best that can."""

    chosen: Weighed
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """No change now. `best` is the candidate that came nearest, `threshold_seconds` the regret that would have admitted it."""

    reason: Reason
    detail: str
    best: Weighed | None = None
    regret_seconds: float = 0.0
    threshold_seconds: float | None = None


Admission = Admitted | Forced | Rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """All that weighing rests on: beliefs about plans, the present one, its predicted step and horizon, the step to come."""

    outlook: Outlook
    offsets: Offsets
    present_id: str
    present_kind: str
    present_seconds: float
    horizon: Horizon
    caution: Caution
    step: int


def weigh(candidate: Candidate, known: Known, barred: str = "") -> Weighed:
    """The candidate's numbers. Pure arithmetic on a few predictions."""
    outlook, caution = known.outlook, known.caution.caution_ratio
    old, new = known.offsets.of(known.present_kind), known.offsets.of(candidate.kind)
    step = scaled(outlook.step(candidate.plan_id), new.ratio)
    old_seconds = known.present_seconds * old.ratio
    joint = outlook.saving(known.present_id, candidate.plan_id, old.ratio, new.ratio)
    own = step.mean_seconds * new.deviation_share
    deviation = hypot(joint.deviation_seconds, own, old_seconds * old.deviation_share)
    misfit = outlook.misfit(candidate.plan_id, known.step)
    remaining = float(known.horizon.remaining_steps)
    steps = known.horizon.expected_steps
    if misfit is not None:
        steps, remaining = min(steps, misfit.within_steps), min(remaining, misfit.within_steps)
    price = candidate.price
    gain = steps * joint.mean_seconds - price.mean_seconds
    gain_deviation = hypot(steps * deviation, price.deviation_seconds)
    over_run = remaining * (joint.mean_seconds - caution * deviation)
    return Weighed(
        plan_id=candidate.plan_id,
        step_seconds=step.mean_seconds,
        step_deviation_seconds=hypot(step.deviation_seconds, own),
        ratio=new.ratio,
        ratio_deviation_share=new.deviation_share,
        saving_seconds=joint.mean_seconds,
        saving_deviation_seconds=deviation,
        price_seconds=price.mean_seconds,
        price_deviation_seconds=price.deviation_seconds,
        price_bound_seconds=price.bound_seconds,
        horizon_steps=steps,
        gain_seconds=gain,
        gain_deviation_seconds=gain_deviation,
        least_gain_seconds=gain - caution * gain_deviation,
        remaining_gain_seconds=over_run - price.mean_seconds - caution * price.deviation_seconds,
        fits_steps=None if misfit is None else misfit.within_steps,
        barred=barred,
    )


def scaled(estimate: Estimate, ratio: float) -> Estimate:
    """The estimate times a factor."""
    return Estimate(mean_seconds=ratio * estimate.mean_seconds, deviation_seconds=ratio * estimate.deviation_seconds)


def nearest(weighed: Iterable[Weighed]) -> Weighed | None:
    """The candidate to beat staying with: the greatest lower bound of the gain over the horizon, else over the run.

    None when there is no candidate that may be used. Of equals the first by name, so that the order does not matter.
    """
    usable = [w for w in weighed if not w.barred]
    promised = [w for w in usable if w.least_gain_seconds > 0]
    return _first(promised or usable, lambda w: w.least_gain_seconds if promised else w.remaining_gain_seconds)


def admit(best: Weighed | None, regret_seconds: float, caution: Caution) -> Admitted | Rejected:
    """The rule of the module for the nearest candidate, when nothing else bars or forces a change."""
    if best is None:
        return Rejected(reason="no candidate", detail="no other plan may be used")
    if best.sure_saving(caution) <= 0:
        detail = f"{best.plan_id} saves {best.saving_seconds:.4g} s a step, not sure within {best.saving_deviation_seconds:.4g} s"
        return Rejected(reason="saving", detail=detail, best=best, regret_seconds=regret_seconds)
    if best.remaining_gain_seconds <= 0:
        detail = f"{best.plan_id} does not repay {best.price_seconds:.4g} s in the steps that are left to it"
        return Rejected(reason="price", detail=detail, best=best, regret_seconds=regret_seconds)
    promised = best.least_gain_seconds > 0
    trust = caution.trust_share
    threshold = best.price_seconds * (trust if promised else 1 / trust)
    if regret_seconds < threshold:
        detail = f"staying lost {regret_seconds:.4g} s so far, a change waits for {threshold:.4g} s"
        return Rejected(
            reason="regret", detail=detail, best=best, regret_seconds=regret_seconds, threshold_seconds=threshold
        )
    return Admitted(chosen=best, promised=promised, regret_seconds=regret_seconds, threshold_seconds=threshold)


def force(weighed: Iterable[Weighed], reason: str, caution: Caution) -> Forced | None:
    """The best feasible plan when the present one cannot go on: least price plus steps over the horizon, uncertain ones worse.

    A plan that stops fitting within the lead is taken only when all do; None when no plan fits the next step.
    """
    usable = [w for w in weighed if not w.barred and w.fits_steps != 0]
    lasting = [w for w in usable if w.fits_steps is None or w.fits_steps > caution.lead_steps]
    ratio = caution.caution_ratio
    steps = max((w.horizon_steps for w in usable), default=1.0)

    def cost(w: Weighed) -> float:
        uncertain = w.step_seconds * w.ratio_deviation_share
        return w.price_seconds + ratio * w.price_deviation_seconds + steps * (w.step_seconds + ratio * uncertain)

    chosen = _first(lasting or usable, lambda w: -cost(w))
    return None if chosen is None else Forced(chosen=chosen, reason=reason)


def _first(weighed: list[Weighed], value: Callable[[Weighed], float]) -> Weighed | None:
    return min(weighed, key=lambda w: (-value(w), w.plan_id), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided before a step, and everything it rests on: what `nereus explain` shows.

    `present_seconds` is the believed step under the present plan, `noise_share` the deviation of steps about beliefs.
    """

    at_seconds: float
    step: int
    policy: str
    plan_id: str
    admission: Admission
    weighed: tuple[Weighed, ...] = ()
    horizon: Horizon | None = None
    present_seconds: float | None = None
    noise_share: float | None = None
    search_id: int | None = None
    dry: bool = False
