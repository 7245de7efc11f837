"""The prompts of a Run as the parquet file that verl reads: those that Nereus would take, in the same order.

`python -m baselines.verl.data RUN_ID [--folder runs/verl/RUN_ID]`, for a run of experiments/ppo_8b.py.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

import polars as pl

from baselines.prompts import BaselinePrompt, prompts_of
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


def main() -> None:
    """Writes the prompts of the run that is named."""
    from experiments import ppo_8b

    known = {run.run_id: run for run in ppo_8b.runs("verl")}
    parser = ArgumentParser(description="Write the prompts of a run as verl reads them.")
    parser.add_argument("run", choices=sorted(known), metavar="RUN_ID", help=f"one of {', '.join(sorted(known))}")
    parser.add_argument("--folder", help="default: runs/verl/RUN_ID")
    words = parser.parse_args()
    run = known[words.run]
    sys.stdout.write(f"{write_prompts(run, Path(words.folder or default_data_folder(run)))}\n")


if __name__ == "__main__":
    main()
