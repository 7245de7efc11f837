"""What one model-stage does in a step: seconds by term for each of its phases, from the cost model.

Micro-batches are of samples of mean length: packing balances tokens over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import ceil

from nereus.costs.generation import (
    MEMORY_SHARE,
    WORKSPACE_BYTES,
    Generator,
    Lengths,
    generate_terms,
    weight_bytes_per_slot,
)
from nereus.costs.rates import Rates
from nereus.costs.shape import Shape
from nereus.costs.step import FRAMEWORK_SAMPLE_SECONDS, FRAMEWORK_STEP_SECONDS
from nereus.costs.training import HIDDEN_SHARE, BatchWork, forward_terms, most_owned_parameters, train_terms
from nereus.layout import Layout
from nereus.planning.job import Job
from nereus.planning.plan import StageChoice

Terms = dict[str, float]


def batch_of(job: Job, choice: StageChoice, sequences: int) -> BatchWork:
    """The work of a pass over this many samples of mean length."""
    return BatchWork(
        sequences=sequences,
        tokens=max(1, ceil(job.sample_tokens)),
        micro_batch=choice.micro_batch,
        recompute=choice.recompute,
        sharding=choice.sharding,
    )


def forward_work(job: Job, shape: Shape, choice: StageChoice, rates: Rates) -> Terms:
    """Terms of a pass without gradients over all samples. Full sharding gathers weights once a micro-batch."""
    batch = batch_of(job, choice, job.samples)
    terms = forward_terms(shape, choice.layout, batch, rates)
    if choice.sharding == "full" and choice.layout.optimizer_ranks > 1:
        ranks = choice.layout.optimizer_ranks
        wire = 2 * (ranks - 1) / ranks * sum(most_owned_parameters(shape, choice.layout))
        gather = rates.collective_seconds(wire, ranks, max(1, rates.slots_per_node // choice.layout.tp))
        count = batch.micro_batches(choice.layout)
        busy = sum(terms.values()) / count
        terms["dp"] = count * (gather - HIDDEN_SHARE * min(gather, busy))
    return terms


def update_work(job: Job, shape: Shape, choice: StageChoice, rates: Rates) -> Terms:
    """Terms of the optimizer steps of a step: mini-batches x epochs."""
    batch = batch_of(job, choice, max(1, ceil(job.samples / job.mini_batches)))
    times = job.mini_batches * job.epochs
    return {name: times * value for name, value in train_terms(shape, choice.layout, batch, rates).items()}


def generate_work(job: Job, layout: Layout, rates: Rates, cache_bytes: float) -> Terms:
    """Terms of the fullest engine's responses when its slots have `cache_bytes` each for keys and values."""
    responses = ceil(job.samples / layout.dp)
    return dict(_generated(job.actor.shape, layout.tp, rates, cache_bytes, job.prompt_tokens, responses, job.lengths))


@lru_cache(maxsize=4096)
def _generated(
    shape: Shape, tp: int, rates: Rates, cache_bytes: float, prompt_tokens: float, responses: int, lengths: Lengths
) -> Mapping[str, float]:
    engine = Generator(tp=tp)
    taken = cache_bytes + weight_bytes_per_slot(shape, engine) + WORKSPACE_BYTES
    given = replace(rates, memory_bytes=ceil(taken / MEMORY_SHARE))
    return generate_terms(shape, engine, given, prompt_tokens, responses, lengths)


def sync_work(job: Job, rates: Rates, *, one_domain: bool) -> Terms:
    """Terms of the actor's weights to the engines: every slot receives the whole model, as the coefficient was fitted.

    `one_domain`: links reach from all training slots to all engines.
    """
    shared = rates.slots_per_node * rates.nic_bytes_per_second
    wire = rates.link_bytes_per_second if one_domain else min(rates.link_bytes_per_second, shared)
    return {"sync": 2.0 * job.actor.shape.parameters_count / wire}


def framework_work(job: Job) -> Terms:
    """Terms of what no device does."""
    return {
        "step_framework": FRAMEWORK_STEP_SECONDS,
        "sample_framework": FRAMEWORK_SAMPLE_SECONDS * job.samples,
    }


def with_offload(terms: Terms, moved_bytes: float, rates: Rates) -> Terms:
    """The terms with what goes over the slot's PCIe port before and after the phase."""
    return {**terms, "offload": moved_bytes / rates.host_bytes_per_second} if moved_bytes else terms


def added(parts: list[Mapping[str, float]]) -> Terms:
    """The terms of all parts together."""
    total: Terms = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
