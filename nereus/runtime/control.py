"""A slot's control thread: it says what the slot's one thread does while that computes, and tells it to stop.

It touches no object of torch, Megatron or vLLM: it reads plain fields, each of which the slot's thread replaces as a
whole. The driver asks over TCP: the slot sends a fresh nonce, the driver one JSON line signed with the slot's key, the
slot one JSON line. The key is made by the slot and reaches the driver by Ray, and the next driver by a private file of
the run's folder.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nereus.errors import NereusError

if TYPE_CHECKING:
    from nereus.runtime.slot import Slot

SILENT_SECONDS = 10.0  # a control thread that says nothing for so long is that of a stopped process
STATUS_SECONDS = 2.0
ANSWER_SECONDS = 0.1  # for an answer to be on its way before the process ends
TOUCHES = 5  # questions within the time after which a slot would end
TICKS = 20  # how often the time without a driver is looked at
ASKING_SECONDS = 2.0  # how long a connection may take to ask: one that is silent holds up the others
LINE_BYTES = 1 << 20
NONCE_BYTES = 16
STDOUT = 1
AT_REST = "rest"
BEGINS = "begin_change"
UPDATES = "train"
MADE_WHOLE = frozenset({"attach", "configure"})
ENDS = frozenset({"finish_change", "abandon_change", "retreat", "leave", "configure"})


class SlotAborted(NereusError):
    """The driver told the slot to end what it did; the message has the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contact:
    """Where the control thread of the process `pid` listens, and the key (hex) that signs questions to it."""

    pid: int
    address: str
    port: int
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotStatus:
    """What a slot does: the method that it carries out and for how long, the task of a change that it is at.

    `phase` is "rest" between two calls. `layouts` and `optimizer_steps` are those of the live EMUs as the last call left
    them. `changing` says whether a change of plan is under way, `torn` whether an optimizer step was cut short.
    """

    pid: int
    slot: int
    phase: str
    phase_seconds: float
    task: str
    changing: bool
    torn: bool
    layouts: Mapping[str, str]
    optimizer_steps: Mapping[str, int]

    def __str__(self) -> str:
        at = f", at task {self.task}" if self.task else ""
        return f"slot {self.slot} (process {self.pid}): {self.phase} for {self.phase_seconds:.0f} s{at}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlMemory:
    """Resident memory of a slot's process (shared file pages not counted), and the total of its ledger."""

    resident_bytes: int
    ledger_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Doing:
    method: str
    began_seconds: float
    task: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Left:
    changing: bool
    torn: bool
    layouts: Mapping[str, str]
    optimizer_steps: Mapping[str, int]


class Control:
    """What the slot's thread tells its control thread, and the other way round whether to go on."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._lock = threading.Lock()
        self._doing: _Doing | None = None
        self._left = _Left(changing=False, torn=False, layouts={}, optimizer_steps={})
        self._reason = ""

    # -- the slot's thread ---------------------------------------------------------------------------------------

    @contextmanager
    def doing(self, method: str) -> Iterator[None]:
        """While inside the slot carries out `method`; an abort concerns the method under way alone."""
        with self._lock:
            self._doing, self._reason = _Doing(method=method, began_seconds=time.monotonic()), ""
        ended_well = False
        try:
            yield
            ended_well = True
        finally:
            changing = method == BEGINS or (self._left.changing and method not in ENDS)
            torn = (self._left.torn or (method == UPDATES and not ended_well)) and method not in MADE_WHOLE
            left = _left(self._slot, changing=changing, torn=torn)
            with self._lock:
                self._doing, self._reason, self._left = None, "", left

    def at(self, task: str) -> None:
        """The slot comes to a task of a change. SlotAborted as `check`."""
        if self._doing is not None:
            began = self._doing
            self._doing = _Doing(method=began.method, began_seconds=began.began_seconds, task=task)
        self.check()

    def check(self) -> None:
        """SlotAborted when the driver has told this slot to end what it does."""
        if self._reason:
            doing = self._doing
            where = f" in {doing.method} {doing.task}".rstrip() if doing else ""
            raise SlotAborted(f"slot {self._slot.number} was aborted{where}: {self._reason}")

    def checking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` behind a check."""

        def checked(*arguments: object, **named: object) -> Any:
            self.check()
            return function(*arguments, **named)

        return checked

    @contextmanager
    def before_each(self, module: Any) -> Iterator[None]:
        """While inside there is a check before each forward pass of a torch `module`: before each micro-batch."""
        hook = module.register_forward_pre_hook(lambda *_: self.check())
        try:
            yield
        finally:
            hook.remove()

    # -- the control thread --------------------------------------------------------------------------------------

    def status(self) -> SlotStatus:
        """What the slot does now."""
        doing, left = self._doing, self._left
        return SlotStatus(
            pid=os.getpid(),
            slot=self._slot.number,
            phase=doing.method if doing else AT_REST,
            phase_seconds=time.monotonic() - doing.began_seconds if doing else 0.0,
            task=doing.task if doing else "",
            changing=left.changing,
            torn=left.torn or (doing is not None and doing.method == UPDATES),
            layouts=left.layouts,
            optimizer_steps=left.optimizer_steps,
        )

    def memory(self) -> ControlMemory:
        """What the process holds now."""
        _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
        held = tuple(self._slot.ledger.held.values())
        return ControlMemory(
            resident_bytes=(int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE"), ledger_bytes=sum(held)
        )

    def abort(self, reason: str) -> bool:
        """Tells the slot's thread to end what it does; False when it rests."""
        with self._lock:
            if self._doing is None:
                return False
            self._reason = self._reason or reason or "no reason was given"  # the first one is the cause
            return True


def _left(slot: Slot, *, changing: bool, torn: bool) -> _Left:
    live = dict(slot.live)
    return _Left(
        changing=changing,
        torn=torn,
        layouts={emu: str(engine.stage.layout) for emu, engine in live.items()},
        optimizer_steps={emu: slot.steps.get(emu, 0) for emu in live},
    )


class Watch:
    """Ends this process once no driver has asked it anything for `limit_seconds`; before the first question `first_seconds`.

    Only time counts in which this process runs: one that was stopped, or held by a long call, hears its driver first.
    `end` is called just before.
    """

    def __init__(self, limit_seconds: float, first_seconds: float, end: Callable[[], None]) -> None:
        self._limit_seconds, self._first_seconds, self._end = limit_seconds, first_seconds, end
        self._heard = False
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def heard(self) -> None:
        """A driver has asked."""
        self._heard = True

    def _run(self) -> None:
        tick_seconds, left_seconds = min(self._limit_seconds / TICKS, 1.0), self._first_seconds
        while left_seconds > 0:
            time.sleep(tick_seconds)
            heard, self._heard = self._heard, False
            left_seconds = self._limit_seconds if heard else left_seconds - tick_seconds
        os.write(STDOUT, f"no driver has asked for {self._limit_seconds:g} s: this slot ends\n".encode())
        end_process(self._end)


def end_process(end: Callable[[], None]) -> None:
    """At once, whatever the slot's thread is in."""
    try:
        end()
    finally:
        os._exit(0)


def serve(control: Control, address: str, watch: Watch | None = None) -> Contact:
    """Starts the control thread on a free port of `address`; it ends with the process. `watch` hears of each question."""
    listener, key = socket.create_server((address, 0)), os.urandom(32)
    threading.Thread(target=_serve, args=(control, listener, key, watch), name="control", daemon=True).start()
    return Contact(pid=os.getpid(), address=address, port=listener.getsockname()[1], key=key.hex())


def _serve(control: Control, listener: socket.socket, key: bytes, watch: Watch | None) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, suppress(OSError, ValueError):  # who cannot ask gets no answer
            connection.settimeout(ASKING_SECONDS)
            nonce = os.urandom(NONCE_BYTES)
            connection.sendall(nonce)
            signature, _, asked = _line(connection).partition(b" ")
            if hmac.compare_digest(signature, _signature(key, nonce, asked)):
                if watch is not None:
                    watch.heard()
                connection.sendall(json.dumps(_answer(control, json.loads(asked))).encode() + b"\n")


def _answer(control: Control, asked: Mapping[str, str]) -> object:
    match asked:
        case {"ask": "status"}:
            return asdict(control.status())
        case {"ask": "memory"}:
            return asdict(control.memory())
        case {"ask": "abort", "reason": reason}:
            return control.abort(reason)
        case {"ask": "end"}:
            threading.Timer(ANSWER_SECONDS, end_process, (lambda: None,)).start()
            return True
        case _:
            raise ValueError(f"a question of {sorted(asked)} is not known")


def _signature(key: bytes, nonce: bytes, asked: bytes) -> bytes:
    return hmac.new(key, nonce + asked, "sha256").hexdigest().encode()


def _line(connection: socket.socket) -> bytes:
    """One line without its newline; ValueError where it does not end."""
    found = bytearray()
    while not found.endswith(b"\n"):
        part = connection.recv(1 << 16)
        if not part or len(found) > LINE_BYTES:
            raise ValueError("a line did not end")
        found += part
    return bytes(found[:-1])


def ask(contact: Contact, asked: Mapping[str, str], timeout_seconds: float) -> Any:
    """What a slot answers; None where it has not within `timeout_seconds` a read, because it stopped or is gone."""
    line = json.dumps(dict(asked)).encode()
    try:
        with socket.create_connection((contact.address, contact.port), timeout=timeout_seconds) as connection:
            nonce = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
            connection.sendall(_signature(bytes.fromhex(contact.key), nonce, line) + b" " + line + b"\n")
            return json.loads(_line(connection))
    except (OSError, ValueError):
        return None


def ask_each(contacts: Mapping[int, Contact], asked: Mapping[str, str], timeout_seconds: float) -> dict[int, Any]:
    """What each slot answers, all asked at once, by rising number; None as in `ask`."""
    if not contacts:
        return {}
    with ThreadPoolExecutor(len(contacts)) as threads:
        slots = sorted(contacts)
        found = threads.map(lambda slot: ask(contacts[slot], asked, timeout_seconds), slots)
        return dict(zip(slots, found, strict=True))


class Touch:
    """Keeps in touch with slots that would end without a driver: asks each from a thread until it is closed."""

    def __init__(self, contacts: Callable[[], Collection[Contact]], limit_seconds: float) -> None:
        self._contacts, self._every_seconds = contacts, min(limit_seconds / TOUCHES, 10.0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="touch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._every_seconds):
            ask_each(dict(enumerate(self._contacts())), {"ask": "status"}, STATUS_SECONDS)

    def close(self) -> None:
        """Asks no more; a second call does nothing."""
        self._closed.set()
        self._thread.join(STATUS_SECONDS)
