"""Engines are built slot by slot: nobody waits inside a constructor, so each slot may build in an order of its own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ray import cloudpickle

from nereus.config import ModelConfig
from nereus.layout import StagePlan, first_plan
from nereus.runtime.pool import SlotPool
from tests.live.scene import S, Scene, config
from tests.live.test_architectures import QWEN3_MOE

if TYPE_CHECKING:
    from nereus.runtime.slot import Slot
    from nereus.transitions.programs import Task

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # slots need not find this file

TIED = replace(config().model, layers=2, tie_embeddings=True)
Kinds = list[list[tuple[float, bool, bool]]]
"""Of each optimizer of a slot its groups: weight decay's factor, experts', whether any parameter is here."""


def make_groups(slot: Slot, stage: StagePlan) -> None:
    from nereus.engines.megatron.groups import ModelGroups

    slot.made_groups = ModelGroups(slot.joined, slot.joined.sub(stage.slots), stage.layout)  # type: ignore[attr-defined]


def build(slot: Slot, stage: StagePlan, talking: bool) -> Kinds:
    """Builds the engine in the groups that were made; `talking` as Megatron does it, which asks all slots."""
    from contextlib import nullcontext

    from nereus.engines.megatron import engine as module

    alone = module.alone

    def together(*, experts: bool) -> nullcontext[bool]:
        return nullcontext(experts)

    if talking:
        module.alone = together  # type: ignore[assignment]
    try:
        adam = module.adam_of(slot.config.algorithm, stage.model)
        groups = slot.made_groups  # type: ignore[attr-defined]
        made = module.TrainEngine(slot.joined, slot.specs[stage.model], stage, slot.number, adam, groups)
    finally:
        module.alone = alone
    inners = [inner.optimizer.param_groups for inner in made._inners]
    kinds = [[(g["wd_mult"], g["is_expert_parallel"], bool(g["params"])) for g in groups] for groups in inners]
    made.close()
    return kinds


@pytest.mark.parametrize(
    ("model", "stage"),
    [(TIED, S(tp=2, pp=2)), (QWEN3_MOE, S(pp=2, dp=2, ep=2)), (QWEN3_MOE, S(pp=2, dp=2, distributed_optimizer=False))],
    ids=["tied", "experts_on_one_pipeline_rank", "experts_replicated"],
)
def test_a_slot_builds_alone_what_all_build_together(pool: SlotPool, model: ModelConfig, stage: object) -> None:
    job = config(model=model, plan=replace(config().plan, actor_train=stage))
    planned = first_plan(job).actor_train
    pool.call_all("configure", job, ".")

    def grouped() -> None:
        pool.call_all("align", (planned.slots,), max(pool.call_all("group_count").values()))
        pool.call_all("apply", make_groups, planned)

    grouped()
    alone = {slot: pool.call("apply", {slot: (build, planned, False)})[slot] for slot in reversed(pool.numbers)}
    grouped()
    assert alone == pool.call_all("apply", build, planned, True)


def turned(slot: Slot) -> None:
    """Odd slots build their engines in the opposite order."""
    perform = slot.perform
    if slot.number % 2 == 0:
        return

    def turning(tasks: tuple[Task, ...], *others: Any) -> object:
        places = [at for at, task in enumerate(tasks) if task.kind == "build_engine" and task.emu != "actor.generate"]
        given = list(tasks)
        for at, other in zip(places, reversed(places), strict=True):
            given[at] = tasks[other]
        slot.turns = max(len(places), vars(slot).get("turns", 0))  # type: ignore[attr-defined]
        return perform(tuple(given), *others)

    slot.perform = turning  # type: ignore[method-assign]


def straight(slot: Slot) -> int:
    """As before `turned`; how many tasks changed places."""
    vars(slot).pop("perform", None)
    return vars(slot).pop("turns", 0)


def test_slots_build_models_that_change_together_in_orders_that_cross(pool: SlotPool, tmp_path: Path) -> None:
    plan = replace(config().plan, actor_train=S(dp=4), critic_train=S(dp=4))
    scene = Scene(pool, config(plan=plan, model=replace(TIED, layers=4)), tmp_path, generation=False)
    before = scene.job.digests(("actor.train", "critic.train"), "")
    pool.call_all("apply", turned)
    try:
        scene.change(actor_train=S(pp=3, pipeline=(1, 1, 2)), critic_train=S(pp=3, pipeline=(2, 1, 1)))
    finally:
        assert max(pool.call_all("apply", straight).values()) == 2
    assert scene.job.digests(("actor.train", "critic.train"), "") == before
