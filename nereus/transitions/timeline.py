"""When each operation of a transition runs: a list schedule over ports, network ports, PCIe, hosts and threads.

Whenever something ends, the ready operation with the longest way to the end goes first. A move is sent in parts, between
which its ports may serve others (the fabric sends buckets); the order of parts comes from an edge colouring of the
ports, which has every busy port work in every round. Operations before the pause, then those of the pause, are scheduled
apart: the pause begins when everything before it is done. The lower bound beside it: the longest chain, and for every
resource its load with the shortest way to it and from it. Times are whole nanoseconds inside, so that equal parts end
together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from nereus.schedule import rounds
from nereus.transitions.durations import NANOSECONDS_PER_SECOND, Durations, Hold
from nereus.transitions.graph import PLACES, Place, TransitionGraph, uncollected
from nereus.transitions.order import Lane

Span = tuple[int, float, float]
PARTS_OF_LOAD = 40
"""A move is cut where it exceeds this part of the busiest port's load: open shops with preemption reach their bound."""
MOST_PARTS = 40_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The operations of one place: their span in seconds, a lower bound of it, and of the moves among them alone.

    `busiest` names the resource or "the longest chain" that gives the bound. `moves_seconds` is from the first start to
    the last end of a move, `moves_bound_seconds` the load of the busiest port by moves.
    """

    place: Place
    seconds: float
    bound_seconds: float
    busiest: str
    moves_seconds: float
    moves_bound_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Start and end of each operation in seconds from the transition's beginning, and the windows of the three places.

    `spans` says when each operation really works, a move part by part: (operation, start, end in seconds) by start.
    """

    start_seconds: tuple[float, ...]
    end_seconds: tuple[float, ...]
    spans: tuple[Span, ...]
    windows: tuple[Window, ...]

    @property
    def makespan_seconds(self) -> float:
        """From the first start to the last end."""
        return sum(window.seconds for window in self.windows)

    @property
    def bound_seconds(self) -> float:
        """What no schedule of these operations can go below."""
        return sum(window.bound_seconds for window in self.windows)

    @property
    def gap_ratio(self) -> float:
        """Makespan over bound; 1 is perfect."""
        return self.makespan_seconds / self.bound_seconds if self.bound_seconds > 0 else 1.0

    def seconds_in(self, place: Place) -> float:
        """The span of one place."""
        return sum(window.seconds for window in self.windows if window.place == place)


@uncollected()
def timeline(graph: TransitionGraph, durations: Durations) -> Timeline:
    """The list schedule of a graph that `nereus.transitions.proof.check` accepts."""
    length = [round(op.seconds * NANOSECONDS_PER_SECOND) for op in graph.operations]
    holds = _holds(graph, length, durations)
    start, ends = [0] * len(length), [0] * len(length)
    windows: list[Window] = []
    spans: list[tuple[int, int, int]] = []
    begin = 0
    for place in PLACES:
        members = [index for index, op in enumerate(graph.operations) if op.place == place]
        if members:
            listing = _Listing(graph, members, length, holds)
            spans += listing.run(start, ends, begin, durations.resources_count)
            window, begin = _window(listing, place, start, ends, begin, durations)
            windows.append(window)
    nano = NANOSECONDS_PER_SECOND
    return Timeline(
        start_seconds=tuple(at / nano for at in start),
        end_seconds=tuple(at / nano for at in ends),
        spans=tuple((index, at / nano, until / nano) for index, at, until in spans),
        windows=tuple(windows),
    )


def _holds(graph: TransitionGraph, length: list[int], durations: Durations) -> list[list[Hold]]:
    """What each operation holds; of a thread's ports one stands for the thread, the others matter only to moves."""
    holds: list[list[Hold]] = [durations.holds(op) if op.carries else [] for op in graph.operations]
    moved = {resource for held in holds for resource, _ in held}
    ports: dict[Lane, tuple[int, ...]] = {}
    for index, op in enumerate(graph.operations):
        if op.carries or not length[index] or not durations.needs_thread(op):
            continue
        for lane in op.lanes:
            if lane >= 0:
                if lane not in ports:
                    first, *others = durations.ports(lane)
                    ports[lane] = first, *(port for port in others if port in moved)
                holds[index] += [(port, length[index]) for port in ports[lane]]
    return holds


def _window(
    listing: _Listing, place: Place, start: list[int], ends: list[int], begin: int, durations: Durations
) -> tuple[Window, int]:
    end = max(ends[index] for index in listing.members)
    bound, busiest = listing.bound(durations)
    moves, load = listing.moves, listing.move_loads()
    span = max((ends[i] for i in moves), default=0) - min((start[i] for i in moves), default=0)
    window = Window(
        place=place,
        seconds=(end - begin) / NANOSECONDS_PER_SECOND,
        bound_seconds=bound / NANOSECONDS_PER_SECOND,
        busiest=busiest,
        moves_seconds=span / NANOSECONDS_PER_SECOND,
        moves_bound_seconds=max(load.values(), default=0) / NANOSECONDS_PER_SECOND,
    )
    return window, end


class _Listing:
    """The operations of one place, how long they take, what they hold, and what must run before and after them.

    Lists have an entry for every operation of the graph; those of other places are not looked at.
    """

    def __init__(self, graph: TransitionGraph, members: list[int], length: list[int], holds: list[list[Hold]]) -> None:
        self.graph, self.members, self.length, self.holds = graph, members, length, holds
        self.count = len(length)
        self.after: list[list[int]] = [[]] * self.count
        self.waits = [0] * self.count
        place = graph.operations[members[0]].place
        for index in members:
            self.after[index] = [b for b in graph.successors[index] if graph.operations[b].place is place]
            for b in self.after[index]:
                self.waits[b] += 1
        self.heads, self.tails = self._ways()
        self.moves = [index for index in members if graph.operations[index].carries]
        self.quantum = 1
        self.turns = self._turns()
        self.rank = self._ranks()

    def _ways(self) -> tuple[list[int], list[int]]:
        """Nanoseconds that must pass before an operation starts, and after it ends, if every resource were free."""
        waits, heads, tails = list(self.waits), [0] * self.count, [0] * self.count
        order = [index for index in self.members if not waits[index]]
        for index in order:
            ready = heads[index] + self.length[index]
            for b in self.after[index]:
                heads[b] = max(heads[b], ready)
                waits[b] -= 1
                if not waits[b]:
                    order.append(b)
        for index in reversed(order):
            tails[index] = max((tails[b] + self.length[b] for b in self.after[index]), default=0)
        return heads, tails

    def _ranks(self) -> dict[int, tuple[int, int]]:
        """What goes first: the longest way to the end; of moves by whole loads of the busiest port, then by round."""
        ranks = {index: (-self.tails[index] - self.length[index], index) for index in self.members}
        most = max(self.move_loads().values(), default=0) or 1
        least = min((self.tails[index] for index in self.moves), default=0)
        for index in self.moves:
            way = (self.tails[index] - least) // most * most
            ranks[index] = (-least - way - most, self.turns[index][0])
        return ranks

    def move_loads(self) -> defaultdict[int, int]:
        """Nanoseconds that moves hold each resource."""
        load: dict[int, int] = defaultdict(int)
        for index in self.moves:
            for resource, busy in self.holds[index]:
                load[resource] += busy
        return load

    def _turns(self) -> dict[int, list[int]]:
        """The round of every part of each move: whole parts by edge colouring of the ports, then what is left of each."""
        share = max(self.move_loads().values(), default=0) // PARTS_OF_LOAD
        budget = max(MOST_PARTS - len(self.moves), 0)
        total = sum(self.length[index] for index in self.moves)
        self.quantum = max(share, total // budget if budget else total, 1)
        ports = [(self.holds[index][0][0], self.holds[index][-1][0]) for index in self.moves]
        parts = [self.length[index] // self.quantum for index in self.moves]
        found = rounds([port for port, count in zip(ports, parts, strict=True) for _ in range(count)])
        last = 1 + max(found, default=0)
        rests = [self.length[index] % self.quantum for index in self.moves]
        longest = max(rests, default=0)
        turns: dict[int, list[int]] = {}
        for index, count, rest, end in zip(self.moves, parts, rests, accumulate(parts), strict=True):
            turns[index] = sorted(found[end - count : end]) + ([last + longest - rest] if rest or not count else [])
        return turns

    def run(self, start: list[int], ends: list[int], begin: int, resources: int) -> list[tuple[int, int, int]]:
        """Fills `start` and `ends` (nanoseconds) from `begin` on; the spans (operation, start, end) of all parts."""
        state = _Running(self, start, ends, begin, resources)
        ready = [index for index in self.members if not self.waits[index]]
        while True:
            state.start_ready(ready)
            if not state.events:
                return state.spans
            ready = state.advance()

    def bound(self, durations: Durations) -> tuple[int, str]:
        """(nanoseconds, what gives it): the longest chain, or a resource's load with the least before and after it.

        A resource is free again when an operation's hold ends, which may be before the operation does.
        """
        best, name = max((self.heads[i] + self.length[i] + self.tails[i] for i in self.members), default=0), -1
        load: dict[int, int] = defaultdict(int)
        head: dict[int, int] = {}
        tail: dict[int, int] = {}
        for index in self.members:
            for resource, busy in self.holds[index]:
                load[resource] += busy
                rest = self.tails[index] + self.length[index] - busy
                head[resource] = min(head.get(resource, self.heads[index]), self.heads[index])
                tail[resource] = min(tail.get(resource, rest), rest)
        for resource, busy in load.items():
            if head[resource] + busy + tail[resource] > best:
                best, name = head[resource] + busy + tail[resource], resource
        return best, durations.resource_name(name) if name >= 0 else "the longest chain"


class _Running:
    """A schedule under way. An operation that cannot start at once is kept, by rank, at every resource that it holds.

    A move goes on part by part: after each its ports are free for what has longer to go. An entry is one number: the
    rank, then the operation; an event is one too: the time, then the operation that ends or, above them, a resource set
    free.
    """

    def __init__(self, listing: _Listing, start: list[int], ends: list[int], begin: int, resources: int) -> None:
        self.listing, self.start, self.ends, self.now, self.count = listing, start, ends, begin, listing.count
        self.events_base = self.count + resources
        self.waits = list(listing.waits)
        self.free = [begin] * resources
        self.parts = {index: len(turns) for index, turns in listing.turns.items()}
        self.least = min(rank for rank, _ in listing.rank.values())
        self.width = 1 + max((turn for turns in listing.turns.values() for turn in turns), default=0) + self.count
        self.entry = [0] * self.count
        for index, (rank, turn) in listing.rank.items():
            self.entry[index] = ((rank - self.least) * self.width + turn) * self.count + index
        self.length = list(listing.length)
        self.holds = list(listing.holds)
        for index, parts in self.parts.items():
            if parts > 1:
                self._part(index, listing.quantum)
        self.uses: list[list[int]] = [[]] * self.count
        for index in listing.members:
            self.uses[index] = [resource for resource, _ in listing.holds[index]]
        self.begun = bytearray(self.count)
        self.spans: list[tuple[int, int, int]] = []
        self.kept: list[list[int]] = [[] for _ in range(resources)]
        self.events: list[int] = []
        self.freed: set[int] = set()

    def _part(self, index: int, length: int) -> None:
        """The next part of a move takes so long, and its resources in proportion."""
        whole = self.listing.length[index]
        self.length[index] = length
        self.holds[index] = [(resource, -(-busy * length // whole)) for resource, busy in self.listing.holds[index]]

    def start_ready(self, ready: list[int]) -> None:
        """Starts what waits for a resource that is just free, and what became ready, best first."""
        entries, free, now, kept, uses = self.entry, self.free, self.now, self.kept, self.uses
        fresh: list[int] = []
        for index in ready:
            if index in self.parts:
                for resource in uses[index]:
                    insort(kept[resource], entries[index])
                self.freed.update(uses[index])
            else:
                fresh.append(index)
        for _, resource in sorted([(kept[r][0], r) for r in self.freed if kept[r]]):
            if free[resource] <= now:
                self._next(resource)
        for index in sorted(fresh, key=entries.__getitem__):
            if any(free[resource] > now for resource in uses[index]):
                for resource in uses[index]:
                    insort(kept[resource], entries[index])
            else:
                self._start(index)

    def _next(self, resource: int) -> None:
        """Starts the first operation kept at a free resource that can."""
        free, now, uses, count = self.free, self.now, self.uses, self.count
        for entry in self.kept[resource]:
            index = entry % count
            for other in uses[index]:
                if free[other] > now:
                    break
            else:
                for other in uses[index]:
                    kept = self.kept[other]
                    del kept[bisect_left(kept, entry)]
                self._start(index)
                return

    def _start(self, index: int) -> None:
        now, end, base = self.now, self.now + self.length[index], self.events_base
        if not self.begun[index]:
            self.start[index] = now
            self.begun[index] = 1
        for resource, busy in self.holds[index]:
            until = now + busy
            self.free[resource] = until
            if until != end:
                heappush(self.events, until * base + self.count + resource)
        self.spans.append((index, now, end))
        heappush(self.events, end * base + index)

    def advance(self) -> list[int]:
        """Goes to the next time at which something ends or gets free; the operations that became ready."""
        events, base, count, waits = self.events, self.events_base, self.count, self.waits
        self.now = events[0] // base
        self.freed = set()
        ready: list[int] = []
        until = (self.now + 1) * base
        while events and events[0] < until:
            index = heappop(events) % base
            if index >= count:
                self.freed.add(index - count)
                continue
            self.freed.update(self.uses[index])
            if self.parts.get(index, 1) > 1:
                self._again(index)
                ready.append(index)
                continue
            self.ends[index] = self.now
            for b in self.listing.after[index]:
                waits[b] -= 1
                if not waits[b]:
                    ready.append(b)
        return ready

    def _again(self, index: int) -> None:
        """A part of a move has ended: the next one has the rank of its round."""
        self.parts[index] -= 1
        rank, turn = self.listing.rank[index][0], self.listing.turns[index][-self.parts[index]]
        self.entry[index] = ((rank - self.least) * self.width + turn) * self.count + index
        rest = self.listing.length[index] % self.listing.quantum
        if self.parts[index] == 1 and rest:
            self._part(index, rest)
