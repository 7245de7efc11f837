"""The job that transitions are measured on: actor and critic of about 30 M parameters with Adam, on slots that stay.

Its changes go one of two ways: live (`BenchJob.timed_change`), or by hand as a job without Nereus does it (`BenchJob.rebuilt`: the old
engines are dropped and empty ones of the new layout are built in the same processes; what fills them is the caller's).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from ray import cloudpickle

from nereus.cli.folder import create_run_folder
from nereus.config import (
    Config,
    DataConfig,
    FleetConfig,
    LoggerConfig,
    ModelConfig,
    PlanChange,
    PlanConfig,
    RunConfig,
    StageConfig,
    WarmupConfig,
)
from nereus.layout import Plan, StagePlan
from nereus.runtime.changes import ChangeRecord, Transaction, first_state
from nereus.runtime.driven import DrivenJob
from nereus.runtime.job import Digests
from nereus.runtime.outset import other_states
from nereus.runtime.pool import SlotPool
from nereus.storage import emu_name
from nereus.transition import placed_change
from nereus.validate import validate

if TYPE_CHECKING:
    from nereus.runtime.slot import Slot

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # slots need not find this file

SLOTS = 4
TRAINED = ("actor.train", "critic.train")
LAYOUTS = {
    "TP2 PP2": StageConfig(tp=2, pp=2),
    "PP2 DP2": StageConfig(pp=2, dp=2),
    "DP4": StageConfig(dp=4),
    "TP4": StageConfig(tp=4),
    "TP2 DP2": StageConfig(tp=2, dp=2),
}
PAIRS = (("TP2 PP2", "PP2 DP2"), ("PP2 DP2", "DP4"), ("DP4", "TP4"), ("TP4", "TP2 DP2"))
MODEL_30M = ModelConfig(layers=10, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1536)
Samples = dict[str, list[float]]
"""Seconds by name, a number for each repetition."""


def bench_config(model: ModelConfig = MODEL_30M, first: str = PAIRS[0][0]) -> Config:
    """A PPO job whose actor and critic are trained as `first` says; nothing of it is ever sampled or trained."""
    made = Config(
        run=RunConfig(name="transition", seed=7, steps=1),
        data=DataConfig(prompts_per_step=8, samples_per_prompt=2, max_prompt_tokens=16),
        model=model,
        warmup=WarmupConfig(steps=0),
        fleet=FleetConfig(slots=SLOTS, slot_budget_bytes=8 << 30),
        plan=PlanConfig(
            actor_train=LAYOUTS[first],
            critic_train=LAYOUTS[first],
            actor_generate=LAYOUTS["DP4"],
            reference_infer=LAYOUTS[first],
        ),
        logger=LoggerConfig(wandb="off"),
    )
    validate(made)
    return made


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a call on all slots took: seconds as the driver saw them, and those of the slot that took longest."""

    driver_seconds: float
    slot_seconds: float


class BenchJob(DrivenJob):
    """The live job. Its plans change; its state never does, and `digests` says so."""

    def __init__(self, pool: SlotPool, config: Config, folder: Path) -> None:
        super().__init__(pool, config, create_run_folder(config, folder))
        first_state(self.job)
        other_states(self.job)
        pool.call_all("apply", fill_moments)
        self.state = self.digests()

    def digests(self) -> Digests:
        """Of all that is trained."""
        return self.job.digests(TRAINED, "")

    def check(self) -> None:
        """AssertionError where the state is not what it was at the start."""
        if self.digests() != self.state:
            raise AssertionError(f"the state changed on the way to {self.job.plan}")

    def placed(self, layout: str, stages: Sequence[str] = ("actor_train", "critic_train")) -> Plan:
        """The plan with these stages cut anew, its ranks placed as a run would place them."""
        change = PlanChange(**dict.fromkeys(stages, LAYOUTS[layout]))
        return placed_change(self.config, self.job.plan, change)

    def timed_change(self, plan: Plan) -> tuple[ChangeRecord, float]:
        """A live change and its seconds from its begin to its end, planning (beside a step) left out."""
        record = ChangeRecord(transition=f"t{self.job.state_version + 1}", step=1)
        transaction = Transaction(self.job, plan, record, self.journal)
        transaction.start()
        transaction.planned  # noqa: B018  # waited for, as a step that takes longer than planning would
        started = perf_counter()
        transaction.early()
        transaction.finish()
        return record, perf_counter() - started

    def rebuilt(self, plan: Plan, stages: Sequence[str] = ("actor_train", "critic_train")) -> Measured:
        """Drops the engines of these stages and builds empty ones for `plan` in the same processes."""
        started = perf_counter()
        took: list[float] = []
        wanted: list[StagePlan] = [getattr(plan, name) for name in stages]
        took.append(max(self.pool.call_all("apply", drop_engines, tuple(emu_name(s) for s in wanted)).values()))
        for stage in wanted:
            self.job.align([stage])
            took.append(max(self.pool.call_all("apply", build_engine, stage).values()))
        self.job.plan = replace(self.job.plan, **dict(zip(stages, wanted, strict=True)))
        return Measured(driver_seconds=perf_counter() - started, slot_seconds=sum(took))

    def measured(self, function: Any, *arguments: object) -> Measured:
        """Calls `function(slot, *arguments)` on every slot; it returns its seconds."""
        started = perf_counter()
        took: Mapping[int, float] = self.pool.call_all("apply", function, *arguments)
        return Measured(driver_seconds=perf_counter() - started, slot_seconds=max(took.values()))


def fill_moments(slot: Slot) -> None:
    """Moments that are not zero: pages of zeros are cheaper to read than those of a job that trains."""
    for emu in TRAINED:
        engine = slot.live.get(emu)
        if engine is None:
            continue
        engine.optimizer_steps = 1
        for shard, view in engine.views().items():
            if shard.component in ("exp_avg", "exp_avg_sq"):
                columns = torch.arange(shard.box.start[-1], shard.box.stop[-1], dtype=torch.float32)
                rows = torch.arange(shard.box.start[0], shard.box.stop[0], dtype=torch.float32)
                values = columns if len(shard.box.start) == 1 else rows[:, None] * 31 + columns
                view.copy_(values % 9973 * 1e-7)


def drop_engines(slot: Slot, emus: tuple[str, ...]) -> float:
    """Drops live engines with their groups."""
    started = perf_counter()
    for emu in emus:
        if emu in slot.live:
            slot.live.pop(emu).close()
            slot.ledger.release(emu)
    return perf_counter() - started


def build_engine(slot: Slot, stage: StagePlan) -> float:
    """Collective over the stage's slots: an engine whose state is unfilled."""
    from nereus.engines.megatron.engine import TrainEngine, adam_of

    started = perf_counter()
    emu = emu_name(stage)
    if stage.rank_of(slot.number) is not None:
        adam = adam_of(slot.config.algorithm, stage.model) if stage.stage == "train" else None
        engine = TrainEngine(slot.joined, slot.specs[stage.model], stage, slot.number, adam)
        engine.optimizer_steps = 1
        slot.live[emu], slot.steps[emu] = engine, 1
        slot.ledger.hold_all(emu, engine.resident_bytes())
    return perf_counter() - started
