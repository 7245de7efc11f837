"""The linear programme that no direct plan can beat, written from the definition: the oracle of the transfer planner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from nereus.fleet import Fleet
from nereus.transfer.streams import Streams

Classes = Mapping[tuple[tuple[int, ...], tuple[int, ...]], float]
"""Bytes by (slots that hold them, slots that need them)."""


def classes(found: Streams) -> Classes:
    """The streams' bytes by slots; rank r takes slot r of the target's table."""
    total: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = defaultdict(float)
    for index in range(len(found)):
        key = tuple(found.holders_of(index).tolist()), tuple(found.wanters_of(index).tolist())
        total[key] += int(found.size_bytes[index])
    return total


def direct_seconds(classes: Classes, fleet: Fleet) -> float:
    """Least seconds of the busiest port when every slot gets what it misses straight from holders, near ones first.

    Ports are each slot's send and receive side (rate: its link) and each network port's two sides, which only traffic
    between nodes uses. The division of each demand over its holders is free, fractions too; where some are in the
    slot's own node only those count (a rule of the planner: what a node has does not enter it again).
    """
    link, nic, node, rail = fleet.link_rates, fleet.nic_rates, fleet.node_of, fleet.nic_of
    ports: dict[tuple[str, int], dict[int, float]] = defaultdict(
        lambda: defaultdict(float)
    )  # port -> variable -> weight
    demands: list[tuple[list[int], float]] = []
    count = 1  # variable 0 is the seconds
    for (holders, wanters), size in classes.items():
        for slot in set(wanters) - set(holders):
            made = []
            near = [holder for holder in holders if node[holder] == node[slot]]
            for holder in near or holders:
                ports["send", holder][count] += 1 / float(link[holder])
                ports["receive", slot][count] += 1 / float(link[slot])
                if node[holder] != node[slot]:
                    ports["out", int(rail[holder])][count] += 1 / float(nic[rail[holder]])
                    ports["in", int(rail[slot])][count] += 1 / float(nic[rail[slot]])
                made.append(count)
                count += 1
            demands.append((made, size))
    if not demands:
        return 0.0
    scale = max(size for _, size in demands)
    unit = scale / min(link[link > 0].max(), nic.max())  # seconds, so that the programme's numbers are near 1
    rows, columns, weights = [], [], []
    for number, users in enumerate(ports.values()):
        rows += [number] * (len(users) + 1)
        columns += [*users, 0]
        weights += [*(w * scale / unit for w in users.values()), -1.0]
    limits = coo_matrix((weights, (rows, columns)), shape=(len(ports), count))
    owner = [number for number, (made, _) in enumerate(demands) for _ in made]
    which = [variable for made, _ in demands for variable in made]
    equal = coo_matrix((np.ones(len(owner)), (owner, which)), shape=(len(demands), count))
    found = linprog(
        np.eye(1, count)[0],
        A_ub=limits.tocsr(),
        b_ub=np.zeros(len(ports)),
        A_eq=equal.tocsr(),
        b_eq=[size / scale for _, size in demands],
        method="highs",
    )
    assert found.status == 0, found.message
    return float(found.fun) * unit
