"""A Run as verl's command line: `python -m verl.trainer.main_ppo key=value ...`, for verl 0.9.1.

Needs nothing of verl. Same model, data, batch, lengths and numbers of the algorithm as the Run; what verl cannot do as
the Run says is a ConfigError, never left out. The keys are those of verl's trainer/config; `make baselines-check` has
verl's own parser judge them.
"""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Literal

from baselines.refusals import GPUS_PER_NODE, check_even, check_job, check_ppo
from nereus.config import StageConfig
from nereus.errors import ConfigError
from nereus.experiment import Run

Engine = Literal["megatron", "fsdp"]

PROGRAM = ("python", "-m", "verl.trainer.main_ppo")
TRAINED = ("actor_train", "critic_train", "reference_infer")
REWARD_FILE = Path(__file__).with_name("reward.py")
ACTOR, REFERENCE, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"

Value = str | float | bool | list[float] | list[str]
Settings = dict[str, Value]


def argv(run: Run, engine: Engine = "megatron", data_folder: str = "") -> tuple[str, ...]:
    """The command line that carries `run` out in verl, with Megatron or FSDP training and vLLM sampling.

    `data_folder` (default: runs/verl/RUN_ID) has the train.parquet that `baselines.verl.data` writes. Raises ConfigError for what verl cannot
    express: a model made from the seed, a change of layout, a supervised warm-up, a plan that leaves GPUs idle, ...
    """
    check_job(run, "verl")
    _check_algorithm(run)
    _check_plan(run, engine)
    settings: Settings = {
        **_data(run, data_folder or default_data_folder(run)),
        **_model(run),
        **_algorithm(run),
        **_optimizer(run, engine),
        **_rollout(run),
        **_batches(run),
        **(_megatron(run) if engine == "megatron" else _fsdp(run)),
        **_trainer(run),
    }
    return (*PROGRAM, f"model_engine={'megatron' if engine == 'megatron' else 'dp'}", *map(_override, settings.items()))


def default_data_folder(run: Run) -> str:
    """Where a run's prompts are; they follow from its task and seed."""
    return f"runs/verl/{run.run_id}"


def _data(run: Run, folder: str) -> Settings:
    """Prompts in the Run's order; a step's are `train_batch_size`. Its own scoring function stands in `reward.py`."""
    data = run.workload.data
    return {
        "data.train_files": f"{folder}/train.parquet",
        "data.val_files": f"{folder}/train.parquet",  # must be named; nothing is validated
        "data.train_batch_size": data.prompts_per_step,
        "data.max_prompt_length": data.max_prompt_tokens,
        "data.max_response_length": data.max_response_tokens,
        "data.shuffle": False,
        "data.seed": run.seed,
        "reward.custom_reward_function.path": str(REWARD_FILE),
        "reward.custom_reward_function.name": "compute_score",
    }


def _model(run: Run) -> Settings:
    return dict.fromkeys(("actor_rollout_ref.model.path", "critic.model.path"), run.workload.model_path)


def _algorithm(run: Run) -> Settings:
    """PPO with GAE; KL to the reference is in the reward, by the k1 estimate, as in Nereus. The critic takes over the
    actor's epochs, mini-batch and aggregation by verl's own interpolation.
    """
    a = run.workload.algorithm
    settings: Settings = {
        "algorithm.adv_estimator": "gae",
        "algorithm.gamma": a.gamma,
        "algorithm.lam": a.lam,
        "algorithm.use_kl_in_reward": a.kl_coef > 0,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.kl_ctrl.kl_coef": a.kl_coef,
        f"{ACTOR}.use_kl_loss": False,
        f"{ACTOR}.clip_ratio": a.clip_ratio_low,
        f"{ACTOR}.clip_ratio_low": a.clip_ratio_low,
        f"{ACTOR}.clip_ratio_high": a.clip_ratio_high,
        f"{ACTOR}.clip_ratio_c": a.dual_clip_ratio,
        f"{ACTOR}.entropy_coeff": a.entropy_coef,
        f"{ACTOR}.loss_agg_mode": a.loss_agg_mode,
        f"{ACTOR}.ppo_epochs": a.epochs,
        f"{ACTOR}.shuffle": False,
        "critic.cliprange_value": a.value_clip,
    }
    if a.loss_agg_mode == "seq-mean-token-sum-norm":
        settings[f"{ACTOR}.loss_scale_factor"] = run.workload.data.max_response_tokens
    return settings


def _optimizer(run: Run, engine: Engine) -> Settings:
    """Adam with a constant rate; epsilon has no key of its own, the engine's optimizer takes it."""
    a = run.workload.algorithm
    settings: Settings = {}
    for optimizer, lr in ((f"{ACTOR}.optim", a.actor_lr), ("critic.optim", a.critic_lr)):
        settings[f"{optimizer}.lr"] = lr
        settings[f"{optimizer}.weight_decay"] = a.weight_decay
        settings[f"{optimizer}.betas"] = [a.adam_beta1, a.adam_beta2]
        settings[f"{optimizer}.clip_grad"] = a.clip_grad
        epsilon = "adam_eps" if engine == "megatron" else "eps"
        settings[f"+{optimizer}.override_optimizer_config.{epsilon}"] = a.adam_eps
    return settings


def _rollout(run: Run) -> Settings:
    """vLLM engines of the plan's TP; verl makes as many as fit on all GPUs."""
    w = run.workload
    return {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": w.data.samples_per_prompt,
        f"{ROLLOUT}.temperature": w.rollout.temperature,
        f"{ROLLOUT}.dtype": w.model.dtype,
        f"{ROLLOUT}.seed": run.seed,
        f"{ROLLOUT}.tensor_model_parallel_size": run.plan.actor_generate.tp,
        f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": w.rollout.kv_cache_bytes,
    }


def _batches(run: Run) -> Settings:
    """verl counts a mini-batch in prompts, a micro-batch in samples of a replica."""
    w, plan = run.workload, run.plan
    return {
        f"{ACTOR}.ppo_mini_batch_size": w.data.prompts_per_step // w.algorithm.mini_batches,
        f"{ACTOR}.use_dynamic_bsz": False,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": plan.actor_train.micro_batch,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": plan.actor_train.micro_batch,
        f"{REFERENCE}.log_prob_micro_batch_size_per_gpu": plan.reference_infer.micro_batch,
        "critic.ppo_micro_batch_size_per_gpu": plan.critic_train.micro_batch,
    }


def _megatron(run: Run) -> Settings:
    """Degrees of each model; data parallelism is what they leave of the GPUs."""
    settings: Settings = {}
    for model, name in ((ACTOR, "actor_train"), (REFERENCE, "reference_infer"), ("critic", "critic_train")):
        stage = _stage(run, name)
        settings[f"{model}.megatron.tensor_model_parallel_size"] = stage.tp
        settings[f"{model}.megatron.pipeline_model_parallel_size"] = stage.pp
        settings[f"{model}.megatron.dtype"] = run.workload.model.dtype
        settings[f"{model}.megatron.seed"] = run.seed
        if model != REFERENCE:
            settings[f"{model}.megatron.use_distributed_optimizer"] = stage.distributed_optimizer
    return settings


def _fsdp(run: Run) -> Settings:
    """Every model sharded over all GPUs; masters in fp32, computation in the model's type."""
    settings: Settings = {}
    for model, part in ((ACTOR, "fsdp_config"), (REFERENCE, "fsdp_config"), ("critic", "fsdp")):
        settings[f"{model}.strategy"] = "fsdp2"
        settings[f"{model}.{part}.dtype"] = run.workload.model.dtype
        settings[f"{model}.{part}.seed"] = run.seed
    return settings


def _trainer(run: Run) -> Settings:
    gpus = run.fleet.slots
    return {
        "trainer.nnodes": max(1, gpus // GPUS_PER_NODE),
        "trainer.n_gpus_per_node": min(gpus, GPUS_PER_NODE),
        "trainer.total_training_steps": run.workload.steps,
        "trainer.total_epochs": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.logger": ["console", "file", "wandb"],
        "trainer.project_name": "nereus",
        "trainer.experiment_name": run.run_id,
    }


def _check_algorithm(run: Run) -> None:
    a, data = run.workload.algorithm, run.workload.data
    check_ppo(run, "verl")
    if a.dual_clip_ratio <= 1:
        raise ConfigError("algorithm.dual_clip_ratio", a.dual_clip_ratio, "expected above 1: verl cannot turn it off")
    if data.prompts_per_step % a.mini_batches:
        expected = f"expected a divisor of data.prompts_per_step = {data.prompts_per_step}: verl's mini-batches have whole prompts"
        raise ConfigError("algorithm.mini_batches", a.mini_batches, expected)


def _check_plan(run: Run, engine: Engine) -> None:
    actor = run.plan.actor_train
    for name in (*TRAINED, "actor_generate"):
        _check_stage(run, name)
    if engine == "fsdp" and run.workload.model.dtype != "bfloat16":
        expected = "expected bfloat16: verl's FSDP computes in it whatever fsdp_config.dtype says; or choose the Megatron engine"
        raise ConfigError("workload.model.dtype", run.workload.model.dtype, expected)
    for name in TRAINED:
        stage, key = _stage(run, name), f"plan.{name}"
        degrees = f"tp={stage.tp} pp={stage.pp}"
        if engine == "fsdp" and (stage.tp, stage.pp) != (1, 1):
            raise ConfigError(key, degrees, "expected tp=1 pp=1: FSDP has neither; or choose the Megatron engine")
        if (stage.tp, stage.pp) != (actor.tp, actor.pp):
            expected = f"expected plan.actor_train's tp={actor.tp} pp={actor.pp}: verl's workers share one set of process groups"
            raise ConfigError(key, degrees, expected)


def _check_stage(run: Run, name: str) -> None:
    """verl cuts every model evenly over all GPUs of the job, in their order."""
    stage, key, gpus = _stage(run, name), f"plan.{name}", run.fleet.slots
    degrees = f"tp={stage.tp} pp={stage.pp} dp={stage.dp}"
    if stage.tp * stage.pp * stage.dp != gpus:
        raise ConfigError(key, degrees, f"expected tp * pp * dp = fleet.slots = {gpus}: verl leaves no GPU idle")
    if stage.slots is not None and stage.slots != tuple(range(gpus)):
        raise ConfigError(f"{key}.slots", list(stage.slots), "expected none or all in order: verl places ranks itself")
    check_even(stage, key, "verl")
    if name == "actor_generate" and (stage.pp != 1 or GPUS_PER_NODE % stage.tp):
        raise ConfigError(key, degrees, f"expected pp=1 and a tp that divides the {GPUS_PER_NODE} GPUs of a node")


def _stage(run: Run, name: str) -> StageConfig:
    return attrgetter(name)(run.plan)


def _override(setting: tuple[str, Value]) -> str:
    key, value = setting
    if isinstance(value, list):
        return f"{key}=[{','.join(map(str, value))}]"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"
