"""What a step works on: prompts and responses of random lengths around a curve that grows, spikes or shrinks.

A response's length is a log-normal body and a Pareto tail, cut at the cap: the long tail is explicit. The scale is
solved so that the mean after the cut is the curve's. Samples of one prompt share part of their spread (hard prompts are
answered at length), so that GRPO's groups are correlated. Everything is a function of (seed, step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from nereus.errors import ConfigError
from nereus.model import seed_of
from nereus.sim.traces import LengthCurve

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Algorithm = Literal["ppo", "grpo"]
STRATA = 1 << 14
SCALES = 240


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthShape:
    """How lengths of one step spread around their mean.

    `log_std` of the body; `tail_share` of the responses are longer by a Pareto factor of exponent `tail_shape`;
    `prompt_share` of the body's variance is common to the samples of a prompt. The defaults lie between what verl's
    published GPG logs show (Qwen2-7B on MATH, cap 1,024): of responses with a mean of 308 they cut 1.7 % (logs: 3.6 %),
    with a mean of 190 .5 % (logs: .1 to .2 %). Their own per-sample lengths were not published.
    """

    log_std: float = 0.6
    tail_share: float = 0.04
    tail_shape: float = 1.4
    prompt_share: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """From step `step` on, for `steps` steps, responses are `length_ratio` times as long: a change of data, or a collapse."""

    step: int
    steps: int
    length_ratio: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSamples:
    """The batch of one step, prompt by prompt: `prompt_tokens` and `response_tokens`, [samples] each."""

    prompt_tokens: Tokens
    response_tokens: Tokens

    @property
    def total_tokens(self) -> int:
        """Prompts and responses."""
        return int(self.prompt_tokens.sum() + self.response_tokens.sum())


@dataclass(frozen=True, kw_only=True)
class SimWorkload:
    """The job's data: `prompts_per_step` prompts, each sampled `samples_per_prompt` times, lengths by a curve and a shape.

    `limit_tokens` are (step, tokens) from which on a response has at most so many, `most_response_tokens` of them before.
    `prompt_log_std` spreads prompts around `mean_prompt_tokens`. PPO has a critic, GRPO none.
    """

    algorithm: Algorithm = "ppo"
    prompts_per_step: int
    samples_per_prompt: int
    mean_prompt_tokens: float
    prompt_log_std: float = 0.4
    most_prompt_tokens: int
    most_response_tokens: int
    limit_tokens: tuple[tuple[int, int], ...] = ()
    curve: LengthCurve
    shape: LengthShape = field(default_factory=LengthShape)
    spikes: tuple[Spike, ...] = ()
    seed: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "_grid", _Grid(self.shape, self.largest_limit))
        if self.shape.tail_shape <= 1.0:
            raise ConfigError("tail_shape", self.shape.tail_shape, "above 1, else the tail has no mean")

    @property
    def samples(self) -> int:
        """Responses of a step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def largest_limit(self) -> int:
        """The longest response of any step."""
        return max(self.most_response_tokens, *(tokens for _, tokens in self.limit_tokens), 0)

    def limit_at(self, step: int) -> int:
        """The longest response of a step."""
        return [self.most_response_tokens, *(tokens for start, tokens in self.limit_tokens if start <= step)][-1]

    def mean_at(self, step: int) -> float:
        """The mean response length of a step: the curve times its spikes; at least a token, at most the cap."""
        mean = self.curve.mean_at(step)
        for spike in self.spikes:
            if spike.step <= step < spike.step + spike.steps:
                mean *= spike.length_ratio
        return min(max(mean, 1.0), float(self.limit_at(step)))

    def batch(self, step: int) -> StepSamples:
        """The samples of a step."""
        draw = np.random.Generator(np.random.PCG64(seed_of("lengths", self.seed, step)))
        prompts, each, shape = self.prompts_per_step, self.samples_per_prompt, self.shape
        prompt = np.exp(self.prompt_log_std * draw.standard_normal(prompts) - self.prompt_log_std**2 / 2)
        prompt = np.clip(np.rint(prompt * self.mean_prompt_tokens), 1, self.most_prompt_tokens).astype(np.int64)
        common = np.repeat(draw.standard_normal(prompts), each)
        own = draw.standard_normal(prompts * each)
        body = np.sqrt(shape.prompt_share) * common + np.sqrt(1 - shape.prompt_share) * own
        units = _units(shape, body, draw.random(prompts * each), draw.random(prompts * each))
        grid: _Grid = self._grid  # type: ignore[attr-defined]
        lengths = np.rint(units * grid.scale_for(self.mean_at(step)))
        response = np.clip(lengths, 1, self.limit_at(step)).astype(np.int64)
        return StepSamples(prompt_tokens=np.repeat(prompt, each), response_tokens=response)


def _units(shape: LengthShape, body: Floats, chosen: Floats, tail: Floats) -> Floats:
    """Lengths in units of the body's median."""
    units = np.exp(shape.log_std * body)
    factor = (1 - tail) ** (-1 / shape.tail_shape)
    return np.where(chosen < shape.tail_share, units * factor, units)


class _Grid:
    """The scale at which lengths, cut at the cap, have a wanted mean: by interpolation in a table of both.

    The mean grows with the scale up to the cap; a wanted mean near it takes the table's last scale.
    """

    def __init__(self, shape: LengthShape, most_tokens: int) -> None:
        order = np.arange(STRATA)
        even = [(order * step + 0.5 / STRATA) % 1.0 for step in (1 / STRATA, sqrt(5) / 2, sqrt(2))]
        units = _units(shape, ndtri(even[0]), even[1].astype(np.float64), even[2].astype(np.float64))
        self.scales = np.geomspace(0.01, 1e3 * most_tokens, SCALES)
        self.means = np.array([np.clip(np.rint(units * scale), 1, most_tokens).mean() for scale in self.scales])

    def scale_for(self, mean_tokens: float) -> float:
        """The scale for a mean in tokens."""
        first = int(np.searchsorted(self.means, mean_tokens))
        if first == 0:
            return float(self.scales[0])
        if first == len(self.means):
            return float(self.scales[-1])
        low, high = self.means[first - 1], self.means[first]
        share = (mean_tokens - low) / (high - low)
        return float(self.scales[first - 1] * (self.scales[first] / self.scales[first - 1]) ** share)


def constant(mean_tokens: float) -> LengthCurve:
    """A curve that does not change."""
    return LengthCurve(name=f"constant {mean_tokens:g}", at_steps=(1,), mean_tokens=(mean_tokens,))


def shape_like(lengths: Sequence[int]) -> LengthShape:
    """The body and tail of measured lengths, such as a request trace's: spread from the quartiles, tail from what is above.

    The tail begins where the body's log-normal would leave one in a thousand; its exponent is Hill's estimate.
    """
    found = np.sort(np.asarray(lengths, dtype=np.float64))
    found = found[found > 0]
    if len(found) < 100:
        raise ConfigError("requests", len(found), "at least 100 lengths above 0, to see a tail")
    low, median, high = (float(np.quantile(found, q)) for q in (0.25, 0.5, 0.75))
    log_std = max(np.log(high / low) / (2 * 0.6744897501960817), 1e-3)
    edge = median * np.exp(3.0902 * log_std)
    above = found[found > edge]
    share = max(len(above) / len(found) - 0.001, 0.0)
    exponent = 1.0 / np.log(above / edge).mean() if len(above) > 10 else 3.0
    return LengthShape(log_std=float(log_std), tail_share=share, tail_shape=float(np.clip(exponent, 1.1, 5.0)))
