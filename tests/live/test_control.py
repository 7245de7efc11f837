"""The control thread: it answers while its slot computes, ends what the slot does, and tells a stopped slot from a busy one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nereus.config import FleetConfig, RunConfig, WarmupConfig
from nereus.errors import NereusError
from nereus.runtime.control import AT_REST, Contact, SlotAborted, SlotStatus, ask
from nereus.runtime.journal import read_journal
from nereus.runtime.pool import SlotPool, _kill
from nereus.transitions.programs import Task
from tests.live.scene import S, changes, config, run_job

WAIT_SECONDS = 30.0


def compute(_: Any, seconds: float, until: str = "") -> None:
    """Keeps the slot's thread in torch; no longer than the file is missing that is named."""
    square, end = torch.rand(400, 400), time.monotonic() + seconds
    while time.monotonic() < end and not (until and Path(until).exists()):
        square = torch.softmax(square @ square, dim=0)


def long_program(slot: Any) -> None:
    """Tasks for a minute, as a program of a change has them."""
    for _ in range(1200):
        slot.before_task(Task(kind="copy", emu="actor.train", operation_ids=()))
        time.sleep(0.05)


def long_phase(slot: Any) -> None:
    """Micro-batches for a minute."""
    module = torch.nn.Linear(1, 1)
    with slot.control.before_each(module):
        for _ in range(1200):
            module(torch.zeros(1))
            time.sleep(0.05)


@contextmanager
def busy(
    pool: SlotPool, slots: tuple[int, ...], function: Callable[..., None], *given: object
) -> Iterator[Future[Any]]:
    """While inside the slots are in `function`, as their status says."""
    pool.call("apply", dict.fromkeys(slots, (compute, 0.0)))  # each imports this module, and not at the same pace
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(pool.gather, "apply", dict.fromkeys(slots, (function, *given)), lambda _: False)
        wait_until(pool, slots, lambda told: told.phase == "apply")
        yield done


def wait_until(pool: SlotPool, slots: tuple[int, ...], reached: Callable[[SlotStatus], bool]) -> None:
    """Returns when the status of each slot has `reached`."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not all(told is not None and reached(told) for told in pool.status(slots).values()):
        assert time.monotonic() < deadline, pool.status()
        time.sleep(0.01)


def niceness(_: Any) -> int:
    """Of the slot's process."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_slots_are_as_urgent_as_their_driver(pool: SlotPool) -> None:
    """Ray would start them at niceness 15, behind everything else on the host."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert set(pool.call_all("apply", niceness).values()) == {own}


def test_it_answers_while_the_slot_computes(pool: SlotPool, tmp_path: Path) -> None:
    with busy(pool, (0, 1), compute, 60.0, str(tmp_path / "enough")) as done:
        started = time.monotonic()
        found, memory = pool.status(), pool.memory()
        took = time.monotonic() - started
        assert took < 1 or os.environ.get("NEREUS_TESTS_BESIDE"), "a second for two questions to four slots"
        assert not done.done()
        (tmp_path / "enough").touch()
    assert [told.phase for told in found.values() if told] == ["apply", "apply", AT_REST, AT_REST]
    assert {slot: told.pid for slot, told in found.items() if told} == pool.pids
    ledgers = pool.call_all("memory")
    for slot, told in memory.items():
        assert told is not None
        assert told.ledger_bytes == sum(ledgers[slot].held.values())
        assert told.resident_bytes > 100 << 20, "the engines' imports alone"


@pytest.mark.parametrize("function", [long_program, long_phase])
def test_an_abort_ends_what_is_long_with_its_reason(pool: SlotPool, function: Callable[..., None]) -> None:
    assert pool.abort("nobody is in a call") == ()
    with busy(pool, (1, 3), function) as done:
        assert pool.abort("the plan is out of date") == (1, 3)
        found = done.result(timeout=5)
    for slot, error in found.items():
        assert isinstance(error, SlotAborted)
        assert f"slot {slot} was aborted" in str(error)
        assert "the plan is out of date" in str(error)
    pool.call("apply", {1: (compute, 0.0), 3: (compute, 0.0)})  # it concerned that call alone


def test_a_stopped_slot_is_lost_and_a_busy_one_is_not(pool: SlotPool) -> None:
    os.kill(pool.pids[2], signal.SIGSTOP)
    try:
        with busy(pool, (1,), compute, 5.0):
            assert pool.lost(silent_seconds=1.0) == (2,)
    finally:
        os.kill(pool.pids[2], signal.SIGCONT)
    assert pool.lost() == ()


def test_a_lost_process_is_ended_only_where_it_is_stopped(pool: SlotPool) -> None:
    assert pool.pids
    words = [sys.executable, "-c", "input()", "SlotActor"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        contact = Contact(pid=process.pid, address="127.0.0.1", port=1, key="")
        _kill(contact)
        assert process.poll() is None, "another process may have a dead slot's number"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # it has stopped
        _kill(contact)
        assert process.wait(timeout=5) == -signal.SIGKILL


def test_a_phase_that_is_late_says_what_each_slot_does(pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_timeout_seconds", 0.5)
    with pytest.raises(
        NereusError, match=r"slots \[0\] did not finish apply within 0 s\n  slot 0 .*: apply for [01] s"
    ):
        pool.call("apply", {0: (compute, 2.0)})
    wait_until(pool, (0,), lambda told: told.phase == AT_REST)


def test_only_who_has_the_key_is_answered(pool: SlotPool) -> None:
    contact = pool.contacts[0]
    assert ask(replace(contact, key="00" * 32), {"ask": "abort", "reason": "a stranger's"}, 2.0) is None
    assert ask(contact, {"ask": "nothing"}, 2.0) is None
    with socket.create_connection((contact.address, contact.port)):  # says nothing
        pass
    assert ask(contact, {"ask": "status"}, 5.0)["slot"] == 0
    assert ask(Contact(pid=0, address="127.0.0.1", port=1, key="00"), {"ask": "status"}, 1.0) is None, "nobody listens"


def test_an_abort_in_mid_change_leaves_the_plan_before_it(pool: SlotPool, tmp_path: Path) -> None:
    """All slots come out of the program, the change is undone, and the run goes on to its end."""
    made = config(
        run=RunConfig(name="abort", seed=4, steps=2),
        warmup=WarmupConfig(steps=1, samples=8),
        fleet=FleetConfig(slots=4),
        changes=changes((2, {"actor_train": S(pp=2, dp=2)})),
    )
    hit: list[tuple[int, ...]] = []

    def abort() -> None:
        wait_until(pool, (0,), lambda told: told.task.startswith("transfer"))
        hit.append(pool.abort("the test says so"))

    watching = threading.Thread(target=abort)
    watching.start()
    world = run_job(pool, made, tmp_path, faults={0: ("sleep 1", "transfer", "")})
    watching.join()
    events: list[Any] = list(read_journal(world.folder.events))
    (failed,) = (event for event in events if event["kind"] == "transition_failed")
    assert 0 in hit[0]
    assert "the test says so" in failed["reason"]
    assert [event["step"] for event in events if event["kind"] == "step_done"] == [1, 2]
    assert events[-1]["reason"] == "done"
    assert world.job.state_version == 0
