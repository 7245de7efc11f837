"""A Run: what one run of an experiment is, whatever system carries it out; its name is a function of its content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal

from nereus.config import (
    AlgorithmConfig,
    ChangeConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    FleetConfig,
    LoggerConfig,
    ModelConfig,
    PlanConfig,
    RolloutConfig,
    RunConfig,
    TransferConfig,
    WarmupConfig,
)

System = Literal["nereus", "verl", "openrlhf"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is trained on what: the same for every system that is compared.

    `model_path` names a Hugging Face model (folder or hub name) for systems that load one; "" is a model made from
    the seed, which only nereus has.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    model_path: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    steps: int = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Where a run takes place that is simulated: a fleet that stays, such as 16xh100, or the trace of one (a file) on a device.

    `policy` decides on the plan as `nereus simulate` says; of another system it names the configuration, default or
    tuned. Responses have `mean_tokens`, or follow the trace's curve, or that of the trace `curve` (a file), stretched over
    the steps of the run. The run starts in the Run's plan, or (`start`) in the best layout for the first fleet. `hindsight`
    are the runs (ids) whose plans an oracle may use beside the planner's.

    `pace_ratio` times as much time passes between the trace's changes. `placing` says where a change's operations run
    (nereus.sim.changes). The truth's noise, what engines take beside kernels, and the links' rates are so many times what
    they are elsewhere; the controller's prior stays.
    """

    fleet: str = ""
    trace: str = ""
    device: str = "h100"
    policy: str = "fixed"
    mean_tokens: float | None = None
    curve: str = ""
    notice_seconds: float = 0.0
    checkpoint_steps: int = 10
    pace_ratio: float = 1.0
    placing: str = "measured"
    noise_ratio: float = 1.0
    engine_ratio: float = 1.0
    link_ratio: float = 1.0
    start: Literal["stated", "best"] = "stated"
    hindsight: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One cell of an experiment: system, workload, fleet, plan (with its scripted changes), seed; simulated in `scene`, if any.

    `variant` is the word that tells the run from its siblings in tables and figures; it is part of the content.
    """

    experiment: str
    variant: str
    system: System = "nereus"
    workload: Workload = field(default_factory=Workload)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    changes: tuple[ChangeConfig, ...] = ()
    seed: int = 1
    scene: Scene | None = field(default=None, repr=False)

    @property
    def run_id(self) -> str:
        """Readable, and different for any different content: quickstart_pair-live-s1-1a2b3c4d."""
        content = repr(self) + (repr(self.scene) if self.scene else "")
        digest = hashlib.sha256(content.encode()).hexdigest()[:8]
        return f"{self.experiment}-{self.variant}-s{self.seed}-{digest}"

    def config(self, folder: str) -> Config:
        """The configuration with which nereus carries the run out, below `folder`; the run folder is the run's id."""
        w = self.workload
        return Config(
            run=RunConfig(name=self.run_id, folder=folder, seed=self.seed, steps=w.steps, group=self.experiment),
            model=w.model,
            data=w.data,
            rollout=w.rollout,
            algorithm=w.algorithm,
            warmup=w.warmup,
            fleet=self.fleet,
            transfer=TransferConfig(),
            plan=self.plan,
            changes=self.changes,
            checkpoint=CheckpointConfig(every_steps=self.scene.checkpoint_steps if self.scene else 0),
            logger=LoggerConfig(wandb="offline"),
        )


def run_of(config: Config, *, experiment: str, variant: str, seed: int) -> Run:
    """The Run that a configuration describes, with another seed."""
    return Run(
        experiment=experiment,
        variant=variant,
        workload=Workload(
            model=config.model,
            data=config.data,
            rollout=config.rollout,
            algorithm=config.algorithm,
            warmup=config.warmup,
            steps=config.run.steps,
        ),
        fleet=config.fleet,
        plan=config.plan,
        changes=config.changes,
        seed=seed,
    )


def without_changes(run: Run, variant: str) -> Run:
    """The same run that keeps its first plan."""
    return replace(run, variant=variant, changes=())
