"""Slots that die or fail at each kind of operation of a change, in each mode: how every case ends.

    make bench-faults            all cases (at most 20 minutes)
    make bench-faults ARGS=8     the first eight

A case is a job of three steps whose actor changes after the first; a fault strikes a slot at its first task of a kind.
Expected is written down before: the state version that stands, where the bytes come from, and that all steps are done.
State that stands without a checkpoint must have the digests that its slots took before the change; state from a
checkpoint has those of its manifest (`nereus.runtime.restore` compares them). Cases share slots as long as they live.
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

SLOTS = 4
BEFORE = ("quiesce", "allocate", "build_groups", "build_engine", "copy", "transfer", "verify")
AFTER = ("activate", "release", "destroy_groups")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What strikes where. `replicated`: DP2 without sharded optimizer, so that other slots hold all; else DP1."""

    fault: str
    kind: str
    mode: str
    replicated: bool
    victim: int

    @property
    def name(self) -> str:
        """Its line in the table."""
        layout = "DP2" if self.replicated else "DP1"
        return f"{self.fault:4} {self.mode:10} {self.kind:14} {layout} slot {self.victim}"

    @property
    def committed(self) -> bool:
        """Whether the fault comes after the commit record."""
        return self.kind in AFTER

    @property
    def sources(self) -> set[str]:
        """Where the actor's bytes may come from."""
        if self.fault == "fail":
            return {"slots", "snapshot"}
        if self.replicated:
            return {"slots", "snapshot"}
        return {"snapshot", "checkpoint"} if not self.committed and self.mode != "beside" else {"checkpoint"}


def cases() -> list[Case]:
    """Every kind: a failure that all slots live through, then kills of each role in each mode and from both layouts."""
    found = [
        Case(fault="fail", kind=kind, mode=mode, replicated=False, victim=1)
        for mode in ("beside", "snapshot")
        for kind in (*BEFORE, *(("stage_out",) if mode == "snapshot" else ()), *AFTER)
    ]
    for mode in ("beside", "snapshot", "checkpoint"):
        kinds = (*BEFORE, *(("stage_out",) if mode != "beside" else ()), *AFTER)
        for number, kind in enumerate(kinds):
            found.append(Case(fault="kill", kind=kind, mode=mode, replicated=number % 2 == 0, victim=number % 3))
    return found


def job(case: Case, slots: int) -> Config:
    """The job of a case: the actor goes from a pipeline to replicas, or from replicas to a pipeline, on all slots."""
    if case.replicated:
        actor, to = S(dp=slots, distributed_optimizer=False), S(tp=1, pp=slots)
    else:
        actor, to = S(pp=slots), S(dp=slots)
    whole = S(dp=slots, distributed_optimizer=False)
    plan = PlanConfig(actor_train=actor, actor_generate=S(dp=slots), critic_train=whole, reference_infer=S(dp=slots))
    return config(
        run=RunConfig(name="fault", seed=7, steps=3),
        model=ModelConfig(init_std=0.08, layers=12, hidden=64, head_dim=32, heads=2, kv_heads=2, ffn=128),
        warmup=WarmupConfig(steps=1, samples=8),
        fleet=FleetConfig(slots=slots),
        plan=plan,
        changes=changes((2, {"actor_train": to})),
        checkpoint=CheckpointConfig(every_steps=1),
    )


def judged(case: Case, events: list[dict[str, Any]], slots: int) -> str:
    """What is wrong with how a case ended; nothing when it ended as it must."""
    lost = [e for e in events if e["kind"] == "slots_lost"]
    recovered = [e for e in events if e["kind"] == "recovered"]
    if len(lost) != 1 or len(recovered) != 1:
        return f"{len(lost)} losses and {len(recovered)} recoveries, expected one of each"
    (hit,), (back,) = lost, recovered
    expected = [] if case.fault == "fail" else [case.victim]
    if hit["lost"] != expected:
        return f"lost {hit['lost']}, expected {expected}"
    if back["state_version"] != int(case.committed):
        return f"version {back['state_version']} stands"
    source = back["sources"]["actor.train"]
    if source not in case.sources:
        return f"the actor came from {source}, expected {sorted(case.sources)}"
    known = {key: value for key, value in hit["digests"].items() if back["digests"].get(key) not in (value, None)}
    if source != "checkpoint" and known and case.fault == "fail":
        return f"digests changed: {sorted(known)}"
    if back["slots"] != slots - len(expected):
        return f"{back['slots']} slots go on"
    done = sorted({e["step"] for e in events if e["kind"] == "step_done"})
    if done != [1, 2, 3] or events[-1].get("reason") != "done":
        return f"steps {done}, end {events[-1].get('reason')}"
    return ""


def run_case(case: Case, pool: SlotPool, folder: Path) -> str:
    """Carries a case out; what is wrong, "" for nothing."""
    slots = len(pool.numbers)
    fault = (case.fault, case.kind, "" if case.kind == "transfer" else "actor.train")
    modes: dict[str, Any] = {"actor.train": case.mode}
    world = run_job(pool, job(case, slots), folder, faults={case.victim % slots: fault}, modes=modes)
    return judged(replace(case, victim=case.victim % slots), list(read_journal(world.folder.events)), slots)


def main(arguments: list[str]) -> int:
    """Prints a line a case and the count; 1 when a case ended otherwise than it must."""
    wanted = cases()[: int(arguments[0]) if arguments else None]
    started, wrong = time.monotonic(), 0
    pool: SlotPool | None = None
    with tempfile.TemporaryDirectory(prefix="nereus-faults-") as name:
        try:
            for number, case in enumerate(wanted):
                if pool is None or len(pool.numbers) < 2:
                    if pool is not None:
                        pool.close()
                    pool = new_pool(Path(name))
                begun, slots = time.monotonic(), len(pool.numbers)
                try:
                    said = run_case(case, pool, Path(name) / str(number))
                except Exception as error:  # noqa: BLE001  # the table shows every case
                    said = f"{type(error).__name__}: {str(error)[:300]}"
                    pool.close()
                    pool = None
                wrong += bool(said)
                print(
                    f"{case.name}  on {slots}: {said or 'as expected'}  ({time.monotonic() - begun:.0f} s)", flush=True
                )
        finally:
            if pool is not None:
                pool.close()
    minutes = (time.monotonic() - started) / 60
    print(f"{len(wanted)} cases, {wrong} ended otherwise than they must, {minutes:.1f} minutes")
    return int(wrong > 0)


def new_pool(folder: Path) -> SlotPool:
    """Fresh slots."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    return SlotPool(SLOTS, logs, start_timeout_seconds=300, phase_timeout_seconds=60, note=lambda _: None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
