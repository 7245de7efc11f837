"""When does adapting pay? nereus and dp-scaling in one scene, of which one thing at a time is made stronger or weaker.

The scene is 8B PPO on a trace of 64 GPUs whose responses grow. Varied: the truth's noise; how far the truth is from what the
controller believes at first (links beside their data sheets); how fast the fleet changes;
how long the job is; and a fleet and lengths that do not change at all, where the plan on which searches settle is beside
both. The controller's prior is the same in all. Everything is simulated.

Carried out by `nereus experiment run sensitivity`, drawn by analysis/sensitivity.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus.cli.load import load_config
from nereus.experiment import Run, Scene, run_of

NAME = "sensitivity"
TRACES = Path(__file__).with_name("traces")
POLICIES = ("nereus", "dp-scaling")
SEEDS = (1, 2)
STEPS = 80
RATIOS = {"noise": (0.0, 4.0), "link": (0.25, 4.0), "pace": (0.25, 4.0)}
"""What is varied, a scene's `..._ratio`, by how much; 1 is the scene itself."""
LENGTHS = (20, 40)
"""Shorter jobs, in steps; the fleet and the lengths of a step stay."""


def scenes() -> dict[str, tuple[Scene, int]]:
    """Name -> scene, steps. The name is what is varied and by how much; "same-1" is the scene itself."""
    base = Scene(trace="experiments/traces/p3_64_grow.json", device="h100", notice_seconds=120.0)
    found: dict[str, tuple[Scene, int]] = {"same-1": (base, STEPS)}
    for name, values in RATIOS.items():
        for value in values:
            changed: dict[str, Any] = {f"{name}_ratio": value}
            found[f"{name}-{value:g}"] = (replace(base, **changed), STEPS)
    for steps in LENGTHS:
        found[f"steps-{steps}"] = (base, steps)
    found["steady-1"] = (Scene(fleet="64xh100", mean_tokens=900.0), STEPS)
    return found


def runs() -> tuple[Run, ...]:
    """Every scene under both policies and seeds; in the steady one also the plan on which searches settle."""
    config = load_config(TRACES / "ppo_8b.yaml", [])
    base = run_of(config, experiment=NAME, variant="", seed=1)
    made: list[Run] = []
    for name, (scene, steps) in scenes().items():
        policies = (*POLICIES, "settled-plan") if name.startswith("steady") else POLICIES
        made += [
            replace(
                base,
                variant=f"{name}-{policy}",
                seed=seed,
                workload=replace(base.workload, steps=steps),
                scene=replace(scene, policy=policy),
            )
            for policy in policies
            for seed in SEEDS
        ]
    return tuple(made)
