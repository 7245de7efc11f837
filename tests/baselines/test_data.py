"""verl's prompts and scores are those of Nereus."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from baselines.verl.data import write_prompts
from baselines.verl.reward import compute_score
from experiments.ppo_8b import runs
from nereus.config import DataConfig
from nereus.rl.tasks import Task

SPELL = DataConfig(
    task="spell_backward",
    task_options={"min_word_len": 3, "max_word_len": 5},
    prompt_template="{word}>",
    prompts_per_step=4,
)
SYMBOLIC = replace(runs()[0].workload.data, prompts_per_step=201)  # 603 prompts: more than one chunk of the data set


@pytest.mark.parametrize("data", [SPELL, SYMBOLIC], ids=lambda data: data.task)
def test_prompts_and_scores(tmp_path: Path, data: DataConfig) -> None:
    run = runs()[0]
    run = replace(run, workload=replace(run.workload, data=data, steps=3), seed=7)
    table = pl.read_parquet(write_prompts(run, tmp_path / "data"))
    task = Task(data.task, data.task_options, run.seed, template=data.prompt_template)
    assert table.height == 3 * data.prompts_per_step
    for number, row in list(enumerate(table.to_dicts()))[::7]:
        assert row["prompt"] == [{"role": "user", "content": task.prompt(number).text}]
        assert row["data_source"] == data.task
        truth = row["reward_model"]["ground_truth"]
        for response in (str(task.entry(number)["answer"]), "xyz", ""):
            assert compute_score(row["data_source"], response, truth, row["extra_info"]) == task.score(number, response)
