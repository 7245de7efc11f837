"""What no baseline here can carry out of a Run: a ConfigError says so, nothing is left out in silence."""

from __future__ import annotations

from nereus.config import StageConfig
from nereus.errors import ConfigError
from nereus.experiment import Run, System

GPUS_PER_NODE = 8
NAMES: dict[System, str] = {"verl": "verl", "openrlhf": "OpenRLHF"}


def check_job(run: Run, system: System) -> None:
    """ConfigError for another system's run, a model made from the seed, anything that changes, nodes of unequal size."""
    w, name = run.workload, NAMES[system]
    if run.system != system:
        raise ConfigError("system", run.system, f"expected {system}")
    if not w.model_path:
        expected = f"{name} loads a model: expected a Hugging Face folder or hub name"
        raise ConfigError("workload.model_path", "", expected)
    if run.workload.data.response_schedule:
        steps = [each.step for each in run.workload.data.response_schedule]
        expected = f"expected none: {name} keeps one longest response"
        raise ConfigError("data.response_schedule", steps, expected)
    if run.changes:
        steps = [change.step for change in run.changes]
        raise ConfigError("changes", steps, f"expected none: {name} keeps the layout that it starts with")
    if w.warmup.steps:
        expected = f"expected 0: {name}'s PPO has no supervised warm-up"
        raise ConfigError("workload.warmup.steps", w.warmup.steps, expected)
    if run.fleet.slots > GPUS_PER_NODE and run.fleet.slots % GPUS_PER_NODE:
        expected = (
            f"expected at most {GPUS_PER_NODE} or a multiple of it: {name} wants the same number of GPUs on every node"
        )
        raise ConfigError("fleet.slots", run.fleet.slots, expected)


def check_ppo(run: Run, system: System) -> None:
    """ConfigError for other advantages than whitened GAE, and for a clip that the baseline cannot turn off."""
    a, name = run.workload.algorithm, NAMES[system]
    if a.adv_estimator != "gae":
        raise ConfigError("algorithm.adv_estimator", a.adv_estimator, "expected gae: PPO with a critic")
    if not a.whiten_advantages:
        expected = f"expected true: {name} always whitens GAE's advantages"
        raise ConfigError("algorithm.whiten_advantages", False, expected)
    if a.value_clip <= 0:
        raise ConfigError("algorithm.value_clip", a.value_clip, f"expected above 0: {name} cannot turn it off")


def check_even(stage: StageConfig, key: str, name: str) -> None:
    """ConfigError for replicas or pipelines in unequal parts; `key` is the stage's, `name` the baseline's."""
    for part, parts in (("shares", stage.shares), ("pipeline", stage.pipeline)):
        if parts is not None and len(set(parts)) > 1:
            raise ConfigError(f"{key}.{part}", list(parts), f"expected equal parts: {name} cuts evenly")
