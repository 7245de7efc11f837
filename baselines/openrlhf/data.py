"""The prompts of a Run as the JSON lines that OpenRLHF reads: those that Nereus would take.

`python -m baselines.openrlhf.data RUN_ID [--folder runs/openrlhf/RUN_ID]`, for a run of experiments/ppo_8b.py. OpenRLHF
draws them in an order of its own, which no flag turns off; over the whole run they are the same.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from pathlib import Path

from baselines.openrlhf.command import INPUT_KEY, LABEL_KEY, default_data_folder
from baselines.prompts import prompts_of
from nereus.experiment import Run


def write_prompts(run: Run, folder: Path) -> Path:
    """Writes train.jsonl with the prompts of all steps and returns its path.

    The label, which OpenRLHF hands to reward.py as it is, is JSON: the task and the ground truth. Raises ConfigError for
    a task that is not there.
    """
    lines = [
        json.dumps(
            {
                INPUT_KEY: prompt.text,
                LABEL_KEY: json.dumps({"task": run.workload.data.task, **json.loads(prompt.ground_truth)}),
            }
        )
        for prompt in prompts_of(run)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def main() -> None:
    """Writes the prompts of the run that is named."""
    from experiments import ppo_8b

    known = {run.run_id: run for run in ppo_8b.runs("openrlhf")}
    parser = ArgumentParser(description="Write the prompts of a run as OpenRLHF reads them.")
    parser.add_argument("run", choices=sorted(known), metavar="RUN_ID", help=f"one of {', '.join(sorted(known))}")
    parser.add_argument("--folder", help="default: runs/openrlhf/RUN_ID")
    words = parser.parse_args()
    run = known[words.run]
    sys.stdout.write(f"{write_prompts(run, Path(words.folder or default_data_folder(run)))}\n")


if __name__ == "__main__":
    main()
