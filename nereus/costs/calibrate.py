"""Calibration on the running job: Bayesian linear regression over term coefficients, robust, with forgetting.

A measured time is a sum of coefficient x term plus noise in proportion to itself. Coefficients start at a prior: its means,
how far each may be off by itself, and how far all may be off together (another clock, another build). `observe` moves them
by one measurement and answers the next state; nothing is kept elsewhere, so a journal replays to the same state.

An outlier (a garbage collection, a straggler) is weighed down as under a Student t distribution. Three surprises in a row
to the same side are no outliers: the covariance is opened to the prior's and the change is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

FREEDOM = 4.0
"""Degrees of freedom of the Student t distribution of a measurement about its prediction."""
SURPRISE = 2.5
"""Predictive deviations from which a measurement is a surprise."""
SURPRISES_IN_A_ROW = 3
LEAST_COEFFICIENT = 0.05
"""A coefficient never falls below this part of its prior: more work is never faster."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """What is believed before the job ran: a mean for each term, and deviations as shares of the means.

    `own_share` is each coefficient's own deviation, `common_share` that of a factor that all share, `noise_share` a
    measurement's. `kept_share` of what was learnt stays at each further measurement; the rest drifts back to unknown.
    """

    means: Mapping[str, float]
    own_share: float = 0.2
    common_share: float = 0.15
    noise_share: float = 0.03
    kept_share: float = 0.98

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the coefficients, in order."""
        return tuple(sorted(self.means))

    def covariance(self) -> Matrix:
        """[terms, terms] covariance of the coefficients over their means."""
        return np.diag(np.full(len(self.terms), self.own_share**2)) + self.common_share**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Seconds, and the standard deviation of what will be measured."""

    mean_seconds: float
    deviation_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The state: coefficients over their prior means, their covariance, and how many surprises came in a row (signed)."""

    prior: Prior
    mean_shares: tuple[float, ...]
    covariance_shares: tuple[tuple[float, ...], ...]
    observation_count: int = 0
    surprise_count: int = 0

    @property
    def coefficients(self) -> dict[str, float]:
        """Term -> coefficient as it is believed now."""
        return {
            name: factor * self.prior.means[name]
            for name, factor in zip(self.prior.terms, self.mean_shares, strict=True)
        }


def start(prior: Prior) -> Calibration:
    """The state before any measurement."""
    return Calibration(
        prior=prior,
        mean_shares=tuple(1.0 for _ in prior.terms),
        covariance_shares=_frozen(prior.covariance()),
    )


def predict(state: Calibration, terms: Mapping[str, float]) -> Prediction:
    """What the terms will take. KeyError names a term without a coefficient."""
    design = _design(state.prior, terms)
    mean = float(design @ np.array(state.mean_shares))
    variance = float(design @ np.array(state.covariance_shares) @ design) + (state.prior.noise_share * mean) ** 2
    return Prediction(mean_seconds=mean, deviation_seconds=variance**0.5)


def observe(state: Calibration, terms: Mapping[str, float], measured_seconds: float) -> Calibration:
    """The state after one measurement of these terms. Terms that it does not exercise keep what is believed of them."""
    if not measured_seconds > 0:
        raise ValueError(f"measured_seconds = {measured_seconds!r}: expected a time above 0")
    prior, factors = state.prior, np.array(state.mean_shares)
    design = _design(prior, terms) / measured_seconds
    covariance = _forget(np.array(state.covariance_shares), prior)
    residual = 1.0 - float(design @ factors)
    noise = prior.noise_share**2
    spread = float(design @ covariance @ design)
    surprise = residual / (spread + noise) ** 0.5
    streak = _streak(state.surprise_count, surprise)
    if abs(streak) >= SURPRISES_IN_A_ROW:
        covariance, streak = prior.covariance(), 0
        spread = float(design @ covariance @ design)
        weight = 1.0
    else:
        weight = (FREEDOM + 1) / (FREEDOM + surprise**2) if abs(surprise) > 1 else 1.0
    gain = covariance @ design / (spread + noise / weight)
    factors = np.maximum(factors + gain * residual, LEAST_COEFFICIENT)
    covariance -= np.outer(gain, design @ covariance)
    return replace(
        state,
        mean_shares=tuple(float(factor) for factor in factors),
        covariance_shares=_frozen((covariance + covariance.T) / 2),
        observation_count=state.observation_count + 1,
        surprise_count=streak,
    )


def _design(prior: Prior, terms: Mapping[str, float]) -> Matrix:
    unknown = sorted(set(terms) - set(prior.means))
    if unknown:
        raise KeyError(f"no coefficient for {', '.join(unknown)}; the prior has {', '.join(prior.terms)}")
    return np.array([prior.means[name] * terms.get(name, 0.0) for name in prior.terms])


def _forget(covariance: Matrix, prior: Prior) -> Matrix:
    """A part of the way back to what was believed at first: old measurements lose their hold, none is lost for good."""
    return covariance + (1 - prior.kept_share) * (prior.covariance() - covariance)


def _streak(before: int, surprise: float) -> int:
    if abs(surprise) < SURPRISE:
        return 0
    sign = 1 if surprise > 0 else -1
    return before + sign if before * sign >= 0 else sign


def _frozen(matrix: Matrix) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in matrix)
