"""Seating: the slots of a stage's ranks on large fleets, and an estimate of what a placement costs, without routing it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.fleet import Fleet
from nereus.layout import Layout
from nereus.transfer.gains import Gains, Pairings, gains
from nereus.transfer.matching import seated, seats
from nereus.transfer.ports import Ints


def group_ranks(layout: Layout) -> int:
    """How many consecutive ranks form the groups that should share a node: tensor, and expert times expert tensor."""
    return max(layout.tp, layout.ep * layout.expert_tp if layout.ep > 1 else 1)


def rank_groups(layout: Layout) -> Ints:
    """[groups, ranks] the ranks of each group, in order; each rank alone where groups do not divide them."""
    size = group_ranks(layout)
    return np.arange(layout.ranks, dtype=np.int64).reshape(-1, 1 if layout.ranks % size else size)


def replica_ranks(layout: Layout) -> Ints:
    """[replicas, ranks] the ranks of each model replica: all tensor and pipeline ranks of one data and context rank."""
    at = [layout.coordinates(rank) for rank in range(layout.ranks)]
    order = sorted(range(layout.ranks), key=lambda rank: (at[rank].dp, at[rank].cp, at[rank].pp, at[rank].tp))
    return np.array(order, dtype=np.int64).reshape(layout.dp * layout.cp, -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Seating:
    """The slots that a stage may take, and its ranks: `first_rank`.. of `total_ranks`; each row of `groups` keeps together."""

    fleet: Fleet
    slots: Ints
    first_rank: int
    total_ranks: int
    groups: Ints

    def own(self, found: Pairings) -> Pairings:
        """The pairings of this stage: slots numbered from 0, ranks in the order of the groups."""
        rows = np.full(len(self.fleet.node_of), -1, dtype=np.int64)
        rows[self.slots] = np.arange(len(self.slots))
        columns = np.full(self.total_ranks, -1, dtype=np.int64)
        columns[self.first_rank + self.groups.ravel()] = np.arange(self.groups.size)
        return found.placed(slots=rows, ranks=columns)

    def gains(self, *parts: Pairings) -> Gains:
        """What each pairing of its slots and ranks gains."""
        return gains([self.own(part) for part in parts], len(self.slots), self.groups.size)

    def apart(self, found: Gains, *, by_node: bool = False) -> tuple[int, ...]:
        """Slots in rank order, each rank for itself; `by_node`: first its node (the gain is about the same in a node)."""
        return self._in_rank_order(seated(found, self.fleet.node_of[self.slots] if by_node else self.slots))

    def together(self, found: Gains) -> tuple[int, ...]:
        """Slots in rank order with every group in one node; each rank for itself where nodes are too small."""
        count, size = self.groups.shape
        nodes = self.fleet.node_of[self.slots]
        if size == 1 or seats(nodes, size) < count:
            return self.apart(found)
        return self._in_rank_order(seated(found, nodes, size))

    def _in_rank_order(self, rows: Ints) -> tuple[int, ...]:
        slots = np.empty(len(rows), dtype=np.int64)
        slots[self.groups.ravel()] = self.slots[rows]
        return tuple(slots.tolist())


@dataclass(frozen=True, kw_only=True, slots=True)
class PortEstimate:
    """Seconds of the busiest port, bytes between nodes when each node takes a copy once, and bytes that move (exact)."""

    seconds: float
    inter_node_bytes: int
    moved_bytes: int


def port_estimate(found: Pairings, fleet: Fleet) -> PortEstimate:
    """The ports' loads without routes: what a slot misses it receives, what its node misses enters once, and holders
    share the sending evenly, each byte once. `found.rank_sets` name the slots of the ranks.
    """
    flow = _Flow(fleet)
    single = (found.slot_sets.counts[found.slot_set] == 1) & (found.rank_sets.counts[found.rank_set] == 1)
    flow.singles(found, np.flatnonzero(single))
    for stream in np.flatnonzero(~single).tolist():
        holders = found.slot_sets.at(int(found.slot_set[stream]))
        flow.shared(holders, found.rank_sets.at(int(found.rank_set[stream])), float(found.size_bytes[stream]))
    return flow.estimate()


class _Flow:
    """Bytes at each port so far."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.send, self.receive = np.zeros(len(fleet.node_of)), np.zeros(len(fleet.node_of))
        self.out = np.zeros(len(fleet.nic_rates))
        self.entering = np.zeros(len(fleet.nodes))
        self.holds = np.zeros(len(fleet.node_of), dtype=bool)
        self.near = np.zeros(len(fleet.nodes), dtype=bool)

    def singles(self, found: Pairings, index: Ints) -> None:
        """Streams of one holder and one wanter."""
        source = found.slot_sets.members[found.slot_sets.first[found.slot_set[index]]]
        destination = found.rank_sets.members[found.rank_sets.first[found.rank_set[index]]]
        moves = source != destination
        source, destination, size = source[moves], destination[moves], found.size_bytes[index][moves]
        np.add.at(self.send, source, size)
        np.add.at(self.receive, destination, size)
        node = self.fleet.node_of
        crosses = node[source] != node[destination]
        np.add.at(self.out, self.fleet.nic_of[source[crosses]], size[crosses])
        np.add.at(self.entering, node[destination[crosses]], size[crosses])

    def shared(self, holders: Ints, slots: Ints, size: float) -> None:
        """A stream that any of its holders may send, each its part."""
        node = self.fleet.node_of
        self.holds[holders] = True
        missing = slots[~self.holds[slots]]
        self.holds[holders] = False
        if not len(missing):
            return
        self.receive[missing] += size
        self.send[holders] += size / len(holders)
        self.near[node[holders]] = True
        needy = node[missing]
        bare = np.unique(needy[~self.near[needy]])
        self.near[node[holders]] = False
        if len(bare):
            self.entering[bare] += size
            np.add.at(self.out, self.fleet.nic_of[holders], size / len(holders))

    def estimate(self) -> PortEstimate:
        """The busiest port, and the sums."""
        fleet = self.fleet
        link = np.maximum(fleet.link_rates, 1e-300)
        levels = (self.send / link, self.receive / link, self.out / fleet.nic_rates, self.entering / fleet.node_rates)
        return PortEstimate(
            seconds=max(float(level.max(initial=0.0)) for level in levels),
            inter_node_bytes=round(float(self.entering.sum())),
            moved_bytes=round(float(self.receive.sum())),
        )
