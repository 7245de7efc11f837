"""Seconds of generation: prefill, decode steps by bandwidth, the long tail of a batch, and how many sequences a cache holds.

Terms (names of their own, so that training and generation are calibrated apart):

  prefill        the prompts' forward passes
  decode_gemm    weights read, or products, of all decode steps
  decode_experts the same of experts: those that some token chose
  decode_cache   keys and values read
  decode_tp      all-reduces of a step
  decode_launch  launches of a step's kernels beside products, attention and all-reduces
  engine_step    what the engine takes a step whatever it holds: scheduler, sampler
  engine_token   what it takes for each token: sampling, detokenising, bookkeeping

Lengths decide: all sequences of a batch start together, so that a step's batch is the number of those that still live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import erf, exp, log, sqrt

from nereus.costs.rates import Rates
from nereus.costs.shape import Shape
from nereus.costs.training import BatchWork, forward_terms
from nereus.layout import Layout

ENGINE_STEP_SECONDS = 1e-3
"""Unit of the term `engine_step` beside the kernels: one millisecond."""
ENGINE_TOKEN_SECONDS = 1e-5
SMALL_KERNELS = 6
"""Kernels of a decoder layer beside products, attention and all-reduces."""
MEMORY_SHARE = 0.9
"""Share of a slot's memory that an engine takes (vLLM's gpu_memory_utilization)."""
WORKSPACE_BYTES = 3_500_000_000
"""What an engine needs beside weights and cache: activations of a prefill, graphs, communicators (facts: costs, 3.9)."""
QUANTILES = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """One generation replica: its tensor parallelism, which cuts experts like the rest, and bytes a number.

    `arithmetic_bytes` 0: products run at the width of the weights.
    """

    tp: int
    weight_bytes: float = 2.0
    cache_bytes: float = 2.0
    arithmetic_bytes: float = 0.0

    @property
    def operand_bytes(self) -> float:
        """The width that products run at; the weights' own unless told otherwise (weight-only quantisation)."""
        return self.arithmetic_bytes or self.weight_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Response lengths as quantiles, ascending: each stands for the same share of the responses."""

    tokens: tuple[float, ...]

    @property
    def mean_tokens(self) -> float:
        """Their mean."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def mean_context_tokens(self) -> float:
        """Tokens that a running response has so far, on average over its steps and over all responses."""
        return sum(tokens**2 for tokens in self.tokens) / (2 * sum(self.tokens))

    def scaled(self, factor: float) -> Lengths:
        """All lengths times `factor`."""
        return Lengths(tokens=tuple(tokens * factor for tokens in self.tokens))


def equal_lengths(tokens: float) -> Lengths:
    """Every response this long."""
    return Lengths(tokens=(float(tokens),))


def lognormal_lengths(
    mean_tokens: float, cap_tokens: float, spread: float = 0.6, quantiles: int = QUANTILES
) -> Lengths:
    """Log-normal lengths cut at a cap, with this mean after the cut; `spread` is the deviation of the logarithm.

    A mean at or above the cap means that all reach it.
    """
    if mean_tokens >= cap_tokens:
        return equal_lengths(cap_tokens)
    normals = tuple(_normal((index + 0.5) / quantiles) for index in range(quantiles))
    low, high = log(mean_tokens) - 4.0, log(cap_tokens) + 8.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = sum(min(cap_tokens, exp(middle + spread * z)) for z in normals) / quantiles
        low, high = (middle, high) if mean < mean_tokens else (low, middle)
    return Lengths(tokens=tuple(min(cap_tokens, exp(low + spread * z)) for z in normals))


def _normal(probability: float) -> float:
    """The quantile of the standard normal distribution, by bisection of its distribution function."""
    low, high = -8.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 * (1 + erf(middle / sqrt(2)))
        low, high = (middle, high) if below < probability else (low, middle)
    return low


def weight_bytes_per_slot(shape: Shape, engine: Generator) -> float:
    """Bytes of the weights on one slot of an engine; embedding and head stay at 2 bytes."""
    ends = shape.embedding_parameters_count + shape.head_parameters_count
    return (engine.weight_bytes * (shape.parameters_count - ends) + 2.0 * ends) / engine.tp


def cache_bytes_per_token(shape: Shape, engine: Generator) -> float:
    """Bytes that a token's keys and values take on one slot, over all layers; key heads are repeated above their number."""
    if shape.kv_latent_dim:
        return shape.layers * (shape.kv_latent_dim + shape.rope_dim) * engine.cache_bytes
    heads = max(1.0, shape.kv_heads / engine.tp)
    return shape.layers * 2 * heads * shape.head_dim * engine.cache_bytes


def cache_tokens(shape: Shape, engine: Generator, rates: Rates) -> float:
    """How many tokens of cache a replica has room for; 0 when the weights alone do not fit."""
    room = rates.memory_bytes * MEMORY_SHARE - weight_bytes_per_slot(shape, engine) - WORKSPACE_BYTES
    return max(0.0, room / cache_bytes_per_token(shape, engine))


def decode_step(shape: Shape, engine: Generator, rates: Rates, live: float, context_tokens: float) -> dict[str, float]:
    """Terms of one decode step with `live` sequences of this mean context."""
    tp, operand = engine.tp, engine.operand_bytes
    attention = sum(rates.gemm_seconds(live, out, into, operand) for out, into in shape.attention_matrices(tp))
    mlp = sum(rates.gemm_seconds(live, out, into, operand) for out, into in shape.mlp_matrices(shape.ffn, tp))
    plain = shape.layers - shape.expert_layers
    gemm = shape.layers * attention + plain * mlp
    experts = shape.expert_layers * _expert_step(shape, engine, rates, live) if shape.expert_layers else 0.0
    gemm += rates.gemm_seconds(live, shape.vocab / tp, shape.hidden)
    cached = live * context_tokens * cache_bytes_per_token(shape, engine)
    reduced = 2 * (tp - 1) / tp * 2 * live * shape.hidden
    allreduce = rates.collective_seconds(reduced, tp, rates.slots_per_node)
    return {
        "decode_gemm": gemm,
        "decode_experts": experts,
        "decode_cache": cached / rates.cache_bytes_per_second,
        "decode_tp": 2 * shape.layers * allreduce,
        "decode_launch": SMALL_KERNELS * shape.layers * rates.launch_seconds,
        "engine_step": ENGINE_STEP_SECONDS,
        "engine_token": ENGINE_TOKEN_SECONDS * live,
    }


def _expert_step(shape: Shape, engine: Generator, rates: Rates, live: float) -> float:
    """A layer's experts: only those that some token chose are read, each with its part of the tokens."""
    share = shape.active_expert_count / shape.expert_count
    touched = shape.expert_count * (1 - (1 - share) ** max(live, 1.0))
    rows = live * shape.active_expert_count / touched
    seconds = 0.0
    for out, into in shape.mlp_matrices(shape.expert_ffn, engine.tp):
        one = rates.gemm_seconds(rows, out, into, engine.operand_bytes) - rates.launch_seconds
        seconds += touched * one + rates.launch_seconds  # one grouped kernel
    if shape.shared_ffn:
        cut = shape.mlp_matrices(shape.shared_ffn, engine.tp)
        seconds += sum(rates.gemm_seconds(live, out, into, engine.operand_bytes) for out, into in cut)
    return seconds


def prefill_seconds(shape: Shape, engine: Generator, rates: Rates, prompts: float, prompt_tokens: float) -> float:
    """Seconds of the forward passes over `prompts`, packed into passes of 8,192 tokens."""
    per_pass = max(1, int(8192 // max(prompt_tokens, 1)))
    batch = BatchWork(
        sequences=per_pass,
        tokens=max(1, int(prompt_tokens)),
        micro_batch=per_pass,
        weight_bytes=engine.operand_bytes,
    )
    layout = Layout(tp=engine.tp, pp=1, dp=1, pipeline=(shape.layers,), etp=engine.tp)
    terms = forward_terms(shape, layout, batch, rates)
    whole = sum(seconds for name, seconds in terms.items() if name not in ("head", "step"))
    return prompts * whole / per_pass


def generate_terms(
    shape: Shape, engine: Generator, rates: Rates, prompt_tokens: float, responses: float, lengths: Lengths
) -> dict[str, float]:
    """Terms of a replica that answers `responses` prompts, with lengths by the quantiles of `lengths`.

    All start together when the cache holds them; if not, that many run at a time until the last ones drain. A replica
    whose cache holds none takes for ever (inf).
    """
    room = cache_tokens(shape, engine, rates)
    most = room / (prompt_tokens + lengths.mean_tokens)
    terms = {"prefill": prefill_seconds(shape, engine, rates, responses, prompt_tokens)}
    if most < 1:
        return {**terms, "decode_gemm": float("inf")}
    together = min(responses, most)
    steps: dict[str, float] = {}
    waiting = responses - together
    if waiting > 0:
        count = waiting * lengths.mean_tokens / together
        _add(steps, decode_step(shape, engine, rates, together, prompt_tokens + lengths.mean_context_tokens), count)
    previous = 0.0
    for index, tokens in enumerate(sorted(lengths.tokens)):
        live = together * (1 - index / len(lengths.tokens))
        if tokens > previous:
            context = prompt_tokens + (previous + tokens) / 2
            _add(steps, decode_step(shape, engine, rates, max(live, 1.0), context), tokens - previous)
            previous = tokens
    return terms | steps


def _add(total: dict[str, float], terms: dict[str, float], times: float) -> None:
    for name, seconds in terms.items():
        total[name] = total.get(name, 0.0) + times * seconds


def steady_terms(
    shape: Shape, engine: Generator, rates: Rates, prompt_tokens: float, output_tokens: float, live: float
) -> dict[str, float]:
    """Terms of the time between two tokens of a sequence when `live` run and each that ends is replaced at once.

    In the time of `output_tokens` steps every sequence is replaced once, so that `live` prefills are spread over them.
    """
    step = decode_step(shape, engine, rates, live, prompt_tokens + output_tokens / 2)
    prefills = prefill_seconds(shape, engine, rates, live, prompt_tokens) / output_tokens
    return {"prefill": prefills, **step}


def quantiles_of(lengths: Sequence[float], quantiles: int = QUANTILES) -> Lengths:
    """The quantiles of measured lengths."""
    ordered = sorted(lengths)
    picks = (ordered[min(len(ordered) - 1, int((i + 0.5) / quantiles * len(ordered)))] for i in range(quantiles))
    return Lengths(tokens=tuple(float(pick) for pick in picks))
