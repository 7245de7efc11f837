"""A plan as OpenRLHF's flags: `python -m openrlhf.cli.train_ppo_ray`, for 0.11.2 (dotted names).

Sources: the repository's examples/scripts (train_ppo_ray_hybrid_engine.sh and its siblings) and docs (hybrid_engine: the
three flags of the shared engine) of 0.10 and later; `max_tokens_per_gpu`, `dynamic_batch_enable`: its script for ROCm.
tests/cli/test_peer_flags.py has the argument list of 0.11.2 judge these; the command itself has not been started.
One ZeRO stage, one micro-batch and one sleep mode serve all models there; where the plan's differ, the safe one is taken
(the smaller micro-batch; sleep if any model offloads; recomputation if any recomputes), and a comment says so.
"""

from __future__ import annotations

from nereus.report.exports.peer import TRAINED, Export, check_even, check_plain_shards

GROUPS = {"actor_train": "actor", "critic_train": "critic", "reference_infer": "ref"}


def flags(export: Export) -> str:
    """The command's flags. Raises ConfigError, naming the part of the plan, for what OpenRLHF cannot do."""
    check_even(export, "OpenRLHF")
    check_plain_shards(export, "OpenRLHF")
    actor = export.choice("actor_train")
    trained = [name for name in TRAINED if name in export.trained]
    choices = [export.choice(name) for name in trained]
    lines = [f"# plan: {export.plan}"]
    if len({choice.micro_batch for choice in choices}) > 1:
        lines.append("# one micro-batch serves actor and critic: the smaller of the plan's")
    words = [*_groups(export), *_engines(export), *_batch(export)]
    words.append(f"--train.max_tokens_per_gpu {min(export.packed_tokens(name) for name in trained)}")
    words += ["--train.dynamic_batch_enable", "--ds.packing_samples"]
    words.append(f"--ds.zero_stage {3 if actor.sharding == 'full' else 2}")
    words.append("--ds.param_dtype bf16")
    if any(export.choice(name).keep != "all" for name in export.trained):
        words.append("--ds.enable_sleep")
    if any(choice.recompute != "none" for choice in choices):
        words.append("--actor.gradient_checkpointing_enable")
    return "\n".join([*lines, " \\\n  ".join(words)])


def _groups(export: Export) -> list[str]:
    """--MODEL.num_nodes, --MODEL.num_gpus_per_node: with --train.colocate_all they must be equal."""
    nodes, slots = export.nodes
    words = ["--train.colocate_all"]
    for name in export.trained:
        words += [f"--{GROUPS[name]}.num_nodes {nodes}", f"--{GROUPS[name]}.num_gpus_per_node {slots}"]
    words.append(f"--actor.model_name_or_path {export.model_path}")
    if "critic_train" in export.trained:
        words.append(f"--critic.model_name_or_path {export.model_path}")
    return words


def _engines(export: Export) -> list[str]:
    """--vllm.*: engines x their TP must be the actor's GPUs where all share."""
    layout = export.choice("actor_generate").layout
    return [
        f"--vllm.num_engines {layout.dp}",
        f"--vllm.tensor_parallel_size {layout.tp}",
        f"--vllm.gpu_memory_utilization {export.engine_share}",
        "--vllm.enable_sleep",
        "--vllm.sync_backend nccl",
    ]


def _batch(export: Export) -> list[str]:
    """--rollout.batch_size counts prompts, --train.batch_size samples of an optimizer step."""
    job = export.job
    estimator = "gae" if job.critic is not None else "group_norm"
    words = [
        f"--rollout.batch_size {export.prompts}",
        f"--rollout.n_samples_per_prompt {export.samples_per_prompt}",
        f"--rollout.max_new_tokens {int(job.longest_tokens - job.prompt_tokens)}",
        f"--data.max_len {int(job.longest_tokens)}",
        f"--train.batch_size {max(1, job.samples // job.mini_batches)}",
        f"--train.max_epochs {job.epochs}",
        f"--algo.advantage.estimator {estimator}",
    ]
    if job.reference is None:
        words.append("--algo.kl.init_coef 0")
    return words
