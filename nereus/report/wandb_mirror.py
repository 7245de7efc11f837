"""Runs as offline W&B runs, so that one panel shows all systems: equal metric names, one axis, one group.

`wandb sync` uploads them; `nereus compare` reads them where they are. Each says in its config which system carried it out and
whether it was simulated.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nereus.report.compared_run import ComparedRun
from nereus.runtime.metrics import STEP


def write_offline(runs: Sequence[ComparedRun], folder: Path, *, project: str, group: str) -> list[Path]:
    """Writes every run below `folder`/wandb, by its name, with its system as the type of job; returns their folders."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own process would call out, offline too
    folder.mkdir(parents=True, exist_ok=True)
    wandb: Any = importlib.import_module("wandb")
    settings = wandb.Settings(
        silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True, x_disable_meta=True
    )
    made: list[Path] = []
    for run in runs:
        mirror = wandb.init(
            mode="offline",
            project=project,
            group=group,
            job_type=run.system,
            name=run.name,
            dir=str(folder),
            config={"system": run.system, "simulated": run.simulated, "group": group},
            settings=settings,
            reinit="finish_previous",
        )
        mirror.define_metric("*", step_metric=STEP)
        for row in run.rows:
            mirror.log({name: value for name, value in row.items() if math.isfinite(value)})
        made.append(Path(mirror.dir).parent)
        mirror.finish()
    wandb.teardown()
    return made
