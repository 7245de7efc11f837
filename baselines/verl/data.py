"""The prompts of a Run as the parquet file that verl reads: those that Nereus would take, in the same order.

`python -m baselines.verl.data RUN_ID [--folder runs/verl/RUN_ID]`, for a run of experiments/ppo_8b.py.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from pathlib import Path

import polars as pl

from baselines.verl.command import default_data_folder
from nereus.experiment import Run
from nereus.rl.tasks import CHUNK_PROMPTS, Task, dataset_seed


def write_prompts(run: Run, folder: Path) -> Path:
    """Writes train.parquet with the prompts of all steps and returns its path.

    Raises ConfigError for a task that is not there.
    """
    data = run.workload.data
    task = Task(data.task, data.task_options, run.seed, template=data.prompt_template)
    rows = [_row(run, task, number) for number in range(run.workload.steps * data.prompts_per_step)]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.parquet"
    pl.DataFrame(rows).write_parquet(path)
    return path


def _row(run: Run, task: Task, number: int) -> dict[str, object]:
    """A row under the names that verl's RLHFDataset and its naive reward manager read.

    The ground truth names the entry, which reasoning-gym makes again: not every task's entries can be written as JSON.
    """
    chunk, index = divmod(number, CHUNK_PROMPTS)
    seed = dataset_seed(task.name, task.seed, "train", chunk)
    data_set = {**run.workload.data.task_options, "seed": seed, "size": CHUNK_PROMPTS}
    return {
        "data_source": task.name,
        "prompt": [{"role": "user", "content": task.prompt(number).text}],
        "reward_model": {"style": "rule", "ground_truth": json.dumps({"data_set": data_set, "index": index})},
        "extra_info": {"index": number},
    }


def main() -> None:
    """Writes the prompts of the run that is named."""
    from experiments import ppo_8b

    known = {run.run_id: run for run in ppo_8b.runs()}
    parser = ArgumentParser(description="Write the prompts of a run as verl reads them.")
    parser.add_argument("run", choices=sorted(known), metavar="RUN_ID", help=f"one of {', '.join(sorted(known))}")
    parser.add_argument("--folder", help="default: runs/verl/RUN_ID")
    words = parser.parse_args()
    run = known[words.run]
    sys.stdout.write(f"{write_prompts(run, Path(words.folder or default_data_folder(run)))}\n")


if __name__ == "__main__":
    main()
