"""The demands of a movement: which bytes of which stream must reach which slot, and which slots may send them.

A slot serves itself first. Then a holder in the same node serves, then any holder. With relays, one copy enters each
node in stripes over the slots that need it and these exchange the rest; where many nodes need what few hold, nodes hand
it on in chains. Relays never add a byte: every missing byte is still received once by every slot that misses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from nereus.fleet import Fleet
from nereus.transfer.ports import Floats, Ints
from nereus.transfer.streams import Streams

STREAM, SOURCE, DESTINATION, START, STOP, HOP = range(6)

SMALL_SHARE = 1e-4  # of the mean bytes per rank: a smaller stream (a norm's) is sent in turn, without balancing

Row = tuple[int, int, int, int, int, int]


@dataclass(kw_only=True)
class Job:
    """Demands that the same slots may serve: rows [stream, destination, start, stop, hop]; `crosses` nodes or not."""

    senders: Ints
    crosses: bool
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int, int]])

    @property
    def amount_bytes(self) -> float:
        """Bytes over all demands."""
        return float(sum(row[3] - row[2] for row in self.rows))


@dataclass(frozen=True, kw_only=True, eq=False)
class Wide:
    """A stream that relays may serve better: `bare` are the members of each node that needs it, or, inside one node,
    the only such list. `senders` hold it, over `sender_nodes` nodes; `chained` nodes hand it on.
    """

    stream: int
    bare: list[Ints]
    senders: Ints
    sender_nodes: int
    crosses: bool
    chained: bool


class Jobs:
    """Jobs by their senders, and rows [stream, source, destination, start, stop, hop] whose sender is known."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.rows: list[Row] = []
        self.by_senders: dict[tuple[bytes, bool], Job] = {}
        self._cuts: dict[tuple[int, int], list[int]] = {}

    def direct(self, stream: int, members: Ints, senders: Ints, *, crosses: bool) -> None:
        """Every member receives the whole stream from the senders."""
        size = int(self.streams.size_bytes[stream])
        self._add([(stream, slot, 0, size, 0) for slot in members.tolist()], senders, crosses=crosses)

    def relayed(self, wide: Wide, busy: Floats) -> None:
        """Each node's members receive a stripe each and exchange them; `busy` are bytes that slots send anyway."""
        bare = sorted(wide.bare, key=lambda members: float(busy[members].sum()))  # a chain's last node sends nothing
        step = wide.sender_nodes if wide.chained else len(bare)
        for chain in (bare[first::step] for first in range(min(step, len(bare)))):
            self._striped(wide, chain[0])
            for link in range(1, len(chain)):
                self._handed_on(wide.stream, chain[link - 1], chain[link], hop=2 * link)

    def _striped(self, wide: Wide, members: Ints) -> None:
        edges, slots = self._edges(wide.stream, len(members)), members.tolist()
        rows = [(wide.stream, slot, edges[i], edges[i + 1], 0) for i, slot in enumerate(slots)]
        self._add(rows, wide.senders, crosses=wide.crosses)
        self._exchange(wide.stream, slots, edges, hop=1)

    def _handed_on(self, stream: int, before: Ints, members: Ints, hop: int) -> None:
        """The members of the chain's next node take their stripes from those of the node `before`."""
        edges, sources, slots = self._edges(stream, len(members)), before.tolist(), members.tolist()
        self.rows += [
            (stream, sources[lane % len(sources)], slot, edges[lane], edges[lane + 1], hop)
            for lane, slot in enumerate(slots)
        ]
        self._exchange(stream, slots, edges, hop + 1)

    def _exchange(self, stream: int, members: list[int], edges: list[int], hop: int) -> None:
        for lane, source in enumerate(members):
            start, stop = edges[lane], edges[lane + 1]
            self.rows += [(stream, source, slot, start, stop, hop) for slot in members if slot != source]

    def _edges(self, stream: int, count: int) -> list[int]:
        """Where a stream is cut for `count` stripes, in bytes; the nodes of its chains are mostly of one size."""
        key = (stream, count)
        if key not in self._cuts:
            even = np.arange(count + 1, dtype=np.int64) * self.streams.size_bytes[stream] // count
            self._cuts[key] = self.streams.snap(stream, even).tolist()
        return self._cuts[key]

    def _add(self, rows: list[tuple[int, int, int, int, int]], senders: Ints, *, crosses: bool) -> None:
        if len(senders) == 1:
            sender = int(senders[0])
            self.rows += [(stream, sender, slot, start, stop, hop) for stream, slot, start, stop, hop in rows]
            return
        key = (senders.tobytes(), crosses)
        if key not in self.by_senders:
            self.by_senders[key] = Job(senders=senders, crosses=crosses)
        self.by_senders[key].rows += rows


class Demands:
    """What is kept, what has one sender, what several may send, and what any plan must carry.

    `forced` are rows with one holder and one wanter, `small` rows of streams too small to balance, whose senders are
    chosen in turn. `scarce` lists (holders, bytes) that must leave their holders at least once, `leaving` the same for
    those that some node without a holder needs, `entering` the bytes that must enter each node. `wide` are the streams of at least
    `relay_least_bytes` that relays may serve better. `place` gives the slot of each rank. `fan_out` says that some
    network port is slower than some link, `mixed` that another is not.
    """

    def __init__(self, streams: Streams, place: Ints, fleet: Fleet, relay_least_bytes: int) -> None:
        self.streams, self.place, self.fleet = streams, place, fleet
        self.relay_least_bytes = relay_least_bytes
        self.size = streams.size_bytes
        self.wide: list[Wide] = []
        self.scarce: list[tuple[Ints, float]] = []
        self.leaving: list[tuple[Ints, float]] = []
        self.entering = np.zeros(len(fleet.nodes))
        self.fan_out = bool(fleet.nic_rates.min(initial=np.inf) < fleet.link_rates.max(initial=0.0))
        links = fleet.link_rates[list(fleet.slots)]
        self.mixed = self.fan_out and bool(fleet.nic_rates.max(initial=0.0) >= links.min(initial=np.inf))
        self._jobs = Jobs(streams)
        self._kept: list[Ints] = []
        self._fixed: list[Ints] = []
        self._small: list[Row] = []
        shared = self._simple()
        mean = float(self.size[shared].sum() + sum(float(r[:, STOP].sum()) for r in self._fixed)) / max(len(place), 1)
        self.small_bytes = SMALL_SHARE * mean
        for stream in shared.tolist():
            self._shared(stream)
        self.forced = np.concatenate([*self._fixed, np.zeros((0, 6), dtype=np.int64)])
        self.small = np.array(self._small, dtype=np.int64).reshape(-1, 6)

    def kept(self) -> Ints:
        """Rows [stream, slot] of what stays where it is, ascending."""
        kept = np.concatenate([*self._kept, np.zeros((0, 2), dtype=np.int64)])
        return kept[np.lexsort((kept[:, 1], kept[:, 0]))]

    def jobs(self, busy: Floats | None = None) -> tuple[list[Job], Ints]:
        """The jobs, and rows with one sender; with relays when `busy`, the bytes that slots send without, is given."""
        made = Jobs(self.streams)
        made.by_senders = {key: replace(job, rows=list(job.rows)) for key, job in self._jobs.by_senders.items()}
        made.rows = list(self._jobs.rows)
        for wide in self.wide:
            if busy is not None:
                made.relayed(wide, busy)
            else:
                made.direct(wide.stream, np.concatenate(wide.bare), wide.senders, crosses=wide.crosses)
        return list(made.by_senders.values()), np.array(made.rows, dtype=np.int64).reshape(-1, 6)

    def _simple(self) -> Ints:
        """Takes the streams with one holder and one wanter, all at once; returns the others."""
        s, node = self.streams, self.fleet.node_of
        if not len(s):
            return np.zeros(0, dtype=np.int64)
        holder, holders = _first(s.holder_sets)
        wanter, wanters = _first(s.target.sets)
        simple = (holders[s.holders] == 1) & (wanters[s.wanters] == 1)
        index = np.flatnonzero(simple)
        source, destination = holder[s.holders[index]], self.place[wanter[s.wanters[index]]]
        stays = source == destination
        self._kept.append(np.stack([index[stays], source[stays]], axis=1))
        index, source, destination = index[~stays], source[~stays], destination[~stays]
        zero = np.zeros(len(index), dtype=np.int64)
        size = self.size[index]
        self._fixed.append(np.stack([index, source, destination, zero, size, zero], axis=1))
        crosses = node[source] != node[destination]
        np.add.at(self.entering, node[destination[crosses]], size[crosses])
        return np.flatnonzero(~simple)

    def _shared(self, stream: int) -> None:
        """One stream with several holders or wanters."""
        holders = self.streams.holders_of(stream)
        slots = np.sort(self.place[self.streams.wanters_of(stream)])
        where = np.minimum(np.searchsorted(holders, slots), len(holders) - 1)
        stays = holders[where] == slots
        self._kept.append(np.stack([np.full(int(stays.sum()), stream), slots[stays]], axis=1))
        missing = slots[~stays]
        if not len(missing):
            return
        if self.size[stream] * len(missing) < self.small_bytes:
            self._few_bytes(stream, missing, holders)
            return
        self.scarce.append((holders, float(self.size[stream])))
        nodes, holder_nodes = self.fleet.node_of[missing], self.fleet.node_of[holders]
        bare: list[Ints] = []
        for node in np.unique(nodes).tolist():
            members, near = missing[nodes == node], holders[holder_nodes == node]
            if len(near):
                self._inside(stream, members, near)
            else:
                bare.append(members)
                self.entering[node] += self.size[stream]
        if bare:
            self.leaving.append((holders, float(self.size[stream])))
            self._across(stream, bare, holders, len(np.unique(holder_nodes)))

    def _few_bytes(self, stream: int, missing: Ints, holders: Ints) -> None:
        """A stream too small to load a port: in turn from the holders, those in the same node first."""
        node, size = self.fleet.node_of, int(self.size[stream])
        holder_nodes = node[holders]
        for turn, slot in enumerate(missing.tolist()):
            near = holders[holder_nodes == node[slot]]
            able = near if len(near) else holders
            self._small.append((stream, int(able[(stream + turn) % len(able)]), slot, 0, size, 0))

    def _inside(self, stream: int, members: Ints, near: Ints) -> None:
        """Slots of a node that holds the stream: served by its holders."""
        if len(members) >= 2 * len(near) and self.size[stream] >= self.relay_least_bytes:
            self.wide.append(
                Wide(stream=stream, bare=[members], senders=near, sender_nodes=1, crosses=False, chained=False)
            )
        else:
            self._jobs.direct(stream, members, near, crosses=False)

    def _across(self, stream: int, bare: list[Ints], holders: Ints, sender_nodes: int) -> None:
        """Nodes that hold nothing of the stream (`bare`: their members that need it)."""
        chained = len(bare) >= 2 * sender_nodes
        striped = self.fan_out and any(len(members) > 1 for members in bare)
        if (chained or striped) and self.size[stream] >= self.relay_least_bytes:
            self.wide.append(
                Wide(
                    stream=stream,
                    bare=bare,
                    senders=holders,
                    sender_nodes=sender_nodes,
                    crosses=True,
                    chained=chained,
                )
            )
        else:
            self._jobs.direct(stream, np.concatenate(bare), holders, crosses=True)


def _first(sets: tuple[Ints, ...]) -> tuple[Ints, Ints]:
    """The first member of each set, and how many it has."""
    return (
        np.array([members[0] for members in sets], dtype=np.int64),
        np.array([len(members) for members in sets], dtype=np.int64),
    )
