"""Shapes have the parameters that the models' cards state, and those of the catalogue's specs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from nereus.costs.shape import Shape, dense, shape_of
from nereus.model import model_spec
from nereus.report.accuracy.models import MODELS, shape_named
from tests.strategies import general_configs

PUBLISHED = {  # billions, from the model cards
    "llama-7b": 6.74,
    "llama-13b": 13.02,
    "llama-70b": 68.98,
    "llama3-1b": 1.236,
    "llama3-8b": 8.030,
    "llama3-70b": 70.55,
    "llama3-405b": 405.85,
    "qwen2-7b": 7.62,
    "qwen2-1.5b": 1.54,
    "qwen3-0.6b": 0.596,
    "qwen3-4b": 4.02,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "gpt-oss-120b": 116.8,
    "deepseek-v2": 235.7,
    "deepseek-v3": 671.0,
    "deepseek-7b": 6.91,
    "falcon-180b": 179.5,
    "nemotron-340b": 341.0,
}
ACTIVE = {"qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22.0, "deepseek-v3": 37.0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert MODELS[name].parameters_count / 1e9 == pytest.approx(PUBLISHED[name], rel=0.012)


def test_models_that_are_shipped_have_their_shipped_sizes() -> None:
    qwen = Shape(
        layers=94,
        hidden=4096,
        heads=64,
        kv_heads=4,
        head_dim=128,
        ffn=12288,
        vocab=151936,
        expert_count=128,
        active_expert_count=8,
        expert_ffn=1536,
    )
    assert MODELS["qwen3-235b-a22b"] == qwen
    assert MODELS["llama3-70b"] == dense(80, 8192, 64, 8, 28672, 128256)
    assert MODELS["qwen2-1.5b"] == replace(dense(28, 1536, 12, 2, 8960, 151936), tied=True)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(name: str) -> None:
    assert MODELS[name].active_parameters_count / 1e9 == pytest.approx(ACTIVE[name], rel=0.1)


@given(config=general_configs())
def test_a_configured_model_has_its_specs_parameters(config) -> None:
    """All of the spec's but norms and biases, which a Shape leaves out."""
    spec = model_spec("actor", config)
    counted = sum(
        rows * tensor.shape[1] for tensor in spec.tensors if len(tensor.shape) == 2 for rows in (tensor.shape[0],)
    )
    shape = shape_of(config)
    assert shape.parameters_count == counted


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("LLAMA3.1_8B", "llama3-8b"),
        ("meta-llama/Llama-3.1-70B", "llama3-70b"),
        ("LLaMA 7B", "llama-7b"),
        ("LLAMA2-13B", "llama-13b"),
        ("Qwen3-30B3A", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("DeepSeek-R1-Distill-Qwen-7B", "qwen2-7b"),
        ("DeepSeek V3", "deepseek-v3"),
    ],
)
def test_names_of_the_tables_are_understood(text: str, name: str) -> None:
    assert shape_named(text) == MODELS[name]


def test_what_is_not_known_is_not_guessed() -> None:
    assert shape_named("Nemotron_3_Nano") is None
    cut = shape_named("llama3-70b truncated to 12 layers")
    assert cut is not None
    assert (cut.layers, cut.hidden) == (12, 8192)
