"""Identity of a sampled response: its seed is a hash of what it is, never of where or when it was sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from nereus.model import seed_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleId:
    """Which response: the `sample`-th to prompt `prompt` in PPO step `step`."""

    step: int
    prompt: int
    sample: int

    def seed(self, run_seed: int) -> int:
        """The request's 63-bit seed: a hash of (run seed, step, prompt id, sample id)."""
        return seed_of("rollout", run_seed, self.step, self.prompt, self.sample)


def samples_of_step(step: int, first_prompt: int, prompts: int, samples: int) -> tuple[SampleId, ...]:
    """The samples of a step in batch order: all of a prompt, then the next prompt."""
    return tuple(
        SampleId(step=step, prompt=prompt, sample=sample)
        for prompt in range(first_prompt, first_prompt + prompts)
        for sample in range(samples)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt to be continued; `seed` (0 <= seed < 2**63) alone decides the sampling of the request.

    Generation ends with `stop_token` or after `max_response_tokens`. A temperature of 0 is greedy; at most 2. A request
    that another engine has begun goes on after its tokens `so_far_tokens`, whose log-probabilities are `so_far_logprobs`.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    seed: int
    temperature: float
    max_response_tokens: int
    stop_token: int
    so_far_tokens: tuple[int, ...] = ()
    so_far_logprobs: tuple[float, ...] = ()

    def after(self, begun: Completion) -> Request:
        """The rest of this request, of which `begun` has been sampled.

        Its seed is another hash of the same seed: the same one would draw the same random numbers once more.
        """
        seed = seed_of("continued", self.seed, len(begun.tokens))
        return replace(self, seed=seed, so_far_tokens=begun.tokens, so_far_logprobs=begun.logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """A request's sampled tokens (the stop token included) and the log-probability of each, natural logarithm.

    Log-probabilities are vLLM's `raw_logprobs`: of the model's own distribution, at temperature 1, whatever the
    request's temperature was. At temperature 1 that is the distribution that was sampled from. One that is still
    "running" has its tokens so far.
    """

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: Literal["stop", "length", "running"]
