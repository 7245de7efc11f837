"""vLLM engines rebuilt on the shared slots: weights by own slices, log-probabilities, seeds, failures, leaks."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from ray import cloudpickle

from nereus.config import Config
from nereus.engines.world import Census, census
from nereus.errors import TransferFailed
from nereus.rollout import Completion, Request
from nereus.runtime.pool import SlotPool

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nereus.engines.vllm.engine import GenerationEngine
    from nereus.runtime.slot import Slot

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # slots need not find this file

ALL, PART = (0, 1, 2, 3), (0, 1)
BUILDS = ((ALL, 2), (PART, 1), (PART, 2), (ALL, 1), (ALL, 2), (PART, 2))  # (slots, TP); the first fills what stays
RESPONSE_TOKENS = 8
SHARED_MEMORY = "/dev/shm/nereus-"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,  # large enough that the distributions are not flat
    "dtype": "float32",
}
Tokens = list[tuple[int, ...]]


@pytest.fixture
def slots(pool: SlotPool) -> SlotPool:
    """The shared slots without anything live."""
    pool.call_all("configure", Config(), ".")
    return pool


def model_folder(folder: Path, **changes: object) -> str:
    """A folder with the configuration of a Llama."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(folder)


def on(pool: SlotPool, group: tuple[int, ...], function: Any, *arguments: object) -> dict[int, Any]:
    """Calls `function(slot, group, *arguments)` in the slots of `group`, which may build groups."""
    counts = pool.call_all("group_count")
    pool.call_all("align", (group,), max(counts.values()))
    return pool.call("apply", dict.fromkeys(group, (function, group, *arguments)))


def one_value(by_slot: dict[int, Any]) -> Any:
    """What all slots said alike."""
    first, *others = by_slot.values()
    assert all(other == first for other in others)
    return first


def assert_nothing_left(pool: SlotPool, before: dict[int, tuple[Census, int, int]], spare_tensors: int = 0) -> None:
    """No slot holds more than before; a rebuild that leaked a group would keep descriptors and a thread of it."""
    for number, (now, tensors, memories) in pool.call_all("apply", held).items():
        settled, settled_tensors, settled_memories = before[number]
        assert now.groups == settled.groups, (number, settled, now)
        assert now.descriptors <= settled.descriptors + 2, (number, settled, now)  # Ray's own come and go
        assert now.threads <= settled.threads + 2, (number, settled, now)
        assert tensors <= settled_tensors + spare_tensors, (number, settled_tensors, tensors)
        assert memories == settled_memories, number


def test_engines_rebuilt_on_all_slots_and_on_a_part(slots: SlotPool, tmp_path: Path) -> None:
    """TP 2 and TP 1 in turn: exact log-probabilities, the same tokens everywhere, and nothing that grows."""
    folder = model_folder(tmp_path / "plain")
    on(slots, PART, nothing)  # its group stays as long as the world
    sampled, settled = [], {}
    for group, tp in BUILDS:
        began = time.perf_counter()
        sampled.append(one_value(on(slots, group, build, tp, folder)))
        print(f"slots {group} TP {tp}: {time.perf_counter() - began:.1f} s")
        if settled:
            assert_nothing_left(slots, settled)
        else:
            settled = slots.call_all("apply", held)
    assert all(tokens == sampled[0] for tokens in sampled)


def test_tied_embeddings(slots: SlotPool, tmp_path: Path) -> None:
    """The head of tied embeddings follows each load; at TP 4 the last slot has no rows of this vocabulary."""
    folder = model_folder(tmp_path / "tied", tie_word_embeddings=True, vocab_size=129)
    sampled = [one_value(on(slots, group, build, tp, folder)) for group, tp in ((PART, 1), (PART, 2), (ALL, 4))]
    assert all(tokens == sampled[0] for tokens in sampled)


def test_failed_starts_and_loads(slots: SlotPool, tmp_path: Path) -> None:
    """What fails says so, is usable after it or not as promised, and leaves nothing behind."""
    folder = model_folder(tmp_path / "plain")
    on(slots, PART, failed_loads, folder)
    before = slots.call_all("apply", held)
    on(slots, PART, failed_start, str(tmp_path / "absent"))
    assert_nothing_left(slots, before)
    on(slots, PART, failed_start_with_groups, folder)
    assert_nothing_left(slots, before, spare_tensors=2)  # vLLM's rotary tables, which the next engine's end takes along
    on(slots, PART, failed_loads, folder)
    assert_nothing_left(slots, before)


# -- in the slots ------------------------------------------------------------------------------------------------------


def nothing(slot: Slot, group: tuple[int, ...]) -> None:
    """Aligning was all."""


def held(slot: Slot) -> tuple[Census, int, int]:
    """What this process holds: groups, descriptors and threads; live tensors; mapped shared memories of engines."""
    gc.collect()
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    return census(), tensors, Path("/proc/self/maps").read_text().count(SHARED_MEMORY)


def process_state() -> bytes:
    """What an engine must not change for the whole process."""
    random_states = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()  # noqa: NPY002
    return pickle.dumps((random_states, sorted(os.environ.items()), torch.get_num_threads()))


def start(slot: Slot, group: tuple[int, ...], tp: int, folder: str, **changes: Any) -> GenerationEngine:
    from nereus.engines.vllm.engine import GenerationEngine

    sizes = {"max_model_tokens": 128, "max_requests": 16, "kv_cache_bytes": 16 << 20, "dtype": "float32", **changes}
    assert slot.world is not None
    return GenerationEngine(world=slot.world, group_ranks=group, tp=tp, model_folder=Path(folder), **sizes)


def build(slot: Slot, group: tuple[int, ...], tp: int, folder: str) -> list[Tokens]:
    """Starts this slot's engine, loads two models in turn and checks each, stops it; the tokens of each model.

    Every other engine of the group begins with the second model, so that engines which mix are seen.
    """
    models = [reference(folder, seed) for seed in (1, 2)]
    torch.manual_seed(10 * tp + slot.number)  # sampling must not depend on it
    state = process_state()
    engine = start(slot, group, tp, folder)
    assert process_state() == state
    place = group.index(slot.number)
    sampled: list[Tokens] = [[], []]
    for turn, poison in enumerate((True, True, False)):
        which = (turn + place // tp) % 2
        engine.load(slices(models[which], tp, place % tp), poison=poison)
        completions = engine.generate(requests(models[which]))
        assert greatest_difference(models[which], completions) < 1e-4
        tokens = [completion.tokens for completion in completions]
        assert sampled[which] in ([], tokens)
        sampled[which] = tokens
    assert engine.generate([]) == []
    assert engine.slots == group[place // tp * tp : (place // tp + 1) * tp]
    assert min(engine.resident_bytes().values()) > 0
    engine.close()
    engine.close()
    assert process_state() == state
    return sampled


def failed_start(slot: Slot, group: tuple[int, ...], absent: str) -> None:
    """An engine that cannot start leaves the world as it was."""
    state = process_state()
    with pytest.raises(ValueError, match="have no part for it"):
        start(slot, group, 3, absent)
    with pytest.raises(Exception, match="absent"):
        start(slot, group, 2, absent)
    assert torch.distributed.get_world_size() == len(ALL)
    assert process_state() == state


def failed_start_with_groups(slot: Slot, group: tuple[int, ...], folder: str) -> None:
    """Nor does one that fails after its groups were built, for want of cache."""
    state = process_state()
    with pytest.raises(ValueError, match="cache"):
        start(slot, group, 2, folder, kv_cache_bytes=1)
    assert torch.distributed.get_world_size() == len(ALL)
    assert process_state() == state


def failed_loads(slot: Slot, group: tuple[int, ...], folder: str) -> None:
    """Refused requests, an incomplete load, a whole one after it, and one that breaks off: only that is the end."""
    engine, model, rank = start(slot, group, 2, folder), reference(folder, 1), group.index(slot.number)
    with pytest.raises(TransferFailed, match=r"missing .*model\.norm\.weight"):
        engine.load(item for item in slices(model, 2, rank) if item[0] != "model.norm.weight")
    engine.load(slices(model, 2, rank))
    with pytest.raises(ValueError, match="does not fit"):
        engine.generate([replace(requests(model)[0], max_response_tokens=90)])
    assert greatest_difference(model, engine.generate(requests(model))) < 1e-4
    with pytest.raises(ConnectionError, match="torn"):
        engine.load(torn(slices(model, 2, rank)))
    with pytest.raises(RuntimeError, match="broken off"):
        engine.load(slices(model, 2, rank))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([])


def torn(weights: Iterator[tuple]) -> Iterator[tuple]:
    """The first weights of a sync whose peer is then lost."""
    for _ in range(7):
        yield next(weights)
    raise ConnectionError("torn")


def reference(folder: str, seed: int) -> PreTrainedModel:
    """A Hugging Face Llama with weights from the seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()


def requests(model: PreTrainedModel) -> list[Request]:
    """Ten requests with a common prefix, so that a stale prefix cache would show; each grows into a new KV block."""
    return [
        Request(
            request_id=f"r{index}",
            prompt_tokens=(*range(1, 91), index),
            seed=(1 << 62) + index,
            temperature=1.0,
            max_response_tokens=RESPONSE_TOKENS,
            stop_token=model.config.vocab_size - 1,
        )
        for index in range(10)
    ]


def greatest_difference(model: PreTrainedModel, completions: list[Completion]) -> float:
    """Greatest difference between the completions' log-probabilities and the reference's on the same tokens."""
    asked, worst = requests(model), 0.0
    rows = [(*r.prompt_tokens, *c.tokens) for r, c in zip(asked, completions, strict=True)]
    padded = [row + (0,) * (max(map(len, rows)) - len(row)) for row in rows]  # attention is causal
    with torch.no_grad():
        logprobs = model(torch.tensor(padded)).logits.log_softmax(-1)
    for request, completion, row in zip(asked, completions, logprobs, strict=True):
        assert completion.request_id == request.request_id
        assert (completion.finished == "stop") == (completion.tokens[-1] == request.stop_token)
        assert len(completion.tokens) == RESPONSE_TOKENS or completion.finished == "stop"
        first, count = len(request.prompt_tokens) - 1, len(completion.tokens)
        expected = row[range(first, first + count), list(completion.tokens)]
        worst = max(worst, (expected - torch.tensor(completion.logprobs)).abs().max().item())
    return worst


def slices(model: PreTrainedModel, tp: int, rank: int) -> Iterator[tuple]:
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
    rows, per = tensor.shape[0], tensor.shape[0] // tp
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        per = -(-rows // 64) * 64 // tp
    return (min(rank * per, rows), 0), tensor[rank * per : (rank + 1) * per]
