"""Proof before action: what must be true of a transition graph before anything of it runs.

`check` knows the change and the graph, not how the graph was made. Whatever a rule needs to be ordered must be joined
by an edge, or by edges through one named operation (arrive, secure, verify, commit).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from nereus.transitions.change import Change, Residency
from nereus.transitions.graph import MOVES, PLACES, TransitionGraph, uncollected
from nereus.transitions.holders import InvalidGraph, broken, check_sources, durability, flow_moves
from nereus.transitions.order import Lane, lane_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """What `check` found: the peak of every lane in any legal order, and what stands in for each EMU's old bytes.

    `durability` by EMU in words; `exposed_bytes` by EMU is what no second domain holds until the commit: the loss of
    its slot sends the job back to the last checkpoint.
    """

    peak_bytes: Mapping[Lane, int]
    durability: Mapping[str, str]
    exposed_bytes: Mapping[str, int]


@uncollected()
def check(graph: TransitionGraph) -> Proof:
    """Proves a graph, else InvalidGraph with the first violation.

    Acyclic, ids unique; every target byte arrives exactly once, into room claimed for it; sources are held while they
    are read; the memory operations of a lane are in one total order whose prefix sums stay within its capacity (and
    before the pause beside what the phases need); shells are built in their memory before state arrives; before an EMU's first destructive operation its old bytes have a
    second holder as its mode says; communicators in one order on every slot; one commit that all changes lead to, but in
    an urgent one the engines of what has no state.
    """
    graph.change.validate()
    _check_operations(graph)
    order = _check_acyclic(graph)
    _check_commit(graph)
    _check_arrivals(graph)
    _check_verified(graph)
    _check_room(graph)
    check_sources(graph)
    _check_engines(graph)
    _check_shells(graph)
    words, exposed = durability(graph)
    _check_communicators(graph, order)
    return Proof(peak_bytes=lane_peaks(graph), durability=words, exposed_bytes=exposed)


def _check_operations(graph: TransitionGraph) -> None:
    """Ids are unique, operations are of the change."""
    if len(set(graph.ids)) != len(graph.ids):
        seen: set[str] = set()
        twice = next(name for name in graph.ids if name in seen or seen.add(name))
        raise InvalidGraph(f"{twice}: two operations have this id")
    emus, capacity = {emu.emu for emu in graph.change.emus}, graph.change.capacity_bytes
    for index, operation in enumerate(graph.operations):
        if operation.emu not in emus and operation.kind != "commit":
            raise broken(graph, index, "its EMU must be of the change")
        if not all(lane in capacity for lane in operation.lanes):
            raise broken(graph, index, "its lanes must have a capacity")
        if operation.size_bytes < 0 or operation.seconds < 0:
            raise broken(graph, index, "bytes and seconds must not be negative")


def _check_acyclic(graph: TransitionGraph) -> list[int]:
    """Edges lead to an end, and never from the pause to before it; the operations in topological order."""
    order = topological(graph)
    place = [PLACES.index(operation.place) for operation in graph.operations]
    for index in order:
        for after in graph.successors[index]:
            if place[after] < place[index]:
                raise broken(graph, after, f"is {PLACES[place[after]]}, but waits for {graph.ids[index]}")
    if len(order) < len(place):
        raise broken(graph, min(set(range(len(place))) - set(order)), "waits for itself: a cycle")
    return order


def _check_commit(graph: TransitionGraph) -> None:
    """One commit; all that changes state leads to it, activation and the end of old groups follow."""
    if len(graph.by_kind["commit"]) != 1:
        raise InvalidGraph(f"a transition has one commit, this graph has {len(graph.by_kind['commit'])}")
    last = graph.change.after_commit()
    for index, operation in enumerate(graph.operations):
        if operation.kind in ("activate", "destroy_groups"):
            if index not in graph.late:
                raise broken(graph, index, "must come after the commit")
        elif operation.kind in ("allocate", "release"):
            if index not in graph.soon and index not in graph.late:
                raise broken(graph, index, "neither leads to the commit nor follows it")
        elif operation.kind in ("build_groups", "build_engine") and operation.emu in last:
            if index not in graph.late:
                raise broken(graph, index, "must come after the commit: the change is urgent, and it has no state")
        elif operation.kind != "commit" and index not in graph.soon:
            raise broken(graph, index, "must come before the commit")


def _check_arrivals(graph: TransitionGraph) -> None:
    """The pieces of each flow tile it: every target byte arrives exactly once."""
    tiles: dict[tuple[str, Lane, Lane, int], list[tuple[int, int]]] = defaultdict(list)
    for index in flow_moves(graph):
        op = graph.operations[index]
        tiles[op.emu, op.lanes[0], op.lanes[1], op.hop].append((op.start, op.size_bytes))
    for flow in graph.change.flows:
        pieces = tiles.pop((flow.emu, flow.source, flow.destination, flow.hop), [])
        if len(pieces) == 1 and pieces[0] == (0, flow.size_bytes):
            continue
        pieces.sort()
        ends = [0, *(start + size for start, size in pieces)]
        if [start for start, _ in pieces] != ends[:-1] or ends[-1] != flow.size_bytes:
            ways = f"{lane_name(flow.source)} > {lane_name(flow.destination)}"
            raise InvalidGraph(
                f"{flow.emu} {ways}: {flow.size_bytes:,} bytes must arrive exactly once, not as {pieces}"
            )
    if tiles:
        raise InvalidGraph(f"bytes move that no flow asks for: {next(iter(tiles))}")


def _check_verified(graph: TransitionGraph) -> None:
    """Relays wait for lower hops at their source, every target is verified after its arrivals."""
    verify = {graph.operations[index].key: index for index in graph.by_kind["verify"]}
    arrive: dict[tuple[str, Lane], dict[int, int]] = defaultdict(dict)
    for index in graph.by_kind["arrive"]:
        arrive[graph.operations[index].key][graph.operations[index].hop] = index
    for index in (*flow_moves(graph), *graph.by_kind["copy"]):
        op = graph.operations[index]
        end = (op.emu, op.lanes[-1])
        if end not in verify or not graph.joined(index, verify[end]):
            raise broken(graph, index, "what arrives must be verified")
        hops = arrive.get(op.key, {})
        if op.hop and (op.hop not in hops or not graph.joined(hops[op.hop], index)):
            raise broken(graph, index, "a relay must wait for the lower hops at its source")
        for hop, after in arrive.get(end, {}).items():
            if hop > op.hop and op.kind != "copy" and not graph.joined(index, after):
                raise broken(graph, index, f"must come before the relays of hop {hop} from {lane_name(end[1])}")
    for r in graph.change.residencies:
        if r.target_bytes and (r.emu, r.lane) not in verify:
            raise InvalidGraph(f"{r.emu} on {lane_name(r.lane)}: the target state must be verified")


def _needed(change: Change, r: Residency) -> int:
    """Bytes of new room for state: all of the target beside, what arrives and what is copied in place."""
    if r.present_bytes == r.kept_bytes == r.target_bytes and not r.copied_bytes:
        return 0
    return r.target_bytes if change.mode_of(r.emu) == "beside" else r.target_bytes - r.kept_bytes + r.copied_bytes


def _check_room(graph: TransitionGraph) -> None:
    """Whatever moves has one claim that it fills, claims are filled, and no more is claimed than needed."""
    filled = dict.fromkeys(graph.by_kind["allocate"], 0)
    for index in (*(i for kind in sorted(MOVES) for i in graph.by_kind[kind]), *graph.by_kind["copy"]):
        op = graph.operations[index]
        found = [
            a for a in graph.predecessors[index] if a in filled and graph.operations[a].key == (op.emu, op.lanes[-1])
        ]
        if len(found) != 1 or not graph.joined(found[0], index):
            raise broken(graph, index, f"must wait for the one allocate on {lane_name(op.lanes[-1])} that it fills")
        filled[found[0]] += op.size_bytes
    claimed: dict[tuple[str, Lane, str], int] = defaultdict(int)
    for index, size in filled.items():
        op = graph.operations[index]
        claimed[(*op.key, op.note)] += op.size_bytes
        if size != (0 if op.note == "blank" else op.size_bytes):
            raise broken(graph, index, f"{size:,} bytes go into {op.size_bytes:,} of room")
    for r in graph.change.residencies:
        for size, note in ((_needed(graph.change, r), ""), (r.blank_target_bytes, "blank")):
            if (have := claimed[r.emu, r.lane, note]) != size:
                what = f"{r.emu} on {lane_name(r.lane)}"
                raise InvalidGraph(f"{what}: {size:,} bytes of {note or 'state'} are needed, {have:,} claimed")


def _check_engines(graph: TransitionGraph) -> None:
    """Every slot of a target is activated once, after its blank memory; its engine after its groups and that memory."""
    operations = graph.operations
    emus = {emu.emu: emu for emu in graph.change.emus}
    groups = {operations[index].emu: index for index in graph.by_kind["build_groups"]}
    engines = _engines(graph)
    active = {operations[index].key: index for index in graph.by_kind["activate"]}
    blank = {operations[i].key: i for i in graph.by_kind["allocate"] if operations[i].note == "blank"}
    for r in graph.change.residencies:
        key, emu = (r.emu, r.lane), emus[r.emu]
        if r.lane < 0 or not r.target_bytes + r.blank_target_bytes:
            continue
        name = f"{r.emu} on {lane_name(r.lane)}"
        if (
            key not in active
            or (emu.engine_seconds > 0 or emu.shell) != (key in engines)
            or (emu.new_groups > 0) != (r.emu in groups)
        ):
            raise InvalidGraph(f"{name}: must be activated, with its engine and groups")
        if key in blank and not graph.joined(blank[key], active[key]):
            raise broken(graph, active[key], "must wait for its blank memory")
        if key in engines and r.emu in groups and not graph.joined(groups[r.emu], engines[key]):
            raise broken(graph, engines[key], "must wait for its groups")
        last = key in engines and engines[key] in graph.late
        if last and not graph.joined(engines[key], active[key]):
            raise broken(graph, active[key], "must wait for its engine")
        early = key in blank and (last or blank[key] not in graph.late)
        if key in engines and early and not graph.joined(blank[key], engines[key]):
            raise broken(graph, engines[key], "must wait for its blank memory")


def _engines(graph: TransitionGraph) -> dict[tuple[str, Lane], int]:
    """What builds the engine of an EMU on a slot. Processes of an engine that is no shell meet: one operation builds it."""
    found: dict[tuple[str, Lane], int] = {}
    together: dict[str, int] = {}
    shells = {emu.emu for emu in graph.change.emus if emu.shell}
    for index in graph.by_kind["build_engine"]:
        operation = graph.operations[index]
        if operation.emu not in shells and together.setdefault(operation.emu, index) != index:
            raise broken(
                graph, index, f"its slots meet while they start: they belong to {graph.ids[together[operation.emu]]}"
            )
        found |= {(operation.emu, lane): index for lane in operation.lanes}
    return found


def _check_shells(graph: TransitionGraph) -> None:
    """A shell is built in all its memory, state and blank, before anything arrives in it."""
    operations = graph.operations
    shells = {emu.emu for emu in graph.change.emus if emu.shell}
    if not shells:
        return
    engines = _engines(graph)
    for index in graph.by_kind["allocate"]:
        op = operations[index]
        engine = engines.get(op.key) if op.emu in shells and op.note in ("", "blank") else None
        if engine is not None and not graph.joined(index, engine):
            raise broken(graph, engine, f"must wait for {graph.ids[index]}: a shell is built in its memory")
    for index in (*flow_moves(graph), *graph.by_kind["copy"]):
        op = operations[index]
        engine = engines.get((op.emu, op.lanes[-1]))
        if op.emu in shells and engine is not None and not graph.joined(engine, index):
            raise broken(graph, index, f"must wait for {graph.ids[engine]}: it arrives in that engine's storage")


def lane_peaks(graph: TransitionGraph) -> dict[Lane, int]:
    """The peak of each lane in bytes: its memory operations are totally ordered, so it is that of their prefix sums.

    InvalidGraph when they are not, when a peak exceeds the capacity, or when what is claimed before the pause does not
    fit beside what the phases need.
    """
    level = graph.change.used_bytes()
    peaks = {lane: level.get(lane, 0) for lane in graph.change.capacity_bytes}
    for lane, indexes in _lane_orders(graph).items():
        room, phases = graph.change.capacity_bytes[lane], graph.change.phase_bytes.get(lane, 0)
        for index in indexes:
            operation = graph.operations[index]
            level[lane] = level.get(lane, 0) + operation.delta_bytes
            peaks[lane] = max(peaks[lane], level[lane])
            needed = level[lane] + (phases if operation.place != "pause" else 0)
            if operation.delta_bytes > 0 and (needed > room or level[lane] < 0):
                beside = f" beside {phases:,} of the phases" if operation.place != "pause" else ""
                raise broken(graph, index, f"{lane_name(lane)} would hold {level[lane]:,} of {room:,} bytes{beside}")
    for lane, room in graph.change.capacity_bytes.items():
        if peaks[lane] > room:
            raise InvalidGraph(f"{lane_name(lane)} holds {peaks[lane]:,} of {room:,} bytes before anything happens")
    return peaks


def _lane_orders(graph: TransitionGraph) -> dict[Lane, list[int]]:
    """The memory operations of each lane in the total order of their memory edges."""
    members: dict[Lane, list[int]] = defaultdict(list)
    for kind in ("allocate", "release"):
        for index in graph.by_kind[kind]:
            if len(graph.operations[index].lanes) != 1:
                raise broken(graph, index, "changes the memory of one lane, so it names one")
            members[graph.operations[index].lanes[0]].append(index)
    memory = next(edges for edges in graph.edges if edges.kind == "memory")
    pairs = zip(memory.before_index, memory.after_index, strict=True)
    following = {a: b for a, b in pairs if graph.operations[a].lanes == graph.operations[b].lanes}
    orders: dict[Lane, list[int]] = {}
    for lane, indexes in members.items():
        first = set(indexes) - {following[a] for a in indexes if a in following}
        orders[lane] = chain = sorted(first)[:1]
        while chain and chain[-1] in following and len(chain) < len(indexes):
            chain.append(following[chain[-1]])
        if len(first) != 1 or len(set(chain)) != len(indexes):
            raise InvalidGraph(
                f"{lane_name(lane)}: memory edges must order its {len(indexes)} operations one after another"
            )
    return orders


def _check_communicators(graph: TransitionGraph, order: list[int]) -> None:
    """Every slot meets its communicator operations in one order; `order` is a topological one."""
    chain = next(edges for edges in graph.edges if edges.kind == "communicator")
    pairs = set(zip(chain.before_index, chain.after_index, strict=True))
    by_lane: dict[Lane, list[int]] = defaultdict(list)
    position = {index: at for at, index in enumerate(order)}
    for index in sorted((*graph.by_kind["build_groups"], *graph.by_kind["destroy_groups"]), key=position.__getitem__):
        for lane in graph.operations[index].lanes:
            by_lane[lane].append(index)
    for lane, indexes in by_lane.items():
        for a, b in pairwise(indexes):
            if (a, b) not in pairs:
                raise broken(
                    graph, b, f"{lane_name(lane)} must meet it after {graph.ids[a]}: a communicator edge is missing"
                )


def topological(graph: TransitionGraph) -> list[int]:
    """Operations so that each comes after those that it waits for; those of a cycle, and all behind it, are missing."""
    waits = list(graph.waits)
    order = [index for index, count in enumerate(waits) if count == 0]
    for index in order:
        for after in graph.successors[index]:
            waits[after] -= 1
            if not waits[after]:
                order.append(after)
    return order
