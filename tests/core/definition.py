"""What each rank holds, written with numpy from how Megatron-core, vLLM and Hugging Face define it: the tests' oracle.

Every element of a model has a unique id; padding is -1. Nothing here uses nereus.storage.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from functools import lru_cache

import numpy as np

from nereus.layout import Coordinates, Layout, StagePlan
from nereus.model import ModelSpec

Ids = dict[str, np.ndarray]
PAD = -1
OUTSIDE = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "language": "lm_head.weight",
    "value": "value_head.weight",
    "reward": "score.weight",
}


@lru_cache(maxsize=4)
def element_ids(spec: ModelSpec) -> Ids:
    """A unique id for every element of every tensor."""
    ids: Ids = {}
    first = 0
    for tensor in spec.tensors:
        count = math.prod(tensor.shape)
        ids[tensor.name] = np.arange(first, first + count).reshape(tensor.shape)
        first += count
    return ids


def _padded_rows(table: np.ndarray, tp: int, rank: int) -> np.ndarray:
    """A vocabulary of whole blocks of 64 rows, cut in tp equal parts."""
    missing = -len(table) % 64
    return np.split(np.pad(table, ((0, missing), (0, 0)), constant_values=PAD), tp)[rank]


def _interleaved(spec: ModelSpec, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Megatron's linear_qkv, weight or bias: [q heads of group g; k_g; v_g] for each KV group g."""
    c = spec.config
    rest = q.shape[1:]
    grouped = [w.reshape(c.kv_heads, -1, c.head_dim, *rest) for w in (q, k, v)]
    return np.concatenate(grouped, axis=1).reshape(-1, *rest)


def places(layout: Layout) -> list[Coordinates]:
    """Where each rank stands: ranks counted through an array of the dimensions in order, and anew for experts."""
    edp = layout.ranks // (layout.pp * layout.ep * layout.expert_tp)
    counted = np.arange(layout.ranks)
    if layout.order.endswith("dp-pp"):
        dense = counted.reshape(layout.pp, layout.dp, layout.cp, layout.tp)
        experts = counted.reshape(layout.pp, edp, layout.ep, layout.expert_tp)
    else:
        dense = counted.reshape(layout.dp, layout.pp, layout.cp, layout.tp).swapaxes(0, 1)
        experts = counted.reshape(edp, layout.pp, layout.ep, layout.expert_tp).swapaxes(0, 1)
    found = []
    for rank in counted:
        ((pp, dp, cp, tp),) = np.argwhere(dense == rank).tolist()
        ((same, expert_dp, ep, etp),) = np.argwhere(experts == rank).tolist()
        assert same == pp
        found.append(Coordinates(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, edp=expert_dp))
    return found


def _mlp(ids: Ids, names: tuple[str, str, str], to: str, tp: int, rank: int) -> Ids:
    """linear_fc1 and linear_fc2 of an MLP or an expert: gate and up cut by rows, down by columns."""
    gate, up = (np.split(ids[f"{name}.weight"], tp)[rank] for name in names[:2])
    down = np.split(ids[f"{names[2]}.weight"], tp, axis=1)[rank]
    return {f"{to}.linear_fc1.weight": np.concatenate([gate, up]), f"{to}.linear_fc2.weight": down}


def _layer(spec: ModelSpec, layout: Layout, at: Coordinates, layer: int, to: str) -> Ids:
    """One decoder layer's parameters, the last ones those of the rank's experts, numbered from 0."""
    c, ids, hf = spec.config, element_ids(spec), f"model.layers.{layer}."
    arrays: Ids = {f"{to}input_layernorm.weight": ids[f"{hf}input_layernorm.weight"]}
    o = ids[f"{hf}self_attn.o_proj.weight"]
    arrays[f"{to}self_attention.linear_proj.weight"] = np.split(o, layout.tp, axis=1)[at.tp]
    for kind in ("weight", "bias") if c.qkv_bias else ("weight",):
        q, k, v = (ids[f"{hf}self_attn.{x}_proj.{kind}"] for x in "qkv")
        arrays[f"{to}self_attention.linear_qkv.{kind}"] = np.split(_interleaved(spec, q, k, v), layout.tp)[at.tp]
    for x in "qk" if c.qk_norm else "":
        arrays[f"{to}self_attention.{x}_layernorm.weight"] = ids[f"{hf}self_attn.{x}_norm.weight"]
    arrays[f"{to}pre_mlp_layernorm.weight"] = ids[f"{hf}post_attention_layernorm.weight"]
    if not c.experts or layer in c.dense_layers:
        names = (f"{hf}mlp.gate_proj", f"{hf}mlp.up_proj", f"{hf}mlp.down_proj")
        return arrays | _mlp(ids, names, f"{to}mlp", layout.tp, at.tp)
    mlp = f"{hf}mlp" if c.qk_norm else f"{hf}block_sparse_moe"
    arrays[f"{to}mlp.router.weight"] = ids[f"{mlp}.gate.weight"]
    for local, expert in enumerate(np.split(np.arange(c.experts), layout.ep)[at.ep]):
        three = ("gate_proj", "up_proj", "down_proj") if c.qk_norm else ("w1", "w3", "w2")
        gate, up, down = (f"{mlp}.experts.{expert}.{name}" for name in three)
        local_to = f"{to}mlp.experts.local_experts.{local}"
        arrays |= _mlp(ids, (gate, up, down), local_to, layout.expert_tp, at.etp)
    return arrays


def megatron_arrays(spec: ModelSpec, layout: Layout, at: Coordinates) -> Ids:
    """The parameters of Megatron's GPTModel (local spec) on a rank, in named_parameters() order."""
    ids, tp = element_ids(spec), layout.tp
    first = 0
    for rank in range(at.pp):
        first += layout.pipeline[rank]
    arrays: Ids = {}
    if at.pp == 0:
        arrays["embedding.word_embeddings.weight"] = _padded_rows(ids[OUTSIDE["embed"]], tp, at.tp)
    for n in range(layout.pipeline[at.pp]):
        arrays |= _layer(spec, layout, at, first + n, f"decoder.layers.{n}.")
    if at.pp == layout.pp - 1:
        arrays["decoder.final_layernorm.weight"] = ids[OUTSIDE["norm"]]
        tied = spec.config.tie_embeddings and spec.head == "language"
        head = ids[OUTSIDE["embed" if tied else spec.head]]
        if layout.pp > 1 or not tied:
            arrays["output_layer.weight"] = _padded_rows(head, tp, at.tp) if spec.head == "language" else head
    return arrays


def is_norm(param: str) -> bool:
    """Whether it is one of the parameters that stay float32."""
    return "norm" in param


def is_expert(param: str) -> bool:
    """Whether it belongs to an expert: where ep > 1 these are reduced and sharded over the replicas of experts."""
    return "local_experts" in param


def _buckets(spec: ModelSpec, arrays: Ids, layout: Layout) -> list[tuple[int, list[tuple[str, int]]]]:
    """Megatron's buckets (param_and_grad_buffer.py): ranks that share one, and (parameter, offset) of its elements.

    One buffer per type, and for experts. Parameters in reverse, each start padded to 64, the end to lcm(ranks, 128).
    The two copies of a tied embedding over a pipeline have a bucket each.
    """
    alone = ("embedding.word_embeddings.weight", "output_layer.weight")
    if not (spec.config.tie_embeddings and spec.head == "language" and layout.pp > 1):
        alone = ()
    types: dict[tuple[bool, bool], list[list[str]]] = {}
    for name in list(arrays)[::-1]:
        parts = types.setdefault(
            (is_expert(name) and layout.ep > 1, is_norm(name) and spec.config.dtype != "float32"), [[]]
        )
        if name in alone:
            parts += [[name], []]
        else:
            parts[-1].append(name)
    found = []
    for (expert, _), parts in types.items():
        ranks = layout.ranks // (layout.pp * layout.ep * layout.expert_tp) if expert else layout.dp * layout.cp
        for members in filter(None, parts):
            where: list[tuple[str, int]] = []
            for name in members:
                where += [("", 0)] * (-len(where) % 64)
                where += [(name, n) for n in range(arrays[name].size)]
            found.append((ranks, where + [("", 0)] * (-len(where) % math.lcm(ranks, 128))))
    return found


def owned(spec: ModelSpec, arrays: Ids, layout: Layout, at: Coordinates) -> dict[str, tuple[int, int]]:
    """Flat range of each parameter whose optimizer state a rank has: an equal part of each bucket, in rank order."""
    found: dict[str, tuple[int, int]] = {}
    for ranks, where in _buckets(spec, arrays, layout):
        apart = layout.ep > 1 and any(is_expert(name) for name, _ in where)
        rank = at.edp if apart else at.dp * layout.cp + at.cp
        size = len(where) // ranks
        mine: dict[str, list[int]] = defaultdict(list)
        for name, offset in where[rank * size : (rank + 1) * size]:
            mine[name].append(offset)
        mine.pop("", None)
        for name, offsets in mine.items():
            assert offsets == list(range(offsets[0], offsets[-1] + 1))
            found[name] = (offsets[0], offsets[-1] + 1)
    return found


def components(spec: ModelSpec, param: str) -> tuple[str, ...]:
    """What the optimizer keeps of a parameter: a float32 weight is its own master."""
    masters = () if spec.config.dtype == "float32" or is_norm(param) else ("master",)
    return (*masters, "exp_avg", "exp_avg_sq")


def trained_state(spec: ModelSpec, layout: Layout, at: Coordinates) -> dict[tuple[str, str], np.ndarray]:
    """The flat array of ids of each (component, parameter) on a rank that trains."""
    arrays = megatron_arrays(spec, layout, at)
    ranges = {name: (0, a.size) for name, a in arrays.items()}
    if layout.distributed_optimizer:
        ranges = owned(spec, arrays, layout, at)
    state = {("weight", name): array.ravel() for name, array in arrays.items()}
    for name, (start, stop) in ranges.items():
        for component in components(spec, name):
            state[component, name] = arrays[name].ravel()[start:stop]
    return state


def vllm_ids(spec: ModelSpec, layout: Layout, rank: int) -> list[np.ndarray]:
    """The elements that a vLLM worker takes: rows or columns by TP; KV heads replicated where there are fewer than tp.

    With ep > 1 a worker takes whole experts, as many as each other.
    """
    c, tp, taken = spec.config, layout.tp, []
    for name, array in element_ids(spec).items():
        expert = re.search(r"experts\.(\d+)\.", name)
        if expert and layout.ep > 1:
            if int(expert[1]) in np.split(np.arange(c.experts), layout.ep)[rank]:
                taken.append(array)
        elif re.search(r"q_proj|gate_proj|up_proj|\.w1\.|\.w3\.", name):
            taken.append(np.split(array, tp)[rank])
        elif "k_proj" in name or "v_proj" in name:
            heads = array.reshape(c.kv_heads, c.head_dim, -1)
            taken.append(np.split(np.repeat(heads, max(tp // c.kv_heads, 1), axis=0), tp)[rank])
        elif re.search(r"o_proj|down_proj|\.w2\.", name):
            taken.append(np.split(array, tp, axis=1)[rank])
        elif name in (OUTSIDE["embed"], OUTSIDE["language"]):
            taken.append(_padded_rows(array, tp, rank))
        else:
            taken.append(array)
    return taken


def held_ids(spec: ModelSpec, stage: StagePlan) -> dict[int, dict[str, np.ndarray]]:
    """The sorted ids that each slot holds, by component."""
    found: dict[int, dict[str, np.ndarray]] = {}
    layout = stage.layout
    generating = [Coordinates(tp=rank % layout.tp, pp=0, dp=rank // layout.tp) for rank in range(layout.ranks)]
    for slot, at in zip(stage.slots, generating if stage.stage == "generate" else places(layout), strict=True):
        parts: dict[str, list[np.ndarray]] = defaultdict(list)
        if stage.stage == "generate":
            parts["weight"] = vllm_ids(spec, layout, at.tp)
        else:
            for (component, _), array in trained_state(spec, layout, at).items():
                if component == "weight" or stage.stage == "train":
                    parts[component].append(array)
        flat = {component: np.concatenate([a.ravel() for a in arrays]) for component, arrays in parts.items()}
        found[slot] = {component: np.sort(a[a != PAD]) for component, a in flat.items() if (a != PAD).any()}
    return found
