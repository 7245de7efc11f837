"""Sizes of the models that point tables name: of shipped models as shipped, of others from their public configurations."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.resources import files

from nereus.catalogue import model_config
from nereus.costs.shape import Shape, dense, gpt, shape_of

LLAMA_2, NEMOTRON = 32000, 256000

_MPT = {
    "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20),
    "mpt-7b": (32, 4096, 32),
    "mpt-13b": (40, 5120, 40),
    "mpt-30b": (48, 7168, 64),
    "mpt-70b": (80, 8192, 64),
}

_DEEPSEEK_V3 = Shape(
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=128,
    ffn=18432,
    vocab=129280,
    expert_count=256,
    active_expert_count=8,
    expert_ffn=2048,
    shared_ffn=2048,
    dense_layers=3,
    q_latent_dim=1536,
    kv_latent_dim=512,
    rope_dim=64,
)
_DEEPSEEK_V2 = Shape(
    layers=60,
    hidden=5120,
    heads=128,
    kv_heads=128,
    head_dim=128,
    ffn=12288,
    vocab=102400,
    expert_count=160,
    active_expert_count=6,
    expert_ffn=1536,
    shared_ffn=3072,
    dense_layers=1,
    q_latent_dim=1536,
    kv_latent_dim=512,
    rope_dim=64,
)


def _experts(base: Shape, count: int, active: int, width: int) -> Shape:
    return replace(base, expert_count=count, active_expert_count=active, expert_ffn=width)


_PLAIN = replace(dense(32, 6144, 48, 8, 24576, NEMOTRON), gated=False)

_SHIPPED = {
    "llama3-1b": "llama-3.2-1b",
    "llama3-8b": "llama-3.1-8b",
    "llama3-70b": "llama-3.1-70b",
    "llama3-405b": "llama-3.1-405b",
    "qwen2-1.5b": "qwen2.5-1.5b",
    "qwen2-7b": "qwen2.5-7b",
    **{name: name for name in ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b")},
}
"""Name here -> name in nereus/models; Llama 3 and 3.1, and Qwen 2 and 2.5, have the same sizes."""


def _shipped(name: str) -> Shape:
    text = (files("nereus") / "models" / f"{name}.json").read_text(encoding="utf-8")
    return shape_of(model_config(json.loads(text)))


MODELS: dict[str, Shape] = {name: _shipped(shipped) for name, shipped in _SHIPPED.items()} | {
    "llama-7b": dense(32, 4096, 32, 32, 11008, LLAMA_2),
    "llama-13b": dense(40, 5120, 40, 40, 13824, LLAMA_2),
    "llama-34b": dense(48, 8192, 64, 8, 22016, LLAMA_2),
    "llama-70b": dense(80, 8192, 64, 8, 28672, LLAMA_2),
    "gpt-oss-120b": _experts(dense(36, 2880, 64, 8, 2880, 201088, head_dim=64), 128, 4, 2880),
    "deepseek-v2": _DEEPSEEK_V2,
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-7b": dense(30, 4096, 32, 32, 11008, 102400),
    "falcon-180b": replace(dense(80, 14848, 232, 8, 59392, 65024, head_dim=64), gated=False, tied=True),
    "gpt-j-6b": gpt(28, 4096, 16, 50400),
    "gpt3-20b": gpt(44, 6144, 48, 51200, position_rows=2048),
    "nemotron-8b": replace(_PLAIN, layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=16384),
    "nemotron-22b": replace(_PLAIN, layers=40, heads=48, kv_heads=48, head_dim=128),
    "nemotron-340b": replace(_PLAIN, layers=96, hidden=18432, heads=96, kv_heads=8, head_dim=192, ffn=73728),
}

_PATTERNS = (
    (r"llama-?(3|3\.[13])[-_ .]?(v)?[-_ ]?405b", "llama3-405b"),
    (r"llama[- ]?(3|3\.[13])[-_ ]70b( \(sft\))?", "llama3-70b"),
    (r"llama[- ]?(3|3\.[13])[-_ ]8b(-instruct)?", "llama3-8b"),
    (r"llama[- ]?3\.2[-_ ]1b(-instruct)?", "llama3-1b"),
    (r"llama[-_ ]?2?[-_ ](7|13|34|70)b", r"llama-\1b"),
    (r"deepseek[- ]?v3", "deepseek-v3"),
    (r"deepseek[- ]?v2", "deepseek-v2"),
    (r"deepseek-llm-7b-chat", "deepseek-7b"),
    (r"qwen2(\.5)?(-math)?-7b(-instruct)?( sft)?|(deepseek-)?r1-distill-qwen-7b", "qwen2-7b"),
    (r"qwen2(\.5)?(-math)?-1\.5b(-instruct)?|(deepseek-)?r1-distill-qwen-1\.5b", "qwen2-1.5b"),
    (r"qwen3[-_ ](0\.6|4|8|32)b(-base|-instruct-2507)?", r"qwen3-\1b"),
    (r"qwen3[-_ ]30b([-_ ]?a3b|3a)(-base)?", "qwen3-30b-a3b"),
    (r"qwen3[-_ ]235b([-_]a22b)?", "qwen3-235b-a22b"),
    (r"gpt[- ]oss[- ]120b", "gpt-oss-120b"),
    (r"falcon[- ]180b", "falcon-180b"),
    (r"gpt-j[- ]6b", "gpt-j-6b"),
)


def shape_named(name: str, position_rows: int = 0) -> Shape | None:
    """The sizes of a model under any of the names that tables use, None when unknown.

    "NAME truncated to N layers" and "NAME L=N" keep their first N layers.
    """
    text = re.sub(r"^[\w.-]+/", "", name.strip().lower())
    cut = re.fullmatch(r"(.+?) (?:truncated to (\d+) layers|l=(\d+))", text)
    if cut:
        whole = shape_named(cut[1])
        first = None if whole is None else min(whole.dense_layers, 1)  # what is cut short keeps one dense layer
        return None if whole is None else replace(whole, layers=int(cut[2] or cut[3]), dense_layers=first or 0)
    if text in _MPT:
        layers, hidden, heads = _MPT[text]
        return gpt(layers, hidden, heads, 50368, position_rows=position_rows)
    if text in MODELS:
        return MODELS[text]
    for pattern, known in _PATTERNS:
        match = re.fullmatch(pattern, text)
        if match:
            return MODELS[match.expand(known)]
    return None
