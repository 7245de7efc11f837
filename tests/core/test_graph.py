"""Transition graphs: golden files of named scenes, proven, legal in the world of bytes, the same again from JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings

from nereus.transitions.assemble import assemble
from nereus.transitions.graph import TransitionGraph, from_data
from nereus.transitions.order import Infeasible, host_lane
from nereus.transitions.price import least_seconds, price
from nereus.transitions.proof import check, topological
from nereus.transitions.timeline import Timeline, timeline
from tests.core.changes import Places, Scene, World, scene, scenes, two_nodes
from tests.core.graph_scenes import HOST, NAMED


def attempt(case: Scene) -> TransitionGraph | None:
    """The graph, or None where memory allows none."""
    try:
        return assemble(case.change, case.durations)
    except Infeasible:
        return None


def carry_out(case: Scene, graph: TransitionGraph) -> None:
    """The operations one after another, in the world of bytes: the change is what came of it."""
    world = World(case, graph)
    for index in topological(graph):
        world.end(graph.operations[index])
    for emu, places in case.after.items():
        for lane, numbers in places.items():
            assert world.new[emu, lane] == set(numbers)


def lines(graph: TransitionGraph) -> list[str]:
    """An operation a line: id, bytes, place, and what it waits for by kind of edge."""
    before: list[dict[str, list[str]]] = [{} for _ in graph.operations]
    for edges in graph.edges:
        for a, b in zip(edges.before_index, edges.after_index, strict=True):
            before[b].setdefault(edges.kind, []).append(graph.ids[a])
    return [
        f"{name} | {operation.size_bytes} | {operation.place}"
        + "".join(f" | {kind}: {', '.join(names)}" for kind, names in after.items())
        for name, operation, after in zip(graph.ids, graph.operations, before, strict=True)
    ]


@pytest.mark.parametrize("name", NAMED)
def test_golden_graphs(name: str, golden: Callable[[str, object], None]) -> None:
    case = NAMED[name]()
    graph = assemble(case.change, case.durations)
    proof = check(graph)
    carry_out(case, graph)
    cost = price(graph, case.durations)
    found = {
        "scene": (NAMED[name].__doc__ or "").strip(),
        "durability": proof.durability,
        "exposed_bytes": proof.exposed_bytes,
        "peak_bytes": {str(lane): size for lane, size in proof.peak_bytes.items()},
        "pause_seconds": round(cost.pause_seconds, 4),
        "interleaved_seconds": round(cost.interleaved_seconds, 4),
        "deviation_seconds": round(cost.deviation_seconds, 4),
        "bound_seconds": round(cost.bound_seconds, 4),
        "operations": lines(graph),
    }
    golden(f"graph_{name}", found)
    assert from_data(json.loads(json.dumps(graph.data()))) == graph


@settings(max_examples=150, deadline=None)
@given(scenes())
def test_graphs_are_proven_and_carry_out_the_change(case: Scene) -> None:
    graph = attempt(case)
    if graph is None:
        return
    proof = check(graph)
    carry_out(case, graph)
    assert all(proof.peak_bytes[lane] <= room for lane, room in case.change.capacity_bytes.items())
    again = from_data(json.loads(json.dumps(graph.data())))
    assert again == graph
    assert again.ids == graph.ids
    assert assemble(case.change, case.durations) == graph


def test_two_lanes_park_the_same_byte_on_one_host() -> None:
    """Both lay byte 0 out anew by way of host 1: what slot 0 drops there is not slot 2's."""
    before: Places = {0: frozenset({0, 1}), 1: frozenset({0}), 2: frozenset({0}), HOST: frozenset({1})}
    after: Places = {0: frozenset({1}), 1: frozenset({0, 1}), 2: frozenset({0}), HOST: frozenset({0})}
    case = scene(
        {"actor.train": (before, after)},
        two_nodes(3),
        {0: 2, 1: 2, 2: 1, HOST: 1, host_lane(1): 3},
        modes={"actor.train": "checkpoint"},
        relay=False,
        copied={("actor.train", 0): 1, ("actor.train", 2): 1},
    )
    graph = assemble(case.change, case.durations)
    check(graph)
    parked = [graph.operations[i].lanes for i in graph.by_kind["stage_out"] if graph.operations[i].note == "parked"]
    assert {(0, host_lane(1)), (2, host_lane(1))} <= set(parked)
    carry_out(case, graph)


@settings(max_examples=80, deadline=None)
@given(scenes())
def test_schedules_keep_the_edges_and_the_bounds(case: Scene) -> None:
    graph = attempt(case)
    if graph is None:
        return
    schedule = timeline(graph, case.durations)
    for index, after in enumerate(graph.successors):
        assert all(schedule.end_seconds[index] <= schedule.start_seconds[b] + 1e-9 for b in after)
    found = price(graph, case.durations, schedule)
    assert found.seconds + found.outside_seconds == pytest.approx(schedule.makespan_seconds)
    assert found.bound_seconds <= found.seconds + 1e-9
    if all(operation.via is None for operation in graph.operations):
        assert least_seconds(case.change, case.durations) <= found.bound_seconds + 1e-6
    assert found.deviation_seconds >= 0
    assert_ports_serve_one(case, graph, schedule)


def assert_ports_serve_one(case: Scene, graph: TransitionGraph, schedule: Timeline) -> None:
    """No resource is held twice at a time; every operation works as long as it takes, within its start and end."""
    busy: dict[int, list[tuple[int, int]]] = defaultdict(list)
    worked: dict[int, int] = defaultdict(int)
    for index, start, end in schedule.spans:
        operation = graph.operations[index]
        share = (end - start) / operation.seconds if operation.seconds else 0.0
        assert schedule.start_seconds[index] <= start <= end <= schedule.end_seconds[index]
        worked[index] += round((end - start) * 1e9)
        for resource, hold in case.durations.holds(operation):
            busy[resource].append((round(start * 1e9), round(start * 1e9 + hold * min(share, 1.0))))
    for resource, spans in busy.items():
        spans.sort()
        name = case.durations.resource_name(resource)
        assert all(a[1] <= b[0] + 1 for a, b in pairwise(spans)), name
    assert all(abs(worked[i] - op.seconds * 1e9) <= 1 for i, op in enumerate(graph.operations))
