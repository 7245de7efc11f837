"""True seconds of a model's passes under a Cut: micro-batches of real samples on measured kernels, with collectives over replicas.

What `nereus.sim.training` does not have: full sharding, recomputation, micro-batches by tokens, balanced replicas. A
plain Cut takes the same seconds as there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from nereus.costs.rates import DISPATCH_SECONDS
from nereus.costs.shape import Shape
from nereus.fleet import Device, Fleet
from nereus.layout import Layout, StagePlan, equal_shares
from nereus.sim.measured import collective_seconds
from nereus.sim.rivals.setups import Cut, Offload, Packing
from nereus.sim.training import (
    BACKWARD_PRODUCTS,
    HIDING_SHARE,
    LEAST_EXPOSED_SHARE,
    MEMORY_SHARE,
    OPTIMIZER_BYTES,
    OPTIMIZER_SECONDS,
    ROWS,
    LayerTimes,
    StageTimes,
    layer_times,
)
from nereus.sim.truth import Floats, Ints

WEIGHT_BYTES = 2.0
HOST_SHARE = 0.8
"""What moves over PCIe reach of its data sheet."""
HOST_ADAM_BYTES_PER_SECOND = 240e9
"""An optimizer on a node's CPUs: 60 % of 16 channels of DDR4-3200, an assumption."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Micros:
    """Micro-batches of one pass: [mini-batch, replica, index] tokens, and seconds of a layer's attention."""

    rows: Floats
    attention: Floats


class Passes(StageTimes):
    """One model under a Cut on a fleet."""

    def __init__(self, shape: Shape, cut: Cut, fleet: Fleet, samples: int, mini_batches: int, *, trains: bool) -> None:
        self.cut = cut
        layout = Layout(
            tp=cut.tp,
            pp=cut.pp,
            dp=cut.dp,
            cp=cut.cp,
            ep=cut.ep,
            etp=1 if shape.expert_count and cut.ep > 1 else None,
            pipeline=cut.pipeline or equal_shares(shape.layers, cut.pp),
        )
        minis = mini_batches if trains else 1
        stage = StagePlan(
            model="actor",
            stage="train" if trains else "infer",
            layout=layout,
            slots=cut.slots[: layout.ranks],
            shares=equal_shares(samples // minis, cut.dp),
            micro_batch=samples,  # what the plain passes would take; these make their own micro-batches
        )
        super().__init__(shape, stage, fleet, samples, minis)

    def _device_times(self, device: Device) -> LayerTimes:
        layout = self.stage.layout
        return _known_times(self.shape, device, layout.tp, layout.cp, layout.ep, self._per_node(self.slots[0, 0]))

    # -- passes --------------------------------------------------------------------------------------------------

    def forward_seconds(self, tokens: Floats, slowness: Floats) -> float:
        """A pass without gradients over all samples."""
        packing = self.cut.packing
        micros = self._micros(
            tokens,
            1,
            Packing(samples=packing.forward_samples, tokens=packing.forward_tokens, balanced=packing.balanced),
        )
        return float(self._pass_seconds(micros, slowness, backward=False).sum())

    def training_seconds(self, tokens: Floats, slowness: Floats, epochs: int) -> float:
        """All mini-batches, `epochs` times, with the optimizer."""
        micros = self._micros(tokens, self.mini_batches, self.cut.packing)
        passes = float(self._pass_seconds(micros, slowness, backward=True).sum())
        slow = float(slowness[self.slots].max())
        last = float(micros.rows[-1].mean())
        updates = self.mini_batches * (self._shown_exchange(last) + self._optimizer_seconds) * slow
        return epochs * (passes + updates)

    def moved_seconds(self, offload: Offload, *, trains: bool) -> float:
        """What a phase brings from host memory before it, and after training takes back."""
        weights, state = offload == "all", offload != "nothing"
        once = self.host_seconds(weights=weights, optimizer=state and trains)
        return 2 * once if trains else once

    def _pass_seconds(self, micros: Micros, slowness: Floats, *, backward: bool) -> Floats:
        """[mini-batches] seconds until the slowest replica is done."""
        times = self._times[self.reference]
        layer = times.rows_seconds(micros.rows, backward=backward) + micros.attention * (
            _attention_passes(self.cut) if backward else 1
        )
        if backward and self.cut.recompute:
            layer = layer + times.rows_seconds(micros.rows, backward=False)
        empty = micros.rows <= 0
        layer = np.where(empty, 0.0, layer)
        head = np.where(empty, 0.0, np.interp(micros.rows, ROWS, self._head) * (1 + BACKWARD_PRODUCTS * backward))
        pace = slowness[self.slots].max(axis=2) * self.relative  # [dp, pp]
        if self.cut.sharding == "full":
            return self._sharded(layer, head, pace[:, 0], backward=backward)
        layers = np.array(self.stage.layout.pipeline, dtype=np.float64) * pace
        last = pace[:, -1]
        whole, once = (part[..., None] * layers for part in (layer.sum(axis=2), layer.max(axis=2)))
        whole[..., -1] += head.sum(axis=2) * last
        once[..., -1] += head.max(axis=2) * last
        busiest = whole.argmax(axis=2)[..., None]
        seconds = (
            np.take_along_axis(whole, busiest, 2)
            + once.sum(axis=2, keepdims=True)
            - np.take_along_axis(once, busiest, 2)
        )
        found = seconds[..., 0].max(axis=1)
        if self.cut.sharding == "gradients" and backward:  # ZeRO-2 reduces after each micro-batch, not hidden
            found = found + (micros.rows > 0).any(axis=1).sum(axis=1) * self._reduce_seconds
        return found

    def _sharded(self, layer: Floats, head: Floats, pace: Floats, *, backward: bool) -> Floats:
        """[mini-batches] with weights gathered for each micro-batch: replicas wait for each other in every one."""
        busy = ((layer * self.shape.layers + head) * pace[None, :, None]).max(axis=1)  # [mini-batch, index]
        ahead = busy * (1 / (4 if self.cut.recompute else 3) if backward else 1.0)
        shown = exposed(self._gather_seconds, ahead)
        if backward:
            shown = shown + exposed(self._gather_seconds + self._reduce_seconds, busy - ahead)
        return (busy + np.where(busy > 0, shown, 0.0)).sum(axis=1)

    # -- micro-batches -------------------------------------------------------------------------------------------

    def _micros(self, tokens: Floats, minis: int, packing: Packing) -> Micros:
        attention = self._times[self.reference].attention_seconds(tokens, backward=False)
        groups = self._groups(tokens, minis, balanced=packing.balanced)
        if packing.tokens:
            return _by_tokens(tokens, attention, groups, packing.tokens, together=self.cut.sharding == "full")
        return _by_samples(tokens, attention, groups, max(packing.samples, 1))

    def _groups(self, tokens: Floats, minis: int, *, balanced: bool) -> list[list[Ints]]:
        """[mini-batch][replica] the samples."""
        replicas, samples = self.stage.layout.dp, len(tokens)
        if balanced:
            dealt = _dealt(tokens, replicas)
            return [list(split) for split in zip(*(np.array_split(own, minis) for own in dealt), strict=True)]
        each, found, first = samples // minis, [], 0
        for mini in range(minis):
            count = each if mini < minis - 1 else samples - first
            edges = np.cumsum((0, *equal_shares(count, replicas))) + first
            found.append([np.arange(a, b) for a, b in pairwise(edges)])
            first += count
        return found

    # -- collectives over replicas, optimizer, host ----------------------------------------------------------------

    @property
    def _ranks(self) -> int:
        return self.stage.layout.dp * self.stage.layout.cp

    @cached_property
    def _replicas_per_node(self) -> int:
        return self._per_node(self.slots[:, 0, :: self.stage.layout.tp].reshape(-1))

    def _over_replicas(self, operation: str, size_bytes: float) -> float:
        return float(collective_seconds(self.device, operation, size_bytes, self._ranks, self._replicas_per_node))

    @cached_property
    def _layer_parameters(self) -> float:
        shape = self.shape
        ends = shape.embedding_parameters_count + shape.head_parameters_count
        return (shape.parameters_count - ends) / shape.layers / self.stage.layout.tp

    @cached_property
    def _gather_seconds(self) -> float:
        """All weights once, layer by layer; from host memory first where they wait there."""
        shape = self.shape
        ends = (shape.embedding_parameters_count + shape.head_parameters_count) / self.stage.layout.tp
        wire = shape.layers * self._over_replicas("all_gather", WEIGHT_BYTES * self._layer_parameters)
        wire += self._over_replicas("all_gather", WEIGHT_BYTES * ends)
        if self.cut.on_host:
            wire += self.host_seconds(weights=True, optimizer=False)
        return wire

    @cached_property
    def _reduce_seconds(self) -> float:
        """All gradients once, layer by layer."""
        each = self._over_replicas("reduce_scatter", self.cut.gradient_bytes * self._layer_parameters)
        ends = self.parameters - self._layer_parameters * max(self.stage.layout.pipeline)
        return self.shape.layers * each + self._over_replicas(
            "reduce_scatter", self.cut.gradient_bytes * max(ends, 0.0)
        )

    def _shown_exchange(self, last_rows: float) -> float:
        """What shows once a mini-batch of gradients and weights that cross replicas. Full sharding did it before."""
        if self.cut.sharding == "full":
            return 0.0
        if self.cut.sharding == "gradients":
            return self._over_replicas("all_gather", WEIGHT_BYTES * self.parameters)
        rows = np.array([last_rows])
        backward = float(self._times[self.reference].rows_seconds(rows, backward=True)[0]) * 2 / 3
        return float(exposed(self._exchange_seconds, backward * max(self.stage.layout.pipeline)))

    @property
    def owned_parameters(self) -> float:
        """Parameters whose optimizer state a rank has."""
        whole = self.shape.parameters_count if self.cut.sharding == "full" else self.parameters
        return whole / self._ranks

    @cached_property
    def _optimizer_seconds(self) -> float:
        moved = self.owned_parameters * OPTIMIZER_BYTES
        if self.cut.host_adam:
            per_node = min(self.device.slots_per_node, len(self.cut.slots))
            there_and_back = (self.cut.gradient_bytes + WEIGHT_BYTES) * self.owned_parameters / self._host_rate
            return moved * per_node / HOST_ADAM_BYTES_PER_SECOND + there_and_back + OPTIMIZER_SECONDS
        return moved / (MEMORY_SHARE * self.device.memory_bytes_per_second) + OPTIMIZER_SECONDS

    @property
    def _host_rate(self) -> float:
        return HOST_SHARE * self.device.pcie_bytes_per_second

    def host_seconds(self, *, weights: bool, optimizer: bool) -> float:
        """To bring weights or optimizer state over PCIe, one way."""
        local = WEIGHT_BYTES * (self.owned_parameters if self.cut.sharding == "full" else self.parameters)
        state = (weights * local) + optimizer * 12.0 * self.owned_parameters
        return state / self._host_rate


_known_times = cache(layer_times)


def _attention_passes(cut: Cut) -> float:
    """Attention of forward and backward in forwards: flash attention's backward is 2.5."""
    return 3.5 + 1.0 * cut.recompute


def exposed(seconds: float, busy: Floats | float) -> Floats:
    """What shows of collectives beside computation of `busy` seconds."""
    return np.maximum(LEAST_EXPOSED_SHARE * seconds, seconds - HIDING_SHARE * np.asarray(busy))


def _dealt(tokens: Floats, replicas: int) -> list[Ints]:
    """Equal numbers of samples for each replica with about equal tokens: the longest first, there and back again."""
    order = np.argsort(-tokens, kind="stable")
    turns = np.arange(len(order)) // replicas
    place = np.where(turns % 2 == 0, np.arange(len(order)) % replicas, replicas - 1 - np.arange(len(order)) % replicas)
    return [np.sort(order[place == replica]) for replica in range(replicas)]


def _by_samples(tokens: Floats, attention: Floats, groups: list[list[Ints]], each: int) -> Micros:
    most = max(-(-len(own) // each) for mini in groups for own in mini)
    rows = np.zeros((len(groups), len(groups[0]), max(most, 1)))
    seconds = np.zeros(rows.shape)
    for m, mini in enumerate(groups):
        for r, own in enumerate(mini):
            at = np.arange(len(own)) // each
            rows[m, r, : at[-1] + 1 if len(own) else 0] = np.bincount(at, tokens[own])
            seconds[m, r, : at[-1] + 1 if len(own) else 0] = np.bincount(at, attention[own])
    return Micros(rows=rows, attention=seconds)


def _by_tokens(tokens: Floats, attention: Floats, groups: list[list[Ints]], most: int, *, together: bool) -> Micros:
    """Even micro-batches of at most so many tokens; `together`: all replicas have as many as the one with most."""
    sums = np.array([[tokens[own].sum() for own in mini] for mini in groups])
    work = np.array([[attention[own].sum() for own in mini] for mini in groups])
    counts = np.maximum(np.ceil(sums / most), 1.0)
    if together:
        counts = np.broadcast_to(counts.max(axis=1, keepdims=True), counts.shape)
    index = np.arange(int(counts.max()))
    used = index < counts[..., None]
    return Micros(
        rows=np.where(used, (sums / counts)[..., None], 0.0), attention=np.where(used, (work / counts)[..., None], 0.0)
    )


EAGER_LAYER_SECONDS = DISPATCH_SECONDS
"""What the host takes to issue a layer without a graph (nereus.costs.rates: fitted to public training of small models)."""
