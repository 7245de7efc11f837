"""Drivers that die: each command line of `nereus` in a process of its own, killed with -9 where it is told.

    python -m tests.live.dying '[["commit 1", ["train", "job.yaml"]], ["", ["resume", "runs/job"]]]'

"KIND N" strikes when the driver has written the N-th line of that kind into the journal, "METHOD N" when it has called
that method on the slots for the N-th time and they work; of "A 1, B 2" what is counted last strikes, once the others have
been. "" strikes never. The imports are made once, before the processes part. Prints how each ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray

from nereus.cli.main import main
from nereus.runtime import run
from nereus.runtime.journal import Journal
from nereus.runtime.pool import SlotPool


def strike_at(places: str) -> None:
    """Plants the kill in this process."""
    ahead = [(word, int(number)) for word, number in (place.split() for place in places.split(", "))]
    seen: Counter[str] = Counter()
    append, wait = Journal.append, ray.wait

    def strikes(kind: str) -> bool:
        if not ahead or kind != ahead[0][0]:
            return False
        seen[kind] += 1
        if seen[kind] == ahead[0][1]:
            ahead.pop(0)
            return not ahead
        return False

    def appending(journal: Journal, kind: str, **fields: Any) -> int:
        line = append(journal, kind, **fields)
        if strikes(kind):
            os.kill(os.getpid(), signal.SIGKILL)
        return line

    def calling(call: Callable[..., Any], at: int) -> Callable[..., Any]:
        def called(pool: SlotPool, *arguments: Any, **named: Any) -> Any:
            if strikes(arguments[at]):
                ray.wait = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
            try:
                return call(pool, *arguments, **named)
            finally:
                ray.wait = wait

        return called

    Journal.append = appending  # type: ignore[method-assign]
    SlotPool.gather = calling(SlotPool.gather, 0)  # type: ignore[method-assign]
    SlotPool._collect = calling(SlotPool._collect, 0)  # type: ignore[method-assign]


def carried_out(strike: str, words: list[str]) -> int:
    """The exit code of a command line in a process of its own, below 0 where a signal ended it."""
    child = os.fork()
    if child == 0:
        if strike:
            strike_at(strike)
        code = main(words)
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    assert run.run_job, "imported before the processes part"
    for strike, words in json.loads(sys.argv[1]):
        print(f"== {strike or 'nothing strikes'}: {' '.join(words)}", flush=True)
        print(f"== ended with {carried_out(strike, words)}", flush=True)
