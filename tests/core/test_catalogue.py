"""The catalogue: published sizes of the shipped models, every value that is refused, and configurations there and back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from nereus.catalogue import LLAMA, MODEL_TYPES, QWEN2, QWEN3_MOE, architecture_of, hf_config, model_config, spec_of
from nereus.cli.models import load_hf_config, load_model, model_names
from nereus.config import ModelConfig
from nereus.errors import ConfigError
from nereus.memory import kv_bytes_per_token
from nereus.model import EMBEDDING, LM_HEAD, VALUE_HEAD, Head, is_sparse, model_spec
from tests.strategies import general_configs

# The number of parameters that Hugging Face shows for the model's safetensors files (api/models/NAME, safetensors.total),
# or half of `total_size` in its model.safetensors.index.json (all are bfloat16). Qwen3-0.6B, -1.7B store their tied head
# a second time; here are the parameters that transformers counts.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
}
TINY = {
    "architectures": [LLAMA],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}


@pytest.mark.parametrize("name", model_names())
def test_shipped_models_have_their_published_sizes(name: str) -> None:
    spec = spec_of(load_hf_config(name), name)
    assert spec.parameters == PUBLISHED[name]
    assert spec.config == load_model(name) == model_config(hf_config(spec.config))
    assert spec.config.dtype == "bfloat16"


def test_every_published_size_has_its_model() -> None:
    assert set(PUBLISHED) == set(model_names())


@given(general_configs())
def test_a_configuration_survives_the_way_there_and_back(config: ModelConfig) -> None:
    if config.experts and not config.qk_norm and (config.dense_layers or config.ffn != config.expert_ffn):
        config = replace(config, dense_layers=(), ffn=config.expert_ffn)  # Mixtral has one size and no plain layers
    written = json.loads(json.dumps(hf_config(config)))
    assert model_config(written) == config
    del written["architectures"]
    assert model_config(written) == config  # model_type alone says it too
    assert written["model_type"] == MODEL_TYPES[architecture_of(config)]


@given(general_configs())
def test_tensors_are_named_once_and_are_of_their_layer(config: ModelConfig) -> None:
    heads: tuple[Head, ...] = ("language", "value")
    for head in heads:
        spec = model_spec("m", config, head)
        assert len({t.name for t in spec.tensors}) == len(spec.tensors)
        assert all(spec.tensor(t.name) is t for t in spec.tensors)
        for t in spec.tensors:
            assert (t.layer is not None) == t.name.startswith("model.layers.")
            assert (t.expert is not None) == (".experts." in t.name)
            assert t.layer is None or t.name.startswith(f"model.layers.{t.layer}.")
            assert t.expert is None or f".experts.{t.expert}." in t.name
        counts = {layer: sum(t.layer == layer and t.expert is not None for t in spec.tensors) for layer in range(4)}
        assert counts == {n: 3 * config.experts * (n < config.layers and is_sparse(config, n)) for n in range(4)}
        names = {t.name for t in spec.tensors if t.layer is None}
        assert names - {EMBEDDING, "model.norm.weight"} == (
            {VALUE_HEAD} if head == "value" else set() if config.tie_embeddings else {LM_HEAD}
        )


def test_specs_are_compared_without_their_tensors() -> None:
    config = load_model("qwen3-0.6b")
    spec = model_spec("actor", config)
    assert spec == replace(spec, tensors=())
    assert hash(spec) == hash(replace(spec, tensors=()))
    assert spec != model_spec("critic", config)
    with pytest.raises(KeyError, match="actor has no tensor lm_head"):
        spec.tensor(LM_HEAD)


def test_names_are_those_of_the_families() -> None:
    qwen = {t.name for t in model_spec("m", load_model("qwen3-30b-a3b")).tensors}
    assert {"model.layers.47.mlp.gate.weight", "model.layers.0.mlp.experts.127.down_proj.weight"} <= qwen
    assert "model.layers.5.self_attn.k_norm.weight" in qwen
    mixtral = {t.name: t.shape for t in model_spec("m", load_model("mixtral-8x7b")).tensors}
    assert mixtral["model.layers.31.block_sparse_moe.experts.7.w2.weight"] == (4096, 14336)
    assert mixtral["model.layers.0.block_sparse_moe.gate.weight"] == (8, 4096)
    assert model_spec("m", load_model("qwen2.5-7b")).tensor("model.layers.0.self_attn.k_proj.bias").shape == (512,)


def test_what_is_left_out_takes_hugging_faces_defaults() -> None:
    config = model_config(TINY)
    assert (config.head_dim, config.kv_heads, config.dtype, config.rope_factor) == (16, 4, "float32", 1.0)
    assert not config.tie_embeddings
    sparse = {**TINY, "architectures": [QWEN3_MOE], "num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2}
    sparse |= {"norm_topk_prob": True, "moe_intermediate_size": 32, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert model_config(sparse).dense_layers == (0, 2, 3, 4)
    assert model_config({**TINY, "architectures": [QWEN2], "sliding_window": 4096}).qkv_bias


EXPERTS: dict[str, object] = {
    "architectures": [QWEN3_MOE],
    "num_experts": 4,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("changes", "key", "told"),
    [
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "kv_lora_rank", "latent attention"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None, "model_type": "gemma"}, "model_type", "Qwen3ForCausalLM"),
        ({"hidden_size": 0}, "hidden_size", "at least 1"),
        ({"hidden_size": None}, "hidden_size", "at least 1"),
        ({"vocab_size": "many"}, "vocab_size", "whole number"),
        ({"num_attention_heads": 3}, "num_attention_heads", "divisor of hidden_size = 64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "divisor of num_attention_heads = 4"),
        ({"hidden_act": "gelu"}, "hidden_act", "expected silu"),
        ({"attention_bias": True}, "attention_bias", "expected False"),
        ({"sliding_window": 4096}, "sliding_window", "expected None"),
        ({"architectures": [QWEN2], "sliding_window": 64, "use_sliding_window": True}, "sliding_window", "None"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type", "llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 2}}, "rope_scaling.low_freq_factor", "1.0"),
        ({"torch_dtype": "float16"}, "torch_dtype", "float32, bfloat16"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
        ({"rms_norm_eps": -1}, "rms_norm_eps", "above 0"),
        ({"architectures": [["x"]]}, "architectures", "LlamaForCausalLM"),
        ({"torch_dtype": ["float32"]}, "torch_dtype", "float32, bfloat16"),
        ({"num_attention_heads": 3, "head_dim": None}, "num_attention_heads", "divisor of hidden_size = 64"),
        (EXPERTS | {"num_experts_per_tok": 5}, "num_experts_per_tok", "at most the number of experts, 4"),
        (EXPERTS | {"norm_topk_prob": None}, "norm_topk_prob", "expected true"),
        (EXPERTS | {"norm_topk_prob": False}, "norm_topk_prob", "expected true"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(changes: dict[str, object], key: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        model_config({**TINY, **changes})
    assert refused.value.key == key
    assert refused.value.value == {**TINY, **changes}.get(key, refused.value.value)


def test_biases_with_norms_are_no_architecture() -> None:
    with pytest.raises(ConfigError, match="together with qk_norm"):
        architecture_of(ModelConfig(qkv_bias=True, qk_norm=True))
    with pytest.raises(ConfigError, match="Mixtral has one size"):
        hf_config(ModelConfig(experts=4, experts_per_token=2, expert_ffn=8))


def test_models_are_loaded_by_name_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert load_model(str(tmp_path)) == load_model(str(tmp_path / "config.json")) == model_config(TINY)
    assert load_model("Llama-3.1-8B") == load_model("llama-3.1-8b")
    with pytest.raises(ConfigError, match="did you mean qwen3-8b"):
        load_model("Qwen/Qwen3-8")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"expected a Hugging Face config\.json"):
        load_model(str(tmp_path))


def test_kv_cache_of_a_token() -> None:
    """Llama 3.1 8B keeps 128 KiB a token (2 x 32 layers x 8 heads x 128 x 2 bytes); TP 16 halves no more than TP 8."""
    config = load_model("llama-3.1-8b")
    assert [kv_bytes_per_token(config, tp) for tp in (1, 2, 8, 16)] == [131072, 65536, 16384, 16384]
