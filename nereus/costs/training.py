"""Seconds of a training step and of a forward pass over a batch, as sums of named analytic terms.

Every function answers `Terms`: a mapping term -> seconds, each term linear in one kind of work. The prediction is the sum of
coefficient x term; `nereus.costs.coefficients` has coefficients and deviations, `nereus.costs.calibrate` moves them on the running job.
Formulas: facts, costs, 3; Korthikanti et al. 2022 (activations and collectives of tensor and sequence parallelism),
Narayanan et al. 2021 (interleaved pipeline).

  gemm        products of weights and activations, forward and backward, on the slowest pipeline rank, all micro-batches
  experts     products of routed and shared experts, and their tokens' way through memory
  attention   the attention core, fused (causal half counted) or not (whole squares through memory)
  memory      norms, residuals, activations of the MLP: bytes over memory bandwidth
  launch      kernels too small to hide their launch
  host        what the host takes to issue a layer's kernels beyond what the slot takes to run them
  recompute   what is run a second time before its backward
  head        logits and their loss
  tp, cp, ep  collectives within layers; `pp` sends between pipeline ranks
  bubble      pipeline ranks that wait: fill, drain, and unequal stages
  dp          what gradient and parameter collectives over replicas add
  optimizer   Adam over the owned part
  step        what a step takes whatever its work
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Literal

from nereus.costs.rates import Rates
from nereus.costs.shape import Shape
from nereus.layout import Layout

Terms = Mapping[str, float]
Recompute = Literal["none", "selective", "half", "full"]
Sharding = Literal["none", "optimizer", "full"]
Kernel = Literal["fused", "early", "whole"]

KERNELS_PER_LAYER = 12
"""Small kernels of a layer's forward pass beside its products."""
AHEAD_SHARE = 0.6
"""Share of a slot's running time that hides the host's issuing of what comes next. At most what keeps a faster link or kernel
from costing: below the least coefficient of a term that it hides in, less what collectives over replicas hide in that."""
HIDDEN_SHARE = 0.8
"""Share of a collective that computation of equal length hides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchWork:
    """The work of one optimizer step, or of one forward pass: `sequences` of `tokens` each over the whole layout.

    `micro_batch` is in sequences; `chunk_count` is the number of model chunks on a pipeline rank. `recompute`: "selective"
    repeats the attention core, "half" every second product, "full" whole layers. `attention` is "fused" for today's
    kernels, "early" for the first flash attention (half as fast: Dao 2023), "whole" for squares that go through memory
    (before 2023). `sequence_parallel` cuts norms and residuals over TP; `sharding` "full" is FSDP/ZeRO-3; `weight_bytes` 1
    is fp8 arithmetic, `gradient_bytes` is what gradients weigh on the wire.
    """

    sequences: int
    tokens: int
    micro_batch: int = 1
    chunk_count: int = 1
    recompute: Recompute = "none"
    sharding: Sharding = "optimizer"
    attention: Kernel = "fused"
    sequence_parallel: bool = True
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0

    def micro_batches(self, layout: Layout) -> int:
        """Micro-batches of the fullest replica."""
        return max(1, ceil(ceil(self.sequences / layout.dp) / self.micro_batch))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Seconds of one layer's forward pass of a micro-batch on one rank, by term."""

    gemm_seconds: float
    experts_seconds: float
    attention_seconds: float
    memory_seconds: float
    launch_seconds: float
    tp_seconds: float
    cp_seconds: float
    ep_seconds: float

    def host_seconds(self, dispatch_seconds: float, *, passes: int = 1) -> float:
        """What issuing a layer takes beyond running it; `passes` 2 is its backward. The host runs ahead, not freely."""
        busy = passes * (self.gemm_seconds + self.experts_seconds + self.attention_seconds + self.memory_seconds)
        return max(0.0, dispatch_seconds - AHEAD_SHARE * (busy + self.tp_seconds))


def layer_cost(shape: Shape, layout: Layout, batch: BatchWork, rates: Rates, *, sparse: bool = False) -> LayerCost:
    """The forward pass of a layer (with experts if `sparse`) over one micro-batch."""
    rows = batch.micro_batch * batch.tokens / layout.cp
    weight, tp = batch.weight_bytes, layout.tp
    matrices = shape.attention_matrices(tp)
    gemm = sum(rates.gemm_seconds(rows, out, into, weight) for out, into in matrices)
    width, experts = shape.ffn, 0.0
    if sparse:
        experts = _expert_seconds(shape, layout, rows, rates, weight)
        width = shape.active_expert_count * shape.expert_ffn + shape.shared_ffn
    else:
        gemm += sum(rates.gemm_seconds(rows, out, into, weight) for out, into in shape.mlp_matrices(shape.ffn, tp))
    attention = attention_seconds(shape, layout, batch, rates)
    cut = tp if batch.sequence_parallel else 1
    elements = 10 * shape.hidden / cut + (4 * shape.query_dim + (3 if shape.gated else 2) * width) / tp
    per_node = rates.slots_per_node
    tensor_bytes = 2 * rows * shape.hidden
    tp_seconds = 2 * rates.collective_seconds(2 * (tp - 1) / tp * tensor_bytes, tp, per_node)
    ring_bytes = 2 * rows * 2 * shape.key_dim / tp * (layout.cp - 1)
    cp_seconds = rates.collective_seconds(ring_bytes, layout.cp, per_node // tp)
    ep_seconds = 0.0
    if sparse and layout.ep > 1:
        routed = 2 * rows * shape.hidden * shape.active_expert_count / tp * (layout.ep - 1) / layout.ep
        ep_seconds = 2 * rates.collective_seconds(routed, layout.ep, per_node // layout.expert_tp)
    return LayerCost(
        gemm_seconds=gemm,
        experts_seconds=experts,
        attention_seconds=attention,
        memory_seconds=2 * rows * elements / rates.memory_bytes_per_second,
        launch_seconds=KERNELS_PER_LAYER * rates.launch_seconds,
        tp_seconds=tp_seconds,
        cp_seconds=max(0.0, cp_seconds - HIDDEN_SHARE * attention),
        ep_seconds=ep_seconds,
    )


def _expert_seconds(shape: Shape, layout: Layout, rows: float, rates: Rates, weight: float) -> float:
    """Experts' products (each local expert gets its even part of the group's tokens), permuting there and back."""
    local = max(1, shape.expert_count // layout.ep)
    tokens = rows * layout.ep * shape.active_expert_count / shape.expert_count
    tokens *= layout.expert_tp / layout.tp
    cut = shape.mlp_matrices(shape.expert_ffn, layout.expert_tp)
    grouped = sum(rates.gemm_seconds(tokens, out, into, weight) - rates.launch_seconds for out, into in cut)
    shared = 0.0
    if shape.shared_ffn:
        cut = shape.mlp_matrices(shape.shared_ffn, layout.tp)
        shared = sum(rates.gemm_seconds(rows, out, into, weight) for out, into in cut)
    permuted = 8 * 2 * rows * shape.active_expert_count * shape.hidden / layout.tp
    grouped = local * grouped + len(cut) * rates.launch_seconds
    return grouped + shared + permuted / rates.memory_bytes_per_second


def attention_seconds(shape: Shape, layout: Layout, batch: BatchWork, rates: Rates) -> float:
    """The attention core's forward pass: 2 products over half the squares when fused, whole ones and 6 passes if not."""
    squares = batch.micro_batch * batch.tokens**2 / layout.cp / layout.tp
    flops = 4 * squares * (shape.query_dim + shape.heads * shape.rope_dim / 2)
    if batch.attention != "whole":
        slower = 2 if batch.attention == "early" else 1
        return slower * flops / 2 / rates.attention_flops_per_second + rates.launch_seconds
    passes = 13 * squares * shape.heads / rates.memory_bytes_per_second
    return flops / rates.flops_per_second + passes + 4 * rates.launch_seconds


def head_seconds(shape: Shape, layout: Layout, batch: BatchWork, rates: Rates) -> float:
    """Logits and their log-probabilities of a micro-batch: product, then 12 bytes a logit through memory."""
    rows = batch.micro_batch * batch.tokens / layout.cp
    vocabulary = shape.vocab / layout.tp
    product = rates.gemm_seconds(rows, vocabulary, shape.hidden)
    return product + 12 * rows * vocabulary / rates.memory_bytes_per_second


def _sum(costs: list[tuple[int, LayerCost]], name: str) -> float:
    return sum(count * float(getattr(cost, name)) for count, cost in costs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pipelined:
    """A micro-batch on a pipeline: the slowest rank's terms and seconds, forward and backward, and the other ranks' seconds."""

    terms: Mapping[str, float]
    seconds: float
    others_seconds: float


def layer_counts(shape: Shape, layout: Layout, pp_rank: int) -> tuple[int, int]:
    """(dense, sparse) layers of a pipeline rank."""
    if not shape.expert_count:
        return layout.pipeline[pp_rank], 0
    layers = layout.layers(pp_rank)
    plain = sum(layer < shape.dense_layers for layer in layers)
    return plain, len(layers) - plain


def _pipelined(shape: Shape, layout: Layout, batch: BatchWork, rates: Rates, *, backward: bool) -> _Pipelined:
    """A micro-batch on every pipeline rank. Backward: products twice, attention three times, memory twice the forward.

    Replicas, sequences and sharding do not count, but for the link that pipeline ranks send over: asked for once.
    """
    inside = layout.tp * layout.cp * layout.dp < rates.slots_per_node
    alike = replace(layout, dp=1 if inside else rates.slots_per_node)
    kind = replace(batch, sequences=0, sharding="none", recompute=batch.recompute if backward else "none")
    return _pipelined_alike(shape, alike, kind, rates, backward=backward)


@lru_cache(maxsize=16384)
def _pipelined_alike(shape: Shape, layout: Layout, batch: BatchWork, rates: Rates, *, backward: bool) -> _Pipelined:
    flat = replace(layout, pp=1, dp=1, pipeline=(shape.layers,))
    plain, sparse, head = _micro_batch_costs(shape, flat, replace(batch, recompute="none"), rates)
    slowest: dict[str, float] = {}
    slowest_seconds = total_seconds = 0.0
    known: dict[tuple[int, int, bool], tuple[dict[str, float], float]] = {}
    for rank in range(layout.pp):
        counts = layer_counts(shape, layout, rank)
        last = rank == layout.pp - 1
        kind = (*counts, last)
        if kind not in known:
            costs = [(count, cost) for count, cost in zip(counts, (plain, sparse), strict=True) if count]
            terms = _rank_terms(shape, layout, batch, rates, costs, backward=backward)
            terms["head"] = (3 if backward else 1) * head if last else 0.0
            known[kind] = terms, sum(terms.values())
        terms, seconds = known[kind]
        total_seconds += seconds
        if seconds > slowest_seconds or not rank:
            slowest, slowest_seconds = terms, seconds
    return _Pipelined(terms=slowest, seconds=slowest_seconds, others_seconds=total_seconds - slowest_seconds)


@lru_cache(maxsize=4096)
def _micro_batch_costs(
    shape: Shape, layout: Layout, batch: BatchWork, rates: Rates
) -> tuple[LayerCost, LayerCost, float]:
    """(a dense layer, a sparse one, seconds of the head) of a micro-batch: pipelines and replicas do not count."""
    plain = layer_cost(shape, layout, batch, rates)
    sparse = layer_cost(shape, layout, batch, rates, sparse=True) if shape.expert_count else plain
    return plain, sparse, head_seconds(shape, layout, batch, rates)


def _rank_terms(
    shape: Shape,
    layout: Layout,
    batch: BatchWork,
    rates: Rates,
    costs: list[tuple[int, LayerCost]],
    *,
    backward: bool,
) -> dict[str, float]:
    """One pipeline rank's micro-batch by term, without its head."""
    twice, core, third = (2, 3, 3) if backward else (0, 0, 1)
    gemm, experts = _sum(costs, "gemm_seconds"), _sum(costs, "experts_seconds")
    attention, memory = _sum(costs, "attention_seconds"), _sum(costs, "memory_seconds")
    launch = _sum(costs, "launch_seconds")
    terms = {
        "gemm": (1 + twice) * gemm,
        "experts": (1 + twice) * experts,
        "attention": (1 + core) * attention,
        "memory": (1 + twice) * memory,
        "launch": (1 + twice) * launch,
        "tp": (2 if backward else 1) * _sum(costs, "tp_seconds"),
        "cp": third * _sum(costs, "cp_seconds"),
        "ep": (2 if backward else 1) * _sum(costs, "ep_seconds"),
        "host": _host_seconds(costs, batch, rates, backward=backward),
    }
    if layout.pp > 1:
        rows = batch.micro_batch * batch.tokens / layout.cp
        sent = 2 * rows * shape.hidden / (layout.tp if batch.sequence_parallel else 1)
        inside = layout.tp * layout.cp * layout.dp < rates.slots_per_node
        wire = rates.link_bytes_per_second if inside else rates.nic_bytes_per_second
        times = (2 if backward else 1) * batch.chunk_count
        terms["pp"] = times * (sent / wire + rates.nic_seconds)
    if backward and batch.recompute in ("full", "half"):
        share = 1.0 if batch.recompute == "full" else 0.5
        terms["recompute"] = share * (gemm + experts + attention + memory + launch)
        terms["tp"] *= 1 + share / 2
        terms["ep"] *= 1 + share / 2
    elif backward and batch.recompute == "selective":
        terms["recompute"] = attention
    return terms


def _host_seconds(costs: list[tuple[int, LayerCost]], batch: BatchWork, rates: Rates, *, backward: bool) -> float:
    """The term `host` of a micro-batch on one rank: forward, backward, and once more where layers are recomputed."""
    again = {"full": 1.0, "half": 0.5}.get(batch.recompute, 0.0) if backward else 0.0
    seconds = 0.0
    for count, cost in costs:
        seconds += (1 + again) * count * cost.host_seconds(rates.dispatch_seconds)
        if backward:
            seconds += count * cost.host_seconds(rates.dispatch_seconds, passes=2)
    return seconds


def _repeated(pipelined: _Pipelined, micro_batches: int, chunk_count: int, ranks: int) -> dict[str, float]:
    """The slowest rank's work over all micro-batches, and as `bubble` what 1F1B adds: sum / v + (m - 1 / v) max - m max."""
    terms = {name: micro_batches * seconds for name, seconds in pipelined.terms.items()}
    if ranks > 1:
        terms["bubble"] = pipelined.others_seconds / chunk_count
    return terms


def owned_parameters(shape: Shape, layout: Layout, pp_rank: int) -> tuple[float, float]:
    """(dense, expert) parameters on one rank of a pipeline rank: tensor, pipeline and expert cuts applied."""
    counts = _parameters(shape)
    plain, sparse = layer_counts(shape, layout, pp_rank)
    body = (plain + sparse) * counts.attention_count + plain * counts.dense_mlp_count + sparse * counts.shared_count
    if pp_rank == 0:
        body += counts.embedding_count
    if pp_rank == layout.pp - 1:
        body += shape.vocab * shape.hidden if shape.tied and layout.pp > 1 else counts.head_count
    experts = sparse * shape.expert_count * counts.expert_count / (layout.ep * layout.expert_tp)
    return body / layout.tp, experts


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parameters:
    """Parameters of a layer's parts and of the ends of a model."""

    attention_count: int
    dense_mlp_count: int
    shared_count: int
    expert_count: int
    embedding_count: int
    head_count: int


@lru_cache(maxsize=256)
def _parameters(shape: Shape) -> _Parameters:
    return _Parameters(
        attention_count=shape.attention_parameters_count,
        dense_mlp_count=shape.dense_mlp_parameters_count,
        shared_count=shape.shared_parameters_count,
        expert_count=shape.expert_parameters_count,
        embedding_count=shape.embedding_parameters_count,
        head_count=shape.head_parameters_count,
    )


@lru_cache(maxsize=16384)
def most_owned_parameters(shape: Shape, layout: Layout) -> tuple[float, float]:
    """`owned_parameters` of the pipeline rank that has most."""
    return max((owned_parameters(shape, layout, rank) for rank in range(layout.pp)), key=sum)


def _replica_seconds(
    shape: Shape, layout: Layout, batch: BatchWork, rates: Rates, hiding: float, forward: float
) -> float:
    """What collectives over replicas add to a step; `hiding` and `forward`: seconds of backward and forward they hide in.

    Full sharding gathers parameters for forward and backward and scatters gradients in every micro-batch of a model
    without pipeline.
    """
    ranks = layout.optimizer_ranks
    if ranks <= 1:
        return 0.0
    per_node = max(1, rates.slots_per_node // layout.tp)
    body, experts = most_owned_parameters(shape, layout)
    part = (ranks - 1) / ranks
    gather = 2 * part * body
    scatter = batch.gradient_bytes * part * body
    if batch.sharding == "full":
        times = batch.micro_batches(layout) if layout.pp == 1 else 1  # pipelines keep what they gathered
        seconds = rates.collective_seconds(gather, ranks, per_node), rates.collective_seconds(scatter, ranks, per_node)
        exposed = _exposed(seconds[0], forward) + _exposed(seconds[0] + seconds[1], hiding)
        return times * exposed
    if batch.sharding == "none":
        gather = scatter
    among = layout.expert_dp
    apart = (among - 1) / among * experts
    scattered = rates.collective_seconds(scatter, ranks, per_node)
    scattered += rates.collective_seconds(batch.gradient_bytes * apart, among, per_node)
    gathered = rates.collective_seconds(gather, ranks, per_node) + rates.collective_seconds(2 * apart, among, per_node)
    if batch.sharding == "none":
        return scattered + gathered  # DDP of the time reduces after the last backward
    return _exposed(scattered, hiding) + _exposed(gathered, forward)


def _exposed(seconds: float, hiding: float) -> float:
    return seconds - HIDDEN_SHARE * min(seconds, hiding)


def optimizer_seconds(shape: Shape, layout: Layout, batch: BatchWork, rates: Rates) -> float:
    """Adam reads and writes 30 bytes a parameter that it owns, clipping and zeroing 12 bytes a local one."""
    body, experts = most_owned_parameters(shape, layout)
    sharded = batch.sharding != "none"
    owned = body / (layout.optimizer_ranks if sharded else 1) + experts / (layout.expert_dp if sharded else 1)
    local = owned if batch.sharding == "full" else body + experts
    return (30 * owned + 12 * local) / rates.memory_bytes_per_second


def train_terms(shape: Shape, layout: Layout, batch: BatchWork, rates: Rates) -> dict[str, float]:
    """Terms of one optimizer step over `batch` on equal slots."""
    micro_batches = batch.micro_batches(layout)
    pipelined = _pipelined(shape, layout, batch, rates, backward=True)
    terms = _repeated(pipelined, micro_batches, batch.chunk_count, layout.pp)
    busy = pipelined.seconds
    share = {"none": 2 / 3, "selective": 2 / 3, "half": 0.7, "full": 3 / 4}[batch.recompute]
    terms["dp"] = _replica_seconds(shape, layout, batch, rates, share * busy, (1 - share) * busy)
    terms["optimizer"] = optimizer_seconds(shape, layout, batch, rates)
    terms["step"] = STEP_SECONDS
    return terms


STEP_SECONDS = 0.01
"""Unit of the term `step`: data loading, loss reduction, logging."""


def forward_terms(shape: Shape, layout: Layout, batch: BatchWork, rates: Rates) -> dict[str, float]:
    """Terms of one pass without gradients over `batch`: log-probabilities, values, reference."""
    pipelined = _pipelined(shape, layout, batch, rates, backward=False)
    terms = _repeated(pipelined, batch.micro_batches(layout), batch.chunk_count, layout.pp)
    terms["step"] = STEP_SECONDS
    return terms


def predicted_seconds(terms: Terms, coefficients: Mapping[str, float]) -> float:
    """The sum of coefficient x term; a term without a coefficient counts once."""
    return sum(coefficients.get(name, 1.0) * seconds for name, seconds in terms.items())
