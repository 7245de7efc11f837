"""Whether the values of a configuration fit together, as far as can be judged without memory: pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from operator import attrgetter

from nereus.catalogue import architecture_of
from nereus.config import Config, ModelConfig, PlanChange, PlanConfig, StageConfig
from nereus.errors import ConfigError
from nereus.layout import STAGES, Layout, Stage, all_sparse, equal_shares, first_problem
from nereus.model import VOCAB_ALIGN, round_up

TRAIN_STAGES = ("actor_train", "critic_train")
GENERATE_STAGES = ("actor_generate",)

BYTE_TOKENIZER_VOCAB = 259  # 256 bytes and three specials
VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
DTYPES = ("float32", "bfloat16")
ADV_ESTIMATORS = ("gae", "grpo", "rloo", "reinforce++")  # those of nereus.rl.advantages
GROUP_ESTIMATORS = ("grpo", "rloo")
LOSS_AGG_MODES = (  # those of nereus.rl.losses
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
WANDB_MODES = ("auto", "offline", "online", "off")
POLICIES = ("script", "nereus", "fixed", "dp-scaling", "restart")
MAX_SLOTS = 64
MAX_NAME_CHARACTERS = 100

LEAST: dict[str, int] = {
    "run.seed": 0,
    "run.steps": 1,
    "model.layers": 1,
    "model.hidden": 1,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.ffn": 1,
    "model.experts": 0,
    "model.rope_factor": 1,
    "model.vocab": BYTE_TOKENIZER_VOCAB,
    "data.prompts_per_step": 1,
    "data.samples_per_prompt": 1,
    "data.max_prompt_tokens": 1,
    "data.max_response_tokens": 1,
    "rollout.kv_cache_bytes": 1,
    "algorithm.mini_batches": 1,
    "algorithm.epochs": 1,
    "warmup.steps": 0,
    "warmup.samples": 1,
    "warmup.ramp_steps": 0,
    "fleet.slots": 1,
    "fleet.slot_budget_bytes": 1,
    "fleet.host_bytes": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.keep_count": 0,
    "transfer.bucket_bytes": 16,  # two halves of one 8-byte element
    "nereus.search_nodes": 1,
}
ABOVE_ZERO = (
    "model.norm_eps",
    "model.rope_theta",
    "model.init_std",
    "rollout.temperature",
    "algorithm.clip_grad",
    "algorithm.adam_eps",
    "warmup.lr",
    "fleet.start_timeout_seconds",
    "fleet.phase_timeout_seconds",
)
NOT_NEGATIVE = (
    "algorithm.clip_ratio_low",
    "algorithm.clip_ratio_high",
    "algorithm.value_clip",
    "algorithm.kl_coef",
    "algorithm.entropy_coef",
    "algorithm.actor_lr",
    "algorithm.critic_lr",
    "algorithm.weight_decay",
)
ZERO_TO_ONE = ("algorithm.gamma", "algorithm.lam", "warmup.wrong_share")
ZERO_TO_BELOW_ONE = ("algorithm.adam_beta1", "algorithm.adam_beta2")
CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": DTYPES,
    "algorithm.adv_estimator": ADV_ESTIMATORS,
    "algorithm.loss_agg_mode": LOSS_AGG_MODES,
    "logger.wandb": WANDB_MODES,
    "nereus.policy": POLICIES,
}


def validate(config: Config) -> None:
    """Nothing, when every value of `config` fits the others; memory is judged elsewhere.

    Raises ConfigError with the full key path, such as `changes[1].plan.critic_train.tp`, of the first that does not.
    """
    _check_ranges(config)
    _check_names(config)
    _check_model(config.model)
    _check_batch(config)
    _check_responses(config)
    for name, stage in _stages(config.plan):
        _check_stage(config, f"plan.{name}", name, stage)
    _check_changes(config)
    _check_nereus(config)


def _samples_to_share(config: Config, name: str) -> int:
    """The samples that the replicas of the stage `name` share: a mini-batch when it trains, else the whole batch."""
    batch = config.data.prompts_per_step * config.data.samples_per_prompt
    return batch // config.algorithm.mini_batches if name in TRAIN_STAGES else batch


def _check_ranges(config: Config) -> None:
    for key, least in LEAST.items():
        _require(_number(config, key) >= least, key, config, f"at least {least}")
    for key in ABOVE_ZERO:
        _require(_number(config, key) > 0, key, config, "a finite number above 0")
    for key in NOT_NEGATIVE:
        _require(_number(config, key) >= 0, key, config, "a finite number, at least 0")
    for key in ZERO_TO_ONE:
        _require(0 <= _number(config, key) <= 1, key, config, "a number from 0 to 1")
    for key in ZERO_TO_BELOW_ONE:
        _require(0 <= _number(config, key) < 1, key, config, "a number from 0 to below 1")
    probe = "a number from 0 (no probe) to 10"
    _require(0 <= _number(config, "probe.seconds") <= 10, "probe.seconds", config, probe)
    _require(config.fleet.on_loss in ("shrink", "stop"), "fleet.on_loss", config, "shrink or stop")
    dual = _number(config, "algorithm.dual_clip_ratio")
    _require(dual == 0 or dual > 1, "algorithm.dual_clip_ratio", config, "a number above 1, or 0 for no dual clip")
    reattach, kept = config.fleet.reattach_seconds, "0 (slots end with their driver) or at least 1"
    _require(reattach == 0 or 1 <= reattach < math.inf, "fleet.reattach_seconds", config, kept)
    _require(config.fleet.slots <= MAX_SLOTS, "fleet.slots", config, f"at most {MAX_SLOTS}")
    for key, choices in CHOICES.items():
        _require(attrgetter(key)(config) in choices, key, config, f"one of {', '.join(choices)}")


def _check_names(config: Config) -> None:
    name = config.run.name
    safe = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) and len(name) <= MAX_NAME_CHARACTERS
    limits = f"starting with a letter or a digit, at most {MAX_NAME_CHARACTERS} characters"
    _require(bool(safe), "run.name", config, f"a folder name of letters, digits, '.', '_' and '-', {limits}")
    _require(
        bool(config.run.folder.strip()), "run.folder", config, "the folder that holds the run folders, such as runs"
    )
    _require(bool(config.data.task.strip()), "data.task", config, "a reasoning-gym task, such as chain_sum")
    template = config.data.prompt_template
    fields = re.search(r"\{\w+\}", template)
    _require(
        bool(fields), "data.prompt_template", config, "a text with {question} or a field of the task's entries in it"
    )
    _require(bool(config.logger.project.strip()), "logger.project", config, "a W&B project, such as nereus")


def _check_model(model: ModelConfig) -> None:
    if model.heads % model.kv_heads:
        expected = f"expected a divisor of model.heads = {model.heads}"
        raise ConfigError("model.kv_heads", model.kv_heads, expected)
    if model.head_dim not in VLLM_CPU_HEAD_DIMS:
        sizes = ", ".join(map(str, VLLM_CPU_HEAD_DIMS))
        raise ConfigError("model.head_dim", model.head_dim, f"expected one of {sizes} (what vLLM computes on a CPU)")
    if model.experts:
        _check_experts(model)
    try:
        architecture_of(model)
    except ConfigError as error:
        raise ConfigError(f"model.{error.key}", error.value, error.expected) from error
    if model.qkv_bias and model.heads * model.head_dim != model.hidden:
        expected = f"expected model.hidden / model.heads = {model.hidden / model.heads:g}: vLLM's Qwen2 has no other"
        raise ConfigError("model.head_dim", model.head_dim, expected)


def _check_experts(model: ModelConfig) -> None:
    if not 1 <= model.experts_per_token <= model.experts:
        expected = f"expected from 1 to model.experts = {model.experts}"
        raise ConfigError("model.experts_per_token", model.experts_per_token, expected)
    if model.expert_ffn < 1:
        raise ConfigError("model.expert_ffn", model.expert_ffn, "expected at least 1")
    if not set(model.dense_layers) <= set(range(model.layers)):
        expected = f"expected layers from 0 to {model.layers - 1}"
        raise ConfigError("model.dense_layers", list(model.dense_layers), expected)


def _check_batch(config: Config) -> None:
    data, algorithm = config.data, config.algorithm
    batch = data.prompts_per_step * data.samples_per_prompt
    if batch % algorithm.mini_batches:
        expected = f"expected a divisor of data.prompts_per_step * data.samples_per_prompt = {batch}"
        raise ConfigError("algorithm.mini_batches", algorithm.mini_batches, expected)
    if algorithm.adv_estimator in GROUP_ESTIMATORS and data.samples_per_prompt == 1:
        expected = f"expected at least 2: {algorithm.adv_estimator} compares the samples of a prompt"
        raise ConfigError("data.samples_per_prompt", 1, expected)


def _check_responses(config: Config) -> None:
    last = 1
    for index, each in enumerate(config.data.response_schedule):
        key = f"data.response_schedule[{index}]"
        if not last < each.step <= config.run.steps:
            expected = f"expected a step above {last}, at most run.steps = {config.run.steps}"
            raise ConfigError(f"{key}.step", each.step, expected)
        if each.max_response_tokens < 1:
            raise ConfigError(f"{key}.max_response_tokens", each.max_response_tokens, "expected at least 1")
        last = each.step


def _check_stage(config: Config, key: str, name: str, stage: StageConfig) -> None:
    for degree in ("tp", "pp", "dp", "micro_batch"):
        value: int = attrgetter(degree)(stage)
        if value < 1:
            raise ConfigError(f"{key}.{degree}", value, "expected at least 1")
    if stage.keep not in ("all", "nothing") or (stage.keep == "nothing" and name != "reference_infer"):
        raise ConfigError(f"{key}.keep", stage.keep, "expected all, or for reference_infer nothing: others stay")
    _check_tensor_parallel(config.model, key, name, stage.tp)
    _check_pipeline(config.model, key, name, stage)
    _check_degrees(config.model, key, name, stage)
    _check_slots(config, key, stage)
    _check_shares(config, key, name, stage)


def _check_tensor_parallel(model: ModelConfig, key: str, name: str, tp: int) -> None:
    padded = round_up(model.vocab, VOCAB_ALIGN)
    shapes = [("model.heads", model.heads), ("the padded vocabulary", padded)]
    if not all_sparse(model):
        shapes.append(("model.ffn", model.ffn))
    if name not in GENERATE_STAGES:
        shapes.append(("model.kv_heads (Megatron cuts whole KV groups)", model.kv_heads))
    for what, count in shapes:
        if count % tp:
            raise ConfigError(f"{key}.tp", tp, f"expected a divisor of {what} = {count}")
    if model.kv_heads % tp and tp % model.kv_heads:
        expected = f"expected a divisor or a multiple of model.kv_heads = {model.kv_heads}"
        raise ConfigError(f"{key}.tp", tp, expected)


def _check_pipeline(model: ModelConfig, key: str, name: str, stage: StageConfig) -> None:
    if name in GENERATE_STAGES and stage.pp != 1:
        raise ConfigError(f"{key}.pp", stage.pp, "expected 1: vLLM generates without a pipeline here; use tp or dp")
    if stage.pp > model.layers:
        raise ConfigError(f"{key}.pp", stage.pp, f"expected at most model.layers = {model.layers}")
    if stage.pipeline is None and model.layers % stage.pp:
        uneven = list(equal_shares(model.layers, stage.pp))
        expected = (
            f"expected a divisor of model.layers = {model.layers}, or the layers of each rank, {key}.pipeline={uneven}"
        )
        raise ConfigError(f"{key}.pp", stage.pp, expected)
    if stage.pipeline is not None:
        fits = len(stage.pipeline) == stage.pp and min(stage.pipeline) >= 1 and sum(stage.pipeline) == model.layers
        if not fits:
            expected = f"expected {stage.pp} entries (pp), each at least 1, with the sum model.layers = {model.layers}"
            raise ConfigError(f"{key}.pipeline", list(stage.pipeline), expected)


def _check_degrees(model: ModelConfig, key: str, name: str, stage: StageConfig) -> None:
    """What the checks before have not asked: context and expert parallelism and the order of ranks."""
    if stage.cp != 1:
        raise ConfigError(f"{key}.cp", stage.cp, "expected 1: attention here takes whole sequences")
    layout = Layout(
        tp=stage.tp,
        pp=stage.pp,
        dp=stage.dp,
        ep=stage.ep,
        etp=stage.etp,
        order=stage.order,
        pipeline=stage.pipeline or equal_shares(model.layers, stage.pp),
    )
    kind: Stage = "generate" if name in GENERATE_STAGES else "train"
    if (problem := first_problem(model, layout, kind)) is not None:
        raise ConfigError(f"{key}.{problem[0]}", problem[1], problem[2])
    if kind == "generate" and stage.ep != 1:
        raise ConfigError(
            f"{key}.ep", stage.ep, "expected 1: vLLM's CPU kernels want every expert on every slot; use tp"
        )
    if model.experts and kind == "train" and stage.ep > 1 and layout.expert_tp != 1:
        expected = "expected 1: the parts of a cut expert would exchange unequal numbers of tokens, which gloo refuses"
        raise ConfigError(f"{key}.etp", stage.etp, expected)
    if model.experts and name in TRAIN_STAGES and stage.tp != 1:
        expected = (
            "expected 1: Megatron trains experts beside tensor parallelism only with sequence parallelism; use ep"
        )
        raise ConfigError(f"{key}.tp", stage.tp, expected)


def _check_slots(config: Config, key: str, stage: StageConfig) -> None:
    needed, fleet = stage.tp * stage.pp * stage.dp, config.fleet.slots
    if stage.slots is None:
        if needed > fleet:
            degrees = f"tp={stage.tp} pp={stage.pp} dp={stage.dp}"
            expected = f"needs {needed} slots: expected tp * pp * dp of at most fleet.slots = {fleet}"
            raise ConfigError(key, degrees, expected)
        return
    slots = list(stage.slots)
    if len(slots) != needed:
        raise ConfigError(f"{key}.slots", slots, f"expected tp * pp * dp = {needed} slots")
    if len(set(slots)) != len(slots):
        raise ConfigError(f"{key}.slots", slots, "expected each slot once")
    if min(slots) < 0 or max(slots) >= fleet:
        raise ConfigError(f"{key}.slots", slots, f"expected slots from 0 to {fleet - 1} (fleet.slots = {fleet})")


def _check_shares(config: Config, key: str, name: str, stage: StageConfig) -> None:
    if stage.shares is None:
        return
    samples, shares = _samples_to_share(config, name), stage.shares
    if len(shares) != stage.dp or min(shares) < 0 or sum(shares) != samples:
        what = "a mini-batch" if name in TRAIN_STAGES else "a step"
        even = list(equal_shares(samples, stage.dp))
        expected = (
            f"expected {stage.dp} entries (dp), none negative, with the sum {samples} (samples of {what}), as {even}"
        )
        raise ConfigError(f"{key}.shares", list(shares), expected)


def _check_changes(config: Config) -> None:
    last = 0
    for index, change in enumerate(config.changes):
        key = f"changes[{index}]"
        if not last < change.step <= config.run.steps:
            above = f" above the change before it ({last})" if last else ""
            expected = f"expected a step from 1 to run.steps = {config.run.steps}{above}"
            raise ConfigError(f"{key}.step", change.step, expected)
        stages = list(_stages(change.plan))
        if not stages:
            raise ConfigError(f"{key}.plan", None, f"expected at least one of {', '.join(STAGES)}")
        last = change.step
        for name, stage in stages:  # those left out were judged before and stay
            _check_stage(config, f"{key}.plan.{name}", name, stage)


def _check_nereus(config: Config) -> None:
    wanted = config.nereus
    if wanted.policy != "script" and config.changes:
        expected = f"expected none (changes=[]): with nereus.policy = {wanted.policy} the controller changes the plan"
        raise ConfigError("changes", f"{len(config.changes)} scripted", expected)
    if wanted.policy == "restart" and config.checkpoint.keep_count < 1:
        expected = "expected at least 1: the policy restart resumes from a checkpoint"
        raise ConfigError("checkpoint.keep_count", config.checkpoint.keep_count, expected)
    _check_schedule(config)
    most = wanted.max_transitions
    if most is not None and most < 0:
        raise ConfigError("nereus.max_transitions", most, "expected at least 0, or null for no limit")
    for key, patterns in (("allow", wanted.plans.allow), ("deny", wanted.plans.deny)):
        for index, pattern in enumerate(patterns):
            stage, _, layout = pattern.partition(" ")
            if not layout or not any(fnmatchcase(name, stage) for name in STAGES):
                expected = (
                    f"expected a stage ({', '.join(STAGES)}, or a pattern of them), a space and a pattern of layouts"
                )
                raise ConfigError(f"nereus.plans.{key}[{index}]", pattern, f"{expected}, such as 'actor_train TP2*'")


def _check_schedule(config: Config) -> None:
    last, fleet = 1, config.fleet
    policy = config.nereus.policy
    if fleet.schedule and policy == "script":
        expected = "expected nereus, fixed, dp-scaling or restart: a script does not follow the fleet (fleet.schedule)"
        raise ConfigError("nereus.policy", policy, expected)
    if fleet.schedule and policy == "fixed" and fleet.schedule[-1].slots < fleet.slots:
        expected = "expected nereus, dp-scaling or restart: a fixed plan does not follow the fleet, it waits for all slots, which fleet.schedule does not give back"
        raise ConfigError("nereus.policy", policy, expected)
    for index, each in enumerate(fleet.schedule):
        key = f"fleet.schedule[{index}]"
        if not last < each.step <= config.run.steps:
            expected = f"expected a step above {last}, at most run.steps = {config.run.steps}"
            raise ConfigError(f"{key}.step", each.step, expected)
        if not 1 <= each.slots <= fleet.slots:
            raise ConfigError(f"{key}.slots", each.slots, f"expected from 1 to fleet.slots = {fleet.slots}")
        if each.away_seconds is not None and not each.away_seconds >= 0:
            raise ConfigError(f"{key}.away_seconds", each.away_seconds, "expected null or at least 0")
        last = each.step


def _stages(plan: PlanConfig | PlanChange) -> Iterator[tuple[str, StageConfig]]:
    """The names and stages that `plan` states."""
    for name in STAGES:
        stage: StageConfig | None = attrgetter(name)(plan)
        if stage is not None:
            yield name, stage


def _number(config: Config, key: str) -> float:
    """The number at `key`; NaN for one that is not finite, so that every comparison with it fails."""
    value: float = attrgetter(key)(config)
    return value if math.isfinite(value) else math.nan


def _require(holds: bool, key: str, config: Config, expected: str) -> None:
    if not holds:
        raise ConfigError(key, attrgetter(key)(config), f"expected {expected}")
