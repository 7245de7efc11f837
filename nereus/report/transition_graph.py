"""The transition graph of a change of layout on a fleet: in which order, within which memory, in how many seconds.

What a data sheet does not say is assumed, and said: gradients take 4 bytes for each parameter on a slot, a host has as
much memory as its slots together, engines take ENGINE_SECONDS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nereus.layout import Stage, StagePlan
from nereus.report.transition import MovementReport, held_by_slot, moved_by_kind, row_bytes, sum_at
from nereus.storage import emu_name
from nereus.transfer.boxtable import TRACK, BoxTable
from nereus.transfer.demands import DESTINATION, HOP, SOURCE
from nereus.transfer.ports import Ints
from nereus.transitions.assemble import assemble
from nereus.transitions.change import Change, EmuChange, Flow, Mode, Residency
from nereus.transitions.durations import Durations
from nereus.transitions.graph import PLACES, Place, TransitionGraph
from nereus.transitions.order import host_lane
from nereus.transitions.price import Price, price
from nereus.transitions.proof import Proof, check
from nereus.transitions.timeline import Timeline, timeline

ENGINE_SECONDS: Mapping[Stage, float] = {"train": 5.0, "infer": 5.0, "generate": 45.0}
"""To build an engine on a slot: a cold vLLM engine of an 8B model takes 39 to 59 s; Megatron's shell is an estimate."""
GRADIENT_BYTES = 4
"""Of each parameter on a slot: Megatron keeps gradients in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSeconds:
    """Operations of one kind in one place: how many, the bytes they move or claim, and the time in which one runs."""

    kind: str
    place: Place
    operations_count: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledChange:
    """A change's graph, proven, with its timeline and price. `engine_seconds` and `reserve_bytes` as asked for."""

    mode: Mode
    engine_seconds: float
    reserve_bytes: int
    graph: TransitionGraph
    durations: Durations
    proof: Proof
    schedule: Timeline
    price: Price
    by_kind: tuple[KindSeconds, ...]


def scheduled(
    report: MovementReport, *, mode: Mode, reserve_bytes: int, engine_seconds: float | None = None
) -> ScheduledChange:
    """Orders, proves and prices a report's change; Infeasible when it does not fit in the mode.

    beside: the old state stays until the commit; snapshot: it goes by way of the hosts. `reserve_bytes` of each slot are
    what the phases of a step need: only what fits beside that happens before the pause.
    """
    stage = report.stages[0].after.stage
    seconds = ENGINE_SECONDS[stage] if engine_seconds is None else engine_seconds
    change = change_of(report, mode=mode, reserve_bytes=reserve_bytes, engine_seconds=seconds)
    durations = Durations(fleet=report.fleet)
    graph = assemble(change, durations)
    proof = check(graph)
    schedule = timeline(graph, durations)
    return ScheduledChange(
        mode=mode,
        engine_seconds=seconds,
        reserve_bytes=reserve_bytes,
        graph=graph,
        durations=durations,
        proof=proof,
        schedule=schedule,
        price=price(graph, durations, schedule),
        by_kind=_by_kind(graph, schedule),
    )


# -- the change ----------------------------------------------------------------------------------------------------------


def change_of(report: MovementReport, *, mode: Mode, reserve_bytes: int, engine_seconds: float) -> Change:
    """What the graph is made from: bytes of every EMU on every slot, flows, capacities of slots and hosts."""
    fleet = report.fleet
    host_of = {slot: host_lane(int(fleet.node_of[slot])) for slot in fleet.slots}
    capacity = {slot: device.memory_bytes for slot, device in fleet.device_of.items()}
    hosts = {
        host_lane(index): sum(capacity[slot] for slot in node.slots)
        for index, node in enumerate(fleet.nodes)
        if mode == "snapshot"
    }
    flows: list[Flow] = []
    residencies: list[Residency] = []
    moved: dict[str, Ints] = {}
    for (emu, _), size in moved_by_kind(report.routes.streams, report.routes.rows).items():
        moved[emu] = moved[emu] + size if emu in moved else size
    for stage in report.stages:
        emu = emu_name(stage.after)
        own, received = _flows(report, emu, moved[emu])
        flows += own
        residencies += _residencies(report, emu, received)
    return Change(
        emus=tuple(
            EmuChange(  # noqa: S604  (an engine's shell, no process)
                emu=emu_name(stage.after),
                mode=mode,
                shell=True,
                through_host=mode == "snapshot",
                old_groups=groups_of(stage.before),
                new_groups=groups_of(stage.after),
                engine_seconds=engine_seconds,
            )
            for stage in report.stages
        ),
        residencies=tuple(residencies),
        flows=tuple(flows),
        capacity_bytes={**capacity, **hosts},
        host_of=host_of,
        phase_bytes=dict.fromkeys(fleet.slots, reserve_bytes) if reserve_bytes else {},
    )


def groups_of(stage: StagePlan) -> int:
    """Communicators that a slot of the stage is in: one for each way in which the model is cut, and one for all."""
    layout = stage.layout
    return 1 + sum(degree > 1 for degree in (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep))


def _flows(report: MovementReport, emu: str, size: Ints) -> tuple[list[Flow], Ints]:
    """The EMU's bytes, `size` [rows], by source, destination and hop, and [slots] what each slot receives."""
    rows, slots = report.routes.rows[size > 0], len(report.fleet.node_of)
    size = size[size > 0]
    received = sum_at(rows[:, DESTINATION], size, slots)
    hops = int(rows[:, HOP].max(initial=0)) + 1
    keys, at = np.unique((rows[:, SOURCE] * slots + rows[:, DESTINATION]) * hops + rows[:, HOP], return_inverse=True)
    pairs, hop_of = np.divmod(keys, hops)
    sources, destinations = np.divmod(pairs, slots)
    columns = (sources, destinations, sum_at(at, size, len(keys)), hop_of)
    flows = [
        Flow(emu=emu, source=source, destination=destination, size_bytes=amount, hop=hop)
        for source, destination, amount, hop in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return flows, received


def _residencies(report: MovementReport, emu: str, received: Ints) -> list[Residency]:
    streams, slots = report.routes.streams, len(report.fleet.node_of)
    present, target = streams.present, streams.target
    shared = np.array([len(holders) > 1 for holders in present.sets], dtype=bool)
    sizes = _own(present, emu, row_bytes(present))
    before, after = (
        held_by_slot(present, slots, sizes),
        held_by_slot(target, slots, _own(target, emu, row_bytes(target))),
    )
    guarded = held_by_slot(present, slots, np.where(shared[present.holders], sizes, 0))
    old, new = (held_by_slot(table, slots, _gradient_bytes(table, emu)) for table in (present, target))
    kept = after - received
    return [
        Residency(
            emu=emu,
            lane=slot,
            present_bytes=int(before[slot]),
            target_bytes=int(after[slot]),
            kept_bytes=int(kept[slot]),
            copied_bytes=int(kept[slot]),
            guarded_bytes=int(guarded[slot]),
            blank_present_bytes=int(old[slot]),
            blank_target_bytes=int(new[slot]),
        )
        for slot in report.fleet.slots
        if before[slot] or after[slot]
    ]


def _own(table: BoxTable, emu: str, size_bytes: Ints) -> Ints:
    """[rows] bytes of the rows of an EMU, 0 of others."""
    of_track = np.array([track.emu == emu for track in table.tracks], dtype=bool)
    return np.where(of_track[table.rows[:, TRACK]], size_bytes, 0)


def _gradient_bytes(table: BoxTable, emu: str) -> Ints:
    """[rows] bytes of the gradients of what the rows hold: of weights that train."""
    trained = {track.tensor for track in table.tracks if track.emu == emu and "exp_avg" in track.components}
    weights = [t.emu == emu and "weight" in t.components and t.tensor in trained for t in table.tracks]
    return np.where(np.array(weights, dtype=bool)[table.rows[:, TRACK]], table.elements * GRADIENT_BYTES, 0)


# -- seconds by kind -----------------------------------------------------------------------------------------------------


def _by_kind(graph: TransitionGraph, schedule: Timeline) -> tuple[KindSeconds, ...]:
    """By place, then in the order in which the kinds begin; kinds that take no time are left out."""
    spans: dict[tuple[Place, str], list[tuple[float, float]]] = {}
    for index, start, end in schedule.spans:
        operation = graph.operations[index]
        spans.setdefault((operation.place, operation.kind), []).append((start, end))
    found: list[KindSeconds] = []
    for (place, kind), times in sorted(spans.items(), key=lambda item: (PLACES.index(item[0][0]), item[1][0])):
        seconds = _covered(times)
        if seconds:
            members = [op for op in graph.operations if op.kind == kind and op.place == place]
            size = sum(op.size_bytes for op in members)
            found.append(
                KindSeconds(kind=kind, place=place, operations_count=len(members), size_bytes=size, seconds=seconds)
            )
    return tuple(found)


def _covered(times: list[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans (start, end), ascending by start, lasts."""
    total, until = 0.0, -1.0
    for start, end in times:
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return round(total, 9)
