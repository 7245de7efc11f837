"""A fleet over time: which nodes are there, from a trace of how many; which one leaves is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nereus.control.records import PreemptionNotice
from nereus.fleet import Device, Fleet, Node
from nereus.sim.traces import FleetTrace
from nereus.sim.truth import Truth


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """From `at_seconds` on: the fleet as it is, and the slots that have just gone and come."""

    at_seconds: float
    fleet: Fleet
    lost_slots: tuple[int, ...] = ()
    gained_slots: tuple[int, ...] = ()


def play(trace: FleetTrace, device: Device, truth: Truth) -> tuple[Moment, ...]:
    """The moments of a trace. Slots are numbered node by node and keep their numbers; the lowest absent node comes back."""
    size, nodes = trace.slots_per_node, trace.nodes
    present = list(range(nodes.counts[0]))
    moments = [Moment(at_seconds=0.0, fleet=_fleet(present, size, device))]
    for index, (at, count) in enumerate(zip(nodes.at_seconds[1:], nodes.counts[1:], strict=True), 1):
        before = set(present)
        while len(present) > count:
            draw = truth.generator("leaves", index, len(present))
            present.pop(int(draw.integers(len(present))))
        absent = (node for node in range(max(nodes.counts)) if node not in before)
        present = sorted([*present, *(next(absent) for _ in range(count - len(present)))])
        moments.append(
            Moment(
                at_seconds=at,
                fleet=_fleet(present, size, device),
                lost_slots=_slots(sorted(before - set(present)), size),
                gained_slots=_slots(sorted(set(present) - before), size),
            )
        )
    return tuple(moments)


def notices(moments: Sequence[Moment], seconds: float) -> tuple[PreemptionNotice, ...]:
    """What is told `seconds` before each loss, in order; of a slot that comes later than that, when it comes."""
    since: dict[int, float] = {}
    found: dict[tuple[float, float], list[int]] = {}
    for moment in moments[1:]:
        for slot in moment.lost_slots:
            told = max(moment.at_seconds - seconds, since.get(slot, 0.0))
            found.setdefault((told, moment.at_seconds), []).append(slot)
        since |= dict.fromkeys(moment.gained_slots, moment.at_seconds)
    return tuple(
        PreemptionNotice(at_seconds=told, slots=tuple(slots), deadline_seconds=at)
        for (told, at), slots in sorted(found.items())
    )


def steady(fleet: Fleet) -> tuple[Moment, ...]:
    """A fleet that does not change."""
    return (Moment(at_seconds=0.0, fleet=fleet),)


def _slots(nodes: list[int], size: int) -> tuple[int, ...]:
    return tuple(slot for node in nodes for slot in range(node * size, (node + 1) * size))


def _fleet(present: list[int], size: int, device: Device) -> Fleet:
    return Fleet(nodes=tuple(Node(slots=_slots([node], size), device=device) for node in present))


def inventory_of(moments: tuple[Moment, ...]) -> Fleet:
    """Every node that is there at some moment; slots keep their numbers."""
    nodes = {node.slots: node for moment in moments for node in moment.fleet.nodes}
    return Fleet(nodes=tuple(nodes[slots] for slots in sorted(nodes)))
