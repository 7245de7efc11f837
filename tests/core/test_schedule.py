"""Rounds are matchings, as few as the busiest port needs; with relays, few."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.schedule import pipelined, rounds

Pairs = list[tuple[int, int]]


def degree(pairs: Pairs) -> int:
    """The most transfers that one port takes part in: the least number of rounds (König)."""
    sends, receives = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    return max((*sends.values(), *receives.values()), default=0)


def assert_matchings(pairs: Pairs, turns: list[int]) -> None:
    """No port twice in a round, no empty round."""
    assert len(turns) == len(pairs)
    assert len({(turn, a) for turn, (a, _) in zip(turns, pairs, strict=True)}) == len(pairs)
    assert len({(turn, b) for turn, (_, b) in zip(turns, pairs, strict=True)}) == len(pairs)
    assert sorted(set(turns)) == list(range(len(set(turns))))


def multigraphs(ports: int, edges: int) -> st.SearchStrategy[Pairs]:
    return st.lists(st.tuples(st.integers(0, ports), st.integers(0, ports)), max_size=edges)


@settings(deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: multigraphs(n, 80)))
def test_rounds_are_at_the_bound(pairs: Pairs) -> None:
    turns = rounds(pairs)
    assert_matchings(pairs, turns)
    assert len(set(turns)) == degree(pairs)


@settings(deadline=None)
@given(multigraphs(5, 30))
def test_rounds_are_a_function_of_the_pairs(pairs: Pairs) -> None:
    assert rounds(pairs) == rounds(list(pairs))


@pytest.mark.parametrize(
    ("pairs", "fewest"),
    [
        ([(i, (i + 1) % 8) for i in range(8)], 1),
        ([(0, i) for i in range(1, 8)], 7),
        ([(i, 7) for i in range(7)], 7),
        ([(a, b) for a in range(4) for b in range(4) if a != b], 3),
        ([(0, 1)] * 5 + [(0, 2)] * 6, 11),
        ([], 0),
    ],
    ids=["ring-8", "scatter-7", "gather-7", "all-to-all-4", "parallel", "none"],
)
def test_patterns(pairs: Pairs, fewest: int) -> None:
    """The patterns of Megatron's own scheduler tests. Full duplex: a ring takes one round."""
    turns = rounds(pairs)
    assert_matchings(pairs, turns)
    assert len(set(turns)) == fewest


@pytest.mark.parametrize(("ports", "edges"), [(1024, 50_000), (7, 20_000), (1024, 900)])
def test_large_random_multigraphs(ports: int, edges: int) -> None:
    """100,000 transfers between 1,024 slots take about a quarter of a second; no assertion on time."""
    pairs = [(a, b) for a, b in np.random.default_rng(edges).integers(0, ports, (edges, 2)).tolist()]
    turns = rounds(pairs)
    assert_matchings(pairs, turns)
    assert len(set(turns)) == degree(pairs)


def fed(pairs: Pairs, hops: list[int]) -> list[list[int]]:
    """For each pair the earlier ones of a lower hop that arrive at its source: what the worst relay waits for."""
    return [[j for j in range(i) if hops[j] < hops[i] and pairs[j][1] == source] for i, (source, _) in enumerate(pairs)]


hopped = multigraphs(5, 40).flatmap(
    lambda pairs: st.tuples(st.just(pairs), st.lists(st.integers(0, 3), min_size=len(pairs), max_size=len(pairs)))
)


@settings(deadline=None)
@given(hopped)
def test_relays_come_after_their_feeds(case: tuple[Pairs, list[int]]) -> None:
    pairs, hops = case
    feeds = fed(pairs, hops)
    turns = pipelined(pairs, feeds)
    assert_matchings(pairs, turns)
    assert all(turns[feed] < turns[i] for i, before in enumerate(feeds) for feed in before)
    assert degree(pairs) <= len(set(turns)) <= len(pairs)
    assert pipelined(list(pairs), [list(before) for before in feeds]) == turns


@pytest.mark.parametrize(("links", "buckets"), [(1, 5), (3, 1), (3, 10), (15, 40)])
def test_a_chain_takes_as_many_rounds_as_buckets_and_links(links: int, buckets: int) -> None:
    """Each link hands a bucket on in the round after it came (F10 of the formal facts)."""
    pairs = [(link, link + 1) for link in range(links) for _ in range(buckets)]
    feeds = [[] if i < buckets else [i - buckets] for i in range(len(pairs))]
    turns = pipelined(pairs, feeds)
    assert_matchings(pairs, turns)
    assert len(set(turns)) == buckets + links - 1


def test_a_chain_of_relays_overlaps_with_others() -> None:
    """Three chains 0>1>2>3 through disjoint slots, and one slot that feeds another: the bound is reached."""
    pairs = [(4 * k + i, 4 * k + i + 1) for k in range(3) for i in range(3)] + [(12, 13)] * 3
    turns = pipelined(pairs, fed(pairs, [0, 1, 2] * 3 + [0] * 3))
    assert turns == [0, 1, 2] * 3 + turns[9:]
    assert len(set(turns)) == 3


def test_relays_on_a_large_fleet_stay_near_the_bound() -> None:
    """Nodes of 8: one copy of 24 chunks reaches each node, chunk by chunk on its 8 slots, which exchange them."""
    pairs: Pairs = []
    feeds: list[list[int]] = []
    for node in range(1, 9):
        first = len(pairs)
        pairs += [(chunk % 8, 8 * node + chunk % 8) for chunk in range(24)]
        feeds += [[]] * 24
        exchanged = [(c, s) for c in range(24) for s in range(8) if s != c % 8]
        pairs += [(8 * node + c % 8, 8 * node + s) for c, s in exchanged]
        feeds += [[first + c] for c, _ in exchanged]
    turns = pipelined(pairs, feeds)
    assert_matchings(pairs, turns)
    assert all(turns[feed] < turns[i] for i, before in enumerate(feeds) for feed in before)
    least = degree(pairs) + 7  # a sender's last chunk comes in its last round, and is then handed on seven times
    print(f"{len(pairs)} transfers with relays: {len(set(turns))} rounds, at least {least}")
    assert len(set(turns)) <= 1.1 * least
