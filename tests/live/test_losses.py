"""Slots die while a plan changes: the version that stands goes on, on the slots that are left.

These are the shared slots, of which each test leaves fewer: conftest.py puts this file last.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereus.config import (
    CheckpointConfig,
    Config,
    FleetConfig,
    ModelConfig,
    PlanConfig,
    RunConfig,
    StageConfig,
    WarmupConfig,
)
from nereus.runtime.journal import read_journal
from nereus.runtime.pool import SlotPool
from nereus.runtime.real import RealWorld
from tests.live.faults import TOKENS
from tests.live.scene import S, changes, config, run_job

START_SECONDS = 300.0


def joined_by_another(pool: SlotPool) -> None:
    """One more slot, in a world with the others."""
    pool.call_all("leave")
    pool.start_more(1)
    deadline = time.monotonic() + START_SECONDS
    while not pool.arrived():
        assert time.monotonic() < deadline, "the slot did not start"
        time.sleep(0.2)
    pool.admit()
    pool.rejoin()


def whole(**degrees: int) -> StageConfig:
    """A stage whose optimizer is on every replica, so that one replica holds everything."""
    return S(**degrees, distributed_optimizer=False, micro_batch=4)  # type: ignore[arg-type]


def job(slots: int, *, actor: StageConfig, to: StageConfig, others: int, layers: int = 4) -> Config:
    """Two steps; the actor changes between them, beside a critic and a reference that other replicas hold too."""
    plan = PlanConfig(
        actor_train=actor,
        actor_generate=S(dp=others),
        critic_train=whole(dp=others),
        reference_infer=S(dp=others),
    )
    return config(
        run=RunConfig(name="loss", seed=4, steps=2),
        warmup=WarmupConfig(steps=1, samples=8),
        fleet=FleetConfig(slots=slots),
        plan=plan,
        model=ModelConfig(init_std=0.08, layers=layers),
        changes=changes((2, {"actor_train": to})),
    )


def facts(world: RealWorld) -> tuple[Any, Any, list[int]]:
    """What was lost, how the job went on, and the steps that were done."""
    events: list[Any] = list(read_journal(world.folder.events))
    (lost,) = (e for e in events if e["kind"] == "slots_lost")
    (recovered,) = (e for e in events if e["kind"] == "recovered")
    assert events[-1]["kind"] == "run_stopped"
    assert events[-1]["reason"] == "done"
    return lost, recovered, [e["step"] for e in events if e["kind"] == "step_done"]


def test_requests_of_a_dead_engine_go_on_where_they_were(pool: SlotPool, tmp_path: Path) -> None:
    """kill -9 of an engine of generation: what it had sampled is kept, what others finished is not done again."""
    made = job(4, actor=whole(dp=4), to=whole(pp=2, dp=2), others=4)
    world = run_job(pool, replace(made, changes=()), tmp_path, faults={3: ("kill", "generate", "")})
    lost, recovered, steps = facts(world)
    assert (lost["lost"], lost["whole"], steps) == ([3], True, [1, 2])
    assert set(recovered["sources"].values()) == {"slots"}, "no step was half done"
    first, second = (record.metrics for record in world.records)
    assert first["rollout/requests_resumed"] == 16, "12 that others finished, 4 that had begun"
    assert first["rollout/tokens_kept"] >= 12 + 4 * TOKENS
    assert "rollout/requests_resumed" not in second
    assert first["rollout_corr/logp_diff_max"] < 1e-4, (
        "log-probabilities of tokens from two engines are those of one policy"
    )
    assert len(pool.numbers) == 3
    joined_by_another(pool)
    assert len(pool.numbers) == 4


def test_before_the_commit_the_old_version_stands(pool: SlotPool, tmp_path: Path) -> None:
    """kill -9 of a sender in the middle of a transfer: replicas hold all, nothing is done twice."""
    made = job(4, actor=whole(pp=2, dp=2), to=whole(tp=2, dp=2), others=4)
    world = run_job(pool, made, tmp_path, faults={3: ("kill", "transfer", "")})
    lost, recovered, steps = facts(world)
    assert (lost["lost"], lost["state_version"], recovered["state_version"]) == ([3], 0, 0)
    assert lost["digests"], "the old state was known"
    assert lost["digests"].items() <= recovered["digests"].items()
    assert set(recovered["sources"].values()) == {"slots"}
    assert steps == [1, 2]
    assert world.job.plan.actor_train.slots == (0, 1, 2), "three replicas where four slots had two of two stages"
    assert len(pool.numbers) == 3


def test_a_snapshot_outlives_its_slot(pool: SlotPool, tmp_path: Path) -> None:
    """Optimizer shards that one slot alone held come back from host memory."""
    made = job(3, actor=S(dp=3, micro_batch=4), to=S(pp=3, micro_batch=4), others=3, layers=6)
    world = run_job(
        pool, made, tmp_path, faults={1: ("kill", "verify", "actor.train")}, modes={"actor.train": "snapshot"}
    )
    lost, recovered, steps = facts(world)
    assert (lost["lost"], recovered["state_version"]) == ([1], 0)
    assert lost["digests"].items() <= recovered["digests"].items()
    assert recovered["sources"]["actor.train"] == "snapshot"
    assert steps == [1, 2]
    assert len(pool.numbers) == 2


def test_after_the_commit_the_new_version_stands_and_a_checkpoint_helps_else(pool: SlotPool, tmp_path: Path) -> None:
    """A loss after the commit record keeps the new version; one that no slot outlives goes back to the checkpoint."""
    made = job(2, actor=S(tp=2, micro_batch=4), to=S(dp=2, micro_batch=4), others=2)
    made = replace(made, checkpoint=CheckpointConfig(every_steps=1))
    world = run_job(pool, made, tmp_path, faults={1: ("kill", "release", "actor.train")})
    lost, recovered, steps = facts(world)
    assert (lost["lost"], lost["state_version"], recovered["state_version"]) == ([1], 1, 1)
    assert set(recovered["sources"].values()) == {"checkpoint"}, "moments were cut over both slots"
    assert recovered["next_step"] == 2
    assert steps == [1, 2]
    assert len(pool.numbers) == 1
