"""Tied embeddings, biases of q, k, v, norms of q and k, and experts, in Megatron and in vLLM, against Hugging Face."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from ray import cloudpickle

from nereus.config import ModelConfig, StageConfig, WarmupConfig
from nereus.rl.batch import Batch, build
from nereus.rl.correction import mismatch
from nereus.rl.losses import Denominators
from nereus.rollout import Request
from nereus.runtime.objective import Objective
from nereus.runtime.pool import SlotPool
from tests.live.scene import S, Scene, config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nereus.runtime.slot import Slot

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # slots need not find this file

SMALL = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=96, init_std=0.1)
QWEN2 = replace(SMALL, hidden=128, qkv_bias=True, tie_embeddings=True)
QWEN3 = replace(SMALL, qk_norm=True, rope_theta=1e6)
QWEN3_MOE = replace(QWEN3, experts=4, experts_per_token=2, expert_ffn=48, dense_layers=(0,))
MIXTRAL = replace(SMALL, experts=4, experts_per_token=2, expert_ffn=96)


def disturb(slot: Slot) -> None:
    """Gives what starts as 0 or 1, biases and norms, other values: a function of the place in the tensor alone."""
    engine = slot.live.get("actor.train")
    for shard, view in engine.views().items() if engine else ():
        if shard.component == "weight" and len(shard.box.start) == 1:
            places = torch.arange(shard.box.start[0], shard.box.stop[0])
            view.copy_(0.3 * torch.sin(1.7 * places + len(shard.tensor)) + float("norm" in shard.tensor))


def asked(scene: Scene) -> list[Request]:
    """Six requests of the scene's task."""
    return [
        Request(
            request_id=str(i),
            prompt_tokens=scene.phases.task.prompt(i % 4).token_ids,
            seed=i + 1,
            temperature=1.0,
            max_response_tokens=6,
            stop_token=258,
        )
        for i in range(6)
    ]


def sampled(scene: Scene) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Completions by vLLM after a weight sync: the batch, and log-probabilities by the trainer and by vLLM."""
    scene.phases.sync(poison=True)
    requests = asked(scene)
    done = scene.phases.sample(requests)
    batch = build([r.prompt_tokens for r in requests], [c.tokens for c in done])
    logp = scene.phases.infer(scene.job.plan.actor_train, batch, "old_log_prob")["logp"]
    return batch, logp, batch.align([c.logprobs for c in done])


def grad_norm(scene: Scene, batch: Batch) -> float:
    """The gradient norm of the mean negative log-likelihood; the weights stay as they are."""
    objective = Objective(kind="sft", denominators=Denominators.of(batch.mask))
    return scene.phases.update(scene.job.plan.actor_train, batch, objective, 0.0)["actor/grad_norm"]


def hugging_face(scene: Scene) -> PreTrainedModel:
    """The scene's actor as transformers loads it from a folder with its weights, under their names."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder = scene.folder.model
    weights = {name: tensor for (_, name), tensor in scene.tensors("actor.train", "weight").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def reference(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, float]:
    """Log-probabilities of the batch's labels, and the gradient norm of their masked mean."""
    logits = model(batch.tokens, attention_mask=torch.ones_like(batch.tokens)).logits
    logp = logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
    (-(logp * batch.mask).sum() / batch.mask.sum()).backward()
    squares = sum(float((p.grad.double() ** 2).sum()) for p in model.parameters() if p.grad is not None)
    return logp.detach(), squares**0.5


def scene_of(pool: SlotPool, model: ModelConfig, folder: Path, **stages: StageConfig) -> Scene:
    """A job with this model, with other cuts than the usual ones where `stages` says so."""
    job = config(warmup=WarmupConfig(steps=0))
    return Scene(pool, replace(job, model=model, plan=replace(job.plan, **stages)), folder)


@pytest.mark.parametrize("model", [QWEN2, QWEN3], ids=["tied_and_biased", "normed"])
def test_trainer_and_vllm_agree_with_hugging_face(pool: SlotPool, tmp_path: Path, model: ModelConfig) -> None:
    """At TP2·PP2 and 2 x TP2, and after a change to DP4 and 4 x TP1: the same bits, log-probabilities, gradient norm."""
    scene = scene_of(pool, model, tmp_path)
    pool.call_all("apply", disturb)
    batch, trained, generated = sampled(scene)
    expected, norm = reference(hugging_face(scene), batch)
    assert batch.mask.sum() > 12
    before = scene.job.digests(("actor.train", "critic.train"), "")
    for _ in range(2):
        assert ((trained - expected) * batch.mask).abs().max() < 1e-4
        assert mismatch(trained, generated, batch.mask).max_abs_nats < 1e-4
        if scene.job.plan.actor_train.layout.dp == 1:
            record = scene.change(
                actor_train=S(dp=4, micro_batch=4), critic_train=S(tp=2, dp=2), actor_generate=S(dp=4)
            )
            assert record.moved is not None
            assert scene.job.digests(("actor.train", "critic.train"), "") == before
            again, trained, generated = sampled(scene)
            assert torch.equal(again.tokens, batch.tokens)
    assert grad_norm(scene, batch) == pytest.approx(norm, rel=1e-5)
    scene.change(actor_train=S(tp=2, pp=2, micro_batch=4))
    assert grad_norm(scene, batch) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (QWEN3_MOE, (S(tp=2, dp=2, ep=2, etp=1), S(pp=2, dp=2, ep=2, micro_batch=1))),
        (MIXTRAL, (S(tp=2, pp=2), S(dp=2, ep=2, etp=1, micro_batch=2))),
    ],
    ids=["qwen3_moe", "mixtral"],
)
def test_experts_agree_with_hugging_face(
    pool: SlotPool, tmp_path: Path, model: ModelConfig, layouts: tuple[StageConfig, ...]
) -> None:
    """Experts over EP2: log-probabilities of trainer, reference and vLLM, gradient norm; the same bits in each layout.

    Megatron trains them without tensor parallelism only, so gradients are asked for at TP1.
    """
    stages = {"actor_train": S(dp=4, ep=2, micro_batch=1), "critic_train": S(dp=2, ep=2)}
    scene = scene_of(pool, model, tmp_path, **stages, reference_infer=S(tp=2, dp=2, ep=2, etp=1, micro_batch=4))
    batch, trained, generated = sampled(scene)
    expected, norm = reference(hugging_face(scene), batch)
    referred = scene.phases.infer(scene.job.plan.reference_infer, batch, "ref")["logp"]
    assert ((trained - expected) * batch.mask).abs().max() < 1e-4
    assert ((referred - expected) * batch.mask).abs().max() < 1e-4
    assert mismatch(trained, generated, batch.mask).max_abs_nats < 1e-4
    assert grad_norm(scene, batch) == pytest.approx(norm, rel=1e-5)
    before = scene.job.digests(("actor.train",), "")
    for layout in layouts:
        record = scene.change(actor_train=layout)
        assert record.moved is not None
        assert scene.job.digests(("actor.train",), "") == before
    assert grad_norm(scene, batch) == pytest.approx(norm, rel=1e-5)
