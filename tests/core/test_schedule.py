"""Rounds are matchings, and not many more than the busiest port needs."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.schedule import rounds


def degree(pairs: list[tuple[int, int]]) -> int:
    """The most transfers that one port takes part in: the least number of rounds (König)."""
    sends, receives = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    return max((*sends.values(), *receives.values()), default=0)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=60))
def test_rounds_are_matchings(pairs: list[tuple[int, int]]) -> None:
    turns = rounds(pairs)
    by_turn: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for turn, pair in zip(turns, pairs, strict=True):
        by_turn[turn].append(pair)
    for together in by_turn.values():
        assert len({a for a, _ in together}) == len({b for _, b in together}) == len(together)
    assert sorted(by_turn) == list(range(len(by_turn)))  # no empty round
    assert degree(pairs) <= len(by_turn) <= max(2 * degree(pairs) - 1, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_rounds_are_a_function_of_the_pairs(pairs: list[tuple[int, int]]) -> None:
    assert rounds(pairs) == rounds(list(pairs))


@pytest.mark.parametrize(
    "pairs",
    [
        [(i, (i + 1) % 8) for i in range(8)],
        [(0, i) for i in range(1, 8)],
        [(i, 7) for i in range(7)],
        [(a, b) for a in range(4) for b in range(4) if a != b],
    ],
    ids=["ring-8", "scatter-7", "gather-7", "all-to-all-4"],
)
def test_patterns_take_few_rounds(pairs: list[tuple[int, int]]) -> None:
    """The patterns of Megatron's own scheduler tests. Full duplex: a ring takes one round."""
    taken = 1 + max(rounds(pairs))
    assert degree(pairs) <= taken <= 2 * degree(pairs) - 1
    if len({a for a, _ in pairs}) == 1 or len({b for _, b in pairs}) == 1 or degree(pairs) == 1:
        assert taken == degree(pairs)
