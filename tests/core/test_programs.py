"""Programs of slots: the whole graph, each operation once on each of its slots, and an order in which nobody waits for ever."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings

from nereus.errors import TransferFailed
from nereus.transitions.assemble import assemble
from nereus.transitions.graph import MOVES, TransitionGraph
from nereus.transitions.order import Infeasible
from nereus.transitions.programs import BARRIERS, Stretch, stretches
from tests.core.changes import scenes
from tests.core.graph_scenes import NAMED


def runs_to_the_end(graph: TransitionGraph, parts: tuple[Stretch, ...]) -> None:  # noqa: C901
    """Carries programs out as slots would, a task when all its slots have come to it; every edge must be kept.

    What happens on hosts alone is done as soon as it may be.
    """
    done: set[str] = set()
    number = {name: index for index, name in enumerate(graph.ids)}

    def finish(name: str) -> None:
        for before in graph.predecessors[number[name]]:
            assert graph.ids[before] in done, f"{name} ran before {graph.ids[before]}"
        assert name not in done
        done.add(name)

    for part in parts:
        at = dict.fromkeys(part.tasks, 0)
        by_driver = {o.id: o for o in part.order if not any(lane >= 0 for lane in o.lanes)}
        moving = True
        while moving:
            moving = False
            while ready := [n for n in by_driver if all(graph.ids[b] in done for b in graph.predecessors[number[n]])]:
                for name in ready:
                    finish(name)
                    del by_driver[name]
                moving = True
            waiting = {lane: tasks[at[lane]] for lane, tasks in part.tasks.items() if at[lane] < len(tasks)}
            for lane, task in list(waiting.items()):
                partners = [other for other, tasks in part.tasks.items() if _meets(task, tasks)]
                if waiting.get(lane) is task and all(_same(waiting.get(p), task) for p in partners):
                    fresh = {n for p in partners for n in waiting[p].operation_ids}
                    for name in sorted(fresh, key=number.__getitem__):
                        finish(name)
                    for p in partners:
                        at[p] += 1
                        del waiting[p]
                    moving = True
        assert not by_driver
        assert all(at[lane] == len(tasks) for lane, tasks in part.tasks.items()), "slots wait for each other"
    assert done == set(graph.ids)


def _same(one, other) -> bool:
    if one is None:
        return False
    if other.movement_index >= 0:
        return one.movement_index == other.movement_index
    return one.operation_ids == other.operation_ids


def _meets(task, tasks) -> bool:
    return any(_same(each, task) for each in tasks)


@pytest.mark.parametrize("name", sorted(NAMED))
def test_named_scenes(name: str) -> None:
    made = NAMED[name]()
    graph = assemble(made.change, made.durations)
    try:
        parts = stretches(graph)
    except TransferFailed:
        moves = [o for o in graph.operations if o.kind in MOVES]
        assert any(o.start or o.lanes[0] < 0 or o.note == "parked" for o in moves), "nothing else is refused"
        return
    runs_to_the_end(graph, parts)


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_random_changes(scene) -> None:
    try:
        graph = assemble(scene.change, scene.durations)
        parts = stretches(graph)
    except (Infeasible, TransferFailed):
        return
    runs_to_the_end(graph, parts)
    ends = defaultdict(int)
    for part in parts:
        ends[part.when] += 1
        assert all(o.kind not in BARRIERS for o in part.order if any(lane >= 0 for lane in o.lanes))
    assert ends["early"] <= 1
