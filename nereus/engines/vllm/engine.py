"""This slot's part of a vLLM engine: start, weight sync, generation, teardown, inside a running process world.

The engines of the generation stage are consecutive runs of `tp` of its slots; each run is an engine of its own
(vLLM's "external_launcher" without data parallelism), and every slot of a run drives it in lockstep: the same
requests in the same order. One process holds one engine part at a time, because vLLM's state is global to it.
"""

from __future__ import annotations

import gc
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, get_layerwise_info
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from nereus.engines.vllm.boot import ENGINE_KEY, boot
from nereus.engines.vllm.staging import WeightSlice, offer
from nereus.engines.world import ProcessWorld
from nereus.errors import TransferFailed
from nereus.memory import BATCH_TOKENS, CACHE_BLOCK_TOKENS
from nereus.rollout import Completion, Request

VOCAB_ALIGN = 64
"""Rows of the vocabulary are padded to a multiple of this (vLLM's DEFAULT_VOCAB_PADDING_SIZE)."""
_EXPERTS = re.compile(r"(?P<before>.*\.(?P<family>mlp|block_sparse_moe))\.experts\.(.*\.)?(?P<weight>w13|w2)_weight")
_EXPERT_PIECES = {  # what vLLM stacks over experts, under the names of Qwen3-MoE and of Mixtral
    ("mlp", "w13"): ("gate_proj", "up_proj"),
    ("mlp", "w2"): ("down_proj",),
    ("block_sparse_moe", "w13"): ("w1", "w3"),
    ("block_sparse_moe", "w2"): ("w2",),
}
_FIXED: dict[str, object] = {
    "distributed_executor_backend": "external_launcher",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "block_size": CACHE_BLOCK_TOKENS,
    "logprobs_mode": "raw_logprobs",
    "disable_log_stats": True,
    "seed": 0,
}


class GenerationEngine:
    """This slot's part of the engine that its place in `group_ranks` gives it; weights are dummies until `load`.

    `group_ranks` are all slots of the generation stage in order, engines are consecutive runs of `tp` of them.
    `model_folder` holds a Hugging Face config.json (no tokenizer). `max_model_tokens` is prompt plus response,
    `kv_cache_bytes` this slot's part of the cache; where it holds fewer than `max_requests` requests vLLM queues.

    Construction is collective in two steps: every rank of the world must have called `world.sub(group_ranks)` (the
    constructor calls it too, so members only need to agree on the order), and the counters of groups must be equal
    over `group_ranks` (`ProcessWorld.align_group_count`). ValueError for slots that do not fit `tp`.
    """

    def __init__(
        self,
        *,
        world: ProcessWorld,
        group_ranks: tuple[int, ...],
        tp: int,
        model_folder: Path,
        max_model_tokens: int,
        max_requests: int,
        kv_cache_bytes: int,
        dtype: str,
    ) -> None:
        if tp < 1 or len(group_ranks) % tp or world.rank not in group_ranks:
            raise ValueError(f"rank {world.rank}: engines of tp {tp} over slots {group_ranks} have no part for it")
        boot()
        self._world, self._group = world, world.sub(group_ranks)
        first = group_ranks.index(world.rank) // tp * tp
        self._slots: tuple[int, ...] = group_ranks[first : first + tp]
        arguments = EngineArgs(
            model=str(model_folder),
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_model_len=max_model_tokens,
            max_num_seqs=max_requests,
            max_num_batched_tokens=max(BATCH_TOKENS, max_model_tokens),
            kv_cache_memory_bytes=kv_cache_bytes,
            tensor_parallel_size=tp,
            distributed_timeout_seconds=max(1, int(world.timeout_seconds)),
            cpu_distributed_timeout_seconds=max(1, int(world.timeout_seconds)),
            **_FIXED,  # pyright: ignore[reportArgumentType]
        )
        with ExitStack() as failed, world.inside(self._group), _random_states_kept(), _process_state_kept(self._slots):
            failed.callback(_destroy_groups)
            self._engine: LLMEngine | None = LLMEngine.from_engine_args(arguments)
            failed.pop_all()
        self._loadable, self._max_model_tokens = True, max_model_tokens
        self._expected = _checkpoint_names(self._model, self._engine.model_config.get_num_experts())
        self._vocab_padded = self._engine.model_config.get_vocab_size() % VOCAB_ALIGN != 0

    @property
    def slots(self) -> tuple[int, ...]:
        """The ranks that form this slot's engine, in TP order."""
        return self._slots

    def load(self, weights: Iterator[WeightSlice], *, poison: bool = False) -> None:
        """Replaces all weights by those that the iterator yields layer by layer, then empties the prefix cache.

        Items are (Hugging Face name, full shape, start, data): this slot's own box of each tensor of the model,
        embedding first, decoder layers in order, final norm, output head (absent when tied). A rank without rows of
        the vocabulary offers an empty box. The memory of a layer's data may be written again when the next
        layer's first item is asked for; at most a layer and the vocabulary's padded tensors are staged. The
        iterator runs outside `ProcessWorld.inside`, so it may communicate over the world. Local: ranks of an
        engine need not load at the same time. TransferFailed names tensors that are missing, unknown or double: the
        weights are then a mixture. After an exception out of the iterator or vLLM the engine can only be closed.
        `poison` fills everything but the own slices with NaN before it is offered (for tests).
        """
        if not self._loadable:
            raise RuntimeError("a load has broken off, vLLM would miscount the next: close the engine, start another")
        names: list[str] = []

        def offered() -> Iterator[tuple[str, torch.Tensor]]:
            for weight in weights:
                names.append(weight[0])
                keep = self._vocab_padded and _is_vocabulary(weight[0])
                yield weight[0], offer(weight, poison=poison, keep=keep)

        self._loadable = False
        self._running.collective_rpc("reload_weights", kwargs={"weights_iterator": offered()})
        self._loadable = True
        if sorted(names) != self._expected:
            missing, unknown = sorted(set(self._expected) - set(names)), sorted(set(names) - set(self._expected))
            raise TransferFailed(f"weights for vLLM: missing {missing}, unknown {unknown}, or one came twice")
        self._repack_tied_head()
        if not self._running.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache: requests are unfinished")

    def generate(
        self, requests: list[Request], told: Callable[[Callable[[], list[Completion]]], None] = lambda _: None
    ) -> list[Completion]:
        """Completions in the order of the requests; collective over the slots of the engine.

        Every slot of an engine passes the same list in the same order and gets the same result; engines are
        independent. An empty list is allowed. After each step of the engine `told` is given a function that says how far
        the requests have come. ValueError, before anything is generated, for an empty prompt and for one
        that does not fit `max_model_tokens` with its response.
        """
        engine = self._running
        for request in requests:
            prompt_tokens, response_tokens = len(request.prompt_tokens), request.max_response_tokens
            if not 0 < prompt_tokens <= self._max_model_tokens - response_tokens:
                raise ValueError(
                    f"request {request.request_id}: a prompt of {prompt_tokens} tokens with a response of up to "
                    f"{response_tokens} does not fit max_model_tokens = {self._max_model_tokens}"
                )
        finished: dict[str, RequestOutput] = {}
        with self._world.inside(self._group), _random_states_kept():
            for index, request in enumerate(requests):
                prompt = {"prompt_token_ids": [*request.prompt_tokens, *request.so_far_tokens]}
                engine.add_request(str(index), prompt, _sampling(request))  # pyright: ignore[reportArgumentType]
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if isinstance(output, RequestOutput) and output.finished:
                        finished[output.request_id] = output
                told(lambda: self._so_far(requests, finished))
        return [_completion(request, finished[str(index)]) for index, request in enumerate(requests)]

    def _so_far(self, requests: list[Request], finished: Mapping[str, RequestOutput]) -> list[Completion]:
        """What has been sampled of each request that has begun."""
        found = [_completion(requests[int(index)], output) for index, output in finished.items()]
        for state in self._running.output_processor.request_states.values():  # vLLM's own record: private
            if state.detokenizer is not None and state.logprobs_processor is not None:
                request = requests[int(state.external_req_id)]
                sampled = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
                found.append(_joined(request, *sampled, "running"))
        return found

    def resident_bytes(self) -> dict[str, int]:
        """Bytes that this slot's part holds: {"weights": ..., "kv_cache": ...}.

        Weights are counted as loaded, vocabulary padding included; on the CPU a packed copy stands in for each
        linear weight, and stands beside the weight for embedding and output head.
        """
        caches = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in self._kv_caches()}
        weights = sum(_module_bytes(module) for module in self._model.modules())
        return {"weights": weights, "kv_cache": sum(caches.values())}

    def close(self) -> None:
        """Shuts the engine down and destroys its groups; the world and its other groups stand. Safe to call twice.

        Local: it waits for no peer, so it may follow the loss of one.
        """
        if self._engine is None:
            return
        for module in self._model.modules():  # its values hold their keys: without this a loaded model never dies
            LAYERWISE_INFO.pop(module, None)
        engine, self._engine = self._engine, None
        with self._world.inside(self._group):
            engine.engine_core.shutdown()
            engine.renderer.shutdown()
        del engine
        gc.collect()

    @property
    def _running(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("the engine is closed")
        return self._engine

    @property
    def _model(self) -> torch.nn.Module:
        return self._running.model_executor.driver_worker.worker.get_model()

    def _kv_caches(self) -> list[torch.Tensor]:
        return self._running.model_executor.driver_worker.worker.model_runner.kv_caches

    def _repack_tied_head(self) -> None:
        """Packs a tied output head anew: it gets no load of its own, so its packed copy would stay old (8.2)."""
        model = self._model
        if self._running.model_config.hf_config.tie_word_embeddings and current_platform.is_cpu():
            head = model.get_submodule("lm_head")
            head.quant_method.process_weights_after_loading(head)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Puts back the three global random states: vLLM's start seeds them, and its CPU sampler draws from torch's."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


@contextmanager
def _process_state_kept(slots: tuple[int, ...]) -> Iterator[None]:
    """Around an engine's start: puts back what vLLM changes for the whole process, besides the random states.

    That is os.environ (vLLM leaves an LD_PRELOAD for children), and `torch.set_num_threads`, which vLLM's CPU worker
    replaces by one that refuses, and the number of threads.
    """
    environment = dict(os.environ)
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    os.environ[ENGINE_KEY] = "-".join(map(str, slots))
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(environment)


def _destroy_groups() -> None:
    """Destroys all groups that vLLM has made in this process; its world group too, but not the process's (`boot`)."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def _checkpoint_names(model: torch.nn.Module, experts: int) -> list[str]:
    """The Hugging Face names of all tensors that the model loads: its parameters with fused modules taken apart."""
    fused: dict[str, list[str]] = model.packed_modules_mapping  # pyright: ignore[reportAssignmentType]
    names = []
    for name, _ in model.named_parameters():
        if (found := _EXPERTS.fullmatch(name)) is not None:
            pieces = _EXPERT_PIECES[found["family"], found["weight"]]
            names += [f"{found['before']}.experts.{n}.{piece}.weight" for n in range(experts) for piece in pieces]
            continue
        for module, pieces in fused.items():
            if f".{module}." in name:
                names.extend(name.replace(f".{module}.", f".{piece}.") for piece in pieces)
                break
        else:
            names.append(name)
    return sorted(names)


def _is_vocabulary(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "lm_head.weight"))


def _module_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's own parameters as loaded; twice where a packed copy lives beside the weight."""
    parameters, _ = get_layerwise_info(module).restore_metadata
    loaded_bytes = sum(prod(tensor.shape) * tensor.element_size() for tensor in parameters.values())
    weight = getattr(module, "weight", None)
    beside = hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel() > 0
    return 2 * loaded_bytes if beside else loaded_bytes


def _sampling(request: Request) -> SamplingParams:
    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed,
        max_tokens=request.max_response_tokens - len(request.so_far_tokens),
        stop_token_ids=[request.stop_token],
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(request: Request, output: RequestOutput) -> Completion:
    """The record of a finished request; RuntimeError for an end that is neither the stop token nor the length."""
    (sample,) = output.outputs
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"request {request.request_id}: vLLM ended it with {sample.finish_reason!r}")
    return _joined(request, sample.token_ids, sample.logprobs, sample.finish_reason)


def _joined(
    request: Request, sampled: Sequence[int], steps: Any, finished: Literal["stop", "length", "running"]
) -> Completion:
    """What was sampled before and now; RuntimeError where log-probabilities are missing."""
    tokens = tuple(sampled)
    listed = [step for step in steps or () if step is not None]
    if len(listed) != len(tokens):
        raise RuntimeError(f"request {request.request_id}: {len(listed)} log-probabilities of {len(tokens)} tokens")
    return Completion(
        request_id=request.request_id,
        tokens=(*request.so_far_tokens, *tokens),
        logprobs=(*request.so_far_logprobs, *(s[t].logprob for s, t in zip(listed, tokens, strict=True))),
        finished=finished,
    )
