"""Save under one plan, resume under others and on fewer slots: the same function of the same data."""

from __future__ import annotations

import resource
import shutil
import signal
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nereus.cli.resume import resumed_run
from nereus.config import CheckpointConfig, RunConfig, WarmupConfig
from nereus.controller import Controller
from nereus.report.display import QuietDisplay
from nereus.report.summary import render, summarise
from nereus.runtime.checkpoints import Checkpoints, newest_good, saved_steps
from nereus.runtime.journal import Journal, RunFolder, read_journal
from nereus.runtime.metrics import open_metrics, read_metrics
from nereus.runtime.pool import SlotPool
from nereus.runtime.real import RealWorld
from nereus.runtime.run import journal_start
from nereus.world import drive
from tests.live.scene import NeverStop, S, changes, config, run_job

STEPS, SAVED = 3, 2
EMUS = ("actor.train", "critic.train", "reference.infer")


class SomeSlots:
    """The first slots of the shared pool in a world of their own."""

    def __init__(self, pool: SlotPool, count: int) -> None:
        self.pool, self.numbers = pool, tuple(range(count))

    def call(self, method: str, arguments: Mapping[int, tuple[object, ...]]) -> dict[int, Any]:
        return self.pool.call(method, arguments)

    def call_all(self, method: str, *arguments: object) -> dict[int, Any]:
        return self.pool.call(method, dict.fromkeys(self.numbers, arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def join(self) -> None:
        self.pool.join(self.numbers)


@contextmanager
def some_slots(pool: SlotPool, count: int) -> Iterator[Any]:
    if count == len(pool.numbers):
        yield pool
        return
    part = SomeSlots(pool, count)
    pool.call_all("leave")
    part.join()
    try:
        yield part
    finally:
        part.call_all("leave")
        SomeSlots(pool, len(pool.numbers)).join()


@pytest.fixture(scope="module")
def saved(pool: SlotPool, tmp_path_factory: pytest.TempPathFactory) -> RealWorld:
    """A run under TP2·PP2 that saves after step 2 and at its end, after a change of plan."""
    job = config(
        run=RunConfig(name="saved", seed=3, steps=STEPS),
        changes=changes((2, {"critic_train": S(tp=2, dp=2, micro_batch=4)})),
        warmup=WarmupConfig(steps=4, samples=32, lr=3e-3),
        checkpoint=CheckpointConfig(every_steps=SAVED, keep_count=3),
    )
    return run_job(pool, job, tmp_path_factory.mktemp("saved"))


def copy_of(world: RealWorld, folder: Path, *, without_last: bool = True) -> Path:
    """The run as it was after step 2, or in whole."""
    made = folder / world.folder.path.name
    shutil.copytree(world.folder.path, made)
    if without_last:
        shutil.rmtree(made / "checkpoints" / "step-000003")
    return made


def resume(pool: Any, folder: Path, *overrides: str, rollouts: Path | None = None) -> RealWorld:
    """What `nereus resume FOLDER OVERRIDES --rollouts ROLLOUTS` does, on slots that are up."""
    found = resumed_run(
        Namespace(words=[str(folder), *overrides], rollouts=None if rollouts is None else str(rollouts))
    )
    run = RunFolder(path=folder)
    world = RealWorld(
        config=found.config,
        folder=run,
        pool=pool,
        journal=Journal(run.events),
        metrics=open_metrics(found.config, run, lambda _: None),
        display=QuietDisplay(),
        stop=NeverStop(),
        recorded=None if found.rollouts is None else RunFolder(path=found.rollouts).rollouts,
        resumption=found.resumption,
    )
    journal_start(world.journal, found.config, found.rollouts, found.resumption)
    drive(Controller(found.config), world)
    world.metrics.close()
    world.journal.close()
    return world


def compare(world: RealWorld, reference: RealWorld) -> float:
    """Losses, gradient norms, random states and counters of the steps after the checkpoint; the largest gap."""
    worst = 0.0
    assert [record.step for record in world.records] == [3]
    expected = [row for record in reference.records[SAVED:] for row in record.updates]
    for row, wanted in zip([r for record in world.records for r in record.updates], expected, strict=True):
        for key in ("actor/loss", "critic/vf_loss", "actor/grad_norm", "critic/grad_norm"):
            gap = abs(row[key] - wanted[key]) / max(1.0 if "loss" in key else 0.0, abs(wanted[key]))
            assert gap <= 1e-5, f"{key} differs by {gap:.2e}"
            worst = max(worst, gap)
        assert [row[k] for k in ("actor/rng", "critic/rng")] == [wanted[k] for k in ("actor/rng", "critic/rng")]
    assert world.job.data_position == reference.job.data_position
    assert world.job.optimizer_steps == reference.job.optimizer_steps
    return worst


PLANS = {
    "PP2 on two slots": (2, ("fleet.slots=2", "plan.actor_train={tp: 1, pp: 2}", "plan.critic_train={tp: 1, dp: 1, pp: 2}")),
    "three slots, cut anew": (3, ("fleet.slots=3",)),
    "one slot, cut anew": (1, ("fleet.slots=1",)),
}  # fmt: skip
DP4 = ("plan.actor_train={tp: 1, pp: 1, dp: 4}", "plan.critic_train={tp: 1, dp: 4}")
TP4 = ("plan.actor_train={tp: 4, pp: 1}", "plan.critic_train={tp: 4, dp: 1}")


@pytest.mark.parametrize("name", PLANS)
def test_resumed_on_fewer_slots(pool: SlotPool, saved: RealWorld, tmp_path: Path, name: str) -> None:
    slots, overrides = PLANS[name]
    folder = copy_of(saved, tmp_path)
    with some_slots(pool, slots) as part:
        world = resume(part, folder, *overrides, rollouts=saved.folder.path)
    print(f"{name}: {world.job.plan}; largest gap {compare(world, saved):.1e}")
    assert saved_steps(folder / "checkpoints") == (2, 3)
    rows = read_metrics(RunFolder(path=folder).metrics)
    assert [row["training/global_step"] for row in rows] == [1, 2, 3]


def test_the_record_of_saving(saved: RealWorld) -> None:
    """Journal, retention and the pointer; the pieces of slots are disjoint and every slot writes."""
    events: list[Any] = list(read_journal(saved.folder.events))
    kinds = [e["kind"] for e in events if e["kind"].startswith("checkpoint")]
    assert kinds == ["checkpoint_started", "checkpoint_saved"] * 2
    done = [e for e in events if e["kind"] == "checkpoint_saved"]
    assert [e["step"] for e in done] == [2, 3]
    assert all(set(e["seconds"]) == {"snapshot", "write", "waited", "commit", "until_durable"} for e in done)
    assert all(e["foreground"] == {} for e in done), "the copies fit, so that threads write"
    folder = saved.folder.checkpoints
    assert (folder / "latest").read_text() == "step-000003\n"
    manifest = newest_good(folder).manifest
    assert [f.name for f in manifest.files] == [f"slot-00{slot}.safetensors" for slot in range(4)]
    sizes = [f.size_bytes for f in manifest.files]
    assert max(sizes) <= 1.2 * min(sizes), "slots share the writing"
    assert manifest.optimizer_steps == {"actor.train": 6, "critic.train": 6}
    assert (manifest.data_position, manifest.kl_coef, manifest.state_version) == (24, 0.01, 1)
    print("seconds of the saves:", [e["seconds"] for e in done], "bytes", manifest.size_bytes)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used_under_tp4(
    pool: SlotPool, saved: RealWorld, tmp_path: Path
) -> None:
    folder = copy_of(saved, tmp_path, without_last=False)
    damaged = folder / "checkpoints" / "step-000003" / "slot-002.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    world = resume(pool, folder, *TP4, rollouts=saved.folder.path)
    print(f"TP4: {world.job.plan}; largest gap {compare(world, saved):.1e}")
    assert world.resumption is not None
    assert [str(damaged) in reason for reason in world.resumption.refused] == [True]
    assert newest_good(folder / "checkpoints").manifest.step == 3, "the damaged one was replaced"
    events: list[Any] = list(read_journal(RunFolder(path=folder).events))
    state = next(e for e in reversed(events) if e["kind"] == "state")
    before = next(e for e in events if e["kind"] == "checkpoint_saved" and e["step"] == SAVED)
    assert {key.split(" ")[0] for key in state["digests"]} == set(EMUS)
    assert state["digests"] == before["digests"], "the state on the slots is the state that was saved"
    assert state["state_version"] == 1
    text = render(summarise(folder))
    assert "done, 3 of 3 steps" in text
    assert "resumed after step 2" in text


def limit(slot: Any, size_bytes: int) -> int:
    """Sets the largest file that the process may write; returns the limit before."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    return before


def budget(slot: Any, room_bytes: int | None) -> int:
    """Leaves `room_bytes` of the slot's budget; None gives all of it back. Returns what is held."""
    given = slot.config.fleet.slot_budget_bytes
    slot.ledger.budget_bytes = given if room_bytes is None else slot.ledger.total_bytes + room_bytes
    return slot.ledger.total_bytes


def test_saves_that_fail_cost_a_line_and_the_run_goes_on_under_dp4(
    pool: SlotPool, saved: RealWorld, tmp_path: Path
) -> None:
    """As on a full disk: writing fails in the background, the run ends well, the checkpoint before stands."""
    folder = copy_of(saved, tmp_path)
    checkpoints = folder / "checkpoints"
    before = pool.call("apply", {1: (limit, 50_000)})
    try:
        world = resume(pool, folder, "checkpoint.every_steps=1", *DP4, rollouts=saved.folder.path)
    finally:
        pool.call("apply", {1: (limit, before[1])})
    print(f"DP4: {world.job.plan}; largest gap {compare(world, saved):.1e}")
    events: list[Any] = list(read_journal(RunFolder(path=folder).events))
    failed = [e for e in events if e["kind"] == "checkpoint_failed"]
    assert [e["step"] for e in failed] == [3, 3], "tried once more at the end"
    assert all("slot 1: " in e["reason"] and "File too large" in e["reason"] for e in failed)
    assert events[-1]["kind"] == "run_stopped"
    assert newest_good(checkpoints).manifest.step == SAVED
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "step-000002"], "no draft is left"

    foreground_and_unwritable(pool, world, tmp_path)


def foreground_and_unwritable(pool: SlotPool, world: RealWorld, folder: Path) -> None:
    """On the job that is still live: without room for a copy slots write in the foreground, and the state is the same."""
    told: list[str] = []
    path = folder / "events.jsonl"
    journal = Journal(path)
    saves = Checkpoints(job=world.job, folder=folder / "there", journal=journal, note=told.append)
    held = pool.call_all("apply", budget, 3 << 20)
    try:
        saves.at_end(3)
    finally:
        assert pool.call_all("apply", budget, None) == held, "the ledger has its copy back"
    saves.at_end(3)
    done: list[Any] = [e for e in read_journal(path) if e["kind"] == "checkpoint_saved"]
    assert len(done) == 1, "what is saved is not saved again"
    assert sorted(done[0]["foreground"]) == ["0", "1", "2", "3"]
    assert "checkpoint.snapshot needs" in done[0]["foreground"]["0"]
    manifest = newest_good(folder / "there").manifest
    assert manifest.digests == {**world.job.digests(EMUS, "")}
    assert told == []
    (folder / "a file").write_text("")
    fails = Checkpoints(job=world.job, folder=folder / "a file", journal=journal, note=told.append)
    for _ in range(2):
        fails.at_end(3)
    assert len(told) == 1, "told once"
    assert "the run goes on" in told[0]
    assert [e["kind"] for e in read_journal(path)].count("checkpoint_failed") == 2
