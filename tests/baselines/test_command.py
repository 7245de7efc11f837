"""A Run as verl's command line: those of experiments/ppo_8b.py word for word, and what verl cannot express."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest

from baselines.verl.check import different, expected, sharded, stated
from baselines.verl.command import PROGRAM, REWARD_FILE, argv
from experiments import ppo_8b
from nereus.config import ChangeConfig, PlanChange, StageConfig
from nereus.errors import ConfigError
from nereus.experiment import Run
from nereus.validate import validate


def runs() -> tuple[Run, ...]:
    return ppo_8b.runs("verl")


def changed(record: Any, key: str, value: object) -> Any:
    """`record` with the value at a dotted key."""
    head, _, rest = key.partition(".")
    return replace(record, **{head: changed(attrgetter(head)(record), rest, value) if rest else value})


@pytest.mark.parametrize("run", runs(), ids=lambda run: run.variant)
def test_the_words(run: Run, golden: Callable[[str, object], None]) -> None:
    words = argv(run)
    assert words[:3] == ("python", "-m", "verl.trainer.main_ppo")
    assert len({word.partition("=")[0] for word in words}) == len(words), "a key is stated twice"
    folder = str(REWARD_FILE.parents[2])
    golden(f"verl_ppo_8b_{run.variant}", [word.replace(folder, "NEREUS") for word in words])


def test_the_runs_fit_together() -> None:
    for run in runs():
        validate(run.config("runs"))
    assert len({run.run_id for run in runs()}) == 3


def test_nodes_and_gpus() -> None:
    small, large, largest = runs()
    two = changed(changed(small, "fleet.slots", 2), "plan.actor_generate.dp", 1)
    for name in ("actor_train", "critic_train", "reference_infer"):
        two = changed(two, f"plan.{name}", StageConfig(tp=2))
    for run, nodes, gpus in ((small, 1, 8), (large, 2, 8), (largest, 8, 8), (two, 1, 2)):
        words = argv(run)
        assert f"trainer.nnodes={nodes}" in words
        assert f"trainer.n_gpus_per_node={gpus}" in words


def test_fsdp() -> None:
    run = sharded(runs()[0])
    words = argv(run, "fsdp")
    assert "model_engine=dp" in words
    assert "critic.strategy=fsdp2" in words
    assert "+critic.optim.override_optimizer_config.eps=1e-08" in words
    assert not [word for word in words if "megatron" in word]
    assert argv(run, "megatron") != words


def test_what_is_left_to_verl() -> None:
    run = changed(
        changed(runs()[0], "workload.algorithm.kl_coef", 0.0), "workload.algorithm.loss_agg_mode", "token-sum"
    )
    words = argv(run)
    assert "algorithm.use_kl_in_reward=false" in words
    assert not [word for word in words if "loss_scale_factor" in word]
    by_length = argv(changed(run, "workload.algorithm.loss_agg_mode", "seq-mean-token-sum-norm"))
    assert "actor_rollout_ref.actor.loss_scale_factor=2048" in by_length


REFUSED = [
    ("system", "nereus", "expected verl"),
    ("workload.model_path", "", "verl loads a model"),
    ("changes", (ChangeConfig(step=2, plan=PlanChange(actor_train=StageConfig(dp=8))),), "keeps the layout"),
    ("workload.warmup.steps", 3, "no supervised warm-up"),
    ("fleet.slots", 12, "same number of GPUs on every node"),
    ("workload.algorithm.adv_estimator", "grpo", "expected gae"),
    ("workload.algorithm.whiten_advantages", False, "always whitens"),
    ("workload.algorithm.dual_clip_ratio", 0.0, "cannot turn it off"),
    ("workload.algorithm.value_clip", 0.0, "cannot turn it off"),
    ("workload.algorithm.mini_batches", 3, "whole prompts"),
    ("plan.critic_train", StageConfig(tp=2, dp=4), "share one set of process groups"),
    ("plan.reference_infer", StageConfig(tp=4, dp=1), "leaves no GPU idle"),
    ("plan.actor_generate", StageConfig(tp=1, dp=2), "leaves no GPU idle"),
    ("plan.actor_train.slots", (7, 6, 5, 4, 3, 2, 1, 0), "places ranks itself"),
    ("plan.critic_train.shares", (100, 156), "cuts evenly"),
]


@pytest.mark.parametrize(("key", "value", "words"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_verl_cannot_express(key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        argv(changed(runs()[0], key, value))
    assert caught.value.key in key or key in caught.value.key


def test_what_verl_s_fsdp_cannot_express() -> None:
    small = runs()[0]
    with pytest.raises(ConfigError, match="expected tp=1 pp=1"):
        argv(small, "fsdp")
    with pytest.raises(ConfigError, match="expected bfloat16"):
        argv(changed(sharded(small), "workload.model.dtype", "float32"), "fsdp")


def test_a_wrong_value_is_found() -> None:
    """What check.py does with verl's answer: here the answer is made from the command line itself."""
    run = runs()[0]
    job: dict[str, Any] = {}
    for key, value in stated(argv(run)[len(PROGRAM) :]).items():
        *folders, last = key.split(".")
        place = job
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    assert list(different(stated(argv(run)[len(PROGRAM) :]), job)) == []
    job["data"]["train_batch_size"] = 128
    del job["critic"]["cliprange_value"]
    wrong = list(different({**stated(argv(run)[len(PROGRAM) :]), **expected(run, "megatron")}, job))
    assert "data.train_batch_size: expected 256, verl has 128" in wrong
    assert "critic.cliprange_value: expected 0.5, verl has nothing" in wrong
