"""A model's configuration in Megatron's words (Megatron-LM's arguments, NeMo 2's model.yaml) as Nereus's. Pure.

What would make the model compute something else than Nereus's engines do is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nereus.config import ModelConfig
from nereus.interchange.source import UnreadableFolder

PLAIN: dict[str, tuple[object, ...]] = {  # keys whose other values change what is computed
    "normalization": ("RMSNorm",),
    "gated_linear_unit": (True,),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "position_embedding_type": ("rope",),
    "multi_latent_attention": (False, None),
    "rotary_percent": (1, 1.0),
    "rotary_interleaved": (False, None),
    "seq_len_interpolation_factor": (None,),
    "rotary_seq_len_interpolation_factor": (None,),
    "window_size": (None,),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "layernorm_zero_centered_gamma": (False, None),
    "apply_layernorm_1p": (False, None),
    "moe_shared_expert_intermediate_size": (None, 0),
    "attention_output_gate": (False, None),
    "linear_attention_freq": (None,),
    "mtp_num_layers": (None, 0),
}
LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}


class _Values:
    """Asks a mapping for values by key and type; UnreadableFolder names key, value and what would be right."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values, self.place = values, place

    def wrong(self, key: str, value: object, expected: str) -> UnreadableFolder:
        return UnreadableFolder(f"{self.place}: {key} = {value!r}: expected {expected}")

    def first(self, *keys: str) -> Any:
        """The first of these keys that is there and not null."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def whole(self, *keys: str, default: int | None = None) -> int:
        value = self.first(*keys)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(keys[0], value, "a whole number, at least 1")
        return value

    def number(self, *keys: str, default: float) -> float:
        value = self.first(*keys)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.wrong(keys[0], value, "a number above 0")
        return float(value)


def config_of(values: Mapping[str, Any], *, vocab: int, dtype: str, place: str) -> ModelConfig:
    """The ModelConfig of Megatron's values. UnreadableFolder names the key in `place` that Nereus cannot follow."""
    asked = _Values(values, place)
    for key, usual in PLAIN.items():
        if key in values and values[key] not in usual:
            raise asked.wrong(key, values[key], f"{usual[0]!r}: Nereus computes no other")
    hidden, heads = asked.whole("hidden_size"), asked.whole("num_attention_heads")
    layers = asked.whole("num_layers")
    experts = asked.whole("num_moe_experts", "num_experts", default=0) if _some(values) else 0
    ffn = asked.whole("ffn_hidden_size")
    return ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(asked, heads),
        head_dim=asked.whole("kv_channels", default=max(hidden // heads, 1)),
        ffn=ffn,
        vocab=vocab,
        dtype=dtype,
        norm_eps=asked.number("layernorm_epsilon", "norm_epsilon", default=1e-5),
        rope_theta=asked.number("rotary_base", default=10000.0),
        rope_factor=_rope_factor(asked),
        init_std=asked.number("init_method_std", default=0.02),
        tie_embeddings=_tied(values),
        qkv_bias=bool(values.get("add_qkv_bias")),
        qk_norm=bool(values.get("qk_layernorm")),
        experts=experts,
        experts_per_token=asked.whole("moe_router_topk") if experts else 0,
        expert_ffn=asked.whole("moe_ffn_hidden_size", default=ffn) if experts else 0,
        dense_layers=_dense_layers(asked, layers) if experts else (),
    )


def values_of(config: ModelConfig) -> dict[str, object]:
    """The model in the words of Megatron-core's TransformerConfig and NeMo's GPTConfig: `config_of` reads it back."""
    values: dict[str, object] = {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "ffn_hidden_size": config.ffn,
        "num_attention_heads": config.heads,
        "num_query_groups": config.kv_heads,
        "kv_channels": config.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.norm_eps,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "position_embedding_type": "rope",
        "rotary_base": config.rope_theta,
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": config.tie_embeddings,
        "init_method_std": config.init_std,
        "vocab_size": config.vocab,
    }
    if config.rope_factor != 1:
        values |= {"scale_factor": config.rope_factor, **LLAMA3_ROPE}
    if config.experts:
        sparse = [int(layer not in config.dense_layers) for layer in range(config.layers)]
        values |= {"num_moe_experts": config.experts, "moe_router_topk": config.experts_per_token}
        values |= {"moe_ffn_hidden_size": config.expert_ffn, "moe_layer_freq": sparse if config.dense_layers else 1}
    return values


def _some(values: Mapping[str, Any]) -> bool:
    return bool(values.get("num_moe_experts") or values.get("num_experts"))


def _kv_heads(asked: _Values, heads: int) -> int:
    """Megatron-LM writes num_query_groups = 1 also where its attention is not grouped."""
    if asked.values.get("group_query_attention") is False:
        return heads
    return asked.whole("num_query_groups", default=heads)


def _tied(values: Mapping[str, Any]) -> bool:
    if values.get("untie_embeddings_and_output_weights") is not None:
        return not values["untie_embeddings_and_output_weights"]
    return bool(values.get("share_embeddings_and_output_weights"))


def _rope_factor(asked: _Values) -> float:
    """Llama 3.1's scaling: `scale_factor` in NeMo's configuration, `rope_scaling_factor` in Megatron-LM's."""
    if asked.values.get("use_rope_scaling"):
        return asked.number("rope_scaling_factor", default=8.0)
    factor = asked.number("scale_factor", default=1.0)
    for key, usual in LLAMA3_ROPE.items() if factor != 1 else ():
        if asked.values.get(key, usual) != usual:
            raise asked.wrong(key, asked.values[key], f"{usual}, as in Llama 3.1")
    return factor


def _dense_layers(asked: _Values, layers: int) -> tuple[int, ...]:
    """`moe_layer_freq` is a period, or 0 or 1 for each layer."""
    frequency = asked.first("moe_layer_freq") or 1
    if isinstance(frequency, int):
        return tuple(layer for layer in range(layers) if layer % frequency)
    if not isinstance(frequency, Sequence) or len(frequency) != layers:
        raise asked.wrong("moe_layer_freq", frequency, f"a whole number or a list of {layers}")
    return tuple(layer for layer, sparse in enumerate(frequency) if not sparse)
