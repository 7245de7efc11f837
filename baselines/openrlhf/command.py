"""A Run as OpenRLHF's command line: `python -m openrlhf.cli.train_ppo_ray --flag value ...`, for OpenRLHF 0.11.2.

Needs nothing of OpenRLHF. Same model, data, batch, lengths and numbers of the algorithm as the Run; what OpenRLHF cannot
do as the Run says is a ConfigError, never left out. Where the plan's models share all GPUs this is its hybrid engine
(README, quick start): ZeRO-3, everything asleep while another works, half of a GPU's memory for an engine. Where they have
GPUs of their own it is the layout of examples/scripts/train_ppo_llama_ray.sh. `make baselines-check` has OpenRLHF's own
parser and its own assertions judge the command lines.

Not as in Nereus, because no flag says otherwise: prompts come in another order, a step's samples are shuffled between
mini-batches, KL terms are cut at 10, and whitening divides by the biased deviation.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from baselines.refusals import GPUS_PER_NODE, check_even, check_job, check_ppo
from nereus.config import StageConfig
from nereus.errors import ConfigError
from nereus.experiment import Run

PROGRAM = ("python", "-m", "openrlhf.cli.train_ppo_ray")
REWARD_FILE = Path(__file__).with_name("reward.py")
INPUT_KEY, LABEL_KEY = "prompt", "label"
WANDB_KEY = "environment"
"""OpenRLHF logs to W&B only where a key stands on its command line; the one in WANDB_API_KEY is what it then uses."""
SHARED_MEMORY, OWN_MEMORY = 0.5, 0.95
"""An engine's share of a GPU: the quick start's where all share, the flag's default on GPUs of its own."""
TRAINED = ("actor_train", "critic_train", "reference_infer")

Value = str | float | tuple[float, ...] | None
Flags = dict[str, Value]
"""A flag without its dashes, and its value or values; None for one that only stands there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """How many GPUs actor (with the reference), critic and engines have; `shared`: all of them the same, all there are."""

    shared: bool
    actor_slots: int
    critic_slots: int
    engine_slots: int


def argv(run: Run, data_folder: str = "") -> tuple[str, ...]:
    """The command line that carries `run` out in OpenRLHF, with DeepSpeed training and vLLM sampling.

    `data_folder` (default: runs/openrlhf/RUN_ID) has the train.jsonl that `baselines.openrlhf.data` writes. Raises
    ConfigError for what OpenRLHF cannot express: a model made from the seed, a pipeline, a change of layout, ...
    """
    check_job(run, "openrlhf")
    _check_algorithm(run)
    groups = groups_of(run)
    _check_batch(run, groups)
    flags: Flags = {
        **_data(run, data_folder or default_data_folder(run)),
        **_algorithm(run),
        **_optimizers(run),
        **_engines(run, groups),
        **_layout(run, groups),
        **_batches(run),
        **_records(run),
    }
    return (*PROGRAM, *(word for flag, value in flags.items() for word in _words(flag, value)))


def default_data_folder(run: Run) -> str:
    """Where a run's prompts are, and what OpenRLHF writes."""
    return f"runs/openrlhf/{run.run_id}"


def groups_of(run: Run) -> Groups:
    """The GPUs of each group of models, as the plan has them. Raises ConfigError for a plan that is not like that."""
    actor = _slots(run, "actor_train")
    if _slots(run, "reference_infer") != actor:
        raise ConfigError("plan.reference_infer", _degrees(run, "reference_infer"), "expected plan.actor_train's slots")
    critic, engines = _slots(run, "critic_train"), _slots(run, "actor_generate")
    gpus = tuple(range(run.fleet.slots))
    shared = actor == critic == engines == gpus
    if not shared and actor + critic + engines != gpus:
        expected = (
            f"expected all {len(gpus)} slots for every stage, or actor, critic and engines on slots of their own in this"
            " order: OpenRLHF places its groups itself and leaves no GPU idle"
        )
        raise ConfigError("plan", [len(actor), len(critic), len(engines)], expected)
    for name in (*TRAINED, "actor_generate"):
        _check_stage(run, name)
    return Groups(shared=shared, actor_slots=len(actor), critic_slots=len(critic), engine_slots=len(engines))


def _data(run: Run, folder: str) -> Flags:
    """A rollout has `rollout.batch_size` prompts; the Run's own scoring function stands in `reward.py`."""
    data = run.workload.data
    return {
        "data.prompt_dataset": f"{folder}/train.jsonl",
        "data.input_key": INPUT_KEY,
        "data.label_key": LABEL_KEY,
        "data.apply_chat_template": None,
        "data.max_len": data.max_prompt_tokens + data.max_response_tokens,
        "rollout.max_new_tokens": data.max_response_tokens,
        "rollout.batch_size": data.prompts_per_step,
        "rollout.n_samples_per_prompt": data.samples_per_prompt,
        "rollout.temperature": run.workload.rollout.temperature,
        "train.num_episodes": 1,
        "train.seed": run.seed,
        "reward.remote_url": str(REWARD_FILE),
        "actor.model_name_or_path": run.workload.model_path,
        "critic.model_name_or_path": run.workload.model_path,
    }


def _algorithm(run: Run) -> Flags:
    """PPO with GAE; KL to the reference is in the reward, by the k1 estimate, as in Nereus."""
    a = run.workload.algorithm
    flags: Flags = {
        "algo.advantage.estimator": "gae",
        "algo.advantage.gamma": a.gamma,
        "algo.advantage.lambd": a.lam,
        "algo.kl.init_coef": a.kl_coef,
        "algo.kl.estimator": "k1",
        "actor.eps_clip_low_high": (a.clip_ratio_low, a.clip_ratio_high),
        "actor.entropy_coef": a.entropy_coef,
        "actor.loss_agg_mode": a.loss_agg_mode,
        "critic.value_clip": a.value_clip,
        "train.max_epochs": a.epochs,
    }
    if a.dual_clip_ratio:
        flags["actor.dual_clip"] = a.dual_clip_ratio
    return flags


def _optimizers(run: Run) -> Flags:
    """Adam with a constant rate; OpenRLHF's own default is a cosine with a warm-up."""
    a = run.workload.algorithm
    flags: Flags = {}
    for model, lr in (("actor", a.actor_lr), ("critic", a.critic_lr)):
        flags[f"{model}.optim"] = "adam"
        flags[f"{model}.adam.lr"] = lr
        flags[f"{model}.adam.betas"] = (a.adam_beta1, a.adam_beta2)
        flags[f"{model}.adam.eps"] = a.adam_eps
        flags[f"{model}.adam.weight_decay"] = a.weight_decay
        flags[f"{model}.lr_scheduler"] = "constant"
        flags[f"{model}.lr_warmup_ratio"] = 0
        flags[f"{model}.max_norm"] = a.clip_grad
    return flags


def _engines(run: Run, groups: Groups) -> Flags:
    """vLLM engines of the plan's TP. Their cache is what the share of memory leaves: there is no flag for its bytes."""
    tp = run.plan.actor_generate.tp
    flags: Flags = {
        "vllm.num_engines": groups.engine_slots // tp,
        "vllm.tensor_parallel_size": tp,
        "vllm.gpu_memory_utilization": SHARED_MEMORY if groups.shared else OWN_MEMORY,
        "vllm.sync_backend": "nccl",
    }
    if groups.shared:
        flags |= {"vllm.enable_sleep": None, "vllm.enforce_eager": None}
    return flags


def _layout(run: Run, groups: Groups) -> Flags:
    """Nodes and GPUs of each group; every model fully sharded over its group."""
    flags: Flags = {}
    for model, gpus in (("actor", groups.actor_slots), ("ref", groups.actor_slots), ("critic", groups.critic_slots)):
        flags[f"{model}.num_nodes"] = max(1, gpus // GPUS_PER_NODE)
        flags[f"{model}.num_gpus_per_node"] = min(gpus, GPUS_PER_NODE)
    if groups.shared:
        flags |= {"train.colocate_all": None, "ds.enable_sleep": None}
    else:
        flags |= {"train.colocate_actor_ref": None}
    return {
        **flags,
        "ds.zero_stage": 3,
        "ds.param_dtype": {"bfloat16": "bf16", "float16": "fp16"}[run.workload.model.dtype],
        "actor.gradient_checkpointing_enable": None,
    }


def _batches(run: Run) -> Flags:
    """An optimizer step's samples; micro-batches are packed by tokens, as many as the plan's have at their longest."""
    w, plan = run.workload, run.plan
    longest_tokens = w.data.max_prompt_tokens + w.data.max_response_tokens
    return {
        "train.batch_size": _mini_batch_samples(run),
        "train.dynamic_batch_enable": None,
        "ds.packing_samples": None,
        "train.max_tokens_per_gpu": plan.actor_train.micro_batch * longest_tokens,
        "rollout.max_tokens_per_gpu": plan.reference_infer.micro_batch * longest_tokens,
    }


def _records(run: Run) -> Flags:
    folder = default_data_folder(run)
    return {
        "ckpt.path": f"{folder}/checkpoints",
        "ckpt.output_dir": f"{folder}/model",
        "logger.wandb.key": WANDB_KEY,
        "logger.wandb.project": "nereus",
        "logger.wandb.group": run.experiment,
        "logger.wandb.run_name": run.run_id,
    }


def _check_algorithm(run: Run) -> None:
    a, dtype = run.workload.algorithm, run.workload.model.dtype
    check_ppo(run, "openrlhf")
    if a.loss_agg_mode != "token-mean":
        expected = "expected token-mean: OpenRLHF's critic knows no other, and Nereus's follows the actor"
        raise ConfigError("algorithm.loss_agg_mode", a.loss_agg_mode, expected)
    if 0 < a.dual_clip_ratio <= 1:
        raise ConfigError("algorithm.dual_clip_ratio", a.dual_clip_ratio, "expected 0 (off) or above 1")
    if dtype not in ("bfloat16", "float16"):
        raise ConfigError("workload.model.dtype", dtype, "expected bfloat16 or float16: OpenRLHF's ds.param_dtype")


def _check_batch(run: Run, groups: Groups) -> None:
    """DeepSpeed shares a mini-batch out in whole samples."""
    data, a = run.workload.data, run.workload.algorithm
    samples = data.prompts_per_step * data.samples_per_prompt
    if samples % a.mini_batches:
        expected = f"expected a divisor of a step's {samples} samples: OpenRLHF's mini-batches are equal"
        raise ConfigError("algorithm.mini_batches", a.mini_batches, expected)
    for name, gpus in (("actor_train", groups.actor_slots), ("critic_train", groups.critic_slots)):
        if _mini_batch_samples(run) % gpus:
            expected = f"expected a dp that divides a mini-batch's {_mini_batch_samples(run)} samples: DeepSpeed shares them out evenly"
            raise ConfigError(f"plan.{name}", _degrees(run, name), expected)


def _check_stage(run: Run, name: str) -> None:
    stage, key = _stage(run, name), f"plan.{name}"
    degrees, gpus = _degrees(run, name), len(_slots(run, name))
    check_even(stage, key, "OpenRLHF")
    if name == "actor_generate":
        if stage.pp != 1 or GPUS_PER_NODE % stage.tp:
            raise ConfigError(key, degrees, f"expected pp=1 and a tp that divides the {GPUS_PER_NODE} GPUs of a node")
        return
    if (stage.tp, stage.pp) != (1, 1):
        raise ConfigError(
            key, degrees, "expected tp=1 pp=1: ZeRO-3 shards every model over its GPUs, DeepSpeed has no pp here"
        )
    if gpus > GPUS_PER_NODE and gpus % GPUS_PER_NODE:
        raise ConfigError(key, degrees, f"expected at most {GPUS_PER_NODE} slots or a multiple of it: whole nodes")


def _mini_batch_samples(run: Run) -> int:
    data = run.workload.data
    return data.prompts_per_step * data.samples_per_prompt // run.workload.algorithm.mini_batches


def _slots(run: Run, name: str) -> tuple[int, ...]:
    """The slots that a stage is on: those stated, else the first."""
    stage = _stage(run, name)
    return tuple(range(stage.tp * stage.pp * stage.dp)) if stage.slots is None else stage.slots


def _stage(run: Run, name: str) -> StageConfig:
    return attrgetter(name)(run.plan)


def _degrees(run: Run, name: str) -> str:
    stage = _stage(run, name)
    return f"tp={stage.tp} pp={stage.pp} dp={stage.dp}"


def _words(flag: str, value: Value) -> tuple[str, ...]:
    if value is None:
        return (f"--{flag}",)
    return (f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,)))
