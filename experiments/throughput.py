"""8B PPO in the simulated world: Nereus' best plan beside verl and OpenRLHF, by their defaults and tuned, over clusters.

Steady state: the fleet and the lengths stay, so Nereus is a plan that stays: the best of its search before the job ran, or
that on which it settles when measured steps have corrected its cost model (no controller decides here, and what changes
cost is not counted). What the other systems do, and from where that is known, is in nereus/sim/rivals/sources.json. Every figure is simulated.

Carried out by `nereus experiment run throughput`, drawn by analysis/throughput.py.
"""

from __future__ import annotations

from dataclasses import replace

from nereus.cli.models import load_model
from nereus.config import AlgorithmConfig, DataConfig
from nereus.experiment import Run, Scene, System, Workload

NAME = "throughput"
FLEETS = (
    *("8xa100", "64xa100", "256xa100"),
    *("8xh100", "32xh100", "128xh100", "256xh100"),
    *("16xh20", "64xh20"),
    *("16xl40s", "64xl40s"),
    "16xh100,16xa100",
)
LENGTHS = {"short": (512, 1024, 350.0), "long": (1024, 8192, 2500.0)}
"""Name -> caps of prompts and responses, mean tokens of responses."""
CONFIGURATIONS: tuple[tuple[System, str], ...] = (
    ("nereus", "best-plan"),
    ("nereus", "settled-plan"),
    ("verl", "default"),
    ("verl", "tuned"),
    ("openrlhf", "default"),
    ("openrlhf", "default, apart"),
    ("openrlhf", "tuned"),
)
STEPS = 5


def workload(lengths: str) -> Workload:
    """1,024 samples in four mini-batches, one response to a prompt."""
    prompt, response, _ = LENGTHS[lengths]
    return Workload(
        model=load_model("llama-3.1-8b"),
        data=DataConfig(
            prompts_per_step=1024, samples_per_prompt=1, max_prompt_tokens=prompt, max_response_tokens=response
        ),
        algorithm=AlgorithmConfig(mini_batches=4),
        steps=STEPS,
    )


def variant(system: str, configuration: str, fleet: str, lengths: str) -> str:
    """Such as verl-tuned-32xh100-long."""
    return f"{system}-{configuration.replace(', ', '_')}-{fleet.replace(',', '_')}-{lengths}"


def runs() -> tuple[Run, ...]:
    """Every system and configuration on every fleet, with short and with long responses."""
    made: list[Run] = []
    for fleet in FLEETS:
        for lengths, (_, _, mean) in LENGTHS.items():
            run = Run(
                experiment=NAME,
                variant="",
                workload=workload(lengths),
                scene=Scene(fleet=fleet, mean_tokens=mean),
            )
            made += [
                replace(
                    run,
                    variant=variant(system, configuration, fleet, lengths),
                    system=system,
                    scene=replace(run.scene, policy=configuration),  # type: ignore[type-var]
                )
                for system, configuration in CONFIGURATIONS
            ]
    return tuple(made)
