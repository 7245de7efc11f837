"""The slots as Ray actors: started together, called together, ended together whatever happens."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import services
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nereus.engines.vllm.boot import ENVIRONMENT
from nereus.errors import NereusError, SlotFailed
from nereus.runtime.control import Contact, ControlMemory, SlotStatus, ask_each, serve
from nereus.runtime.meeting import Meeting

DEATH_SECONDS = 3.0  # how long after a slot's error another slot's death is waited for, which may be its cause
JOIN_POLL_SECONDS = 0.2
SILENT_SECONDS = 10.0  # a control thread that says nothing for so long is that of a stopped process
STATUS_SECONDS = 2.0
LOOPBACK = "127.0.0.1"
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # large blocks go back to the system when they are freed, so that resident memory says what is held
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
    "MALLOC_ARENA_MAX": "2",
}


@ray.remote
class SlotActor:
    """A slot process. Output of the process goes to its own log file; importing the engines is the slow part."""

    def __init__(self, number: int, log: str) -> None:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, sys.stdout.fileno())
        os.dup2(target, sys.stderr.fileno())
        self._number = number
        self._slot: Any = None

    def boot(self, several_hosts: bool) -> Contact:
        """Imports the engines, makes the slot and starts its control thread; returns how to ask that."""
        from nereus.engines.vllm.boot import ENVIRONMENT  # the module's own: Ray pickles this class with its globals

        if several_hosts:
            ENVIRONMENT.update(_network(ray.util.get_node_ip_address()))
            os.environ.update(ENVIRONMENT)
        from nereus.runtime.slot import Slot  # half a minute of imports, wanted here

        self._slot = Slot(self._number)
        return serve(self._slot.control, ray.util.get_node_ip_address() if several_hosts else LOOPBACK)

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


def start_ray(slots: int, timeout_seconds: float) -> None:
    """Starts Ray on loopback with `slots` slots, or joins the cluster that RAY_ADDRESS names.

    A cluster may still be growing: SlotFailed when after `timeout_seconds` it has fewer than `slots` slots.
    """
    os.environ.update(ENVIRONMENT)
    os.environ.update(RAY_ENVIRONMENT)
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if os.environ.get("RAY_ADDRESS"):
        _join_cluster(quiet, slots, timeout_seconds)
        return
    with _own_session():
        ray.init(
            num_cpus=1,
            resources={"slot": float(slots)},
            include_dashboard=False,
            object_store_memory=100 << 20,
            _node_ip_address="127.0.0.1",
            **quiet,
        )


def _join_cluster(quiet: Mapping[str, Any], slots: int, timeout_seconds: float) -> None:
    address, deadline = os.environ["RAY_ADDRESS"], time.monotonic() + timeout_seconds
    try:
        ray.init(**quiet)
    except (ConnectionError, RuntimeError) as error:
        raise SlotFailed(f"no Ray cluster answers at RAY_ADDRESS = {address}: {error}") from error
    while len(places := _places()) < slots:
        if time.monotonic() > deadline:
            found = ", ".join(f"{node['NodeName']} {node['Resources'].get('slot', 0):.0f}" for node in _nodes())
            ray.shutdown()
            raise SlotFailed(
                f"the Ray cluster at {address} has {len(places)} of {slots} slots after {timeout_seconds:.0f} s: {found}"
            )
        time.sleep(JOIN_POLL_SECONDS)


def _nodes() -> list[dict[str, Any]]:
    """The live Ray nodes, by name."""
    return sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeName"]))


def _places() -> list[str]:
    """The Ray node of each slot: the first node's slots come first, so that neighbours share a node."""
    return [node["NodeID"] for node in _nodes() for _ in range(int(node["Resources"].get("slot", 0)))]


@contextmanager
def _own_session() -> Iterator[None]:
    """While inside, Ray starts its processes in a session of their own.

    A signal to the driver's process group (Ctrl-C in a terminal, `timeout`, a batch system) then reaches the driver
    alone, which stops at a safe point. They still end with the driver: Ray sets the parent-death signal.
    """
    popen = services.ConsolePopen  # private: an AttributeError here means that Ray has moved it
    services.ConsolePopen = functools.partial(popen, start_new_session=True)  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


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
    ) -> None:
        self.numbers = tuple(range(slots))
        self._logs, self._timeout_seconds, self._start_seconds = logs, phase_timeout_seconds, start_timeout_seconds
        note(f"starting {slots} slots")
        start_ray(slots, start_timeout_seconds)
        self._meeting: Meeting | None = None
        self._actors: dict[int, Any] = {}
        self._boots: list[tuple[Any, Any, str, int]] = []  # of slots that are still to join: actor, boot, log, host
        self._logs_of = {number: self._logs / f"slot_{number}.log" for number in self.numbers}
        self.contacts: dict[int, Contact] = {}
        self.hosts: dict[int, int] = {}
        self._started = slots
        try:
            self._gpus = 1 if ray.cluster_resources().get("GPU", 0) >= slots else 0  # a GPU each where there are enough
            places = _places()
            self._nodes = list(dict.fromkeys(places))
            self.hosts = {number: self._nodes.index(node) for number, node in zip(self.numbers, places, strict=False)}
            for number, node in zip(self.numbers, places, strict=False):
                self._actors[number] = self._actor(number, node, self._logs_of[number])
            note("importing engines in the slots")
            started = time.monotonic()
            self._several_hosts = len({node["NodeManagerAddress"] for node in _nodes()}) > 1
            boots = {number: actor.boot.remote(self._several_hosts) for number, actor in self._actors.items()}
            self.contacts = self._collect("boot", boots, start_timeout_seconds)
            note(f"slots are up after {time.monotonic() - started:.0f} s")
            self.rejoin()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> dict[int, int]:
        """The number of each slot's process on its host."""
        return {slot: contact.pid for slot, contact in self.contacts.items()}

    def _actor(self, number: int, node: str, log: Path) -> Any:
        options = SlotActor.options(
            num_cpus=0,
            num_gpus=self._gpus,
            resources={"slot": 1.0},
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        return options.remote(number, str(log))

    def start_more(self, count: int) -> None:
        """Starts slot processes beside the others, on the nodes that have room; `arrived` says when they are there."""
        places = _places()
        taken = [self._nodes[host] for host in (*self.hosts.values(), *(host for *_, host in self._boots))]
        for node in taken:
            if node in places:
                places.remove(node)
        for node in places[:count]:
            log = self._logs / f"slot_{self._started}.log"
            actor = self._actor(self._started, node, log)
            self._started += 1
            self._boots.append((actor, actor.boot.remote(self._several_hosts), str(log), self._nodes.index(node)))

    def arrived(self) -> int:
        """How many slots wait to join, once all that were started are there."""
        refs = [boot for _, boot, _, _ in self._boots]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        return len(refs) if len(done) == len(refs) else 0

    def admit(self) -> tuple[int, ...]:
        """The numbers of the slots that arrived, after those of the others; they are in no world until `rejoin`."""
        first = len(self._actors)
        for number, (actor, boot, log, host) in enumerate(self._boots, start=first):
            self._logs_of[number], self.hosts[number] = Path(log), host
            self.contacts[number] = self._get("boot", number, boot)
            self._actors[number] = actor
        self._boots = []
        self.numbers = tuple(sorted(self._actors))
        self.call("renumber", {slot: (slot,) for slot in self.numbers[first:]})  # they began with numbers of their own
        return self.numbers[first:]

    def restart(self, slots: int) -> None:
        """Ends every slot process, starts so many new ones and forms their world: what a stop and a resume do."""
        for actor in (*self._actors.values(), *(actor for actor, *_ in self._boots)):
            ray.kill(actor)
        self._actors, self._boots, self.contacts, self.hosts, self.numbers = {}, [], {}, {}, ()
        self.start_more(slots)
        self._logs_of = {number: Path(log) for number, (_, _, log, _) in enumerate(self._boots)}
        self._collect("boot", {number: boot for number, (_, boot, _, _) in enumerate(self._boots)}, self._start_seconds)
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
    ) -> dict[int, Any]:
        """As `call`, but waits for every slot: what each said, or the NereusError that came of it.

        After an answer that has `failed` none of the others waits any longer for groups that are being built.
        """
        owner = {self._actors[slot].do.remote(method, given): slot for slot, given in arguments.items()}
        found: dict[int, Any] = {}
        waiting, deadline = list(owner), time.monotonic() + self._timeout_seconds
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(deadline - time.monotonic(), 0.0))
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
        return {slot: found[slot] for slot in arguments}

    def status(self, slots: Sequence[int] | None = None) -> dict[int, SlotStatus | None]:
        """What slots (all) do now, also while they compute; None of one whose process is stopped or gone."""
        found = ask_each(self._contacts_of(slots), {"ask": "status"}, STATUS_SECONDS)
        return {slot: None if told is None else SlotStatus(**told) for slot, told in found.items()}

    def memory(self) -> dict[int, ControlMemory | None]:
        """What each slot's process and ledger hold now; None as in `status`."""
        found = ask_each(self.contacts, {"ask": "memory"}, STATUS_SECONDS)
        return {slot: None if told is None else ControlMemory(**told) for slot, told in found.items()}

    def abort(self, reason: str) -> tuple[int, ...]:
        """Tells every slot to end the call that it is in, which then raises SlotAborted; those that were in one.

        A slot looks between tasks of a change, micro-batches, tokens and layers of a sync, not inside a collective.
        """
        found = ask_each(self.contacts, {"ask": "abort", "reason": reason}, STATUS_SECONDS)
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
            ray.kill(self._actors.pop(slot))
            _kill(self.contacts[slot])
        renumbered = {old: new for new, old in enumerate(sorted(self._actors))}
        self._actors = {renumbered[old]: actor for old, actor in self._actors.items()}
        self.contacts = {renumbered[old]: found for old, found in self.contacts.items() if old in renumbered}
        self._logs_of = {renumbered[old]: log for old, log in self._logs_of.items() if old in renumbered}
        self.hosts = {renumbered[old]: host for old, host in self.hosts.items() if old in renumbered}
        self.numbers = tuple(sorted(self._actors))
        self.call("renumber", {slot: (slot,) for slot in self.numbers})
        return renumbered

    def rejoin(self) -> None:
        """Forms the world of the slots that there are."""
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
        for actor in (*self._actors.values(), *(actor for actor, *_ in self._boots)):
            ray.kill(actor)
        self._actors, self._boots, self.contacts = {}, [], {}
        ray.shutdown()
