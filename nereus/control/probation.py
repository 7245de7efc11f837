"""What a plan turns out to be: its steps over their prediction, the noise of steps, and the first steps after a change.

The best of thousands of predictions is too good to be true (the winner's curse). So a plan that never ran is uncertain by
`novelty_share` beyond the joint posterior of the cost model's coefficients, and what its first steps show beyond noise is
learnt as the plan's own ratio of measured to predicted seconds. The coefficients learn only what the ratio leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp, sqrt
from typing import Literal

NOVELTY_SHARE = 0.05
NOISE_SHARE = 0.03
NOISE_COUNT = 5.0
MOST_NOISE_COUNT = 100.0
OUTLIER = 3.0
KEPT_SHARE = 0.995
WORSE_DEVIATIONS = 1.0
KEPT_KINDS = 128
"""How many kinds of plans are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offset:
    """The logarithm of a plan's measured over predicted seconds: a mean and the variance about it."""

    log_ratio: float
    variance_ratio: float

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds."""
        return exp(self.log_ratio)

    @property
    def deviation_share(self) -> float:
        """The ratio's standard deviation over the ratio."""
        return sqrt(self.variance_ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offsets:
    """The Offset of every kind of plan; of one that never ran, what chosen ones turned out to be, within `novelty_share`.

    The first plan's is 0 and sure: what it is off by is in the coefficients, and nobody chose it. The mean of the others
    is what being chosen for a good prediction costs; it counts as if one more plan had kept its promise. Plans that do
    not run drift back to unknown.
    """

    known: Mapping[str, Offset] = field(default_factory=dict[str, Offset])
    first_kind: str = ""
    novelty_share: float = NOVELTY_SHARE
    kept_share: float = KEPT_SHARE

    def of(self, kind: str) -> Offset:
        """What is believed of plans of this kind."""
        return self.known.get(kind) or Offset(log_ratio=self._curse(), variance_ratio=self.novelty_share**2)

    def _curse(self) -> float:
        """Mean logarithm of the ratios of chosen plans."""
        chosen = [offset.log_ratio for kind, offset in self.known.items() if kind != self.first_kind]
        return sum(chosen) / (len(chosen) + 1)

    def first(self, kind: str) -> Offsets:
        """The plan that the coefficients are calibrated on from the start."""
        sure = Offset(log_ratio=0.0, variance_ratio=0.0)
        return replace(self, known={**self.known, kind: sure}, first_kind=kind)

    def ratios(self) -> tuple[tuple[str, float], ...]:
        """(kind, ratio) of what ran, by name."""
        return tuple((kind, offset.ratio) for kind, offset in sorted(self.known.items()))

    def observe(self, kind: str, log_ratio: float, *, belief_share: float, noise_share: float) -> Offsets:
        """After a step of the plan that took exp(log_ratio) times its prediction, offset included (a scalar Kalman filter).

        `belief_share` is the prediction's own deviation: that part of a surprise is the coefficients' business.
        """
        offset = self.of(kind)
        spread = offset.variance_ratio + belief_share**2 + noise_share**2
        gain = offset.variance_ratio / spread if spread > 0 else 0.0
        known = {name: self._older(other) for name, other in self.known.items() if name != kind}
        for name in [name for name in known if name != self.first_kind][: max(0, len(known) + 1 - KEPT_KINDS)]:
            del known[name]  # of those that ran longest ago
        known[kind] = Offset(
            log_ratio=offset.log_ratio + gain * log_ratio, variance_ratio=(1 - gain) * offset.variance_ratio
        )
        return replace(self, known=known)

    def _older(self, offset: Offset) -> Offset:
        drift = (1 - self.kept_share) * (self.novelty_share**2 - offset.variance_ratio)
        return replace(offset, variance_ratio=offset.variance_ratio + drift)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """The deviation of a step's seconds about their expectation, as a share: a running mean of squared log ratios."""

    variance_ratio: float = NOISE_SHARE**2
    seen_count: float = NOISE_COUNT

    @property
    def share(self) -> float:
        """The standard deviation."""
        return sqrt(self.variance_ratio)

    def observe(self, log_ratio: float, belief_share: float) -> Noise:
        """After one step: what the prediction's own deviation explains is taken off, an outlier counts as `OUTLIER` deviations."""
        most = OUTLIER**2 * self.variance_ratio
        square = min(max(log_ratio**2 - belief_share**2, 0.0), most)
        count = min(self.seen_count + 1, MOST_NOISE_COUNT)
        return Noise(variance_ratio=self.variance_ratio + (square - self.variance_ratio) / count, seen_count=count)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbationEnded:
    """What the first steps under a new plan showed, on the tokens that they had.

    `predicted_ratio` is measured over what was predicted of the plan, `before_ratio` over what the old plan is expected
    to have taken for the same steps, `deviation_share` the noise of their means. `verdict` is worse when `before_ratio`
    is above 1 by more than that, the way back is then up to admission as any change.
    """

    plan_id: str
    before_id: str
    steps: int
    measured_seconds_per_token: float
    before_seconds_per_token: float
    predicted_ratio: float
    before_ratio: float
    deviation_share: float
    learnt_ratio: float
    verdict: Literal["kept", "worse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probation:
    """The first `wanted_steps` steps of a plan: seconds summed as measured, predicted and expected of the old plan."""

    plan_id: str
    before_id: str
    wanted_steps: int
    steps: int = 0
    tokens: int = 0
    measured_seconds: float = 0.0
    predicted_seconds: float = 0.0
    before_seconds: float = 0.0

    @property
    def over(self) -> bool:
        """Whether all its steps are in."""
        return self.steps >= self.wanted_steps

    def observe(
        self, *, tokens: int, measured_seconds: float, predicted_seconds: float, before_seconds: float
    ) -> Probation:
        """After one step."""
        return replace(
            self,
            steps=self.steps + 1,
            tokens=self.tokens + tokens,
            measured_seconds=self.measured_seconds + measured_seconds,
            predicted_seconds=self.predicted_seconds + predicted_seconds,
            before_seconds=self.before_seconds + before_seconds,
        )

    def ended(self, learnt_ratio: float, noise_share: float) -> ProbationEnded:
        """The record of it."""
        deviation, tokens = noise_share / sqrt(max(self.steps, 1)), max(self.tokens, 1)
        before_ratio = self.measured_seconds / self.before_seconds
        return ProbationEnded(
            plan_id=self.plan_id,
            before_id=self.before_id,
            steps=self.steps,
            measured_seconds_per_token=self.measured_seconds / tokens,
            before_seconds_per_token=self.before_seconds / tokens,
            predicted_ratio=self.measured_seconds / self.predicted_seconds,
            before_ratio=before_ratio,
            deviation_share=deviation,
            learnt_ratio=learnt_ratio,
            verdict="worse" if before_ratio > 1 + WORSE_DEVIATIONS * deviation else "kept",
        )
