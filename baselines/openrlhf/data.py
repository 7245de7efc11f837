"""The prompts of a Run as the JSON lines that OpenRLHF reads: those that Nereus would take.

`python -m baselines.openrlhf.data RUN_ID [--folder runs/openrlhf/RUN_ID]`, for a run of experiments/ppo_8b.py. OpenRLHF
draws them in an order of its own, which no flag turns off; over the whole run they are the same.
"""

from __future__ import annotations

import json
from pathlib import Path

from baselines.openrlhf.command import INPUT_KEY, LABEL_KEY, default_data_folder
from baselines.prompts import prompts_of, write_named
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


if __name__ == "__main__":
    write_named("openrlhf", write_prompts, default_data_folder)
