"""Hugging Face configurations as a `ModelConfig` and back: which architectures there are, and what each of them means.

Supported are decoder-only models with RMS norms, rotary embeddings and gated MLPs: Llama, Mistral, Qwen2 and Qwen2.5
(biases of q, k, v), Qwen3 (norms of q and k), and with experts Qwen3-MoE and Mixtral. What a configuration says beyond
that, such as a sliding window, is refused by name: a model computed almost right would go unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from nereus.config import ModelConfig
from nereus.errors import ConfigError
from nereus.model import DTYPE_BYTES, Head, ModelSpec, model_spec

LLAMA, MISTRAL, QWEN2 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"
QWEN3, QWEN3_MOE, MIXTRAL = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"
_QWEN = (QWEN2, QWEN3, QWEN3_MOE)
MODEL_TYPES = {
    LLAMA: "llama",
    MISTRAL: "mistral",
    QWEN2: "qwen2",
    QWEN3: "qwen3",
    QWEN3_MOE: "qwen3_moe",
    MIXTRAL: "mixtral",
}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of Llama 3.1's scaled rotary embeddings, which Megatron has built in (rotary_pos_embedding.py)."""
_ATTENTION_KEYS = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")  # multi-head latent attention
_PLAIN = {  # keys whose other values change what is computed, and the values that do not
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (None,),
    "norm_topk_prob": (True,),
    "num_shared_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
}


@dataclass(frozen=True, slots=True)
class _HfConfig:
    """A Hugging Face configuration whose values are asked for by key and type.

    Every mistake is a ConfigError with the key, the value and what would be right.
    """

    values: Mapping[str, object]

    def whole(self, key: str, default: int | None = None) -> int:
        """The whole number, at least 1, at `key`; `default` where it is missing or null."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(key, value, "expected a whole number, at least 1")
        return value

    def number(self, key: str, default: float) -> float:
        """The finite number above 0 at `key`; `default` where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ConfigError(key, value, "expected a finite number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false at `key`; `default` where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(key, value, "expected true or false")
        return value


def architecture_of(config: ModelConfig) -> str:
    """The Hugging Face class that computes `config`; a Mistral without a sliding window is a Llama.

    Raises ConfigError for what none of the supported classes has: biases together with norms or experts, and experts of
    another size than the plain layers' without norms of q and k.
    """
    if config.qkv_bias and (config.qk_norm or config.experts):
        other = "qk_norm" if config.qk_norm else "experts"
        raise ConfigError("qkv_bias", True, f"expected false: no supported architecture has it together with {other}")
    if config.experts and not config.qk_norm and (config.expert_ffn != config.ffn or config.dense_layers):
        raise ConfigError("expert_ffn", config.expert_ffn, "expected ffn and no dense_layers: Mixtral has one size")
    if config.experts:
        return QWEN3_MOE if config.qk_norm else MIXTRAL
    if config.qkv_bias:
        return QWEN2
    return QWEN3 if config.qk_norm else LLAMA


def spec_of(hf: Mapping[str, object], name: str, head: Head = "language") -> ModelSpec:
    """The model called `name` that a Hugging Face configuration describes; ConfigError as `model_config` says."""
    return model_spec(name, model_config(hf), head)


def model_config(hf: Mapping[str, object]) -> ModelConfig:
    """The ModelConfig of a Hugging Face configuration (the content of its config.json).

    ConfigError, naming key and value, for an architecture that is not supported and for a value that would make it
    compute something else than Nereus's engines do.
    """
    architecture = _architecture(hf)
    _refuse_the_unusual(hf, architecture)
    asked = _HfConfig(hf)
    hidden, heads = asked.whole("hidden_size"), asked.whole("num_attention_heads")
    if hf.get("head_dim") is None and hidden % heads:
        raise ConfigError("num_attention_heads", heads, f"expected a divisor of hidden_size = {hidden}, or head_dim")
    layers = asked.whole("num_hidden_layers")
    config = ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=asked.whole("num_key_value_heads", heads),
        head_dim=asked.whole("head_dim", max(hidden // heads, 1)),
        ffn=asked.whole("intermediate_size"),
        vocab=asked.whole("vocab_size"),
        dtype=_dtype(hf),
        norm_eps=asked.number("rms_norm_eps", 1e-6),
        rope_theta=_HfConfig(_rope(hf) | dict(hf)).number("rope_theta", 10000.0),
        rope_factor=_rope_factor(_rope(hf)),
        init_std=asked.number("initializer_range", 0.02),
        tie_embeddings=asked.flag("tie_word_embeddings", default=False),
        qkv_bias=architecture == QWEN2,
        qk_norm=architecture in (QWEN3, QWEN3_MOE),
    )
    if config.heads % config.kv_heads:
        raise ConfigError(
            "num_key_value_heads", config.kv_heads, f"expected a divisor of num_attention_heads = {heads}"
        )
    if architecture in (QWEN3_MOE, MIXTRAL):
        return _with_experts(config, asked, architecture)
    return config


def _with_experts(config: ModelConfig, asked: _HfConfig, architecture: str) -> ModelConfig:
    if architecture == MIXTRAL:
        count, ffn, dense = asked.whole("num_local_experts"), config.ffn, ()
    else:
        count, ffn = asked.whole("num_experts"), asked.whole("moe_intermediate_size")
        step = asked.whole("decoder_sparse_step", 1)
        only = set(_listed(asked.values.get("mlp_only_layers")))
        dense = tuple(layer for layer in range(config.layers) if layer in only or (layer + 1) % step)
    per_token = asked.whole("num_experts_per_tok")
    if per_token > count:
        raise ConfigError("num_experts_per_tok", per_token, f"expected at most the number of experts, {count}")
    return replace(config, experts=count, experts_per_token=per_token, expert_ffn=ffn, dense_layers=dense)


def _architecture(hf: Mapping[str, object]) -> str:
    """The one supported architecture that `hf` names, by `architectures` or else by `model_type`."""
    for key in _ATTENTION_KEYS:
        if hf.get(key) is not None:
            raise ConfigError(key, hf[key], f"multi-head latent attention is not supported; {_supported()}")
    named = hf.get("architectures")
    if named is None:
        for architecture, model_type in MODEL_TYPES.items():
            if hf.get("model_type") == model_type:
                return architecture
        raise ConfigError("model_type", hf.get("model_type"), _supported())
    names = _listed(named)
    if len(names) != 1 or names[0] not in tuple(MODEL_TYPES):
        raise ConfigError("architectures", named, _supported())
    return str(names[0])


def _listed(value: object) -> list[object]:
    """The entries of a list; a single value stands for a list of it, null for an empty one."""
    if isinstance(value, list | tuple):
        return list(cast("Iterable[object]", value))
    return [] if value is None else [value]


def _supported() -> str:
    return f"expected one of {', '.join(MODEL_TYPES)}"


def _refuse_the_unusual(hf: Mapping[str, object], architecture: str) -> None:
    if architecture == QWEN3_MOE and not hf.get("norm_topk_prob"):  # left out means false there
        expected = "expected true: the weights of a token's experts are made to sum to 1"
        raise ConfigError("norm_topk_prob", hf.get("norm_topk_prob"), expected)
    for key, usual in _PLAIN.items():
        if key == "sliding_window" and architecture in _QWEN and not hf.get("use_sliding_window"):
            continue  # Qwen states a window that it does not use
        if key in hf and not any(type(hf[key]) is type(value) and hf[key] == value for value in usual):
            shown = " or ".join(str(value) for value in usual)
            raise ConfigError(key, hf[key], f"expected {shown}: {architecture} is supported without it")


def _dtype(hf: Mapping[str, object]) -> str:
    key = "dtype" if hf.get("dtype") is not None else "torch_dtype"
    value = hf.get(key) or "float32"
    if value not in tuple(DTYPE_BYTES):
        raise ConfigError(key, value, f"expected one of {', '.join(DTYPE_BYTES)}")
    return str(value)


def _rope(hf: Mapping[str, object]) -> dict[str, object]:
    """What a configuration says about rotary embeddings, under the newer key or the older one."""
    found: object = hf.get("rope_parameters") or hf.get("rope_scaling") or cast("dict[str, object]", {})
    if not isinstance(found, Mapping):
        raise ConfigError("rope_scaling", found, "expected a mapping or null")
    return dict(cast("Mapping[str, object]", found))


def _rope_factor(rope: Mapping[str, object]) -> float:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return 1.0
    if kind != "llama3":
        raise ConfigError("rope_scaling.rope_type", kind, "expected default or llama3")
    for key, usual in LLAMA3_ROPE.items():
        if rope.get(key, usual) != usual:
            raise ConfigError(f"rope_scaling.{key}", rope[key], f"expected {usual}, as in Llama 3.1")
    return _HfConfig(rope).number("factor", 8.0)


def hf_config(config: ModelConfig) -> dict[str, object]:
    """The Hugging Face configuration that computes `config`: what `model_config` reads back equal."""
    architecture = architecture_of(config)
    rope: dict[str, object] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_factor != 1:
        rope |= {"rope_type": "llama3", "factor": config.rope_factor, **LLAMA3_ROPE}
    values: dict[str, object] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.dtype,
    }
    if architecture in (LLAMA, QWEN3, QWEN3_MOE):
        values["attention_bias"] = False
    if architecture == LLAMA:
        values["mlp_bias"] = False
    if config.rope_factor != 1:
        values["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return values | _expert_values(config, architecture)


def _expert_values(config: ModelConfig, architecture: str) -> dict[str, object]:
    if not config.experts:
        return {}
    values: dict[str, object] = {"num_experts_per_tok": config.experts_per_token}
    if architecture == MIXTRAL:
        return values | {"num_local_experts": config.experts}
    return values | {
        "num_experts": config.experts,
        "moe_intermediate_size": config.expert_ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
    }
