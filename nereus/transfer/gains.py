"""What a slot gains by taking a rank, for fleets too large for a matrix of all pairings.

Streams between many slots and many ranks become classes: slots that hold the same of them are alike, and ranks that want
the same. Streams between few (an optimizer share) become single entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nereus.fleet import Fleet
from nereus.transfer.ports import Floats, Ints
from nereus.transfer.streams import Streams

FEW_PAIRS, MOST_PAIRS = 256, 4096
"""A stream of at most FEW_PAIRS (slot, rank) pairs becomes entries, one of more than MOST_PAIRS never."""
MOST_ENTRIES = 400_000
"""Entries of the largest streams are kept up to so many."""
MOST_CLASSES = 256
"""Classes are made by the sets that carry most, up to so many."""
SMALL_SHARE, CLASS_SHARE = 1e-4, 1e-3
"""Of the mean bytes per rank: smaller streams (norms) make no entries, and streams that can gain less make no classes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sets:
    """Sets of numbers, one after the other: set i is members[first[i]:first[i + 1]], ascending."""

    members: Ints
    first: Ints

    @staticmethod
    def of(sets: Sequence[Ints]) -> Sets:
        """The sets of a table or of streams."""
        counts = np.array([len(s) for s in sets], dtype=np.int64)
        members = np.concatenate([np.zeros(0, dtype=np.int64), *sets])
        return Sets(members=members, first=np.append(0, np.cumsum(counts)).astype(np.int64))

    @cached_property
    def counts(self) -> Ints:
        """Members of each set."""
        return np.diff(self.first)

    def at(self, index: int) -> Ints:
        """The members of one set."""
        return self.members[self.first[index] : self.first[index + 1]]

    def mapped(self, number_of: Ints) -> Sets:
        """The sets with `number_of[member]` for each member; members without a number (-1) vanish."""
        owner = np.repeat(np.arange(len(self.counts)), self.counts)
        number = np.where(self.members < len(number_of), number_of[np.minimum(self.members, len(number_of) - 1)], -1)
        width = int(number.max(initial=0)) + 1
        keys = np.unique((owner * width + number)[number >= 0])
        counts = np.bincount(keys // width, minlength=len(self.counts))
        return Sets(members=keys % width, first=np.append(0, np.cumsum(counts)).astype(np.int64))

    def expanded(self, groups: Sets) -> Sets:
        """The sets of all members of the groups that each set names; groups do not overlap."""
        counts = groups.counts[self.members]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        members = groups.members[np.repeat(groups.first[self.members], counts) + within]
        owner = np.repeat(np.repeat(np.arange(len(self.counts)), self.counts), counts)
        order = np.lexsort((members, owner))
        sizes = np.bincount(owner, minlength=len(self.counts))
        return Sets(members=members[order], first=np.append(0, np.cumsum(sizes)).astype(np.int64))


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairings:
    """Stream s gains factor x size_bytes[s] for each slot of slot_sets[slot_set[s]] that takes a rank of
    rank_sets[rank_set[s]].
    """

    slot_sets: Sets
    slot_set: Ints
    rank_sets: Sets
    rank_set: Ints
    size_bytes: Ints
    factor: float = 1.0

    def placed(self, *, slots: Ints | None = None, ranks: Ints | None = None) -> Pairings:
        """Slots and ranks renumbered (-1: left out; None: as they are); streams without either vanish."""
        slot_sets = self.slot_sets if slots is None else self.slot_sets.mapped(slots)
        rank_sets = self.rank_sets if ranks is None else self.rank_sets.mapped(ranks)
        kept = (slot_sets.counts[self.slot_set] > 0) & (rank_sets.counts[self.rank_set] > 0)
        return Pairings(
            slot_sets=slot_sets,
            slot_set=self.slot_set[kept],
            rank_sets=rank_sets,
            rank_set=self.rank_set[kept],
            size_bytes=self.size_bytes[kept],
            factor=self.factor,
        )

    def near(self, fleet: Fleet) -> Pairings:
        """Every slot of a node counts as a holder of what one of them holds."""
        nodes = Sets.of([np.array(sorted(node.slots), dtype=np.int64) for node in fleet.nodes])
        return replace(self, slot_sets=self.slot_sets.mapped(fleet.node_of).expanded(nodes))

    def weighed(self, factor: float) -> Pairings:
        """The same with `factor` times the gain."""
        return replace(self, factor=self.factor * factor)

    def turned(self) -> Pairings:
        """Slots and ranks in each other's place."""
        return replace(
            self,
            slot_sets=self.rank_sets,
            slot_set=self.rank_set,
            rank_sets=self.slot_sets,
            rank_set=self.slot_set,
        )

    @cached_property
    def pairs(self) -> Ints:
        """(slot, rank) pairs of each stream."""
        return self.slot_sets.counts[self.slot_set] * self.rank_sets.counts[self.rank_set]

    @cached_property
    def most(self) -> Floats:
        """The most that each stream can add to a matching, in bytes."""
        once = np.minimum(self.slot_sets.counts[self.slot_set], self.rank_sets.counts[self.rank_set])
        return self.factor * (self.size_bytes * once).astype(np.float64)

    def mean_bytes(self, ranks: int) -> float:
        """What a rank wants in the mean."""
        return float(self.size_bytes @ self.rank_sets.counts[self.rank_set]) / max(ranks, 1)


def of_streams(found: Streams) -> Pairings:
    """The pairings of streams: their holders are the slots, their wanters the ranks."""
    return Pairings(
        slot_sets=Sets.of(found.holder_sets),
        slot_set=found.holders,
        rank_sets=Sets.of(found.target.sets),
        rank_set=found.wanters,
        size_bytes=found.size_bytes,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Gains:
    """What each pairing of a row with a column gains: class_bytes[row_class[r], column_class[c]] + the entry at (r, c).

    Entries ascend by column, then row, each pairing once. `left_out_bytes` is the most that any matching could gain
    beyond this.
    """

    row_class: Ints
    column_class: Ints
    class_bytes: Floats
    entry_rows: Ints
    entry_columns: Ints
    entry_bytes: Floats
    left_out_bytes: float

    @cached_property
    def _keys(self) -> Ints:
        return self.entry_columns * len(self.row_class) + self.entry_rows

    def of(self, rows: Ints, columns: Ints) -> Floats:
        """The gain of each pairing, in bytes; `rows` and `columns` are equally long."""
        by_class = self.class_bytes[self.row_class[rows], self.column_class[columns]]
        return by_class + at_keys(self._keys, self.entry_bytes, columns * len(self.row_class) + rows)

    def total_bytes(self, rows: Ints) -> float:
        """What a matching gains, given by the row of each column."""
        return float(self.of(rows, np.arange(len(rows), dtype=np.int64)).sum())


def at_keys(keys: Ints, values: Floats, wanted: Ints) -> Floats:
    """The values at wanted keys, 0 where there is none; `keys` ascend."""
    if not len(keys):
        return np.zeros(len(wanted))
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0.0)


def gains(parts: Sequence[Pairings], rows: int, columns: int, *, few_pairs: int = FEW_PAIRS) -> Gains:
    """What each pairing of `rows` with `columns` gains over all parts, which are numbered by them.

    Streams of more than `few_pairs` pairs make classes while these stay few; the others become entries. What is too small
    or too much for entries is left out, and counted as such.
    """
    mean = [part.mean_bytes(columns) for part in parts]
    many = [
        np.flatnonzero((p.pairs > few_pairs) & (p.most >= CLASS_SHARE * p.factor * m))
        for p, m in zip(parts, mean, strict=True)
    ]
    wide = list(zip(parts, many, strict=True))
    row_class, row_used = _classes([(p.slot_sets, p.slot_set[m], p.most[m]) for p, m in wide], rows)
    column_class, column_used = _classes([(p.rank_sets, p.rank_set[m], p.most[m]) for p, m in wide], columns)
    table = np.zeros((int(row_class.max(initial=0)) + 1, int(column_class.max(initial=0)) + 1))
    left_out = 0.0
    found: list[tuple[Ints, Ints, Floats]] = []
    for part, each, members, in_rows, in_columns in zip(parts, mean, many, row_used, column_used, strict=True):
        used = np.zeros(len(part.pairs), dtype=bool)
        used[members[in_rows & in_columns]] = True
        table += _class_part(part, np.flatnonzero(used), row_class, column_class)
        rest = np.flatnonzero(~used & (part.pairs <= MOST_PAIRS) & (part.size_bytes >= SMALL_SHARE * each))
        rest = rest[np.argsort(-part.size_bytes[rest], kind="stable")]
        rest = rest[np.cumsum(part.pairs[rest]) <= MOST_ENTRIES]
        found.append(_entries(part, rest))
        used[rest] = True
        left_out += float(part.most[~used].sum())
    key = np.concatenate([np.zeros(0, dtype=np.int64), *(c * rows + r for r, c, _ in found)])
    key, inverse = np.unique(key, return_inverse=True)
    amount = np.bincount(inverse, weights=np.concatenate([np.zeros(0), *(b for *_, b in found)]), minlength=len(key))
    return Gains(
        row_class=row_class,
        column_class=column_class,
        class_bytes=table,
        entry_rows=key % rows,
        entry_columns=key // rows,
        entry_bytes=amount.astype(np.float64),
        left_out_bytes=left_out,
    )


def _entries(part: Pairings, kept: Ints) -> tuple[Ints, Ints, Floats]:
    """(rows, columns, bytes) of every pair of the kept streams; a pair may come more than once."""
    pairs = part.pairs[kept]
    stream = np.repeat(kept, pairs)
    within = np.arange(len(stream)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    slot_set, rank_set = part.slot_set[stream], part.rank_set[stream]
    row, column = np.divmod(within, part.rank_sets.counts[rank_set])
    return (
        part.slot_sets.members[part.slot_sets.first[slot_set] + row],
        part.rank_sets.members[part.rank_sets.first[rank_set] + column],
        part.factor * part.size_bytes[stream].astype(np.float64),
    )


def _classes(parts: Sequence[tuple[Sets, Ints, Floats]], count: int) -> tuple[Ints, list[np.ndarray]]:
    """The class of each of `count` numbers, and which streams' sets are unions of classes.

    Each part has its sets, the set of each stream and what the stream carries. Sets that carry most come first; one that
    would make more than MOST_CLASSES classes is left out.
    """
    carried: dict[bytes, float] = {}
    keys: list[list[bytes]] = []
    for sets, index, most in parts:
        known = {i: sets.at(i).tobytes() for i in np.unique(index).tolist()}
        keys.append([known[i] for i in index.tolist()])
        for key, amount in zip(keys[-1], most.tolist(), strict=True):
            carried[key] = carried.get(key, 0.0) + amount
    classes, made, used = np.zeros(count, dtype=np.int64), 1, set[bytes]()
    for key in sorted(carried, key=lambda k: (-carried[k], k)):
        mark = np.zeros(count, dtype=np.int64)
        mark[np.frombuffer(key, dtype=np.int64)] = 1
        present = np.bincount(classes * 2 + mark, minlength=2 * made) > 0
        if int(present.sum()) <= MOST_CLASSES:
            classes = (np.cumsum(present) - 1)[classes * 2 + mark]
            made = int(present.sum())
            used.add(key)
    return classes, [np.array([key in used for key in part], dtype=bool) for part in keys]


def _class_part(part: Pairings, used: Ints, row_class: Ints, column_class: Ints) -> Floats:
    """[row classes, column classes] bytes of the used streams, whose sets are unions of classes."""
    in_rows = _inside(part.slot_sets, part.slot_set[used], row_class)
    in_columns = _inside(part.rank_sets, part.rank_set[used], column_class)
    return in_rows.T @ (in_columns * (part.factor * part.size_bytes[used])[:, None])


def _inside(sets: Sets, index: Ints, class_of: Ints) -> Floats:
    """[streams, classes] 1 where the stream's set holds the class."""
    distinct, number = np.unique(index, return_inverse=True)
    inside = np.zeros((len(distinct), int(class_of.max(initial=0)) + 1))
    for place, one in enumerate(distinct.tolist()):
        inside[place, class_of[sets.at(one)]] = 1.0
    return inside[number]
