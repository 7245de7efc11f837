"""State that arrives in new engines' own storage, and state that goes by way of the host: what must hold of the graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import ConfigError
from nereus.transitions.assemble import assemble
from nereus.transitions.change import EmuChange
from nereus.transitions.graph import TransitionGraph
from nereus.transitions.holders import InvalidGraph
from nereus.transitions.order import Infeasible
from nereus.transitions.price import least_seconds, price
from nereus.transitions.proof import check
from tests.core.changes import NOTHING, Places, Scene, any_scene, scene, two_nodes
from tests.core.graph_scenes import HOST, NAMED, on_slots
from tests.core.settling import Trial, trial
from tests.core.test_graph import carry_out


def graph_of(name: str) -> tuple[Scene, TransitionGraph]:
    case = NAMED[name]()
    return case, assemble(case.change, case.durations)


def with_emus(case: Scene, **parts: object) -> Scene:
    emus = tuple(replace(emu, **parts) for emu in case.change.emus)  # type: ignore[arg-type]
    return replace(case, change=replace(case.change, emus=emus))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([0, 12, 40]))
def test_shells_and_hosts_settle_within_memory_and_lose_nothing(data: st.DataObject, faults: int) -> None:
    def choose(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    case = any_scene(choose)
    if any(emu.shell or emu.through_host for emu in case.change.emus):
        try:
            Trial(case, choose, faults=faults).run()
        except Infeasible as refusal:
            assert refusal.phase in ("beside", "snapshot", "target", "order")  # noqa: PT017
    else:
        trial(choose, faults)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.booleans())
def test_through_the_host_a_slot_needs_the_larger_of_old_and_new(data: st.DataObject, shells: bool) -> None:
    """Any exchange between slots that are as full as their old or their new state: no cycle, no piece, no refusal."""
    slots = data.draw(st.integers(2, 5))
    emus: dict[str, tuple[Places, Places]] = {}
    blank: dict[tuple[str, int], tuple[int, int]] = {}
    for number in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(1, 8))
        some = st.frozensets(st.integers(0, size - 1))
        before: Places = {slot: data.draw(some) for slot in range(slots)}
        held = sorted(frozenset().union(*before.values()))
        after: Places = {slot: data.draw(some) & frozenset(held) for slot in range(slots)}
        after[0] |= frozenset(held) - frozenset().union(*after.values())
        emus[f"emu{number}"] = before, after
        blank[f"emu{number}", 0] = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    level = [[0] * slots, [0] * slots]
    for emu, placings in emus.items():
        for at, places in enumerate(placings):
            for slot in range(slots):
                level[at][slot] += len(places.get(slot, NOTHING)) + blank.get((emu, slot), (0, 0))[at]
    room = on_slots(0, slots, host=1000) | {slot: max(level[0][slot], level[1][slot]) for slot in range(slots)}
    modes = dict.fromkeys(emus, "snapshot")
    case = scene(
        emus,
        two_nodes(slots),
        room,
        modes=modes,  # type: ignore[arg-type]
        shells=emus if shells else (),
        through=emus,
        blank=blank,
    )
    graph = assemble(case.change, case.durations)
    check(graph)
    carry_out(case, graph)
    assert not any(op.note == "parked" for op in graph.operations)
    assert least_seconds(case.change, case.durations) <= price(graph, case.durations).bound_seconds + 1e-6


def test_a_shell_beside_the_step_is_built_before_the_pause() -> None:
    case, graph = graph_of("shell_beside_with_room")
    assert {op.place for op in graph.operations if op.kind in ("allocate", "build_groups", "build_engine")} == {
        "interleaved"
    }
    assert all(i in graph.late for i in graph.by_kind["release"])
    tight = replace(case.change, phase_bytes={0: 9, 1: 8})  # 26 present + 26 new + 9 of 60 on slot 0
    placed = assemble(tight, case.durations)
    assert {name: placed.operations[i].place for i, name in enumerate(placed.ids) if name.startswith("build_eng")} == {
        "build_engine:actor.train:0": "pause",
        "build_engine:actor.train:1": "interleaved",
    }


def test_old_and_new_that_do_not_fit_beside_each_other_are_refused_by_reason() -> None:
    """Old state and its blank memory stay until the commit: the caller may choose mode snapshot."""
    case, _ = graph_of("shell_beside_with_room")
    room = {**case.change.capacity_bytes, 1: 51}
    with pytest.raises(
        Infeasible, match="slot 1 in phase beside: needs 52 bytes, 51 are free; 26 bytes of old"
    ) as told:
        assemble(replace(case.change, capacity_bytes=room), case.durations)
    assert (told.value.phase, told.value.lane, told.value.needed_bytes) == ("beside", 1, 52)
    through = with_emus(case, mode="snapshot", through_host=True)
    least = replace(through.change, capacity_bytes={**case.change.capacity_bytes, 0: 26, 1: 26})
    assert check(assemble(least, case.durations)).peak_bytes[0] == 26


def test_a_host_without_room_for_what_goes_through_it_is_refused() -> None:
    case, _ = graph_of("swap_through_the_host_on_full_slots")
    room = {**case.change.capacity_bytes, HOST: 47}
    with pytest.raises(Infeasible, match="host0 in phase snapshot: needs 48 bytes, 47 are free"):
        assemble(replace(case.change, capacity_bytes=room), case.durations)


def test_a_graph_made_for_other_storage_is_refused() -> None:
    case, graph = graph_of("shell_beside_with_room")
    plain = assemble(with_emus(case, shell=False).change, case.durations)
    with pytest.raises(InvalidGraph, match=r"must wait for build_engine:actor\.train|keeps its blank memory"):
        check(replace(plain, change=graph.change))
    case, graph = graph_of("swap_through_the_host_on_full_slots")
    direct = replace(with_emus(case, through_host=False).change, capacity_bytes=on_slots(99, host=99))
    with pytest.raises(InvalidGraph, match="must read the snapshot of slot"):
        check(replace(assemble(direct, case.durations), change=replace(graph.change, capacity_bytes=on_slots(99))))
    (read,) = (i for i, name in enumerate(graph.ids) if name == "copy:actor.train:1:via host0")
    moved = (*graph.operations[:read], replace(graph.operations[read], via=None), *graph.operations[read + 1 :])
    with pytest.raises(InvalidGraph, match=r"copy:actor\.train:1: must read the snapshot of slot 1"):
        check(replace(graph, operations=moved))


def test_wrong_changes_are_refused_by_name() -> None:
    case, _ = graph_of("shell_beside_with_room")
    with pytest.raises(ConfigError, match=r"through_host = .*actor\.train in mode beside.*mode snapshot"):
        with_emus(case, through_host=True).change.validate()
    less = replace(case.change.residencies[0], copied_bytes=3)
    with pytest.raises(ConfigError, match=r"copied_bytes = .*3 of actor\.train on slot 0.*its 10 kept bytes"):
        replace(case.change, residencies=(less, *case.change.residencies[1:])).validate()
    assert not EmuChange(emu="a").anew
    for name in ("early", "outside"):
        with pytest.raises(ConfigError, match=f"{name} = '?quiesce'?: .*kinds that may come before the pause"):
            assemble(replace(case.change, **{name: ("quiesce",)}), case.durations)


def test_work_outside_of_the_step_needs_room_beside_its_phases() -> None:
    case, _ = graph_of("shell_beside_with_room")
    outside = replace(case.change, outside=("allocate", "build_groups", "build_engine"))
    graph = assemble(outside, case.durations)
    check(graph)
    built = [graph.operations[i].place for i in graph.by_kind["build_engine"]]
    assert built == ["outside", "outside"]
    cost = price(graph, case.durations)
    assert cost.outside_seconds == pytest.approx(1.5)
    assert cost.interleaved_seconds == 0
    tight = assemble(replace(outside, phase_bytes={0: 9, 1: 8}), case.durations)
    check(tight)
    assert [tight.operations[i].place for i in tight.by_kind["build_engine"]] == ["pause", "outside"]
    groups = assemble(replace(outside, outside=("build_engine",)), case.durations)  # waits for what is interleaved
    assert {groups.operations[i].place for i in groups.by_kind["build_engine"]} == {"interleaved"}
