"""A plan as verl's settings: overrides of `python -m verl.trainer.main_ppo`, for verl 0.9.1.

Sources: verl/trainer/config of 0.9.1 (actor/actor.yaml, critic/critic.yaml, engine/fsdp.yaml, engine/megatron.yaml,
ref/ref.yaml, rollout/rollout.yaml, ppo_trainer.yaml); tests have verl's own parser judge what is written here, where its
environment is there. Left to the user: data files, reward function, rates, logging.
"""

from __future__ import annotations

from nereus.errors import ConfigError
from nereus.report.exports.peer import Export, Settings, Value, check_even, check_plain_shards, hydra

ACTOR, REFERENCE, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
MODEL_OF = {"actor_train": ACTOR, "critic_train": "critic", "reference_infer": REFERENCE}
FSDP_OF = {"actor_train": "fsdp_config", "critic_train": "fsdp", "reference_infer": "fsdp_config"}
"""Where each model's FSDP settings stand (dp_actor.yaml, dp_ref.yaml: fsdp_config; dp_critic.yaml: fsdp)."""


def flags(export: Export) -> str:
    """The command's end: engine and settings. Raises ConfigError, naming the part of the plan, for what verl cannot do."""
    check_even(export, "verl")
    full = export.choice("actor_train").sharding == "full"
    if export.choice("actor_generate").layout.ep > 1:
        raise ConfigError("plan.actor_generate", "ep", "expected 1: engines with spread experts are not exported")
    for name in export.trained:
        whole = export.choice(name).sharding == "full"
        if whole != full:
            expected = "expected the actor's sharding: one model engine serves all models in verl"
            raise ConfigError(f"plan.{name}.sharding", export.choice(name).sharding, expected)
    settings: dict[str, Value] = {
        **_batch(export),
        **_tokens(export),
        **_rollout(export),
        **(_fsdp(export) if full else _megatron(export)),
        **_trainer(export),
    }
    return f"model_engine={'dp' if full else 'megatron'} \\\n  {hydra(settings)}"


def _batch(export: Export) -> Settings:
    """data/legacy_data.yaml; algorithm.adv_estimator, use_kl_in_reward: ppo_trainer.yaml; use_kl_loss: actor.yaml.

    Batches and mini-batches count prompts: verl multiplies by rollout.n.
    """
    job, ppo = export.job, export.job.critic is not None
    if export.prompts % job.mini_batches:
        expected = f"expected a divisor of the batch of {export.prompts}: verl's mini-batches have whole prompts"
        raise ConfigError("--mini-batches", job.mini_batches, expected)
    settings: dict[str, Value] = {
        "data.train_batch_size": export.prompts,
        "data.max_prompt_length": int(job.prompt_tokens),
        "data.max_response_length": int(job.longest_tokens - job.prompt_tokens),
        "algorithm.adv_estimator": "gae" if ppo else "grpo",
        "algorithm.use_kl_in_reward": ppo and job.reference is not None,
        f"{ACTOR}.use_kl_loss": not ppo and job.reference is not None,
        f"{ACTOR}.ppo_mini_batch_size": export.prompts // job.mini_batches,
        f"{ACTOR}.ppo_epochs": job.epochs,
        "actor_rollout_ref.model.path": export.model_path,
    }
    if ppo:
        settings["critic.model.path"] = export.model_path
    return settings


def _tokens(export: Export) -> Settings:
    """use_dynamic_bsz packs by tokens (actor.yaml, critic.yaml, ref.yaml); log-probabilities have a budget of their own."""
    settings: dict[str, Value] = {
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": export.packed_tokens("actor_train"),
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": export.packed_tokens("actor_train"),
    }
    if "critic_train" in export.trained:
        settings["critic.ppo_max_token_len_per_gpu"] = export.packed_tokens("critic_train")
    if "reference_infer" in export.trained:
        settings[f"{REFERENCE}.log_prob_max_token_len_per_gpu"] = export.packed_tokens("reference_infer")
    return settings


def _rollout(export: Export) -> Settings:
    """rollout.yaml: free_cache_engine puts the engine to sleep; verl makes as many engines as fit on all slots."""
    return {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": export.samples_per_prompt,
        f"{ROLLOUT}.tensor_model_parallel_size": export.choice("actor_generate").layout.tp,
        f"{ROLLOUT}.gpu_memory_utilization": export.engine_share,
        f"{ROLLOUT}.free_cache_engine": True,
    }


def _fsdp(export: Export) -> Settings:
    """engine/fsdp.yaml: strategy, param_offload, optimizer_offload; hf_model.yaml: enable_gradient_checkpointing."""
    check_plain_shards(export, "verl")
    settings: dict[str, Value] = {}
    for name in export.trained:
        choice, model, part = export.choice(name), MODEL_OF[name], FSDP_OF[name]
        settings[f"{model}.strategy"] = "fsdp2"
        settings[f"{model}.{part}.param_offload"] = choice.keep == "nothing"
        if name != "reference_infer":
            settings[f"{model}.{part}.optimizer_offload"] = choice.keep != "all"
            owner = "actor_rollout_ref.model" if name == "actor_train" else "critic.model"
            settings[f"{owner}.enable_gradient_checkpointing"] = choice.recompute == "full"
    return settings


def _megatron(export: Export) -> Settings:
    """engine/megatron.yaml: degrees, offloading, use_distributed_optimizer, override_transformer_config.recompute_*."""
    settings: dict[str, Value] = {}
    for name in export.trained:
        choice, model = export.choice(name), f"{MODEL_OF[name]}.megatron"
        layout = choice.layout
        settings[f"{model}.tensor_model_parallel_size"] = layout.tp
        settings[f"{model}.pipeline_model_parallel_size"] = layout.pp
        settings[f"{model}.context_parallel_size"] = layout.cp
        settings[f"{model}.expert_model_parallel_size"] = layout.ep
        if layout.ep > 1:
            settings[f"{model}.expert_tensor_parallel_size"] = layout.expert_tp
        settings[f"{model}.param_offload"] = choice.keep == "nothing"
        if name == "reference_infer":
            continue
        settings[f"{model}.optimizer_offload"] = choice.keep != "all"
        settings[f"{model}.use_distributed_optimizer"] = choice.sharding == "optimizer"
        if choice.recompute not in ("none", "full"):
            raise ConfigError(f"plan.{name}.recompute", choice.recompute, "expected none or full for verl")
        if choice.recompute == "full":
            settings[f"{model}.override_transformer_config.recompute_granularity"] = "full"
            settings[f"{model}.override_transformer_config.recompute_method"] = "uniform"
            settings[f"{model}.override_transformer_config.recompute_num_layers"] = 1
    return settings


def _trainer(export: Export) -> Settings:
    """ppo_trainer.yaml."""
    nodes, slots = export.nodes
    return {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": slots}
