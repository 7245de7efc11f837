"""What `make verl-parity` starts from and what comes of a step: the job, its recorded rollouts and weights, the outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from nereus.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    FleetConfig,
    LoggerConfig,
    ModelConfig,
    PlanConfig,
    ProbeConfig,
    RunConfig,
    StageConfig,
    WarmupConfig,
)
from nereus.rl.batch import Batch
from nereus.validate import validate

WARMUP_STEPS, STEPS_BEFORE = 60, 2
MICRO_BATCH = 16
ONE = StageConfig(micro_batch=MICRO_BATCH)
Weights = dict[str, dict[str, Tensor]]
"""Weights by model and Hugging Face name."""


def base_config() -> Config:
    """The small PPO job: 16 prompts with 4 samples each, two mini-batches of two micro-batches."""
    made = Config(
        run=RunConfig(name="verl-parity", seed=11, steps=STEPS_BEFORE + 1),
        model=ModelConfig(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, init_std=0.08),
        data=DataConfig(
            task="spell_backward",
            task_options={"min_word_len": 3, "max_word_len": 5},
            prompt_template="{word}>",
            prompts_per_step=16,
            samples_per_prompt=4,
            max_prompt_tokens=8,
            max_response_tokens=7,
        ),
        algorithm=AlgorithmConfig(gamma=1.0, lam=0.95, mini_batches=2, actor_lr=2e-3, critic_lr=2e-3),
        warmup=WarmupConfig(steps=WARMUP_STEPS, samples=64, lr=3e-3),
        fleet=FleetConfig(slots=1, slot_budget_bytes=8 << 30),
        plan=PlanConfig(actor_train=ONE, actor_generate=ONE, critic_train=ONE, reference_infer=ONE),
        probe=ProbeConfig(seconds=0.0),
        logger=LoggerConfig(wandb="off"),
    )
    validate(made)
    return made


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What both systems start from: the rollouts of a step, what the models said of them, the weights to update.

    `columns` are old_logp, reference_logp and values, [rows, S] as in `nereus.rl.batch`. The weights are those after
    an update on the same rollouts, so that ratios have left 1 and values their recorded ones, as in a later epoch.
    """

    folder: Path
    step: int
    data_position: int
    batch: Batch
    scores: Tensor
    groups: Tensor
    columns: Mapping[str, Tensor]
    weights: Weights
    horizon_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What a PPO step computed: advantages and returns [rows, S], a row of numbers per optimizer step, new weights."""

    advantages: Tensor
    returns: Tensor
    updates: list[dict[str, float]]
    weights: Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOfVerl:
    """What verl computed: advantages and returns [rows, longest response], a row per optimizer step, new weights."""

    advantages: Tensor
    returns: Tensor
    updates: dict[str, list[dict[str, float]]]
    weights: dict[str, dict[str, Tensor]]
