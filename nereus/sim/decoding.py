"""True seconds of generation: engines that decode their own responses until the longest ends."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from nereus.config import Config
from nereus.costs.shape import Shape, shape_of
from nereus.fleet import Device, Fleet
from nereus.layout import StagePlan, batch_shares
from nereus.memory import kv_bytes_per_token
from nereus.sim.measured import (
    _Grid,
    collective_seconds,
    decode_attention_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
)
from nereus.sim.training import KERNEL_SECONDS, LayerTimes, layer_times
from nereus.sim.truth import Floats, Ints, Truth

LIVE = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048], dtype=np.float64)
CONTEXTS = np.geomspace(16, 1 << 17, 27)
DECODE_KERNELS = 7
PREFILL_TOKENS = 8192
"""Rows of a chunk of prefill, vLLM's max_num_batched_tokens."""


def step_grid(shape: Shape, device: Device, tp: int, per_node: int, truth: Truth) -> _Grid:
    """Seconds of one decode step by sequences and by context, for one replica of `tp` ranks."""
    live, context = np.meshgrid(LIVE, CONTEXTS, indexing="ij")
    products = np.zeros(live.shape)
    for out, into in shape.attention_matrices(tp):
        products = products + gemm_seconds(device, live, out, into)
    if shape.expert_count:
        chosen = shape.expert_count * (1 - (1 - shape.active_expert_count / shape.expert_count) ** live)
        each = np.maximum(live * shape.active_expert_count / chosen, 1.0)
        for out, into in shape.mlp_matrices(shape.expert_ffn, tp):
            products = products + grouped_gemm_seconds(device, chosen, each, out, into)
    else:
        for out, into in shape.mlp_matrices(shape.ffn, tp):
            products = products + gemm_seconds(device, live, out, into)
    heads, keys = max(shape.heads // tp, 1), max(shape.kv_heads // tp, 1)
    attention = decode_attention_seconds(device, heads, keys, live, context)
    reduced = 2 * collective_seconds(device, "all_reduce", 2 * live * shape.hidden, tp, per_node)
    layer = products + attention + reduced + DECODE_KERNELS * KERNEL_SECONDS * 0.3  # graphs hide most of a launch
    head = gemm_seconds(device, live, shape.vocab / tp, shape.hidden)
    overhead = truth.decode_step_seconds + truth.decode_token_seconds * live * (1 + live / truth.crowd_sequences)
    return _Grid((LIVE, CONTEXTS), np.log(shape.layers * layer + head + overhead))


class GenerationTimes:
    """The engines of a generation stage: seconds of a batch of prompts and responses."""

    def __init__(self, config: Config, stage: StagePlan, fleet: Fleet, truth: Truth) -> None:
        self.stage, self.truth = stage, truth
        self.shape = shape_of(config.model)
        tp = stage.layout.tp
        self.slots = np.array(stage.slots, dtype=np.int64).reshape(
            stage.layout.dp, tp
        )  # tp counts faster, pp and cp are 1
        devices = {fleet.device_of[int(s)].name: fleet.device_of[int(s)] for s in self.slots[:, 0]}
        self.names = [fleet.device_of[int(s)].name for s in self.slots[:, 0]]
        per_node = max(1, tp // len(set(fleet.node_of[self.slots[0]].tolist())))
        self.grids = {name: step_grid(self.shape, device, tp, per_node, truth) for name, device in devices.items()}
        self.prefills: dict[str, LayerTimes] = {
            name: layer_times(self.shape, device, tp, 1, 1, per_node) for name, device in devices.items()
        }
        self.cache_tokens = config.rollout.kv_cache_bytes / kv_bytes_per_token(config.model, tp)

    def seconds(self, prompts: Ints, responses: Ints, slowness: Floats) -> float:
        """Until the last engine is done."""
        shares = batch_shares(self.stage, len(prompts))
        edges = np.concatenate([[0], np.cumsum(shares)])
        engine, *columns = self._stretches(prompts, responses, edges)
        total = np.zeros(len(engine))
        for name, grid in self.grids.items():
            here = np.isin(engine, [i for i, other in enumerate(self.names) if other == name])
            total[here] = columns[2][here] * grid.at(columns[0][here], columns[1][here])
        seconds = np.bincount(engine, total, len(shares)) + self._prefill(prompts, edges)
        return float((seconds * slowness[self.slots].max(axis=1)).max())

    def _stretches(self, prompts: Ints, responses: Ints, edges: Ints) -> tuple[Ints, Floats, Floats, Floats]:
        """Stretches of decode steps: the engine, sequences alive, their mean context, steps."""
        shares = np.diff(edges)
        sums = [np.add.reduceat(np.append(part, 0), edges[:-1]) * (shares > 0) for part in (prompts, responses)]
        prompt, response = (part / np.maximum(shares, 1) for part in sums)
        room = np.maximum(self.cache_tokens / np.maximum(prompt + response, 1.0), 1.0)
        together = np.minimum(np.minimum(shares, room.astype(np.int64)), self.truth.most_sequences)
        most = int(shares.max())
        at = np.minimum(edges[:-1, None] + np.arange(most), len(responses) - 1)
        ends = np.sort(np.where(np.arange(most) < shares[:, None], responses[at], 0).astype(np.float64), axis=1)
        begins = np.concatenate([np.zeros((len(shares), 1)), ends[:, :-1]], axis=1)
        engine = np.repeat(np.arange(len(shares)), most)
        live = np.tile(np.arange(most, 0, -1, dtype=np.float64), len(shares))
        context = (prompt[:, None] + (begins + ends) / 2).reshape(-1)
        steps = (ends - begins).reshape(-1)
        used = (steps > 0) & (together == shares)[engine]
        found = [(engine[used], live[used], context[used], steps[used])]
        for index in np.flatnonzero(together < shares).tolist():
            own = self._waves(responses[edges[index] : edges[index + 1]], int(together[index]))
            count = len(own[0])
            mean = np.full(count, float(prompt[index] + response[index] / 2))
            found.append((np.full(count, index), own[0], mean, own[1]))
        engines, lives, contexts, counts = (np.concatenate(column) for column in zip(*found, strict=True))
        return engines, lives, contexts, counts

    @staticmethod
    def _waves(responses: Ints, together: int) -> tuple[Floats, Floats]:
        """An engine with room for fewer than it has: who waits takes the place of the first that ends."""
        lanes: list[int] = responses[:together].tolist()
        heapify(lanes)
        for tokens in responses[together:].tolist():
            heapreplace(lanes, lanes[0] + tokens)
        ends = np.sort(np.array(lanes, dtype=np.float64))
        begins = np.concatenate([[0.0], ends[:-1]])
        return np.arange(together, 0, -1, dtype=np.float64), ends - begins

    def _prefill(self, prompts: Ints, edges: Ints) -> Floats:
        """[engines] seconds of the prompts' forward passes, in chunks."""
        sums = np.add.reduceat(np.append(prompts, 0), edges[:-1]) * (np.diff(edges) > 0)
        found = np.zeros(len(sums))
        for name, times in self.prefills.items():
            here = np.array([other == name for other in self.names])
            rate = float(times.rows_seconds(np.array([float(PREFILL_TOKENS)]), backward=False)[0]) / PREFILL_TOKENS
            attention = times.attention_seconds(prompts.astype(np.float64), backward=False)
            heads = np.add.reduceat(np.append(attention, 0.0), edges[:-1]) * (np.diff(edges) > 0)
            found[here] = (self.shape.layers * (rate * sums + heads))[here]
        return found
