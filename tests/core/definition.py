"""What each rank holds, written with numpy from how Megatron-core, vLLM and Hugging Face define it: the tests' oracle.

Every element of a model has a unique id; padding is -1. Nothing here uses nereus.storage.
"""

from __future__ import annotations

import math
from collections import defaultdict

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
}


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
    """Megatron's linear_qkv: [q heads of group g; k_g; v_g] for each KV group g."""
    c = spec.config
    hidden = q.shape[1]
    grouped = [w.reshape(c.kv_heads, -1, c.head_dim, hidden) for w in (q, k, v)]
    return np.concatenate(grouped, axis=1).reshape(-1, hidden)


def megatron_arrays(spec: ModelSpec, layout: Layout, at: Coordinates) -> Ids:
    """The parameters of Megatron's GPTModel (local spec) on a rank, in named_parameters() order."""
    ids, tp = element_ids(spec), layout.tp

    def part(array: np.ndarray, axis: int) -> np.ndarray:
        return np.split(array, tp, axis=axis)[at.tp]

    first = 0
    for rank in range(at.pp):
        first += layout.pipeline[rank]
    arrays: Ids = {}
    if at.pp == 0:
        arrays["embedding.word_embeddings.weight"] = _padded_rows(ids[OUTSIDE["embed"]], tp, at.tp)
    for n in range(layout.pipeline[at.pp]):
        hf, mcore = f"model.layers.{first + n}.", f"decoder.layers.{n}."
        q, k, v = (ids[f"{hf}self_attn.{x}_proj.weight"] for x in "qkv")
        gate, up = (part(ids[f"{hf}mlp.{x}_proj.weight"], 0) for x in ("gate", "up"))
        arrays[f"{mcore}input_layernorm.weight"] = ids[f"{hf}input_layernorm.weight"]
        arrays[f"{mcore}self_attention.linear_proj.weight"] = part(ids[f"{hf}self_attn.o_proj.weight"], 1)
        arrays[f"{mcore}self_attention.linear_qkv.weight"] = part(_interleaved(spec, q, k, v), 0)
        arrays[f"{mcore}pre_mlp_layernorm.weight"] = ids[f"{hf}post_attention_layernorm.weight"]
        arrays[f"{mcore}mlp.linear_fc1.weight"] = np.concatenate([gate, up])
        arrays[f"{mcore}mlp.linear_fc2.weight"] = part(ids[f"{hf}mlp.down_proj.weight"], 1)
    if at.pp == layout.pp - 1:
        head = ids[OUTSIDE[spec.head]]
        arrays["decoder.final_layernorm.weight"] = ids[OUTSIDE["norm"]]
        arrays["output_layer.weight"] = _padded_rows(head, tp, at.tp) if spec.head == "language" else head
    return arrays


def is_norm(param: str) -> bool:
    """Whether it is one of the parameters that stay float32."""
    return "norm" in param


def owned(spec: ModelSpec, arrays: Ids, dp: int, dp_rank: int) -> dict[str, tuple[int, int]]:
    """Flat range of each parameter in a DP rank's part of Megatron's buffers (param_and_grad_buffer.py).

    One buffer per type: parameters in reverse, each start padded to 64, the end to lcm(dp, 128), cut in dp parts.
    """
    names = list(arrays)
    buffers = [names] if spec.config.dtype == "float32" else [[n for n in names if is_norm(n) == x] for x in (0, 1)]
    found: dict[str, tuple[int, int]] = {}
    for members in buffers:
        where: list[tuple[str, int]] = []  # of each element of the buffer: parameter, offset in it
        for name in members[::-1]:
            where += [("", 0)] * (-len(where) % 64)
            where += [(name, n) for n in range(arrays[name].size)]
        where += [("", 0)] * (-len(where) % math.lcm(dp, 128))
        size = len(where) // dp
        mine: dict[str, list[int]] = defaultdict(list)
        for name, offset in where[dp_rank * size : (dp_rank + 1) * size]:
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
        ranges = owned(spec, arrays, layout.dp, at.dp)
    state = {("weight", name): array.ravel() for name, array in arrays.items()}
    for name, (start, stop) in ranges.items():
        for component in components(spec, name):
            state[component, name] = arrays[name].ravel()[start:stop]
    return state


def vllm_ids(spec: ModelSpec, tp: int, rank: int) -> list[np.ndarray]:
    """The elements that a vLLM worker takes: rows or columns by TP; KV heads replicated where there are fewer than tp."""
    c, taken = spec.config, []
    for name, array in element_ids(spec).items():
        if "q_proj" in name or "gate_proj" in name or "up_proj" in name:
            taken.append(np.split(array, tp)[rank])
        elif "k_proj" in name or "v_proj" in name:
            heads = array.reshape(c.kv_heads, c.head_dim, -1)
            taken.append(np.split(np.repeat(heads, max(tp // c.kv_heads, 1), axis=0), tp)[rank])
        elif "o_proj" in name or "down_proj" in name:
            taken.append(np.split(array, tp, axis=1)[rank])
        elif name in (OUTSIDE["embed"], OUTSIDE["language"]):
            taken.append(_padded_rows(array, tp, rank))
        else:
            taken.append(array)
    return taken


def held_ids(spec: ModelSpec, stage: StagePlan) -> dict[int, dict[str, np.ndarray]]:
    """The sorted ids that each slot holds, by component."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for rank, slot in enumerate(stage.slots):
        within, layout = rank // stage.layout.tp, stage.layout  # Megatron's order: tp fastest, then dp, then pp
        at = Coordinates(tp=rank % layout.tp, dp=within % layout.dp, pp=within // layout.dp)
        parts: dict[str, list[np.ndarray]] = defaultdict(list)
        if stage.stage == "generate":
            parts["weight"] = vllm_ids(spec, layout.tp, at.tp)
        else:
            for (component, _), array in trained_state(spec, layout, at).items():
                if component == "weight" or stage.stage == "train":
                    parts[component].append(array)
        flat = {component: np.concatenate([a.ravel() for a in arrays]) for component, arrays in parts.items()}
        found[slot] = {component: np.sort(a[a != PAD]) for component, a in flat.items() if (a != PAD).any()}
    return found
