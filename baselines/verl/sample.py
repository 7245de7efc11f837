"""A sample of verl's logs, made by verl's own logging code; runs in verl's environment, without Nereus.

`build/verl/env/bin/python baselines/verl/sample.py FOLDER` writes console.log and file.jsonl to FOLDER. Three steps on made-up
tokens: every metric comes from the function from which verl's trainer (RayPPOTrainer.fit, and the workers that it asks) has
it, and its `Tracking` writes them by its console and file loggers. No model is trained: log-probabilities and values are
random, norms and memory are those of small tensors on this machine's CPU, and the phases last as long as they last here. The numbers are
nobody's performance; tests/baselines/samples has what this wrote.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from verl import DataProto  # pyright: ignore[reportAttributeAccessIssue]
from verl.trainer.ppo import metric_utils, ray_trainer  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.core_algos import (  # pyright: ignore[reportMissingImports]
    FixedKLController,
    agg_loss,
    compute_policy_loss_vanilla,
    compute_value_loss,
)
from verl.trainer.ppo.rollout_corr_helper import (  # pyright: ignore[reportMissingImports]
    compute_rollout_correction_and_add_to_batch,
)
from verl.utils.debug import marked_timer  # pyright: ignore[reportMissingImports]
from verl.utils.debug.metrics import calculate_debug_metrics  # pyright: ignore[reportMissingImports]
from verl.utils.metric import reduce_metrics  # pyright: ignore[reportMissingImports]
from verl.utils.py_functional import rename_dict  # pyright: ignore[reportMissingImports]
from verl.utils.torch_functional import masked_mean  # pyright: ignore[reportMissingImports]
from verl.utils.tracking import Tracking  # pyright: ignore[reportMissingImports]
from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]

STEPS, SAMPLES, PROMPT, RESPONSE, GPUS = 3, 16, 8, 12, 8
GIB = 1024**3


def main() -> None:
    """Writes the sample to the folder that is named."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["VERL_FILE_LOGGER_PATH"] = str(folder / "file.jsonl")
    torch.manual_seed(1)
    rows = [_step(step) for step in range(1, STEPS + 1)]
    with (folder / "console.log").open("w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        tracking = Tracking("nereus", "sample", ["console", "file"])
        for step, row in enumerate(rows, start=1):
            tracking.log(data=row, step=step)
        tracking.finish()
    text = (folder / "console.log").read_text(encoding="utf-8")
    steps = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("step:"))
    (folder / "console.log").write_text(steps, encoding="utf-8")  # without the line that names this machine's folder


def _step(step: int) -> dict[str, Any]:
    """The metrics of a step, in the order of RayPPOTrainer.fit."""
    metrics: dict[str, Any] = {}
    timing: dict[str, float] = {}
    with marked_timer("start_profile", timing):
        pass
    with marked_timer("step", timing):
        with marked_timer("gen", timing):
            batch = _rollout()
        trainer = SimpleNamespace(_get_dp_size=lambda *_: 2, actor_rollout_wg=None)
        ray_trainer.RayPPOTrainer._balance_batch(trainer, batch, metrics)  # noqa: SLF001 - verl's own
        with marked_timer("reward", timing):
            scores = torch.zeros(SAMPLES, RESPONSE)
            scores[:, -1] = torch.rand(SAMPLES)
        with marked_timer("old_log_prob", timing):
            mask = batch.batch["response_mask"]
            entropy = agg_loss(torch.rand(SAMPLES, RESPONSE), mask, "token-mean")
            metrics.update({"actor/entropy": entropy.item(), "perf/mfu/actor_infer": 0.0})
            metrics.update(calculate_debug_metrics(batch))
        with marked_timer(str(ray_trainer.Role.RefPolicy), timing):
            batch.batch["ref_log_prob"] = batch.batch["old_log_probs"] + 0.01 * torch.randn(SAMPLES, RESPONSE)
        with marked_timer("values", timing):
            batch.batch["values"] = torch.rand(SAMPLES, RESPONSE) * mask
        with marked_timer("adv", timing):
            batch.batch["token_level_scores"] = scores
            batch, of_kl = ray_trainer.apply_kl_penalty(batch, FixedKLController(1e-3), "kl")
            metrics.update(of_kl)
            correction = OmegaConf.create({"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None})
            batch, of_correction = compute_rollout_correction_and_add_to_batch(batch, correction)
            metrics.update(of_correction)
            batch = ray_trainer.compute_advantage(
                batch, adv_estimator="gae", gamma=1.0, lam=0.95, config=OmegaConf.create()
            )
        for phase, update in (("update_critic", _update_critic), ("update_actor", _update_actor)):
            with marked_timer(phase, timing):
                metrics.update(reduce_metrics(update(batch)))
        with marked_timer("update_weights", timing):
            pass
    with marked_timer("stop_profile", timing):
        pass
    metrics.update({"training/global_step": step, "training/epoch": 0})
    metrics.update(metric_utils.compute_data_metrics(batch=batch, use_critic=True))
    metrics.update(metric_utils.compute_timing_metrics(batch=batch, timing_raw=timing))
    metrics.update(metric_utils.compute_throughout_metrics(batch=batch, timing_raw=timing, n_gpus=GPUS))
    metrics.update(metric_utils.compute_variance_proxy_metrics(batch=batch, gradient_norm=metrics["actor/grad_norm"]))
    return metrics


def _rollout() -> DataProto:
    """A batch as generation and `old_log_prob` leave it."""
    lengths = torch.randint(2, RESPONSE + 1, (SAMPLES, 1))
    mask = (torch.arange(RESPONSE)[None] < lengths).long()
    prompts = torch.ones(SAMPLES, PROMPT, dtype=torch.long)
    log_probs = -torch.rand(SAMPLES, RESPONSE) * mask
    batch = DataProto.from_single_dict(
        {
            "prompts": prompts,
            "responses": torch.ones(SAMPLES, RESPONSE, dtype=torch.long),
            "attention_mask": torch.cat([prompts, mask], dim=1),
            "response_mask": mask,
            "old_log_probs": log_probs,
            "rollout_log_probs": log_probs + 0.01 * torch.randn(SAMPLES, RESPONSE) * mask,
            "uid": np.array([str(number // 4) for number in range(SAMPLES)], dtype=object),
            "__num_turns__": np.full(SAMPLES, 2, dtype=np.int32),
        }
    )
    batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
    return batch


def _update_actor(batch: DataProto) -> dict[str, Any]:
    """What a worker of the actor answers, under the names that RayPPOTrainer._update_actor makes of it."""
    config = ActorConfig(strategy="fsdp2", rollout_n=4, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=4)
    log_probs = (batch.batch["old_log_probs"] + 0.02 * torch.randn(SAMPLES, RESPONSE)).requires_grad_()
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob=batch.batch["old_log_probs"],
        log_prob=log_probs,
        advantages=batch.batch["advantages"],
        response_mask=batch.batch["response_mask"],
        loss_agg_mode="token-mean",
        config=config,
    )
    loss.backward()
    norm = log_probs.grad.norm().item()
    found = {**metrics, "actor/pg_loss": loss.item(), "loss": loss.item(), "grad_norm": norm, "lr": 1e-6, **_memory()}
    renamed = rename_dict({key: [value] for key, value in found.items()}, "actor/")
    renamed["perf/mfu/actor"] = renamed.pop("actor/mfu")
    return renamed


def _update_critic(batch: DataProto) -> dict[str, Any]:
    """What a worker of the critic answers, under the names that RayPPOTrainer._update_critic makes of it."""
    mask, values = batch.batch["response_mask"], batch.batch["values"]
    predictions = (values + 0.1 * torch.randn(SAMPLES, RESPONSE)).requires_grad_()
    loss, clipped = compute_value_loss(predictions, batch.batch["returns"], values, mask, 0.5)
    loss.backward()
    found = {
        "critic/vf_loss": loss.item(),
        "critic/vf_clipfrac": clipped.item(),
        "critic/vpred_mean": masked_mean(predictions, mask).item(),
        "loss": loss.item(),
        "grad_norm": predictions.grad.norm().item(),
        "lr": 1e-5,
        **_memory(),
    }
    renamed = rename_dict({key: [value] for key, value in found.items()}, "critic/")
    renamed["perf/mfu/critic"] = renamed.pop("critic/mfu")
    return renamed


def _memory() -> dict[str, float]:
    """What TrainingWorker._postprocess_output adds; on a CPU no memory of a GPU is used, and MFU has no meaning."""
    used_pages = os.sysconf("SC_PHYS_PAGES") - os.sysconf("SC_AVPHYS_PAGES")
    return {
        "perf/max_memory_allocated_gb": 0.0,
        "perf/max_memory_reserved_gb": 0.0,
        "perf/cpu_memory_used_gb": used_pages * os.sysconf("SC_PAGE_SIZE") / GIB,
        "mfu": 0.0,
    }


if __name__ == "__main__":
    main()
