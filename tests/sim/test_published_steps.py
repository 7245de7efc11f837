"""The benchmark against published steps: rows by its rules, one published row within its goal, orders between rows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.published_steps import kept_order, read, text

COLUMNS = [
    "source",
    "system",
    "version",
    "model",
    "algo",
    "gpu",
    "num_gpus",
    "prompt_len",
    "response_len",
    "train_tp",
    "train_pp",
    "train_cp",
    "train_dp",
    "train_ep",
    "gen_tp",
    "gen_dp",
    "global_batch",
    "rollouts_per_prompt",
    "step_time_s",
    "gen_s",
    "logprob_s",
    "train_s",
    "notes",
]
NEMO = {
    "source": "NeMo-RL performance summary v0.5 (NVIDIA-NeMo/RL docs/about/performance-summary.md, Apache-2.0)",
    "system": "NeMo-RL", "version": "v0.5", "model": "LLAMA3.1_8B", "algo": "GRPO", "gpu": "H100", "num_gpus": "16",
    "prompt_len": "127", "response_len": "1019", "gen_tp": "1", "global_batch": "2048", "rollouts_per_prompt": "32",
    "step_time_s": "92.8", "notes": "On policy; bf16; max_seq=4096",
}  # fmt: skip
OFF = {
    **NEMO,
    "response_len": "1123",
    "prompt_len": "131",
    "step_time_s": "64.8",
    "notes": "1-step Off; bf16; max_seq=4096",
}
VERL = {
    **NEMO, "system": "verl", "version": "", "model": "Qwen3-4B-Base", "algo": "DRPO", "gpu": "H20", "prompt_len": "",
    "response_len": "1024", "global_batch": "512", "step_time_s": "62.2", "gen_tp": "",
    "rollouts_per_prompt": "", "notes": "light regime; max_new_tokens 8192, 4 mini-updates",
}  # fmt: skip


def table(folder: Path, *rows: dict[str, str]) -> Path:
    with (folder / "perf_points.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({name: row.get(name, "") for name in COLUMNS} for row in rows)
    return folder


def test_a_published_step_and_its_order(tmp_path: Path) -> None:
    rows, left, ranges = read(table(tmp_path, NEMO, OFF, VERL))
    assert left == []
    assert ranges == []
    assert [(row.system, row.kind) for row in rows] == [("NeMo-RL", "sync"), ("NeMo-RL", "1-off"), ("verl", "sync")]
    assert abs(rows[0].error_share) < 0.15
    assert kept_order(rows) == (1, 1)
    told = text(*read(tmp_path))
    assert "median error, verl, stated configuration" in told
    assert told == text(*read(tmp_path))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"notes": "UPPER BOUND, not a measurement"}, "a ceiling of a test, not a measurement"),
        ({"notes": "On policy; DOES NOT CLOSE"}, "the row does not close, as the table says"),
        ({"notes": "8-step Off; bf16"}, "more than one step off"),
        ({"algo": "DAPO"}, "DAPO's sampling generates an unknown multiple of the batch"),
        ({"notes": "On policy; fp8; max_seq=4096"}, "fp8"),
        ({"system": "verl", "notes": "colocate sync; response_len=max"}, "lengths are caps"),
        ({"model": "DeepSeek V3"}, "latent attention: no table of its kernels"),
        ({"train_tp": "3"}, "tp x pp x cp does not divide the GPUs that train"),
        ({"system": "slime"}, "another system: what it does is not modelled"),
    ],
)
def test_rows_are_left_out_by_rule(change: dict[str, str], rule: str, tmp_path: Path) -> None:
    rows, left, _ = read(table(tmp_path, {**NEMO, **change}))
    assert rows == []
    assert [told for _, told in left] == [rule]
