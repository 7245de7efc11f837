"""An engine that rested in the cache is what a new one would be: views, padding, settings, the next training step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from ray import cloudpickle

from nereus.config import StageConfig
from nereus.layout import StagePlan, first_plan
from nereus.rl.batch import build
from nereus.rl.losses import Denominators
from nereus.runtime.objective import Objective
from nereus.runtime.pool import SlotPool
from tests.live.scene import S, Scene, config

if TYPE_CHECKING:
    from nereus.engines.megatron.engine import TrainEngine
    from nereus.runtime.slot import Slot

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # slots need not find this file

BATCH = build([(5, 6, 7, 8 + i) for i in range(16)], [(9 + i, 11, 258) for i in range(16)])
WIDE = {"hidden": 256, "ffn": 1024, "layers": 4}


def fill(engine: TrainEngine) -> None:
    """State as a function of the place in each box."""
    with torch.no_grad():
        for shard, view in engine.views().items():
            values = torch.arange(view.numel()).remainder(97).view(view.shape)
            scale = {"exp_avg": 1e-5, "exp_avg_sq": 1e-9}.get(shard.component, 1e-3)
            view.copy_((values - (0 if shard.component == "exp_avg_sq" else 48)) * scale)
    engine.optimizer_steps = 3


def stepped(engine: TrainEngine) -> tuple[list[torch.Tensor], float, int]:
    """All state after a training step from `fill`, its gradient norm, the optimizer's steps."""
    from nereus.engines.megatron.steps import train

    fill(engine)
    objective = Objective(kind="sft", denominators=Denominators.of(BATCH.mask))
    result = train(engine, BATCH, micro_batch=4, temperature=1.0, loss=objective.loss, lr=1e-3)
    state = [tensor.clone() for _, tensor in sorted(engine.views().items())]
    return state, result.grad_norm, engine.optimizer_steps


def whole(engine: TrainEngine) -> list[torch.Tensor]:
    """Every parameter and every optimizer tensor, padding included."""
    found = [p.data.clone() for p in engine.module.parameters()]
    for inner in engine._inners:
        for state in inner.optimizer.state.values():
            found += [state["exp_avg"].clone(), state["exp_avg_sq"].clone(), state["step"].clone()]
    return found


def compare(slot: Slot, stage: StagePlan) -> tuple[int, int]:
    """Builds, steps, rests, wakes, steps again; bytes of state, and bytes that the process shrank by at rest."""
    from nereus.engines.megatron.engine import TrainEngine, adam_of
    from nereus.runtime.ledger import resident_bytes, settle

    if stage.rank_of(slot.number) is None:
        return 0, 0
    adam = adam_of(slot.config.algorithm, stage.model)
    engine = TrainEngine(slot.joined, slot.specs[stage.model], stage, slot.number, adam)
    blank = whole(engine)
    settings = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
    first = stepped(engine)
    settle()
    size_bytes, before = sum(engine.resident_bytes().values()), resident_bytes()
    engine.rest()
    shrunk_bytes = before - resident_bytes()
    other = replace(stage, micro_batch=stage.micro_batch + 1)
    engine.wake(other)
    assert engine.stage == other
    assert [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups] == settings
    assert engine.module.training
    assert engine.optimizer_steps == 0
    woken = whole(engine)
    assert all(torch.equal(a, b) for a, b in zip(woken, blank, strict=True))
    again = stepped(engine)
    assert again[1:] == first[1:]
    assert all(torch.equal(a, b) for a, b in zip(again[0], first[0], strict=True))
    with pytest.raises(ValueError, match="the shell is of"):
        engine.wake(replace(stage, slots=stage.slots[::-1]))
    engine.close()
    return size_bytes, shrunk_bytes


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (S(tp=2, pp=2, micro_batch=4), {}),
        (S(pp=2, dp=2, micro_batch=4), {"dtype": "bfloat16", "tie_embeddings": True}),
        (S(dp=4, distributed_optimizer=False, micro_batch=4), {}),
    ],
    ids=["tp2pp2", "bfloat16_tied", "replicated"],
)
def test_a_shell_that_wakes_steps_as_a_new_engine(
    pool: SlotPool, stage: StageConfig, changes: dict[str, object]
) -> None:
    """Bit for bit; at rest its memory is the system's, and layout or slots of another are refused."""
    job = config(plan=replace(config().plan, actor_train=stage))
    job = replace(job, model=replace(job.model, **WIDE, **changes))
    pool.call_all("configure", job, ".")
    planned = first_plan(job).actor_train
    counts = pool.call_all("group_count")
    pool.call_all("align", (planned.slots,), max(counts.values()))
    for slot, (size_bytes, shrunk_bytes) in pool.call_all("apply", compare, planned).items():
        assert shrunk_bytes > 0.8 * size_bytes - 2e6, (slot, size_bytes, shrunk_bytes)


def test_a_layout_that_comes_back_wakes_its_shells(pool: SlotPool, tmp_path: Path) -> None:
    """Engines of a layout seen before are the same objects with the present state; they train; the build is shorter."""
    scene = Scene(pool, config(), tmp_path)
    first = pool.call_all("apply", identities)
    before = scene.job.digests(("actor.train", "critic.train"), "")
    seconds: list[float] = []
    for stages in (
        {"actor_train": S(pp=2, dp=2), "critic_train": S(dp=4)},
        {"actor_train": S(tp=2, pp=2, micro_batch=2), "critic_train": S(pp=2, dp=2, micro_batch=2)},
    ):
        seconds.append(sum(scene.change(**stages).seconds.get(kind, 0.0) for kind in ("build_groups", "build_engine")))
        assert scene.job.digests(("actor.train", "critic.train"), "") == before
        for slot, memory in pool.call_all("memory").items():
            assert not any(name.startswith(("old.", "next.", "overhead.old.")) for name in memory.held), (slot, memory)
        assert set(pool.call_all("apply", shells).values()) == {2}
    assert pool.call_all("apply", identities) == first
    print("seconds to build:", seconds)
    assert seconds[1] < seconds[0] / 2
    scene.step()
    after = scene.job.digests(("actor.train", "critic.train"), "")
    scene.change(actor_train=S(pp=2, dp=2), critic_train=S(dp=4))
    assert scene.job.digests(("actor.train", "critic.train"), "") == after != before


def identities(slot: Slot) -> dict[str, int]:
    """Which module each trained EMU has here."""
    return {emu: id(engine.module) for emu, engine in slot.live.items() if emu.endswith(".train")}


def shells(slot: Slot) -> int:
    """How many shells wait here."""
    return len(slot.shells)
