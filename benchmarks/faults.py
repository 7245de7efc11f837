"""Slots that die or fail at each kind of operation of a change, in each mode: how every case ends.

    make bench-faults                  what fits into 20 minutes: every kind, each role, each mode
    make bench-faults ARGS=every       all cases
    make bench-faults ARGS=snapshot    those of them whose line contains a word

A case is a job of three or four steps whose actor moves before the last, from slot 0 (DP1), or from slots 0 and 1 without a sharded
optimizer (DP2), to one other slot; the fault strikes when a slot comes to its first task of a kind. A sender, the
receiver or a bystander is killed, or the task fails, or a byte is flipped before the digests are compared. Written down
before: the state version that stands, where the actor may come from, that all steps are done. In every case the state
that the run goes on with has the digests that the same job without change and fault has after the same step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nereus.config import CheckpointConfig, Config, FleetConfig, ModelConfig, PlanConfig, RunConfig, WarmupConfig
from nereus.runtime.journal import read_journal
from nereus.runtime.pool import SlotPool
from tests.live.scene import S, changes, config, run_job

MODES = ("beside", "snapshot", "checkpoint")
ROLES = ("sender", "receiver", "bystander")
OF_SENDER = ("quiesce", "stage_out", "transfer", "release", "destroy_groups")
"""Kinds that the sender comes to; the receiver comes to the others."""
BEFORE = ("quiesce", "stage_out", "allocate", "build_groups", "build_engine", "transfer", "verify")
AFTER = ("activate", "release", "destroy_groups")
EARLY = ("allocate", "build_groups", "build_engine")
"""Kinds that come at a boundary of the step before the change."""
EMU = "actor.train"
STEPS = 4
"""Of the longest case."""
SLOTS = 4
EVERY = "every"
"""The word for all cases."""
POLL_SECONDS = 0.1
Truth = dict[int, dict[str, str]]
"""Digests of the state after each step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What strikes whom, where. `replicated`: the actor leaves two slots that hold all of it alike, else one."""

    fault: str
    kind: str
    mode: str
    replicated: bool
    role: str

    @property
    def name(self) -> str:
        """Its line in the table."""
        return f"{self.fault:4} {self.mode:10} {self.kind:14} {'DP2' if self.replicated else 'DP1'} {self.role:9}"

    @property
    def steps(self) -> int:
        """How many steps the job has, of which the actor moves before the last.

        What comes early strikes in the step before, when the checkpoint of one more step is to be there.
        """
        return STEPS if self.kind in EARLY else STEPS - 1

    @property
    def receiver(self) -> int:
        """The slot that the actor goes to."""
        return 2 if self.replicated else 1

    @property
    def striker(self) -> int:
        """The slot that comes to the task."""
        return 0 if self.kind in OF_SENDER else self.receiver

    @property
    def victim(self) -> int:
        """The slot that dies, or fails."""
        return {"sender": 0, "receiver": self.receiver, "bystander": self.receiver + 1}[self.role]

    @property
    def part_done(self) -> bool:
        """Whether the victim has nothing left to do before the commit, so that either version may be the journal's.

        The receiver has verified all bytes then; the version that the journal names is checked as everywhere.
        """
        last = {"sender": ("verify",), "receiver": () if self.mode == "beside" else ("release",)}
        return self.role == "bystander" or self.kind in last[self.role]

    @property
    def after_commit(self) -> bool:
        """Whether the task comes after the commit; with a snapshot the old state goes before it, to make room."""
        return self.kind in AFTER and not (self.kind == "release" and self.mode != "beside")


def cases(*, every: bool = False) -> list[Case]:
    """Every kind: failures that all slots live through, a flipped byte, and each role killed in each mode."""
    found = [
        Case(fault="fail", kind=kind, mode="beside", replicated=bool(n % 2), role=_own_role(kind))
        for n, kind in enumerate((*BEFORE, *AFTER))
        if kind != "stage_out"
    ]
    found.append(Case(fault="fail", kind="stage_out", mode="snapshot", replicated=False, role="sender"))
    found += [Case(fault="flip", kind="verify", mode=mode, replicated=False, role="receiver") for mode in MODES]
    for m, mode in enumerate(MODES):
        kinds = [kind for kind in (*BEFORE, *AFTER) if kind != "stage_out" or mode != "beside"]
        found += [
            Case(fault="kill", kind=kind, mode=mode, replicated=(k + r + m) % 2 == 0, role=role)
            for k, kind in enumerate(kinds)
            for r, role in enumerate(ROLES)
            if _wanted(mode, role, k, r) or (every and (mode != "checkpoint" or r == k % 3))
        ]
    return sorted(found, key=lambda case: (case.fault == "kill", case.mode if case.fault == "kill" else ""))


def _wanted(mode: str, role: str, kind: int, place: int) -> bool:
    """The sender and the receiver of every kind beside and with a snapshot, the others of every third; `every` has them all.

    In mode checkpoint only the folder is another than in mode snapshot.
    """
    if mode == "checkpoint":
        return kind % 3 == place == 1
    return role != "bystander" or (kind + MODES.index(mode)) % 3 == 0


def _own_role(kind: str) -> str:
    return "sender" if kind in OF_SENDER else "receiver"


def job(case: Case) -> Config:
    """The job of a case: critic and reference are on all slots, whole on each."""
    actor = S(dp=2, slots=(0, 1), distributed_optimizer=False) if case.replicated else S(slots=(0,))
    everywhere = S(dp=SLOTS)
    plan = PlanConfig(
        actor_train=actor,
        actor_generate=everywhere,
        critic_train=replace(everywhere, distributed_optimizer=False),
        reference_infer=everywhere,
    )
    return config(
        run=RunConfig(name="fault", seed=7, steps=case.steps),
        model=ModelConfig(init_std=0.08, layers=2, hidden=64, head_dim=32, heads=2, kv_heads=2, ffn=128),
        warmup=WarmupConfig(steps=1, samples=8),
        fleet=FleetConfig(slots=SLOTS),
        plan=plan,
        changes=changes((case.steps, {"actor_train": S(slots=(case.receiver,))})),
        checkpoint=CheckpointConfig(every_steps=1),
    )


def judged(case: Case, events: list[dict[str, Any]], truth: Truth) -> str:
    """What is wrong with how a case ended; nothing when it ended as it must."""
    done = {e["step"] for e in events if e["kind"] == "step_done"}
    if done != set(range(1, case.steps + 1)) or events[-1].get("reason") != "done":
        return f"steps {sorted(done)}, end {events[-1].get('reason')}"
    lost = [e for e in events if e["kind"] == "slots_lost"]
    back = [e for e in events if e["kind"] == "recovered"]
    if case.fault == "flip" and case.mode == "beside":
        undone = any(e["kind"] == "transition_failed" and "after the movement" in str(e["reason"]) for e in events)
        return "" if undone and not lost else "the flipped byte was not found"
    if len(lost) != 1 or len(back) != 1:
        return f"{len(lost)} losses and {len(back)} recoveries, expected one of each"
    committed = any(e["kind"] == "commit" for e in events[: events.index(lost[0])])
    return _who_is_left(case, lost[0], back[0]) or _what_stands(case, back[0], truth, committed=committed)


def _who_is_left(case: Case, lost: dict[str, Any], back: dict[str, Any]) -> str:
    gone = [case.victim] if case.fault == "kill" else []
    if lost["lost"] != gone:
        return f"lost {lost['lost']}, expected {gone}"
    return "" if back["slots"] == SLOTS - len(gone) else f"{back['slots']} slots go on"


def _what_stands(case: Case, back: dict[str, Any], truth: Truth, *, committed: bool) -> str:
    if not case.part_done and committed != case.after_commit:
        return f"committed: {committed}"
    if back["state_version"] != int(committed):
        return f"version {back['state_version']} stands, committed: {committed}"
    source, expected = back["sources"][EMU], sources(case, committed=committed)
    if source not in expected:
        return f"the actor came from {source}, expected {' or '.join(sorted(expected))}"
    after = truth[back["next_step"] - 1]
    wrong = {key for key, digest in after.items() if back["digests"].get(key) != digest}
    return f"digests changed: {', '.join(sorted(wrong))}" if wrong else ""


def sources(case: Case, *, committed: bool) -> set[str]:
    """Where the actor's bytes may come from: a checkpoint where the dead slot alone held them, or in the midst of a step."""
    kill = case.fault == "kill"
    if kill and case.victim == case.receiver and committed:
        return {"checkpoint"}
    anywhere = {"slots", "snapshot", "checkpoint"}
    if kill and case.victim == 0 and not case.replicated and not committed:
        staged = case.mode != "beside" and case.kind not in ("quiesce", "stage_out")
        return {"snapshot", "checkpoint"} if staged else {"checkpoint"}
    return anywhere if kill and case.kind in EARLY else {"slots", "snapshot"}


def truth_of(case: Case, pool: SlotPool, folder: Path) -> Truth:
    """The state after each step of the case's job without its change."""
    made = job(case)
    undisturbed = replace(
        made, run=replace(made.run, steps=STEPS), changes=(), checkpoint=CheckpointConfig(every_steps=1, keep_count=9)
    )
    events: list[dict[str, Any]] = list(read_journal(run_job(pool, undisturbed, folder).folder.events))
    return {e["step"]: e["digests"] for e in events if e["kind"] == "checkpoint_saved"}


def run_case(case: Case, pool: SlotPool, folder: Path, truth: Truth) -> str:
    """Carries a case out; what is wrong, "" for nothing."""
    kill = f"kill {pool.pids[case.victim]}"
    fault = kill if case.fault == "kill" else case.fault, case.kind, "" if case.kind == "transfer" else EMU
    modes: dict[str, Any] = {EMU: case.mode}
    world = run_job(pool, job(case), folder, faults={case.striker: fault}, modes=modes)
    return judged(case, list(read_journal(world.folder.events)), truth)


class StandingPool(SlotPool):
    """Four slots, and one that boots beside them and takes the place of the next one that dies; no job sees it before."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(exist_ok=True)
        super().__init__(SLOTS + 1, logs, start_timeout_seconds=300, phase_timeout_seconds=60, note=lambda _: None)
        self._leave_to((SLOTS,))

    def arrived(self) -> int:
        """What a job asks for."""
        return 0

    def fill(self, *, expect_loss: bool) -> None:
        """Four slots again, and the next one on its way where one will be lost."""
        while len(self.numbers) < SLOTS:
            if not self._boots:
                self.start_more(SLOTS - len(self.numbers))
            while not super().arrived():
                time.sleep(POLL_SECONDS)
            self.call_all("leave")
            self.admit()
            self._leave_to(self.numbers[SLOTS:])
        if expect_loss and not self._boots:
            self.start_more(1)

    def _leave_to(self, lost: tuple[int, ...]) -> None:
        """Goes on without these slots."""
        if lost:
            self.call_all("leave")
            self.drop(lost)
        self.rejoin()


def main(arguments: list[str]) -> int:
    """Prints a line a case and the count; 1 when a case ended otherwise than it must."""
    words = [word for word in arguments if word != EVERY]
    known = cases(every=len(arguments) > 0)
    wanted = [case for case in known if all(word in case.name for word in words)]
    started, wrong = time.monotonic(), 0
    truths: dict[bool, Truth] = {}
    with tempfile.TemporaryDirectory(prefix="nereus-faults-") as name:
        pool = StandingPool(Path(name) / "logs")
        try:
            for number, case in enumerate(wanted):
                begun = time.monotonic()
                try:
                    pool.fill(expect_loss=any(each.fault == "kill" for each in wanted[number : number + 2]))
                    if case.replicated not in truths:
                        truths[case.replicated] = truth_of(case, pool, Path(name) / f"truth-{number}")
                    said = run_case(case, pool, Path(name) / str(number), truths[case.replicated])
                except Exception as error:  # noqa: BLE001  # the table shows every case
                    said = f"{type(error).__name__}: {str(error)[-700:]}"
                    pool.close()
                    pool = StandingPool(Path(name) / "logs")
                wrong += bool(said)
                seconds = time.monotonic() - begun
                print(f"{case.name}: {said or 'as expected'}  ({seconds:.0f} s)", flush=True)
        finally:
            pool.close()
    minutes = (time.monotonic() - started) / 60
    print(f"{len(wanted)} cases, {wrong} ended otherwise than they must, {minutes:.1f} minutes")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
