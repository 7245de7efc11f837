"""Validation: each rule has an override that breaks it, and the key that the message must name."""

import ast
from pathlib import Path

import pytest

from nereus import validate as validate_module
from nereus.cli.load import load_config
from nereus.config import Config
from nereus.errors import ConfigError
from nereus.validate import validate

# The defaults: 4 layers, 8 heads, 4 kv heads, ffn 384, 4 slots, 16 * 4 samples in 2 mini-batches, 20 steps.
BROKEN = [
    ("run.steps=0", "run.steps", "at least 1"),
    ("run.seed=-1", "run.seed", "at least 0"),
    ("run.name=a/b", "run.name", "folder name"),
    ("run.name=..", "run.name", "folder name"),
    ("run.name=", "run.name", "folder name"),
    ("run.name=" + "x" * 101, "run.name", "at most 100"),
    ("run.folder=", "run.folder", "folder"),
    ("data.task=", "data.task", "chain_sum"),
    ("data.prompt_template=What is it?", "data.prompt_template", "{question}"),
    ("logger.project=", "logger.project", "project"),
    ("model.layers=0", "model.layers", "at least 1"),
    ("model.hidden=0", "model.hidden", "at least 1"),
    ("model.heads=0", "model.heads", "at least 1"),
    ("model.kv_heads=0", "model.kv_heads", "at least 1"),
    ("model.kv_heads=3", "model.kv_heads", "divisor of model.heads = 8"),
    ("model.ffn=0", "model.ffn", "at least 1"),
    ("model.head_dim=16", "model.head_dim", "32, 64, 80"),
    ("model.head_dim=48", "model.head_dim", "32, 64, 80"),
    ("model.vocab=258", "model.vocab", "at least 259"),
    ("model.dtype=float16", "model.dtype", "float32, bfloat16"),
    ("model.norm_eps=0", "model.norm_eps", "above 0"),
    ("model.rope_factor=0.5", "model.rope_factor", "at least 1"),
    ("model.experts=-1", "model.experts", "at least 0"),
    ("model={qkv_bias: true, qk_norm: true}", "model.qkv_bias", "together with qk_norm"),
    ("model={qkv_bias: true, hidden: 64}", "model.head_dim", "vLLM's Qwen2 has no other"),
    (
        "model={experts: 4, experts_per_token: 5, expert_ffn: 8}",
        "model.experts_per_token",
        "from 1 to model.experts = 4",
    ),
    ("model={experts: 4, experts_per_token: 2}", "model.expert_ffn", "at least 1"),
    (
        "model={qk_norm: true, experts: 4, experts_per_token: 2, expert_ffn: 8, dense_layers: [4]}",
        "model.dense_layers",
        "from 0 to 3",
    ),
    ("model.rope_theta=0", "model.rope_theta", "above 0"),
    ("model.init_std=0", "model.init_std", "above 0"),
    ("data.prompts_per_step=0", "data.prompts_per_step", "at least 1"),
    ("data.samples_per_prompt=0", "data.samples_per_prompt", "at least 1"),
    ("data.max_prompt_tokens=0", "data.max_prompt_tokens", "at least 1"),
    ("data.max_response_tokens=0", "data.max_response_tokens", "at least 1"),
    ("data.response_schedule=[{step: 1, max_response_tokens: 9}]", "data.response_schedule[0].step", "above 1"),
    ("data.response_schedule=[{step: 99, max_response_tokens: 9}]", "data.response_schedule[0].step", "run.steps"),
    (
        "data.response_schedule=[{step: 3, max_response_tokens: 9}, {step: 3, max_response_tokens: 10}]",
        "data.response_schedule[1].step",
        "above 3",
    ),
    (
        "data.response_schedule=[{step: 3, max_response_tokens: 0}]",
        "data.response_schedule[0].max_response_tokens",
        "at least 1",
    ),
    ("rollout.temperature=0", "rollout.temperature", "above 0"),
    ("rollout.temperature=.inf", "rollout.temperature", "finite"),
    ("rollout.temperature=.nan", "rollout.temperature", "finite"),
    ("rollout.kv_cache_bytes=0", "rollout.kv_cache_bytes", "at least 1"),
    ("algorithm.adv_estimator=magic", "algorithm.adv_estimator", "gae"),
    ("algorithm.loss_agg_mode=sum", "algorithm.loss_agg_mode", "token-mean"),
    ("algorithm.gamma=1.1", "algorithm.gamma", "0 to 1"),
    ("algorithm.lam=-0.1", "algorithm.lam", "0 to 1"),
    ("algorithm.kl_coef=-1", "algorithm.kl_coef", "at least 0"),
    ("algorithm.entropy_coef=-1", "algorithm.entropy_coef", "at least 0"),
    ("algorithm.clip_ratio_low=-1", "algorithm.clip_ratio_low", "at least 0"),
    ("algorithm.clip_ratio_high=-1", "algorithm.clip_ratio_high", "at least 0"),
    ("algorithm.dual_clip_ratio=1", "algorithm.dual_clip_ratio", "above 1"),
    ("algorithm.value_clip=-1", "algorithm.value_clip", "at least 0"),
    ("algorithm.mini_batches=0", "algorithm.mini_batches", "at least 1"),
    ("algorithm.mini_batches=3", "algorithm.mini_batches", "= 64"),
    ("algorithm.epochs=0", "algorithm.epochs", "at least 1"),
    ("algorithm.actor_lr=-1", "algorithm.actor_lr", "at least 0"),
    ("algorithm.critic_lr=-1", "algorithm.critic_lr", "at least 0"),
    ("algorithm.weight_decay=-1", "algorithm.weight_decay", "at least 0"),
    ("algorithm.clip_grad=0", "algorithm.clip_grad", "above 0"),
    ("algorithm.adam_beta1=1", "algorithm.adam_beta1", "below 1"),
    ("algorithm.adam_beta2=1", "algorithm.adam_beta2", "below 1"),
    ("algorithm.adam_eps=0", "algorithm.adam_eps", "above 0"),
    ("warmup.steps=-1", "warmup.steps", "at least 0"),
    ("warmup.samples=0", "warmup.samples", "at least 1"),
    ("warmup.lr=0", "warmup.lr", "above 0"),
    ("fleet.slots=0", "fleet.slots", "at least 1"),
    ("fleet.slots=65", "fleet.slots", "at most 64"),
    ("fleet.slot_budget_bytes=0", "fleet.slot_budget_bytes", "at least 1"),
    ("fleet.start_timeout_seconds=0", "fleet.start_timeout_seconds", "above 0"),
    ("fleet.phase_timeout_seconds=0", "fleet.phase_timeout_seconds", "above 0"),
    ("transfer.bucket_bytes=8", "transfer.bucket_bytes", "at least 16"),
    ("logger.wandb=maybe", "logger.wandb", "auto, offline, online, off"),
    ("plan.actor_train.tp=0", "plan.actor_train.tp", "at least 1"),
    ("plan.critic_train.pp=0", "plan.critic_train.pp", "at least 1"),
    ("plan.reference_infer.dp=-1", "plan.reference_infer.dp", "at least 1"),
    ("plan.actor_train.micro_batch=0", "plan.actor_train.micro_batch", "at least 1"),
    ("plan.actor_train.tp=3", "plan.actor_train.tp", "divisor of model.heads = 8"),
    ("plan.actor_generate.pp=2", "plan.actor_generate.pp", "expected 1"),
    ("plan.actor_train.pp=5", "plan.actor_train.pp", "at most model.layers = 4"),
    ("plan.actor_train.cp=2", "plan.actor_train.cp", "whole sequences"),
    ("plan.critic_train.ep=2", "plan.critic_train.ep", "no experts"),
    ("plan.critic_train.order=pp-tp", "plan.critic_train.order", "tp-cp-ep-dp-pp, tp-cp-ep-pp-dp"),
    ("plan.actor_train.pp=3", "plan.actor_train.pp", "plan.actor_train.pipeline=[2, 1, 1]"),
    ("plan.actor_train={pp: 2, pipeline: [4]}", "plan.actor_train.pipeline", "2 entries"),
    ("plan.actor_train={pp: 2, pipeline: [2, 1]}", "plan.actor_train.pipeline", "sum model.layers = 4"),
    ("plan.actor_train={pp: 2, pipeline: [4, 0]}", "plan.actor_train.pipeline", "each at least 1"),
    ("plan.actor_train.pipeline=[]", "plan.actor_train.pipeline", "1 entries"),
    ("plan.actor_train={tp: 2, pp: 2, dp: 2}", "plan.actor_train", "needs 8 slots"),
    ("plan.actor_train={tp: 2, slots: [0]}", "plan.actor_train.slots", "= 2 slots"),
    ("plan.actor_train={tp: 2, slots: [1, 1]}", "plan.actor_train.slots", "each slot once"),
    ("plan.actor_train={tp: 2, slots: [0, 4]}", "plan.actor_train.slots", "from 0 to 3"),
    ("plan.actor_train={tp: 2, slots: [-1, 0]}", "plan.actor_train.slots", "from 0 to 3"),
    ("plan.actor_train={dp: 3, shares: [16, 16]}", "plan.actor_train.shares", "3 entries"),
    ("plan.actor_train={dp: 2, shares: [33, -1]}", "plan.actor_train.shares", "none negative"),
    ("plan.actor_train={dp: 3, shares: [20, 20, 24]}", "plan.actor_train.shares", "sum 32 (samples of a mini-batch)"),
    ("plan.reference_infer={dp: 2, shares: [16, 16]}", "plan.reference_infer.shares", "sum 64 (samples of a step)"),
    ("plan.actor_generate={dp: 2, shares: [16, 16]}", "plan.actor_generate.shares", "as [32, 32]"),
    ("changes=[{step: 0, plan: {critic_train: {}}}]", "changes[0].step", "from 1 to run.steps = 20"),
    ("changes=[{step: 21, plan: {critic_train: {}}}]", "changes[0].step", "from 1 to run.steps = 20"),
    (
        "changes=[{step: 3, plan: {critic_train: {}}}, {step: 3, plan: {critic_train: {}}}]",
        "changes[1].step",
        "above the change before it (3)",
    ),
    ("changes=[{step: 3, plan: {}}]", "changes[0].plan", "at least one of actor_train"),
    (
        "changes=[{step: 3, plan: {actor_train: {dp: 4}}}, {step: 4, plan: {critic_train: {tp: 3}}}]",
        "changes[1].plan.critic_train.tp",
        "divisor of model.heads",
    ),
    ("changes=[{step: 3, plan: {actor_generate: {dp: 5}}}]", "changes[0].plan.actor_generate", "needs 5 slots"),
]

MOE = "model={experts: 4, experts_per_token: 2, expert_ffn: 384}"
RIGHT = [
    [],
    [  # no layer has a plain MLP: its size does not matter
        "model={experts: 4, experts_per_token: 2, expert_ffn: 256, qk_norm: true, ffn: 7}",
        "plan.actor_train={dp: 4, ep: 2}",
        "plan.critic_train={dp: 4}",
        "plan.reference_infer={tp: 2}",
        "plan.actor_generate={tp: 2, dp: 2}",
    ],
    [MOE, "plan.actor_train={dp: 4, ep: 4}", "plan.actor_generate={tp: 2, dp: 2}"],
    ["plan.actor_train={pp: 2, dp: 2, order: tp-cp-ep-pp-dp}"],
    ["model={qkv_bias: true, tie_embeddings: true, head_dim: 32, heads: 4}"],
    ["plan.actor_train={tp: 2, pp: 2, slots: [3, 2, 1, 0]}", "plan.actor_generate={tp: 2, dp: 2}"],
    ["plan.actor_train={dp: 3, slots: [0, 2, 3], shares: [32, 0, 0]}", "plan.reference_infer={dp: 3}"],
    ["plan.critic_train={pp: 3, pipeline: [1, 2, 1]}", "plan.actor_train={pp: 3, pipeline: [2, 1, 1]}"],
    ["fleet.slots=8", "plan.actor_generate.tp=8", "plan.actor_generate.dp=1"],  # each kv head is held twice
    ["changes=[{step: 1, plan: {actor_train: {dp: 4}}}, {step: 20, plan: {actor_generate: {dp: 3}}}]"],
    ["model.dtype=bfloat16", "warmup.steps=0", "algorithm.actor_lr=0", "algorithm.adv_estimator=grpo"],
    ["algorithm.dual_clip_ratio=0", "algorithm.value_clip=0", "algorithm.adv_estimator=reinforce++"],
]


def loaded(folder: Path, overrides: list[str]) -> Config:
    (folder / "empty.yaml").write_text("", encoding="utf-8")
    return load_config(folder / "empty.yaml", overrides)


@pytest.mark.parametrize(("override", "key", "words"), BROKEN, ids=lambda entry: str(entry)[:40])
def test_a_broken_rule_names_its_key(tmp_path: Path, override: str, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(loaded(tmp_path, [override]))
    assert caught.value.key == key
    assert words in caught.value.expected


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["model.heads=6", "model.kv_heads=3", "plan.actor_train.tp=2"], "plan.actor_train.tp", "= 3"),
        (["model.kv_heads=2", "plan.actor_train.tp=4", "plan.actor_train.pp=1"], "plan.actor_train.tp", "KV groups"),
        (
            ["model.heads=6", "model.kv_heads=3", "model.vocab=320", "plan.actor_train.tp=3"],
            "plan.actor_train.tp",
            "320",
        ),
        ([MOE, "plan.actor_train.tp=2"], "plan.actor_train.tp", "sequence parallelism; use ep"),
        ([MOE, "plan.actor_generate={tp: 2, ep: 2}"], "plan.actor_generate.ep", "every expert on every slot"),
        ([MOE, "plan.actor_train={dp: 4, ep: 2, etp: 2}"], "plan.actor_train.etp", "unequal numbers of tokens"),
        ([MOE, "plan.reference_infer={tp: 2, dp: 2, ep: 2}"], "plan.reference_infer.etp", "unequal numbers of tokens"),
        ([MOE, "plan.actor_train={dp: 2, ep: 3}"], "plan.actor_train.ep", "divisor of experts = 4"),
        ([MOE, "plan.actor_train={dp: 3, ep: 2}"], "plan.actor_train.ep", "a divisor of tp . cp . dp = 3"),
        (["model={experts: 4, experts_per_token: 2, expert_ffn: 256}"], "model.expert_ffn", "Mixtral has one size"),
        (["model.ffn=7", "plan.actor_train.tp=2"], "plan.actor_train.tp", "model.ffn = 7"),
        (["algorithm.adv_estimator=grpo", "data.samples_per_prompt=1"], "data.samples_per_prompt", "at least 2"),
    ],
)
def test_two_values_that_do_not_fit(tmp_path: Path, overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        validate(loaded(tmp_path, overrides))
    assert caught.value.key == key


@pytest.mark.parametrize("overrides", RIGHT, ids=str)
def test_what_fits_passes(tmp_path: Path, overrides: list[str]) -> None:
    validate(loaded(tmp_path, overrides))


@pytest.mark.parametrize(
    ("file", "name", "allowed"),
    [
        ("advantages.py", "AdvEstimator", validate_module.ADV_ESTIMATORS),
        ("losses.py", "LossAggMode", validate_module.LOSS_AGG_MODES),
    ],
)
def test_the_lists_are_those_of_the_algorithms(file: str, name: str, allowed: tuple[str, ...]) -> None:
    """Read from the source: importing it would load torch."""
    tree = ast.parse((Path(validate_module.__file__).parent / "rl" / file).read_text(encoding="utf-8"))
    (literal,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    assert isinstance(literal, ast.Subscript)
    assert ast.literal_eval(literal.slice) == allowed
