"""Layouts and plans: ranks, shares, plan ids, and the plan after a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st

from nereus.config import PlanChange, StageConfig
from nereus.layout import (
    STAGES,
    Coordinates,
    Layout,
    Plan,
    batch_shares,
    changed_plan,
    equal_shares,
    first_plan,
)
from tests.core.scenes import CONFIG, PP2_DP2, THREE, with_plan
from tests.strategies import layouts, model_configs, stage_plan, stage_plans

PLAN = first_plan(CONFIG)


@given(model_configs().flatmap(layouts))
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    places = [layout.coordinates(rank) for rank in range(layout.ranks)]
    wanted = [
        Coordinates(tp=tp, pp=pp, dp=dp)  # Megatron's default order tp-cp-ep-dp-pp: tp fastest
        for pp in range(layout.pp)
        for dp in range(layout.dp)
        for tp in range(layout.tp)
    ]
    assert places == wanted
    assert [layout.rank(at) for at in places] == list(range(layout.ranks))


@given(model_configs().flatmap(layouts))
def test_pipeline_ranks_hold_each_layer_once_in_order(layout: Layout) -> None:
    held = [layer for rank in range(layout.pp) for layer in layout.layers(rank)]
    assert held == list(range(sum(layout.pipeline)))
    assert [len(layout.layers(rank)) for rank in range(layout.pp)] == list(layout.pipeline)


@given(model_configs().flatmap(stage_plans))
def test_replicas_share_out_the_slots(stage) -> None:
    replicas = [stage.replica_slots(dp) for dp in range(stage.layout.dp)]
    assert sorted(slot for slots in replicas for slot in slots) == sorted(stage.slots)
    for dp, slots in enumerate(replicas):
        assert len(slots) == stage.layout.tp * stage.layout.pp
        assert stage.output_slot(dp) in slots
        at = stage.layout.coordinates(stage.rank_of(stage.output_slot(dp)))
        assert at == Coordinates(tp=0, pp=stage.layout.pp - 1, dp=dp)
    assert all(stage.slots[stage.rank_of(slot)] == slot for slot in stage.slots)
    assert stage.rank_of(99) is None


@given(st.integers(0, 200), st.integers(1, 20))
def test_equal_shares(samples: int, replicas: int) -> None:
    shares = equal_shares(samples, replicas)
    assert sum(shares) == samples
    assert len(shares) == replicas
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


def shared(*shares: int):
    layout = Layout(tp=1, pp=1, dp=len(shares), pipeline=(4,))
    return replace(stage_plan(layout), shares=shares)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(1, 5))
def test_batches_of_whole_mini_batches_keep_the_shares(shares: list[int], times: int) -> None:
    assert batch_shares(shared(*shares), times * sum(shares)) == tuple(times * share for share in shares)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(0, 50))
def test_batch_shares_are_all_of_the_batch(shares: list[int], samples: int) -> None:
    assert sum(batch_shares(shared(*shares), samples)) == samples


def test_batch_shares_keep_the_proportion() -> None:
    assert batch_shares(shared(6, 2), 12) == (9, 3)
    assert batch_shares(shared(8, 0), 12) == (12, 0)


def test_plan_ids_are_functions_of_content() -> None:
    assert first_plan(CONFIG).plan_id == PLAN.plan_id
    ids = {PLAN.plan_id}
    for name in STAGES:
        stage = getattr(PLAN, name)
        for part in (
            {"micro_batch": 3},
            {"shares": (sum(stage.shares), *(0,) * (stage.layout.dp - 1))},
            {"slots": tuple(reversed(stage.slots))},
            {"layout": replace(stage.layout, pipeline=(3, 1))},
            {"layout": replace(stage.layout, distributed_optimizer=not stage.layout.distributed_optimizer)},
        ):
            changed = replace(stage, **part)
            if changed != stage:
                ids.add(replace(PLAN, **{name: changed}).plan_id)
    assert len(ids) == 1 + sum(4 if getattr(PLAN, name).layout.dp == 1 else 5 for name in STAGES)


def test_a_change_keeps_the_other_stages() -> None:
    after = changed_plan(PLAN, PlanChange(critic_train=THREE), CONFIG)
    assert after.critic_train.slots == (0, 1, 3)
    assert after.critic_train.shares == (11, 11, 10)
    for name in STAGES:
        if name != "critic_train":
            assert getattr(after, name) is getattr(PLAN, name)


def test_a_changed_stage_takes_defaults_for_what_it_leaves_out() -> None:
    uneven = StageConfig(dp=2, shares=(24, 8), micro_batch=2, distributed_optimizer=False)
    config = with_plan(replace(CONFIG.plan, actor_train=uneven))
    before = first_plan(config)
    after = changed_plan(before, PlanChange(actor_train=StageConfig(dp=2)), config)
    assert before.actor_train.shares == (24, 8)
    assert (after.actor_train.shares, after.actor_train.micro_batch) == ((16, 16), 8)
    assert after.actor_train.layout.distributed_optimizer


def test_a_change_that_states_every_stage_is_a_first_plan() -> None:
    stages = {name: getattr(CONFIG.plan, name) for name in STAGES}
    other = first_plan(with_plan(replace(CONFIG.plan, actor_train=PP2_DP2)))
    assert changed_plan(other, PlanChange(**stages), CONFIG) == PLAN


def test_shares_are_of_a_mini_batch_in_training_and_of_the_batch_elsewhere() -> None:
    batch = CONFIG.data.prompts_per_step * CONFIG.data.samples_per_prompt
    for _, stage in PLAN.stages():
        wanted = batch // CONFIG.algorithm.mini_batches if stage.stage == "train" else batch
        assert sum(stage.shares) == wanted
        assert len(stage.shares) == stage.layout.dp


def test_golden_plan(golden: Callable[[str, object], None]) -> None:
    plan: Plan = PLAN
    golden("plan_quickstart", {"plan_id": plan.plan_id, "text": str(plan), **asdict(plan)})
