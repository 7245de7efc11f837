"""How live slots are found again, who ends them, and when another driver may take them over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.cli.attach import Left, end_slots, left_slots
from nereus.cli.folder import create_run_folder
from nereus.cli.resume import resumed_run
from nereus.config import CheckpointConfig, Config, FleetConfig, PlanChange
from nereus.control.written import written
from nereus.errors import CheckpointError, ConfigError, JournalError
from nereus.layout import first_plan
from nereus.runtime import host_memory
from nereus.runtime.attachment import Attaching, Attachment, LiveSlot, read, write
from nereus.runtime.control import Contact, Touch, ask
from nereus.runtime.host_memory import HostMemory, kept, left
from nereus.runtime.journal import Journal, RunFolder, read_journal
from tests.core.scenes import DP4, THREE, with_changes

STATUS = {"ask": "status"}
SLOT = """
import sys, time
from types import SimpleNamespace
from nereus.runtime.control import Control, Watch, serve
slot = SimpleNamespace(number=0, live={}, steps={})
watch = Watch(float(sys.argv[1]), float(sys.argv[2]), lambda: print("ended", flush=True))
found = serve(Control(slot), "127.0.0.1", watch)
print(found.pid, found.port, found.key, flush=True)
time.sleep(600)
"""


class Slots:
    """Processes with a control thread and nothing else."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, limit_seconds: float = 60.0, first_seconds: float = 60.0) -> tuple[subprocess.Popen[str], Contact]:
        command = [sys.executable, "-c", SLOT, str(limit_seconds), str(first_seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        assert process.stdout is not None
        pid, port, key = process.stdout.readline().split()
        return process, Contact(pid=int(pid), address="127.0.0.1", port=int(port), key=key)


@pytest.fixture
def slots() -> Iterator[Slots]:
    found = Slots()
    yield found
    for process in found.started:
        process.kill()
        process.communicate()


def attachment(*contacts: Contact) -> Attachment:
    return Attachment(
        cluster="127.0.0.1:6379",
        namespace="nereus-0",
        nodes=("n0",),
        several_hosts=False,
        started_count=len(contacts),
        host_memory="",
        slots={
            n: LiveSlot(actor=f"slot-{n}", contact=each, host_index=0, log=f"slot_{n}.log")
            for n, each in enumerate(contacts)
        },
    )


NOBODY = Contact(pid=1, address="127.0.0.1", port=9, key="00")


def test_the_file_is_private_and_whole(tmp_path: Path) -> None:
    path, told = tmp_path / "slots.json", attachment(NOBODY, replace(NOBODY, port=10))
    write(path, attachment(NOBODY))
    write(path, told)
    assert read(path) == told
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path], "no draft is left"
    content = path.read_bytes()
    for cut_bytes in range(0, len(content), 7):
        path.write_bytes(content[:cut_bytes])
        with pytest.raises(JournalError, match=r"slots\.json: does not say where the slots are"):
            read(path)


@pytest.mark.parametrize("content", ["[]", "{}", '{"slots": {"0": {}}}', '{"slots": 3}', "null"])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "slots.json").write_text(content)
    with pytest.raises(JournalError):
        read(tmp_path / "slots.json")


def test_a_slot_without_a_driver_ends_itself(slots: Slots) -> None:
    process, _ = slots.start(limit_seconds=30.0, first_seconds=1.0)
    assert process.wait(120) == 0
    assert process.stdout is not None
    said = process.stdout.read()
    assert "no driver has asked for 30 s: this slot ends" in said
    assert said.endswith("ended\n"), "what it holds is given back first"


def test_a_slot_lives_as_long_as_its_driver_is_in_touch(slots: Slots) -> None:
    """Many times its limit, of which it hears by a questions a fifth of that apart."""
    process, contact = slots.start(limit_seconds=2.0, first_seconds=60.0)
    touch = Touch(lambda: [contact], 2.0)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(8)
    touch.close()
    assert process.wait(120) == 0


def test_a_slot_is_ended_by_whoever_has_its_key(slots: Slots) -> None:
    process, contact = slots.start()
    assert ask(replace(contact, key="00" * 32), {"ask": "end"}, 10.0) is None
    assert ask(contact, {"ask": "end"}, 10.0) is True
    assert process.wait(120) == 0


# -- host memory -------------------------------------------------------------------------------------------------------


def test_host_memory_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed driver left stays while a slot keeps it, is another's then, and goes with that one."""
    monkeypatch.setattr(host_memory, "PLACES", (tmp_path,))
    words = f"""
import os
from pathlib import Path
from nereus.runtime import host_memory
host_memory.PLACES = (Path({str(tmp_path)!r}),)
host = host_memory.HostMemory(None)
(host.folder / "snapshots").mkdir()
print(host.folder, flush=True)
os._exit(0)
"""
    told = subprocess.run([sys.executable, "-c", words], check=True, capture_output=True, text=True, timeout=120)
    folder = Path(told.stdout.strip())
    keeping = kept(folder)
    assert keeping is not None
    other = HostMemory(None)
    assert other.folder != folder
    assert folder.is_dir(), "a slot keeps it"
    host = HostMemory(None)
    assert host.adopt(folder)
    keeping.close()
    host_memory.remove_orphans(tmp_path)
    assert host.snapshots("snapshot").is_dir(), "its new owner keeps it"
    host.close()
    assert not folder.exists()
    assert not HostMemory(None).adopt(folder)
    assert kept(folder) is None
    other.close()


def test_the_last_slot_takes_the_folder_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PLACES", (tmp_path,))
    host = HostMemory(None)
    first, last = kept(host.folder), kept(host.folder)
    host._owner.close()  # as if the driver were killed
    left(first)
    assert host.folder.is_dir()
    left(last)
    assert not host.folder.exists()


# -- resuming ----------------------------------------------------------------------------------------------------------

CONFIG = replace(
    with_changes((3, PlanChange(actor_train=DP4)), (5, PlanChange(critic_train=THREE))),
    fleet=FleetConfig(slots=4, reattach_seconds=60.0),
    checkpoint=CheckpointConfig(every_steps=1),
)


def run_folder(tmp_path: Path, config: Config, steps: int) -> RunFolder:
    """A run whose driver has died after so many steps."""
    folder = create_run_folder(config, tmp_path)
    journal = Journal(folder.events)
    counters: dict[str, Any] = {"state_version": 0, "kl_coef": 0.25}
    journal.append("run_started", config={}, slots=4, rollouts=None)
    for step in range(steps + 1):
        done = {"actor.train": 2 * step, "critic.train": 2 * step}
        kind, more = ("step_done", {}) if step else ("state", {"plan": written(first_plan(config)), "digests": {}})
        journal.append(kind, step=step, data_position=8 * step, optimizer_steps=done, **counters, **more)
    journal.close()
    return folder


def live(slots: Slots, folder: RunFolder, dead: tuple[int, ...] = ()) -> list[subprocess.Popen[str]]:
    """Four slots of the run; the dead ones never answer."""
    found = {n: slots.start() for n in range(4) if n not in dead}
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = replace(NOBODY, port=closed.getsockname()[1])
    write(folder.slots, attachment(*(found[n][1] if n in found else gone for n in range(4))))
    return [process for process, _ in found.values()]


def resumed(folder: RunFolder, *overrides: str):
    return resumed_run(Namespace(words=[str(folder.path), *overrides], rollouts=None))


def test_live_slots_go_on_where_they_are(slots: Slots, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, CONFIG, steps=3)
    live(slots, folder)
    run = resumed(folder, "run.steps=9", "plan.critic_train={tp: 1, pp: 1, dp: 4}")
    assert run.attaching is not None
    assert (run.resumption.manifest.step, run.config.run.steps, run.config.algorithm.kl_coef) == (3, 9, 0.25)
    assert first_plan(run.config).critic_train.layout.dp == 4, "another plan is brought about at once"
    assert [change.step for change in run.config.changes] == [5]
    assert not run.nothing_left
    assert "attaching to 4 live slots" in run.told()[0]
    for word, expected in {
        "fleet.slots=3": "expected 4, the slots",
        "fleet.reattach_seconds=30": "expected 60.0",
    }.items():
        with pytest.raises(ConfigError, match=expected):
            resumed(folder, word)


def test_dead_slots_are_lost(slots: Slots, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, CONFIG, steps=4)
    live(slots, folder, dead=(1,))
    run = resumed(folder)
    assert run.attaching is not None
    assert (run.attaching.lost_slots, run.config.fleet.slots) == ((1,), 3)
    assert run.config.changes == (), "the one of step 5 names a slot that is gone"
    assert {slot for _, stage in first_plan(run.config).stages() for slot in stage.slots} <= {0, 1, 2}
    found = left_slots(
        folder, replace(CONFIG, fleet=replace(CONFIG.fleet, on_loss="stop")), read_journal(folder.events)
    )
    assert isinstance(found, Left)
    assert "slots 1 are lost" in found.why


def test_what_cannot_be_taken_over_is_told_and_ended(slots: Slots, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, CONFIG, steps=2)
    processes = live(slots, folder)
    events = read_journal(folder.events)
    assert isinstance(left_slots(folder, CONFIG, events), Attaching)
    off = replace(CONFIG, fleet=replace(CONFIG.fleet, reattach_seconds=0.0))
    for wanted, known, why in (
        (off, events, "reattach_seconds = 0"),
        (CONFIG, events[:1], "before the first state"),
        (CONFIG, [*events, {"kind": "recovering"}], "while the slots recovered"),
    ):
        found = left_slots(folder, wanted, known)
        assert isinstance(found, Left)
        assert why in found.why
    with pytest.raises(CheckpointError, match="no checkpoint to go on from"):
        resumed(folder, "fleet.reattach_seconds=0")
    assert all(process.poll() is None for process in processes), "nothing is done before the run is claimed"
    end_slots(folder, found)
    assert [process.wait(120) for process in processes] == [0, 0, 0, 0]
    assert not folder.slots.exists()


def test_without_an_answer_the_checkpoint_is_read(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, CONFIG, steps=2)
    write(folder.slots, attachment(NOBODY, NOBODY))
    found = left_slots(folder, CONFIG, read_journal(folder.events))
    assert isinstance(found, Left)
    assert found.why == "none of them answers"
    folder.slots.write_text("{")
    found = left_slots(folder, CONFIG, read_journal(folder.events))
    assert isinstance(found, Left)
    assert "does not say where the slots are" in found.why


def test_slots_outlive_their_driver_only_in_a_cluster_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from nereus.runtime.run import check_reattach

    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "127.0.0.1:6379")
    check_reattach(CONFIG)
    monkeypatch.delitem(os.environ, "RAY_ADDRESS")
    with pytest.raises(ConfigError, match=r"fleet.reattach_seconds = 60.0: set RAY_ADDRESS"):
        check_reattach(CONFIG)
    check_reattach(replace(CONFIG, fleet=FleetConfig()))
