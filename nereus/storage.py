"""How each engine keeps a rank's boxes in its own storage: pure arithmetic over ModelSpec and Layout.

Megatron-core (0.16) interleaves q, k, v per KV group into linear_qkv, fuses gate and up into linear_fc1, pads the
vocabulary, keeps a rank's experts one after the other, and shards optimizer state over DP (and CP; experts over their
own replicas) as a flat range of each bucket of a contiguous buffer (param_and_grad_buffer.py). vLLM cuts the same
tensors by tensor parallelism, or gives whole experts to its ranks. The engines check at every build that their real
storage is what is said here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod
from typing import Literal

from nereus.boxes import Box, flat_boxes, whole
from nereus.layout import Coordinates, Layout, StagePlan
from nereus.model import (
    DTYPE_BYTES,
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    SCALAR_HEADS,
    VOCAB_ALIGN,
    ModelSpec,
    Tensor,
    expert_parts,
    is_sparse,
    layer_name,
    round_up,
    router_part,
)

Component = Literal["weight", "master", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Component, ...] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Shard:
    """A Box of one component of one tensor of one model-stage's state; `dtype` as it is stored and sent."""

    emu: str
    component: str
    tensor: str
    box: Box
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the shard."""
        return self.box.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Where a shard lies in storage: `offset` elements into `param`'s flat array, rows `stride` elements apart."""

    component: Component
    tensor: str
    box: Box
    param: str
    offset: int
    stride: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Canonical `box` of `tensor` that fills rows [row, row + height) of a local parameter over its full width."""

    tensor: str
    box: Box
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """A parameter of an engine on one rank: its name, local shape, type, and the pieces that fill it.

    `expert` says that it is reduced over the replicas of experts, not over data parallelism: an expert's where ep > 1;
    `shared` that it is one of the two copies of a tied embedding, on the first and the last rank of a pipeline.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    expert: bool = False
    shared: bool = False

    @property
    def width(self) -> int:
        """Elements of one row."""
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def elements(self) -> int:
        """Elements of the local parameter, padding included."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """A contiguous buffer of Megatron's DDP: parameters of one type, of experts or not, by their place in it.

    `places` are offsets in elements, `buckets` the ranges that are reduced and sharded each on its own, one after the
    other up to `end`; with the distributed optimizer starts and ends are padded.
    """

    dtype: str
    expert: bool
    places: Mapping[str, int]
    buckets: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        """Elements of the buffer, padding included."""
        return self.buckets[-1][1]


def vocab_rows(vocab: int, tp: int, tp_rank: int) -> tuple[int, int, int]:
    """(first row, end row, padded rows) of a vocabulary tensor on a TP rank; padding does not depend on tp."""
    per = round_up(vocab, VOCAB_ALIGN) // tp
    return min(tp_rank * per, vocab), min((tp_rank + 1) * per, vocab), per


def cut_box(spec: ModelSpec, tensor: Tensor, tp: int, tp_rank: int) -> Box:
    """The box of `tensor` on a TP rank: rows, columns, the rank's KV heads (replicated above kv_heads), or all.

    For a tensor of an expert the degree and the rank are those of expert tensor parallelism.
    """
    box = whole(tensor.shape)
    if tensor.cut == "none" or (tp == 1 and tensor.cut != "vocabulary"):
        return box
    if tensor.cut == "vocabulary":
        first, end, _ = vocab_rows(tensor.shape[0], tp, tp_rank)
        return Box((first, 0), (end, tensor.shape[1]))
    if tensor.cut == "columns":
        per = tensor.shape[1] // tp
        return Box((0, tp_rank * per), (tensor.shape[0], (tp_rank + 1) * per))
    parts, rank = tp, tp_rank
    if tensor.cut == "kv" and spec.config.kv_heads < tp:
        parts, rank = spec.config.kv_heads, tp_rank // (tp // spec.config.kv_heads)
    per = tensor.shape[0] // parts
    return Box((rank * per, *box.start[1:]), ((rank + 1) * per, *box.stop[1:]))


def generation_box(spec: ModelSpec, tensor: Tensor, layout: Layout, tp_rank: int) -> Box | None:
    """The box of `tensor` on a rank of a vLLM engine, None where it holds nothing of it.

    With ep > 1 (then ep = tp) the ranks share out whole experts, in order; without, each cuts all of them by TP.
    """
    if layout.ep > 1 and tensor.expert is not None:
        return whole(tensor.shape) if tensor.expert // (spec.config.experts // layout.ep) == tp_rank else None
    box = cut_box(spec, tensor, layout.tp, tp_rank)
    return box if box.elements > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """What of a rank's coordinates decides which weights Megatron keeps there."""

    pipeline: tuple[int, ...]
    pp_rank: int
    tp: int
    tp_rank: int
    ep: int
    ep_rank: int
    etp: int
    etp_rank: int

    @property
    def first(self) -> bool:
        return self.pp_rank == 0

    @property
    def last(self) -> bool:
        return self.pp_rank == len(self.pipeline) - 1


def _whole_param(
    spec: ModelSpec, name: str, tensor: Tensor, tp: int, tp_rank: int, *, expert: bool = False, shared: bool = False
) -> Param:
    """A parameter that holds one tensor's box; a vocabulary's rows are padded at the end."""
    box = cut_box(spec, tensor, tp, tp_rank)
    shape = box.shape
    if tensor.cut == "vocabulary":
        shape = (vocab_rows(tensor.shape[0], tp, tp_rank)[2], tensor.shape[1])
    pieces = (Piece(tensor=tensor.name, box=box, row=0),) if box.elements > 0 else ()
    return Param(name=name, shape=shape, dtype=tensor.dtype, pieces=pieces, expert=expert, shared=shared)


def _qkv_param(spec: ModelSpec, name: str, layer: int, place: _Place, kind: str) -> Param:
    """linear_qkv's weight or bias: for each KV group of the rank [its q heads; k; v].

    With tp above kv_heads Megatron would cut inside a group; `nereus.validate` allows that only for generation.
    """
    c = spec.config
    q, k, v = (spec.tensor(layer_name(layer, f"self_attn.{x}_proj", kind)) for x in "qkv")
    queries = c.heads // c.kv_heads * c.head_dim
    groups = c.kv_heads // place.tp
    rest = q.shape[1:]
    zeros = (0,) * len(rest)
    pieces: list[Piece] = []
    row = 0
    for group in range(place.tp_rank * groups, (place.tp_rank + 1) * groups):
        for tensor, rows in ((q, queries), (k, c.head_dim), (v, c.head_dim)):
            box = Box((group * rows, *zeros), ((group + 1) * rows, *rest))
            pieces.append(Piece(tensor=tensor.name, box=box, row=row))
            row += rows
    return Param(name=name, shape=(row, *rest), dtype=q.dtype, pieces=tuple(pieces))


def _mlp_params(
    spec: ModelSpec, prefix: str, names: tuple[str, str, str], tp: int, tp_rank: int, *, expert: bool = False
) -> tuple[Param, Param]:
    """linear_fc1 (the rank's rows of gate, then of up) and linear_fc2 of an MLP or an expert; `names` are the tensors'."""
    gate, up, down = (spec.tensor(name) for name in names)
    box = cut_box(spec, gate, tp, tp_rank)
    rows = box.shape[0]
    fc1 = Param(
        name=f"{prefix}.linear_fc1.weight",
        shape=(2 * rows, gate.shape[1]),
        dtype=gate.dtype,
        pieces=(Piece(tensor=gate.name, box=box, row=0), Piece(tensor=up.name, box=box, row=rows)),
        expert=expert,
    )
    return fc1, _whole_param(spec, f"{prefix}.linear_fc2.weight", down, tp, tp_rank, expert=expert)


def _attention_params(spec: ModelSpec, prefix: str, layer: int, place: _Place) -> Iterator[Param]:
    """The parameters of a decoder layer before its MLP."""

    def single(name: str, part: str) -> Param:
        tensor = spec.tensor(layer_name(layer, part))
        return _whole_param(spec, f"{prefix}.{name}.weight", tensor, place.tp, place.tp_rank)

    yield single("input_layernorm", "input_layernorm")
    yield single("self_attention.linear_proj", "self_attn.o_proj")
    for kind in ("weight", "bias") if spec.config.qkv_bias else ("weight",):
        yield _qkv_param(spec, f"{prefix}.self_attention.linear_qkv.{kind}", layer, place, kind)
    for norm in "qk" if spec.config.qk_norm else "":
        yield single(f"self_attention.{norm}_layernorm", f"self_attn.{norm}_norm")
    yield single("pre_mlp_layernorm", "post_attention_layernorm")


def _layer_params(spec: ModelSpec, prefix: str, layer: int, place: _Place) -> Iterator[Param]:
    """The parameters of a decoder layer; of its experts those that the rank keeps, numbered from 0."""
    c = spec.config
    yield from _attention_params(spec, prefix, layer, place)
    if not is_sparse(c, layer):
        gate, up, down = (layer_name(layer, f"mlp.{x}_proj") for x in ("gate", "up", "down"))
        yield from _mlp_params(spec, f"{prefix}.mlp", (gate, up, down), place.tp, place.tp_rank)
        return
    yield _whole_param(spec, f"{prefix}.mlp.router.weight", spec.tensor(layer_name(layer, router_part(c))), 1, 0)
    count = c.experts // place.ep
    for local in range(count):
        gate, up, down = (layer_name(layer, part) for part in expert_parts(c, place.ep_rank * count + local))
        to = f"{prefix}.mlp.experts.local_experts.{local}"
        yield from _mlp_params(spec, to, (gate, up, down), place.etp, place.etp_rank, expert=place.ep > 1)


@lru_cache(maxsize=2048)
def _params(spec: ModelSpec, place: _Place) -> tuple[Param, ...]:
    shared = spec.tied and len(place.pipeline) > 1

    def outside(name: str, tensor: str) -> Param:
        known = spec.tensor(tensor)
        copied = shared and tensor == EMBEDDING
        return _whole_param(spec, name, known, place.tp, place.tp_rank, shared=copied)

    params: list[Param] = []
    if place.first:
        params.append(outside("embedding.word_embeddings.weight", EMBEDDING))
    first = sum(place.pipeline[: place.pp_rank])
    for local in range(place.pipeline[place.pp_rank]):
        params += _layer_params(spec, f"decoder.layers.{local}", first + local, place)
    if place.last:
        params.append(outside("decoder.final_layernorm.weight", FINAL_NORM))
        if not spec.tied:
            params.append(
                outside("output_layer.weight", LM_HEAD if spec.head == "language" else SCALAR_HEADS[spec.head])
            )
        elif shared:
            params.append(outside("output_layer.weight", EMBEDDING))
    return tuple(params)


def megatron_params(spec: ModelSpec, layout: Layout, at: Coordinates) -> tuple[Param, ...]:
    """The parameters of Megatron's GPTModel on a rank, in the order of `named_parameters()`.

    Data and context parallelism do not matter; with experts every coordinate counts, for theirs follow from all.
    """
    at = layout.coordinates(layout.rank(at))
    place = _Place(
        pipeline=layout.pipeline,
        pp_rank=at.pp,
        tp=layout.tp,
        tp_rank=at.tp,
        ep=layout.ep if spec.config.experts else 1,
        ep_rank=at.ep if spec.config.experts else 0,
        etp=layout.expert_tp if spec.config.experts else 1,
        etp_rank=at.etp if spec.config.experts else 0,
    )
    return _params(spec, place)


def buffers(params: tuple[Param, ...], layout: Layout) -> tuple[Buffer, ...]:
    """Megatron's buffers for `params`, in its order: those of experts last, one for each type.

    Parameters lie in reverse order. With the distributed optimizer each starts at a multiple of 64 elements and a
    bucket ends at a multiple of lcm(its ranks, 128). A buffer is one bucket (bucketing is off without
    overlap_grad_reduce), but for a copy of a tied embedding, which has one of its own.
    """
    kinds = dict.fromkeys((p.expert, p.dtype) for p in params)
    return tuple(
        _buffer([p for p in params if (p.expert, p.dtype) == kind], layout, *kind)
        for kind in sorted(kinds, key=lambda kind: kind[0])
    )


def _buffer(members: list[Param], layout: Layout, expert: bool, dtype: str) -> Buffer:
    ranks = layout.expert_dp if expert else layout.optimizer_ranks
    start_multiple, end_multiple = (64, lcm(ranks, 128)) if layout.distributed_optimizer else (1, 1)
    places: dict[str, int] = {}
    buckets: list[tuple[int, int]] = []
    first = end = 0

    def close_bucket() -> None:
        nonlocal first, end
        end = round_up(end, end_multiple)
        buckets.append((first, end))
        first = end

    for param in reversed(members):
        own_bucket = param.shared and layout.distributed_optimizer
        end = round_up(end, start_multiple)
        if own_bucket and end > first:
            close_bucket()
        places[param.name] = end
        end += param.elements
        if own_bucket:
            close_bucket()
    if end > first:
        close_bucket()
    return Buffer(dtype=dtype, expert=expert, places=places, buckets=tuple(buckets))


def owned_ranges(params: tuple[Param, ...], layout: Layout, at: Coordinates) -> dict[str, tuple[int, int]]:
    """Flat range of each parameter whose optimizer state a rank owns (Megatron's distributed optimizer).

    Of every bucket the ranks that share it own equal parts in turn: the dp-cp group, for experts their replicas.
    Without the distributed optimizer a rank owns all of its parameters.
    """
    if not layout.distributed_optimizer:
        return {p.name: (0, p.elements) for p in params}
    at = layout.coordinates(layout.rank(at))
    elements = {p.name: p.elements for p in params}
    ranges: dict[str, tuple[int, int]] = {}
    for buffer in buffers(params, layout):
        ranks, rank = layout.optimizer_ranks, layout.optimizer_rank(at)
        if buffer.expert:
            ranks, rank = layout.expert_dp, at.edp
        own = [(a + rank * ((b - a) // ranks), a + (rank + 1) * ((b - a) // ranks)) for a, b in buffer.buckets]
        for name, place in buffer.places.items():
            for first, last in own:
                start, stop = max(first - place, 0), min(last - place, elements[name])
                if start < stop:
                    ranges[name] = (start, stop)
    return {p.name: ranges[p.name] for p in params if p.name in ranges}


def _regions(component: Component, param: Param, start: int, stop: int) -> list[Region]:
    """Regions of the flat range [start, stop) of a parameter, offsets counted from `start`."""
    found: list[Region] = []
    for piece in param.pieces:
        first = piece.row * param.width
        for offset, box in flat_boxes(piece.box, start - first, stop - first):
            found.append(
                Region(
                    component=component,
                    tensor=piece.tensor,
                    box=box,
                    param=param.name,
                    offset=first + offset - start,
                    stride=param.width,
                )
            )
    return found


def state_dtype(component: str, dtype: str) -> str:
    """How a component is stored: weights in the tensor's type, masters and moments in float32."""
    return dtype if component == "weight" else "float32"


@lru_cache(maxsize=512)
def megatron_regions(spec: ModelSpec, layout: Layout, at: Coordinates, trained: bool) -> tuple[Region, ...]:
    """Every region of state on a rank of a Megatron stage: weights and, where trained, masters and moments.

    A float32 weight is its own master. Without the distributed optimizer masters and moments cover the rank's
    weights; with it, the flat range that the DP rank owns.
    """
    params = megatron_params(spec, layout, at)
    regions = [r for p in params for r in _regions("weight", p, 0, p.elements)]
    if not trained:
        return tuple(regions)
    owned = owned_ranges(params, layout, at)
    for param in params:
        if param.name in owned:
            components: tuple[Component, ...] = MOMENTS if param.dtype == "float32" else ("master", *MOMENTS)
            for component in components:
                regions += _regions(component, param, *owned[param.name])
    return tuple(regions)


def emu_name(stage: StagePlan) -> str:
    """The name of a model-stage's state, e.g. "actor.train"."""
    return f"{stage.model}.{stage.stage}"


@lru_cache(maxsize=256)
def holding(spec: ModelSpec, stage: StagePlan) -> dict[int, tuple[Shard, ...]]:
    """Which shards each slot holds when `spec` is cut as `stage` says; determined by the plan alone."""
    held: dict[int, tuple[Shard, ...]] = {}
    dtypes = {t.name: t.dtype for t in spec.tensors}
    for rank, slot in enumerate(stage.slots):
        at = stage.layout.coordinates(rank)
        if stage.stage == "generate":
            held[slot] = tuple(
                Shard(emu=emu_name(stage), component="weight", tensor=t.name, box=box, dtype=t.dtype)
                for t in spec.tensors
                if (box := generation_box(spec, t, stage.layout, at.tp)) is not None
            )
        else:
            held[slot] = tuple(
                Shard(
                    emu=emu_name(stage),
                    component=r.component,
                    tensor=r.tensor,
                    box=r.box,
                    dtype=state_dtype(r.component, dtypes[r.tensor]),
                )
                for r in megatron_regions(spec, stage.layout, at, stage.stage == "train")
            )
    return held
