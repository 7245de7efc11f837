"""What travels is what was planned, and what arrives is what was sent: changes, weight syncs, and vLLM's answers."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import nereus.runtime.fabric
import nereus.slices
import nereus.transition
from nereus.config import Config, ModelConfig, RunConfig, TransferConfig, WarmupConfig
from nereus.errors import DigestMismatch, TransferFailed
from nereus.rl.batch import build
from nereus.rl.correction import mismatch
from nereus.rollout import Request
from nereus.runtime.changes import ChangeUndone
from nereus.runtime.journal import read_journal
from nereus.runtime.pool import SlotPool
from nereus.slices import movement
from nereus.transition import build as build_transition
from tests.live.faults import plant, seen, watch
from tests.live.scene import FIRST, S, Scene, config

LAYOUTS = (  # (actor training layout, generation layout) of a tour through all that the quickstart uses, and more
    (S(pp=2, dp=2, micro_batch=4), S(tp=2, dp=2)),
    (S(dp=4, micro_batch=4), S(dp=4)),
    (S(dp=3, micro_batch=4), S(dp=3)),
    (S(tp=4, micro_batch=4), S(tp=4)),
    (S(tp=2, pp=2, pipeline=(1, 3), micro_batch=4), S(tp=2, slots=(2, 3))),
)


def parity(scene: Scene, *, poison: bool = False) -> float:
    """Syncs, samples 12 requests, and compares vLLM's log-probabilities with the trainer's on the same tokens."""
    report = scene.phases.sync(poison=poison)
    sync = scene.job.sync
    assert sync is not None
    planned = sync.whole
    for slot in scene.pool.numbers:
        assert report.sent_bytes[slot] == planned.sent_bytes(slot)
        assert report.received_bytes[slot] == planned.received_bytes(slot)
    layer = max(sum(s.size_bytes for s in movement_target(part)) for part in sync.layers)
    assert report.staged_bytes <= scene.config.transfer.bucket_bytes + layer
    requests = [
        Request(
            request_id=str(i),
            prompt_tokens=scene.phases.task.prompt(i % 4).token_ids,  # prompts repeat: the prefix cache takes part
            seed=i + 1,
            temperature=1.0,
            max_response_tokens=8,
            stop_token=258,
        )
        for i in range(12)
    ]
    done = scene.phases.sample(requests)
    batch = build([r.prompt_tokens for r in requests], [c.tokens for c in done])
    logp = scene.phases.infer(scene.job.plan.actor_train, batch, "old_log_prob")["logp"]
    gap = mismatch(logp, batch.align([c.logprobs for c in done]), batch.mask)
    assert gap.tokens > 12
    assert gap.mean_exp_abs < 1.001
    return gap.max_abs_nats


def movement_target(part):
    return {s.wanted for s in (*part.kept, *(x for b in part.buckets for x in b.slices))}


def test_bytes_and_parity_over_layouts(pool: SlotPool, tmp_path: Path) -> None:
    """Every layout: counted bytes are planned bytes, digests stand, log-probabilities agree after two syncs in a row."""
    scene = Scene(pool, config(), tmp_path)
    assert parity(scene, poison=True) < 1e-3  # what is not the slot's own is NaN: nothing of it is read
    for train, generate in LAYOUTS:
        scene.step()  # other weights: a stale engine or prefix cache would show
        before = build_transition(
            scene.job.specs,
            scene.job.plan,
            scene.job.plan,
            scene.config.transfer.bucket_bytes,
        )
        assert before.moved.moved_bytes == 0
        record = scene.change(actor_train=train, actor_generate=generate)
        assert record.moved is not None
        assert record.moved.counted_bytes == record.moved.planned_bytes > 0
        assert record.moved.staged_bytes <= scene.config.transfer.bucket_bytes
        assert parity(scene) < 1e-3
        scene.phases.warm_up(1)
        assert parity(scene) < 1e-3
        print(scene.job.plan, {k: round(v, 3) for k, v in record.seconds.items()}, round(record.pause_seconds, 2))


def test_small_buckets_bound_the_staging(pool: SlotPool, tmp_path: Path) -> None:
    """With buckets far smaller than a tensor the same state arrives, in more rounds."""
    scene = Scene(pool, config(transfer=TransferConfig(bucket_bytes=32 << 10)), tmp_path, generation=False)
    before = scene.tensors("actor.train")
    record = scene.change(actor_train=S(dp=4, micro_batch=4))
    assert record.moved is not None
    assert record.moved.staged_bytes <= 32 << 10
    after = scene.tensors("actor.train")
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_state_is_handed_on(pool: SlotPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one slot to four: the new ones exchange stripes of what the first sends, and it arrives bit by bit."""
    monkeypatch.setattr(nereus.transition, "cut", partial(nereus.slices.cut, relay_least_bytes=1))
    plan = replace(FIRST, actor_train=S(micro_batch=4, distributed_optimizer=False))
    scene = Scene(pool, config(plan=plan, transfer=TransferConfig(bucket_bytes=64 << 10)), tmp_path, generation=False)
    before = scene.tensors("actor.train")
    record = scene.change(actor_train=S(dp=4, micro_batch=4, distributed_optimizer=False))
    assert record.moved is not None
    state_bytes = record.moved.received_bytes[1]
    assert record.moved.counted_bytes == record.moved.planned_bytes == 3 * state_bytes
    assert record.moved.sent_bytes[0] < 1.2 * state_bytes  # once, where it would be three times without relays
    assert min(record.moved.sent_bytes[slot] for slot in (1, 2, 3)) > 0.5 * state_bytes
    after = scene.tensors("actor.train")
    assert all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("sharded", [True, False], ids=["distributed", "plain"])
def test_bf16_weights_masters_and_moments_survive_bit_by_bit(pool: SlotPool, tmp_path: Path, sharded: bool) -> None:
    """A bfloat16 model with float32 masters: three hops of training state without a changed bit."""
    job: Config = config(
        model=ModelConfig(dtype="bfloat16", init_std=0.08),
        run=RunConfig(name="bf16", seed=5, steps=2),
        warmup=WarmupConfig(steps=1, samples=8),
    )
    scene = Scene(pool, job, tmp_path, generation=False)
    scene.phases.warm_up(1)
    for layout in (
        S(pp=2, dp=2, distributed_optimizer=sharded),
        S(dp=3, distributed_optimizer=sharded),
        S(tp=4, distributed_optimizer=not sharded),
    ):
        before = scene.tensors("actor.train")
        assert {component for component, _ in before} == {"weight", "master", "exp_avg", "exp_avg_sq"}
        scene.change(actor_train=layout)
        after = scene.tensors("actor.train")
        assert before.keys() == after.keys()
        for key in before:
            assert torch.equal(before[key], after[key]), key
        for name in {n for c, n in after if c == "master"}:
            assert torch.equal(after["master", name].bfloat16(), after["weight", name])
        scene.phases.warm_up(2)


def test_a_corrupted_movement_is_undone(pool: SlotPool, tmp_path: Path) -> None:
    """State that arrives changed is found before the commit, and the plan before it goes on with the same state."""
    scene = Scene(pool, config(), tmp_path)
    scene.step()
    before, plan = scene.tensors("actor.train"), scene.job.plan
    pool.call("apply", {1: (plant, "flip", "verify", "actor.train")})
    with pytest.raises(ChangeUndone, match=r"^actor\.train \w+ of .* after the movement, was "):
        scene.change(actor_train=S(dp=4), actor_generate=S(dp=4))
    assert scene.job.plan == plan
    assert scene.job.state_version == 0
    after = scene.tensors("actor.train")
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert not [e for e in read_journal(scene.folder.events) if e["kind"] == "commit"]
    scene.step()
    assert parity(scene) < 1e-3


def test_a_flipped_bit_changes_the_digest(pool: SlotPool, tmp_path: Path) -> None:
    """Digests of the live state add up over any layout, and replicas that differ are named."""
    scene = Scene(pool, config(), tmp_path, generation=False)
    one = scene.job.digests(("actor.train",), "")
    scene.change(actor_train=S(dp=4, micro_batch=4))
    assert scene.job.digests(("actor.train",), "") == one
    shards = pool.call_all("digests", ("actor.train",), "")
    first = next(iter(shards[0]))
    shards[0] = {**shards[0], first: shards[0][first] ^ 1}
    from nereus.runtime.job import combined

    with pytest.raises(DigestMismatch, match="differs between slots"):
        combined(scene.job.specs, shards)


def test_bytes_beside_the_plan_are_refused(pool: SlotPool, tmp_path: Path) -> None:
    """A wire that carried other bytes than planned is an error that names the slot."""
    from nereus.runtime.job import report

    scene = Scene(pool, config(), tmp_path, generation=False)
    traffic = pool.call_all("sync", "actor.train")  # no sync is planned: nothing is sent
    planned = scene.job.plan_sync().whole
    with pytest.raises(TransferFailed, match="slot"):
        report(planned, traffic)
    assert movement((), 1024).moved_bytes == 0


def test_the_mover_uses_no_collectives() -> None:
    """The fabric names point-to-point operations of torch.distributed and nothing else that communicates."""
    tree = ast.parse(Path(nereus.runtime.fabric.__file__).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist"
    }
    assert used == {"isend", "irecv", "P2POp", "Work", "batch_isend_irecv"}  # a type, and no collective


def room_left(slot, room_bytes: int | None) -> int:
    """Leaves so much of the slot's budget above what it holds (None: all of it); returns the largest total since."""
    ledger, given = slot.ledger, slot.config.fleet.slot_budget_bytes
    most = max(ledger.peaks.values(), default=0)
    ledger.budget_bytes = given if room_bytes is None else ledger.total_bytes + room_bytes
    ledger.peaks.clear()
    return most


def test_models_change_places_on_full_slots(pool: SlotPool, tmp_path: Path) -> None:
    """Actor and critic need each other's room: through host memory they get it, within the budget."""
    plan = replace(
        FIRST, actor_train=S(tp=2, micro_batch=4, slots=(0, 1)), critic_train=S(tp=2, micro_batch=4, slots=(2, 3))
    )
    scene = Scene(pool, config(plan=plan), tmp_path, generation=False)
    scene.phases.warm_up(1)
    emus = ("actor.train", "critic.train")
    before = {emu: scene.tensors(emu) for emu in emus}
    held = {slot: room.held_bytes for slot, room in pool.call_all("room").items()}
    spare = (8 << 20) + scene.config.transfer.bucket_bytes  # of about 40 MB that an EMU has on a slot
    pool.call_all("apply", room_left, spare)
    try:
        record = scene.change(
            actor_train=S(tp=2, micro_batch=4, slots=(2, 3)), critic_train=S(tp=2, micro_batch=4, slots=(0, 1))
        )
    finally:
        most = pool.call_all("apply", room_left, None)
    assert record.modes == dict.fromkeys(emus, "snapshot")
    assert all(most[slot] <= held[slot] + spare for slot in pool.numbers)
    for emu in emus:
        after = scene.tensors(emu)
        assert after.keys() == before[emu].keys()
        assert all(torch.equal(after[key], before[emu][key]) for key in after), emu
    assert record.moved is not None
    assert record.moved.counted_bytes == record.moved.planned_bytes > 0
    assert not scene.job.host.snapshots("snapshot").exists(), "host memory is given back"
    scene.phases.warm_up(2)


def test_before_slots_leave_all_state_is_committed_and_engines_come_last(pool: SlotPool, tmp_path: Path) -> None:
    """An urgent change to three slots: of generation's engines none is built before every byte has been verified."""
    scene = Scene(pool, config(), tmp_path)
    scene.step()
    stages = {"actor_train": S(dp=3), "critic_train": S(dp=3), "actor_generate": S(dp=3)}
    pool.call_all("apply", watch)
    scene.urgent = True
    record = scene.change(**stages)
    engine = ("build_engine", "actor.generate")
    for slot, tasks in pool.call_all("apply", seen).items():
        assert (engine in tasks) == (slot < 3)
        kinds = [kind for kind, _ in tasks]
        last = tasks.index(engine) if engine in tasks else len(tasks)
        assert {"transfer", "verify"} & set(kinds)
        assert not {"transfer", "verify", "copy"} & set(kinds[last:]), (slot, tasks)
    assert record.state_version == 1
    scene.step()
    again = {"actor_train": S(tp=2, dp=2), "critic_train": S(dp=4), "actor_generate": S(dp=4)}
    pool.call_all("apply", watch)
    scene.urgent = False
    scene.change(**again)
    for tasks in pool.call_all("apply", seen).values():
        assert tasks.index(engine) < max(at for at, (kind, _) in enumerate(tasks) if kind == "verify")
    scene.step()


def test_the_reference_waits_in_host_memory(pool: SlotPool, tmp_path: Path) -> None:
    """Offloaded after its phase and back before it, also for a change of its plan: the same run, with more room."""
    steps = {}
    for keep in ("all", "nothing"):
        plan = replace(FIRST, reference_infer=S(dp=4, keep=keep))
        scene = Scene(pool, config(plan=plan), tmp_path / keep)
        first = scene.step()
        held = {slot: facts.held for slot, facts in pool.call_all("memory").items()}
        scene.change(actor_train=S(dp=4, micro_batch=4))
        waiting = [file.stat().st_size for file in scene.job.host.offloaded.glob("*")]
        assert len(waiting) == (4 if keep == "nothing" else 0), "a change of another model leaves it where it is"
        scene.change(reference_infer=S(pp=2, dp=2, keep=keep))
        second = scene.step()
        losses = [row["actor/loss"] for record in (first, second) for row in record.updates]
        steps[keep] = losses, held, scene.tensors("reference.infer"), sum(waiting)
        assert ("offload" in second.seconds) == (keep == "nothing")
    kept, away = steps["all"], steps["nothing"]
    assert kept[0] == pytest.approx(away[0], abs=1e-6)
    weights_bytes = sum(t.numel() * t.element_size() for t in kept[2].values())
    for slot in pool.numbers:
        assert kept[1][slot]["reference.infer.weights"] >= weights_bytes, "each slot had a replica"
        assert "reference.infer.weights" not in away[1][slot], "and now the room for other things"
    assert away[3] == sum(kept[1][slot]["reference.infer.weights"] for slot in pool.numbers), "once, in host memory"
    assert all(torch.equal(kept[2][key], away[2][key]) for key in kept[2])
