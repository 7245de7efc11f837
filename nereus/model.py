"""The logical tensors of a model, in the model's own coordinates and Hugging Face's names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from typing import Literal

from nereus.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "value_head.weight"

Cut = Literal["rows", "columns", "vocabulary", "kv", "none"]
Head = Literal["language", "value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A logical tensor: `cut` says how tensor parallelism divides it, `layer` its decoder layer (None: outside).

    Example: Tensor(name="lm_head.weight", shape=(259, 128), dtype="float32", layer=None, cut="vocabulary").
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: int | None
    cut: Cut

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
    """A Llama-like model: its configuration, its head, and its tensors from the embedding to the head."""

    name: str
    config: ModelConfig
    head: Head
    tensors: tuple[Tensor, ...]

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; KeyError when the model has none."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(f"{self.name} has no tensor {name}")

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return sum(prod(t.shape) for t in self.tensors)


def layer_name(layer: int, part: str) -> str:
    """The Hugging Face name of a decoder layer's weight, e.g. (3, "mlp.up_proj")."""
    return f"model.layers.{layer}.{part}.weight"


def _layer_tensors(c: ModelConfig, layer: int) -> tuple[Tensor, ...]:
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    parts: tuple[tuple[str, tuple[int, ...], Cut], ...] = (
        ("input_layernorm", (c.hidden,), "none"),
        ("self_attn.q_proj", (queries, c.hidden), "rows"),
        ("self_attn.k_proj", (keys, c.hidden), "kv"),
        ("self_attn.v_proj", (keys, c.hidden), "kv"),
        ("self_attn.o_proj", (c.hidden, queries), "columns"),
        ("post_attention_layernorm", (c.hidden,), "none"),
        ("mlp.gate_proj", (c.ffn, c.hidden), "rows"),
        ("mlp.up_proj", (c.ffn, c.hidden), "rows"),
        ("mlp.down_proj", (c.hidden, c.ffn), "columns"),
    )
    return tuple(
        # Megatron's local layer spec keeps norms in float32 whatever the model's type (facts: engines, 2)
        Tensor(
            name=layer_name(layer, part),
            shape=shape,
            dtype="float32" if cut == "none" else c.dtype,
            layer=layer,
            cut=cut,
        )
        for part, shape, cut in parts
    )


def llama(name: str, config: ModelConfig, head: Head = "language") -> ModelSpec:
    """The tensors of a Llama-like model with untied embeddings; with head="value" a scalar head replaces lm_head."""
    c = config
    last = (
        Tensor(name=LM_HEAD, shape=(c.vocab, c.hidden), dtype=c.dtype, layer=None, cut="vocabulary")
        if head == "language"
        else Tensor(name=VALUE_HEAD, shape=(1, c.hidden), dtype=c.dtype, layer=None, cut="none")
    )
    tensors = (
        Tensor(name=EMBEDDING, shape=(c.vocab, c.hidden), dtype=c.dtype, layer=None, cut="vocabulary"),
        *(tensor for layer in range(c.layers) for tensor in _layer_tensors(c, layer)),
        Tensor(name=FINAL_NORM, shape=(c.hidden,), dtype="float32", layer=None, cut="none"),
        last,
    )
    return ModelSpec(name=name, config=config, head=head, tensors=tensors)


def models_of(config: ModelConfig) -> dict[str, ModelSpec]:
    """The models of a PPO job by name; reward is a rule."""
    return {
        "actor": llama("actor", config),
        "critic": llama("critic", config, "value"),
        "reference": llama("reference", config),
    }


def seed_of(*parts: object) -> int:
    """A 63-bit seed that is a function of its parts alone: the same on every slot, layout and run."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
