"""Transitions operation by operation: known makespans exactly, every named scene to its commit, losses at any moment."""

from __future__ import annotations

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.fleet import DEVICES, uniform
from nereus.sim.network import Network
from nereus.sim.transit import Transit
from nereus.sim.truth import Truth
from nereus.transitions.assemble import assemble
from nereus.transitions.change import Change, EmuChange, Flow, Residency
from nereus.transitions.durations import Durations, Tolls
from nereus.transitions.execution import Settled
from nereus.transitions.graph import TransitionGraph
from nereus.transitions.order import Infeasible
from nereus.transitions.timeline import timeline
from tests.core.changes import scenes
from tests.core.graph_scenes import NAMED

H100 = DEVICES["h100"]
EXACT = Truth(exact=True)


def carried(
    graph: TransitionGraph,
    durations: Durations,
    truth: Truth = EXACT,
    lost: tuple[float, tuple[int, ...]] | None = None,
    *,
    boundaries: int = 0,
    together_seconds: float = 0.0,
) -> tuple[Settled, float, Transit]:
    """The settlement of a graph, when it came, and the Transit; `boundaries` phases of 10 s come before the pause."""
    env = simpy.Environment()
    transit = Transit(env, graph, durations, Network(env, together_seconds=together_seconds), truth)
    if lost is not None:
        seconds, lanes = lost

        def strike():
            yield env.timeout(seconds)
            transit.lose(lanes, "struck")

        env.process(strike())

    def step():
        transit.begin()
        for _ in range(boundaries):
            yield env.timeout(10.0)
            yield from transit.boundary()
        yield from transit.pause()

    process = env.process(step())
    settled = env.run(transit.settled)
    if process.is_alive:
        env.run(process)
    assert isinstance(settled, Settled)
    return settled, env.now, transit


def one_move(size: int = 45 * 10**9, *, copies: int = 1) -> Change:
    """Slot 0 gives its state to `copies` others."""
    others = tuple(range(1, 1 + copies))
    return Change(
        emus=(EmuChange(emu="a"),),
        residencies=(
            Residency(emu="a", lane=0, present_bytes=size),
            *(Residency(emu="a", lane=slot, target_bytes=size) for slot in others),
        ),
        flows=tuple(Flow(emu="a", source=0, destination=slot, size_bytes=size) for slot in others),
        capacity_bytes=dict.fromkeys(range(8), 1 << 50),
        host_of={},
    )


@pytest.mark.parametrize("copies", [1, 3])
def test_a_transition_of_known_makespan(copies: int) -> None:
    """Allocate before the pause, quiesce; the copies share the sender's port; verify; commit; activate; release and the rest."""
    tolls = Tolls(rate_share=0.5)
    durations = Durations(fleet=uniform(8, H100), tolls=tolls)
    size = 45 * 10**9
    graph = assemble(one_move(size, copies=copies), durations)
    _, seconds, transit = carried(graph, durations)
    moved = tolls.move_seconds + copies * size / (0.5 * H100.link_bytes_per_second)
    verified = size / (0.5 * H100.memory_bytes_per_second * tolls.digest_share)
    ended = tolls.activate_seconds + tolls.release_seconds  # activate, then the old state goes; or the other way round
    start = tolls.allocate_seconds + tolls.quiesce_seconds
    least = start + moved + verified + tolls.commit_seconds + tolls.activate_seconds
    assert least - 1e-6 <= seconds <= start + moved + verified + tolls.commit_seconds + ended + 1e-6
    if copies == 1:
        assert seconds == pytest.approx(timeline(graph, durations).makespan_seconds, abs=1e-6)
    assert transit.moved_bytes == copies * size


def ring(slots: int, size: int) -> Change:
    residencies = tuple(Residency(emu="a", lane=s, present_bytes=size, target_bytes=size) for s in range(slots))
    flows = tuple(Flow(emu="a", source=s, destination=(s + 1) % slots, size_bytes=size) for s in range(slots))
    capacity = dict.fromkeys(range(slots), 1 << 50)
    return Change(emus=(EmuChange(emu="a"),), residencies=residencies, flows=flows, capacity_bytes=capacity, host_of={})


@pytest.mark.parametrize("per_node", [8, 1])
def test_a_ring_takes_what_its_schedule_says(per_node: int) -> None:
    durations = Durations(fleet=uniform(8, H100, slots_per_node=per_node))
    graph = assemble(ring(8, 10**10), durations)
    _, seconds, _ = carried(graph, durations)
    assert seconds == pytest.approx(timeline(graph, durations).makespan_seconds, abs=1e-6)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("boundaries", [0, 2])
def test_named_scenes_commit(name: str, boundaries: int) -> None:
    scene = NAMED[name]()
    graph = assemble(scene.change, scene.durations)
    settled, seconds, transit = carried(graph, scene.durations, boundaries=boundaries)
    assert settled.result == "committed"
    assert all(transit.execution.status(op.id) == "done" for op in graph.operations)
    if boundaries:
        assert seconds >= 10.0 * boundaries
        early = transit.place_seconds("interleaved")
        planned = any(op.place == "interleaved" and op.seconds for op in graph.operations)
        assert bool(early) == planned or not planned


@settings(max_examples=60, deadline=None)
@given(scenes(), st.floats(0, 1), st.data())
def test_losses_at_any_moment_settle(scene, share: float, data: st.DataObject) -> None:
    try:
        graph = assemble(scene.change, scene.durations)
    except Infeasible:
        return
    _, seconds, _ = carried(graph, scene.durations)
    lane = data.draw(st.sampled_from(sorted(scene.change.capacity_bytes)))
    settled, _, transit = carried(graph, scene.durations, lost=(share * seconds, (lane,)))
    assert settled.result in ("committed", "replan")
    if settled.result == "replan":
        assert lane in settled.lost
        assert (settled.version == "new") == transit.execution.committed


def test_spreads_change_times_and_repeat() -> None:
    durations = Durations(fleet=uniform(8, H100))
    graph = assemble(ring(8, 10**10), durations)
    exact, first, again = (carried(graph, durations, truth)[1] for truth in (EXACT, Truth(seed=3), Truth(seed=3)))
    assert first == again
    assert first != exact
