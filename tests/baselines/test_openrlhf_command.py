"""A Run as OpenRLHF's command line: those of experiments/ppo_8b.py word for word, and what OpenRLHF cannot express."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest

from baselines.openrlhf.check import different, expected, stated
from baselines.openrlhf.command import PROGRAM, REWARD_FILE, argv, groups_of
from experiments import ppo_8b
from nereus.config import ChangeConfig, PlanChange, StageConfig
from nereus.errors import ConfigError
from nereus.experiment import Run
from nereus.validate import validate


def runs() -> tuple[Run, ...]:
    shared = ppo_8b.runs("openrlhf")
    return (*shared, ppo_8b.apart(shared[2]))


def changed(record: Any, key: str, value: object) -> Any:
    """`record` with the value at a dotted key."""
    head, _, rest = key.partition(".")
    return replace(record, **{head: changed(attrgetter(head)(record), rest, value) if rest else value})


@pytest.mark.parametrize("run", runs(), ids=lambda run: run.variant)
def test_the_words(run: Run, golden: Callable[[str, object], None]) -> None:
    words = argv(run)
    assert words[:3] == ("python", "-m", "openrlhf.cli.train_ppo_ray")
    flags = [word for word in words if word.startswith("--")]
    assert len(set(flags)) == len(flags), "a flag is stated twice"
    folder = str(REWARD_FILE.parents[2])
    name = run.variant.removeprefix("openrlhf-").replace("-", "_")
    golden(f"openrlhf_ppo_8b_{name}", [word.replace(folder, "NEREUS") for word in words])


def test_the_runs_fit_together() -> None:
    for run in runs():
        validate(run.config("runs"))
    verl = ppo_8b.runs("verl")
    for ours, theirs in zip(ppo_8b.runs("openrlhf"), verl, strict=True):
        assert (ours.workload, ours.fleet, ours.seed) == (theirs.workload, theirs.fleet, theirs.seed)
    assert len({run.run_id for run in (*runs(), *verl)}) == 7


def test_who_shares_gpus() -> None:
    shared, apart = stated(argv(runs()[2])[3:]), stated(argv(runs()[3])[3:])
    assert groups_of(runs()[2]).shared
    assert shared["train.colocate_all"] == shared["vllm.enable_sleep"] == shared["ds.enable_sleep"] == []
    assert [shared[f"{model}.num_nodes"] for model in ("actor", "ref", "critic")] == [["8"], ["8"], ["8"]]
    assert int(shared["vllm.num_engines"][0]) * int(shared["vllm.tensor_parallel_size"][0]) == 64
    assert "train.colocate_all" not in apart
    assert "vllm.enable_sleep" not in apart
    assert [apart[f"{model}.num_nodes"] for model in ("actor", "ref", "critic")] == [["2"], ["2"], ["2"]]
    assert int(apart["vllm.num_engines"][0]) * int(apart["vllm.tensor_parallel_size"][0]) == 32


def test_dual_clip_off() -> None:
    assert "--actor.dual_clip" not in argv(changed(runs()[0], "workload.algorithm.dual_clip_ratio", 0.0))


REFUSED = [
    ("system", "verl", "expected openrlhf"),
    ("workload.model_path", "", "OpenRLHF loads a model"),
    ("changes", (ChangeConfig(step=2, plan=PlanChange(actor_train=StageConfig(dp=8))),), "keeps the layout"),
    ("workload.warmup.steps", 3, "no supervised warm-up"),
    ("fleet.slots", 12, "same number of GPUs on every node"),
    ("workload.algorithm.adv_estimator", "grpo", "expected gae"),
    ("workload.algorithm.whiten_advantages", False, "always whitens"),
    ("workload.algorithm.loss_agg_mode", "seq-mean-token-mean", "critic knows no other"),
    ("workload.algorithm.dual_clip_ratio", 0.5, "expected 0 .off. or above 1"),
    ("workload.algorithm.value_clip", 0.0, "cannot turn it off"),
    ("workload.algorithm.mini_batches", 3, "equal"),
    ("workload.model.dtype", "float32", "ds.param_dtype"),
    ("plan.actor_train", StageConfig(tp=2, dp=4), "ZeRO-3 shards every model"),
    ("plan.critic_train", StageConfig(pp=8), "ZeRO-3 shards every model"),
    ("plan.reference_infer", StageConfig(dp=4), "expected plan.actor_train's slots"),
    ("plan.actor_generate", StageConfig(tp=2, dp=2), "leaves no GPU idle"),
    ("plan.actor_generate", StageConfig(pp=2, dp=4), "expected pp=1"),
    ("plan.critic_train.shares", (100, 156, 0, 0, 0, 0, 0, 0), "cuts evenly"),
    ("workload.data.prompts_per_step", 255, "DeepSpeed shares them out evenly"),
]


@pytest.mark.parametrize(("key", "value", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_openrlhf_cannot_express(key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        argv(changed(runs()[0], key, value))


def test_a_wrong_value_is_found() -> None:
    """What check.py does with OpenRLHF's answer: here the answer is made from the command line itself."""
    run = runs()[0]
    settings = stated(argv(run)[len(PROGRAM) :])
    job: dict[str, Any] = {}
    for key, words in settings.items():
        *folders, last = key.split(".")
        place = job
        for folder in folders:
            place = place.setdefault(folder, {})
        values = [float(word) if word.replace(".", "").replace("e-", "").isdigit() else word for word in words]
        place[last] = True if not values else values[0] if len(values) == 1 else values
    assert list(different(settings, {}, job)) == []
    job["train"]["batch_size"] = 128
    job["train"]["colocate_all"] = False
    job["ds"]["zero_stage"] = 2.0
    del job["critic"]["value_clip"]
    wrong = list(different(settings, expected(run), job))
    assert "train.batch_size: expected 256, OpenRLHF has 128" in wrong
    assert "train.colocate_all: expected True, OpenRLHF has False" in wrong
    assert "critic.value_clip: expected 0.5, OpenRLHF has nothing" in wrong
    assert "ds.zero_stage: expected 3, OpenRLHF has 2.0" in wrong
