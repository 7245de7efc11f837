"""A plan as NeMo-RL's overrides: `examples/run_grpo.py --config examples/configs/grpo_math_1B.yaml key=value ...`.

Source of every key: examples/configs/grpo_math_1B.yaml (NeMo-RL 0.4 and later): grpo, policy.{train_*,logprob_*,
max_total_sequence_length,sequence_packing}, policy.megatron_cfg, policy.dtensor_cfg, policy.generation.{vllm_cfg,
colocated}, cluster. tests/cli/test_peer_flags.py compares these with that file's keys; its own loader has not judged them.
The policy's workers give the reference's log-probabilities too, with the reference's weights kept in host memory
meanwhile, so both are cut alike.
"""

from __future__ import annotations

from nereus.errors import ConfigError
from nereus.report.exports.peer import Export, Settings, Value, check_even, check_plain_shards, hydra


def flags(export: Export) -> str:
    """The overrides. Raises ConfigError, naming the part of the plan, for what NeMo-RL cannot do."""
    if export.job.critic is not None:
        raise ConfigError("--algo", "ppo", "expected grpo: NeMo-RL's configuration here has no critic")
    check_even(export, "NeMo-RL")
    actor = export.choice("actor_train")
    if actor.keep == "weights":
        expected = "expected all or nothing: NeMo-RL moves the whole policy out of the engine's way"
        raise ConfigError("plan.actor_train.keep", actor.keep, expected)
    engine = _dtensor(export) if actor.sharding == "full" else _megatron(export)
    settings: dict[str, Value] = {**_batch(export), **engine, **_generation(export), **_cluster(export)}
    return hydra(settings)


def _batch(export: Export) -> Settings:
    """Micro-batches are packed up to their tokens; the micro-batch size states how many of the longest samples those are."""
    job = export.job
    settings: dict[str, Value] = {
        "grpo.num_prompts_per_step": export.prompts,
        "grpo.num_generations_per_prompt": export.samples_per_prompt,
        "policy.model_name": export.model_path,
        "policy.train_global_batch_size": max(1, job.samples // job.mini_batches),
        "policy.max_total_sequence_length": int(job.longest_tokens),
        "policy.train_micro_batch_size": 1,
        "policy.logprob_batch_size": 1,
        "policy.sequence_packing.enabled": True,
        "policy.sequence_packing.train_mb_tokens": export.packed_tokens("actor_train"),
        "policy.sequence_packing.logprob_mb_tokens": export.packed_tokens("actor_train"),
    }
    if job.reference is None:
        settings["loss_fn.reference_policy_kl_penalty"] = 0
    return settings


def _dtensor(export: Export) -> Settings:
    """policy.dtensor_cfg: FSDP2 over all ranks."""
    check_plain_shards(export, "NeMo-RL")
    choice = export.choice("actor_train")
    return {
        "policy.dtensor_cfg.enabled": True,
        "policy.megatron_cfg.enabled": False,
        "policy.dtensor_cfg.tensor_parallel_size": choice.layout.tp,
        "policy.dtensor_cfg.context_parallel_size": choice.layout.cp,
        "policy.dtensor_cfg.activation_checkpointing": choice.recompute == "full",
    }


def _megatron(export: Export) -> Settings:
    """policy.megatron_cfg: degrees, distributed optimizer, recomputation."""
    choice = export.choice("actor_train")
    layout = choice.layout
    return {
        "policy.dtensor_cfg.enabled": False,
        "policy.megatron_cfg.enabled": True,
        "policy.megatron_cfg.tensor_model_parallel_size": layout.tp,
        "policy.megatron_cfg.pipeline_model_parallel_size": layout.pp,
        "policy.megatron_cfg.context_parallel_size": layout.cp,
        "policy.megatron_cfg.expert_model_parallel_size": layout.ep,
        "policy.megatron_cfg.expert_tensor_parallel_size": layout.expert_tp,
        "policy.megatron_cfg.sequence_parallel": layout.tp > 1,
        "policy.megatron_cfg.optimizer.use_distributed_optimizer": choice.sharding == "optimizer",
        "policy.megatron_cfg.activation_checkpointing": choice.recompute == "full",
        "policy.make_sequence_length_divisible_by": layout.tp * (2 * layout.cp if layout.cp > 1 else 1),
    }


def _generation(export: Export) -> Settings:
    """policy.generation: engines of one TP on the policy's own slots."""
    return {
        "policy.generation.backend": "vllm",
        "policy.generation.colocated.enabled": True,
        "policy.generation.vllm_cfg.tensor_parallel_size": export.choice("actor_generate").layout.tp,
        "policy.generation.vllm_cfg.gpu_memory_utilization": export.engine_share,
    }


def _cluster(export: Export) -> Settings:
    nodes, slots = export.nodes
    return {"cluster.num_nodes": nodes, "cluster.gpus_per_node": slots}
