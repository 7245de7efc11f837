"""verl's side of `make verl-parity`; runs in verl's environment, without Nereus (see parity.py).

`python parity_step.py RECORDED ANSWERS` reads what Nereus recorded (safetensors: rollouts, weights) with the settings in its
header, and writes for every setting what verl 0.9.1 computes of a PPO step.

What runs is verl's: `compute_response_mask`, `apply_kl_penalty` and `compute_advantage` of its trainer with the estimators of
core_algos; `left_right_2_no_padding` and `make_iterator`, as its trainer and worker cut mini-batches; `train_batch` of its FSDP
engines (zero gradients, micro-batches, model inputs, log-probabilities, entropy, values, backward, clipping, optimizer step)
with its `ppo_loss` and `value_loss`; its `build_optimizer`. The model is transformers' Llama. Not verl's: `fit`, Ray workers,
sampling, the reward manager, and the FSDP wrapping: a plain module stands in its place, on a CPU, which verl has no platform for.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict  # pyright: ignore[reportMissingImports]
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from verl import DataProto  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.ray_trainer import (  # pyright: ignore[reportMissingImports]
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
)
from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]
from verl.workers.config import (  # pyright: ignore[reportMissingImports]
    CriticConfig,
    FSDPActorConfig,
    FSDPOptimizerConfig,
)
from verl.workers.config.optimizer import build_optimizer  # pyright: ignore[reportMissingImports]
from verl.workers.engine.fsdp import transformer_impl  # pyright: ignore[reportMissingImports]
from verl.workers.utils.losses import ppo_loss, value_loss  # pyright: ignore[reportMissingImports]
from verl.workers.utils.padding import left_right_2_no_padding  # pyright: ignore[reportMissingImports]

Settings = dict[str, Any]
ESTIMATORS = {"reinforce++": "reinforce_plus_plus"}
METRICS = {"actor/pg_loss", "actor/entropy_loss", "critic/vf_loss"}


def main() -> None:
    """Answers what the file named as the first argument asks."""
    torch.set_num_threads(1)
    transformer_impl.get_device_id = transformer_impl.get_device_name = lambda: "cpu"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    answers: dict[str, Tensor] = {}
    numbers: list[dict[str, Any]] = []
    with safe_open(sys.argv[1], framework="pt") as file:
        asked = json.loads(file.metadata()["asked"])
        recorded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    for index, settings in enumerate(asked["settings"]):
        data = advantages_of(batch_of(recorded), settings)
        row_of: dict[str, list[dict[str, float]]] = {}
        for model in ("actor", "critic") if settings["adv_estimator"] == "gae" else ("actor",):
            engine, row_of[model] = updated(model, data, settings, recorded, asked)
            weights = dict(engine.module.named_parameters())
            answers |= {f"{index}/{model}/{name}": weights[name].detach().clone() for name in asked["weights"][model]}
        answers |= {f"{index}/{name}": data.batch[name].clone() for name in ("advantages", "returns")}
        numbers.append(row_of)
    save_file(answers, sys.argv[2], metadata={"numbers": json.dumps(numbers)})


def batch_of(recorded: dict[str, Tensor]) -> Any:
    """The recorded rows as verl's rollout gives them: prompts padded on the left, responses on the right."""
    tokens, prompts, responses = (recorded[key] for key in ("tokens", "prompt_lengths", "response_lengths"))
    rows, most_prompt, most_response = len(tokens), int(prompts.max()), int(responses.max())
    ids = torch.zeros(rows, most_prompt + most_response, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    per_token = ("old_logp", "reference_logp", "values")
    columns = {name: torch.zeros(rows, most_response) for name in (*per_token, "scores")}
    for row, (prompt, response) in enumerate(zip(prompts.tolist(), responses.tolist(), strict=True)):
        place = slice(most_prompt - prompt, most_prompt + response)
        ids[row, place], mask[row, place] = tokens[row, : prompt + response], 1
        for name in per_token:
            columns[name][row, :response] = recorded[name][row, prompt - 1 : prompt - 1 + response]
        columns["scores"][row, response - 1] = recorded["scores"][row]
    tensors = {
        "prompts": ids[:, :most_prompt],
        "responses": ids[:, most_prompt:],
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=-1) - 1).clamp(min=0),
        "old_log_probs": columns["old_logp"],
        "ref_log_prob": columns["reference_logp"],
        "values": columns["values"],
        "token_level_scores": columns["scores"],
    }
    groups = np.array([str(group) for group in recorded["groups"].tolist()], dtype=object)
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": groups})
    data.batch["response_mask"] = compute_response_mask(data)
    return data


def advantages_of(data: Any, settings: Settings) -> Any:
    """What the trainer does between the reward and the updates."""
    if settings["kl_coef"]:
        control = core_algos.FixedKLController(settings["kl_coef"])
        data, _ = apply_kl_penalty(data, kl_ctrl=control, kl_penalty="kl")
    else:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    algorithm = {"gamma": settings["gamma"], "lam": settings["lam"], "use_pf_ppo": False}
    return compute_advantage(
        data,
        adv_estimator=ESTIMATORS.get(settings["adv_estimator"], settings["adv_estimator"]),
        gamma=settings["gamma"],
        lam=settings["lam"],
        num_repeat=settings["samples_per_prompt"],
        norm_adv_by_std_in_grpo=True,
        config=OmegaConf.create(algorithm),
    )


class PlainModule:
    """Mixed into an engine of verl: its module is not wrapped, its process group has one rank, its type is float32."""

    def __init__(self, module: torch.nn.Module, optimizer_config: Any, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer_config, self.optimizer = module, optimizer_config, optimizer
        self.engine_config = SimpleNamespace(entropy_checkpointing=False)
        self.ulysses_device_mesh, self.ulysses_sequence_parallel_size, self.use_ulysses_sp = None, 1, False
        self.pad_to_length, self.scaler, self._qat_enabled = False, None, False
        self._autocast_dtype = torch.float32

    def get_data_parallel_size(self) -> int:
        """One rank."""
        return 1

    def get_data_parallel_group(self) -> Any:
        """The group of the one rank."""
        return dist.group.WORLD

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()


class ActorEngine(PlainModule, transformer_impl.FSDPEngineWithLMHead):
    """verl's engine of an actor."""


class CriticEngine(PlainModule, transformer_impl.FSDPEngineWithValueHead):
    """verl's engine of a critic."""


def engine_of(model: str, settings: Settings, recorded: dict[str, Tensor], asked: dict[str, Any]) -> Any:
    """The engine with the recorded weights and a fresh optimizer; weight decay is for norms too, as in verl's FSDP engine."""
    config = AutoConfig.from_pretrained(asked["model_folder"])
    config.num_labels, config.classifier_dropout = 1, 0.0
    kind = AutoModelForCausalLM if model == "actor" else AutoModelForTokenClassification
    module = kind.from_config(config, attn_implementation="eager", dtype=torch.float32)
    held = {name: recorded[f"{model}/{name}"] for name in asked["weights"][model]}
    if model == "critic":  # Nereus's scalar head has no bias
        held["score.bias"] = torch.zeros(1)
        module.score.bias.requires_grad_(False)
    module.load_state_dict(held, strict=True)
    module.train()
    optimizer_config = FSDPOptimizerConfig(
        lr=settings[f"{model}_lr"],
        weight_decay=settings["weight_decay"],
        betas=(settings["adam_beta1"], settings["adam_beta2"]),
        clip_grad=settings["clip_grad"],
        override_optimizer_config={"eps": settings["adam_eps"]},
    )
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine = ActorEngine if model == "actor" else CriticEngine
    return engine(module, optimizer_config, build_optimizer(trained, optimizer_config))


def loss_of(model: str, settings: Settings, asked: dict[str, Any]) -> Any:
    """verl's loss with its configuration; the horizon is the longest response allowed, as in Nereus."""
    norm = settings["loss_agg_mode"] == "seq-mean-token-sum-norm"
    scale = asked["horizon_tokens"] if norm else None
    shared = {
        "strategy": "fsdp",
        "ppo_micro_batch_size_per_gpu": settings["micro_batch"],
        "loss_agg_mode": settings["loss_agg_mode"],
        "loss_scale_factor": scale,
    }
    if model == "critic":
        return partial(value_loss, CriticConfig(cliprange_value=settings["value_clip"], **shared))
    actor = FSDPActorConfig(
        rollout_n=settings["samples_per_prompt"],
        clip_ratio=settings["clip_ratio_low"],
        clip_ratio_low=settings["clip_ratio_low"],
        clip_ratio_high=settings["clip_ratio_high"],
        clip_ratio_c=settings["dual_clip_ratio"],
        entropy_coeff=settings["entropy_coef"],
        **shared,
    )
    return partial(ppo_loss, actor)


def updated(
    model: str, data: Any, settings: Settings, recorded: dict[str, Tensor], asked: dict[str, Any]
) -> tuple[Any, list[dict[str, float]]]:
    """The engine after its updates, and what each optimizer step said: its losses, summed over micro-batches, and norm."""
    engine, loss = engine_of(model, settings, recorded, asked), loss_of(model, settings, asked)
    data.meta_info["temperature"] = 1.0
    batch: TensorDict = left_right_2_no_padding(data.to_tensordict())
    mini = len(batch) // settings["mini_batches"]
    tu.assign_non_tensor(
        batch,
        calculate_entropy=model == "actor",
        global_batch_size=mini,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        use_fused_kernels=False,
        micro_batch_size_per_gpu=settings["micro_batch"],
        compute_loss=True,
    )
    rows: list[dict[str, float]] = []
    for mini_batch in tu.make_iterator(
        batch, mini_batch_size=mini, epochs=settings["epochs"], seed=0, dataloader_kwargs={"shuffle": False}
    ):
        done = engine.train_batch(mini_batch, loss_function=loss)
        found = done["metrics"]
        row = {name: total(found[name]) for name in METRICS if name in found}
        rows.append({**row, "loss": sum(done["loss"]), "grad_norm": float(found["grad_norm"])})
    return engine, rows


def total(metric: Any) -> float:
    """The sum over micro-batches of a metric's parts: one of verl's Metric, or a list."""
    parts = getattr(metric, "values", metric)
    return float(sum(total(part) if isinstance(part, list) else float(part) for part in parts))


if __name__ == "__main__":
    Path(sys.argv[2]).unlink(missing_ok=True)
    main()
