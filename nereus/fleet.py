"""The fleet: which slots exist, on which nodes, and how fast their memory, links and arithmetic are.

Device figures are the vendors' data sheets (dense bf16, one direction of a link); what a job reaches of them is the cost
model's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nereus.errors import ConfigError, near

GB = 1_000_000_000
GBIT = GB // 8
TFLOPS = 10**12

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One kind of slot: memory, peak arithmetic (bf16 FLOP/s), memory bandwidth and links, one direction each.

    `nic_bytes_per_second` is a slot's share of its node's network. Peer traffic inside a node goes over
    `link_bytes_per_second`, to host memory over `pcie_bytes_per_second`.
    """

    name: str
    memory_bytes: int
    peak_flops_per_second: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    pcie_bytes_per_second: float
    nic_bytes_per_second: float
    slots_per_node: int


def _device(name: str, memory: float, peak: float, bandwidth: int, link: int, pcie: float, nic: float) -> Device:
    """GB, TFLOP/s, GB/s, GB/s, GB/s, Gbit/s; 8 slots a node (4 for GB200's trays)."""
    return Device(
        name=name,
        memory_bytes=int(memory * 1024**3),
        peak_flops_per_second=peak * TFLOPS,
        memory_bytes_per_second=bandwidth * GB,
        link_bytes_per_second=link * GB,
        pcie_bytes_per_second=pcie * GB,
        nic_bytes_per_second=nic * GBIT,
        slots_per_node=4 if name == "gb200" else 8,
    )


DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _device("v100", 32, 125, 900, 150, 15.8, 12.5),  # fp16: no bf16 tensor cores; p3dn's network
        _device("a10g", 24, 70, 600, 32, 31, 12.5),
        _device("a100-40", 40, 312, 1555, 300, 31, 200),
        _device("a100", 80, 312, 2039, 300, 31, 200),
        _device("a100-pcie", 80, 312, 1935, 32, 31, 200),
        _device("a800", 80, 312, 2039, 200, 31, 200),
        _device("l40s", 48, 362, 864, 32, 31, 100),
        _device("rtx4090", 24, 165.2, 1008, 25, 31, 25),
        _device("h100", 80, 989, 3350, 450, 63, 400),
        _device("h100-pcie", 80, 756, 2000, 64, 63, 400),
        _device("h800", 80, 989, 3350, 200, 63, 400),
        _device("h20", 96, 148, 4000, 450, 63, 400),
        _device("h200", 141, 989, 4800, 450, 63, 400),
        _device("b200", 180, 2250, 8000, 900, 63, 400),
        _device("gb200", 186, 2500, 8000, 900, 450, 400),
        _device("mi300x", 192, 1307, 5300, 448, 63, 400),
        _device("910b", 64, 400, 1600, 392, 31, 200),
    )
}
"""Data sheets of the vendors; V100 and A10G with the networks of AWS's p3dn and g5."""

CPU_SLOT = Device(  # a worker process: rates are rough and only order links (memory copies beat the network)
    name="cpu",
    memory_bytes=1 << 30,
    peak_flops_per_second=50e9,
    memory_bytes_per_second=10e9,
    link_bytes_per_second=1e9,
    pcie_bytes_per_second=10e9,
    nic_bytes_per_second=1e9,
    slots_per_node=8,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A host: its slots, their device, and over how many network ports (`nics`) its slots share the way out.

    Slot i of the node uses port i * nics // slots. `nics` 0 means a port for every slot.
    """

    slots: tuple[int, ...]
    device: Device
    nics: int = 0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The nodes of a job. Slot numbers are unique and need not be dense."""

    nodes: tuple[Node, ...]

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Every slot, ascending."""
        return tuple(sorted(slot for node in self.nodes for slot in node.slots))

    @cached_property
    def device_of(self) -> dict[int, Device]:
        """The device of every slot."""
        return {slot: node.device for node in self.nodes for slot in node.slots}

    @cached_property
    def devices(self) -> dict[str, Device]:
        """The kinds of device by name."""
        return {node.device.name: node.device for node in self.nodes}

    @cached_property
    def _hash(self) -> int:
        return hash(self.nodes)

    def __hash__(self) -> int:
        """Worked out once: a fleet of a thousand slots is asked for it often."""
        return self._hash

    def _table(self, fill: int = -1) -> Slots:
        return np.full(max(self.slots, default=-1) + 1, fill, dtype=np.int64)

    @cached_property
    def node_of(self) -> Slots:
        """[largest slot + 1] index of the slot's node, -1 where there is no slot."""
        table = self._table()
        for index, node in enumerate(self.nodes):
            table[list(node.slots)] = index
        return table

    @cached_property
    def nic_of(self) -> Slots:
        """[largest slot + 1] index of the slot's network port over the whole fleet, -1 where there is no slot."""
        table, first = self._table(), 0
        for node in self.nodes:
            nics = min(node.nics or len(node.slots), len(node.slots))  # slots may be lost; a port has at least one
            for index, slot in enumerate(node.slots):
                table[slot] = first + index * nics // len(node.slots)
            first += nics
        return table

    @cached_property
    def link_rates(self) -> npt.NDArray[np.float64]:
        """[largest slot + 1] bytes per second of a slot's port to its node's other slots, one direction."""
        return self._rates("link_bytes_per_second")

    @cached_property
    def nic_rates(self) -> npt.NDArray[np.float64]:
        """[ports] bytes per second of each network port, one direction: the sum of its slots' shares."""
        rates = np.zeros(int(self.nic_of.max(initial=-1)) + 1)
        np.add.at(rates, self.nic_of[list(self.slots)], self._rates("nic_bytes_per_second")[list(self.slots)])
        return rates

    @cached_property
    def node_rates(self) -> npt.NDArray[np.float64]:
        """[nodes] bytes per second of each node's network, one direction: the sum of its slots' shares."""
        return np.array([len(node.slots) * node.device.nic_bytes_per_second for node in self.nodes])

    def _rates(self, name: str) -> npt.NDArray[np.float64]:
        rates = np.zeros(len(self.node_of))
        for slot, device in self.device_of.items():
            rates[slot] = getattr(device, name)
        return rates

    def without(self, lost: frozenset[int]) -> Fleet:
        """The fleet when these slots are gone; empty nodes vanish."""
        kept = [replace(n, slots=tuple(s for s in n.slots if s not in lost)) for n in self.nodes]
        return Fleet(nodes=tuple(n for n in kept if n.slots))

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for node in self.nodes:
            counts[node.device.name] = counts.get(node.device.name, 0) + len(node.slots)
        return ",".join(f"{count}x{name}" for name, count in counts.items())


def uniform(slots: int, device: Device = CPU_SLOT, *, slots_per_node: int | None = None, first: int = 0) -> Fleet:
    """A fleet of equal slots numbered from `first`, filled node by node (`slots_per_node` defaults to the device's)."""
    per = slots_per_node or device.slots_per_node
    starts = range(first, first + slots, per)
    ranges = [tuple(range(start, min(start + per, first + slots))) for start in starts]
    return Fleet(nodes=tuple(Node(slots=numbers, device=device) for numbers in ranges))


def parse_fleet(text: str, key: str = "--fleet") -> Fleet:
    """A fleet from "16xh100" or "8xh100,8xa100-40"; ConfigError that lists near names for unknown devices."""
    nodes: list[Node] = []
    first = 0
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*x\s*([A-Za-z0-9-]+)\s*", part, re.ASCII)
        if match is None or int(match[1]) < 1:
            raise ConfigError(key, text, "expected counts and devices, such as 16xh100 or 8xh100,8xa100-40")
        count, name = int(match[1]), match[2].lower()
        if name not in DEVICES:
            raise ConfigError(key, text, f"unknown device {name}; {near(name, DEVICES)}")
        nodes += uniform(count, DEVICES[name], first=first).nodes
        first += count
    return Fleet(nodes=tuple(nodes))
