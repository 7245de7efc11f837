"""Traces of timelines: structure, order, no overlap on a track, and that they say what the timeline says."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings

from nereus.report.perfetto import trace
from nereus.transitions.assemble import assemble
from nereus.transitions.graph import TransitionGraph
from nereus.transitions.order import Infeasible
from nereus.transitions.proof import lane_peaks
from nereus.transitions.timeline import Timeline, timeline
from tests.core.changes import Scene, scenes
from tests.core.graph_scenes import NAMED

PHASES = {"M", "X", "i", "C"}


def traced(case: Scene) -> tuple[TransitionGraph, Timeline, list[dict[str, Any]]]:
    graph = assemble(case.change, case.durations)
    schedule = timeline(graph, case.durations)
    found = json.loads(json.dumps(trace(graph, schedule, case.durations)))
    assert found["otherData"]["makespan_seconds"] == pytest.approx(schedule.makespan_seconds)
    return graph, schedule, found["traceEvents"]


def tracks(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Slices by process and track name; every slice has both."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[processes[event["pid"]], threads[event["pid"], event["tid"]]].append(event)
    return found


def check_structure(graph: TransitionGraph, schedule: Timeline, events: list[dict[str, Any]]) -> None:
    assert {event["ph"] for event in events} <= PHASES
    timed = [event for event in events if event["ph"] != "M"]
    assert all(event["ph"] == "M" for event in events[: len(events) - len(timed)])
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(timed))
    named = {e["pid"] for e in events if e["name"] == "process_name"}
    assert all(event["pid"] in named for event in timed)
    for name, slices in tracks(events).items():
        assert all(event["dur"] > 0 for event in slices), name
        for a, b in pairwise(sorted(slices, key=lambda e: e["ts"])):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6, (name, a["name"], b["name"])
    at = {name: index for index, name in enumerate(graph.ids)}
    seen: set[str] = set()
    for event in timed:
        if event["ph"] == "C":
            continue
        index = at[event["name"]]
        operation = graph.operations[index]
        seen.add(event["name"])
        assert (event["cat"], event["args"]["bytes"]) == (operation.kind, operation.size_bytes)
        assert event["args"]["place"] == operation.place
        assert event["ts"] >= schedule.start_seconds[index] * 1e6 - 1e-3
        assert event["ts"] + event.get("dur", 0) <= schedule.end_seconds[index] * 1e6 + 1e-3
    assert seen == set(graph.ids)


@pytest.mark.parametrize("name", NAMED)
def test_traces_of_named_scenes(name: str) -> None:
    check_structure(*traced(NAMED[name]()))


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_traces_of_any_scene(case: Scene) -> None:
    try:
        found = traced(case)
    except Infeasible:
        return
    check_structure(*found)


def test_a_transfer_is_on_its_two_ports_and_an_engine_on_its_slots_thread() -> None:
    _, _, events = traced(NAMED["shell_beside_with_room"]())
    on: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for track, slices in tracks(events).items():
        for event in slices:
            on[event["name"]].add(track)
    assert on["transfer:actor.train:1>0"] == {("slot 1", "link out"), ("slot 0", "link in")}
    assert on["build_engine:actor.train:0"] == {("slot 0", "thread")}
    assert on["build_groups:actor.train:0-1"] == {("slot 0", "thread"), ("slot 1", "thread")}
    assert on["allocate:actor.train:1:blank"] == {("slot 1", "memory")}
    assert on["commit"] == {("job", "commit")}
    _, _, through = traced(NAMED["swap_through_the_host_on_full_slots"]())
    names = {track for track, slices in tracks(through).items() if any(e["cat"] == "stage_in" for e in slices)}
    assert names == {("hosts", "host 0"), *((f"slot {slot}", "pcie in") for slot in (0, 2, 3))}


def test_work_outside_has_tracks_of_its_own() -> None:
    case = NAMED["colocated_to_disaggregated"]()
    outside = replace(case, change=replace(case.change, outside=("build_groups", "build_engine"), phase_bytes={}))
    graph, schedule, events = traced(outside)
    check_structure(graph, schedule, events)
    names = {track for track, slices in tracks(events).items() for e in slices if e["args"]["place"] == "outside"}
    assert {"outside", "outside (2)"} & {track for _, track in names}
    assert all(track.startswith(("outside", "memory")) for _, track in names)


def test_counters_are_what_slots_hold() -> None:
    """Blank memory and the new state come beside the old, 26 bytes each."""
    case = NAMED["shell_beside_with_room"]()
    graph, _, events = traced(case)
    slots = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    levels: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            levels[slots[event["pid"]]].append(event["args"]["bytes"])
    peaks = lane_peaks(graph)
    for slot in range(2):
        held = levels[f"slot {slot}"]
        assert held == [26, 32, 52, 32, 26]
        assert max(held) == peaks[slot]
