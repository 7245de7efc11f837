"""The proof fails when it should: any edge or operation that is missing, any byte too many, any rule broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from nereus.errors import ConfigError
from nereus.transitions.assemble import assemble
from nereus.transitions.change import EmuChange, Flow, Residency
from nereus.transitions.graph import MOVES, Edges, Operation, TransitionGraph
from nereus.transitions.holders import InvalidGraph
from nereus.transitions.order import Infeasible, host_lane
from nereus.transitions.proof import check
from tests.core.changes import Scene, scene
from tests.core.graph_scenes import HOST, NAMED


def graph_of(name: str) -> TransitionGraph:
    case = NAMED[name]()
    return assemble(case.change, case.durations)


def with_operation(graph: TransitionGraph, index: int, **parts: object) -> TransitionGraph:
    changed = replace(graph.operations[index], **parts)  # type: ignore[arg-type]
    return replace(graph, operations=(*graph.operations[:index], changed, *graph.operations[index + 1 :]))


def without_operation(graph: TransitionGraph, index: int) -> TransitionGraph:
    """The graph without an operation; what it waited for comes before what waited for it."""
    edges = []
    for some in graph.edges:
        pairs = set(zip(some.before_index, some.after_index, strict=True))
        into, out = [a for a, b in pairs if b == index], [b for a, b in pairs if a == index]
        pairs = {pair for pair in pairs if index not in pair} | {(a, b) for a in into for b in out}
        shifted = sorted((a - (a > index), b - (b > index)) for a, b in pairs)
        edges.append(
            Edges(kind=some.kind, before_index=tuple(a for a, _ in shifted), after_index=tuple(b for _, b in shifted))
        )
    operations = (*graph.operations[:index], *graph.operations[index + 1 :])
    return replace(graph, operations=operations, edges=tuple(edges))


def without_edge(graph: TransitionGraph, kind: int, at: int) -> TransitionGraph:
    some = graph.edges[kind]
    before = (*some.before_index[:at], *some.before_index[at + 1 :])
    after = (*some.after_index[:at], *some.after_index[at + 1 :])
    fewer = replace(some, before_index=before, after_index=after)
    return replace(graph, edges=(*graph.edges[:kind], fewer, *graph.edges[kind + 1 :]))


def reaches(graph: TransitionGraph, before: int, after: int) -> bool:
    seen, stack = set(), [before]
    while stack:
        for b in graph.successors[stack.pop()]:
            if b not in seen:
                seen.add(b)
                stack.append(b)
    return after in seen


@pytest.mark.parametrize("name", NAMED)
def test_no_edge_can_be_left_out(name: str) -> None:
    """Unless other edges imply it."""
    graph = graph_of(name)
    refused = Counter[bool]()
    for kind, some in enumerate(graph.edges):
        for at, (before, after) in enumerate(zip(some.before_index, some.after_index, strict=True)):
            fewer = without_edge(graph, kind, at)
            try:
                check(fewer)
            except InvalidGraph:
                refused[True] += 1
            else:
                assert reaches(fewer, before, after), (graph.ids[before], graph.ids[after])
                refused[False] += 1
    assert refused[True] > 5 * refused[False]


@pytest.mark.parametrize("name", NAMED)
def test_no_operation_can_be_left_out_or_have_other_bytes(name: str) -> None:
    graph = graph_of(name)
    for index, operation in enumerate(graph.operations):
        if operation.kind != "destroy_groups":  # old groups are the engine's to end
            with pytest.raises(InvalidGraph):
                check(without_operation(graph, index))
        if operation.kind in (*MOVES, "allocate", "release", "copy"):
            for size in (operation.size_bytes + 1, operation.size_bytes - 1):
                with pytest.raises(InvalidGraph):
                    check(with_operation(graph, index, size_bytes=size))


def find(graph: TransitionGraph, start: str) -> int:
    return next(index for index, name in enumerate(graph.ids) if name.startswith(start))


def test_a_cycle_is_named() -> None:
    graph = graph_of("tp_change")
    data = graph.edges[0]
    assert data.kind == "data"
    commit = find(graph, "commit")
    back = replace(data, before_index=(*data.before_index, commit), after_index=(*data.after_index, 0))
    with pytest.raises(InvalidGraph, match=r"a cycle|waits for"):
        check(replace(graph, edges=(back, *graph.edges[1:])))


def test_an_id_is_there_once() -> None:
    graph = graph_of("tp_change")
    with pytest.raises(InvalidGraph, match=r"activate:actor.train:0: two operations have this id"):
        check(with_operation(graph, find(graph, "activate:actor.train:1"), lanes=(0,)))


def test_what_is_before_the_pause_waits_for_nothing_in_it() -> None:
    graph = graph_of("tp_change")
    with pytest.raises(InvalidGraph, match=r"verify:actor.train:0: is interleaved, but waits for"):
        check(with_operation(graph, find(graph, "verify:actor.train:0"), place="interleaved"))


def test_room_before_the_pause_is_what_the_phases_leave() -> None:
    graph = graph_of("tp_change")
    tight = replace(graph.change, phase_bytes={0: 20})  # 32 present + 16 new + 20 of 64
    with pytest.raises(InvalidGraph, match="slot 0 would hold 48 of 64 bytes beside 20 of the phases"):
        check(replace(graph, change=tight))
    case = NAMED["tp_change"]()
    placed = assemble(tight, case.durations)
    places = {placed.ids[i]: op.place for i, op in enumerate(placed.operations) if op.kind == "allocate"}
    assert places == {f"allocate:actor.train:{s}": "pause" if s == 0 else "interleaved" for s in range(4)}


def test_a_lane_holds_no_more_than_its_capacity() -> None:
    graph = graph_of("pp_change")
    for lane, peak in check(graph).peak_bytes.items():
        if peak:
            with pytest.raises(InvalidGraph):
                check(
                    replace(
                        graph,
                        change=replace(graph.change, capacity_bytes={**graph.change.capacity_bytes, lane: peak - 1}),
                    )
                )


def test_modes_say_what_stands_in_for_old_bytes() -> None:
    case = NAMED["swap_of_two_models_between_full_slots"]()
    graph = assemble(case.change, case.durations)
    for mode, rule in (("beside", "."), ("snapshot", "old bytes have no second holder|host")):
        emus = tuple(replace(emu, mode=mode) for emu in graph.change.emus)
        with pytest.raises(InvalidGraph, match=rule):
            check(replace(graph, change=replace(graph.change, emus=emus)))
    emus = tuple(replace(emu, checkpoint="") for emu in graph.change.emus)
    with pytest.raises(InvalidGraph, match="must name the checkpoint"):
        check(replace(graph, change=replace(graph.change, emus=emus)))


def test_guards_must_keep_what_they_guard() -> None:
    graph = graph_of("moe_ep_change")
    first = graph.change.residencies[0]
    others = (replace(first, guarded_bytes=24), *graph.change.residencies[1:])
    kept = sum(r.kept_bytes for r in graph.change.residencies[1:])
    assert kept >= 24  # the necessary condition of the totals holds, so the snapshot alone must not suffice
    assert check(replace(graph, change=replace(graph.change, residencies=others))).durability
    many = (replace(first, present_bytes=200, guarded_bytes=150), *graph.change.residencies[1:])
    with pytest.raises((InvalidGraph, ConfigError)):
        check(replace(graph, change=replace(graph.change, residencies=many)))


def test_groups_meet_in_one_order_on_every_slot() -> None:
    graph = graph_of("colocated_to_disaggregated")
    at = next(i for i, edges in enumerate(graph.edges) if edges.kind == "communicator")
    with pytest.raises(InvalidGraph, match="a communicator edge is missing"):
        check(
            replace(graph, edges=tuple(e if i != at else Edges(kind="communicator") for i, e in enumerate(graph.edges)))
        )


def test_an_engine_whose_processes_meet_is_one_operation() -> None:
    """Cut in two, its slots could come to it in orders that cross other meetings; shells are built slot by slot."""
    graph = graph_of("tp_change")
    (at,) = graph.by_kind["build_engine"]
    whole = graph.operations[at]
    assert whole.lanes == (0, 1, 2, 3)
    edges = []
    for some in graph.edges:
        into = [a for a, b in zip(some.before_index, some.after_index, strict=True) if b == at]
        out = [b for a, b in zip(some.before_index, some.after_index, strict=True) if a == at]
        more = [(a, len(graph.operations)) for a in into] + [(len(graph.operations), b) for b in out]
        before, after = (*some.before_index, *(a for a, _ in more)), (*some.after_index, *(b for _, b in more))
        edges.append(replace(some, before_index=before, after_index=after))
    parted = with_operation(graph, at, lanes=(0, 1))
    parted = replace(parted, operations=(*parted.operations, replace(whole, lanes=(2, 3))), edges=tuple(edges))
    with pytest.raises(InvalidGraph, match=r"build_engine:actor.train:2-3: its slots meet while they start"):
        check(parted)


def scene_change(**parts: object):
    return replace(NAMED["tp_change"]().change, **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"emus": (EmuChange(emu="a"), EmuChange(emu="a"))}, "each EMU once"),
        ({"emus": ()}, "an EMU and a lane of the change"),
        ({"residencies": (Residency(emu="actor.train", lane=0),) * 2}, "each EMU once on a lane"),
        ({"flows": ()}, r"kept .* \+ arriving 0 bytes to be the target's"),
        ({"flows": (Flow(emu="actor.train", source=0, destination=9, size_bytes=1),)}, "two different lanes"),
        ({"flows": (Flow(emu="actor.train", source=0, destination=1, size_bytes=0),)}, "size_bytes > 0"),
        ({"flows": (Flow(emu="actor.train", source=0, destination=1, size_bytes=99),)}, "at most 32 bytes"),
        ({"least_chunk_bytes": 0}, "least_chunk_bytes = 0: .*1 to chunk_bytes = 1,048,576"),
        ({"least_chunk_bytes": 2, "chunk_bytes": 1}, "1 to chunk_bytes = 1"),
        ({"chunk_bytes": 0}, "1 to chunk_bytes = 0"),
    ],
)
def test_wrong_changes_are_refused_by_name(parts: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        scene_change(**parts).validate()


def test_a_snapshot_needs_the_host_of_each_of_its_slots() -> None:
    case = NAMED["pp_change"]()
    hosts = {slot: host for slot, host in case.change.host_of.items() if slot != 2}
    change = replace(case.change, host_of=hosts)
    with pytest.raises(ConfigError, match=r"actor\.train on slot 2.*the lane of the slot's host memory"):
        assemble(change, case.durations)
    beside = replace(NAMED["tp_change"]().change, host_of={})
    assert check(assemble(beside, case.durations)).durability


def small(case: Scene, **capacity: int) -> Scene:
    room = {**case.change.capacity_bytes, **{(HOST if k == "host" else int(k[1:])): v for k, v in capacity.items()}}
    return replace(case, change=replace(case.change, capacity_bytes=room))


def test_what_cannot_be_is_infeasible_with_slot_phase_and_bytes() -> None:
    swap = NAMED["swap_of_two_models_between_full_slots"]()
    with pytest.raises(Infeasible, match="slot 1 in phase target: needs 12 bytes, 11 are free"):
        assemble(small(swap, s1=11).change, swap.durations)
    nowhere = {**dict.fromkeys(range(4), 12), HOST: 0, host_lane(1): 0}
    with pytest.raises(Infeasible, match=r"in phase order.*can give back only after.*to park a piece") as told:
        assemble(replace(swap.change, capacity_bytes=nowhere), swap.durations)
    assert told.value.phase == "order"
    assert {lane for lane, _ in told.value.cycle} <= set(range(4))
    pp = NAMED["pp_change"]()
    with pytest.raises(Infeasible, match="host0 in phase snapshot: needs 48 bytes, 40 are free"):
        assemble(small(pp, host=40).change, pp.durations)


def test_offloading_takes_its_bytes_of_host_memory_once() -> None:
    """No doubled pinned buffer: the host's peak is what it holds at the end (verl PR 6193), and a full host refuses."""
    back = NAMED["reference_back_from_host"]()
    away = scene(
        {"reference.infer": (back.after["reference.infer"], back.before["reference.infer"])},
        back.fleet,
        {0: 20, 1: 20, HOST: 32},
    )
    assert check(assemble(away.change, away.durations)).peak_bytes == {0: 16, 1: 16, HOST: 32}
    with pytest.raises(Infeasible, match="host0 in phase target: needs 32 bytes, 31 are free"):
        assemble(small(away, host=31).change, away.durations)


def test_ids_read_well() -> None:
    assert Operation(kind="transfer", emu="a", lanes=(0, 1), start=7, hop=2).id == "transfer:a:0>1:hop 2@7"
    assert Operation(kind="build_groups", emu="a", lanes=(0, 1, 2, 5, -1, -2)).id == "build_groups:a:0-2,5,host0,host1"
    assert Operation(kind="stage_in", emu="a", lanes=(0, 1), via=HOST).id == "stage_in:a:0>1:via host0"
    assert Operation(kind="commit").id == "commit"
