"""8B PPO on fleets whose nodes come and go, simulated: nereus beside dp-scaling in its strengths, fixed, restart, and the oracle.

Three traces of public clouds, two curves of response lengths, three seeds. The usual recipe is the shipped one of
experiments/traces/ppo_8b.yaml: tensor groups of 4 to train and of 2 to generate, 4 samples a micro-batch; "best" starts in the
best layout for the first fleet. Nodes that leave are announced as their clouds do: 120 s before on AWS, 30 s on GCP. Every
policy loses what slots take with them, and goes back to the last checkpoint, one every 5 steps, alike. The cache of an engine
is 8 GB: with 16 the margin that is learnt from peaks leaves the recipe's engines no room, and nereus, held to them, waits for
ever. Every figure is simulated.

Carried out by `nereus experiment run trace`, drawn by analysis/trace.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nereus.cli.models import load_model
from nereus.config import AlgorithmConfig, DataConfig, FleetConfig, PlanConfig, RolloutConfig, StageConfig, WarmupConfig
from nereus.experiment import Run, Scene, Workload

NAME = "trace"
FOLDER = "experiments/traces"
SEEDS, STEPS = (1, 2, 3), 40
CURVES = {"grow": f"{FOLDER}/p3_64_grow.json", "spike": f"{FOLDER}/p3_64_spike.json"}
"""Response lengths of published RL runs over their whole length, here over the steps of a run."""
PLACES = {
    "p3": (f"{FOLDER}/p3_64_grow.json", 40, 120.0),
    "sailor": (f"{FOLDER}/sailor_a100_56.json", 56, 30.0),
    "gcp": (f"{FOLDER}/gcp_a100_64_grow.json", 56, 30.0),
}
"""Name -> trace of nodes of 8 A100, slots at first, seconds before a node's leaving at which it is announced."""
BASELINES = {
    "fixed": "fixed",
    "dp-scaling": "dp-scaling",
    "dp-scaling-any": "dp-scaling-any",
    "dp-scaling-free": "dp-scaling-free",
    "dp-scaling-any-free": "dp-scaling-any-free",
    "restart": "restart",
}
BEST_STARTS = {
    "best-nereus": "nereus",
    "best-dp-scaling": "dp-scaling",
    "best-dp-scaling-any-free": "dp-scaling-any-free",
}
ABLATIONS = ("nereus-uncalibrated", "nereus-unpriced", "nereus-hasty", "nereus-storage", "nereus-restart")
FREEDOMS = ("nereus-shares", "nereus-micro-batch", "nereus-engines")
PARTS = (("p3", "grow"),)
"""Where ablations and freedoms run."""
ORACLE = "oracle"


def workload() -> Workload:
    """1,024 samples in four mini-batches, eight responses to a prompt."""
    return Workload(
        model=load_model("llama-3.1-8b"),
        data=DataConfig(prompts_per_step=128, samples_per_prompt=8, max_prompt_tokens=1024, max_response_tokens=4096),
        rollout=RolloutConfig(kv_cache_bytes=8_000_000_000),
        algorithm=AlgorithmConfig(mini_batches=4),
        warmup=WarmupConfig(steps=0),
        steps=STEPS,
    )


def recipe(slots: int) -> PlanConfig:
    """The usual one: as many replicas as divide the mini-batch of 256 samples."""
    replicas, engines = (1 << (slots // size).bit_length() - 1 for size in (4, 2))
    stage = StageConfig(tp=4, dp=replicas, micro_batch=4)
    return PlanConfig(
        actor_train=stage,
        critic_train=stage,
        reference_infer=stage,
        actor_generate=StageConfig(tp=2, dp=engines),
    )


def scenario(place: str, curve: str, seed: int, name: str) -> Run:
    """What the runs of a scenario share."""
    trace, slots, notice_seconds = PLACES[place]
    return Run(
        experiment=name,
        variant="",
        workload=workload(),
        fleet=FleetConfig(slots=slots, slot_budget_bytes=81_000_000_000),
        plan=recipe(slots),
        seed=seed,
        scene=Scene(trace=trace, device="a100", curve=CURVES[curve], notice_seconds=notice_seconds, checkpoint_steps=5),
    )


def runs(seeds: Sequence[int] = SEEDS, name: str = NAME) -> tuple[Run, ...]:
    """Every policy in every scenario; an oracle of each looks back on all of them but ablations and freedoms."""
    made: list[Run] = []
    for place in PLACES:
        for curve in CURVES:
            for seed in seeds:
                made += _runs_of(scenario(place, curve, seed, name), place, curve)
    return tuple(made)


def _runs_of(shared: Run, place: str, curve: str) -> list[Run]:
    named = {"nereus": "nereus", **BASELINES, **BEST_STARTS}
    if (place, curve) in PARTS:
        named |= {policy: policy for policy in (*ABLATIONS, *FREEDOMS)}
    found: list[Run] = []
    for name, policy in named.items():
        start = "best" if name in BEST_STARTS else "stated"
        scene = replace(shared.scene, policy=policy, start=start)  # type: ignore[type-var]
        found.append(replace(shared, variant=f"{name}-{place}-{curve}", scene=scene))
    past = tuple(
        run.run_id for run in found if run.scene is not None and run.scene.policy not in (*ABLATIONS, *FREEDOMS)
    )
    scene = replace(shared.scene, policy=ORACLE, hindsight=past)  # type: ignore[type-var]
    return [*found, replace(shared, variant=f"{ORACLE}-{place}-{curve}", scene=scene)]
