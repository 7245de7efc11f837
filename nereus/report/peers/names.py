"""verl's and OpenRLHF's metric names and ours. Source: the code of each version, at the places that are named."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.report.peers.naming import Naming, told
from nereus.report.summary import Row

_SUMMARY = "(mean|max|min)"
VERL = Naming(
    system="verl",
    version="0.9.1",
    step="training/global_step",
    # trainer/ppo/ray_trainer.py fit, trainer/ppo/metric_utils.py, workers/utils/losses.py, workers/engine_workers.py,
    # trainer/ppo/rollout_corr_helper.py, utils/debug/metrics.py, utils/seqlen_balancing.py
    same=(
        r"timing_s/[a-z0-9_/]+",
        r"timing_per_token_ms/[a-z0-9_]+",
        r"perf/(total_num_tokens|time_per_step|throughput|mfu/[a-z_]+)",
        r"(actor/|critic/)?perf/(max_memory_allocated|max_memory_reserved|cpu_memory_used)_gb",
        rf"critic/(score|rewards|advantages|returns|values)/{_SUMMARY}",
        r"critic/(vf_loss|vf_clipfrac|vf_explained_var|vpred_mean|grad_norm|lr|loss)",
        r"actor/(entropy|entropy_loss|pg_loss|pg_clipfrac|pg_clipfrac_lower|ppo_kl|grad_norm|lr|loss|kl_loss|kl_coef)",
        r"actor/reward_kl_penalty_coeff",
        rf"(response_length|response_length_non_aborted|prompt_length)/({_SUMMARY}|clip_ratio)",
        r"response/aborted_ratio",
        rf"(num_turns|tool_call_counts)/{_SUMMARY}",
        r"global_seqlen/[a-z_]+",
        r"rollout_corr/[a-z0-9_]+",
        r"training/(epoch|rollout_probs_diff_(valid|max|mean|std)|rollout_actor_probs_pearson_corr)",
        r"variance_proxy/[a-z0-9_]+",
        r"(val-core|val-aux)/.+",
    ),
    renamed={
        "actor/reward_kl_penalty": "actor/ref_kl",  # apply_kl_penalty: the mean of k1 to the reference
        "timing_s/reshard": "timing_s/update_weights",  # of versions before it had this name
        "timing_s/param_sync": "timing_s/update_weights",
    },
)

AGAIN = "the rollout's own statistic, {}, once more, as the mean of micro-batches"


def _of_openrlhf(row: Row) -> Mapping[str, float]:
    """Tokens and prompt lengths: `total_length` and `response_length` are means over the samples, in tokens."""
    more: dict[str, float] = {}
    if told(row, ["total_length", "rollout/num_samples"]):
        more["perf/total_num_tokens"] = row["total_length"] * row["rollout/num_samples"]
    if told(row, ["total_length", "response_length"]):
        more["prompt_length/mean"] = row["total_length"] - row["response_length"]
    if told(row, ["timing/step_total"]):
        more["perf/time_per_step"] = row["timing/step_total"]
    return more


OPENRLHF = Naming(
    system="openrlhf",
    version="0.10",
    step="global_step",
    # trainer/ppo_trainer.py (train_step, fit, _compute_rollout_stats), trainer/ray/ppo_actor.py, trainer/ray/ppo_critic.py
    # (training_step), trainer/ppo_utils/experience_maker.py and samples_generator.py (info)
    renamed={
        "timing/step_total": "timing_s/step",
        "timing/generation": "timing_s/gen",
        "timing/make_experience": "timing_s/make_experience",  # reward, old_log_prob, ref, values and adv together
        "timing/ppo_train": "timing_s/ppo_train",  # update_critic and update_actor together
        "timing/broadcast": "timing_s/update_weights",
        "rollout/reward_mean": "critic/score/mean",
        "rollout/reward_std": "critic/score/std",
        "rollout/num_samples": "critic/score/count",
        "rollout/response_length_mean": "response_length/mean",
        "rollout/truncated_rate": "response_length/clip_ratio",
        "return": "critic/rewards/mean",  # a sample's sum of rewards with its KL terms
        "policy_loss": "actor/pg_loss",
        "ppo_clip_ratio": "actor/pg_clipfrac",
        "ppo_kl": "actor/ppo_kl",
        "entropy_loss": "actor/entropy",
        "kl": "actor/ref_kl",
        "actor_lr": "actor/lr",
        "actor_grad_norm": "actor/grad_norm",
        "critic_loss": "critic/vf_loss",
        "values": "critic/vpred_mean",
        "critic_lr": "critic/lr",
        "critic_grad_norm": "critic/grad_norm",
        "vllm_kl": "rollout_corr/kl",
    },
    unplaced={
        "reward": AGAIN.format("rollout/reward_mean"),
        "score": AGAIN.format("rollout/reward_mean"),
        "response_length": AGAIN.format("rollout/response_length_mean"),
        "truncated": AGAIN.format("rollout/truncated_rate"),
        "total_length": "makes perf/total_num_tokens and prompt_length/mean",
        "logprobs_diff": "kl before it is cut at 10",
        "response_clip_ratio": "the share of samples as long as prompt and response may be together",
        "group_reward_std": "nothing of Nereus is grouped by prompts",
        "is_filter_ratio": "the share that OpenRLHF's importance sampling drops; Nereus has none",
        "dynamic_filtering_pass_rate": "the share of prompts that OpenRLHF's filter leaves; Nereus has none",
        **dict.fromkeys(
            ("generated_samples/nrows", "generated_samples/ncols", "generated_samples/size"),
            "the size of a table of texts",
        ),
    },
    derive=_of_openrlhf,
)
