"""The slots of bench-adapt: processes that are kept between runs, half a core each, one of them slow when told.

A slot that leaves the fleet is parked, not ended, and comes back as a new one does, without the half minute that a
process takes to import its engines: on a cluster another machine does that. A restart keeps the processes too and takes
everything else anew. Both are kinder to the baselines than the real thing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import ray

from nereus.runtime.control import Contact
from nereus.runtime.pool import Boot, SlotPool

CORE_SHARE = 0.5
PERIOD_SECONDS = 0.01
SLOW_SHARE = 0.5
"""Of what it else could, a slow slot computes so much: its control group has less, or it is stopped and let go in turn."""
RUNNING_SECONDS = 0.01
"""A slot without a control group of its own runs so long each time."""
THROTTLE = """
import os, select, signal, sys, time
stopped, running, pid = float(sys.argv[1]), float(sys.argv[2]), 0

def send(number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

while True:
    if select.select([sys.stdin], [], [], None if not pid else 0)[0]:
        line = sys.stdin.readline()
        if pid:
            send(signal.SIGCONT)
        if not line:
            break
        pid = int(line)
        continue
    send(signal.SIGSTOP)
    time.sleep(stopped)
    send(signal.SIGCONT)
    time.sleep(running)
"""


class KeptPool(SlotPool):
    """A SlotPool whose processes outlive a run, a leave and a restart."""

    _parked: list[tuple[Contact, Boot]]

    def __init__(self, slots: int, logs: Path) -> None:
        self._parked = []
        super().__init__(
            slots, logs, start_timeout_seconds=400, phase_timeout_seconds=180, note=lambda text: print(text, flush=True)
        )
        self.as_begun = dict(self.pids)

    def drop(self, lost: Sequence[int]) -> dict[int, int]:
        """The slots are parked."""
        for slot in lost:
            self._park(slot)
        return super().drop(())

    def _park(self, slot: int) -> None:
        boot = Boot(
            actor=self._actors.pop(slot),
            name=self._names[slot],
            done=None,
            log=self._logs_of[slot],
            host_index=self.hosts[slot],
        )
        self._parked.append((self.contacts[slot], boot))

    def start_more(self, count: int) -> None:
        """Those that were parked come first."""
        for _ in range(min(count, len(self._parked))):
            contact, boot = self._parked.pop()
            self._boots.append(replace(boot, done=ray.put(contact)))
            count -= 1
        if count:
            super().start_more(count)

    def restart(self, slots: int) -> None:
        """So many of the processes, as they began, form a world anew; the others are parked."""
        self.admit()
        self.call_all("leave")
        for slot in self.numbers:
            self._park(slot)
        by_pid = {contact.pid: (contact, boot) for contact, boot in self._parked}
        found = [by_pid.pop(self.as_begun[slot]) for slot in sorted(self.as_begun) if self.as_begun[slot] in by_pid]
        self._parked = [*by_pid.values(), *found[slots:]]
        self._actors = {number: boot.actor for number, (_, boot) in enumerate(found[:slots])}
        self._names = {number: boot.name for number, (_, boot) in enumerate(found[:slots])}
        self.contacts = {number: contact for number, (contact, _) in enumerate(found[:slots])}
        self._logs_of = {number: boot.log for number, (_, boot) in enumerate(found[:slots])}
        self.hosts = {number: boot.host_index for number, (_, boot) in enumerate(found[:slots])}
        self.numbers = tuple(range(slots))
        self.call("renumber", {slot: (slot,) for slot in self.numbers})
        self.rejoin()

    def close(self) -> None:
        """Parked ones too."""
        for _, boot in self._parked:
            ray.kill(boot.actor)
        self._parked = []
        super().close()


class Cores:
    """Gives every slot process `CORE_SHARE` of a core by a control group, where that may be set."""

    def __init__(self) -> None:
        self._folder = _group_folder()
        self._held: set[int] = set()

    @property
    def capped(self) -> bool:
        """Whether slots have a share of their own."""
        return self._folder is not None

    def hold(self, pids: Sequence[int]) -> None:
        """Processes that were not held yet."""
        for pid in set(pids) - self._held:
            self._held.add(pid)
            if self._folder is not None:
                folder = self._folder / f"nereus-bench-{pid}"
                folder.mkdir(exist_ok=True)
                self.give(pid, CORE_SHARE)
                (folder / "cgroup.procs").write_text(str(pid))

    def give(self, pid: int, share: float) -> None:
        """So much of a core for a process that is held."""
        if self._folder is None or pid not in self._held:
            return
        folder = self._folder / f"nereus-bench-{pid}"
        period, quota = (str(round(1e6 * s)) for s in (PERIOD_SECONDS, share * PERIOD_SECONDS))
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota} {period}")
        else:
            (folder / "cpu.cfs_period_us").write_text(period)
            (folder / "cpu.cfs_quota_us").write_text(quota)

    def close(self) -> None:
        """Takes the groups away once their processes are gone."""
        for pid in self._held if self._folder is not None else ():
            assert self._folder is not None
            with suppress(OSError):
                (self._folder / f"nereus-bench-{pid}").rmdir()


def _group_folder() -> Path | None:
    """Where control groups with a share of processor can be made: version 1's or 2's tree."""
    for folder in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")):
        probe = folder / f"nereus-bench-{os.getpid()}"
        try:
            probe.mkdir()
            able = any((probe / name).exists() for name in ("cpu.cfs_quota_us", "cpu.max"))
            probe.rmdir()
        except OSError:
            continue
        if able:
            return folder
    return None


class Throttle:
    """Makes one process slow from outside, or none."""

    def __init__(self, cores: Cores) -> None:
        self._cores, self._pid = cores, 0
        stopped = RUNNING_SECONDS / SLOW_SHARE - RUNNING_SECONDS
        self._process = subprocess.Popen(
            [sys.executable, "-c", THROTTLE, str(stopped), str(RUNNING_SECONDS)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def hold(self, pid: int) -> None:
        """This process from now on; 0 for none."""
        if pid == self._pid:
            return
        if self._cores.capped:
            self._cores.give(self._pid, CORE_SHARE)
            self._cores.give(pid, SLOW_SHARE * CORE_SHARE)
            self._pid = pid
            return
        self._pid = pid
        assert self._process.stdin is not None
        self._process.stdin.write(f"{pid}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Lets the process go and ends."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGCONT)
