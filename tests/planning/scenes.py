"""Jobs and fleets that several tests plan for."""

from __future__ import annotations

from dataclasses import replace

from nereus.cli.models import load_model
from nereus.config import ModelConfig
from nereus.costs.generation import equal_lengths, lognormal_lengths
from nereus.fleet import DEVICES, parse_fleet, uniform
from nereus.planning.evaluate import Problem
from nereus.planning.ground import Terrain
from nereus.planning.job import Job, language_model, scalar_model


def job_of(name: str, algorithm: str = "ppo", *, mean: float = 1024, cap: float = 2048, samples: int = 1024) -> Job:
    config = load_model(name)
    return Job(
        actor=language_model(config),
        critic=scalar_model(config) if algorithm == "ppo" else None,
        reference=language_model(config),
        samples=samples,
        prompt_tokens=512,
        lengths=lognormal_lengths(mean, cap),
        longest_tokens=512 + cap,
    )


def problem_of(name: str, fleet: str, algorithm: str = "ppo", **lengths) -> Problem:
    return Problem(job=job_of(name, algorithm, **lengths), terrain=Terrain(fleet=parse_fleet(fleet)))


def small_problem(slots: int, memory_gigabytes: float, *, critic: bool, reference: bool, layers: int, samples: int):
    """A model of three wide layers or so, on slots of little memory: every component is of a size with the room."""
    config = ModelConfig(layers=layers, hidden=4096, heads=16, kv_heads=4, head_dim=256, ffn=11008, vocab=32000)
    device = replace(DEVICES["h100"], memory_bytes=int(memory_gigabytes * 1e9))
    job = Job(
        actor=language_model(config),
        critic=scalar_model(config) if critic else None,
        reference=language_model(config) if reference else None,
        samples=samples,
        prompt_tokens=300,
        lengths=equal_lengths(700),
        longest_tokens=1500,
        mini_batches=2,
    )
    return Problem(job=job, terrain=Terrain(fleet=uniform(slots, device), host_bytes_per_slot=24e9))
