"""How long one operation of a transition takes and what it holds meanwhile: ports, network ports, PCIe, host, thread.

A slot has one thread that may touch torch and the engines: while it builds or verifies it serves no port (design,
section 6). Ports are full duplex; traffic inside a node, between nodes and to the host has ports of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from nereus.fleet import Fleet
from nereus.transitions.change import EmuChange
from nereus.transitions.graph import MOVES, Operation
from nereus.transitions.order import Lane

PORTS = ("link out", "link in", "net out", "net in", "pcie out", "pcie in")
LINK, NET, PCIE = 0, 2, 4
OUT, IN = 0, 1
NANOSECONDS_PER_SECOND = 1_000_000_000

THREADLESS = frozenset(("allocate", "release", "secure", "arrive", "commit"))
Hold = tuple[int, int]
"""A resource's number, and for how many nanoseconds an operation holds it from its start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolls:
    """Seconds of the fixed parts, and what is reached of the data sheet; the calibrated part of a price.

    `deviation_share` is the standard deviation of a kind's seconds over their mean: a common factor of all its
    operations, as calibration knows them; "rate" is that of everything that moves bytes.
    """

    quiesce_seconds: float = 0.02
    allocate_seconds: float = 0.001
    release_seconds: float = 0.001
    move_seconds: float = 50e-6
    group_seconds: float = 0.5
    destroy_group_seconds: float = 0.05
    activate_seconds: float = 0.1
    commit_seconds: float = 0.01
    rate_share: float = 0.8
    digest_share: float = 0.3
    deviation_share: Mapping[str, float] = field(default_factory=lambda: {"rate": 0.15, "build_engine": 0.3})


HOST_TOLLS = Tolls(
    quiesce_seconds=0.05,
    group_seconds=0.025,
    destroy_group_seconds=1e-4,
    activate_seconds=1e-4,
    deviation_share={"rate": 0.5, "build_engine": 0.3, "quiesce": 1.0, "build_groups": 0.5},
)
"""For slots that are processes of one host, over gloo: the quickstart's two changes on two cores (`make run`, 2026-11-30)
took 0.08 s for the groups of four stages, 0.38 s to end the engines of generation, 0.002 s to quiesce a trained EMU."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds and holds of every operation on a fleet. Lanes of hosts are the fleet's nodes by index."""

    fleet: Fleet
    tolls: Tolls = field(default_factory=Tolls)
    host_bytes_per_second: float = 200e9

    def resource_name(self, number: int) -> str:
        """How people read a resource: slot 3 link out, net port 2 in, host 0."""
        slots, nics = len(self._link), len(self._nic)
        if number < 6 * slots:
            return f"slot {number // 6} {PORTS[number % 6]}"
        number -= 6 * slots
        if number < 2 * nics:
            return f"net port {number // 2} {'out' if number % 2 == OUT else 'in'}"
        return f"host {number - 2 * nics}"

    @property
    def resources_count(self) -> int:
        """How many resources there are."""
        return 6 * len(self._link) + 2 * len(self._nic) + len(self.fleet.nodes)

    @cached_property
    def _link(self) -> list[float]:
        return [rate * self.tolls.rate_share for rate in self.fleet.link_rates.tolist()]

    @cached_property
    def _nic(self) -> list[float]:
        return [rate * self.tolls.rate_share for rate in self.fleet.nic_rates.tolist()]

    @cached_property
    def _nic_of(self) -> list[int]:
        return self.fleet.nic_of.tolist()

    @cached_property
    def _node_of(self) -> list[int]:
        return self.fleet.node_of.tolist()

    @cached_property
    def _pcie(self) -> dict[int, float]:
        return {s: d.pcie_bytes_per_second * self.tolls.rate_share for s, d in self.fleet.device_of.items()}

    @cached_property
    def _memory(self) -> dict[int, float]:
        return {s: d.memory_bytes_per_second * self.tolls.rate_share for s, d in self.fleet.device_of.items()}

    @cached_property
    def _users(self) -> list[int]:
        """How many slots share each network port."""
        users = [0] * len(self._nic)
        for slot in self.fleet.slots:
            users[self._nic_of[slot]] += 1
        return users

    @cached_property
    def _alone(self) -> list[tuple[int, int, float]]:
        """For each slot with a network port to itself: that port out and in, and its rate; else -1."""
        found = [(-1, -1, 0.0)] * len(self._link)
        for slot in self.fleet.slots:
            port = self._nic_of[slot]
            if self._users[port] == 1:
                rate = min(self._nic[port], self._link[slot])
                found[slot] = (self._net(slot, OUT), self._net(slot, IN), rate)
        return found

    def _net(self, slot: int, way: int) -> int:
        """The slot's own port to other nodes; where it has a network port to itself, that one."""
        port = self._nic_of[slot]
        return 6 * len(self._link) + 2 * port + way if self._users[port] == 1 else 6 * slot + NET + way

    def node(self, lane: Lane) -> int:
        """The node of a slot or host."""
        return -1 - lane if lane < 0 else self._node_of[lane]

    def legs(self, source: Lane, destination: Lane) -> list[tuple[int, float]]:
        """(resource, bytes per second) that a move from one lane to another goes over.

        Each resource comes once: nothing holds one twice. Host memory of another node is read or written over the
        network by the slot's own port of the other side; a move inside one host's memory reads and writes it, as a copy.
        """
        home, away = self.node(source), self.node(destination)
        if source >= 0 and destination >= 0 and home == away:
            return [
                (6 * source + LINK + OUT, self._link[source]),
                (6 * destination + LINK + IN, self._link[destination]),
            ]
        if source >= 0 and destination >= 0:
            (out, _, rate), (_, into, rate_in) = self._alone[source], self._alone[destination]
            if out >= 0 and into >= 0:
                return [(out, rate), (into, rate_in)]
        if source == destination:
            return [(self._host(home), self.host_bytes_per_second / 2)]
        return self._end(source, home, OUT, far=home != away) + self._end(destination, away, IN, far=home != away)

    def _end(self, lane: Lane, node: int, way: int, *, far: bool) -> list[tuple[int, float]]:
        """The legs of one end of a move: over the network where the other end is `far`, else over PCIe to a host."""
        legs: list[tuple[int, float]] = []
        if far:
            port = self._nic_of[lane] if lane >= 0 else self._nic_of[self.fleet.nodes[node].slots[0]]
            if lane < 0 or self._users[port] > 1:
                legs.append((6 * len(self._link) + 2 * port + way, self._nic[port]))
            if lane >= 0:
                legs.append((self._net(lane, way), min(self._nic[port], self._link[lane])))
        elif lane >= 0:
            legs.append((6 * lane + PCIE + way, self._pcie[lane]))
        if lane < 0:
            legs.append((self._host(node), self.host_bytes_per_second))
        return legs

    def _host(self, node: int) -> int:
        return 6 * len(self._link) + 2 * len(self._nic) + node

    def move_seconds(self, source: Lane, destination: Lane, size_bytes: int) -> float:
        """Seconds of a move alone on its way."""
        slowest = min(rate for _, rate in self.legs(source, destination))
        return self.tolls.move_seconds + size_bytes / slowest

    def seconds(
        self, kind: str, lanes: tuple[Lane, ...], size_bytes: int, via: Lane | None = None, emu: EmuChange | None = None
    ) -> float:
        """Predicted seconds of an operation that runs alone; `emu` for its groups and engine."""
        tolls = self.tolls
        if kind in MOVES or via is not None:
            return self.move_seconds(lanes[0] if via is None else via, lanes[-1], size_bytes)
        if kind in ("copy", "verify"):
            rate = self._memory[lanes[0]] if lanes[0] >= 0 else self.host_bytes_per_second
            return size_bytes / (rate / 2 if kind == "copy" else rate * tolls.digest_share)
        if emu is not None and kind in ("build_groups", "destroy_groups", "build_engine"):
            return {
                "build_groups": tolls.group_seconds * emu.new_groups,
                "destroy_groups": tolls.destroy_group_seconds * emu.old_groups,
                "build_engine": emu.engine_seconds,
            }[kind]
        return self._fixed.get(kind, 0.0)

    @cached_property
    def _fixed(self) -> dict[str, float]:
        kinds = ("quiesce", "allocate", "release", "activate", "commit")
        return {kind: getattr(self.tolls, f"{kind}_seconds") for kind in kinds}

    def holds(self, operation: Operation) -> list[Hold]:
        """What an operation holds: the legs of a move, every port of the slots whose thread it needs, else nothing."""
        if operation.carries:
            source = operation.lanes[0] if operation.via is None else operation.via
            destination = operation.lanes[-1]
            latency = self.tolls.move_seconds
            return [
                (resource, _nanoseconds(latency + operation.size_bytes / rate))
                for resource, rate in self.legs(source, destination)
            ]
        busy = _nanoseconds(operation.seconds) if self.needs_thread(operation) else 0
        return [(port, busy) for lane in operation.lanes if lane >= 0 for port in self.ports(lane)] if busy else []

    def needs_thread(self, operation: Operation) -> bool:
        """Whether what is no move holds the threads of its slots."""
        return operation.place != "outside" and operation.kind not in THREADLESS

    def ports(self, slot: int) -> tuple[int, ...]:
        """All ports of a slot: what its thread would serve."""
        own = (6 * slot + kind + way for kind in (LINK, PCIE) for way in (OUT, IN))
        return (*own, self._net(slot, OUT), self._net(slot, IN))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS_PER_SECOND)
