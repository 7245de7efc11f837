"""The baselines' prompts and scores are those of Nereus."""

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from baselines.openrlhf import data as openrlhf_data
from baselines.openrlhf.reward import reward_func
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


@pytest.mark.parametrize("data", [SPELL, SYMBOLIC], ids=lambda data: data.task)
def test_openrlhf_s_prompts_and_scores(tmp_path: Path, data: DataConfig) -> None:
    run = runs("openrlhf")[0]
    run = replace(run, workload=replace(run.workload, data=data, steps=3), seed=7)
    lines = openrlhf_data.write_prompts(run, tmp_path / "data").read_text(encoding="utf-8").splitlines()
    task = Task(data.task, data.task_options, run.seed, template=data.prompt_template)
    assert len(lines) == 3 * data.prompts_per_step
    for number, row in list(enumerate(map(json.loads, lines)))[::7]:
        assert row["prompt"] == task.prompt(number).text
        prompt = f"<|user|>{row['prompt']}<|assistant|>"  # as a chat template has it
        for response in (str(task.entry(number)["answer"]), "xyz", ""):
            for end in ("", "<|eot_id|>", "</s>\n"):
                answer = reward_func([f"{prompt}{response}{end}"], [prompt], [row["label"]])
                assert answer["rewards"].tolist() == pytest.approx([task.score(number, response)])
                assert float(answer["scores"][0]) == float(answer["rewards"][0])
