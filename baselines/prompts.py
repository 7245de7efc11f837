"""The prompts of a Run for a baseline: those that Nereus would take, in the same order, and how a response is scored."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nereus.experiment import Run, System
from nereus.rl.tasks import CHUNK_PROMPTS, Task, dataset_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselinePrompt:
    """One prompt: its number, its text, and the ground truth by which reasoning-gym scores a response.

    The ground truth is JSON that names the entry, which reasoning-gym makes again: not every task's entries can be
    written as JSON.
    """

    number: int
    text: str
    ground_truth: str


def prompts_of(run: Run) -> Iterator[BaselinePrompt]:
    """The prompts of all steps, in order. Raises ConfigError for a task that is not there."""
    data = run.workload.data
    task = Task(data.task, data.task_options, run.seed, template=data.prompt_template)
    for number in range(run.workload.steps * data.prompts_per_step):
        chunk, index = divmod(number, CHUNK_PROMPTS)
        seed = dataset_seed(task.name, task.seed, "train", chunk)
        data_set = {**data.task_options, "seed": seed, "size": CHUNK_PROMPTS}
        truth = json.dumps({"data_set": data_set, "index": index})
        yield BaselinePrompt(number=number, text=task.prompt(number).text, ground_truth=truth)


def write_named(system: System, write: Callable[[Run, Path], Path], default_folder: Callable[[Run], str]) -> None:
    """The command of a baseline's data.py: has `write` write the prompts of the run that the command line names."""
    from experiments import ppo_8b

    known = {run.run_id: run for run in ppo_8b.runs(system)}
    parser = ArgumentParser(description=f"Write the prompts of a run as {system} reads them.")
    parser.add_argument("run", choices=sorted(known), metavar="RUN_ID", help=f"one of {', '.join(sorted(known))}")
    parser.add_argument("--folder", help=f"default: runs/{system}/RUN_ID")
    words = parser.parse_args()
    run = known[words.run]
    sys.stdout.write(f"{write(run, Path(words.folder or default_folder(run)))}\n")
