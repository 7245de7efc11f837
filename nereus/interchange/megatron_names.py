"""Where the canonical tensors lie in a Megatron distributed checkpoint: keys, leading axes, rows. Pure arithmetic.

A checkpoint holds global tensors: those of a rank of TP1 PP1, whose pieces `nereus.storage` knows. Megatron-core names
them after Transformer Engine's fused modules, and puts the layer (and the expert) into leading axes, or, with
`non_homogeneous_layers` or `singleton_local_shards`, into the key (megatron-core 0.16.1, transformer_block.py, mlp.py,
moe/experts.py). NeMo 2 puts "module." before every key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from nereus.boxes import Box, whole
from nereus.checkpoint import chunks
from nereus.interchange.source import Found, UnreadableFolder
from nereus.layout import Coordinates, Layout
from nereus.model import ModelSpec
from nereus.storage import Component, Param, megatron_params

STATE_NAMES = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_STATE = re.compile(r"optimizer\.state\.(param|fp32_param|exp_avg_sq|exp_avg)\.(?:(?:module|model)\.)*(.+)")
_COMPONENTS: dict[str, Component] = {
    "param": "master",
    "fp32_param": "master",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
}
EMBEDDING_KEY = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A parameter is the global tensor under `key`, behind the leading indices `index`.

    `part` tells gate and up apart where they have keys of their own.
    """

    key: str
    index: tuple[int, ...]
    part: Literal["both", "gate", "up"] = "both"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyStyle:
    """How a checkpoint spells its keys: a prefix, layers (and experts) in the key, and SwiGLU's halves apart."""

    prefix: str = ""
    layer_in_key: bool = False
    halves_apart: bool = False


def whole_params(spec: ModelSpec) -> tuple[Param, ...]:
    """The parameters of TP1 PP1: the global tensors of a checkpoint, but for leading axes."""
    layout = Layout(tp=1, pp=1, dp=1, pipeline=(spec.config.layers,))
    return megatron_params(spec, layout, Coordinates(tp=0, pp=0, dp=0))


def places(param: Param, style: KeyStyle, *, sparse: bool) -> tuple[Place, ...]:
    """Where a parameter lies: one place, or two where SwiGLU's halves are apart. `sparse`: its layer has experts."""
    match = _LAYER.fullmatch(param.name)
    if match is None:
        return (Place(key=style.prefix + param.name, index=()),)
    layer, rest = int(match[1]), match[2]
    lead: tuple[int, ...] = () if style.layer_in_key else (layer,)
    stem = f"decoder.layers.{layer}." if style.layer_in_key else "decoder.layers."
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        rest = f"mlp.experts.experts.{expert[1] + '.' if style.layer_in_key else ''}{expert[2]}"
        lead = () if style.layer_in_key else (*lead, int(expert[1]))
    key = style.prefix + stem + _fused(rest, sparse=sparse)
    if style.halves_apart and rest.endswith("linear_fc1.weight"):
        return (Place(key=f"{key}_w", index=lead, part="gate"), Place(key=f"{key}_v", index=lead, part="up"))
    return (Place(key=key, index=lead),)


def _fused(rest: str, *, sparse: bool) -> str:
    """Transformer Engine keeps a norm in the linear layer after it; before experts the norm stands alone."""
    if rest == "input_layernorm.weight":
        return "self_attention.linear_qkv.layer_norm_weight"
    if rest == "pre_mlp_layernorm.weight" and not sparse:
        return "mlp.linear_fc1.layer_norm_weight"
    return rest


def _rows(param: Param, place: Place) -> int:
    """Rows of the global tensor without its leading axes."""
    return param.shape[0] if place.part == "both" else param.shape[0] // 2


class Names:
    """The global tensors of a model in a checkpoint of one style."""

    def __init__(self, spec: ModelSpec, style: KeyStyle) -> None:
        self.spec, self.style = spec, style
        params = whole_params(spec)
        sparse = {m[1] for p in params if (m := _LAYER.fullmatch(p.name)) and ".experts." in p.name}
        self.entries: list[tuple[Param, tuple[Place, ...]]] = []
        for param in params:
            match = _LAYER.fullmatch(param.name)
            self.entries.append((param, places(param, style, sparse=match is not None and match[1] in sparse)))
        self._by_tensor: dict[str, list[int]] = {}
        for index, (param, _) in enumerate(self.entries):
            for name in dict.fromkeys(piece.tensor for piece in param.pieces):
                self._by_tensor.setdefault(name, []).append(index)

    @cached_property
    def _of_key(self) -> dict[str, list[tuple[Param, Place]]]:
        found: dict[str, list[tuple[Param, Place]]] = {}
        for param, where in self.entries:
            for place in where:
                found.setdefault(place.key, []).append((param, place))
        return found

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of every key, leading axes included, vocabulary padded to Nereus's own multiple."""
        found: dict[str, tuple[int, ...]] = {}
        for key, members in self._of_key.items():
            param, place = members[0]
            lead = tuple(max(indices) + 1 for indices in zip(*(p.index for _, p in members), strict=True))
            found[key] = (*lead, _rows(param, place), *param.shape[1:])
        return found

    def dtype(self, key: str) -> str:
        """The type of the weights under a key."""
        param, _ = self._of_key[key][0]
        return self.spec.tensor(param.pieces[0].tensor).dtype

    def chunks(self, key: str, limit_bytes: int) -> tuple[Box, ...]:
        """Disjoint boxes that cover the global tensor of a key: a layer's, an expert's, at most `limit_bytes` or a row."""
        found: list[Box] = []
        for param, place in self._of_key[key]:
            lead, ones = place.index, tuple(i + 1 for i in place.index)
            local = whole((_rows(param, place), *param.shape[1:]))
            found += [Box((*lead, *b.start), (*ones, *b.stop)) for b in chunks(local, 4, limit_bytes)]
        return tuple(found)

    def canonical(self, key: str, box: Box) -> Iterator[tuple[str, Box, Box]]:
        """(tensor, canonical box, the box of the global tensor that it is) for every part of `box` under a key."""
        for param, place in self._of_key[key]:
            for piece in param.pieces:
                if place.part != "both" and (piece.row < _rows(param, place)) != (place.part == "gate"):
                    continue
                first = piece.row - (place.part == "up") * _rows(param, place)
                start = (*place.index, first, *piece.box.start[1:])
                stop = (*(i + 1 for i in place.index), first + piece.box.shape[0], *piece.box.stop[1:])
                common = Box(start, stop).intersect(box)
                if common is None:
                    continue
                shift = piece.box.start[0] - first
                low, high = common.start[len(place.index) :], common.stop[len(place.index) :]
                part = Box((low[0] + shift, *low[1:]), (high[0] + shift, *high[1:]))
                yield piece.tensor, part, common

    def boxes(self, tensor: str, box: Box) -> Iterator[tuple[str, Box, Box]]:
        """(key, box in its global tensor, the canonical box that this is) for every part of `box` of a tensor."""
        param, where = self.entries[self._by_tensor[tensor][0]]
        rows = _rows(param, where[0])
        for piece in param.pieces:
            part = piece.box.intersect(box) if piece.tensor == tensor else None
            if part is None:
                continue
            shift = piece.row - piece.box.start[0]
            place = where[0 if len(where) == 1 else piece.row // rows]
            first = shift - (place.part == "up") * rows
            start = (*place.index, part.start[0] + first, *part.start[1:])
            stop = (*(i + 1 for i in place.index), part.stop[0] + first, *part.stop[1:])
            yield place.key, Box(start, stop), part

    def missing(self, found: Mapping[str, Found]) -> Iterator[str]:
        """What a checkpoint lacks or has in another shape, in words; rows of padding may differ."""
        for key, shape in self.shapes.items():
            if key not in found:
                yield f"{key} is missing (expected {shape})"
                continue
            real = found[key].shape
            vocabulary = self.spec.config.vocab if key.removeprefix(self.style.prefix) in _VOCABULARY else None
            least = shape if vocabulary is None else (vocabulary, *shape[1:])
            if len(real) != len(shape) or real[1:] != shape[1:] or real[0] < least[0]:
                yield f"{key} has shape {real}, expected {least}"
            elif vocabulary is None and real[0] != shape[0]:
                yield f"{key} has shape {real}, expected {shape}"


_VOCABULARY = (EMBEDDING_KEY, "output_layer.weight")


def component_key(key: str, component: str) -> str:
    """The key of a parameter's component: the distributed optimizer's fully reshardable names."""
    return key if component == "weight" else f"optimizer.state.{STATE_NAMES[component]}.{key}"


def state_keys(keys: Iterable[str]) -> dict[tuple[Component, str], str]:
    """(component, key of the weight without a prefix) to the key of optimizer state; a chain's prefix may stand before."""
    found: dict[tuple[Component, str], str] = {}
    for key in keys:
        match = _STATE.search(key)
        if match is not None:
            found[_COMPONENTS[match[1]], match[2]] = key
    return found


def style_of(keys: Iterable[str], place: str) -> KeyStyle:
    """How the checkpoint in the folder `place` spells its keys. UnreadableFolder for none of a Megatron language model."""
    known = list(keys)
    ends = [k for k in known if k.endswith(EMBEDDING_KEY) and "optimizer." not in k]
    if not ends:
        shown = ", ".join(sorted(known)[:3]) or "nothing"
        raise UnreadableFolder(f"{place}: no key ends in {EMBEDDING_KEY}: expected a Megatron GPT model, found {shown}")
    prefix = min(ends, key=len).removesuffix(EMBEDDING_KEY)
    mine = [k for k in known if k.startswith(prefix)]
    return KeyStyle(
        prefix=prefix,
        layer_in_key=any(_LAYER.fullmatch(k.removeprefix(prefix)) for k in mine),
        halves_apart=any(k.endswith("linear_fc1.weight_w") for k in mine),
    )
