"""The contract with newer engines: it reads what is installed as Python does, and it can find fault."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from scripts.gpu_contract.judge import complaint
from scripts.gpu_contract.sources import Sources
from scripts.gpu_contract.touched import MEMBERS, ROOT, Touch, of_source, touched

SITE = Sources(path=Path(sysconfig.get_path("purelib")))


def test_the_pinned_engines_have_all_that_is_touched() -> None:
    found = touched()
    assert len(found) > 100
    assert {touch.module.split(".")[0] for touch in found} == {"megatron", "vllm", "ray"}
    assert [f"{touch}: {said}" for touch in found if (said := complaint(touch, SITE))] == []


def test_what_is_listed_by_hand_is_still_used() -> None:
    for file, entries in MEMBERS.items():
        text = (ROOT / file).read_text()
        for _, name, words in entries:
            for word in words.split():
                member = word.partition("(")[0]
                assert not member or member in text, f"{file} no longer uses {member} of {name}"


SOURCE = """
from megatron.core.models.gpt import GPTModel
from vllm import EngineArgs, SamplingParams
from vllm.distributed import parallel_state

OPTIONS = {"seed": 0, "no_such_option": 1}

def made():
    parallel_state.init_model_parallel_group(1, 2, 3)
    return EngineArgs(model="m", **OPTIONS), SamplingParams(sead=1), GPTModel(1, 2, colour=3)
"""


def test_arguments_are_read_from_calls() -> None:
    calls = {touch.name: touch for touch in of_source("here.py", SOURCE) if touch.called}
    assert calls["EngineArgs"].keywords == ("model", "seed", "no_such_option")
    assert (calls["GPTModel"].positional_count, calls["GPTModel"].keywords) == (2, ("colour",))
    assert complaint(calls["EngineArgs"], SITE) == "takes no no_such_option"
    assert complaint(calls["SamplingParams"], SITE) == "takes no sead"
    assert complaint(calls["GPTModel"], SITE) == "takes no colour"


OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"


@pytest.mark.parametrize(
    ("touch", "said"),
    [
        (Touch(where="", module="vllm.v1.gone", name="X"), "there is no module vllm.v1.gone"),
        (Touch(where="", module="vllm", name="NoSuchEngine"), "vllm has no NoSuchEngine"),
        (
            Touch(where="", module="megatron.core.distributed", name="DistributedDataParallel", member="bufers"),
            "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel has no bufers",
        ),
        (
            Touch(where="", module=OPTIMIZER, name="DistributedOptimizer", member="model_map"),
            f"{OPTIMIZER}.DistributedOptimizer has no model_map",
        ),
        (Touch(where="", module="ray", name="", member="util.get_node_address"), "ray.util has no get_node_address"),
        (
            Touch(where="", module="vllm.v1.engine.llm_engine", name="LLMEngine.steps", called=True),
            "there is no steps to call",
        ),
        (
            Touch(where="", module=OPTIMIZER, name="Range", called=True, positional_count=5),
            "takes 2 arguments by place, not 5",
        ),
    ],
)
def test_what_is_missing_is_named(touch: Touch, said: str) -> None:
    assert complaint(touch, SITE) == said


def test_a_member_of_a_foreign_base_is_there() -> None:
    touch = Touch(where="", module="megatron.core.models.gpt", name="GPTModel", member="named_parameters")
    assert complaint(touch, SITE) == ""
