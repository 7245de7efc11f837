"""The process that searches beside the loop: a real one; its answers, and what is said when it dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from nereus.control.records import Search, SearchDone
from nereus.runtime.journal import Journal, read_journal
from nereus.runtime.searches import Searches, Seek
from nereus.runtime.stop import StopSignal
from nereus.transitions.durations import Tolls
from tests.core.test_proposals import CONFIG, ROOM, ground, request


@dataclass
class FewSlots:
    """A job as far as a search asks it: two slots on one host with the room that they say."""

    engine_seconds: dict[str, float] = field(default_factory=dict)
    tolls: Tolls = field(default_factory=Tolls)
    modes: dict[str, Any] = field(default_factory=dict)

    @property
    def pool(self) -> SimpleNamespace:
        return SimpleNamespace(hosts={0: 0, 1: 0}, call_all=lambda _: {0: ROOM, 1: ROOM})


@pytest.fixture
def searches(tmp_path: Path) -> Iterator[Searches]:
    journal = Journal(tmp_path / "events.jsonl")
    found = Searches(FewSlots(), journal)  # type: ignore[arg-type]
    yield found
    found.close()
    journal.close()


def seek(search_id: int) -> Seek:
    search = Search(search_id=search_id, request=request(8.0), budget_count=2000)
    return Seek(search=search, outlook=ground(CONFIG).outlook, ids=(0, 1), torn=False)


def answered(searches: Searches) -> SearchDone:
    found = searches.wait(120.0)
    assert found is not None
    return found


def test_answers_come_in_order_and_are_written_down(searches: Searches, tmp_path: Path) -> None:
    assert searches.poll() is None
    searches.begin(seek(1))
    searches.begin(seek(2))
    first, second = answered(searches), answered(searches)
    assert (first.search_id, second.search_id) == (1, 2)
    assert first.candidates == second.candidates != ()
    assert not searches.pending
    lines = [record for record in read_journal(tmp_path / "events.jsonl") if record["kind"] == "search_done"]
    assert [line["search_id"] for line in lines] == [1, 2]
    assert all(line["processor_seconds"] > 0 for line in lines)  # type: ignore[operator]


def test_a_dead_process_is_an_answer_without_candidates_and_the_next_search_has_a_new_one(searches: Searches) -> None:
    searches.start()
    process = searches._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.poll()
    searches._pending.append(1)  # asked just before it died
    found = answered(searches)
    assert found.candidates == ()
    assert "code -9" in found.reason
    searches.begin(seek(2))
    assert answered(searches).candidates


def test_closing_while_a_search_is_under_way_ends_its_process(searches: Searches) -> None:
    searches.begin(seek(1))
    process = searches._process
    assert process is not None
    assert process.poll() is None
    searches.close()
    assert process.poll() is not None
    assert searches.poll() is None
    searches.close()


def test_the_process_ends_with_the_driver_that_asked_it(searches: Searches) -> None:
    searches.begin(seek(1))
    process, searches._process = searches._process, None
    assert process is not None
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()  # as the kernel does for a driver that was killed
    process.stdout.close()
    assert process.wait(120.0) == 0


def test_a_user_who_stops_the_run_does_not_wait_for_an_answer(searches: Searches) -> None:
    searches.start()
    process = searches._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)  # no answer will come
    searches.begin(seek(1))
    with StopSignal() as stop:
        Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert searches.wait(120.0, lambda: stop.requested) is None
        assert searches.pending
        Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            searches.wait(120.0)
    searches.close()
    assert process.poll() is not None
    assert searches.seconds > 0
