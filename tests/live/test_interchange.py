"""Hugging Face folders onto live slots and out again, and Megatron's own save and load on the same state."""

from __future__ import annotations

import json
import queue
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ray import cloudpickle

from nereus.boxes import whole
from nereus.cli.export import export
from nereus.cli.imports import import_folder
from nereus.config import ModelConfig, StageConfig, WarmupConfig
from nereus.interchange.foreign import open_folder
from nereus.interchange.megatron import MegatronFolder
from nereus.interchange.native import NereusModel, manifest_in
from nereus.interchange.start import from_folder
from nereus.rl.batch import Batch, build
from nereus.rl.tokenizer import ByteTokenizer
from nereus.runtime.pool import SlotPool
from tests.live.scene import S, Scene, config

if TYPE_CHECKING:
    from nereus.runtime.slot import Slot

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # slots need not find this file

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 259}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def hugging_face(folder: Path, **more: Any) -> Any:
    """A tiny Llama that transformers made and saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    settings: dict[str, Any] = {**SIZES, **HEADS, "tie_word_embeddings": False, "initializer_range": 0.1, **more}
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    ByteTokenizer().export(folder)
    return model


def log_probabilities(model: Any, batch: Batch) -> torch.Tensor:
    """transformers' log-probabilities of the batch's labels."""
    with torch.no_grad():
        logits = model(batch.tokens, attention_mask=torch.ones_like(batch.tokens)).logits
    return logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]


def scene_from(pool: SlotPool, source: Path, folder: Path, train: StageConfig) -> Scene:
    """A job whose actor comes from a folder, cut as `train` says; no engines for generation."""
    job = config(warmup=WarmupConfig(steps=0))
    job = from_folder(replace(job, model=ModelConfig(folder=str(source))), {"model": {"folder": str(source)}})
    return Scene(pool, replace(job, plan=replace(job.plan, actor_train=train)), folder, generation=False)


def text_batch() -> Batch:
    prompts = [tuple(b"backward>"), tuple(b"word>")]
    return build(prompts, [tuple(b"drawkcab"), tuple(b"drow")])


@pytest.mark.parametrize("train", [S(tp=1, micro_batch=2), S(tp=2, pp=2, micro_batch=2)], ids=["TP1", "TP2PP2"])
def test_hugging_face_round_trip(pool: SlotPool, tmp_path: Path, train: StageConfig) -> None:
    """In: logits as transformers'. Out, through a checkpoint: transformers loads it, the same logits and digests."""
    source, batch = tmp_path / "source", text_batch()
    expected = log_probabilities(hugging_face(source), batch)
    scene = scene_from(pool, source, tmp_path, train)
    found = scene.phases.infer(scene.job.plan.actor_train, batch, "old_log_prob")["logp"]
    assert ((found - expected) * batch.mask).abs().max() < 1e-4

    import_folder(Namespace(folder=str(source), to=str(tmp_path / "own"), model=None, format="auto", force=False))
    digests = manifest_in(tmp_path / "own").digests["actor.train weight"]
    assert scene.job.digests(("actor.train",), "")["actor.train weight"] == digests

    out = tmp_path / "out"
    export(Namespace(source=str(tmp_path / "own"), to=str(out), format="hf", step=None, of="actor", force=False))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = log_probabilities(AutoModelForCausalLM.from_pretrained(out).eval(), batch)
    assert torch.equal(again, expected)
    assert AutoTokenizer.from_pretrained(out)("ab", add_special_tokens=False)["input_ids"] == [97, 98]


def save_by_megatron(slot: Slot, folder: str) -> None:
    """Megatron-core's own save of the live actor, optimizer in the fully reshardable form."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # its own is a process that imports the slot's main module
    engine: Any = slot.live["actor.train"]
    with engine.inside():
        metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
        model = engine.module.sharded_state_dict(metadata=metadata)
        optimizer = engine.optimizer.sharded_state_dict(model, metadata=metadata)
        dist_checkpointing.save({"model": model, "optimizer": optimizer, "iteration": 3}, folder)


def load_by_megatron(slot: Slot, folder: str) -> int:
    """Megatron-core's own load into the live actor, whose weights are overwritten first; how many tensors it loaded."""
    from megatron.core import dist_checkpointing

    engine: Any = slot.live["actor.train"]
    with engine.inside(), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.fill_(7)
        wanted = {k: v for k, v in engine.module.sharded_state_dict().items() if not k.endswith("_extra_state")}
        loaded: Any = dist_checkpointing.load({"model": wanted}, folder)
        loaded = loaded["model"]
        engine.module.load_state_dict(loaded, strict=False)
    return len(loaded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_megatron_reads_and_writes_the_same_state(pool: SlotPool, tmp_path: Path, dtype: str) -> None:
    job = config(
        warmup=WarmupConfig(steps=4, samples=16, lr=3e-3), model=ModelConfig(layers=2, dtype=dtype, init_std=0.1)
    )
    scene = Scene(pool, job, tmp_path, generation=False)
    for step in (1, 2):
        scene.phases.warm_up(step)
    state = scene.job.digests(("actor.train",), "")

    folder = tmp_path / "torch_dist"
    folder.mkdir()
    pool.call_all("apply", save_by_megatron, str(folder))
    actor = scene.job.specs["actor"]
    real = MegatronFolder(folder, actor)
    assert real.optimizer_steps == 2
    assert set(real.components) == {"weight", "master", "exp_avg", "exp_avg_sq"}
    for (component, name), tensor in scene.tensors("actor.train").items():
        assert torch.equal(real.read(component, name, whole(tensor.shape)).to(tensor.dtype), tensor), (component, name)

    own = tmp_path / "own"
    model = tmp_path / "model.json"
    from nereus.catalogue import hf_config

    model.write_text(json.dumps(hf_config(job.model)))
    import_folder(Namespace(folder=str(folder), to=str(own), model=str(model), format="auto", force=False))
    assert manifest_in(own).digests == state
    assert NereusModel(own, actor).optimizer_steps == 2

    out = tmp_path / "out"
    export(Namespace(source=str(own), to=str(out), format="torch_dist", step=None, of="actor", force=False))
    assert open_folder(out).spec == replace_model(actor, out)
    counts = pool.call_all("apply", load_by_megatron, str(out))
    assert all(count > 5 for count in counts.values())
    assert scene.job.digests(("actor.train",), "")["actor.train weight"] == state["actor.train weight"]


def replace_model(spec: Any, folder: Path) -> Any:
    """The spec as the folder describes it: it does not say how a fresh model would be made."""
    return open_folder(folder, spec.config).spec
