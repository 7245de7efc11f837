"""OpenRLHF's own environment: what its PPO entry point and its loggers import, without the packages that want a GPU."""

from __future__ import annotations

from pathlib import Path

from baselines.environment import Environment

FOLDER = Path("build/openrlhf/env")
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
ENVIRONMENT = Environment(folder=FOLDER, requirements=REQUIREMENTS, most_bytes=1_200_000_000)
