"""The ground that model-stages stand on: a pool of slots, what they reach together, what is believed of its costs.

A pool of several devices counts as its slowest: every rank does an equal part. Tensor-parallel groups stay within a
link domain (a node, or a rack of NVL72), so a node with slots left over gives fewer seats than slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from nereus.costs.calibrate import Calibration, start
from nereus.costs.coefficients import FRAMEWORK_TERMS, GENERATION_TERMS, prior_for
from nereus.costs.host import HOST_BYTES_PER_SLOT
from nereus.costs.rates import Rates, rates_of, weakest
from nereus.fleet import Device, Fleet, Node

TRAINING_TERMS = frozenset(
    {
        *("gemm", "experts", "attention", "memory", "launch", "host", "recompute", "head"),
        *("tp", "cp", "ep", "pp", "bubble", "dp", "optimizer", "step"),
    }
)
TERMS = tuple(sorted(TRAINING_TERMS | GENERATION_TERMS | FRAMEWORK_TERMS))


def seats(domain_slots: Sequence[int], tp: int) -> int:
    """How many slots groups of `tp` can take in these domains; a group wider than a domain takes whole domains."""
    if tp > max(domain_slots):
        return sum(domain_slots) // tp * tp
    return sum(count // tp * tp for count in domain_slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """A pool: its slots in order, how many of them each link domain has, rates, beliefs and room.

    `one_domain`: all slots of the pool are in one. `coefficients` are the beliefs' means.
    """

    slots: tuple[int, ...]
    domain_slots: tuple[int, ...]
    devices: tuple[str, ...]
    rates: Rates
    beliefs: Calibration
    coefficients: Mapping[str, float]
    room_bytes: float
    host_room_bytes: float

    def seats(self, tp: int) -> int:
        """How many slots groups of `tp` can take; a group wider than a domain takes whole domains."""
        return seats(self.domain_slots, tp)

    def first_seats(self, tp: int, count: int) -> tuple[int, ...]:
        """The first `count` slots that groups of `tp` take: no group lies across domains unless it is wider than one."""
        if tp > max(self.domain_slots):
            return self.slots[:count]
        found: list[int] = []
        begin = 0
        for size in self.domain_slots:
            found += self.slots[begin : begin + size // tp * tp]
            begin += size
        return tuple(found[:count])

    @property
    def one_domain(self) -> bool:
        """Whether links reach from every slot to every other."""
        return len(self.domain_slots) == 1

    def seconds(self, terms: Mapping[str, float]) -> float:
        """The mean of what the terms take."""
        known = self.coefficients
        return sum(known[name] * value for name, value in terms.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Terrain:
    """The fleet as the planner sees it: its slots, fastest device first, and what is believed of each device.

    `beliefs` replaces the priors of a device by what a running job has taught; `rates` replaces its rates by probed
    ones. `host_bytes_per_slot` is a slot's share of its node's memory.
    """

    fleet: Fleet
    beliefs: Mapping[str, Calibration] = field(default_factory=dict[str, Calibration])
    rates: Mapping[str, Rates] = field(default_factory=dict[str, Rates])
    host_bytes_per_slot: float = HOST_BYTES_PER_SLOT

    def ordered(self) -> tuple[int, ...]:
        """Every slot: devices by falling arithmetic rate, then as the fleet numbers them."""
        device_of = self.fleet.device_of
        devices = {node.device.name: node.device for node in self.fleet.nodes}
        speed = {name: self.rates_of(device).flops_per_second for name, device in devices.items()}
        return tuple(sorted(device_of, key=lambda s: (-speed[device_of[s].name], device_of[s].name, s)))

    def rates_of(self, device: Device) -> Rates:
        """What a slot of this device reaches."""
        return self.rates.get(device.name) or rates_of(device)

    def ground(self, slots: Sequence[int]) -> Ground:
        """The ground of these slots."""
        nodes, counted = _nodes_of(self.fleet, slots)
        devices = {node.device.name: node.device for node in nodes}
        rates = weakest([self.rates_of(device) for device in devices.values()])
        counts = _domains([node.device.name for node in nodes], counted, rates.slots_per_node)
        beliefs = _slowest([self._belief(name) for name in sorted(devices)])
        return Ground(
            slots=tuple(slots),
            domain_slots=counts,
            devices=tuple(devices),
            rates=replace(rates, slots_per_node=max(counts)),
            beliefs=beliefs,
            coefficients=beliefs.coefficients,
            room_bytes=rates.memory_bytes,
            host_room_bytes=self.host_bytes_per_slot,
        )

    def _belief(self, device: str) -> Calibration:
        return self.beliefs.get(device) or _supposed(device)


@cache
def _supposed(device: str) -> Calibration:
    """What is believed of a device before a job ran on it."""
    return start(prior_for(TERMS, device, kind="rl"))


def _nodes_of(fleet: Fleet, slots: Sequence[int]) -> tuple[list[Node], list[int]]:
    """The nodes of the slots in the order in which they come, and how many of them are on each."""
    found, first, counts = np.unique(fleet.node_of[np.array(slots)], return_index=True, return_counts=True)
    order = np.argsort(first)
    return [fleet.nodes[at] for at in found[order].tolist()], counts[order].tolist()


def _domains(devices: Sequence[str], counted: Sequence[int], most: int) -> tuple[int, ...]:
    """Slots of each link domain: nodes in order, joined while a domain of `most` slots holds them (NVL72's trays)."""
    counts: list[int] = []
    for device, count in zip(devices, counted, strict=True):
        joined = device.startswith("gb") and bool(counts) and counts[-1] + count <= most
        if joined:
            counts[-1] += count
        else:
            counts.append(count)
    return tuple(counts)


def _slowest(beliefs: Sequence[Calibration]) -> Calibration:
    """One belief of several devices': for each term the largest mean, so that no device is believed faster than it is."""
    if len(beliefs) == 1:
        return beliefs[0]
    means = {name: max(belief.coefficients[name] for belief in beliefs) for name in beliefs[0].prior.terms}
    return start(replace(beliefs[0].prior, means=means))
