"""Nereus's side of `make verl-parity`: a job on one slot in this process, its recorded rollouts and its PPO steps.

Everything is the product's own code: `Phases.run` on a `Slot`, Megatron's model, DDP and optimizer, vLLM's sampling. Only
Ray and the other slots are left out; that layouts compute the same is shown by tests/live/test_equivalence.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from baselines.verl.parity_records import STEPS_BEFORE, WARMUP_STEPS, Recorded, StepOutcome, Weights, base_config
from nereus.config import AlgorithmConfig, Config
from nereus.layout import StagePlan, first_plan
from nereus.lengths import WIDTH_MULTIPLE_TOKENS, largest_limit
from nereus.model import VALUE_HEAD, models_of
from nereus.rl.batch import Batch, build
from nereus.runtime.changes import first_state, start_generation
from nereus.runtime.job import Job
from nereus.runtime.meeting import Meeting
from nereus.runtime.objective import Objective
from nereus.runtime.outset import export_model, other_states
from nereus.runtime.phases import Phases, StepRecord, task_of
from nereus.runtime.pool import SlotPool
from nereus.runtime.rollouts import load
from nereus.runtime.slot import Slot
from nereus.storage import Shard, emu_name
from nereus.validate import validate

ADDRESS, SECONDS = "127.0.0.1", 300.0
MODELS = ("actor", "critic")


class OneSlot:
    """The slot 0 of this process with the methods of a `SlotPool` that a job calls."""

    numbers = (0,)

    def __init__(self) -> None:
        self.slot = Slot(0)
        self._meeting = Meeting(ADDRESS, SECONDS)
        self.slot.join(1, ADDRESS, self._meeting.port, SECONDS)

    def call(self, method: str, arguments: Mapping[int, tuple[object, ...]]) -> dict[int, Any]:
        """The method's answer of each slot that is given arguments."""
        return {number: getattr(self.slot, method)(*given) for number, given in arguments.items()}

    gather = call

    def call_all(self, method: str, *arguments: object) -> dict[int, Any]:
        """The method's answer of every slot."""
        return self.call(method, {0: arguments})

    def close(self) -> None:
        """Ends what is live on the slot and its world."""
        self.slot.leave()
        self._meeting.close()


@contextmanager
def one_slot() -> Iterator[SlotPool]:
    """A pool of one slot, without Ray."""
    pool = OneSlot()
    try:
        yield cast(SlotPool, pool)
    finally:
        pool.close()


@dataclass(kw_only=True)
class RecordedPhases(Phases):
    """Phases whose log-probabilities and values are the recorded ones; keeps the mini-batches that it trains on."""

    columns: Mapping[str, Tensor]
    minis: list[Batch] = field(default_factory=list[Batch])

    def infer(self, stage: StagePlan, batch: Batch, phase: str) -> dict[str, Tensor]:  # noqa: ARG002
        """What is on record, instead of a forward pass."""
        if phase == "values":
            return {"values": self.columns["values"]}
        return {"logp": self.columns["old_logp" if phase == "old_log_prob" else "reference_logp"]}

    def update(self, stage: StagePlan, mini: Batch, objective: Objective, lr: float) -> dict[str, Any]:
        """As in `Phases`."""
        if stage.model == "actor":
            self.minis.append(mini)
        return super().update(stage, mini, objective, lr)


def record(pool: SlotPool, folder: Path) -> Recorded:
    """Warms a model up, takes PPO steps, samples one more, and says what policy, reference and critic say of it."""
    config = base_config()
    export_model(config, folder / "model")
    pool.call_all("configure", config, str(folder / "model"))
    job = Job(config=config, pool=pool, plan=first_plan(config))
    phases = _phases(job, folder)
    first_state(job)
    for step in range(1, WARMUP_STEPS + 1):
        phases.warm_up(step)
    actor = emu_name(job.plan.actor_train)
    pool.call_all("reset_optimizer", actor)
    job.optimizer_steps[actor] = 0
    other_states(job)
    start_generation(job)
    job.plan_sync()
    for step in range(1, STEPS_BEFORE + 1):
        phases.run(step)
    step, position = STEPS_BEFORE + 1, job.data_position
    rollouts = phases.rollouts(StepRecord(step=step))
    batch = build(rollouts.prompts, rollouts.responses, multiple_tokens=WIDTH_MULTIPLE_TOKENS)
    columns = {
        "old_logp": phases.infer(job.plan.actor_train, batch, "old_log_prob")["logp"],
        "reference_logp": phases.infer(job.plan.reference_infer, batch, "ref")["logp"],
        "values": phases.infer(job.plan.critic_train, batch, "values")["values"],
    }
    phases.recorded = phases.folder
    phases.run(step)
    pool.call_all("stop_generation")
    return Recorded(
        folder=folder,
        step=step,
        data_position=position,
        batch=batch,
        scores=torch.tensor(load(phases.folder, step).scores, dtype=torch.float32),
        groups=torch.tensor([sample.prompt for sample in rollouts.samples]),
        columns=columns,
        weights=_weights(pool),
        horizon_tokens=largest_limit(config.data),
    )


def step_of_nereus(pool: SlotPool, recorded: Recorded, algorithm: AlgorithmConfig) -> StepOutcome:
    """One PPO step on what is recorded, from its weights and with a fresh optimizer."""
    config = replace(base_config(), algorithm=algorithm)
    validate(config)
    pool.call_all("configure", config, str(recorded.folder / "model"))
    job = Job(config=config, pool=pool, plan=first_plan(config), data_position=recorded.data_position)
    first_state(job)
    other_states(job)
    _set_weights(pool, recorded.weights)
    phases = RecordedPhases(
        job=job,
        task=_task(config),
        folder=recorded.folder / "again",
        recorded=recorded.folder / "rollouts",
        columns=recorded.columns,
    )
    phases.folder.mkdir(exist_ok=True)
    made = phases.run(recorded.step)
    minis = phases.minis[: algorithm.mini_batches]
    return StepOutcome(
        advantages=torch.cat([mini.columns["advantages"] for mini in minis]),
        returns=torch.cat([mini.columns["returns"] for mini in minis]),
        updates=[{name: value for name, value in row.items() if isinstance(value, float)} for row in made.updates],
        weights=_weights(pool),
    )


def _phases(job: Job, folder: Path) -> Phases:
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    return Phases(job=job, task=_task(job.config), folder=folder / "rollouts")


def _task(config: Config) -> Any:
    data = config.data
    return task_of(data.task, data.task_options, config.run.seed, data.prompt_template, "train")


def _weights(pool: SlotPool) -> Weights:
    """Copies of the weights of actor and critic, each tensor put together from the boxes that the one slot holds."""
    found: Weights = {}
    for model, spec in models_of(base_config().model).items():
        if model not in MODELS:
            continue
        whole = {tensor.name: torch.full(tensor.shape, torch.nan) for tensor in spec.tensors}
        for shard, data in pool.call_all("fetch", f"{model}.train", "weight")[0].items():
            whole[shard.tensor][_place(shard)] = data
        found[model] = {_name(name): tensor for name, tensor in whole.items()}
    return found


def _set_weights(pool: SlotPool, weights: Weights) -> None:
    with torch.no_grad():
        for model in MODELS:
            for shard, view in pool.call_all("views", f"{model}.train")[0].items():
                if shard.component == "weight":
                    view.copy_(weights[model][_name(shard.tensor)][_place(shard)])


def _place(shard: Shard) -> tuple[slice, ...]:
    return shard.box.slices((0,) * len(shard.box.start))


def _name(tensor: str) -> str:
    """The name in a Hugging Face model for token classification, which is what verl takes for a critic."""
    return "score.weight" if tensor == VALUE_HEAD else tensor
