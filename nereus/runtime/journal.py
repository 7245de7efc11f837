"""The record of a run: its folder and the append-only `events.jsonl` from which everything else is folded."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from nereus.errors import JournalError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """Where a run writes: everything of a run lies under `path`."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        """The journal, JSON lines."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line of metrics a step, JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """The folder of the slots' logs."""
        return self.path / "logs"

    @property
    def rollouts(self) -> Path:
        """The folder of the recorded rollouts."""
        return self.path / "rollouts"

    @property
    def model(self) -> Path:
        """The folder of the model that the run creates."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, made by the first."""
        return self.path / "checkpoints"

    @property
    def slots(self) -> Path:
        """Where the slots are, for another driver: private, and there only while they could outlive theirs."""
        return self.path / "slots.json"

    @property
    def resumed(self) -> Path:
        """The configuration under which the run was last resumed, YAML; not there before."""
        return self.path / "resumed.yaml"

    def is_run(self) -> bool:
        """Whether a run has written here."""
        return self.config.is_file() and self.events.is_file()


class JsonLines:
    """An append-only file of JSON lines; a line is whole or, after a failure, not there.

    Opening an existing file cuts off a torn last line (one without its newline). Raises JournalError naming the file
    where it cannot be read or written, for example on a full disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0  # whole lines in the file
        try:
            if path.is_file():
                self.lines = _cut_torn_tail(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise JournalError(f"{path}: cannot be opened for writing: {error.strerror}") from error

    def append(self, record: dict[str, object], *, sync: bool = False) -> None:
        """Write `record` as one line; with `sync` it is on the disk when this returns."""
        try:
            line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise JournalError(f"{self.path}: line {self.lines + 1}: JSON cannot hold it: {error}") from error
        start = os.fstat(self._file.fileno()).st_size
        try:
            _write_all(self._file.fileno(), line)
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # a device has no length to restore
                os.ftruncate(self._file.fileno(), start)
            raise JournalError(
                f"{self.path}: line {self.lines + 1} cannot be written: {error.strerror}; what is written before it "
                "is whole; make room there and start again"
            ) from error
        self.lines += 1

    def claim(self) -> None:
        """Locks the file against other processes. JournalError when one has it."""
        if not lock(self._file.fileno()):
            raise JournalError(f"{self.path}: another process is writing this run; wait for its end, or stop it")

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self._file.close()


class Journal:
    """The events of a run: every line has `seq` (1 for the first line), `at_seconds` (since the epoch) and `kind`."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def append(self, kind: str, *, sync: bool = False, at_seconds: float | None = None, **fields: object) -> int:
        """Write one event and return its `seq`; it happened now unless `at_seconds` says otherwise.

        `sync` puts it on the disk before returning: for commits. Keys of mappings become text, tuples become lists.
        Raises JournalError when it cannot be written, or when `fields` has a `seq` or a value that JSON cannot hold.
        """
        if "seq" in fields:
            raise JournalError(
                f"{self._lines.path}: event {kind!r} has a field 'seq', which the journal numbers itself"
            )
        seq = self._lines.lines + 1
        at = time.time() if at_seconds is None else at_seconds
        self._lines.append({"seq": seq, "at_seconds": at, "kind": kind, **fields}, sync=sync)
        return seq

    def claim(self) -> None:
        """Keeps other processes from writing this run until the journal is closed. JournalError when one does now."""
        self._lines.claim()

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        self._lines.close()


def is_being_written(path: Path) -> bool:
    """Whether a process has claimed the journal in `path`."""
    with path.open("rb") as file:
        return not lock(file.fileno())


def lock(descriptor: int) -> bool:
    """Locks an open file unless another process has; whether it could, or its file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def read_journal(path: Path) -> list[dict[str, object]]:
    """The events in `path`, in order; a torn last line is left out.

    Raises JournalError with the line number for anything else that is not a journal's line, or a missing file.
    """
    events = read_lines(path)
    for number, event in enumerate(events, start=1):
        if event.get("seq") != number:
            raise JournalError(f"{path}: line {number}: expected seq {number}, found {event.get('seq')!r}")
        if not isinstance(event.get("kind"), str):
            raise JournalError(f"{path}: line {number}: expected a kind, found {event.get('kind')!r}")
    return events


def read_lines(path: Path) -> list[dict[str, object]]:
    """The JSON objects in `path`, one a line; a torn last line is left out. Raises JournalError as `read_journal`."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from error
    records: list[dict[str, object]] = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):  # after the last newline: nothing or a torn line
        try:
            record = json.loads(line)
        except ValueError as error:
            raise JournalError(f"{path}: line {number}: expected a JSON object: {error}") from error
        if not isinstance(record, dict):
            raise JournalError(f"{path}: line {number}: expected a JSON object, found {type(record).__name__}")
        records.append(record)
    return records


def _cut_torn_tail(path: Path) -> int:
    """The count of whole lines in `path`, after its last line is cut off where it has no newline."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return content.count(b"\n")


def _write_all(descriptor: int, line: bytes) -> None:
    while line:
        line = line[os.write(descriptor, line) :]
