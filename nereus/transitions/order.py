"""Order under memory: in which sequence room is claimed and released when what leaves must make room for what comes.

A *lane* is a place with memory: a slot (its number) or a host (`host_lane`). A Claim takes room on a lane; a Release
gives room back once the claims that its bytes are read for have been made (in a serial order their transfers are done
by then). The order: releases as soon as they are possible; claims that give at least what they take by increasing need,
claims that let others release, then the rest by decreasing yield (the optimal order of independent jobs on one lane,
as Johnson's rule); claims that give nothing last. When nothing fits, the lanes wait for each other in a cycle: bytes of
one of its releases, or of one for each lane, are parked in host memory or on a lane with room to spare, the cycle runs
to completion, and only then other work goes on. With equal sizes one parked piece always suffices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from nereus.errors import NereusError

Lane = int
"""A place with memory: a slot by its number, the host of node n as -1 - n."""
Cycle = tuple[Lane, ...]
Claims = tuple[int, ...]
"""Indexes of claims."""


class Infeasible(NereusError):
    """No order fits: `lane` lacks room in `phase` (present, snapshot, target, order); `certificate` says why.

    For phase order the certificate is the chain of lanes that wait for each other and what each of them waits for;
    `cycle` lists these lanes with the bytes that each has free.
    """

    def __init__(
        self,
        lane: Lane,
        phase: str,
        needed_bytes: int,
        free_bytes: int,
        certificate: tuple[str, ...],
        cycle: tuple[tuple[Lane, int], ...] = (),
    ) -> None:
        super().__init__(
            f"{lane_name(lane)} in phase {phase}: needs {needed_bytes:,} bytes, {free_bytes:,} are free; "
            f"{'; '.join(certificate)}"
        )
        self.lane, self.phase, self.needed_bytes, self.free_bytes = lane, phase, needed_bytes, free_bytes
        self.certificate, self.cycle = certificate, cycle

    def __reduce__(self) -> tuple[type[Infeasible], tuple[object, ...]]:
        return type(self), (self.lane, self.phase, self.needed_bytes, self.free_bytes, self.certificate, self.cycle)


def host_lane(node: int) -> Lane:
    """The lane of a node's host memory; slots are lanes under their own numbers."""
    return -1 - node


def lane_name(lane: Lane) -> str:
    """How people read a lane: 3 is slot 3, host memory of node 0 is host0."""
    return f"slot {lane}" if lane >= 0 else f"host{-1 - lane}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """`size_bytes` of new room on `lane`; `name` is for people."""

    name: str
    lane: Lane
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """`size_bytes` that `lane` gives back when the claims with the indexes `after` have been made and filled."""

    name: str
    lane: Lane
    size_bytes: int
    after: Claims = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of an order: claim or release number `index` on `lane`; park or unpark release `index` at `lane`.

    A parked release frees its own lane at once; its bytes are read from `lane` until it is unparked.
    """

    kind: Literal["claim", "release", "park", "unpark"]
    index: int
    lane: Lane


def order(
    capacity: Mapping[Lane, int],
    used: Mapping[Lane, int],
    claims: Sequence[Claim],
    releases: Sequence[Release],
    host_of: Mapping[Lane, Lane],
    *,
    park: bool = True,
) -> tuple[Step, ...]:
    """A serial order of all claims and releases that never exceeds `capacity` (bytes by lane), else Infeasible.

    `used` are the bytes in use at the start. Bytes are parked on the lane's own host (`host_of`), on another host, or on
    a slot with room that nothing will need; a lane without capacity has none. Without `park` a cycle is refused.
    """
    check_ends(capacity, used, claims, releases)
    search = _Search(capacity, used, claims, releases, host_of if park else None)
    search.run()
    return tuple(search.steps)


def check_ends(
    capacity: Mapping[Lane, int], used: Mapping[Lane, int], claims: Sequence[Claim], releases: Sequence[Release]
) -> None:
    """Infeasible when the present or the target state alone exceeds a lane."""
    final = defaultdict(int, used)
    for claim in claims:
        final[claim.lane] += claim.size_bytes
    for release in releases:
        final[release.lane] -= release.size_bytes
    for phase, state in (("present", used), ("target", final)):
        for lane in sorted(state):
            room = capacity.get(lane, 0)
            if state[lane] > room:
                excess = state[lane] - room
                say = f"the {phase} state takes {state[lane]:,} of {room:,} bytes, {excess:,} too many"
                raise Infeasible(lane, phase, state[lane], room, (say,))


def exchange(
    present: Mapping[Lane, frozenset[str]], target: Mapping[Lane, frozenset[str]], unit_bytes: int = 1
) -> tuple[tuple[Claim, ...], tuple[Release, ...]]:
    """Claims and releases that turn one placing of equal units into another; ValueError for a unit that nobody holds.

    A holder that keeps a unit serves all who need it, others drop it at once. If nobody keeps it, the first holder
    serves the first needer and drops it then; the needer serves the rest.
    """
    holders, needers = _by_unit(present), _by_unit(target)
    claims: list[Claim] = []
    releases: list[Release] = []
    for unit in sorted({*holders, *needers}):
        have, want = holders.get(unit, ()), needers.get(unit, ())
        if want and not have:
            raise ValueError(f"unit {unit} is needed on {lane_name(want[0])}, but nobody holds it")
        first = len(claims)
        claims += [Claim(name=unit, lane=lane, size_bytes=unit_bytes) for lane in want if lane not in have]
        waits = (first,) if len(claims) > first and not set(have) & set(want) else ()
        for lane in (lane for lane in have if lane not in want):
            releases.append(Release(name=unit, lane=lane, size_bytes=unit_bytes, after=waits))
            waits = ()
    return tuple(claims), tuple(releases)


def _by_unit(placing: Mapping[Lane, frozenset[str]]) -> dict[str, list[int]]:
    lanes: dict[str, list[int]] = defaultdict(list)
    for lane in sorted(placing):
        for unit in placing[lane]:
            lanes[unit].append(lane)
    return lanes


def merged(start_bytes: int, capacity_bytes: int, deltas: Sequence[int]) -> list[int]:
    """Positions of a lane's deltas (bytes, claims positive) with claims as early as they fit, releases in their order.

    `deltas` in a legal order; claims among themselves and releases among themselves keep theirs, so the result is
    legal too, and transfers start as early as memory allows.
    """
    grow = [position for position, delta in enumerate(deltas) if delta > 0]
    shrink = [position for position, delta in enumerate(deltas) if delta <= 0]
    result: list[int] = []
    level, g, s = start_bytes, 0, 0
    while g < len(grow) or s < len(shrink):
        if g < len(grow) and (s == len(shrink) or level + deltas[grow[g]] <= capacity_bytes):
            result.append(grow[g])
            g += 1
        else:
            result.append(shrink[s])
            s += 1
        level += deltas[result[-1]]
    return result


class _Search:
    """The state of a search: free bytes by lane, claims not made, what each release still waits for, what is parked."""

    def __init__(
        self,
        capacity: Mapping[Lane, int],
        used: Mapping[Lane, int],
        claims: Sequence[Claim],
        releases: Sequence[Release],
        host_of: Mapping[Lane, Lane] | None,
    ) -> None:
        self.claims, self.releases, self.host_of = claims, releases, host_of
        self.free: dict[int, int] = {lane: size - used.get(lane, 0) for lane, size in sorted(capacity.items())}
        self.steps: list[Step] = []
        self.waits: list[set[int]] = [set(release.after) for release in releases]
        self.fired = [False] * len(releases)
        self.parked: dict[int, int] = {}  # release -> lane
        self.made = [False] * len(claims)
        self.readers: list[list[int]] = [[] for _ in claims]
        for index, release in enumerate(releases):
            for claim in release.after:
                self.readers[claim].append(index)
        self.held: dict[int, list[int]] = defaultdict(list)  # lane -> its releases
        for index, release in enumerate(releases):
            self.held[release.lane].append(index)
        self.coming: dict[int, int] = defaultdict(int)  # lane -> bytes of claims not made
        for claim in claims:
            self.coming[claim.lane] += claim.size_bytes
        ranked = sorted((self._rank(index), index) for index in range(len(claims)))
        self.early: dict[int, list[int]] = defaultdict(list)  # lane -> claims that help, best first
        self.shrinking = [index for rank, index in ranked if rank[0] == 2]
        self.giving_nothing = [index for rank, index in ranked if rank[0] == 3]
        for rank, index in ranked:
            if rank[0] < 2:
                self.early[claims[index].lane].append(index)

    def _rank(self, index: int) -> tuple[int, int, int]:
        """0: gives its own lane at least what it takes; 1: gives others; 2: gives less than it takes; 3: nothing."""
        claim = self.claims[index]
        own = elsewhere = 0
        for r in self.readers[index]:
            release = self.releases[r]
            share = -(-release.size_bytes // len(release.after))
            own += share * (release.lane == claim.lane)
            elsewhere += share * (release.lane != claim.lane)
        if own >= claim.size_bytes > 0:
            return 0, claim.size_bytes, index
        if elsewhere > 0:
            return 1, claim.size_bytes, index
        return (2, -own, index) if own > 0 else (3, claim.size_bytes, index)

    def run(self) -> None:
        """Makes every claim; Infeasible when no parking helps."""
        for index, release in enumerate(self.releases):
            if not release.after:
                self._fire(index)
        while True:
            self._make_early()
            if any(not self.made[index] for lane in self.early.values() for index in lane):
                if not self._make_one(self.shrinking):
                    self._break_cycle()
            elif all(self.made[index] for index in self.shrinking):
                break
            elif not self._make_one(self.shrinking):
                self._break_cycle()
        for index in self.giving_nothing:
            self._make(index)

    def _make_early(self) -> None:
        """Helpful claims of all lanes, best first, until none fits."""
        lanes = sorted(self.early)
        while lanes:
            touched: set[int] = set()
            for lane in lanes:
                rest: list[int] = []
                for index in self.early[lane]:
                    if self.made[index]:
                        continue
                    if self.claims[index].size_bytes <= self.free[lane]:
                        touched |= self._make(index)
                    else:
                        rest.append(index)
                self.early[lane] = rest
            lanes = sorted(lane for lane in touched if self.early.get(lane))

    def _make_one(self, candidates: Sequence[int]) -> bool:
        for index in candidates:
            if not self.made[index] and self.claims[index].size_bytes <= self.free[self.claims[index].lane]:
                self._make(index)
                return True
        return False

    def _make(self, index: int) -> set[int]:
        """Makes a claim and fires what waited for it alone; the lanes that got room."""
        claim = self.claims[index]
        self.free[claim.lane] -= claim.size_bytes
        self.coming[claim.lane] -= claim.size_bytes
        self.made[index] = True
        self.steps.append(Step(kind="claim", index=index, lane=claim.lane))
        lanes: set[int] = set()
        for release in self.readers[index]:
            self.waits[release].discard(index)
            if not self.waits[release]:
                lanes.add(self._fire(release))
        return lanes

    def _fire(self, index: int) -> int:
        release = self.releases[index]
        parked = self.parked.pop(index, None)
        lane = release.lane if parked is None else parked
        self.free[lane] += release.size_bytes
        self.fired[index] = True
        self.steps.append(Step(kind="release" if parked is None else "unpark", index=index, lane=lane))
        return lane

    def _break_cycle(self) -> None:
        """Finds lanes that wait for each other, parks a release of one or of each, and runs the cycle to its end."""
        cycle = self._find_cycle()
        queues = [self._pairs(lane, cycle[(at + 1) % len(cycle)]) for at, lane in enumerate(cycle)]
        count = min(len(queue) for queue in queues)
        if count == 0:  # a release that waits for several claims: its bytes go to the parking as a whole
            at = next(at for at, queue in enumerate(queues) if not queue)
            self._park(self._towards(cycle[at], cycle[(at + 1) % len(cycle)]), cycle)
            return
        queues = [queue[:count] for queue in queues]
        self._park(queues[0][0][0], cycle)
        for queue in queues[1:]:
            if self._spot(queue[0][0]) is None:
                break
            self._park(queue[0][0], cycle)
        self._run_cycle(cycle, queues)

    def _run_cycle(self, cycle: Cycle, queues: list[list[tuple[int, int]]]) -> None:
        """Direct moves against the direction of waiting while they fit, then what is parked; parks more if it must."""
        left = [[pair for pair in queue if pair[0] not in self.parked] for queue in queues]
        stored = [[pair for pair in queue if pair[0] in self.parked] for queue in queues]
        while any(left) or any(stored):
            moved = False
            for queue in reversed(left):
                if queue and self._fits(queue[0][1]):
                    self._make(queue.pop(0)[1])
                    moved = True
            if moved:
                continue
            queue = next((queue for queue in stored if queue and self._fits(queue[0][1])), None)
            if queue is not None:
                self._make(queue.pop(0)[1])
                continue
            at = next((at for at, queue in enumerate(left) if queue), None)
            if at is None:
                return  # only parked pieces of unequal size are left: other work may make their room
            self._park(left[at][0][0], cycle)
            stored[at].append(left[at].pop(0))

    def _fits(self, claim: int) -> bool:
        return self.claims[claim].size_bytes <= self.free[self.claims[claim].lane]

    def _find_cycle(self) -> Cycle:
        """Lanes of which each waits for room on the next: what it holds is read for a claim there."""
        blocked = sorted({self.claims[i].lane for i, made in enumerate(self.made) if not made and self.readers[i]})
        dead: set[int] = set()
        for first in blocked:
            path = [first]
            while path:
                following = [lane for lane in self._waits_for(path[-1]) if lane not in dead]
                if not following:
                    dead.add(path.pop())
                elif following[0] in path:
                    return tuple(path[path.index(following[0]) :])
                else:
                    path.append(following[0])
        raise self._infeasible(tuple(blocked[:1]), "what it holds is not waited for, parked bytes are in the way")

    def _waits_for(self, lane: int) -> list[int]:
        """Lanes of claims that stand between a blocked lane and its room, those that one claim unlocks first."""
        found: list[tuple[int, int]] = []
        for release in self.held[lane]:
            if not self.fired[release] and release not in self.parked:
                found += [(len(self.waits[release]), self.claims[c].lane) for c in self.waits[release]]
        return [other for _, other in sorted(set(found))]

    def _pairs(self, lane: int, towards: int) -> list[tuple[int, int]]:
        """(release, claim): what `lane` can drop as soon as one claim on the lane `towards` is made, one each."""
        pairs: list[tuple[int, int]] = []
        taken: set[int] = set()
        for release in self.held[lane]:
            if self.fired[release] or release in self.parked or len(self.waits[release]) != 1:
                continue
            (claim,) = self.waits[release]
            if self.claims[claim].lane == towards and claim not in taken:
                pairs.append((release, claim))
                taken.add(claim)
        return pairs

    def _towards(self, lane: int, other: int) -> int:
        """The smallest release of `lane` that waits for a claim on `other`."""
        waiting = [
            r
            for r in self.held[lane]
            if not self.fired[r] and r not in self.parked and any(self.claims[c].lane == other for c in self.waits[r])
        ]
        return min(waiting, key=lambda r: (self.releases[r].size_bytes, r))

    def _spot(self, release: int) -> int | None:
        """Where a release's bytes can wait: its host, another host, a slot with room that nothing will need."""
        size, lane = self.releases[release].size_bytes, self.releases[release].lane
        if self.host_of is None:
            return None
        own = self.host_of.get(lane)
        hosts = [lane for lane in sorted(self.free, reverse=True) if lane < 0 and lane != own]
        for host in [*([own] if own is not None else []), *hosts]:
            if self.free.get(host, 0) - self.coming[host] >= size:
                return host
        host_of = self.host_of
        near = sorted(self.free, key=lambda s: (host_of.get(s) != own, s))
        return next((s for s in near if s >= 0 and s != lane and self.free[s] - self.coming[s] >= size), None)

    def _park(self, release: int, cycle: Cycle) -> None:
        spot = self._spot(release)
        if spot is None:
            size = self.releases[release].size_bytes
            raise self._infeasible(cycle, f"no host and no slot has {size:,} bytes to park a piece of this cycle")
        self.parked[release] = spot
        self.free[spot] -= self.releases[release].size_bytes
        self.free[self.releases[release].lane] += self.releases[release].size_bytes
        self.steps.append(Step(kind="park", index=release, lane=spot))

    def _infeasible(self, cycle: Cycle, reason: str) -> Infeasible:
        """The refusal with the chain of lanes: what each needs, has free, and for whom its bytes wait."""
        lines: list[str] = []
        for at, lane in enumerate(cycle):
            towards = cycle[(at + 1) % len(cycle)]
            need = min(self.claims[c].size_bytes for c in self._missing(lane))
            lines.append(
                f"{lane_name(lane)} needs {need:,} bytes, has {self.free[lane]:,}, and can give back only after "
                f"{lane_name(towards)} has taken its bytes"
            )
        lane = cycle[0]
        need = min(self.claims[c].size_bytes for c in self._missing(lane))
        certificate = (*lines, reason)
        return Infeasible(lane, "order", need, self.free[lane], certificate, tuple((at, self.free[at]) for at in cycle))

    def _missing(self, lane: int) -> list[int]:
        return [c for c, made in enumerate(self.made) if not made and self.claims[c].lane == lane]
