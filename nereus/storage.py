"""How each engine keeps a rank's boxes in its own storage: pure arithmetic over ModelSpec and Layout.

Megatron-core (0.16) interleaves q, k, v per KV group into linear_qkv, fuses gate and up into linear_fc1, pads the
vocabulary, and shards optimizer state over DP as a flat range of one contiguous buffer: parameters in reverse order,
each at a multiple of 64 elements, the end padded to lcm(dp, 128) (param_and_grad_buffer.py). vLLM cuts the same
tensors by tensor parallelism alone. The engines check at every build that their real storage is what is said here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod
from typing import Literal

from nereus.boxes import Box, flat_boxes, whole
from nereus.layout import Coordinates, Layout, StagePlan
from nereus.model import EMBEDDING, FINAL_NORM, LM_HEAD, VALUE_HEAD, ModelSpec, Tensor, layer_name

Component = Literal["weight", "master", "exp_avg", "exp_avg_sq"]
VOCAB_ALIGN = 64
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
        return self.box.elements * (2 if self.dtype == "bfloat16" else 4)


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
    """A parameter of an engine on one rank: its name, local shape, type, and the pieces that fill it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def width(self) -> int:
        """Elements of one row."""
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def elements(self) -> int:
        """Elements of the local parameter, padding included."""
        return prod(self.shape)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def vocab_rows(vocab: int, tp: int, tp_rank: int) -> tuple[int, int, int]:
    """(first row, end row, padded rows) of a vocabulary tensor on a TP rank; padding does not depend on tp."""
    per = round_up(vocab, VOCAB_ALIGN) // tp
    return min(tp_rank * per, vocab), min((tp_rank + 1) * per, vocab), per


def cut_box(spec: ModelSpec, tensor: Tensor, tp: int, tp_rank: int) -> Box:
    """The box of `tensor` on a TP rank: rows, columns, the rank's KV heads (replicated above kv_heads), or all."""
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
    return Box((rank * per, 0), ((rank + 1) * per, tensor.shape[1]))


def _whole_param(spec: ModelSpec, name: str, tensor: Tensor, tp: int, tp_rank: int) -> Param:
    """A parameter that holds one tensor's box; a vocabulary's rows are padded at the end."""
    box = cut_box(spec, tensor, tp, tp_rank)
    shape = box.shape
    if tensor.cut == "vocabulary":
        shape = (vocab_rows(tensor.shape[0], tp, tp_rank)[2], tensor.shape[1])
    pieces = (Piece(tensor=tensor.name, box=box, row=0),) if box.elements > 0 else ()
    return Param(name=name, shape=shape, dtype=tensor.dtype, pieces=pieces)


def _qkv_param(spec: ModelSpec, name: str, layer: int, tp: int, tp_rank: int) -> Param:
    """linear_qkv: for each KV group of the rank [its q heads; k; v].

    With tp above kv_heads Megatron would cut inside a group; `nereus.validate` allows that only for generation.
    """
    c = spec.config
    q, k, v = (spec.tensor(layer_name(layer, f"self_attn.{x}_proj")) for x in "qkv")
    queries = c.heads // c.kv_heads * c.head_dim
    groups = c.kv_heads // tp
    pieces: list[Piece] = []
    row = 0
    for group in range(tp_rank * groups, (tp_rank + 1) * groups):
        for tensor, rows in ((q, queries), (k, c.head_dim), (v, c.head_dim)):
            box = Box((group * rows, 0), ((group + 1) * rows, c.hidden))
            pieces.append(Piece(tensor=tensor.name, box=box, row=row))
            row += rows
    return Param(name=name, shape=(row, c.hidden), dtype=q.dtype, pieces=tuple(pieces))


def _fc1_param(spec: ModelSpec, name: str, layer: int, tp: int, tp_rank: int) -> Param:
    """linear_fc1: the rank's rows of gate, then its rows of up."""
    pieces: list[Piece] = []
    row = 0
    dtype = spec.config.dtype
    for part in ("mlp.gate_proj", "mlp.up_proj"):
        tensor = spec.tensor(layer_name(layer, part))
        box = cut_box(spec, tensor, tp, tp_rank)
        pieces.append(Piece(tensor=tensor.name, box=box, row=row))
        row += box.shape[0]
    return Param(name=name, shape=(row, spec.config.hidden), dtype=dtype, pieces=tuple(pieces))


@lru_cache(maxsize=512)
def megatron_params(spec: ModelSpec, layout: Layout, tp_rank: int, pp_rank: int) -> tuple[Param, ...]:
    """The parameters of Megatron's GPTModel on a rank, in the order of `named_parameters()`."""
    tp = layout.tp

    def single(name: str, tensor: str) -> Param:
        return _whole_param(spec, name, spec.tensor(tensor), tp, tp_rank)

    params: list[Param] = []
    if pp_rank == 0:
        params.append(single("embedding.word_embeddings.weight", EMBEDDING))
    for local, layer in enumerate(layout.layers(pp_rank)):
        prefix = f"decoder.layers.{local}"
        params += [
            single(f"{prefix}.input_layernorm.weight", layer_name(layer, "input_layernorm")),
            single(f"{prefix}.self_attention.linear_proj.weight", layer_name(layer, "self_attn.o_proj")),
            _qkv_param(spec, f"{prefix}.self_attention.linear_qkv.weight", layer, tp, tp_rank),
            single(f"{prefix}.pre_mlp_layernorm.weight", layer_name(layer, "post_attention_layernorm")),
            _fc1_param(spec, f"{prefix}.mlp.linear_fc1.weight", layer, tp, tp_rank),
            single(f"{prefix}.mlp.linear_fc2.weight", layer_name(layer, "mlp.down_proj")),
        ]
    if pp_rank == layout.pp - 1:
        params.append(single("decoder.final_layernorm.weight", FINAL_NORM))
        params.append(single("output_layer.weight", LM_HEAD if spec.head == "language" else VALUE_HEAD))
    return tuple(params)


def owned_ranges(params: tuple[Param, ...], dp: int, dp_rank: int) -> dict[str, tuple[int, int]]:
    """Flat range of each parameter whose optimizer state a DP rank owns (Megatron's distributed optimizer).

    One buffer per type, one bucket per buffer (bucketing is off without overlap_grad_reduce).
    """
    ranges: dict[str, tuple[int, int]] = {}
    for dtype in dict.fromkeys(p.dtype for p in params):
        place: dict[str, int] = {}
        end = 0
        members = [p for p in params if p.dtype == dtype]
        for param in reversed(members):
            place[param.name] = round_up(end, 64)
            end = place[param.name] + param.elements
        share = round_up(end, lcm(dp, 128)) // dp
        first, last = dp_rank * share, (dp_rank + 1) * share
        for param in members:
            start = max(first - place[param.name], 0)
            stop = min(last - place[param.name], param.elements)
            if start < stop:
                ranges[param.name] = (start, stop)
    return ranges


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
    params = megatron_params(spec, layout, at.tp, at.pp)
    regions = [r for p in params for r in _regions("weight", p, 0, p.elements)]
    if not trained:
        return tuple(regions)
    owned = (
        owned_ranges(params, layout.dp, at.dp)
        if layout.distributed_optimizer
        else {p.name: (0, p.elements) for p in params}
    )
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
                if (box := cut_box(spec, t, stage.layout.tp, at.tp)).elements > 0
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
