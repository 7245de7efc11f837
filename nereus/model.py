"""The logical tensors of a model, in the model's own coordinates and Hugging Face's names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Literal

from nereus.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "value_head.weight"
VOCAB_ALIGN = 64
"""Rows of the vocabulary are padded to a multiple of this, in both engines."""

Cut = Literal["rows", "columns", "vocabulary", "kv", "none"]
Head = Literal["language", "value", "reward"]
SCALAR_HEADS: dict[str, str] = {"value": VALUE_HEAD, "reward": "score.weight"}
"""The tensor of each head that gives one number: a critic's, and a reward model's under Hugging Face's name."""
Part = tuple[str, tuple[int, ...], Cut]


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A logical tensor: `cut` says how tensor parallelism divides it, `layer` its decoder layer (None: outside).

    `expert` is the expert of the layer that it belongs to; expert parallelism gives it to one rank, and expert tensor
    parallelism cuts it (None: not of an expert). A bias has one axis, cut as the rows of its weight.
    Example: Tensor(name="lm_head.weight", shape=(259, 128), dtype="float32", layer=None, cut="vocabulary").
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | None
    cut: Cut
    expert: int | None = None

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model: its configuration, its head, and its tensors from the embedding to the head.

    The tensors are a function of configuration and head, so specs are compared and hashed without them.
    """

    name: str
    config: ModelConfig
    head: Head
    tensors: tuple[Tensor, ...] = field(compare=False, repr=False)
    by_name: dict[str, Tensor] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {t.name: t for t in self.tensors})

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; KeyError when the model has none."""
        try:
            return self.by_name[name]
        except KeyError:
            raise KeyError(f"{self.name} has no tensor {name}") from None

    @property
    def parameters(self) -> int:
        """How many parameters the model has; tied ones count once."""
        return sum(prod(t.shape) for t in self.tensors)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding itself. A value head is not: it stands on its own."""
        return self.config.tie_embeddings and self.head == "language"


def layer_name(layer: int, part: str, kind: str = "weight") -> str:
    """The Hugging Face name of a decoder layer's weight or bias, e.g. (3, "mlp.up_proj")."""
    return f"model.layers.{layer}.{part}.{kind}"


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a decoder layer has experts in the place of its MLP."""
    return config.experts > 0 and layer not in config.dense_layers


def router_part(config: ModelConfig) -> str:
    """What a layer's router is called: as in Qwen3-MoE where queries and keys have norms, else as in Mixtral."""
    return "mlp.gate" if config.qk_norm else "block_sparse_moe.gate"


def expert_parts(config: ModelConfig, expert: int) -> tuple[str, str, str]:
    """What an expert's gate, up and down projections are called."""
    if config.qk_norm:
        return tuple(f"mlp.experts.{expert}.{x}_proj" for x in ("gate", "up", "down"))  # type: ignore[return-value]
    return tuple(f"block_sparse_moe.experts.{expert}.{x}" for x in ("w1", "w3", "w2"))  # type: ignore[return-value]


def _attention_parts(c: ModelConfig) -> Iterator[Part]:
    """Weights and biases of a layer before its MLP: (name after the layer's, shape, cut)."""
    rows: dict[str, tuple[int, Cut]] = {"q": (c.heads * c.head_dim, "rows")}
    rows |= dict.fromkeys("kv", (c.kv_heads * c.head_dim, "kv"))
    yield "input_layernorm.weight", (c.hidden,), "none"
    for name, (count, cut) in rows.items():
        yield f"self_attn.{name}_proj.weight", (count, c.hidden), cut
    if c.qkv_bias:
        for name, (count, cut) in rows.items():
            yield f"self_attn.{name}_proj.bias", (count,), cut
    if c.qk_norm:
        for name in "qk":
            yield f"self_attn.{name}_norm.weight", (c.head_dim,), "none"
    yield "self_attn.o_proj.weight", (c.hidden, c.heads * c.head_dim), "columns"
    yield "post_attention_layernorm.weight", (c.hidden,), "none"


def _mlp_parts(names: tuple[str, str, str], hidden: int, ffn: int) -> tuple[Part, Part, Part]:
    """Weights of a gated MLP called `names`: gate, up, down."""
    gate, up, down = (f"{name}.weight" for name in names)
    return (gate, (ffn, hidden), "rows"), (up, (ffn, hidden), "rows"), (down, (hidden, ffn), "columns")


def _layer_parts(c: ModelConfig, *, sparse: bool) -> tuple[tuple[Part, int | None], ...]:
    """All parts of a decoder layer, each with its expert."""
    parts: list[tuple[Part, int | None]] = [(part, None) for part in _attention_parts(c)]
    if not sparse:
        names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        return (*parts, *((part, None) for part in _mlp_parts(names, c.hidden, c.ffn)))
    parts.append(((f"{router_part(c)}.weight", (c.experts, c.hidden), "none"), None))
    for expert in range(c.experts):
        parts += [(part, expert) for part in _mlp_parts(expert_parts(c, expert), c.hidden, c.expert_ffn)]
    return tuple(parts)


def _layer_tensors(c: ModelConfig) -> Iterator[Tensor]:
    kinds = {sparse: _layer_parts(c, sparse=sparse) for sparse in {is_sparse(c, layer) for layer in range(c.layers)}}
    for layer in range(c.layers):
        for (part, shape, cut), expert in kinds[is_sparse(c, layer)]:
            # Megatron's local layer spec keeps norms in float32 whatever the model's type (facts: engines, 2)
            yield Tensor(
                name=f"model.layers.{layer}.{part}",
                shape=shape,
                dtype="float32" if len(shape) == 1 and cut == "none" else c.dtype,
                layer=layer,
                cut=cut,
                expert=expert,
            )


@lru_cache(maxsize=16)
def _tensors(c: ModelConfig, head: Head) -> tuple[Tensor, ...]:
    """All tensors in order; a tied language head has none of its own."""
    last: list[Tensor] = []
    if head != "language":
        last.append(Tensor(name=SCALAR_HEADS[head], shape=(1, c.hidden), dtype=c.dtype, layer=None, cut="none"))
    elif not c.tie_embeddings:
        last.append(Tensor(name=LM_HEAD, shape=(c.vocab, c.hidden), dtype=c.dtype, layer=None, cut="vocabulary"))
    return (
        Tensor(name=EMBEDDING, shape=(c.vocab, c.hidden), dtype=c.dtype, layer=None, cut="vocabulary"),
        *_layer_tensors(c),
        Tensor(name=FINAL_NORM, shape=(c.hidden,), dtype="float32", layer=None, cut="none"),
        *last,
    )


def model_spec(name: str, config: ModelConfig, head: Head = "language") -> ModelSpec:
    """The model that `config` describes; with another head than "language" a scalar head replaces lm_head."""
    return ModelSpec(name=name, config=config, head=head, tensors=_tensors(config, head))


llama = model_spec
"""The name of `model_spec` where a plain Llama is meant."""


def models_of(config: ModelConfig) -> dict[str, ModelSpec]:
    """The models of a PPO job by name; reward is a rule."""
    return {
        "actor": model_spec("actor", config),
        "critic": model_spec("critic", config, "value"),
        "reference": model_spec("reference", config),
    }


def seed_of(*parts: object) -> int:
    """A 63-bit seed that is a function of its parts alone: the same on every slot, layout and run."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
