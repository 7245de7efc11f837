"""Rounds: which transfers may run together when a slot has one send and one receive port (full duplex).

A bipartite multigraph has an edge colouring with as many colours as its largest degree (König 1916). It is found by
halving: the graph is padded to a regular one; of an odd degree a perfect matching is taken off as a round of its own,
an even one is split along Euler tours into two graphs of half the degree (Gabow 1976). All graphs of a level have the
same degree, so a level is a handful of array operations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
from scipy.sparse.csgraph import (  # pyright: ignore[reportMissingTypeStubs]
    connected_components,  # pyright: ignore[reportUnknownVariableType]
    maximum_bipartite_matching,  # pyright: ignore[reportUnknownVariableType]
)

Numbers = npt.NDArray[np.int64]


def rounds(pairs: Sequence[tuple[int, int]], hops: Sequence[int] | None = None) -> list[int]:
    """A round for each (source, destination) such that no port is used twice in a round; no round is empty.

    Without `hops` the rounds are as few as the busiest port has transfers. With them, one hop for each pair, a pair
    comes after every pair of a lower hop that arrives at its source, and the rounds are few but not always fewest.
    The same pairs get the same rounds.
    """
    if len(pairs) == 0:
        return []
    if hops is None or not any(hops):
        ports = np.asarray(pairs, dtype=np.int64)
        return _coloured(ports[:, 0], ports[:, 1]).tolist()
    listed, stacked = _listed(pairs, hops), _stacked(pairs, hops)
    return listed if max(listed) <= max(stacked) else stacked


def least_rounds(pairs: Sequence[tuple[int, int]], hops: Sequence[int] | None = None) -> int:
    """A lower bound of the rounds: the busiest port, with the hops that must come before and after its transfers.

    Without hops it is reached. With them a port's transfers of hops a to b cannot start before the earliest feed of one
    of them has come, and the shortest chain behind one of them follows.
    """
    if len(pairs) == 0:
        return 0
    hops = hops or [0] * len(pairs)
    heads, tails = _heads(pairs, hops), _tails(pairs, hops)
    at: dict[tuple[bool, int], list[int]] = defaultdict(list)
    for index, (source, destination) in enumerate(pairs):
        at[False, source].append(index)
        at[True, destination].append(index)
    best = 0
    for edges in at.values():
        for low in {hops[e] for e in edges}:
            for high in {hops[e] for e in edges if hops[e] >= low}:
                some = [e for e in edges if low <= hops[e] <= high]
                best = max(best, len(some) + min(heads[e] for e in some) + min(tails[e] for e in some))
    return best


def pipelined(pairs: Sequence[tuple[int, int]], feeds: Sequence[Sequence[int]]) -> list[int]:
    """Rounds where pair i comes after the pairs `feeds[i]`, all of lower index: what arrives in a round can be handed on
    in the next, so a chain of many buckets takes as many rounds as buckets and links. No round is empty.
    """
    load: Counter[tuple[bool, int]] = Counter()
    tails = [0] * len(pairs)
    for index in reversed(range(len(pairs))):
        load[False, pairs[index][0]] += 1
        load[True, pairs[index][1]] += 1
        for feed in feeds[index]:
            tails[feed] = max(tails[feed], tails[index] + 1)
    busy: dict[tuple[bool, int], int] = defaultdict(int)  # a bit for each round
    turns = [0] * len(pairs)
    depth = [0] * len(pairs)
    for index, after in enumerate(feeds):
        depth[index] = 1 + max((depth[feed] for feed in after), default=-1)
    most = [max(load[False, source], load[True, destination]) for source, destination in pairs]
    for index in sorted(range(len(pairs)), key=lambda i: (depth[i] - tails[i], depth[i], -most[i], i)):
        source, destination = pairs[index]
        early = max((turns[feed] + 1 for feed in feeds[index]), default=0)
        free = ~((busy[False, source] | busy[True, destination]) >> early)
        turns[index] = early + (free & -free).bit_length() - 1
        busy[False, source] |= 1 << turns[index]
        busy[True, destination] |= 1 << turns[index]
    return _closed(turns)


def _coloured(sources: Numbers, destinations: Numbers) -> Numbers:
    """[pairs] the round of each pair, as many rounds as the largest degree."""
    left, left_free, degree = _grouped(sources, 0)
    right, right_free, degree_right = _grouped(destinations, 0)
    if degree != degree_right:
        degree = max(degree, degree_right)
        left, left_free, _ = _grouped(sources, degree)
        right, right_free, _ = _grouped(destinations, degree)
    size = max(len(left_free), len(right_free))
    edges = [
        np.concatenate((side, np.repeat(np.arange(size), np.pad(free, (0, size - len(free)), constant_values=degree))))
        for side, free in ((left, left_free), (right, right_free))
    ]
    return _regular(edges[0], edges[1], size, degree)[: len(sources)]


def _grouped(ports: Numbers, degree: int) -> tuple[Numbers, Numbers, int]:
    """Ports of low degree put together: [pairs] the group of each end, [groups] places left in it, the degree.

    A group has at most `degree` ends (0: the largest degree of a port); two neighbouring groups have more, so that
    padding at most triples the graph.
    """
    _, index, counts = np.unique(ports, return_inverse=True, return_counts=True)
    degree = max(degree, int(counts.max()))
    group_of: list[int] = []
    used: list[int] = [0]
    for count in counts.tolist():
        if used[-1] + count > degree:
            used.append(0)
        used[-1] += count
        group_of.append(len(used) - 1)
    return np.asarray(group_of, dtype=np.int64)[index], degree - np.asarray(used, dtype=np.int64), degree


def _regular(left: Numbers, right: Numbers, size: int, degree: int) -> Numbers:
    """[edges] colours 0 ... degree - 1 of a regular bipartite multigraph of `size` + `size` vertices."""
    colours = np.full(len(left), -1, dtype=np.int64)
    open_edges = np.arange(len(left))
    part = np.zeros(len(left), dtype=np.int64)  # the graph of this level that an open edge belongs to
    parts, used = 1, 0
    while degree > 1:
        ends = (part * size + left[open_edges], part * size + right[open_edges])
        if degree % 2:
            taken = _perfect_matching(*ends, parts * size)
            colours[open_edges[taken]] = used + part[taken]
            used, degree = used + parts, degree - 1
            keep = np.ones(len(open_edges), dtype=bool)
            keep[taken] = False
            open_edges, part = open_edges[keep], part[keep]
            ends = (ends[0][keep], ends[1][keep])
        part = 2 * part + _halves(*ends)
        parts, degree = 2 * parts, degree // 2
    colours[open_edges] = used + part
    return colours


def _perfect_matching(left: Numbers, right: Numbers, size: int) -> Numbers:
    """[size] edges that meet every vertex once; a regular bipartite graph has them (Hall)."""
    keys, first = np.unique(left * size + right, return_index=True)
    links = csr_matrix((np.ones(len(keys), dtype=np.int8), (keys // size, keys % size)), shape=(size, size))
    partner = np.asarray(maximum_bipartite_matching(links, perm_type="column"), dtype=np.int64)
    return first[np.searchsorted(keys, np.arange(size) * size + partner)]


def _halves(left: Numbers, right: Numbers) -> Numbers:
    """[edges] 0 or 1 such that half of the edges at each vertex (of even degree) get 1.

    Edges are paired at each vertex; the pairs close to cycles that alternate between the sides. Two steps along a cycle
    lead through every second edge of it, so each cycle has two orbits: one half takes the one, the other the other.
    """
    count = len(left)
    across = np.empty((2, count), dtype=np.int64)
    for side, ends in enumerate((left, right)):
        order = np.argsort(ends, kind="stable")
        across[side, order[0::2]], across[side, order[1::2]] = order[1::2], order[0::2]
    step = csr_matrix((np.ones(count, dtype=np.int8), (np.arange(count), across[1, across[0]])), shape=(count, count))
    orbit = np.asarray(connected_components(step, directed=False)[1], dtype=np.int64)
    return (orbit > orbit[across[0]]).astype(np.int64)


def _stacked(pairs: Sequence[tuple[int, int]], hops: Sequence[int]) -> list[int]:
    """Hop after hop, each in its fewest rounds."""
    turns = [0] * len(pairs)
    first = 0
    for edges in _by_hop(hops).values():
        found = rounds([pairs[index] for index in edges])
        for index, turn in zip(edges, found, strict=True):
            turns[index] = first + turn
        first += 1 + max(found)
    return turns


def _listed(pairs: Sequence[tuple[int, int]], hops: Sequence[int]) -> list[int]:
    """The first free round of both ports after the feeds; within a hop what has most to come behind it goes first."""
    tails = _tails(pairs, hops)
    load: dict[tuple[bool, int], int] = defaultdict(int)
    for source, destination in pairs:
        load[False, source] += 1
        load[True, destination] += 1

    def rank(index: int) -> tuple[int, int, int, tuple[int, int], int]:
        source, destination = pairs[index]
        return hops[index], -tails[index], -max(load[False, source], load[True, destination]), pairs[index], index

    busy: dict[tuple[bool, int], int] = defaultdict(int)  # a bit for each round
    fed: dict[int, int] = defaultdict(int)  # slot -> first round after all arrivals of lower hops
    turns = [0] * len(pairs)
    order = sorted(range(len(pairs)), key=rank)
    for _, group in groupby(order, key=lambda index: hops[index]):
        arrivals: list[tuple[int, int]] = []
        for index in group:
            source, destination = pairs[index]
            early = fed[source]
            free = ~((busy[False, source] | busy[True, destination]) >> early)
            turn = early + (free & -free).bit_length() - 1
            busy[False, source] |= 1 << turn
            busy[True, destination] |= 1 << turn
            arrivals.append((destination, turn + 1))
            turns[index] = turn
        for destination, after in arrivals:
            fed[destination] = max(fed[destination], after)
    return _closed(turns)


def _closed(turns: list[int]) -> list[int]:
    """The rounds numbered without gaps."""
    number = {turn: index for index, turn in enumerate(sorted(set(turns)))}
    return [number[turn] for turn in turns]


def _by_hop(hops: Sequence[int]) -> dict[int, list[int]]:
    """Indexes of the pairs of each hop, hops ascending."""
    edges: dict[int, list[int]] = {hop: [] for hop in sorted(set(hops))}
    for index, hop in enumerate(hops):
        edges[hop].append(index)
    return edges


def _heads(pairs: Sequence[tuple[int, int]], hops: Sequence[int]) -> list[int]:
    """Rounds that must pass before each pair: all arrivals of lower hops at its source, one a round, and their heads."""
    arrived: dict[int, int] = defaultdict(int)
    counts: dict[int, int] = defaultdict(int)
    heads = [0] * len(pairs)
    for edges in _by_hop(hops).values():
        for index in edges:
            heads[index] = max(arrived[pairs[index][0]], counts[pairs[index][0]])
        for index in edges:
            destination = pairs[index][1]
            arrived[destination] = max(arrived[destination], heads[index] + 1)
            counts[destination] += 1
    return heads


def _tails(pairs: Sequence[tuple[int, int]], hops: Sequence[int]) -> list[int]:
    """Rounds that must follow each pair: what its destination sends in higher hops, one a round, and what follows."""
    follows: dict[int, int] = defaultdict(int)
    counts: dict[int, int] = defaultdict(int)
    tails = [0] * len(pairs)
    for edges in reversed(_by_hop(hops).values()):
        for index in edges:
            tails[index] = max(follows[pairs[index][1]], counts[pairs[index][1]])
        for index in edges:
            source = pairs[index][0]
            follows[source] = max(follows[source], tails[index] + 1)
            counts[source] += 1
    return tails
