"""Runs of other systems as their own command lines, from baselines/SYSTEM/command.py of the checkout."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from nereus.cli.batch import ROOT
from nereus.config import Config
from nereus.errors import ConfigError, NereusError
from nereus.experiment import Run, System, run_of

NODE_GPUS = 8


def run_of_system(config: Config, system: System) -> Run:
    """The Run of a configuration, as `system`'s; its model is the one in `model.folder`."""
    made = run_of(config, experiment=config.run.name, variant=system, seed=config.run.seed)
    return replace(made, system=system, workload=replace(made.workload, model_path=config.model.folder))


def command_line(run: Run, folder: Path, python: str) -> tuple[str, ...]:
    """The command line of `run`, whose prompts are in `folder`. Raises ConfigError for what the system cannot do.

    NereusError where the checkout has nothing for the system.
    """
    argv = tuple(map(str, _module(run.system, "command").argv(run, data_folder=str(folder))))
    return (python, *argv[1:]) if argv[0] in ("python", "python3") else argv


def write_prompts(run: Run, folder: Path) -> None:
    """Writes the run's prompts as its system reads them."""
    _module(run.system, "data").write_prompts(run, folder)


def nodes_of(run: Run) -> tuple[int, int]:
    """Nodes of a run, and GPUs on each: whole nodes, as the command lines say."""
    gpus = run.fleet.slots
    if gpus > NODE_GPUS and gpus % NODE_GPUS:
        raise ConfigError("fleet.slots", gpus, f"expected at most {NODE_GPUS} or a multiple of it, whole nodes")
    return max(1, gpus // NODE_GPUS), min(gpus, NODE_GPUS)


def _module(system: str, name: str) -> ModuleType:
    if str(ROOT) not in sys.path:  # the command `nereus` is started from anywhere
        sys.path.append(str(ROOT))
    try:
        return importlib.import_module(f"baselines.{system}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("baselines"):
            raise
        raise NereusError(
            f"{ROOT / 'baselines' / system / name}.py is not there: {system} cannot be submitted"
        ) from error
