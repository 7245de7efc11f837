"""Two slots rebuild their engines TP 2 -> TP 1 x 2 -> TP 2: weights by own slices, log-probabilities, seeds, leaks."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nereus.engines.vllm.boot import ENVIRONMENT
from nereus.engines.world import ProcessWorld, census
from nereus.errors import TransferFailed

VOCAB, STOP = 259, 258
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "attention_bias": False,
}


def test_engines_rebuilt_in_two_slots(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ.update(ENVIRONMENT)  # the slots inherit it
    mp.spawn(slot, args=(port, tmp_path), nprocs=2)


def slot(rank: int, port: int, parent: Path) -> None:
    """A slot process: the whole test."""
    torch.set_num_threads(1)
    from nereus.engines.vllm.boot import boot

    boot()
    world = ProcessWorld(rank=rank, size=2, address="127.0.0.1", port=port, timeout_seconds=60)
    plain, tied = ([reference(seed, tied) for seed in (1, 2)] for tied in (False, True))
    if rank == 0:
        plain[0].config.save_pretrained(parent / "plain")
        tied[0].config.save_pretrained(parent / "tied")
    torch.distributed.barrier()
    engine_cycle(world, parent / "plain", plain, 2)  # the first use opens what stays open
    torch.distributed.barrier()
    settled, shared, tensors = census(), shared_memories(), live_tensors()
    failed_start(world, parent / "absent")
    samples = []
    for tp in (2, 1, 2, 1, 2, 1):
        samples.append(engine_cycle(world, parent / "plain", plain, tp))
        torch.distributed.barrier()
        left = census()
        assert (left.groups, left.threads) == (settled.groups, settled.threads)
        assert left.descriptors <= settled.descriptors
        assert shared_memories() == shared
        assert live_tensors() <= tensors
    assert all(sample == samples[0] for sample in samples)
    for tp in (1, 2):
        engine_cycle(world, parent / "tied", tied, tp)
    world.close()


def shared_memories() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/nereus-")


def live_tensors() -> int:
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def failed_start(world: ProcessWorld, folder: Path) -> None:
    """An engine that cannot start leaves the world as it was."""
    from nereus.engines.vllm.engine import GenerationEngine

    sizes = {"max_model_tokens": 128, "max_requests": 16, "kv_cache_bytes": 1 << 20, "dtype": "float32"}
    with pytest.raises(ValueError, match="have no part for it"):
        GenerationEngine(world=world, group_ranks=(0, 1), tp=3, model_folder=folder, **sizes)
    with pytest.raises(Exception, match="absent"):
        GenerationEngine(world=world, group_ranks=(0, 1), tp=2, model_folder=folder, **sizes)
    assert torch.distributed.get_world_size() == 2


def reference(seed: int, tied: bool) -> PreTrainedModel:
    """A Hugging Face Llama with weights from the seed, large enough that its distributions are not flat."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, initializer_range=0.1, dtype="float32", **CONFIG))
    model.config.architectures = ["LlamaForCausalLM"]
    return model.eval()


def engine_cycle(world: ProcessWorld, folder: Path, models: list[PreTrainedModel], tp: int) -> list[tuple[int, ...]]:
    """Starts an engine, loads and checks each model's weights, stops it; the tokens sampled from the last."""
    from nereus.engines.vllm.engine import GenerationEngine

    torch.manual_seed(10 * tp + world.rank)  # sampling must not depend on it
    random_state = torch.get_rng_state()
    began = time.perf_counter()
    engine = GenerationEngine(
        world=world,
        group_ranks=(0, 1),
        tp=tp,
        model_folder=folder,
        max_model_tokens=128,
        max_requests=16,
        kv_cache_bytes=16 << 20,
        dtype="float32",
    )
    started = time.perf_counter()
    assert torch.get_rng_state().equal(random_state)
    tp_rank, completions = engine.slots.index(world.rank), []
    for model, poison in ((models[0], True), (models[1], True), (models[0], False), (models[1], False)):
        loading = time.perf_counter()
        engine.load(slices(model, tp, tp_rank), poison=poison)
        loaded = time.perf_counter()
        completions = engine.generate(requests())
        generated = time.perf_counter()
        assert greatest_difference(model, completions) < 1e-4
    assert engine.generate([]) == []
    with pytest.raises(TransferFailed, match=r"missing .*model\.norm\.weight"):
        engine.load(item for item in slices(models[0], tp, tp_rank) if item[0] != "model.norm.weight")
    with pytest.raises(ValueError, match="does not fit"):
        engine.generate([replace(requests()[0], max_response_tokens=90)])
    assert torch.get_rng_state().equal(random_state)
    resident = engine.resident_bytes()
    stopping = time.perf_counter()
    engine.close()
    engine.close()
    stopped = time.perf_counter()
    print(
        f"slot {world.rank} tp {tp}: start {started - began:.2f} load {loaded - loading:.3f} generate "
        f"{generated - loaded:.2f} stop {stopped - stopping:.2f} s {resident} {census()}"
    )
    torch.set_num_threads(1)
    return [completion.tokens for completion in completions]


def requests() -> list:
    """Twelve requests with a common prefix of 70 tokens, so that a stale prefix cache would show."""
    from nereus.engines.vllm.engine import Request

    prefix = tuple(range(1, 71))
    return [
        Request(
            request_id=f"r{index}",
            prompt_tokens=(*prefix, index),
            seed=(1 << 62) + index,
            temperature=1.0,
            max_response_tokens=20,
            stop_token=STOP,
        )
        for index in range(12)
    ]


def greatest_difference(model: torch.nn.Module, completions: list) -> float:
    """Greatest difference between the completions' log-probabilities and the reference's on the same tokens."""
    worst = 0.0
    for request, completion in zip(requests(), completions, strict=True):
        assert completion.request_id == request.request_id
        assert (completion.finished == "stop") == (completion.tokens[-1] == STOP)
        tokens = torch.tensor([[*request.prompt_tokens, *completion.tokens]])
        with torch.no_grad():
            logprobs = model(tokens).logits[0].log_softmax(-1)
        first = len(request.prompt_tokens)
        expected = logprobs[range(first - 1, tokens.shape[1] - 1), list(completion.tokens)]
        worst = max(worst, (expected - torch.tensor(completion.logprobs)).abs().max().item())
    return worst


def slices(model: torch.nn.Module, tp: int, rank: int) -> Iterator[tuple]:
    """The own boxes of a TP rank, layer by layer; the buffers of a layer are spoilt when the next one begins."""
    layer, buffers = "", []
    for name, tensor in model.named_parameters():
        if name.rpartition(".layers.")[2].split(".")[0] != layer:
            layer = name.rpartition(".layers.")[2].split(".")[0]
            for buffer in buffers:
                buffer.fill_(torch.nan)
            buffers.clear()
        start, data = own_box(name, tensor.detach(), tp, rank)
        buffers.append(data.clone())
        yield name, tuple(tensor.shape), start, buffers[-1]
    for buffer in buffers:
        buffer.fill_(torch.nan)


def own_box(name: str, tensor: torch.Tensor, tp: int, rank: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """(start, data) of the TP rank's box: rows, columns, padded rows of the vocabulary, or all of a norm."""
    if name.endswith("norm.weight"):
        return (0,), tensor
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        per = tensor.shape[1] // tp
        return (0, rank * per), tensor[:, rank * per : (rank + 1) * per]
    per = tensor.shape[0] // tp
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        per = -(-VOCAB // 64) * 64 // tp
    return (min(rank * per, VOCAB), 0), tensor[rank * per : (rank + 1) * per]
