"""Seconds of a whole RL step: phases in sequence, each as terms, on slots that all stages share.

  generate    the slowest replica's prefill, decode and tail
  infer       log-probabilities of the actor, of the reference, values: one forward pass each
  train       optimizer steps over the mini-batches, actor and critic
  sync        new weights to the engines, and what is offloaded to host and back
  framework   what no device does: `step_framework` a step, `sample_framework` a sample (rewards, batches, dispatch)

The step is the sum of its phases. A job whose stages overlap or sit apart is not of this kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from nereus.costs.generation import Generator, Lengths, generate_terms, weight_bytes_per_slot
from nereus.costs.rates import Rates
from nereus.costs.shape import Shape
from nereus.costs.training import BatchWork, Terms, forward_terms, most_owned_parameters, train_terms
from nereus.layout import Layout

FRAMEWORK_STEP_SECONDS = 1.0
FRAMEWORK_SAMPLE_SECONDS = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """One RL step: `samples` responses of `lengths` to prompts of `prompt_tokens`, trained in `mini_batches` x
    `epochs`.

    `forward_count` counts passes without gradients of models of the actor's size (its own log-probabilities,
    reference, values, a reward model). With `critic` a second model of the same size is trained. `packed_tokens` is
    what a micro-batch holds. `whole_sync`: every slot receives the whole model's new weights (NeMo-RL, verl), not
    only what its engine lacks.
    """

    samples: int
    prompt_tokens: float
    lengths: Lengths
    mini_batches: int = 1
    epochs: int = 1
    forward_count: int = 2
    critic: bool = False
    whole_sync: bool = False
    packed_tokens: int = 8192

    @property
    def sample_tokens(self) -> float:
        """Mean tokens of a prompt and its response."""
        return self.prompt_tokens + self.lengths.mean_tokens


def step_phases(
    shape: Shape, train: Layout, batch: BatchWork, engine: Generator, replicas: int, work: StepWork, rates: Rates
) -> dict[str, Terms]:
    """Phase -> terms of a step. `batch` says how training and forward passes are done.

    Its `sequences`, `tokens` and `micro_batch` do not count: what is run and packed follows from `work`.
    """
    tokens = max(1, round(work.sample_tokens))
    packed = max(1, int(work.packed_tokens // tokens))
    whole = replace(batch, sequences=work.samples, tokens=tokens, micro_batch=packed)
    each = replace(whole, sequences=max(1, ceil(work.samples / work.mini_batches)))
    steps = work.mini_batches * work.epochs * (2 if work.critic else 1)
    responses = ceil(work.samples / replicas)
    return {
        "generate": generate_terms(shape, engine, rates, work.prompt_tokens, responses, work.lengths),
        "infer": _times(forward_terms(shape, train, whole, rates), work.forward_count),
        "train": _times(train_terms(shape, train, each, rates), steps),
        "sync": sync_terms(shape, train, engine, rates, work),
        "framework": {
            "step_framework": FRAMEWORK_STEP_SECONDS,
            "sample_framework": FRAMEWORK_SAMPLE_SECONDS * work.samples,
        },
    }


def sync_terms(shape: Shape, train: Layout, engine: Generator, rates: Rates, work: StepWork) -> dict[str, float]:
    """Terms of handing new weights to the engines and of moving training state out of their way and back.

    `sync`: weights through a slot's port. `offload`: masters, moments and gradients to host and back.
    """
    inside = train.ranks <= rates.slots_per_node
    wire = rates.link_bytes_per_second if inside else rates.nic_bytes_per_second
    if work.whole_sync:
        received = 2.0 * shape.parameters_count
        shared = rates.slots_per_node * rates.nic_bytes_per_second  # a node's slots share what its ports receive
        wire = rates.link_bytes_per_second if inside else min(rates.link_bytes_per_second, shared)
    else:
        received = weight_bytes_per_slot(shape, engine)
    body, experts = most_owned_parameters(shape, train)
    state = 12 * body / train.optimizer_ranks + 12 * experts / train.expert_dp + 2 * (body + experts)
    times = 2 if work.critic else 1
    return {"sync": received / wire, "offload": 2 * times * state / rates.host_bytes_per_second}


def _times(terms: Terms, count: int) -> dict[str, float]:
    return {name: count * seconds for name, seconds in terms.items()}


def summed(phases: dict[str, Terms]) -> dict[str, float]:
    """The terms of a whole step: equal names of different phases add up."""
    total: dict[str, float] = {}
    for terms in phases.values():
        for name, seconds in terms.items():
            total[name] = total.get(name, 0.0) + seconds
    return total
