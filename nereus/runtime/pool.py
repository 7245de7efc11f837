"""The slots as Ray actors: started together, called together, ended together whatever happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nereus.errors import NereusError, SlotFailed
from nereus.runtime.attachment import Attachment, Keep, LiveSlot, write
from nereus.runtime.cluster import nodes, places, start_ray
from nereus.runtime.control import (
    SILENT_SECONDS,
    STATUS_SECONDS,
    Contact,
    ControlMemory,
    SlotStatus,
    Touch,
    Watch,
    ask_each,
    serve,
)
from nereus.runtime.host_memory import left
from nereus.runtime.meeting import Meeting

DEATH_SECONDS = 3.0  # how long after a slot's error another slot's death is waited for, which may be its cause
LOOPBACK = "127.0.0.1"
PATIENCE_SECONDS = 1.0  # how long those that work together with a failed slot may take to end by themselves
NAMESPACE = "nereus-"


@ray.remote
class SlotActor:
    """A slot process. Output of the process goes to its own log file; importing the engines is the slow part."""

    def __init__(self, number: int, log: str, limit_seconds: float, start_seconds: float) -> None:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, sys.stdout.fileno())
        os.dup2(target, sys.stderr.fileno())
        self._number = number
        self._slot: Any = None
        end = lambda: left(self._slot.keeping if self._slot else None)  # noqa: E731
        self._watch = Watch(limit_seconds, start_seconds + limit_seconds, end) if limit_seconds else None

    def boot(self, several_hosts: bool) -> Contact:
        """Imports the engines, makes the slot and starts its control thread; returns how to ask that."""
        from nereus.engines.vllm.boot import ENVIRONMENT  # the module's own: Ray pickles this class with its globals

        if several_hosts:
            ENVIRONMENT.update(_network(ray.util.get_node_ip_address()))
        os.environ.update(ENVIRONMENT)  # a cluster that others started may not have it
        from nereus.runtime.slot import Slot  # half a minute of imports, wanted here

        self._slot = Slot(self._number)
        address = ray.util.get_node_ip_address() if several_hosts else LOOPBACK
        return serve(self._slot.control, address, self._watch)

    def alive(self) -> bool:
        """Answers where the process lives."""
        return True

    def do(self, method: str, arguments: tuple[object, ...]) -> object:
        """Calls a method of the slot."""
        with self._slot.control.doing(method):
            return getattr(self._slot, method)(*arguments)


def _network(address: str) -> dict[str, str]:
    """What tells gloo and vLLM by which address the slots of this host are reached from others; else it is loopback."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return {"GLOO_SOCKET_IFNAME": interface, "VLLM_HOST_IP": address}
    return {}


def _kill(contact: Contact) -> None:
    """Ends a lost slot's process on this host where it is stopped: Ray's word does not reach it there."""
    if contact.address in (LOOPBACK, ray.util.get_node_ip_address()):
        with suppress(psutil.Error):  # gone already
            process = psutil.Process(contact.pid)
            if process.status() == psutil.STATUS_STOPPED and "SlotActor" in " ".join(process.cmdline()):
                process.kill()


@dataclass(frozen=True, kw_only=True, slots=True)
class Boot:
    """A slot that is still to join: its actor, what `boot` will have returned, its log, its host."""

    actor: Any
    name: str
    done: Any
    log: Path
    host_index: int


class SlotPool:
    """The live slots of a job. `call` runs a method on several slots at once and returns what each said.

    SlotFailed as soon as one raises or dies, a NereusError of a slot as it is. Others that are in the same call may be
    stuck in a collective with it, or wait for it where groups are built, which ends now: they have to leave this world.
    """

    def __init__(
        self,
        slots: int,
        logs: Path,
        *,
        start_timeout_seconds: float,
        phase_timeout_seconds: float,
        note: Callable[[str], None],
        keep: Keep | None = None,
        attachment: Attachment | None = None,
    ) -> None:
        """Starts `slots` slots, which outlive this driver for a while with `keep`; or takes those of an attachment over.

        Those that are taken over are in no world, and in what their last driver let them begin: `abort`, `drop` and
        `rejoin` are the caller's.
        """
        self.numbers = tuple(range(slots))
        self._logs, self._timeout_seconds, self._start_seconds = logs, phase_timeout_seconds, start_timeout_seconds
        self._keep, self._touch, self.host_memory = keep, None, ""
        note(f"starting {slots} slots" if attachment is None else f"attaching to {len(attachment.slots)} slots")
        start_ray(slots, start_timeout_seconds)
        self._meeting: Meeting | None = None
        self._actors: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self._boots: list[Boot] = []
        self._logs_of = {number: self._logs / f"slot_{number}.log" for number in self.numbers}
        self.contacts: dict[int, Contact] = {}
        self.hosts: dict[int, int] = {}
        self._started_count = slots
        self._namespace = f"{NAMESPACE}{os.urandom(8).hex()}"
        try:
            self._gpus = 1 if ray.cluster_resources().get("GPU", 0) >= slots else 0  # a GPU each where there are enough
            if attachment is None:
                self._start(note)
            else:
                self._attach(attachment)
            if keep is not None:
                self._touch = Touch(self._listening, keep.limit_seconds)
            if attachment is None:
                self.rejoin()
        except BaseException:
            self.close()
            raise

    def _start(self, note: Callable[[str], None]) -> None:
        found = places()
        self._nodes = list(dict.fromkeys(found))
        self.hosts = {number: self._nodes.index(node) for number, node in zip(self.numbers, found, strict=False)}
        for number, node in zip(self.numbers, found, strict=False):
            self._names[number] = self._name(number)
            self._actors[number] = self._actor(number, node, self._logs_of[number])
        note("importing engines in the slots")
        started = time.monotonic()
        self._several_hosts = len({node["NodeManagerAddress"] for node in nodes()}) > 1
        boots = {number: actor.boot.remote(self._several_hosts) for number, actor in self._actors.items()}
        self.contacts = self._collect("boot", boots, self._start_seconds)
        note(f"slots are up after {time.monotonic() - started:.0f} s")

    def _attach(self, found: Attachment) -> None:
        self.numbers, self._namespace = tuple(sorted(found.slots)), found.namespace
        self._nodes, self._several_hosts = list(found.nodes), found.several_hosts
        self._started_count, self.host_memory = found.started_count, found.host_memory
        for number, slot in found.slots.items():
            self._names[number], self._logs_of[number] = slot.actor, Path(slot.log)
            self.contacts[number], self.hosts[number] = slot.contact, slot.host_index
            with suppress(ValueError):  # it is dead
                self._actors[number] = ray.get_actor(slot.actor, namespace=found.namespace)

    @property
    def pids(self) -> dict[int, int]:
        """The number of each slot's process on its host."""
        return {slot: contact.pid for slot, contact in self.contacts.items()}

    @staticmethod
    def _name(count: int) -> str:
        return f"slot-{count}"

    def _actor(self, count: int, node: str, log: Path) -> Any:
        outlives: dict[str, Any] = {}
        if self._keep is not None:
            outlives = {"name": self._name(count), "namespace": self._namespace, "lifetime": "detached"}
        options = SlotActor.options(
            num_cpus=0,
            num_gpus=self._gpus,
            resources={"slot": 1.0},
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            **outlives,
        )
        return options.remote(count, str(log), self._keep.limit_seconds if self._keep else 0.0, self._start_seconds)

    def _listening(self) -> list[Contact]:
        """The control threads of all slots, also of those that are still to join."""
        found = list(self.contacts.values())
        for boot in tuple(self._boots):
            done, _ = ray.wait([boot.done], timeout=0)
            with suppress(RayError):  # it died
                found += ray.get(done)
        return found

    def tell(self) -> None:
        """Writes down where the slots are, where they may outlive this driver."""
        if self._keep is None:
            return
        slots = {
            number: LiveSlot(
                actor=self._names[number],
                contact=self.contacts[number],
                host_index=self.hosts[number],
                log=str(self._logs_of[number]),
            )
            for number in self.numbers
        }
        found = Attachment(
            cluster=ray.get_runtime_context().gcs_address,
            namespace=self._namespace,
            nodes=tuple(self._nodes),
            several_hosts=self._several_hosts,
            started_count=self._started_count,
            host_memory=self.host_memory,
            slots=slots,
        )
        write(self._keep.path, found)

    def start_more(self, count: int) -> None:
        """Starts slot processes beside the others, on the nodes that have room; `arrived` says when they are there."""
        free = places()
        taken = [self._nodes[host] for host in (*self.hosts.values(), *(boot.host_index for boot in self._boots))]
        for node in taken:
            if node in free:
                free.remove(node)
        for node in free[:count]:
            log, name = self._logs / f"slot_{self._started_count}.log", self._name(self._started_count)
            actor = self._actor(self._started_count, node, log)
            done, host = actor.boot.remote(self._several_hosts), self._nodes.index(node)
            self._started_count += 1
            self._boots.append(Boot(actor=actor, name=name, done=done, log=log, host_index=host))

    def arrived(self) -> int:
        """How many slots wait to join, once all that were started are there."""
        refs = [boot.done for boot in self._boots]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        return len(refs) if len(done) == len(refs) else 0

    @property
    def waiting_count(self) -> int:
        """How many slots were started that are in no world yet, there or not."""
        return len(self._boots)

    def dismiss(self, count: int) -> None:
        """Ends the last `count` of the slots that wait to join."""
        for boot in self._boots[len(self._boots) - count :]:
            ray.kill(boot.actor)
        self._boots = self._boots[: len(self._boots) - count]

    def admit(self) -> tuple[int, ...]:
        """The numbers of the slots that arrived, after those of the others; they are in no world until `rejoin`."""
        first = len(self._actors)
        for number, boot in enumerate(self._boots, start=first):
            self._logs_of[number], self.hosts[number] = boot.log, boot.host_index
            self.contacts[number] = self._get("boot", number, boot.done)
            self._actors[number], self._names[number] = boot.actor, boot.name
        self._boots = []
        self.numbers = tuple(sorted(self._actors))
        self.call("renumber", {slot: (slot,) for slot in self.numbers[first:]})  # they began with numbers of their own
        return self.numbers[first:]

    def restart(self, slots: int) -> None:
        """Ends every slot process, starts so many new ones and forms their world: what a stop and a resume do."""
        for actor in (*self._actors.values(), *(boot.actor for boot in self._boots)):
            ray.kill(actor)
        self._actors, self._boots, self.contacts, self.hosts, self.numbers = {}, [], {}, {}, ()
        self.start_more(slots)
        self._logs_of = {number: boot.log for number, boot in enumerate(self._boots)}
        self._collect("boot", {number: boot.done for number, boot in enumerate(self._boots)}, self._start_seconds)
        self.admit()
        self.rejoin()

    def call(self, method: str, arguments: Mapping[int, tuple[object, ...]]) -> dict[int, Any]:
        """Calls `method` on each slot of `arguments` with its own arguments."""
        refs = {slot: self._actors[slot].do.remote(method, given) for slot, given in arguments.items()}
        return self._collect(method, refs, self._timeout_seconds)

    def call_all(self, method: str, *arguments: object) -> dict[int, Any]:
        """Calls `method` on every slot with the same arguments."""
        return self.call(method, dict.fromkeys(self.numbers, arguments))

    def gather(
        self,
        method: str,
        arguments: Mapping[int, tuple[object, ...]],
        failed: Callable[[Any], bool] = lambda answer: isinstance(answer, NereusError),
        *,
        together: bool = False,
    ) -> dict[int, Any]:
        """As `call`, but waits for every slot: what each said, or the NereusError that came of it.

        After an answer that has `failed` none of the others waits any longer for groups that are being built; of work
        that counts `together` alone they are soon told to end what they do.
        """
        owner = {self._actors[slot].do.remote(method, given): slot for slot, given in arguments.items()}
        found: dict[int, Any] = {}
        waiting, deadline, patience = list(owner), time.monotonic() + self._timeout_seconds, inf
        while waiting:
            left_seconds = min(deadline, patience) - time.monotonic()
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(left_seconds, 0.0))
            if not done and patience < deadline:
                self.abort(f"another slot failed in {method}", tuple(owner[ref] for ref in waiting))
                patience, together = inf, False
                continue
            if not done:
                late, said = f"did not finish {method} within {self._timeout_seconds:.0f} s", self._said(waiting, owner)
                found |= {owner[ref]: SlotFailed(f"slot {owner[ref]} {late}{said}") for ref in waiting}
                break
            slot = owner[done[0]]
            try:
                found[slot] = self._get(method, slot, done[0])
            except NereusError as error:
                found[slot] = error
            if waiting and failed(found[slot]):
                self.end_meeting()
                patience = time.monotonic() + PATIENCE_SECONDS if together else patience
        return {slot: found[slot] for slot in arguments}

    def status(self, slots: Sequence[int] | None = None) -> dict[int, SlotStatus | None]:
        """What slots (all) do now, also while they compute; None of one whose process is stopped or gone."""
        found = ask_each(self._contacts_of(slots), {"ask": "status"}, STATUS_SECONDS)
        return {slot: None if told is None else SlotStatus(**told) for slot, told in found.items()}

    def memory(self) -> dict[int, ControlMemory | None]:
        """What each slot's process and ledger hold now; None as in `status`."""
        found = ask_each(self.contacts, {"ask": "memory"}, STATUS_SECONDS)
        return {slot: None if told is None else ControlMemory(**told) for slot, told in found.items()}

    def abort(self, reason: str, slots: Sequence[int] | None = None) -> tuple[int, ...]:
        """Tells slots (all) to end the call that they are in, which then raises SlotAborted; those that were in one.

        A slot looks between tasks of a change, rounds of a transfer, micro-batches, tokens and layers of a sync, not
        inside a collective.
        """
        found = ask_each(self._contacts_of(slots), {"ask": "abort", "reason": reason}, STATUS_SECONDS)
        return tuple(slot for slot, told in found.items() if told)

    def _contacts_of(self, slots: Sequence[int] | None) -> dict[int, Contact]:
        return {slot: contact for slot, contact in self.contacts.items() if slots is None or slot in slots}

    def _said(self, waiting: Sequence[Any], owner: Mapping[Any, int]) -> str:
        """What slots that are late say of themselves, for an error."""
        found = self.status(tuple(owner[ref] for ref in waiting))
        silent = "its process does not answer: stopped or gone"
        lines = [f"slot {slot}: {silent}" if told is None else str(told) for slot, told in sorted(found.items())]
        return "".join(f"\n  {line}" for line in lines)

    def lost(self, silent_seconds: float = SILENT_SECONDS) -> tuple[int, ...]:
        """The slots whose processes are dead, or stopped: not even their control threads answer."""
        refs = {actor.alive.remote(): slot for slot, actor in self._actors.items()}
        ray.wait(list(refs), num_returns=len(refs), timeout=DEATH_SECONDS)
        found: list[int] = []
        busy: list[int] = []
        for ref, slot in refs.items():
            try:
                ray.get(ref, timeout=0)
            except RayActorError:
                found.append(slot)
            except RayError:
                busy.append(slot)
        answers = ask_each(self._contacts_of(busy), {"ask": "status"}, silent_seconds)
        return tuple(sorted([*found, *(slot for slot, told in answers.items() if told is None)]))

    def drop(self, lost: Sequence[int]) -> dict[int, int]:
        """Goes on without these slots: the others get the numbers from 0 on, in order. Returns new numbers by old ones.

        The slots must be out of any world; `rejoin` follows.
        """
        for slot in lost:
            self.kill(slot)
        renumbered = {old: new for new, old in enumerate(sorted(self._actors))}
        self._actors = {renumbered[old]: actor for old, actor in self._actors.items()}
        self.contacts = {renumbered[old]: found for old, found in self.contacts.items() if old in renumbered}
        self._logs_of = {renumbered[old]: log for old, log in self._logs_of.items() if old in renumbered}
        self.hosts = {renumbered[old]: host for old, host in self.hosts.items() if old in renumbered}
        self._names = {renumbered[old]: name for old, name in self._names.items() if old in renumbered}
        self.numbers = tuple(sorted(self._actors))
        self.call("renumber", {slot: (slot,) for slot in self.numbers})
        return renumbered

    def kill(self, slot: int) -> None:
        """Ends a slot's process, where that is still to be done; `drop` follows."""
        actor = self._actors.pop(slot, None)
        if actor is not None:
            ray.kill(actor)
            _kill(self.contacts[slot])

    def rejoin(self) -> None:
        """Forms the world of the slots that there are."""
        self.tell()
        self.join(self.numbers)

    def end_meeting(self) -> None:
        """Whoever waits for a slot to build a group with waits no longer; the world can build no more."""
        if self._meeting is not None:
            self._meeting.close()

    def join(self, slots: Sequence[int]) -> None:
        """Forms a world of `slots`, whose numbers count from 0."""
        self.end_meeting()
        self._meeting = Meeting(ray.util.get_node_ip_address(), self._timeout_seconds)
        place = len(slots), self._meeting.address, self._meeting.port, self._timeout_seconds
        self.call("join", dict.fromkeys(slots, place))

    def _collect(self, method: str, refs: Mapping[int, Any], timeout_seconds: float) -> dict[int, Any]:
        owner = {ref: slot for slot, ref in refs.items()}
        found: dict[int, Any] = {}
        waiting, deadline = list(owner), time.monotonic() + timeout_seconds
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
            if not done:
                silent = sorted(owner[ref] for ref in waiting)
                late = f"slots {silent} did not finish {method} within {timeout_seconds:.0f} s"
                raise SlotFailed(f"{late}{self._said(waiting, owner)}")
            try:
                found[owner[done[0]]] = self._get(method, owner[done[0]], done[0])
            except NereusError as error:
                if waiting:
                    self.end_meeting()
                self._blame_the_dead(method, owner, waiting, error)
                raise
        return found

    def _blame_the_dead(self, method: str, owner: Mapping[Any, int], waiting: list[Any], error: NereusError) -> None:
        """When a slot dies its peers fail too, often first: SlotFailed for the dead one, if there is one."""
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=DEATH_SECONDS) if waiting else ([], [])
        for ref in done:
            try:
                ray.get(ref)
            except RayActorError:
                raise SlotFailed(self._death(owner[ref], method), (owner[ref],)) from error
            except RayError:
                continue

    def _get(self, method: str, slot: int, ref: Any) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, NereusError):
                raise cause from error
            raise SlotFailed(f"slot {slot} failed in {method}:\n{error}") from error
        except RayActorError as error:
            raise SlotFailed(self._death(slot, method), (slot,)) from error
        except RayError as error:
            raise SlotFailed(f"slot {slot} failed in {method}: {error}") from error

    def _death(self, slot: int, method: str) -> str:
        return (
            f"slot {slot} (process {self.pids.get(slot)}) died in {method}; its last words are in {self._logs_of[slot]}"
        )

    def close(self) -> None:
        """Ends every slot process and Ray; safe to call twice."""
        if self._touch is not None:
            self._touch.close()
        for actor in (*self._actors.values(), *(boot.actor for boot in self._boots)):
            ray.kill(actor)
        self._actors, self._boots, self.contacts = {}, [], {}
        ray.shutdown()
        if self._keep is not None:
            self._keep.path.unlink(missing_ok=True)
