"""Layouts and plans: ranks, shares, plan ids, and the plan after a change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import ModelConfig, PlanChange, StageConfig
from nereus.layout import (
    ORDERS,
    STAGES,
    Coordinates,
    Layout,
    Plan,
    Stage,
    batch_shares,
    changed_plan,
    equal_shares,
    first_plan,
    layout_problem,
    micro_batch_rows,
)
from tests.core.definition import places
from tests.core.scenes import CONFIG, PP2_DP2, THREE, with_plan
from tests.strategies import general_configs, general_layouts, layouts, model_configs, stage_plan, stage_plans

PLAN = first_plan(CONFIG)


@given(general_configs().flatmap(general_layouts))
def test_ranks_and_coordinates_are_one_to_one(layout: Layout) -> None:
    found = [layout.coordinates(rank) for rank in range(layout.ranks)]
    assert [asdict(at) for at in found] == [asdict(at) for at in places(layout)]
    assert [layout.rank(at) for at in found] == list(range(layout.ranks))
    assert [layout.rank(Coordinates(tp=a.tp, pp=a.pp, dp=a.dp, cp=a.cp)) for a in found] == list(range(layout.ranks))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_groups_are_megatrons(data: st.DataObject) -> None:
    """Against Megatron's RankGenerators: the members of each group, in order, differ in one coordinate alone."""
    from megatron.core.parallel_state import RankGenerator

    tp, cp, dp, pp = (data.draw(st.sampled_from((1, 2, 3, 4))) for _ in range(4))
    order = data.draw(st.sampled_from(ORDERS))
    parts = [(etp, ep) for etp in (1, 2, 3, 4) for ep in (1, 2, 3, 4, 6, 8) if tp * cp * dp % (etp * ep) == 0]
    if order != ORDERS[0] and pp > 1:
        parts = [(etp, ep) for etp, ep in parts if etp * ep == tp * cp] or [(tp * cp, 1)]
    etp, ep = data.draw(st.sampled_from(parts))
    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, order=order, pipeline=(1,) * pp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    experts = RankGenerator(tp=etp, ep=ep, dp=layout.expert_dp, pp=pp, cp=1, order=order)
    assert dense.get_ranks("pp") == experts.get_ranks("pp")
    ranks = range(layout.ranks)
    at = {rank: layout.coordinates(rank) for rank in ranks}
    for generator, token, index in (
        (dense, "tp", lambda a: a.tp),
        (dense, "cp", lambda a: a.cp),
        (dense, "dp", lambda a: a.dp),
        (dense, "pp", lambda a: a.pp),
        (dense, "dp-cp", layout.optimizer_rank),
        (experts, "tp", lambda a: a.etp),
        (experts, "ep", lambda a: a.ep),
        (experts, "dp", lambda a: a.edp),
    ):
        for group in generator.get_ranks(token):
            assert [index(at[rank]) for rank in group] == list(range(len(group))), token
    assert layout.optimizer_ranks == len(dense.get_ranks("dp-cp")[0])
    assert layout.expert_dp == len(experts.get_ranks("dp")[0])


MOE = ModelConfig(layers=4, heads=8, kv_heads=4, ffn=24, expert_ffn=12, experts=6, experts_per_token=2, vocab=64)


@pytest.mark.parametrize(
    ("stage", "degrees", "told"),
    [
        ("train", {"tp": 8}, "tp = 8: expected a divisor of kv_heads = 4: 1, 2, 4 would do"),
        ("train", {"tp": 0}, "tp = 0: expected at least 1"),
        ("train", {"ep": 4}, "ep = 4: expected a divisor of experts = 6: 1, 2, 3, 6 would do"),
        ("train", {"etp": 2, "dp": 4}, "etp = 2: expected null or tp = 1 where ep = 1"),
        ("train", {"etp": 8, "dp": 8}, "etp = 8: expected a divisor of expert_ffn = 12: 1, 2, 3, 4, 6, 12 would do"),
        ("train", {"ep": 3, "dp": 2}, "ep = 3: expected etp * ep = 3, a divisor of tp * cp * dp = 2"),
        ("train", {"pp": 2, "dp": 2, "ep": 2, "order": ORDERS[1]}, "order = tp-cp-ep-pp-dp: expected tp-cp-ep-dp-pp"),
        ("train", {"order": "pp-tp"}, "order = pp-tp: expected one of"),
        ("train", {"pp": 3, "pipeline": (2, 2)}, "pipeline = [2, 2]: expected 3 entries"),
        ("generate", {"tp": 2, "ep": 3}, "ep = 3: expected 1 or tp = 2"),
        ("generate", {"tp": 8}, "tp = 8: expected a divisor of expert_ffn = 12"),
        ("generate", {"pp": 2}, "pp = 2: expected 1: vLLM"),
        ("generate", {"cp": 2}, "cp = 2: expected 1: vLLM"),
    ],
)
def test_layouts_that_do_not_fit_are_told_why(stage: Stage, degrees: dict[str, Any], told: str) -> None:
    made = {"tp": 1, "pp": 1, "dp": 1, "pipeline": equal_shares(MOE.layers, degrees.get("pp", 1)), **degrees}
    assert told in (layout_problem(MOE, Layout(**made), stage) or "it fits")


def test_layouts_that_fit_have_no_problem() -> None:
    even = {"pipeline": (4,), "pp": 1}
    assert layout_problem(MOE, Layout(tp=2, dp=3, ep=3, etp=2, **even)) is None
    assert layout_problem(MOE, Layout(tp=8, dp=1, **even), "generate") is not None
    dense = replace(MOE, experts=0)
    assert layout_problem(dense, Layout(tp=8, dp=1, **even), "generate") is None
    assert "no experts" in (layout_problem(dense, Layout(tp=1, dp=2, ep=2, **even)) or "")
    assert "no experts" in (layout_problem(dense, Layout(tp=1, dp=2, etp=2, **even)) or "")


def test_a_layout_shows_what_is_not_usual() -> None:
    layout = Layout(tp=2, pp=2, dp=2, pipeline=(2, 2))
    assert str(layout) == "TP2·PP2·DP2"
    assert str(replace(layout, cp=2, ep=4, etp=1, pipeline=(1, 3))) == "TP2·CP2·PP2(1/3)·DP2·EP4·ETP1"
    assert str(replace(layout, order=ORDERS[1])) == "TP2·PP2·DP2 (tp-cp-ep-pp-dp)"


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


@given(st.integers(0, 200), st.integers(1, 64))
def test_micro_batches_are_as_few_as_their_limit_lets_and_as_even(samples: int, most: int) -> None:
    rows = micro_batch_rows(samples, most)
    count = max(1, -(-samples // rows))
    assert 1 <= rows <= most
    assert count == max(1, -(-samples // most)), "no more micro-batches than full ones would be"
    assert rows == 1 or count * (rows - 1) < samples, "with a row less they would not hold the samples"
