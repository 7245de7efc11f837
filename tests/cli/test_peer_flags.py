"""What `nereus plan --export` writes is what the peers take: OpenRLHF's own list of arguments, NeMo-RL's own keys."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest

from nereus.cli.main import main

LISTS = Path(__file__).with_name("peers")
JOB = ["plan", "--model", "qwen2.5-7b", "--fleet", "8xh100", "--prompt", "512", "--response", "1024", "--batch", "128"]
SHARDED = "sharding=full recompute=full keep=nothing"
ACTOR, ENGINE = f"actor_train dp=8 {SHARDED}", "actor_generate tp=2 dp=4"
REFERENCE = "reference_infer dp=8 sharding=full"
TYPES = {"int": int, "float": float, "str": str}


def exported(capsys: pytest.CaptureFixture[str], peer: str, algorithm: str, plan: str, *words: str) -> list[str]:
    code = main([*JOB, "--algo", algorithm, "--check", plan, "--export", peer, *words])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return shlex.split(out.replace("\\\n", " "), comments=True)


def openrlhf_parser() -> argparse.ArgumentParser:
    """The arguments that OpenRLHF's command has, no other and no abbreviation."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name, taken in json.loads((LISTS / "openrlhf_flags.json").read_text())["flags"].items():
        if "action" in taken:
            parser.add_argument(name, action=taken["action"])
        else:
            known = {key: taken[key] for key in ("nargs", "choices") if key in taken}
            parser.add_argument(name, type=TYPES.get(taken.get("type", "str"), str), **known)
    return parser


@pytest.mark.parametrize(
    ("algorithm", "plan", "words"),
    [
        ("grpo", f"{ACTOR}; {REFERENCE}; {ENGINE}", []),
        ("grpo", f"{ACTOR}; {ENGINE}", ["--reference", "none"]),
        ("ppo", f"{ACTOR}; critic_train dp=8 {SHARDED}; {REFERENCE}; {ENGINE}", []),
    ],
)
def test_openrlhfs_arguments_take_what_is_written(
    algorithm: str, plan: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parsed, left = openrlhf_parser().parse_known_args(exported(capsys, "openrlhf", algorithm, plan, *words))
    assert left == []
    values = vars(parsed)
    assert values["vllm.num_engines"] * values["vllm.tensor_parallel_size"] == 8  # its train() asserts it
    assert values["actor.num_nodes"] * values["actor.num_gpus_per_node"] == 8
    if algorithm == "grpo":
        assert values["rollout.n_samples_per_prompt"] > 1  # group_norm asserts it
    if "none" not in words:
        assert values["ref.num_nodes"] == values["actor.num_nodes"]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (f"{ACTOR}; {REFERENCE}; {ENGINE}", []),
        (f"{ACTOR}; {ENGINE}", ["--reference", "none"]),
        (f"actor_train tp=4 dp=2 recompute=full keep=nothing; reference_infer tp=4 dp=2 keep=nothing; {ENGINE}", []),
    ],
)
def test_nemo_rls_keys_are_those_that_are_written(
    plan: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """An override of a key that its configuration does not have is refused by Hydra."""
    keys = json.loads((LISTS / "nemo_rl_keys.json").read_text())["keys"]
    for word in exported(capsys, "nemo-rl", "grpo", plan, *words):
        key, value = word.split("=", 1)
        assert key in keys, key
        if keys[key] == "bool":
            assert value in ("true", "false"), word
        else:
            TYPES[keys[key]](value)
