"""Calibration on the running job: Bayesian linear regression over term coefficients, robust, with forgetting.

A measured time is a sum of coefficient x term plus noise in proportion to itself. Coefficients start at a prior: its means,
how far each may be off by itself, and how far all may be off together (another clock, another build). `observe` moves them
by one measurement and answers the next state; nothing is kept elsewhere, so a journal replays to the same state.

An outlier (a garbage collection, a straggler) is weighed down as under a Student t distribution. Three surprises in a row
to the same side are no outliers: the covariance is opened to the prior's and the change is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import exp, log

import numpy as np
import numpy.typing as npt

FREEDOM = 4.0
"""Degrees of freedom of the Student t distribution of a measurement about its prediction."""
SURPRISE = 2.5
"""Predictive deviations from which a measurement is a surprise."""
SURPRISES_IN_A_ROW = 3
FEW_TERMS = 8
"""So many terms are summed faster one by one than as arrays."""
KEPT_ARRAYS = 32
LEAST_COEFFICIENT = 0.05
"""A coefficient never falls below this part of its prior: more work is never faster."""

FACTOR_DEVIATION, FACTOR_NOISE, FACTOR_DRIFT = 1.5, 0.3, 0.1
"""Of a Factor's logarithm: how far off the first guess may be, a measurement's scatter, the drift from one to the next."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """What is believed before the job ran: a mean for each term, and deviations as shares of the means.

    `own_share` is each coefficient's own deviation, `common_share` that of a factor that all share, `noise_share` a
    measurement's; `own_shares` names terms whose own deviation is another. `kept_share` of what was learnt stays at each further measurement; the rest drifts back to unknown.
    """

    means: Mapping[str, float]
    own_share: float = 0.2
    common_share: float = 0.15
    noise_share: float = 0.03
    kept_share: float = 0.98
    own_shares: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the coefficients, in order."""
        return _in_order(tuple(self.means))

    def covariance(self) -> Matrix:
        """[terms, terms] covariance of the coefficients over their means. Shared: not to be written to."""
        own = tuple([self.own_shares.get(name, self.own_share) for name in self.terms])
        return _covariance(own, self.common_share)


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
    mean, variance = moments(state, terms)
    return Prediction(mean_seconds=mean, deviation_seconds=(variance + (state.prior.noise_share * mean) ** 2) ** 0.5)


def moments(state: Calibration, terms: Mapping[str, float]) -> tuple[float, float]:
    """Mean of the terms' seconds and the variance of what is believed of it, without a measurement's noise. As `predict`.

    In plain numbers where there are few terms: a controller asks for many plans before every step.
    """
    means, at = state.prior.means, _places(tuple(state.prior.means))
    try:
        weights = [(at[name], means[name] * seconds) for name, seconds in terms.items() if seconds]
    except KeyError:
        _design(state.prior, terms)
        raise
    factors, covariance = state.mean_shares, state.covariance_shares
    if len(weights) > FEW_TERMS:
        design = np.zeros(len(factors))
        design[[i for i, _ in weights]] = [weight for _, weight in weights]
        return float(design @ _array(factors)), max(float(design @ _array(covariance) @ design), 0.0)
    mean = sum([weight * factors[i] for i, weight in weights])
    variance = 0.0
    for i, weight in weights:
        row = covariance[i]
        variance += weight * sum([other * row[j] for j, other in weights])
    return mean, max(variance, 0.0)


_ARRAYS: dict[int, tuple[object, Matrix]] = {}


def _array(rows: tuple[float, ...] | tuple[tuple[float, ...], ...]) -> Matrix:
    """The numbers as an array, from memory where these very ones were asked for lately; not to be written to."""
    found = _ARRAYS.get(id(rows))
    if found is None or found[0] is not rows:
        if len(_ARRAYS) >= KEPT_ARRAYS:
            del _ARRAYS[next(iter(_ARRAYS))]
        found = _ARRAYS[id(rows)] = (rows, np.array(rows))
    return found[1]


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
    covariance = covariance - np.outer(gain, design @ covariance)
    return replace(
        state,
        mean_shares=tuple(factors.tolist()),
        covariance_shares=_frozen((covariance + covariance.T) / 2),
        observation_count=state.observation_count + 1,
        surprise_count=streak,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Margin:
    """What predicted peaks miss, learnt from measured ones: a coefficient for each part, and the largest miss seen.

    Parts are bytes by name: `state` (what shapes say exactly) and `overhead` (communicators, engines' tables, first-use
    caches: a rough figure). A plan is judged by `safe_bytes`: two deviations above the mean, or as many bytes as ever a
    measured peak was above its prediction.
    """

    parts: Calibration
    largest_bytes: float = 0.0

    def expected_bytes(self, parts: Mapping[str, float]) -> float:
        """What a slot will show at its peak."""
        return predict(self.parts, parts).mean_seconds

    def safe_bytes(self, parts: Mapping[str, float]) -> float:
        """What a slot must have room for."""
        found = predict(self.parts, parts)
        return max(found.mean_seconds + 2 * found.deviation_seconds, found.mean_seconds + self.largest_bytes)

    def unseen_bytes(self, parts: Mapping[str, float]) -> float:
        """The same for a plan that has not run: its engines are built anew, and what that leaves is not learnt yet.

        So the overhead counts in whole, where the plan that runs shows less.
        """
        return self.safe_bytes(parts) + self.unlearnt_bytes(parts)

    def unlearnt_bytes(self, parts: Mapping[str, float]) -> float:
        """What of the overhead the measured plans do not show."""
        return max(0.0, 1.0 - self.parts.coefficients[OVERHEAD]) * parts.get(OVERHEAD, 0.0)


STATE, OVERHEAD = "state", "overhead"
STATE_OWN_SHARE, OVERHEAD_OWN_SHARE, PEAK_NOISE_SHARE = 0.03, 0.5, 0.03


def margin() -> Margin:
    """The margin before any peak was measured: shapes are trusted to a few per cent, the overhead hardly."""
    prior = Prior(
        means={STATE: 1.0, OVERHEAD: 1.0},
        own_share=STATE_OWN_SHARE,
        common_share=0.0,
        noise_share=PEAK_NOISE_SHARE,
        own_shares={OVERHEAD: OVERHEAD_OWN_SHARE},
    )
    return Margin(parts=start(prior))


def observe_peak(state: Margin, parts: Mapping[str, float], measured_bytes: float, *, unseen: bool = False) -> Margin:
    """The margin after a slot's measured peak. An outlier moves the mean little, and the largest miss all the way.

    Of a plan that was `unseen` before, the whole overhead was expected.
    """
    expected = state.expected_bytes(parts) + (state.unlearnt_bytes(parts) if unseen else 0.0)
    missed = measured_bytes - expected
    return Margin(parts=observe(state.parts, parts, measured_bytes), largest_bytes=max(state.largest_bytes, missed))


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """What something takes over what was expected of it: normal in the logarithm. For guesses that may be ten times off.

    `log_ratio` is the mean, `variance_ratio` its variance.
    """

    log_ratio: float = 0.0
    variance_ratio: float = FACTOR_DEVIATION**2
    observation_count: int = 0

    @property
    def ratio(self) -> float:
        """The factor as it is believed now."""
        return exp(self.log_ratio)

    @property
    def deviation_share(self) -> float:
        """The deviation of what the factor will be, as a share of it; at most 1."""
        return min(1.0, self.variance_ratio**0.5)

    def predict(self, expected_seconds: float) -> Prediction:
        """What will be measured where `expected_seconds` are expected."""
        mean = self.ratio * expected_seconds
        return Prediction(
            mean_seconds=mean, deviation_seconds=mean * min(1.0, (self.variance_ratio + FACTOR_NOISE**2) ** 0.5)
        )

    def observe(self, expected_seconds: float, measured_seconds: float) -> Factor:
        """The factor after one measurement. ValueError unless both are above 0."""
        if not (expected_seconds > 0 and measured_seconds > 0):
            raise ValueError(
                f"{expected_seconds!r} s expected, {measured_seconds!r} s measured: expected times above 0"
            )
        prior = self.variance_ratio + (FACTOR_DRIFT**2 if self.observation_count else 0.0)
        gain = prior / (prior + FACTOR_NOISE**2)
        surprise = log(measured_seconds / expected_seconds) - self.log_ratio
        return Factor(
            log_ratio=self.log_ratio + gain * surprise,
            variance_ratio=(1 - gain) * prior,
            observation_count=self.observation_count + 1,
        )


@cache
def _in_order(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(names))


@cache
def _places(names: tuple[str, ...]) -> Mapping[str, int]:
    return {name: place for place, name in enumerate(_in_order(names))}


@lru_cache(maxsize=256)
def _covariance(own_shares: tuple[float, ...], common_share: float) -> Matrix:
    found = np.diag(np.array(own_shares) ** 2) + common_share**2
    found.flags.writeable = False
    return found


def _design(prior: Prior, terms: Mapping[str, float]) -> Matrix:
    unknown = sorted(terms.keys() - prior.means.keys())
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
    return tuple(map(tuple, matrix.tolist()))
