"""Llama-3.1-8B, PPO with a critic, on 8 and on 16 GPUs: verl's side, carried out by `python -m verl.trainer.main_ppo`.

`make baselines-check` has verl's own parser judge both. The model is named, not shipped; its shapes stand beside the name.
"""

from __future__ import annotations

from dataclasses import replace

from nereus.config import (
    AlgorithmConfig,
    DataConfig,
    FleetConfig,
    ModelConfig,
    PlanConfig,
    RolloutConfig,
    StageConfig,
    WarmupConfig,
)
from nereus.experiment import Run, Workload

NAME = "ppo_8b"
LLAMA_8B = ModelConfig(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14336,
    vocab=128256,
    dtype="bfloat16",
    norm_eps=1e-5,
    rope_theta=500000.0,
)
WORKLOAD = Workload(
    model=LLAMA_8B,
    model_path="meta-llama/Llama-3.1-8B-Instruct",
    data=DataConfig(
        task="gsm_symbolic",
        prompts_per_step=256,
        samples_per_prompt=4,
        max_prompt_tokens=1024,
        max_response_tokens=2048,
    ),
    rollout=RolloutConfig(temperature=1.0, kv_cache_bytes=24 << 30),
    algorithm=AlgorithmConfig(
        adv_estimator="gae",
        gamma=1.0,
        lam=0.95,
        kl_coef=1e-3,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        value_clip=0.5,
        mini_batches=4,
        actor_lr=1e-6,
        critic_lr=1e-5,
        weight_decay=0.01,
    ),
    warmup=WarmupConfig(steps=0),
    steps=100,
)
BUDGET_BYTES = 76 << 30  # of an 80 GB GPU


def runs() -> tuple[Run, ...]:
    """On 8 GPUs TP4 and DP2, on 16 a pipeline of two more; generation in engines of TP2."""
    small = Run(
        experiment=NAME,
        variant="8gpus",
        system="verl",
        workload=WORKLOAD,
        fleet=FleetConfig(slots=8, slot_budget_bytes=BUDGET_BYTES),
        plan=_plan(StageConfig(tp=4, dp=2, micro_batch=4), engines=4),
    )
    large = replace(
        small,
        variant="16gpus",
        fleet=FleetConfig(slots=16, slot_budget_bytes=BUDGET_BYTES),
        plan=_plan(StageConfig(tp=4, pp=2, dp=2, micro_batch=4), engines=8),
    )
    return small, large


def _plan(stage: StageConfig, engines: int) -> PlanConfig:
    """Actor, critic and reference cut as `stage`: verl's Megatron workers share one set of process groups."""
    return PlanConfig(
        actor_train=stage,
        critic_train=stage,
        reference_infer=replace(stage, micro_batch=8),
        actor_generate=StageConfig(tp=2, dp=engines),
    )
