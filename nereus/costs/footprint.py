"""Peak bytes of a slot at the scale of GPUs, by component and phase, from shapes alone.

Components of training: weights, gradients, masters, moments, gathered (what full sharding holds whole for a moment),
activations, working (one layer while it is recomputed or differentiated), logits, ends (the gradient of an embedding
or a head before it is added up), communicators. Of generation: weights, cache, engine (workspace and graphs).
Each is one closed form; nothing is fitted but MARGIN.

Formulas: facts, costs, 3.6 and 3.7; Korthikanti et al. 2022 for layers without flash attention (their table 2 by term).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nereus.costs.generation import WORKSPACE_BYTES, Generator, cache_bytes_per_token, weight_bytes_per_slot
from nereus.costs.rates import Rates
from nereus.costs.shape import Shape
from nereus.costs.training import BatchWork, layer_counts, owned_parameters
from nereus.layout import Layout

MARGIN = 0.06
"""Added to a prediction for fragmentation and for what the closed forms leave out; they are rarely high, mostly low."""
COMMUNICATOR_BYTES = 300_000_000
"""NCCL's buffers and CUDA's own of a process with a handful of groups."""
VOCABULARY_PARALLEL_LOSS_BYTES, PLAIN_LOSS_BYTES = 6, 12
"""Bytes a logit: 16-bit logits and their fp32 softmax in place; or both, the fp32 gradient, and the 16-bit one."""


class Parts:
    """Bytes by component, however they came together."""

    __slots__ = ()
    components: Mapping[str, float]

    @property
    def total_bytes(self) -> float:
        """The sum of the components, without margin."""
        return sum(self.components.values())

    @property
    def binding(self) -> str:
        """The largest component."""
        return max(self.components, key=lambda name: self.components[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak(Parts):
    """A slot's peak in one phase: bytes by component."""

    phase: str
    components: Mapping[str, float]

    @property
    def safe_bytes(self) -> float:
        """The peak that a plan is judged by: with MARGIN."""
        return self.total_bytes * (1 + MARGIN)


def state_components(
    shape: Shape, layout: Layout, batch: BatchWork, pp_rank: int, *, gradient_bytes: float = 4.0
) -> dict[str, float]:
    """Bytes of weights, gradients, masters and moments on a rank of this pipeline rank, by how they are sharded.

    Full sharding keeps fp32 weights in parts (they are the masters) and gradients in fp32 parts.
    """
    body, experts = owned_parameters(shape, layout, pp_rank)
    both = body + experts
    parts = body / layout.optimizer_ranks + experts / layout.expert_dp
    if batch.sharding == "full":
        return {"weights": 0.0, "gradients": 4 * parts, "masters": 4 * parts, "moments": 8 * parts}
    owned = parts if batch.sharding == "optimizer" else both
    return {"weights": 2 * both, "gradients": gradient_bytes * both, "masters": 4 * owned, "moments": 8 * owned}


def layer_activation_bytes(shape: Shape, layout: Layout, batch: BatchWork, *, sparse: bool, kept: str) -> float:
    """Bytes that one layer keeps of a micro-batch for its backward pass; `kept` as BatchWork.recompute says."""
    rows = batch.micro_batch * batch.tokens / layout.cp
    tp = layout.tp
    cut = tp if batch.sequence_parallel else 1
    if kept == "full":
        return rows * 2 * shape.hidden / cut
    if kept == "half":
        parts = (layer_activation_bytes(shape, layout, batch, sparse=sparse, kept=how) for how in ("none", "full"))
        return sum(parts) / 2
    old = batch.attention == "whole"
    norms = (10 if old else 8) * shape.hidden
    if shape.kv_latent_dim:
        latent = 4 * (shape.q_latent_dim + shape.kv_latent_dim) + 2 * shape.rope_dim
        attention = 2 * shape.heads * (4 * shape.head_dim + 2 * shape.rope_dim) / tp + latent / cut
    else:
        attention = (4 * shape.query_dim + 4 * max(shape.key_dim, shape.head_dim * tp)) / tp
    if old:
        squares = 0 if kept == "selective" else 5 * shape.heads * batch.tokens / tp
        return rows * (norms / cut + attention + 2 * 2 * shape.ffn / tp + squares)
    if not sparse:
        return rows * (norms / cut + attention + _mlp_bytes(shape, shape.ffn) / tp)
    active = shape.active_expert_count
    routed = active * (4 * shape.hidden + _mlp_bytes(shape, shape.expert_ffn)) / tp
    shared = _mlp_bytes(shape, shape.shared_ffn) / tp
    return rows * (norms / cut + attention + routed + shared + 8 * shape.expert_count / cut)


def _mlp_bytes(shape: Shape, width: int) -> float:
    """Bytes a token that an MLP keeps: gate, up and their product; or the activation's input and output."""
    return (6 if shape.gated else 4) * width


def in_flight(layout: Layout, batch: BatchWork, pp_rank: int) -> float:
    """How many micro-batches' worth of a rank's layers is kept at once under 1F1B, interleaved if told."""
    most = layout.pp - pp_rank
    count = min(most, batch.micro_batches(layout))
    if batch.chunk_count > 1 and layout.pp > 1:
        whole = layout.pp * (1 + (layout.pp - 1) / (layout.pp * batch.chunk_count))
        return min(float(batch.micro_batches(layout)), whole - pp_rank * 2 / batch.chunk_count)
    return float(count)


def activation_components(shape: Shape, layout: Layout, batch: BatchWork, pp_rank: int) -> dict[str, float]:
    """Bytes of kept activations, of the layer at work, of logits and of what full sharding gathers."""
    plain, sparse = layer_counts(shape, layout, pp_rank)

    def kept(how: str) -> tuple[float, float]:
        return (
            layer_activation_bytes(shape, layout, batch, sparse=False, kept=how),
            layer_activation_bytes(shape, layout, batch, sparse=True, kept=how) if sparse else 0.0,
        )

    dense_bytes, sparse_bytes = kept(batch.recompute)
    components = {
        "activations": in_flight(layout, batch, pp_rank) * (plain * dense_bytes + sparse * sparse_bytes),
        "working": max(kept("none")) * (2 if batch.recompute == "full" else 1),
    }
    rows = batch.micro_batch * batch.tokens / layout.cp
    if layout.tp > 1 and batch.sequence_parallel:
        components["working"] += 2 * 2 * rows * shape.hidden  # whole inputs of attention and MLP, gathered
    if pp_rank in (0, layout.pp - 1) and batch.sharding != "full":
        components["ends"] = 2 * shape.vocab * shape.hidden / layout.tp
    if pp_rank == layout.pp - 1:
        each = PLAIN_LOSS_BYTES if batch.sharding == "full" else VOCABULARY_PARALLEL_LOSS_BYTES
        components["logits"] = rows * (each * shape.vocab / layout.tp + 2 * shape.hidden)
    if batch.sharding == "full":
        body, experts = owned_parameters(shape, layout, pp_rank)
        ends = (shape.embedding_parameters_count + shape.head_parameters_count) / layout.tp
        ends = ends if layout.pp == 1 else ends / 2
        per_layer = max(0.0, body + experts - ends) / max(1, plain + sparse)
        components["gathered"] = 2 * (2 * per_layer + ends) + 4 * per_layer
    return components


def train_peak(shape: Shape, layout: Layout, batch: BatchWork, pp_rank: int, *, gradient_bytes: float = 4.0) -> Peak:
    """The peak of training on a rank of this pipeline rank."""
    state = state_components(shape, layout, batch, pp_rank, gradient_bytes=gradient_bytes)
    held = activation_components(shape, layout, batch, pp_rank)
    return Peak(phase="train", components={**state, **held, "communicators": COMMUNICATOR_BYTES})


def worst_train_peak(shape: Shape, layout: Layout, batch: BatchWork, *, gradient_bytes: float = 4.0) -> Peak:
    """The highest of the pipeline ranks' peaks."""
    peaks = (train_peak(shape, layout, batch, rank, gradient_bytes=gradient_bytes) for rank in range(layout.pp))
    return max(peaks, key=lambda peak: peak.total_bytes)


def generate_peak(shape: Shape, engine: Generator, sequences: float, tokens: float) -> Peak:
    """The peak of a generation replica's slot that holds this many sequences of this many tokens at once."""
    return Peak(
        phase="generate",
        components={
            "weights": weight_bytes_per_slot(shape, engine),
            "cache": sequences * tokens * cache_bytes_per_token(shape, engine),
            "engine": WORKSPACE_BYTES,
        },
    )


def infer_peak(shape: Shape, layout: Layout, batch: BatchWork, pp_rank: int) -> Peak:
    """The peak of a pass without gradients: weights, one layer's work, logits."""
    body, experts = owned_parameters(shape, layout, pp_rank)
    sparse = bool(shape.expert_count)
    rows = batch.micro_batch * batch.tokens / layout.cp
    logits = rows * VOCABULARY_PARALLEL_LOSS_BYTES * shape.vocab / layout.tp if pp_rank == layout.pp - 1 else 0.0
    return Peak(
        phase="infer",
        components={
            "weights": 2 * (body + experts),
            "working": layer_activation_bytes(shape, layout, batch, sparse=sparse, kept="none"),
            "logits": logits,
            "communicators": COMMUNICATOR_BYTES,
        },
    )


def with_resident(peak: Peak, resident: Mapping[str, float]) -> Peak:
    """The peak with what other model-stages leave on the slot meanwhile, by name."""
    return Peak(phase=peak.phase, components={**peak.components, **resident})


def binding_peak(peaks: Sequence[Peak]) -> Peak:
    """The phase that needs most."""
    return max(peaks, key=lambda peak: peak.total_bytes)


def fits(peak: Peak, rates: Rates) -> bool:
    """Whether the slot holds the peak with its margin."""
    return peak.safe_bytes <= rates.memory_bytes
