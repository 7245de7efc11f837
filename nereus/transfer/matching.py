"""Matching on large fleets: rows (slots) take columns (ranks) without a matrix of all pairings.

Gains are regular: replicas hold the same, so most of what a pairing gains depends on two classes, and the rest (optimizer
shares) is a short list of pairings. A transport problem between the classes gives prices; what an entry adds above them
is matched exactly; both together bound every matching from above (weak duality of the assignment problem). Columns that
must stay together are seated as groups: groups to nodes, then columns to rows in each node by an exact assignment, then
swaps of groups between nodes while they gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
from scipy.sparse import coo_array, csr_array  # pyright: ignore[reportMissingTypeStubs]
from scipy.sparse.csgraph import (  # pyright: ignore[reportMissingTypeStubs]
    min_weight_full_bipartite_matching,  # pyright: ignore[reportUnknownVariableType]
)

from nereus.transfer.gains import Gains, at_keys
from nereus.transfer.ports import Floats, Ints

TABLE_PAIRS = 20_000
"""Up to so many (node class, group class) pairs are assigned exactly; above the best row of every column counts."""
ROUNDS = 6
"""Prices are set anew at most so often while the seating stays below its bound."""
MATCHED_ENTRIES = 400_000
"""Entries times seats over all rounds, at most (but one round)."""
LOOKS, TRIALS = 30, 4
"""Swaps that the local search looks at, and that it works out exactly, for each node, but for LEAST_NODES at least."""
LEAST_NODES = 300
PARTNERS, SWAPS = 32, 4
"""Kinds of nodes with which a node whose columns compete tries to swap groups, and the swaps tried with each."""
SETTLED, NEAR = 1e-9, 1e-6
"""A gain below this share of the whole is no gain; a seating this close to its bound is not searched."""


def most_bytes(gains: Gains) -> float:
    """An upper bound of what any matching of all columns gains."""
    rows = np.arange(len(gains.row_class), dtype=np.int64)
    return _placed(_Market.of(gains, rows, 1))[1] + gains.left_out_bytes


def seats(node_of: Ints, size: int) -> int:
    """How many groups of `size` the nodes can take, each in one node; `node_of` is the node of each row."""
    return int((np.unique(node_of, return_counts=True)[1] // size).sum())


def seated(gains: Gains, node_of: Ints, size: int = 1) -> Ints:
    """The row of every column: each group of `size` consecutive columns in one node, as much gained as is found.

    `node_of` is the node of each row. ValueError where the columns are no whole groups or the nodes have too few seats.
    """
    groups, rest = divmod(len(gains.column_class), size)
    if rest or seats(node_of, size) < groups:
        raise ValueError(
            f"{len(gains.column_class)} columns in groups of {size} need {groups} whole seats; "
            f"the nodes have {seats(node_of, size)}"
        )
    market = _Market.of(gains, node_of, size)
    placed, most = _placed(market)
    if len(market.rows) == len(market.seats):  # nodes of one row: nothing to assign inside
        return market.rows[placed]
    return _Search(gains, market, placed).searched(most)


# -- groups and nodes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Market:
    """Groups that look for seats: table[node class, group class] + the entry of (group, node), in bytes.

    `rows[first[v]:first[v + 1]]` are the rows of node v. An entry is what the best row of the node adds for each column
    of the group; entries ascend by group, then node.
    """

    group_ranks: int
    rows: Ints
    first: Ints
    seats: Ints
    node_class: Ints
    group_class: Ints
    table: Floats
    entry_groups: Ints
    entry_nodes: Ints
    entry_bytes: Floats

    @staticmethod
    def of(gains: Gains, node_of: Ints, size: int) -> _Market:
        nodes, number = np.unique(node_of, return_inverse=True)
        rows = np.lexsort((np.arange(len(number)), gains.row_class, number))
        first = np.searchsorted(number[rows], np.arange(len(nodes) + 1))
        node_class, like_node = _node_classes(gains.row_class[rows], first)
        kinds, group_class = np.unique(gains.column_class.reshape(-1, size), axis=0, return_inverse=True)
        group, node, amount = _group_entries(gains, number, len(nodes), size)
        return _Market(
            group_ranks=size,
            rows=rows,
            first=first,
            seats=np.diff(first) // size,
            node_class=node_class,
            group_class=group_class.reshape(-1).astype(np.int64),
            table=_table(gains, [gains.row_class[rows[first[v] : first[v + 1]]] for v in like_node], kinds),
            entry_groups=group,
            entry_nodes=node,
            entry_bytes=amount,
        )

    def rows_of(self, node: int) -> Ints:
        return self.rows[self.first[node] : self.first[node + 1]]

    def columns_of(self, groups: Iterable[int]) -> Ints:
        starts = np.array(sorted(groups), dtype=np.int64) * self.group_ranks
        return (starts[:, None] + np.arange(self.group_ranks)).ravel()

    @cached_property
    def _keys(self) -> Ints:
        return self.entry_groups * len(self.seats) + self.entry_nodes

    def of_pairs(self, groups: Ints, nodes: Ints) -> Floats:
        """What each group gains in a node when nothing else is there: never too little."""
        by_class = self.table[self.node_class[nodes], self.group_class[groups]]
        return by_class + at_keys(self._keys, self.entry_bytes, groups * len(self.seats) + nodes)


def _node_classes(row_class: Ints, first: Ints) -> tuple[Ints, list[int]]:
    """The class of each node (nodes with equal rows), and a node of each class."""
    known: dict[bytes, int] = {}
    like: list[int] = []
    classes = np.zeros(len(first) - 1, dtype=np.int64)
    for node in range(len(classes)):
        key = row_class[first[node] : first[node + 1]].tobytes()
        if key not in known:
            known[key] = len(like)
            like.append(node)
        classes[node] = known[key]
    return classes, like


def _table(gains: Gains, node_rows: Sequence[Ints], kinds: Ints) -> Floats:
    """[node classes, group classes] what the class part gains when a node takes one group; `node_rows` are row classes."""
    table = np.zeros((len(node_rows), len(kinds)))
    exact = table.size <= TABLE_PAIRS and kinds.shape[1] > 1
    for index, classes in enumerate(node_rows):
        if len(classes) < kinds.shape[1]:
            continue  # it has no seat
        if not exact:
            table[index] = gains.class_bytes[classes].max(axis=0)[kinds].sum(axis=1)
            continue
        for kind, columns in enumerate(kinds):
            block = gains.class_bytes[np.ix_(classes, columns)]
            table[index, kind] = block[assignment(block)].sum()
    return table


def _group_entries(gains: Gains, number: Ints, nodes: int, size: int) -> tuple[Ints, Ints, Floats]:
    """(groups, nodes, bytes): the best entry of each column in each node, summed over the columns of a group."""
    key, best = _merged(gains.entry_columns * nodes + number[gains.entry_rows], gains.entry_bytes, np.maximum)
    key, amount = _merged(key // nodes // size * nodes + key % nodes, best, np.add)
    return key // nodes, key % nodes, amount


def _merged(keys: Ints, values: Floats, join: np.ufunc) -> tuple[Ints, Floats]:
    """Distinct keys, ascending, and their values joined."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])) if len(keys) else order
    return ordered[first], np.asarray(join.reduceat(values[order], first) if len(keys) else values)


# -- the bound and what follows from it ----------------------------------------------------------------------------------


def _placed(market: _Market) -> tuple[Ints, float]:
    """The node of each group, and an upper bound of what any seating gains.

    Prices come from the classes alone, then from the classes of what entries left: the best of both over some rounds.
    """
    every = np.arange(len(market.group_class))
    capacity = np.bincount(market.node_class, weights=market.seats, minlength=len(market.table)).astype(np.int64)
    _, price = _transport(market.table, capacity, np.bincount(market.group_class, minlength=market.table.shape[1]))
    best, most, gained = every, np.inf, -np.inf
    copies = int(market.seats[market.entry_nodes].sum())
    for _ in range(max(min(ROUNDS, MATCHED_ENTRIES // max(copies, 1)), 1)):
        by_entry, bound = _relaxed(market, price)
        placed, left = _completed(market, by_entry)
        value = float(market.of_pairs(every, placed).sum())
        most = min(most, bound)
        if value > gained:
            best, gained = placed, value
        if gained >= most - NEAR * max(most, 1.0):
            break
        price = (price + left) / 2
    return best, most


def _relaxed(market: _Market, price: Floats) -> tuple[Ints, float]:
    """The node of each group that an entry places (-1: its class decides), and an upper bound of any seating.

    For prices u of groups and v >= 0 of seats that cover the table, any seating gains at most their sum + the best
    matching of entries less the slack u + v - table.
    """
    table, classes = market.table, market.node_class
    capacity = np.bincount(classes, weights=market.seats, minlength=len(table))
    wanted = np.bincount(market.group_class, minlength=table.shape[1])
    rent = np.maximum((table - price).max(axis=1), 0.0)
    slack = rent[:, None] + price - table
    above = market.entry_bytes - slack[classes[market.entry_nodes], market.group_class[market.entry_groups]]
    kept = (above > 0) & (market.seats[market.entry_nodes] > 0)
    node_of_group = np.full(len(market.group_class), -1, dtype=np.int64)
    most = float(rent @ capacity + price @ wanted)
    if kept.any():
        group, node, amount = market.entry_groups[kept], market.entry_nodes[kept], above[kept]
        chosen = _heaviest(group, node, amount, market.seats)
        node_of_group[group[chosen]] = node[chosen]
        most += float(amount[chosen].sum())
    return node_of_group, most


def _transport(table: Floats, capacity: Ints, wanted: Ints) -> tuple[Ints, Floats]:
    """(counts, prices): how many of each column class go to each row class so that most is gained, and its dual.

    `capacity` bounds the rows of `counts`; its columns sum to `wanted`, of which there are not more.
    """
    rows, columns = table.shape
    if rows == 1:
        return wanted[None, :], table[0]
    if columns == 1:  # the last row class in use sets the price
        counts = np.zeros(table.shape, dtype=np.int64)
        _fill(table, counts, capacity, wanted)
        return counts, table.min(axis=0, where=counts > 0, initial=float(table.max()))
    scale = max(float(np.abs(table).max(initial=0.0)), 1.0)
    row, column = np.divmod(np.arange(table.size), columns)
    one = np.ones(table.size)
    found = linprog(  # pyright: ignore[reportUnknownVariableType]
        -table.ravel() / scale,
        A_ub=csr_array((one, (row, np.arange(table.size))), shape=(rows, table.size)),
        b_ub=capacity,
        A_eq=csr_array((one, (column, np.arange(table.size))), shape=(columns, table.size)),
        b_eq=wanted,
        method="highs-ds",
    )
    solved = found.status == 0  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    price = -scale * np.asarray(found.eqlin.marginals) if solved else table.max(axis=0)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    parts = np.asarray(found.x if solved else np.zeros(table.size), dtype=np.float64)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    counts = np.floor(parts + 1e-6).astype(np.int64).reshape(rows, columns)
    _fill(table, counts, capacity, wanted)
    return counts, np.asarray(price, dtype=np.float64)


def _fill(table: Floats, counts: Ints, capacity: Ints, wanted: Ints) -> None:
    """Places what rounding left over, each where it gains most; an integral solution leaves nothing."""
    free = capacity - counts.sum(axis=1)
    for column in np.flatnonzero(counts.sum(axis=0) < wanted):
        for row in np.argsort(-table[:, column], kind="stable"):
            more = min(int(free[row]), int(wanted[column] - counts[:, column].sum()))
            if more > 0:
                counts[row, column] += more
                free[row] -= more


def _heaviest(group: Ints, node: Ints, amount: Floats, capacity: Ints) -> Ints:
    """The entries of a heaviest matching: each group once, each node up to its seats. `amount` > 0."""
    copies = capacity[node]
    entry = np.repeat(np.arange(len(group)), copies)
    copy = np.arange(len(entry)) - np.repeat(np.cumsum(copies) - copies, copies)
    seat_start = np.cumsum(capacity) - capacity
    seat_numbers, seat = np.unique(seat_start[node[entry]] + copy, return_inverse=True)
    members, row = np.unique(group[entry], return_inverse=True)
    alone = np.arange(len(members))  # a column of its own for each group that takes no entry
    top = 2.0 * float(amount.max())
    weights = coo_array(
        (
            np.concatenate([top - amount[entry], np.full(len(members), top)]),
            (np.concatenate([row, alone]), np.concatenate([seat, len(seat_numbers) + alone])),
        ),
        shape=(len(members), len(seat_numbers) + len(members)),
    )
    _, column = min_weight_full_bipartite_matching(csr_array(weights))  # pyright: ignore[reportUnknownVariableType]
    column = np.asarray(column, dtype=np.int64)  # pyright: ignore[reportUnknownArgumentType]
    return np.unique(entry[column[row] == seat])


def _completed(market: _Market, by_entry: Ints) -> tuple[Ints, Floats]:
    """The node of each group: those that no entry places fill the seats that are left, by classes; and their prices."""
    node_of_group = by_entry.copy()
    used = np.bincount(node_of_group[node_of_group >= 0], minlength=len(market.seats))
    free = market.seats - used
    waiting = np.flatnonzero(node_of_group < 0)
    capacity = np.bincount(market.node_class, weights=free, minlength=len(market.table)).astype(np.int64)
    wanted = np.bincount(market.group_class[waiting], minlength=market.table.shape[1])
    counts, price = _transport(market.table, capacity, wanted)
    node = np.repeat(np.arange(len(free)), free)
    turn = np.arange(len(node)) - np.repeat(np.cumsum(free) - free, free)
    node = node[np.lexsort((node, turn))]  # one seat of every node, then the next: equal groups spread over nodes
    for kind in range(len(market.table)):
        ready = node[market.node_class[node] == kind]
        start = 0
        for group_kind in np.flatnonzero(counts[kind]):
            amount = int(counts[kind, group_kind])
            mine = waiting[market.group_class[waiting] == group_kind]
            mine = mine[node_of_group[mine] < 0][:amount]
            node_of_group[mine] = ready[start : start + amount]
            start += amount
    return node_of_group, price


# -- inside nodes, and between them --------------------------------------------------------------------------------------


def assignment(gain: Floats) -> tuple[Ints, Ints]:
    """(rows, columns) of an assignment of all columns to rows that gains most."""
    rows, columns = linear_sum_assignment(gain, maximize=True)  # pyright: ignore[reportUnknownVariableType]
    return np.asarray(rows, dtype=np.int64), np.asarray(columns, dtype=np.int64)  # pyright: ignore[reportUnknownArgumentType]


_Kind = tuple[int, tuple[int, ...]]


class _Search:
    """Groups in nodes while the local search swaps them; `found` is what each node gains."""

    def __init__(self, gains: Gains, market: _Market, node_of_group: Ints) -> None:
        self.gains, self.market, self.node_of_group = gains, market, node_of_group
        self.groups: list[list[int]] = [list[int]() for _ in range(len(market.seats))]
        for group, node in enumerate(node_of_group.tolist()):
            self.groups[int(node)].append(group)
        self.row_of = np.zeros(len(gains.column_class), dtype=np.int64)
        self.found = np.zeros(len(market.seats))
        self.looks = self.trials = 0
        self.known: dict[_Kind, float] = {}
        for node, groups in enumerate(self.groups):
            if groups:
                self.found[node] = self._inside(node, groups, keep=True)

    @cached_property
    def entries(self) -> dict[tuple[int, int], float]:
        """Bytes by (group, node)."""
        market = self.market
        keys = zip(market.entry_groups.tolist(), market.entry_nodes.tolist(), strict=True)
        return dict(zip(keys, market.entry_bytes.tolist(), strict=True))

    def _inside(self, node: int, groups: Sequence[int], *, keep: bool = False) -> float:
        """What a node gains from these groups by an exact assignment; `keep` takes it over."""
        rows, columns = self.market.rows_of(node), self.market.columns_of(groups)
        if not len(columns):
            return 0.0
        block = self.gains.of(np.repeat(rows, len(columns)), np.tile(columns, len(rows)))
        block = block.reshape(len(rows), len(columns))
        at = assignment(block)
        if keep:
            self.row_of[columns[at[1]]] = rows[at[0]]
        return float(block[at].sum())

    def searched(self, most: float) -> Ints:
        """The row of each column after swaps; none is tried where the bound `most` is reached."""
        self.least = SETTLED * max(most, 1.0)
        if float(self.found.sum()) < most - NEAR * max(most, 1.0):
            self._by_value()
            while self._by_shortfall() and not self._spent():
                pass
        return self.row_of

    def _spent(self) -> bool:
        nodes = max(len(self.market.seats), LEAST_NODES)
        return self.looks >= LOOKS * nodes or self.trials >= TRIALS * nodes

    def _by_value(self) -> None:
        """Moves groups to nodes where an entry promises more, for a group there or a free seat."""
        market = self.market
        now = market.of_pairs(np.arange(len(self.node_of_group)), self.node_of_group)
        gain = market.of_pairs(market.entry_groups, market.entry_nodes) - now[market.entry_groups]
        order = np.argsort(-gain, kind="stable")
        for index in order[gain[order] > self.least].tolist():
            if self._spent():
                return
            group, node = int(market.entry_groups[index]), int(market.entry_nodes[index])
            own = int(self.node_of_group[group])
            if own != node and market.seats[node]:
                promises = {p: self._promise(group, p, own, node) for p in self._partners(node)}
                best = max(promises, key=lambda p: promises[p])
                promised = self._most(own, self.groups[own]) + self._most(node, self.groups[node])
                if promises[best] > promised + self.least:
                    self._try(group, best, own, node)

    def _by_shortfall(self) -> bool:
        """Swaps groups of nodes whose columns compete for rows, with some nodes of every kind, such nodes first.

        True where something was gained.
        """
        every = np.arange(len(self.node_of_group))
        promised = np.zeros(len(self.market.seats))
        np.add.at(promised, self.node_of_group, self.market.of_pairs(every, self.node_of_group))
        short = promised - self.found
        order = np.argsort(-short, kind="stable")
        order = order[self.market.seats[order] > 0]
        kinds: dict[_Kind, list[int]] = {}
        for node in order.tolist():
            kinds.setdefault(self._kind(int(node), self.groups[int(node)]), []).append(int(node))
        gained = False
        for node in order[short[order] > self.least].tolist():
            if self._spent():
                break
            if any(self._relieved(node, other) for other in self._others(node, kinds)):
                gained = True
        return gained

    def _others(self, node: int, kinds: Mapping[_Kind, list[int]]) -> list[int]:
        """Some nodes of every kind, from the node's own kind on; those that have changed since are passed over."""
        names = list(kinds)
        start = names.index(own) if (own := self._kind(node, self.groups[node])) in kinds else 0
        each = max(PARTNERS // len(names), 1)
        found: list[list[int]] = []
        for name in (names[start:] + names[:start])[:PARTNERS]:
            alike = kinds[name]
            while alike and self._kind(alike[0], self.groups[alike[0]]) != name:
                alike.pop(0)
            same = [n for n in alike[: 2 * each] if n != node and self._kind(n, self.groups[n]) == name]
            found.append(same[:each])
        return [n for turn in zip_longest(*found) for n in turn if n is not None]  # one of every kind, then the next

    def _relieved(self, node: int, other: int) -> bool:
        """Makes a swap of groups between two nodes that gains, the most promising first."""
        swaps = [(group, partner) for group in self.groups[node] for partner in self._partners(other)]
        promises = np.array([self._promise(group, partner, node, other) for group, partner in swaps])
        best = np.argsort(-promises, kind="stable")[:SWAPS]
        least = float(self.found[node] + self.found[other]) + self.least
        return any(promises[i] > least and self._try(*swaps[int(i)], node, other) for i in best)

    def _partners(self, node: int) -> list[int]:
        """The groups of a node, and -1 where it has a free seat."""
        return self.groups[node] + [-1] * (len(self.groups[node]) < int(self.market.seats[node]))

    def _swapped(self, group: int, partner: int, own: int, node: int) -> tuple[list[int], list[int]]:
        """The groups of both nodes after a swap."""
        mine = [g for g in self.groups[own] if g != group] + [partner] * (partner >= 0)
        return mine, [g for g in self.groups[node] if g != partner] + [group]

    def _promise(self, group: int, partner: int, own: int, node: int) -> float:
        """The most that both nodes can gain after a swap: columns compete by their classes, entries come on top."""
        self.looks += 1
        mine, theirs = self._swapped(group, partner, own, node)
        return self._most(own, mine) + self._most(node, theirs)

    def _most(self, node: int, groups: Sequence[int]) -> float:
        return self._by_class(node, groups) + sum(self.entries.get((group, node), 0.0) for group in groups)

    def _kind(self, node: int, groups: Sequence[int]) -> _Kind:
        """What nodes with their groups have in common as far as classes go."""
        classes = self.market.group_class
        return int(self.market.node_class[node]), tuple(sorted(int(classes[g]) for g in groups))

    def _by_class(self, node: int, groups: Sequence[int]) -> float:
        """What the class part gains in a node, worked out once for nodes and groups that are alike."""
        key = self._kind(node, groups)
        if key not in self.known:
            rows, columns = self.market.rows_of(node), self.market.columns_of(groups)
            gains = self.gains
            block = gains.class_bytes[np.ix_(gains.row_class[rows], gains.column_class[columns])]
            self.known[key] = float(block[assignment(block)].sum()) if len(columns) else 0.0
        return self.known[key]

    def _try(self, group: int, partner: int, own: int, node: int) -> bool:
        """Swaps a group with one of another node (-1: with a free seat there) if both nodes together gain."""
        if self._spent():
            return False
        self.trials += 1
        mine, theirs = self._swapped(group, partner, own, node)
        after = self._inside(own, mine), self._inside(node, theirs)
        if sum(after) <= self.found[own] + self.found[node] + self.least:
            return False
        for place, groups, found in ((own, mine, after[0]), (node, theirs, after[1])):
            self.groups[place] = groups
            self.found[place] = found
            self.node_of_group[groups] = place
            self._inside(place, groups, keep=True)
        return True
