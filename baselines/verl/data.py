"""The prompts of a Run as the parquet file that verl reads: those that Nereus would take, in the same order.

`python -m baselines.verl.data RUN_ID [--folder runs/verl/RUN_ID]`, for a run of experiments/ppo_8b.py.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from baselines.prompts import BaselinePrompt, prompts_of, write_named
from baselines.verl.command import default_data_folder
from nereus.experiment import Run


def write_prompts(run: Run, folder: Path) -> Path:
    """Writes train.parquet with the prompts of all steps and returns its path.

    Raises ConfigError for a task that is not there.
    """
    rows = [_row(run, prompt) for prompt in prompts_of(run)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.parquet"
    pl.DataFrame(rows).write_parquet(path)
    return path


def _row(run: Run, prompt: BaselinePrompt) -> dict[str, object]:
    """A row under the names that verl's RLHFDataset and its naive reward manager read."""
    return {
        "data_source": run.workload.data.task,
        "prompt": [{"role": "user", "content": prompt.text}],
        "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
        "extra_info": {"index": prompt.number},
    }


if __name__ == "__main__":
    write_named("verl", write_prompts, default_data_folder)
