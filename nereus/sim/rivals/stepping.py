"""A step of a Setup in the simulated world: seconds of its phases, and of the step that runs some of them beside others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nereus.costs.shape import Shape
from nereus.fleet import Device, Fleet
from nereus.layout import Layout, StagePlan, equal_shares
from nereus.sim.decoding import CONTEXTS, LIVE, GenerationTimes, step_grid
from nereus.sim.measured import _Grid, collective_seconds
from nereus.sim.rivals.memory import cache_tokens
from nereus.sim.rivals.passes import EAGER_LAYER_SECONDS, Passes
from nereus.sim.rivals.setups import Cut, Engines, RlJob, Setup
from nereus.sim.training import MEMORY_SHARE, layer_times
from nereus.sim.truth import Floats, Truth
from nereus.sim.workload import StepSamples

TENSORS_PER_LAYER, TENSORS_BESIDE = 9, 3
"""Of a Llama-like model: q, k, v, o, gate, up, down and two norms; embedding, head and the last norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handling:
    """What systems take around their kernels: published figures, see sources.json.

    `load_bytes_per_second` is what an engine takes over of whole weights on each slot; `tensor_call_seconds` what a call to
    all engines takes that hands one tensor over; `wake_seconds` what waking and sleeping take together.
    """

    load_bytes_per_second: float = 3.6e9
    tensor_call_seconds: float = 33e-3
    wake_seconds: float = 1.0


PUBLISHED = Handling()
GENEROUS = Handling(load_bytes_per_second=float("inf"), tensor_call_seconds=0.4e-3, wake_seconds=0.0)
"""As if weights went over at the links' rates alone, as those of Nereus' plans do in the simulated world."""


class EngineTimes(GenerationTimes):
    """The engines of a Setup."""

    def __init__(self, job: RlJob, engines: Engines, fleet: Fleet, truth: Truth) -> None:
        layout = Layout(tp=engines.tp, pp=1, dp=engines.replicas, pipeline=(job.actor.layers,))
        self.stage = StagePlan(
            model="actor",
            stage="generate",
            layout=layout,
            slots=engines.slots[: layout.ranks],
            shares=equal_shares(job.samples, engines.replicas),
            micro_batch=1,
        )
        self.truth, self.shape = replace(truth, most_sequences=engines.most_sequences), job.actor
        self.slots = np.array(self.stage.slots, dtype=np.int64).reshape(engines.replicas, engines.tp)
        firsts = [fleet.device_of[int(slot)] for slot in self.slots[:, 0]]
        devices = {device.name: device for device in firsts}
        self.names = [device.name for device in firsts]
        per_node = max(1, engines.tp // len(set(fleet.node_of[self.slots[0]].tolist())))
        self.grids = {name: _grid(job.actor, d, engines, per_node, truth) for name, d in devices.items()}
        self.prefills = {name: layer_times(job.actor, d, engines.tp, 1, 1, per_node) for name, d in devices.items()}
        room = min(device.memory_bytes for device in devices.values())
        self.cache_tokens = cache_tokens(job, engines, room)


def _grid(shape: Shape, device: Device, engines: Engines, per_node: int, truth: Truth) -> _Grid:
    """Decode steps; without graphs a step takes at least what the host needs to issue its layers."""
    grid = step_grid(shape, device, engines.tp, per_node, truth)
    if not engines.eager:
        return grid
    live = np.meshgrid(LIVE, CONTEXTS, indexing="ij")[0]
    overhead = truth.decode_step_seconds + truth.decode_token_seconds * live * (1 + live / truth.crowd_sequences)
    issued = shape.layers * EAGER_LAYER_SECONDS + overhead
    return _Grid(grid.axes, np.log(np.maximum(np.exp(grid.log_seconds), issued)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a step took: seconds by phase under verl's names, and its own, which is less where phases ran side by side."""

    phases: Mapping[str, float]
    seconds: float


class SystemTimes:
    """A Setup of a job on a fleet. `known` keeps the seconds of parts that setups have in common, on one batch only."""

    def __init__(
        self,
        job: RlJob,
        setup: Setup,
        fleet: Fleet,
        truth: Truth,
        handling: Handling = PUBLISHED,
        known: dict[tuple[object, ...], Any] | None = None,
    ) -> None:
        self.job, self.setup, self.fleet, self.truth, self.handling = job, setup, fleet, truth, handling
        self.known = known

        def passes(shape: Shape | None, cut: Cut | None, *, trains: bool) -> Passes | None:
            if shape is None or cut is None:
                return None
            return Passes(shape, replace(cut, offload="nothing"), fleet, job.samples, job.mini_batches, trains=trains)

        self.actor = self._part(("actor", _alike(setup.actor)), lambda: passes(job.actor, setup.actor, trains=True))
        self.critic = self._part(
            ("critic", _alike(setup.critic)), lambda: passes(job.critic, setup.critic, trains=True)
        )
        self.reference = self._part(
            ("reference", _alike(setup.reference)), lambda: passes(job.reference, setup.reference, trains=False)
        )
        self.engines = self._part(("engines", setup.engines), lambda: EngineTimes(job, setup.engines, fleet, truth))
        self.sync_seconds = self._sync()

    def _part(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if self.known is None:
            return make()
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def step(self, step: int, samples: StepSamples, slowness: Floats) -> Step:
        """Seconds of a step over these samples; `slowness` [slots] is how much longer each slot takes in it."""
        tokens = (samples.prompt_tokens + samples.response_tokens).astype(np.float64)
        setup = self.setup
        found = {
            "update_weights": self.sync_seconds,
            "gen": self._part(
                ("gen", setup.engines),
                lambda: self.engines.seconds(samples.prompt_tokens, samples.response_tokens, slowness),
            ),
            **self._trained("actor", setup.actor, self.actor, tokens, slowness, ("old_log_prob", "update_actor")),
            **self._trained("critic", setup.critic, self.critic, tokens, slowness, ("values", "update_critic")),
            **self._trained("reference", setup.reference, self.reference, tokens, slowness, ("ref",)),
        }
        found = {name: seconds * self.truth.noise(step, name) for name, seconds in found.items()}
        found["reward"] = self.truth.rest(step, len(tokens))
        return Step(phases=found, seconds=self._whole(found))

    def _trained(
        self,
        name: str,
        cut: Cut | None,
        passes: Passes | None,
        tokens: Floats,
        slowness: Floats,
        phases: tuple[str, ...],
    ) -> dict[str, float]:
        """Seconds of a model's forward pass, and of its training if it has that phase."""
        if cut is None or passes is None:
            return {}
        alike = _alike(cut)
        forward = self._part(("forward", name, alike), lambda: passes.forward_seconds(tokens, slowness))
        found = {phases[0]: forward + passes.moved_seconds(cut.offload, trains=False)}
        if len(phases) > 1:
            trained = self._part(
                ("train", name, alike), lambda: passes.training_seconds(tokens, slowness, self.job.epochs)
            )
            found[phases[1]] = trained + passes.moved_seconds(cut.offload, trains=True)
        return found

    def _whole(self, found: Mapping[str, float]) -> float:
        """Blocks one after the other; in a block models on slots of their own run beside each other."""
        place = {"old_log_prob": self.setup.actor, "update_actor": self.setup.actor, "ref": self.setup.reference}
        place |= {"values": self.setup.critic, "update_critic": self.setup.critic}

        def block(*names: str) -> float:
            by_slots: dict[tuple[int, ...], float] = {}
            for name in names:
                cut = place[name]
                if name in found and cut is not None:
                    shared = next((s for s in by_slots if set(s) & set(cut.slots)), cut.slots)
                    by_slots[shared] = by_slots.get(shared, 0.0) + found[name]
            return max(by_slots.values(), default=0.0)

        after = block("old_log_prob", "ref", "values") + block("update_critic", "update_actor") + found["reward"]
        if not self.setup.on_policy and not self.setup.colocated:  # the next generation runs meanwhile
            return found["update_weights"] + max(found["gen"], after)
        return found["update_weights"] + found["gen"] + after

    # -- weights to the engines ----------------------------------------------------------------------------------

    def _sync(self) -> float:
        """Seconds in which new weights reach the engines, waking included."""
        cut, engines, handling = self.setup.actor, self.setup.engines, self.handling
        wake = handling.wake_seconds if engines.sleeps else 0.0
        tensors = self.job.actor.layers * TENSORS_PER_LAYER + TENSORS_BESIDE
        if self.setup.sync == "broadcast":
            return wake + self._gathered(cut, tensors) + self._broadcast(tensors)
        if self.setup.sync == "whole":
            load = 2.0 * self.job.actor.parameters_count / handling.load_bytes_per_second
            return wake + self._gathered(cut, tensors) + load + tensors * self.truth.sync_tensor_seconds
        return wake + self.setup.planned_sync_seconds

    def _gathered(self, cut: Cut, tensors: int) -> float:
        """Every slot of the actor gets the whole of each tensor; cut by TP alone where it is not sharded fully."""
        size = 2.0 * self.job.actor.parameters_count / tensors
        ranks = len(cut.slots) if cut.sharding == "full" else cut.tp * cut.pp
        per_node = min(ranks, self.actor.device.slots_per_node)
        return tensors * float(collective_seconds(self.actor.device, "all_gather", size, ranks, per_node))

    def _broadcast(self, tensors: int) -> float:
        """From one slot to all engines, tensor by tensor, each with a call; within a node over links, else its port."""
        device, whole = self.actor.device, 2.0 * self.job.actor.parameters_count
        nodes = {int(self.fleet.node_of[slot]) for slot in (*self.setup.actor.slots[:1], *self.setup.engines.slots)}
        if self.setup.colocated:  # handles of memory of the same device
            wire = whole / (MEMORY_SHARE * device.memory_bytes_per_second)
        else:
            rate = device.link_bytes_per_second if len(nodes) == 1 else device.nic_bytes_per_second
            wire = whole / (self.truth.link_share * rate)
        return wire + tensors * self.handling.tensor_call_seconds


def _alike(cut: Cut | None) -> Cut | None:
    """What cuts that differ in offload alone have in common."""
    return None if cut is None else replace(cut, offload="nothing")


def system_row(step: int, samples: StepSamples, done: Step, setup: Setup, slots: int) -> dict[str, float]:
    """A step's metrics under verl's names, with the setup's sizes."""
    cut, engines, lengths = setup.actor, setup.engines, samples.response_tokens
    return {
        "training/global_step": float(step),
        **{f"timing_s/{name}": seconds for name, seconds in done.phases.items()},
        "timing_s/step": done.seconds,
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "prompt_length/mean": float(samples.prompt_tokens.mean()),
        "perf/total_num_tokens": float(samples.total_tokens),
        "perf/time_per_step": done.seconds,
        "perf/throughput": samples.total_tokens / (done.seconds * slots),
        "plan/tp": float(cut.tp),
        "plan/pp": float(cut.pp),
        "plan/dp": float(cut.dp),
        "plan/gen_tp": float(engines.tp),
        "plan/gen_dp": float(engines.replicas),
        "plan/full_sharding": float(cut.sharding == "full"),
        "plan/colocated": float(setup.colocated),
    }
