"""True seconds of training and forward passes: micro-batch by micro-batch, from measured kernels and real samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nereus.costs.shape import Shape
from nereus.fleet import Device, Fleet
from nereus.layout import Coordinates, StagePlan, batch_shares
from nereus.sim.measured import (
    collective_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
    prefill_attention_seconds,
    relative,
)
from nereus.sim.truth import Floats, Ints

ROWS = np.geomspace(1, 1 << 18, 73)
TOKENS = np.geomspace(16, 1 << 18, 57)
MEMORY_SHARE = 0.72
"""What streaming kernels reach of the memory's data sheet."""
SUSTAINED = {"a100": 1.08, "h100": 1.3, "h200": 1.3, "b200": 1.6, "l40s": 1.2}
"""Products of long training runs over micro-benchmarks: clocks fall. What `nereus accuracy` found on public runs; L40S: a guess."""
KERNEL_SECONDS = 4.5e-6
KERNELS = 14
BACKWARD_PRODUCTS, BACKWARD_ATTENTION = 2.0, 2.5
"""Backward over forward: two products for one; flash attention's five for two."""
OPTIMIZER_BYTES = 28.0
"""Read and written for each owned parameter: gradient, master and two moments in float32, weight in bf16."""
OPTIMIZER_SECONDS = 8e-3
LEAST_EXPOSED_SHARE, HIDING_SHARE = 0.12, 0.6
"""Of collectives over replicas so much always shows, and the last micro-batch's backward hides so much of its own time."""
GRADIENT_BYTES, WEIGHT_BYTES = 4.0, 2.0


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTimes:
    """One layer on one device under a layout: forward seconds by rows, attention's by the tokens of a sequence."""

    products: Floats
    streams: Floats
    collectives: Floats
    attention: Floats

    def rows_seconds(self, rows: Floats, *, backward: bool) -> Floats:
        """A micro-batch of so many rows without its attention; with the backward pass if asked."""
        times = self.products * (1 + BACKWARD_PRODUCTS * backward)
        times = times + (self.streams + self.collectives) * (1 + 1.0 * backward)
        return np.interp(rows, ROWS, times)

    def attention_seconds(self, tokens: Floats, *, backward: bool) -> Floats:
        """Each sequence's attention."""
        return np.interp(tokens, TOKENS, self.attention) * (1 + BACKWARD_ATTENTION * backward)


def layer_times(shape: Shape, device: Device, tp: int, cp: int, ep: int, per_node: int) -> LayerTimes:
    """A decoder layer. `per_node` is how many ranks of a tensor group share a node."""
    rows = ROWS / cp
    products = np.zeros(len(rows))
    for out, into in shape.attention_matrices(tp):
        products = products + gemm_seconds(device, rows, out, into)
    width = shape.ffn
    if shape.expert_count:
        width = shape.active_expert_count * shape.expert_ffn
        local = max(shape.expert_count // ep, 1)
        each = np.maximum(rows * ep * shape.active_expert_count / shape.expert_count, 1.0)
        for out, into in shape.mlp_matrices(shape.expert_ffn, tp):
            products = products + grouped_gemm_seconds(device, local, each, out, into)
    else:
        for out, into in shape.mlp_matrices(shape.ffn, tp):
            products = products + gemm_seconds(device, rows, out, into)
    products = products * SUSTAINED[relative(device).name]
    moved = 2 * rows * (20 * shape.hidden + (4 * shape.query_dim + 4 * width) / tp)
    streams = moved / (MEMORY_SHARE * device.memory_bytes_per_second) + KERNELS * KERNEL_SECONDS
    message = 2 * rows * shape.hidden
    collectives = 2 * collective_seconds(device, "all_reduce", message, tp, per_node)
    if shape.expert_count and ep > 1:
        routed = message * shape.active_expert_count / tp
        collectives = collectives + 2 * collective_seconds(device, "alltoall", routed, ep, device.slots_per_node // tp)
    heads, keys = max(shape.heads // tp, 1), max(shape.kv_heads // tp, 1)
    attention = prefill_attention_seconds(device, heads, keys, 1, TOKENS) / cp
    return LayerTimes(products=products, streams=streams, collectives=collectives, attention=attention)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batching:
    """Which samples make which micro-batch: [samples] the micro-batch, [micro] the group of (mini-batch, replica)."""

    micro_of: Ints
    group_of: Ints
    groups: int

    @staticmethod
    def of(stage: StagePlan, samples: int, mini_batches: int) -> Batching:
        """Samples in order: mini-batch by mini-batch, replica by replica as the shares say."""
        micro: list[int] = []
        groups: list[int] = []
        each = samples // mini_batches
        for mini in range(mini_batches):
            count = each if mini < mini_batches - 1 else samples - each * (mini_batches - 1)
            for replica, share in enumerate(batch_shares(stage, count)):
                for first in range(0, share, stage.micro_batch):
                    micro += [len(groups)] * min(stage.micro_batch, share - first)
                    groups.append(mini * stage.layout.dp + replica)
        return Batching(
            micro_of=np.array(micro, dtype=np.int64),
            group_of=np.array(groups, dtype=np.int64),
            groups=mini_batches * stage.layout.dp,
        )


class StageTimes:
    """One model-stage that trains or infers, on its slots: seconds of a batch of real samples."""

    def __init__(self, shape: Shape, stage: StagePlan, fleet: Fleet, samples: int, mini_batches: int) -> None:
        self.shape, self.stage, self.fleet, self.samples = shape, stage, fleet, samples
        layout = stage.layout
        self.mini_batches = mini_batches if stage.stage == "train" else 1
        self.slots = np.array(
            [
                [
                    [
                        stage.slots[layout.rank(Coordinates(tp=tp, cp=cp, pp=pp, dp=dp))]
                        for cp in range(layout.cp)
                        for tp in range(layout.tp)
                    ]
                    for pp in range(layout.pp)
                ]
                for dp in range(layout.dp)
            ],
            dtype=np.int64,
        )
        self._times = [self._device_times(device) for device in self._devices]
        pace = [times.products[-1] + times.collectives[-1] for times in self._times]
        order = np.array([self._devices.index(fleet.device_of[int(slot)]) for slot in self.slots.flat])
        slowest = np.array(pace)[order].reshape(self.slots.shape)
        self.reference = int(np.argmax(pace))
        self.device = self._devices[self.reference]
        self.relative = slowest.max(axis=2) / pace[self.reference]  # [dp, pp] of the slowest device's time
        self._training = Batching.of(stage, samples, self.mini_batches)
        self._forward = Batching.of(stage, samples, 1)

    @cached_property
    def _devices(self) -> list[Device]:
        return list({self.fleet.device_of[slot].name: self.fleet.device_of[slot] for slot in self.stage.slots}.values())

    def _device_times(self, device: Device) -> LayerTimes:
        layout = self.stage.layout
        return layer_times(self.shape, device, layout.tp, layout.cp, layout.ep, self._per_node(self.slots[0, 0]))

    def _per_node(self, group: Ints) -> int:
        """How many members of a group share a node, on average."""
        return max(1, len(group) // len(set(self.fleet.node_of[group].tolist())))

    def most_rows(self, tokens: Floats, *, training: bool) -> float:
        """Tokens of the fullest micro-batch."""
        return float(np.bincount((self._training if training else self._forward).micro_of, tokens).max())

    def forward_seconds(self, tokens: Floats, slowness: Floats) -> float:
        """A forward pass over all samples; `slowness` by slot."""
        return float(self._passes(tokens, slowness, self._forward, backward=False).max())

    def training_seconds(self, tokens: Floats, slowness: Floats, epochs: int) -> float:
        """All mini-batches, `epochs` times, with gradients over replicas and the optimizer."""
        passes = self._passes(tokens, slowness, self._training, backward=True).reshape(self.mini_batches, -1)
        slow = float(slowness[self.slots].max())
        return epochs * float(passes.max(axis=1).sum() + self.mini_batches * self.update_seconds(tokens) * slow)

    def _passes(self, tokens: Floats, slowness: Floats, batching: Batching, *, backward: bool) -> Floats:
        """[mini-batch x replica] seconds of its pipeline: its busiest rank over all, the others for the longest."""
        times, micros = self._times[self.reference], len(batching.group_of)
        attention = times.attention_seconds(tokens, backward=backward)
        rows = np.bincount(batching.micro_of, tokens, micros).astype(np.float64)
        layer = times.rows_seconds(rows, backward=backward) + np.bincount(batching.micro_of, attention, micros)
        head = np.interp(rows, ROWS, self._head) * (1 + BACKWARD_PRODUCTS * backward)
        group, groups = batching.group_of, batching.groups
        sums = [np.bincount(group, each, groups) for each in (layer, head)]
        longest = [np.zeros(groups), np.zeros(groups)]
        for each, most in zip((layer, head), longest, strict=True):
            np.maximum.at(most, group, each)
        pace = slowness[self.slots].max(axis=2) * self.relative  # [dp, pp]
        layers = np.array(self.stage.layout.pipeline, dtype=np.float64) * pace
        layers = np.tile(layers, (groups // len(layers), 1))
        last = np.tile(pace[:, -1], groups // len(pace))
        whole, once = (layers * part[0][:, None] for part in ((sums[0],), (longest[0],)))
        whole[:, -1] += last * sums[1]
        once[:, -1] += last * longest[1]
        busiest = whole.argmax(axis=1)
        at = np.arange(groups)
        return whole[at, busiest] + once.sum(axis=1) - once[at, busiest]

    @cached_property
    def _head(self) -> Floats:
        """Logits and loss of a micro-batch by rows."""
        layout = self.stage.layout
        rows, vocab = ROWS / layout.cp, self.shape.vocab / layout.tp
        if self.shape.vocab <= 1:
            return np.full(len(rows), 2 * KERNEL_SECONDS)
        memory = 4 * rows * vocab * 3 / (MEMORY_SHARE * self.device.memory_bytes_per_second)
        return gemm_seconds(self.device, rows, vocab, self.shape.hidden) + memory

    @cached_property
    def parameters(self) -> float:
        """Of the fullest rank."""
        layout, shape = self.stage.layout, self.shape
        ends = max(shape.embedding_parameters_count, shape.head_parameters_count)
        inner = shape.parameters_count - shape.embedding_parameters_count - shape.head_parameters_count
        return (inner * max(layout.pipeline) / shape.layers + ends) / layout.tp

    def update_seconds(self, tokens: Floats) -> float:
        """Once a mini-batch: what shows of the collectives over replicas, and the optimizer's step."""
        layout = self.stage.layout
        exchanged = self._exchange_seconds
        last = float(np.mean(tokens)) * self.stage.micro_batch
        backward = float(self._times[self.reference].rows_seconds(np.array([last]), backward=True)[0]) * 2 / 3
        hidden = HIDING_SHARE * backward * max(layout.pipeline)
        shown = max(LEAST_EXPOSED_SHARE * exchanged, exchanged - hidden)
        owned = self.parameters / (layout.optimizer_ranks if layout.distributed_optimizer else 1)
        memory = owned * OPTIMIZER_BYTES / (MEMORY_SHARE * self.device.memory_bytes_per_second)
        return shown + memory + OPTIMIZER_SECONDS

    @cached_property
    def _exchange_seconds(self) -> float:
        layout = self.stage.layout
        ranks = layout.dp * layout.cp
        per_node = self._per_node(self.slots[:, 0, :: layout.tp].reshape(-1))
        spread = collective_seconds(self.device, "reduce_scatter", GRADIENT_BYTES * self.parameters, ranks, per_node)
        back = collective_seconds(self.device, "all_gather", WEIGHT_BYTES * self.parameters, ranks, per_node)
        return float(spread + back)
