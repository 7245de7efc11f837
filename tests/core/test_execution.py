"""Executions: whatever ends in whatever order, a transition settles, within memory, and no committed byte is lost."""

from __future__ import annotations

import random
import time
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.errors import InvalidEvent
from nereus.transitions.assemble import assemble
from nereus.transitions.durations import Durations
from nereus.transitions.execution import (
    Cancel,
    Execution,
    LanesLost,
    OperationDone,
    OperationFailed,
    PauseBegun,
    Settled,
    Start,
)
from nereus.transitions.holders import InvalidGraph
from nereus.transitions.order import host_lane
from tests.core.bench_transition import seeded
from tests.core.graph_scenes import HOST, NAMED
from tests.core.settling import Trial, trial
from tests.core.test_timeline import large_scene


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([0, 12, 40, 150]))
def test_every_transition_settles_and_loses_nothing(data: st.DataObject, faults: int) -> None:
    trial(lambda low, high: data.draw(st.integers(low, high)), faults)


@pytest.mark.parametrize("name", NAMED)
def test_named_scenes_end_committed(name: str) -> None:
    settled = Trial(NAMED[name](), lambda low, _: low, faults=0).run()
    assert (settled.result, settled.version, settled.lost) == ("committed", "new", ())
    assert set(settled.sources.values()) == {"new"}


@pytest.mark.parametrize(
    "broken", [AssertionError("a rule"), InvalidGraph("a rule"), InvalidEvent("a rule"), KeyError("x")]
)
def test_a_rule_that_breaks_names_its_seed(broken: Exception) -> None:
    def run(rng: random.Random) -> Counter[str]:
        raise broken

    with pytest.raises(AssertionError, match=f"seed 7: {type(broken).__name__}: "):
        seeded(7, run)
    assert seeded(7, lambda rng: Counter({"drawn": rng.randint(0, 99)})) == {"drawn": random.Random(7).randint(0, 99)}


def test_a_large_transition_is_driven_in_time() -> None:
    """8,000 operations: every event costs what it changes, not what there is."""
    change, fleet = large_scene(128)
    execution = Execution(assemble(change, Durations(fleet=fleet)))
    running = deque(execution.begin())
    began = time.process_time()
    running.extend(execution.handle(PauseBegun()))
    while execution.settled is None:
        command = running.popleft()
        assert isinstance(command, Start)
        running.extend(execution.handle(OperationDone(operation_id=command.operation.id)))
    assert execution.settled.result == "committed"
    assert time.process_time() - began < 5


class Driven:
    """A named scene's execution, driven by ids."""

    def __init__(self, name: str) -> None:
        case = NAMED[name]()
        self.execution = Execution(assemble(case.change, case.durations))
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.take(self.execution.begin())

    def take(self, commands) -> None:
        for command in commands:
            if isinstance(command, Start):
                self.started.append(command.operation.id)
            elif isinstance(command, Cancel):
                self.cancelled.append(command.operation.id)

    def until(self, name: str) -> None:
        """Ends everything else that starts, in order, until the operation runs and nothing else does."""
        self.take(self.execution.handle(PauseBegun()))
        while any(name not in some for some in self.started) or not self.started:
            at = next(i for i, some in enumerate(self.started) if name not in some)
            self.take(self.execution.handle(OperationDone(operation_id=self.started.pop(at))))
        assert self.started

    @property
    def settled(self) -> Settled:
        assert self.execution.settled is not None
        return self.execution.settled


def test_nothing_of_the_pause_starts_before_it() -> None:
    run = Driven("tp_change")
    early = list(run.started)
    assert {name.split(":")[0] for name in early} == {"allocate", "build_groups"}
    while run.started:
        run.take(run.execution.handle(OperationDone(operation_id=run.started.pop(0))))
    assert run.execution.early_left_count == 0
    run.take(run.execution.handle(PauseBegun()))
    assert {name.split(":")[0] for name in run.started} == {"quiesce"}


def test_a_failure_before_the_commit_rolls_back_when_all_that_ran_has_ended() -> None:
    run = Driven("tp_change")
    run.take(run.execution.handle(PauseBegun()))
    running = list(run.started)
    run.take(run.execution.handle(OperationFailed(operation_id=running[0], reason="no memory")))
    assert run.cancelled == [
        run.execution.graph.ids[i] for i in sorted(map(run.execution.graph.ids.index, running[1:]))
    ]
    assert run.execution.settled is None
    for name in running[1:-1]:
        run.take(run.execution.handle(OperationFailed(operation_id=name, reason="cancelled")))
    assert run.execution.settled is None
    run.take(run.execution.handle(OperationDone(operation_id=running[-1])))
    assert (run.settled.result, run.settled.version) == ("rolled_back", "old")
    assert run.settled.reason == f"{running[0]}: no memory"
    assert run.settled.sources == {"actor.train": "old"}


@pytest.mark.parametrize(
    ("scene", "until", "source"),
    [
        ("tp_change", "verify:actor.train:3", "old"),
        ("pp_change", "secure", "old"),
        ("pp_change", "verify", "snapshot"),
        ("swap_of_two_models_between_full_slots", "verify", "held"),
        ("moe_ep_change", "commit", "snapshot"),
    ],
)
def test_after_a_failure_sources_say_where_the_old_bytes_are(scene: str, until: str, source: str) -> None:
    run = Driven(scene)
    run.until(until)
    for name in list(run.started):
        run.take(run.execution.handle(OperationFailed(operation_id=name, reason="timeout")))
    assert run.settled.result == "rolled_back"
    assert run.settled.sources["actor.train"] == source


@pytest.mark.parametrize(
    ("scene", "until", "lanes", "source"),
    [
        ("tp_change", "verify", (0,), "survivors"),  # one half of each of two replicas: neither keeps what slot 0 had
        ("pp_change", "secure", (1,), "snapshot"),
        ("pp_change", "verify", (1,), "snapshot"),
        ("pp_change", "verify", (1, HOST), "survivors"),
        ("moe_ep_change", "verify", (3,), "snapshot"),
        ("swap_of_two_models_between_full_slots", "verify", (2,), "survivors"),
        ("reference_back_from_host", "verify", (1,), "old"),
        ("dp_shrink_with_a_lost_slot", "verify", (host_lane(1), 3), "survivors"),
    ],
)
def test_a_lost_slot_before_the_commit_leaves_the_old_version(
    scene: str, until: str, lanes: tuple[int, ...], source: str
) -> None:
    run = Driven(scene)
    run.until(until)
    run.take(run.execution.handle(LanesLost(lanes=lanes, reason="killed")))
    for name in run.started:
        if run.execution.status(name) == "running":
            run.take(run.execution.handle(OperationFailed(operation_id=name, reason="peer gone")))
        elif run.execution.settled is None:
            run.take(run.execution.handle(OperationFailed(operation_id=name, reason="late news of what is gone")))
    assert (run.settled.result, run.settled.version) == ("replan", "old")
    assert run.settled.lost == tuple(sorted(lanes))
    assert next(iter(run.settled.sources.values())) == source


def test_while_the_commit_is_recorded_its_answer_decides() -> None:
    for event, version in ((OperationDone(operation_id="commit"), "new"), (None, "old")):
        run = Driven("tp_change")
        run.until("commit")
        run.take(run.execution.handle(LanesLost(lanes=(0,), reason="killed")))
        assert run.cancelled == []
        assert run.execution.settled is None
        run.take(run.execution.handle(event or OperationFailed(operation_id="commit", reason="disk full")))
        assert (run.settled.result, run.settled.version) == ("replan", version)


def test_a_failure_after_the_commit_keeps_the_new_version() -> None:
    run = Driven("tp_change")
    run.until("activate")
    for name in list(run.started):
        run.take(run.execution.handle(OperationFailed(operation_id=name, reason="no engine")))
    assert (run.settled.result, run.settled.version) == ("replan", "new")
    assert run.settled.sources == {"actor.train": "new"}


def test_events_that_cannot_be_are_refused_with_the_story() -> None:
    run = Driven("tp_change")
    with pytest.raises(InvalidEvent, match="no operation transfer:x in this transition; last events: none"):
        run.execution.handle(OperationDone(operation_id="transfer:x"))
    with pytest.raises(InvalidEvent, match="commit is waiting, so it cannot end now"):
        run.execution.handle(OperationDone(operation_id="commit"))
    with pytest.raises(InvalidEvent, match="slot 9 is not a lane"):
        run.execution.handle(LanesLost(lanes=(9,), reason="x"))
    run.execution.handle(PauseBegun())
    with pytest.raises(InvalidEvent, match=r"begun already; last events: PauseBegun\(\)"):
        run.execution.handle(PauseBegun())
    name = run.started[0]
    run.execution.handle(OperationDone(operation_id=name))
    with pytest.raises(InvalidEvent, match="is done, so it cannot end now"):
        run.execution.handle(OperationDone(operation_id=name))
