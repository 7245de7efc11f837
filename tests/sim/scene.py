"""A small job in the simulated world: its configuration, workload, and what is written, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nereus.config import (
    AlgorithmConfig,
    ChangeConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    FleetConfig,
    ModelConfig,
    PlanConfig,
    RolloutConfig,
    RunConfig,
    StageConfig,
)
from nereus.fleet import DEVICES
from nereus.layout import Plan, first_plan
from nereus.report.display import QuietDisplay
from nereus.sim.play import Moment, play
from nereus.sim.traces import FleetTrace, step_function
from nereus.sim.truth import Truth
from nereus.sim.workload import SimWorkload, constant
from nereus.sim.world import SimulatedWorld

H100 = DEVICES["h100"]
AMPLE_BYTES = 400 << 30
"""Of a device on which no plan overflows: for what is not about memory."""
LLAMA_8B = ModelConfig(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, dtype="bfloat16"
)


class Kept:
    """A journal and metrics in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []

    def append(self, kind: str, *, sync: bool = False, at_seconds: float | None = None, **fields: object) -> int:
        self.events.append({"kind": kind, "at_seconds": at_seconds, **fields})
        return len(self.events)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append(dict(metrics))

    def kinds(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] in names]


def plan_config(tp: int, pp: int, dp: int, gen_tp: int) -> PlanConfig:
    stage = StageConfig(tp=tp, pp=pp, dp=dp, micro_batch=4)
    engines = StageConfig(tp=gen_tp, dp=tp * pp * dp // gen_tp)
    return PlanConfig(actor_train=stage, critic_train=stage, reference_infer=stage, actor_generate=engines)


def job(
    slots: int = 16,
    steps: int = 6,
    plan: PlanConfig | None = None,
    changes: tuple[ChangeConfig, ...] = (),
    every: int = 2,
    budget_bytes: int = 76 << 30,
) -> Config:
    return Config(
        run=RunConfig(steps=steps),
        model=LLAMA_8B,
        data=DataConfig(prompts_per_step=64, samples_per_prompt=4, max_prompt_tokens=1024, max_response_tokens=2048),
        rollout=RolloutConfig(kv_cache_bytes=20 << 30),
        algorithm=AlgorithmConfig(mini_batches=2),
        fleet=FleetConfig(slots=slots, slot_budget_bytes=budget_bytes),
        plan=plan or plan_config(4, 1, slots // 4, 2),
        changes=changes,
        checkpoint=CheckpointConfig(every_steps=every),
    )


def workload(config: Config, mean: float = 500.0) -> SimWorkload:
    data = config.data
    return SimWorkload(
        prompts_per_step=data.prompts_per_step,
        samples_per_prompt=data.samples_per_prompt,
        mean_prompt_tokens=200.0,
        most_prompt_tokens=data.max_prompt_tokens,
        most_response_tokens=data.max_response_tokens,
        curve=constant(mean),
    )


def fleet_moments(points: list[tuple[float, int]], truth: Truth, memory_bytes: int = AMPLE_BYTES) -> tuple[Moment, ...]:
    """Nodes of 8 H100 from points (seconds, nodes)."""
    device = replace(H100, memory_bytes=memory_bytes)
    nodes = step_function("scene", points, points[-1][0] + 1)
    return play(FleetTrace(name="scene", slots_per_node=8, nodes=nodes), device, truth)


def world(
    config: Config,
    points: list[tuple[float, int]],
    *,
    truth: Truth | None = None,
    first: Plan | None = None,
    memory_bytes: int = AMPLE_BYTES,
    **more: Any,
) -> tuple[SimulatedWorld, Kept]:
    truth, kept = truth or Truth(), Kept()
    made = SimulatedWorld(
        config=config,
        first=first or first_plan(config),
        moments=fleet_moments(points, truth, memory_bytes),
        workload=workload(config),
        truth=truth,
        journal=kept,
        metrics=kept,
        display=QuietDisplay(),
        **more,
    )
    return made, kept
