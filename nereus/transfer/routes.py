"""Who sends what to whom: every missing byte once, the busiest port as idle as can be, beside a lower bound of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nereus.fleet import Fleet
from nereus.transfer.demands import DESTINATION, HOP, SOURCE, START, STOP, STREAM, Demands, Job
from nereus.transfer.ports import Floats, Ints, Load, bound, pour, spread
from nereus.transfer.streams import Streams

RELAY_GAIN = 1.05
RELAY_LEAST_BYTES = 1 << 20
"""A smaller stream is not handed on: a second hop would cost more in latency than it saves in bandwidth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PortLoads:
    """Bytes at the busiest port of each kind; `seconds` that the slowest needs at the fleet's rates, and its kind."""

    slot_send_bytes: float
    slot_receive_bytes: float
    nic_send_bytes: float
    nic_receive_bytes: float
    seconds: float
    port: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """Rows [stream, source, destination, start, stop, hop] in bytes of the stream, and what stays where it is.

    `kept` has rows [stream, slot]. A row of hop 0 is sent from what its source holds, one of a higher hop from bytes
    that it received at a lower one. `loads` are of the busiest ports, `least` lower bounds of them over all plans, with
    relays too; `direct_send_bytes` bounds the busiest sender when nobody relays (the LP's optimum).
    """

    streams: Streams
    fleet: Fleet
    rows: Ints
    kept: Ints
    loads: PortLoads
    direct_send_bytes: float
    demands: Demands

    @cached_property
    def least(self) -> PortLoads:
        """Lower bounds of the busiest ports, worked out when they are asked for."""
        return _least(self.demands, self.received_bytes().astype(np.float64))

    @property
    def row_bytes(self) -> Ints:
        """Bytes of each row."""
        return self.rows[:, STOP] - self.rows[:, START]

    @property
    def moved_bytes(self) -> int:
        """Bytes that travel between slots."""
        return int(self.row_bytes.sum())

    @property
    def inter_node_bytes(self) -> int:
        """Bytes that travel between nodes."""
        node = self.fleet.node_of
        return int(self.row_bytes[node[self.rows[:, SOURCE]] != node[self.rows[:, DESTINATION]]].sum())

    @property
    def kept_bytes(self) -> int:
        """Bytes that are in place already."""
        return int(self.streams.size_bytes[self.kept[:, 0]].sum())

    @property
    def gap(self) -> float:
        """How far the busiest port is above its lower bound, as a part of it; 0 when nothing moves."""
        return self.loads.seconds / self.least.seconds - 1 if self.least.seconds else 0.0

    def sent_bytes(self) -> Ints:
        """[largest slot + 1] bytes that each slot sends."""
        return self._by(SOURCE)

    def received_bytes(self) -> Ints:
        """[largest slot + 1] bytes that each slot receives."""
        return self._by(DESTINATION)

    def _by(self, column: int) -> Ints:
        totals = np.zeros(len(self.fleet.node_of), dtype=np.int64)
        np.add.at(totals, self.rows[:, column], self.row_bytes)
        return totals

    def of_slot(self, slot: int) -> Ints:
        """The rows that a slot sends or receives."""
        return self.rows[(self.rows[:, SOURCE] == slot) | (self.rows[:, DESTINATION] == slot)]

    def pairs(self) -> tuple[Ints, Ints]:
        """Distinct rows [source, destination, hop], ascending, and the bytes of each."""
        keys = self.rows[:, [SOURCE, DESTINATION, HOP]]
        order = np.lexsort(keys.T[::-1])
        keys = keys[order]
        first = np.flatnonzero(np.append(True, np.any(keys[1:] != keys[:-1], axis=1))) if len(keys) else order
        return keys[first], np.add.reduceat(self.row_bytes[order], first) if len(first) else first

    def buckets(self, bucket_bytes: int) -> Ints:
        """How many buckets of at most `bucket_bytes` each row of `pairs` takes."""
        return -(-self.pairs()[1] // bucket_bytes)


def routes(streams: Streams, place: Ints, fleet: Fleet, *, relay_least_bytes: int | None = RELAY_LEAST_BYTES) -> Routes:
    """Chooses the senders. `place` gives the slot of every rank that wants something.

    Fan-out and chains are used, for streams of at least `relay_least_bytes` (None: never), where they make the busiest
    port at least 5 % less busy.
    """
    least = RELAY_LEAST_BYTES if relay_least_bytes is None else relay_least_bytes
    demands = Demands(streams, place, fleet, least)
    jobs, single = demands.jobs()
    direct = _divided(demands, jobs, single, over_nics=demands.fan_out)
    if demands.mixed and direct.gap > RELAY_GAIN - 1:  # a slow link may be the bottleneck of one node, ports of another
        other = _divided(demands, jobs, single, over_nics=False)
        direct = min(direct, other, key=lambda found: found.loads.seconds)
    if relay_least_bytes is None or not demands.wide or direct.gap <= RELAY_GAIN - 1:
        return direct
    jobs, single = demands.jobs(direct.sent_bytes().astype(np.float64))
    relayed = _divided(demands, jobs, single, over_nics=demands.fan_out)
    if relayed.loads.seconds * RELAY_GAIN >= direct.loads.seconds:
        return direct
    return replace(relayed, direct_send_bytes=direct.direct_send_bytes)


def _divided(demands: Demands, jobs: Sequence[Job], single: Ints, *, over_nics: bool) -> Routes:
    """Spreads the jobs over slots, beside what is fixed; or first those that cross nodes over network ports."""
    fleet, forced = demands.fleet, np.concatenate([demands.forced, single])
    fixed = np.concatenate([forced, demands.small])
    send, _, out, _ = _levels(fleet, fixed)
    across = [j for j in jobs if j.crosses]
    inside = [j for j in jobs if not j.crosses]
    alone = _levels(fleet, forced)[0]
    jobs = (*across, *inside)
    if over_nics:
        shares = _over_nics(fleet, across, out, send)
        for job, share in zip(across, shares, strict=True):
            np.add.at(send, job.senders, share)
        shares += _over_slots(fleet, inside, send)
    else:
        shares = _over_slots(fleet, jobs, send)
    rows = np.concatenate([fixed, *(_stair(demands.streams, j, s) for j, s in zip(jobs, shares, strict=True))])
    rows = rows[rows[:, START] < rows[:, STOP]]
    rows = rows[np.lexsort((rows[:, START], rows[:, STREAM], rows[:, HOP], rows[:, DESTINATION], rows[:, SOURCE]))]
    levels = _levels(fleet, rows)
    loads = [Load(ports=j.senders, amount_bytes=j.amount_bytes) for j in jobs]
    return Routes(
        streams=demands.streams,
        fleet=fleet,
        rows=rows,
        kept=demands.kept(),
        loads=_port_loads(fleet, *levels),
        demands=demands,
        direct_send_bytes=bound(alone, _link_rates(fleet), loads, levels[0])[1],
    )


def _link_rates(fleet: Fleet) -> Floats:
    return np.maximum(fleet.link_rates, 1e-300)  # no slot has that number: nothing is sent there


def _levels(fleet: Fleet, rows: Ints) -> tuple[Floats, Floats, Floats, Floats]:
    """Bytes sent and received by each slot, and over each network port."""
    size = rows[:, STOP] - rows[:, START]
    node, nic = fleet.node_of, fleet.nic_of
    crosses = node[rows[:, SOURCE]] != node[rows[:, DESTINATION]]

    def over(ports: Ints, sizes: Ints, count: int) -> Floats:
        return np.bincount(ports, sizes, count).astype(np.float64)

    return (
        over(rows[:, SOURCE], size, len(node)),
        over(rows[:, DESTINATION], size, len(node)),
        over(nic[rows[crosses, SOURCE]], size[crosses], len(fleet.nic_rates)),
        over(nic[rows[crosses, DESTINATION]], size[crosses], len(fleet.nic_rates)),
    )


def _port_loads(fleet: Fleet, send: Floats, receive: Floats, out: Floats, into: Floats) -> PortLoads:
    link, nic = _link_rates(fleet), fleet.nic_rates
    busiest = {
        "slot send": send / link,
        "slot receive": receive / link,
        "network send": out / nic,
        "network receive": into / nic,
    }
    seconds = {name: float(level.max(initial=0.0)) for name, level in busiest.items()}
    port = max(seconds, key=lambda name: seconds[name])
    most = [float(level.max(initial=0.0)) for level in (send, receive, out, into)]
    return PortLoads(
        slot_send_bytes=most[0],
        slot_receive_bytes=most[1],
        nic_send_bytes=most[2],
        nic_receive_bytes=most[3],
        seconds=seconds[port],
        port=port,
    )


def _over_slots(fleet: Fleet, jobs: Sequence[Job], level: Floats) -> list[Floats]:
    return spread(level, _link_rates(fleet), [Load(ports=j.senders, amount_bytes=j.amount_bytes) for j in jobs])


def _over_nics(fleet: Fleet, jobs: Sequence[Job], nic_level: Floats, slot_level: Floats) -> list[Floats]:
    """Over network ports, and within a port over its slots by what they send already."""
    ports = [np.unique(fleet.nic_of[j.senders]) for j in jobs]
    loads = [Load(ports=p, amount_bytes=j.amount_bytes) for p, j in zip(ports, jobs, strict=True)]
    shares: list[Floats] = []
    for job, used, amounts in zip(jobs, ports, spread(nic_level, fleet.nic_rates, loads), strict=True):
        if len(used) == len(job.senders):
            order = np.argsort(fleet.nic_of[job.senders], kind="stable")
            share = np.empty(len(order))
            share[order] = amounts
            shares.append(share)
            continue
        share, port_of = np.zeros(len(job.senders)), fleet.nic_of[job.senders]
        for port, amount in zip(used.tolist(), amounts.tolist(), strict=True):
            members = np.flatnonzero(port_of == port)
            level = slot_level[job.senders[members]][None]
            share[members] = pour(level, np.ones(level.shape), np.array([amount]))[0]
        shares.append(share)
    return shares


def _stair(streams: Streams, job: Job, share: Floats) -> Ints:
    """Lays the demands end to end and the senders' shares along them: at most demands + senders rows."""
    demand: Ints = np.array(job.rows, dtype=np.int64)
    length: Ints = demand[:, 3] - demand[:, 2]
    ends: Ints = np.cumsum(length)
    marks: Ints = np.rint(np.cumsum(share) * (ends[-1] / share.sum())).astype(np.int64)
    marks[-1] = ends[-1]
    demanded = np.searchsorted(ends, marks, side="right")
    inside = np.flatnonzero(demanded < len(ends))  # a mark inside a demand moves to the nearest edge of an element
    of = demanded[inside]
    base = ends[of] - length[of] - demand[of, 2]
    marks[inside] = base + streams.snap(demand[of, 0], marks[inside] - base)
    cuts = np.unique(np.concatenate([[0], ends, marks]))
    low, high = cuts[:-1], cuts[1:]
    index = np.searchsorted(ends, low, side="right")
    row = demand[index]
    shift = row[:, 2] - (ends - length)[index]
    sender = job.senders[np.searchsorted(marks, low, side="right")]
    return np.stack([row[:, 0], sender, row[:, 1], low + shift, high + shift, row[:, 4]], axis=1)


def _least(demands: Demands, receive: Floats) -> PortLoads:
    """Lower bounds of the busiest ports over all plans.

    What a slot misses it receives; what nobody in a node holds enters it once; whatever moves leaves its holders once;
    and all that moves is sent by somebody. (facts of the theory: F1, F2, F11 of the port bounds.)
    """
    fleet = demands.fleet
    link, nic = _link_rates(fleet), fleet.nic_rates
    once, _, out_once, _ = _levels(fleet, demands.forced)
    send = _bound_once(once, link, demands.scarce)
    able = np.unique(np.concatenate([np.flatnonzero(once), np.flatnonzero(receive), *(h for h, _ in demands.scarce)]))
    if len(able):
        send = max(send, float(receive.sum() / link[able].sum()))
    network = _bound_once(out_once, nic, [(np.unique(fleet.nic_of[h]), size) for h, size in demands.leaving])
    enter = float((demands.entering / fleet.node_rates).max(initial=0.0))
    seconds = {
        "slot send": send,
        "slot receive": float((receive / link).max(initial=0.0)),
        "network send": network,
        "network receive": enter,
    }
    port = max(seconds, key=lambda name: seconds[name])
    return PortLoads(
        slot_send_bytes=send * float(link.max(initial=0.0)),
        slot_receive_bytes=float(receive.max(initial=0.0)),
        nic_send_bytes=network * float(nic.max(initial=0.0)),
        nic_receive_bytes=enter * float(nic.max(initial=0.0)),
        seconds=seconds[port],
        port=port,
    )


def _bound_once(fixed: Floats, rates: Floats, loads: Sequence[tuple[Ints, float]]) -> float:
    """Seconds of the busiest port when each load leaves its ports once, beside what only one port can send."""
    by_ports: dict[bytes, Load] = {}
    for ports, size in loads:
        known = by_ports.get(ports.tobytes())
        amount = size + (known.amount_bytes if known else 0.0)
        by_ports[ports.tobytes()] = Load(ports=ports, amount_bytes=amount)
    merged = list(by_ports.values())
    level = fixed.copy()
    for load, share in zip(merged, spread(fixed, rates, merged), strict=True):
        level[load.ports] += share
    return bound(fixed, rates, merged, level)[0]
