"""What a long life of a job must not change: groups, descriptors, threads, memory that the ledger does not know."""

from __future__ import annotations

from pathlib import Path

from nereus.engines.world import Census
from nereus.runtime.pool import SlotPool
from tests.live.scene import S, Scene, config

TOUR = (  # seven layouts over two slot sets: all four slots, and three of them
    {"actor_train": S(pp=2, dp=2), "critic_train": S(dp=4), "actor_generate": S(dp=4)},
    {"actor_train": S(dp=3), "critic_train": S(pp=3, pipeline=(1, 2, 1)), "actor_generate": S(dp=3)},
    {"actor_train": S(tp=4), "critic_train": S(tp=2, dp=2), "actor_generate": S(tp=2, dp=2)},
    {"actor_train": S(pp=4), "critic_train": S(pp=2, dp=2, pipeline=(3, 1))},
    {"actor_train": S(tp=2, pp=2), "critic_train": S(pp=2, dp=2), "actor_generate": S(tp=4)},
)
KEPT_GROUPS = 4 + 4
"""Groups that may stay: of the orders of slots that the plan's four stages run on, and of four more that are idle."""


def test_twenty_changes_leave_groups_descriptors_and_threads(pool: SlotPool, tmp_path: Path) -> None:
    """The first tour fills what is kept on purpose; after three more, twenty changes in all, nothing has grown."""
    scene = Scene(pool, config(), tmp_path)
    before: dict[int, Census] = {}
    pauses: list[float] = []
    now: dict[int, Census] = {}
    for _ in range(4):
        for stages in TOUR:
            pauses.append(scene.change(**stages).pause_seconds)
        scene.step()
        now = pool.call_all("census")
        before = before or now
    assert len(pauses) == 20
    print("pauses in seconds:", [round(p, 2) for p in pauses])
    for slot, last in now.items():
        first = before[slot]
        assert last.groups <= first.groups, (slot, first, last)
        assert last.descriptors <= first.descriptors + 6, (slot, first, last)
        assert last.threads <= first.threads + 3, (slot, first, last)
    pool.call_all("configure", scene.config, str(scene.folder.model))
    for slot, idle in pool.call_all("census").items():
        assert idle.groups <= 1 + KEPT_GROUPS, (slot, idle)


def test_ledger_agrees_with_resident_memory(pool: SlotPool, tmp_path: Path) -> None:
    """Held bytes and the process's growth above its baseline agree within 15 % + 20 MB, before and after a change."""
    scene = Scene(pool, config(), tmp_path)
    for stages in ({}, TOUR[0]):
        if stages:
            scene.change(**stages)
        scene.step()
        scene.step()
        for slot, memory in pool.call_all("memory").items():
            held = sum(memory.held.values())
            apart = memory.resident_bytes - held
            print(f"slot {slot}: ledger {held:,} resident {memory.resident_bytes:,} apart {apart:,}")
            assert abs(apart) <= 0.15 * max(held, memory.resident_bytes) + 20e6, (slot, memory)
            assert memory.peaks["update_actor"] > held, "activations are not in the ledger"
