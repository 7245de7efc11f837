"""How long a plan will live: from the history of what ended plans' lives, never past the end of the run.

Ends of lives are a Poisson process of unknown rate; a Gamma distribution stands for what is known of the rate, so a life is
Lomax (Pareto II) distributed. Its tail is heavy: a few quiet steps do not make a long life sure, nor one change a short one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

PRIOR_COUNT = 0.2
PRIOR_STEPS = 10.0
KEPT_SHARE = 0.99


@dataclass(frozen=True, kw_only=True, slots=True)
class Horizon:
    """Steps that a plan is expected to live, out of those that remain, and what of the history says so."""

    expected_steps: float
    remaining_steps: int
    seen_count: float
    seen_steps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """How many plans' lives ended in how many steps, older ones weighing less: each step keeps `kept_share`.

    The prior is as if `prior_count` lives had ended in `prior_steps`: less than one observation.
    """

    ended_count: float = 0.0
    seen_steps: float = 0.0
    prior_count: float = PRIOR_COUNT
    prior_steps: float = PRIOR_STEPS
    kept_share: float = KEPT_SHARE

    def step(self) -> History:
        """One more step, in which the plan lived."""
        kept = self.kept_share
        return replace(self, ended_count=kept * self.ended_count, seen_steps=kept * self.seen_steps + 1.0)

    def ended(self) -> History:
        """A plan's life ended: a slot of it was lost, or conditions made another plan better by more than the change."""
        return replace(self, ended_count=self.ended_count + 1.0)

    def horizon(self, remaining_steps: int) -> Horizon:
        """Expected life of a plan that is cut at `remaining_steps`: the integral of the Lomax survival function.

        E[min(X, r)] = b/(a-1) (1 - (b/(b+r))^(a-1)) for shape a and scale b; b ln((b+r)/b) for a = 1.
        """
        remaining = max(remaining_steps, 0)
        shape, scale = self.prior_count + self.ended_count, self.prior_steps + self.seen_steps
        growth = log((scale + remaining) / scale)
        power = (shape - 1) * growth
        if abs(power) < 1e-6:
            expected = scale * growth
        else:
            expected = scale / (shape - 1) * (1 - (scale / (scale + remaining)) ** (shape - 1))
        return Horizon(
            expected_steps=min(max(expected, 0.0), float(remaining)),
            remaining_steps=remaining,
            seen_count=self.ended_count,
            seen_steps=self.seen_steps,
        )
