"""Sizes of the models that point tables name, from their public configurations (Hugging Face, papers)."""

from __future__ import annotations

import re
from dataclasses import replace

from nereus.costs.shape import Shape, dense, gpt

LLAMA_2, LLAMA_3, QWEN, NEMOTRON = 32000, 128256, 151936, 256000

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

MODELS: dict[str, Shape] = {
    "llama-7b": dense(32, 4096, 32, 32, 11008, LLAMA_2),
    "llama-13b": dense(40, 5120, 40, 40, 13824, LLAMA_2),
    "llama-34b": dense(48, 8192, 64, 8, 22016, LLAMA_2),
    "llama-70b": dense(80, 8192, 64, 8, 28672, LLAMA_2),
    "llama3-1b": replace(dense(16, 2048, 32, 8, 8192, LLAMA_3), tied=True),
    "llama3-8b": dense(32, 4096, 32, 8, 14336, LLAMA_3),
    "llama3-70b": dense(80, 8192, 64, 8, 28672, LLAMA_3),
    "llama3-405b": dense(126, 16384, 128, 8, 53248, LLAMA_3),
    "qwen2-1.5b": replace(dense(28, 1536, 12, 2, 8960, QWEN), tied=True),
    "qwen2-7b": dense(28, 3584, 28, 4, 18944, 152064),
    "qwen3-0.6b": replace(dense(28, 1024, 16, 8, 3072, QWEN, head_dim=128), tied=True),
    "qwen3-4b": replace(dense(36, 2560, 32, 8, 9728, QWEN, head_dim=128), tied=True),
    "qwen3-8b": dense(36, 4096, 32, 8, 12288, QWEN),
    "qwen3-32b": dense(64, 5120, 64, 8, 25600, QWEN, head_dim=128),
    "qwen3-30b-a3b": _experts(dense(48, 2048, 32, 4, 6144, QWEN, head_dim=128), 128, 8, 768),
    "qwen3-235b-a22b": _experts(dense(94, 4096, 64, 4, 12288, QWEN, head_dim=128), 128, 8, 1536),
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
