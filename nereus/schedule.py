"""Rounds: which transfers may run together when a slot has one send and one receive port (full duplex)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def rounds(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """A round for each (source, destination) such that no port is used twice in a round.

    First fit over pairs in falling load of their busier port. A bipartite multigraph has an edge colouring with as
    many colours as its largest degree (König 1916); first fit may take up to twice as many less one.
    """
    degree: Counter[tuple[str, int]] = Counter()
    for source, destination in pairs:
        degree[("send", source)] += 1
        degree[("receive", destination)] += 1
    order = sorted(
        range(len(pairs)),
        key=lambda i: (-max(degree[("send", pairs[i][0])], degree[("receive", pairs[i][1])]), pairs[i], i),
    )
    used: dict[tuple[str, int], set[int]] = {port: set() for port in degree}
    chosen = [0] * len(pairs)
    for index in order:
        send, receive = used[("send", pairs[index][0])], used[("receive", pairs[index][1])]
        turn = 0
        while turn in send or turn in receive:
            turn += 1
        send.add(turn)
        receive.add(turn)
        chosen[index] = turn
    return chosen
