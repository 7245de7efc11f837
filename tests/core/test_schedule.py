"""Rounds are matchings, as few as the busiest port needs; with relays, few."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.schedule import least_rounds, rounds

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
    assert len(set(turns)) == degree(pairs) == least_rounds(pairs)


@settings(deadline=None)
@given(multigraphs(5, 30))
def test_rounds_are_a_function_of_the_pairs(pairs: Pairs) -> None:
    assert rounds(pairs) == rounds(list(pairs)) == rounds(pairs, [0] * len(pairs))


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


hopped = multigraphs(5, 40).flatmap(
    lambda pairs: st.tuples(st.just(pairs), st.lists(st.integers(0, 3), min_size=len(pairs), max_size=len(pairs)))
)


@settings(deadline=None)
@given(hopped)
def test_relays_come_after_their_feeds(case: tuple[Pairs, list[int]]) -> None:
    pairs, hops = case
    turns = rounds(pairs, hops)
    assert_matchings(pairs, turns)
    arrivals = list(zip(pairs, hops, turns, strict=True))
    for (source, _), hop, turn in arrivals:
        assert all(t < turn for (_, to), h, t in arrivals if to == source and h < hop)
    least = least_rounds(pairs, hops)
    by_hop = [degree([p for p, h in zip(pairs, hops, strict=True) if h == hop]) for hop in range(4)]
    assert degree(pairs) <= least <= len(set(turns)) <= sum(by_hop)


def test_a_chain_of_relays_overlaps_with_others() -> None:
    """Three chains 0>1>2>3 through disjoint slots, and one slot that feeds another: the bound is reached."""
    pairs = [(4 * k + i, 4 * k + i + 1) for k in range(3) for i in range(3)] + [(12, 13)] * 3
    hops = [0, 1, 2] * 3 + [0] * 3
    turns = rounds(pairs, hops)
    assert turns == [0, 1, 2] * 3 + turns[9:]
    assert len(set(turns)) == least_rounds(pairs, hops) == 3


def test_relays_on_a_large_fleet_stay_near_the_bound() -> None:
    """Nodes of 8: one copy of 24 chunks reaches each node's first slot, which hands every chunk on to its 7 neighbours."""
    pairs, hops = [], []
    for node in range(1, 9):
        pairs += [(chunk % 8, 8 * node + chunk % 8) for chunk in range(24)]
        hops += [0] * 24
        pairs += [(8 * node + c % 8, 8 * node + s) for c in range(24) for s in range(8) if s != c % 8]
        hops += [1] * (24 * 7)
    turns = rounds(pairs, hops)
    assert_matchings(pairs, turns)
    taken, least = len(set(turns)), least_rounds(pairs, hops)
    print(f"{len(pairs)} transfers with relays: {taken} rounds, at least {least}")
    assert taken <= 1.25 * least
