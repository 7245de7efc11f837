"""A job on the shared slots, small enough to be changed many times in a test."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nereus.cli.folder import create_run_folder
from nereus.config import (
    AlgorithmConfig,
    ChangeConfig,
    Config,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    PlanChange,
    PlanConfig,
    ProbeConfig,
    RunConfig,
    StageConfig,
    TransferConfig,
    WarmupConfig,
)
from nereus.report.display import QuietDisplay
from nereus.runtime.changes import first_state, start_generation
from nereus.runtime.driven import DrivenJob
from nereus.runtime.journal import Journal
from nereus.runtime.metrics import open_metrics
from nereus.runtime.outset import other_states
from nereus.runtime.pool import SlotPool
from nereus.runtime.real import RealWorld
from nereus.runtime.run import commander
from nereus.transitions.change import Mode
from nereus.validate import validate
from nereus.world import drive
from tests.live.faults import plant

S = StageConfig
FIRST = PlanConfig(
    actor_train=S(tp=2, pp=2, micro_batch=4),
    actor_generate=S(tp=2, dp=2),
    critic_train=S(pp=2, dp=2, micro_batch=4),
    reference_infer=S(dp=4),
)


def config(**changes: Any) -> Config:
    """A small PPO job; keyword arguments replace whole sections."""
    base = Config(
        run=RunConfig(name="live", seed=3, steps=2),
        data=DataConfig(
            task="spell_backward",
            task_options={"min_word_len": 3, "max_word_len": 4},
            prompt_template="{word}>",
            prompts_per_step=8,
            samples_per_prompt=2,
            max_prompt_tokens=16,
            max_response_tokens=8,
        ),
        algorithm=AlgorithmConfig(mini_batches=2, actor_lr=2e-4, critic_lr=2e-4, kl_coef=0.01),
        # a larger initial deviation than the default, so that attention takes part from the first step on: gradients
        # of q and k that nearly cancel have large relative rounding errors
        model=ModelConfig(init_std=0.08),
        warmup=WarmupConfig(steps=4, samples=32, lr=3e-3),
        plan=FIRST,
        probe=ProbeConfig(seconds=0.0),
        transfer=TransferConfig(bucket_bytes=4 << 20),  # so small a model then travels in several rounds
        logger=LoggerConfig(wandb="off"),
    )
    made = replace(base, **changes)
    validate(made)
    return made


class NeverStop:
    """A user who lets the run go on."""

    requested: bool = False

    def hold(self) -> None:
        """Nothing to hold."""


class Planting(NeverStop):
    """Plants faults in slots once the job is ready: {slot: (fault, kind of task, EMU)}."""

    def __init__(self, pool: SlotPool, faults: Mapping[int, tuple[str, str, str]]) -> None:
        self._pool, self._faults = pool, dict(faults)

    @property
    def requested(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Asked between commands: the first time is when the job is ready."""
        faults, self._faults = self._faults, {}
        if faults:
            self._pool.call("apply", {slot: (plant, *fault) for slot, fault in faults.items()})
        return False


def run_job(
    pool: SlotPool,
    job_config: Config,
    folder: Path,
    recorded: Path | None = None,
    *,
    faults: Mapping[int, tuple[str, str, str]] | None = None,
    modes: Mapping[str, Mode] | None = None,
) -> RealWorld:
    """A whole run through controller and world on the shared slots; returns the world with its records."""
    made = create_run_folder(job_config, folder)
    world = RealWorld(
        config=job_config,
        folder=made,
        pool=pool,
        journal=Journal(made.events),
        metrics=open_metrics(job_config, made, lambda _: None),
        display=QuietDisplay(),
        stop=Planting(pool, faults or {}),
        recorded=recorded,
    )
    world.job.modes.update(modes or {})
    with ExitStack() as ending:
        ending.callback(world.journal.close)
        ending.callback(world.metrics.close)
        ending.callback(world.searches.close)
        drive(commander(world, ending), world)
    return world


class Scene(DrivenJob):
    """A job that a test steps and changes by hand."""

    def __init__(self, pool: SlotPool, job_config: Config, folder: Path, *, generation: bool = True) -> None:
        super().__init__(pool, job_config, create_run_folder(job_config, folder))
        first_state(self.job)
        other_states(self.job)
        if generation:
            start_generation(self.job)
            self.job.plan_sync()

    def tensors(self, emu: str, component: str = "") -> dict[tuple[str, str], torch.Tensor]:
        """The state of an EMU, put together from all slots: {(component, tensor): full tensor}."""
        return assemble(self.job.specs[emu.split(".", maxsplit=1)[0]], self.pool.call_all("fetch", emu, component))


def assemble(spec: Any, by_slot: Mapping[int, Mapping[Any, torch.Tensor]]) -> dict[tuple[str, str], torch.Tensor]:
    """Full tensors from shards; replicas must be equal bit by bit."""
    full: dict[tuple[str, str], torch.Tensor] = {}
    seen: dict[tuple[str, str], torch.Tensor] = {}
    for shards in by_slot.values():
        for shard, data in shards.items():
            key = shard.component, shard.tensor
            shape = spec.tensor(shard.tensor).shape
            target = full.setdefault(key, torch.full(shape, torch.nan, dtype=data.dtype))
            written = seen.setdefault(key, torch.zeros(shape, dtype=torch.bool))
            place = shard.box.slices((0,) * len(shape))
            again = written[place]
            assert torch.equal(target[place][again], data[again]), f"replicas of {key} differ"
            target[place], written[place] = data, True
    assert all(bool(w.all()) for w in seen.values()), "state has gaps"
    return full


def changes(*listed: tuple[int, dict[str, StageConfig]]) -> tuple[ChangeConfig, ...]:
    """Scripted changes from (step, {stage: StageConfig})."""
    return tuple(ChangeConfig(step=step, plan=PlanChange(**stages)) for step, stages in listed)
