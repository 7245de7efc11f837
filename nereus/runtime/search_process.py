"""The process that searches beside the loop: reads questions from standard input, writes answers to standard output.

A frame is eight bytes of length and a pickle. It yields to everything else on the machine, and ends with its parent.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from typing import BinaryIO

from nereus.control.proposals import Ground, Proposal, propose
from nereus.control.records import SearchRequest

LENGTH_BYTES = 8
NICENESS = 5
"""Beside slots at 0: where they use two whole cores a search takes a sixth of one, and answers within a step or two."""
Question = tuple[int, SearchRequest, Ground, int]
Answer = tuple[int, Proposal | str, float, float, float]
"""Search number, what was found or the error, its seconds on the clock and of processor, and the processor's since the
answer before it (at first since the process began, with its imports)."""


def send(stream: BinaryIO, value: object) -> None:
    """Writes one frame."""
    payload = pickle.dumps(value)
    left = memoryview(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
    while left:
        left = left[stream.write(left) :]
    stream.flush()


def receive(stream: BinaryIO) -> object | None:
    """Reads one frame; None where the other side is gone."""
    length = _exactly(stream, LENGTH_BYTES)
    payload = _exactly(stream, int.from_bytes(length, "big")) if length else b""
    return pickle.loads(payload) if payload else None  # noqa: S301  # our own parent's or child's


def _exactly(stream: BinaryIO, size_bytes: int) -> bytes:
    """So many bytes, or none where the stream ends before."""
    found = b""
    while len(found) < size_bytes:
        part = stream.read(size_bytes - len(found))
        if not part:
            return b""
        found += part
    return found


def answer(question: Question, answered_seconds: float = 0.0) -> Answer:
    """Carries out one search; `answered_seconds` is the processor's time at the answer before it."""
    search_id, request, ground, budget = question
    started, worked = time.monotonic(), time.process_time()
    found: Proposal | str
    try:
        found = propose(request, ground, budget)
    except Exception as error:  # noqa: BLE001  # a process's main: the job goes on and the journal says why
        found = f"{type(error).__name__}: {error}"
    ended = time.process_time()
    return search_id, found, time.monotonic() - started, ended - worked, worked - answered_seconds


def main() -> None:
    """Answers until the other side closes."""
    os.nice(NICENESS)
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    answered_seconds = 0.0
    while (question := receive(questions)) is not None:
        found = answer(question, answered_seconds)  # type: ignore[arg-type]
        answered_seconds += found[3] + found[4]
        try:
            send(answers, found)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
