"""verl's own environment: what its parser, its validation and its loggers import."""

from __future__ import annotations

from pathlib import Path

from baselines.environment import Environment, EnvironmentFailed, IndexOutOfReach

__all__ = ["FOLDER", "REQUIREMENTS", "EnvironmentFailed", "IndexOutOfReach", "interpreter", "size_bytes"]

FOLDER = Path("build/verl/env")
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def interpreter() -> Path:
    """The environment's Python; makes it where it is missing or old. Raises IndexOutOfReach, EnvironmentFailed."""
    return Environment(folder=FOLDER, requirements=REQUIREMENTS).interpreter()


def size_bytes() -> int:
    """What the environment's files take."""
    return Environment(folder=FOLDER, requirements=REQUIREMENTS).size_bytes()
