"""Ctrl-C and SIGTERM: the first asks the run to stop at its next safe point, the second interrupts it."""

from __future__ import annotations

import os
import signal
from types import TracebackType
from typing import Self

NOTICE = b"\nstopping after this step (again to stop now)\n"
STDERR = 2


class StopSignal:
    """Whether the user asked to stop. As a context it holds SIGINT and SIGTERM; main thread only.

    The first signal sets `requested` and says so on stderr; a second raises KeyboardInterrupt in the main thread.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self.hold()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def hold(self) -> None:
        """Take both signals, again if need be: `ray.init` puts its own handler on SIGTERM, so call this after it."""
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._receive)
            self._before.setdefault(number, before)

    def _receive(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(STDERR, NOTICE)  # not print: a handler may run inside a print of the main thread
