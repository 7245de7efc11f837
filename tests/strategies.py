"""Hypothesis strategies: small models, layouts that fit them, StagePlans on any slots."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import assume
from hypothesis import strategies as st

from nereus.config import ModelConfig
from nereus.layout import ORDERS, Layout, Stage, StagePlan, equal_shares, layout_problem
from nereus.model import VOCAB_ALIGN, Head, ModelSpec, llama, model_spec, round_up

VOCABS = (259, 40, 64, 129, 320)
FEW_VOCABS = (40, 70)
MAX_RANKS = 8  # the fleet that stage_plans draws from is larger


@st.composite
def model_configs(draw: st.DrawFn, vocabs: tuple[int, ...] = VOCABS) -> ModelConfig:
    """A model of a few thousand parameters: sizes that are no multiples of 64 or 128, GQA and MHA, 1 to 4 layers."""
    kv_heads = draw(st.sampled_from((1, 2, 3, 4)))
    return ModelConfig(
        layers=draw(st.integers(1, 4)),
        hidden=draw(st.sampled_from((1, 6, 8, 20))),
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.sampled_from((1, 2, 4))),
        head_dim=draw(st.sampled_from((1, 2, 5))),
        ffn=draw(st.sampled_from((12, 24, 60))),
        vocab=draw(st.sampled_from(vocabs)),
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
    )


@st.composite
def general_configs(draw: st.DrawFn) -> ModelConfig:
    """Models of every kind: tied or not, with biases, with norms of q and k, with experts in all or some layers."""
    config = replace(draw(model_configs(FEW_VOCABS)), tie_embeddings=draw(st.booleans()))
    kind = draw(st.sampled_from(("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")))
    config = replace(config, qkv_bias=kind == "qwen2", qk_norm=kind.startswith("qwen3"))
    if kind not in ("qwen3_moe", "mixtral"):
        return config
    dense = draw(st.sets(st.integers(0, config.layers - 1), max_size=config.layers - 1))
    ffn = draw(st.sampled_from((4, 12)))
    return replace(
        config,
        experts=draw(st.sampled_from((2, 4, 6))),
        experts_per_token=2,
        expert_ffn=ffn,
        dense_layers=tuple(sorted(dense)),
    )


@st.composite
def general_specs(draw: st.DrawFn) -> ModelSpec:
    """A model of any kind, with a language or a value head."""
    head: Head = draw(st.sampled_from(("language", "value", "reward")))
    return model_spec("m", draw(general_configs()), head)


@st.composite
def general_layouts(draw: st.DrawFn, config: ModelConfig, stage: Stage = "train") -> Layout:
    """A layout of at most 16 ranks that fits the model, with context and expert parallelism and both orders of ranks."""
    layout = draw(layouts(config, stage))
    if stage == "generate":
        spread = config.experts and config.experts % layout.tp == 0 and draw(st.booleans())
        found = replace(layout, ep=layout.tp if spread else 1)
    else:
        found = replace(layout, cp=draw(st.sampled_from((1, 2))), order=draw(st.sampled_from(ORDERS)))
        if config.experts:
            etp, ep = draw(st.sampled_from((None, 1, 2))), draw(st.sampled_from((1, 2, 3)))
            found = replace(found, ep=ep, etp=etp)
    assume(layout_problem(config, found, stage) is None)
    return found


@st.composite
def general_stage_plans(draw: st.DrawFn, config: ModelConfig, stage: Stage = "train") -> StagePlan:
    """The model `m` in any layout that fits it, on any slots, in any order."""
    layout = draw(general_layouts(config, stage))
    slots = draw(st.permutations(range(layout.ranks + 3)))[: layout.ranks]
    return stage_plan(layout, tuple(slots), stage=stage)


@st.composite
def specs(draw: st.DrawFn, vocabs: tuple[int, ...] = VOCABS) -> ModelSpec:
    """A model with a language or a value head."""
    head: Head = draw(st.sampled_from(("language", "value", "reward")))
    return llama("m", draw(model_configs(vocabs)), head)


def tensor_degrees(config: ModelConfig, stage: Stage = "train") -> list[int]:
    """TP degrees that cut the model: divisors of heads, ffn, the padded vocabulary, and of kv_heads (or, generating, multiples)."""
    kv = config.kv_heads
    padded = round_up(config.vocab, VOCAB_ALIGN)
    return [
        tp
        for tp in range(1, MAX_RANKS + 1)
        if config.heads % tp == config.ffn % tp == padded % tp == 0
        and (kv % tp == 0 or (stage == "generate" and tp % kv == 0))
    ]


@st.composite
def pipelines(draw: st.DrawFn, layers: int, most: int) -> tuple[int, ...]:
    """Layers per pipeline rank, each at least 1: any composition."""
    pp = draw(st.integers(1, min(layers, most)))
    cuts = draw(st.lists(st.integers(1, layers - 1), min_size=pp - 1, max_size=pp - 1, unique=True)) if pp > 1 else []
    return tuple(b - a for a, b in pairwise((0, *sorted(cuts), layers)))


@st.composite
def layouts(draw: st.DrawFn, config: ModelConfig, stage: Stage = "train") -> Layout:
    """A layout of at most MAX_RANKS ranks that fits the model."""
    tp = draw(st.sampled_from(tensor_degrees(config, stage)))
    pipeline = (config.layers,) if stage == "generate" else draw(pipelines(config.layers, MAX_RANKS // tp))
    return Layout(
        tp=tp,
        pp=len(pipeline),
        dp=draw(st.integers(1, MAX_RANKS // (tp * len(pipeline)))),
        pipeline=pipeline,
        distributed_optimizer=stage == "train" and draw(st.booleans()),
    )


@st.composite
def stage_plans(draw: st.DrawFn, config: ModelConfig, stage: Stage = "train", fleet: int = 12) -> StagePlan:
    """The model `m` in a layout on any slots of the fleet, in any order."""
    layout = draw(layouts(config, stage))
    slots = draw(st.permutations(range(fleet)))[: layout.ranks]
    return stage_plan(layout, tuple(slots), stage=stage)


def stage_plan(layout: Layout, slots: tuple[int, ...] | None = None, *, stage: Stage = "train") -> StagePlan:
    """A StagePlan of the model `m`; on the first slots unless said otherwise."""
    return StagePlan(
        model="m",
        stage=stage,
        layout=layout,
        slots=tuple(range(layout.ranks)) if slots is None else slots,
        shares=equal_shares(8, layout.dp),
        micro_batch=2,
    )
