"""Searches beside the loop: a process of their own, whose answers come at the next safe point."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from nereus.control.outlook import JobOutlook
from nereus.control.proposals import Ground, Proposal
from nereus.control.records import Search, SearchDone
from nereus.errors import NereusError
from nereus.runtime.job import Job
from nereus.runtime.journal import Journal
from nereus.runtime.search_process import Answer, receive, send
from nereus.transitions.planned import SlotRoom

LOOK_SECONDS = 0.25
"""So often a wait for an answer looks whether the user wants the run to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seek:
    """Carry out a search; `outlook` and the request speak of slots by the numbers in `ids`, the pool's slot i is ids[i].

    With `torn` the slots cannot be asked: what was last known of them counts.
    """

    search: Search
    outlook: JobOutlook
    ids: tuple[int, ...]
    torn: bool


class Searches:
    """The process and what it was asked. `poll` never waits, `wait` does; `close` ends the process.

    `seconds` is what asking, polling and waiting took of the caller; `processor_seconds` what the answered searches took
    of the process's processor, its imports included.
    """

    def __init__(self, job: Job, journal: Journal) -> None:
        self._job, self._journal = job, journal
        self._room: Mapping[int, SlotRoom] = {}
        self._pending: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.seconds = 0.0
        self.processor_seconds = 0.0

    def start(self) -> None:
        """Starts the process, so that its imports are done when the first search comes."""
        if self._process is None or self._process.poll() is not None:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nereus.runtime.search_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # nothing stays in a buffer that `select` does not see
                env=environment,
                start_new_session=True,  # a signal to the run's group reaches the driver, which ends this one
            )

    def begin(self, seek: Seek) -> None:
        """Asks. The slots are asked for their room, which takes milliseconds."""
        with self._counted():
            self._ask(seek)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def _ask(self, seek: Seek) -> None:
        if not seek.torn:
            self._room = {seek.ids[slot]: room for slot, room in self._job.pool.call_all("room").items()}
        request = seek.search.request
        ground = Ground(
            outlook=seek.outlook,
            room=self._room,
            hosts={seek.ids[slot]: host for slot, host in self._job.pool.hosts.items() if slot < len(seek.ids)},
            engine_seconds=dict(self._job.engine_seconds),
            tolls=self._job.tolls,
            modes=dict(self._job.modes),
        )
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._pending.append(seek.search.search_id)
        try:
            send(self._process.stdin, (seek.search.search_id, request, ground, seek.search.budget_count))  # type: ignore[arg-type]
        except BrokenPipeError:
            return  # `poll` finds it ended

    @property
    def pending(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._pending)

    def poll(self) -> SearchDone | None:
        """The next answer, where it is there."""
        return self._taken(0.0)

    def wait(self, timeout_seconds: float, unless: Callable[[], bool] = lambda: False) -> SearchDone | None:
        """The next answer; None as soon as `unless` holds. NereusError when it does not come in time."""
        deadline = time.monotonic() + timeout_seconds
        while not unless():
            left = deadline - time.monotonic()
            found = self._taken(max(0.0, min(LOOK_SECONDS, left)))
            if found is not None:
                return found
            if left <= 0:
                raise NereusError(f"a search for a plan did not end within {timeout_seconds:.0f} s")
        return None

    def _taken(self, timeout_seconds: float) -> SearchDone | None:
        if not self._pending or self._process is None or self._process.stdout is None:
            return None
        with self._counted():
            ready, _, _ = select.select([self._process.stdout], [], [], timeout_seconds)
            if not ready:
                return None
            found = cast("Answer | None", receive(self._process.stdout))  # type: ignore[arg-type]
            if found is None:
                code = self._process.wait()
                self._process = None
                return self._done(self._pending[0], f"the searching process ended with code {code}", 0.0, 0.0, 0.0)
            return self._done(*found)

    def _done(
        self, search_id: int, found: Proposal | str, seconds: float, processor_seconds: float, between_seconds: float
    ) -> SearchDone:
        self._pending.remove(search_id)
        self.processor_seconds += processor_seconds + between_seconds
        failed = isinstance(found, str)
        self._journal.append(
            "search_done",
            search_id=search_id,
            seconds=seconds,
            processor_seconds=processor_seconds,
            between_processor_seconds=between_seconds,
            evaluated_count=0 if failed else found.evaluated_count,
            priced_count=0 if failed else found.priced_count,
            finished=not failed and found.finished,
            error=found if failed else "",
        )
        answer = SearchDone(at_seconds=time.time(), search_id=search_id, candidates=())
        if isinstance(found, str):
            return replace(answer, reason=f"the search failed: {found}")
        return replace(answer, candidates=found.candidates, band=found.band, reason=found.reason)

    def close(self) -> None:
        """Ends the process; safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
