"""Rounds: which transfers may run together when a slot has one send and one receive port (full duplex).

A bipartite multigraph has an edge colouring with as many colours as its largest degree (König 1916). It is found by
halving: the graph is padded to a regular one; of an odd degree a perfect matching is taken off as a round of its own,
an even one is split along Euler tours into two graphs of half the degree (Gabow 1976). All graphs of a level have the
same degree, so a level is a handful of array operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
from scipy.sparse.csgraph import (  # pyright: ignore[reportMissingTypeStubs]
    connected_components,  # pyright: ignore[reportUnknownVariableType]
    maximum_bipartite_matching,  # pyright: ignore[reportUnknownVariableType]
)

Numbers = npt.NDArray[np.int64]


def rounds(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """A round for each (source, destination) such that no port is used twice in a round; no round is empty.

    The rounds are as few as the busiest port has transfers. The same pairs get the same rounds.
    """
    if len(pairs) == 0:
        return []
    ports = np.asarray(pairs, dtype=np.int64)
    return _coloured(ports[:, 0], ports[:, 1]).tolist()


def pipelined(pairs: Sequence[tuple[int, int]], feeds: Sequence[Sequence[int]]) -> list[int]:
    """Rounds where pair i comes after the pairs `feeds[i]`, all of lower index: what arrives in a round can be handed on
    in the next, so a chain of many buckets takes as many rounds as buckets and links. No round is empty.

    Round after round, of the pairs whose feeds have come those go first that have most behind them: what waits for them
    one after the other, and what their busier port has yet to carry.
    """
    behind = [0] * len(pairs)
    left: Counter[tuple[bool, int]] = Counter()
    waits: list[list[int]] = [[] for _ in pairs]
    for index in reversed(range(len(pairs))):
        left[False, pairs[index][0]] += 1
        left[True, pairs[index][1]] += 1
        for feed in feeds[index]:
            behind[feed] = max(behind[feed], behind[index] + 1)
            waits[feed].append(index)
    missing = [len(before) for before in feeds]
    ready = [index for index, count in enumerate(missing) if not count]
    turns = [-1] * len(pairs)
    turn = 0
    while ready:
        ready.sort(key=lambda i: (-behind[i] - max(left[False, pairs[i][0]], left[True, pairs[i][1]]), i))
        busy: set[tuple[bool, int]] = set()
        later: list[int] = []
        for index in ready:
            ports = {(False, pairs[index][0]), (True, pairs[index][1])}
            if ports & busy:
                later.append(index)
                continue
            busy |= ports
            turns[index] = turn
        done = [index for index in ready if turns[index] == turn]
        for index in done:
            left[False, pairs[index][0]] -= 1
            left[True, pairs[index][1]] -= 1
            for after in waits[index]:
                missing[after] -= 1
                if not missing[after]:
                    later.append(after)
        ready, turn = later, turn + 1
    return turns


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
