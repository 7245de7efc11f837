"""Llama-3.1-8B, PPO with a critic, on 8, 16 and 64 GPUs: the baselines' side, each carried out by its own command line.

`make baselines-check` has verl's and OpenRLHF's own parsers judge all of them. The model is named, not shipped; its shapes
stand beside the name. Workload, fleet and seed are the same for both; the layout of each is the one that its own guides
recommend.
"""

from __future__ import annotations

from collections.abc import Callable
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
from nereus.experiment import Run, System, Workload

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
GPUS = (8, 16, 64)
BUDGET_BYTES = 76 << 30  # of an 80 GB GPU


def runs(system: System | None = None) -> tuple[Run, ...]:
    """Of every system, or of the one named: verl in a pipeline of two where there is more than a node, OpenRLHF fully sharded."""
    plans: dict[System, Callable[[int], PlanConfig]] = {"verl": verl_plan, "openrlhf": openrlhf_plan}
    made = [
        Run(
            experiment=NAME,
            variant=f"{gpus}gpus" if name == "verl" else f"{name}-{gpus}gpus",
            system=name,
            workload=WORKLOAD,
            fleet=FleetConfig(slots=gpus, slot_budget_bytes=BUDGET_BYTES),
            plan=plan(gpus),
        )
        for name, plan in plans.items()
        for gpus in GPUS
        if system in (None, name)
    ]
    return tuple(made)


def verl_plan(gpus: int) -> PlanConfig:
    """TP4, on more than one node PP2; generation in engines of TP2. One cut for all: verl's Megatron workers share groups."""
    pp = 1 if gpus <= 8 else 2
    stage = StageConfig(tp=4, pp=pp, dp=gpus // (4 * pp), micro_batch=4)
    return PlanConfig(
        actor_train=stage,
        critic_train=stage,
        reference_infer=replace(stage, micro_batch=8),
        actor_generate=StageConfig(tp=2, dp=gpus // 2),
    )


def openrlhf_plan(gpus: int) -> PlanConfig:
    """The hybrid engine of its quick start: every model sharded over all GPUs, engines of TP2 on the same ones."""
    stage = StageConfig(dp=gpus, micro_batch=5)
    return PlanConfig(
        actor_train=stage,
        critic_train=stage,
        reference_infer=stage,
        actor_generate=StageConfig(tp=2, dp=gpus // 2),
    )


def apart(run: Run) -> Run:
    """An OpenRLHF run with GPUs of their own for actor and reference, critic, engines, 1 : 1 : 2 as in its script."""
    quarter = run.fleet.slots // 4
    actor = StageConfig(dp=quarter, slots=tuple(range(quarter)), micro_batch=5)
    engines = tuple(range(2 * quarter, 4 * quarter))
    plan = PlanConfig(
        actor_train=actor,
        critic_train=replace(actor, slots=tuple(range(quarter, 2 * quarter))),
        reference_infer=actor,
        actor_generate=StageConfig(tp=2, dp=quarter, slots=engines),
    )
    return replace(run, variant=f"{run.variant}-apart", plan=plan)
