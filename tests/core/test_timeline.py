"""The list schedule and the price: patterns at their bound, the scale of 1,024 slots, what the error bar is made of."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from math import sqrt

import pytest

from nereus.fleet import DEVICES, Device, Fleet, Node, uniform
from nereus.transitions.assemble import assemble
from nereus.transitions.change import Change, EmuChange, Flow, Residency
from nereus.transitions.durations import Durations, Tolls
from nereus.transitions.graph import MOVES
from nereus.transitions.order import host_lane
from nereus.transitions.price import critical_chain, least_seconds, price
from nereus.transitions.proof import check
from nereus.transitions.timeline import timeline
from tests.core.graph_scenes import NAMED

FREE = Tolls(
    quiesce_seconds=0,
    allocate_seconds=0,
    release_seconds=0,
    move_seconds=0,
    activate_seconds=0,
    commit_seconds=0,
    rate_share=1.0,
    digest_share=1e9,
)


def moves(pairs: list[tuple[int, int]], fleet: Fleet, size_bytes: int) -> Change:
    """Every slot has one piece for each of its pairs; nothing is dropped before the commit."""
    flows = tuple(Flow(emu="a", source=s, destination=d, size_bytes=size_bytes) for s, d in pairs)
    residencies = tuple(
        Residency(
            emu="a",
            lane=slot,
            present_bytes=size_bytes * sum(s == slot for s, _ in pairs),
            target_bytes=size_bytes * sum(d == slot for _, d in pairs),
        )
        for slot in fleet.slots
    )
    return Change(
        emus=(EmuChange(emu="a"),),
        residencies=residencies,
        flows=flows,
        capacity_bytes=dict.fromkeys(fleet.slots, 1 << 50),
        host_of={},
    )


@pytest.mark.parametrize(
    ("pairs", "rounds"),
    [
        ([(i, (i + 1) % 8) for i in range(8)], 1),
        ([(0, i) for i in range(1, 8)], 7),
        ([(i, 7) for i in range(7)], 7),
        ([(a, b) for a in range(4) for b in range(4) if a != b], 3),
    ],
    ids=["ring-8", "scatter-7", "gather-7", "all-to-all-4"],
)
@pytest.mark.parametrize("per_node", [8, 1])
def test_equal_pieces_take_their_rounds(pairs: list[tuple[int, int]], rounds: int, per_node: int) -> None:
    fleet = uniform(8, DEVICES["h100"], slots_per_node=per_node)
    durations = Durations(fleet=fleet, tolls=FREE)
    graph = assemble(moves(pairs, fleet, 10**9), durations)
    check(graph)
    rate = (fleet.link_rates if per_node == 8 else fleet.nic_rates)[0]
    (window,) = (w for w in timeline(graph, durations).windows if w.place == "pause")
    assert window.moves_seconds == pytest.approx(rounds * 1e9 / rate)
    assert window.moves_seconds == pytest.approx(window.moves_bound_seconds)


def test_a_network_port_shared_by_slots_is_the_bottleneck() -> None:
    """Two nodes of two slots and one port each: two moves across share the port, two inside do not."""
    device: Device = DEVICES["h100"]
    fleet = Fleet(nodes=tuple(Node(slots=(2 * n, 2 * n + 1), device=device, nics=1) for n in range(2)))
    durations = Durations(fleet=fleet, tolls=FREE)
    size, port = 10**9, 2 * device.nic_bytes_per_second
    across = timeline(assemble(moves([(0, 2), (1, 3)], fleet, size), durations), durations)
    assert across.makespan_seconds == pytest.approx(2 * size / port)
    inside = timeline(assemble(moves([(0, 1), (1, 0)], fleet, size), durations), durations)
    assert inside.makespan_seconds == pytest.approx(size / device.link_bytes_per_second)
    assert across.windows[-1].busiest.startswith("net port")


def test_host_memory_goes_over_pcie_and_another_node_over_the_network() -> None:
    fleet = uniform(4, DEVICES["a100"], slots_per_node=2)
    durations = Durations(fleet=fleet, tolls=FREE)
    near, far = durations.legs(0, host_lane(0)), durations.legs(0, host_lane(1))
    assert [durations.resource_name(r) for r, _ in near] == ["slot 0 pcie out", "host 0"]
    assert [durations.resource_name(r) for r, _ in far] == ["net port 0 out", "net port 2 in", "host 1"]
    assert durations.move_seconds(0, host_lane(0), 31 * 10**9) == pytest.approx(1.0)


def test_a_move_holds_each_of_its_resources_once() -> None:
    """Over every pair of lanes, a lane and itself included; slots with a network port each, and sharing one."""
    device = DEVICES["h100"]
    for nics in (0, 1):
        fleet = Fleet(nodes=tuple(Node(slots=(2 * n, 2 * n + 1), device=device, nics=nics) for n in range(2)))
        durations = Durations(fleet=fleet)
        lanes = (*fleet.slots, host_lane(0), host_lane(1))
        for source, destination in product(lanes, lanes):
            resources = [resource for resource, _ in durations.legs(source, destination)]
            assert len(set(resources)) == len(resources) > 0, (source, destination)


def test_what_is_parked_where_it_is_needed_is_read_and_written_there() -> None:
    """Slot 0 is full and lays its bytes out anew by way of its host, which needs them too: a move from host to host.

    The host serves 1 GB in 1 s: the parking 1 s, reading and writing 2 s, the slot's copy from there 1 s, one by one.
    """
    host, size = host_lane(0), 10**9
    slot = Residency(emu="a", lane=0, present_bytes=size, target_bytes=size, kept_bytes=size, copied_bytes=size)
    change = Change(
        emus=(EmuChange(emu="a", mode="checkpoint", checkpoint="state version 7"),),
        residencies=(Residency(emu="a", lane=host, present_bytes=0, target_bytes=size), slot),
        flows=(Flow(emu="a", source=0, destination=host, size_bytes=size),),
        capacity_bytes={0: size, host: 2 * size},
        host_of={0: host},
        chunk_bytes=size,
    )
    durations = Durations(fleet=uniform(1), tolls=FREE, host_bytes_per_second=1e9)
    graph = assemble(change, durations)
    check(graph)
    (number,) = (i for i, op in enumerate(graph.operations) if op.via == host and op.lanes[-1] == host)
    move = graph.operations[number]
    assert [(durations.resource_name(r), busy) for r, busy in durations.holds(move)] == [("host 0", 2 * 10**9)]
    assert move.seconds == pytest.approx(durations.seconds("copy", (host,), size))
    window = timeline(graph, durations).windows[-1]
    assert (window.moves_seconds, window.moves_bound_seconds) == (4.0, 4.0)
    assert window.bound_seconds <= window.seconds


def test_a_slot_that_builds_an_engine_moves_nothing_meanwhile() -> None:
    case = NAMED["tp_change"]()
    change = replace(case.change, early=("allocate",))  # groups and engines in the pause
    graph = assemble(change, case.durations)
    check(graph)
    schedule = timeline(graph, case.durations)
    spans = [
        (start, end, set(graph.operations[i].lanes), graph.operations[i].kind in MOVES)
        for i, start, end in schedule.spans
        if graph.operations[i].kind in (*MOVES, "build_engine", "build_groups", "verify", "quiesce")
    ]
    for a in spans:
        for b in spans:
            if a is not b and a[2] & b[2] and not (a[3] and b[3]):
                assert a[1] <= b[0] + 1e-9 or b[1] <= a[0] + 1e-9
    assert schedule.seconds_in("interleaved") < schedule.seconds_in("pause")


def test_the_error_bar_adds_within_a_kind_and_squares_between_kinds() -> None:
    case = NAMED["tp_change"]()
    tolls = Tolls(deviation_share={"build_engine": 0.3, "build_groups": 0.4, "quiesce": 0.1})
    durations = replace(case.durations, tolls=tolls)
    graph = assemble(case.change, durations)
    schedule = timeline(graph, durations)
    kinds = [graph.operations[i].kind for i in critical_chain(graph, schedule)]
    assert {"build_engine", "build_groups", "quiesce", "commit", "activate"} <= set(kinds)
    expected = sqrt((0.3 * 0.5) ** 2 + (0.4 * 2 * tolls.group_seconds) ** 2 + (0.1 * tolls.quiesce_seconds) ** 2)
    assert price(graph, durations, schedule).deviation_seconds == pytest.approx(expected)


def test_what_is_outside_of_steps_is_priced_apart() -> None:
    """Groups are the first thing that happens here: outside, they cost the job nothing and hold no port."""
    case = NAMED["tp_change"]()
    graph = assemble(case.change, case.durations)
    before = price(graph, case.durations)
    (groups,) = graph.by_kind["build_groups"]
    outside = replace(graph.operations[groups], place="outside")
    graph = replace(graph, operations=(*graph.operations[:groups], outside, *graph.operations[groups + 1 :]))
    check(graph)
    assert case.durations.holds(outside) == []
    found = price(graph, case.durations)
    assert found.outside_seconds == pytest.approx(outside.seconds) == pytest.approx(1.0)
    assert found.seconds == pytest.approx(found.pause_seconds + found.interleaved_seconds)
    assert found.seconds == pytest.approx(before.seconds - 1.0)
    assert before.outside_seconds == 0


def test_more_bandwidth_never_costs_more() -> None:
    case = NAMED["swap_of_two_models_between_full_slots"]()
    big = replace(case, fleet=replace(case.fleet))
    prices = []
    for share in (0.2, 0.5, 1.0):
        durations = replace(big.durations, tolls=Tolls(rate_share=share))
        prices.append(price(assemble(case.change, durations), durations).seconds)
    assert prices == sorted(prices, reverse=True)


def large_scene(slots: int = 1024) -> tuple[Change, Fleet]:
    """Four models of 8B (16 bytes a parameter for two, 2 for two) each cut anew over all slots, 6 sources a slot."""
    fleet = uniform(slots, DEVICES["h100"])
    flows: list[Flow] = []
    residencies: list[Residency] = []
    sizes = {
        "actor.train": 125_000_000,
        "critic.train": 125_000_000,
        "reference.infer": 15_600_000,
        "actor.generate": 15_600_000,
    }
    for number, (emu, size) in enumerate(sizes.items()):
        for slot in range(slots):
            pieces = [size * part // 21 for part in (1, 2, 3, 4, 5, 6)]
            for at, piece in enumerate(pieces):
                source = (slot + (at + 1) * (8 * number + 3)) % slots
                flows.append(Flow(emu=emu, source=source, destination=slot, size_bytes=piece))
            residencies.append(Residency(emu=emu, lane=slot, present_bytes=size, target_bytes=sum(pieces)))
    emus = tuple(EmuChange(emu=emu, old_groups=4, new_groups=4, engine_seconds=8.0) for emu in sizes)
    host_of = {slot: host_lane(slot // 8) for slot in range(slots)}
    room = dict.fromkeys(range(slots), 70 << 30) | dict.fromkeys(host_of.values(), 1 << 40)
    change = Change(
        emus=emus,
        residencies=tuple(residencies),
        flows=tuple(flows),
        capacity_bytes=room,
        host_of=host_of,
        phase_bytes=dict.fromkeys(range(slots), 40 << 30),
    )
    return change, fleet


def scale(slots: int) -> tuple[str, float, float, float]:
    """Build, check and schedule of `large_scene`: a line to print, CPU seconds, moves over their bound, gap."""
    change, fleet = large_scene(slots)
    durations = Durations(fleet=fleet)
    began = time.process_time()
    graph = assemble(change, durations)
    built = time.process_time()
    check(graph)
    checked = time.process_time()
    schedule = timeline(graph, durations)
    done = time.process_time()
    alone = Durations(fleet=fleet, tolls=FREE)
    bare = timeline(assemble(change, alone), alone).windows[-1]
    ratio = bare.moves_seconds / bare.moves_bound_seconds
    assert least_seconds(change, durations) <= price(graph, durations, schedule).seconds
    line = (
        f"{slots} slots, {len(change.flows)} flows, {len(graph.operations)} operations: build {built - began:.2f}, check "
        f"{checked - built:.2f}, schedule {done - checked:.2f} s of CPU time; moves {ratio:.3f} x their bound; all "
        f"{schedule.makespan_seconds:.2f} s, bound {schedule.bound_seconds:.2f} s, gap {schedule.gap_ratio:.4f}"
    )
    return line, done - began, ratio, schedule.gap_ratio


def test_a_fleet_and_four_models() -> None:
    """256 slots here, 1,024 in bench_transition (target 2 s there)."""
    line, _, ratio, gap = scale(256)
    print(line)
    assert ratio <= 1.05
    assert gap <= 1.25
