"""The search on the real job against brute force over every plan of two slots, and its order of visits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import Config, DataConfig, FleetConfig, ModelConfig, PlanConfig, StageConfig
from nereus.control.outlook import JobOutlook
from nereus.control.proposals import Ground, Pricing, propose, rising
from nereus.control.records import SearchRequest, plan_kind
from nereus.costs.profile import supposed
from nereus.layout import STAGES, Layout, Plan, StagePlan, equal_shares, first_plan, first_problem
from nereus.observe import Observed, after, memory_parts
from nereus.transitions.durations import Tolls
from nereus.transitions.planned import SlotRoom

SAMPLES = 8
CONFIG = Config(
    model=ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128),
    data=DataConfig(prompts_per_step=2, samples_per_prompt=4),
    fleet=FleetConfig(slots=2, slot_budget_bytes=256 << 20),
    plan=PlanConfig(**{name: StageConfig(tp=2, micro_batch=2) for name in STAGES}),
)
FIRST = first_plan(CONFIG)
STATE = after(Observed(), {"kind": "probe", "profile": supposed("cpu", 4, 2, 2).record()})
ROOM = SlotRoom(budget_bytes=256 << 20, held_bytes=1 << 26, phase_bytes=1 << 26, generation_bytes=1 << 24)
TOLLS = Tolls(group_seconds=0.01, activate_seconds=0.0, quiesce_seconds=0.0)


def ground(config: Config) -> Ground:
    outlook = JobOutlook(config=config, state=STATE, plans={FIRST.plan_id: FIRST})
    engines = {"actor.train": 0.05, "actor.generate": 0.2, "critic.train": 0.03, "reference.infer": 0.02}
    return Ground(outlook=outlook, room={0: ROOM, 1: ROOM}, hosts={0: 0, 1: 0}, engine_seconds=engines, tolls=TOLLS)


def request(horizon: float, slots: tuple[int, ...] = (0, 1), empty: tuple[int, ...] = ()) -> SearchRequest:
    return SearchRequest(
        reason="test",
        step=4,
        present=FIRST,
        slots=slots,
        empty_slots=empty,
        horizon_steps=horizon,
        remaining_steps=50,
    )


def every_stage(name: str) -> Iterator[StagePlan]:
    """Every cut of a stage over at most two slots, from the definition: degrees that the model admits."""
    kind = name.split("_")[1]
    present: StagePlan = getattr(FIRST, name)
    samples = SAMPLES // CONFIG.algorithm.mini_batches if kind == "train" else SAMPLES
    for tp, pp, dp in product((1, 2), repeat=3):
        if tp * pp * dp > 2 or (kind == "generate" and pp > 1):
            continue
        layout = Layout(tp=tp, pp=pp, dp=dp, pipeline=equal_shares(2, pp), distributed_optimizer=kind == "train")
        if first_problem(CONFIG.model, layout, kind) is not None:  # type: ignore[arg-type]
            continue
        sizes = (2,) if kind == "generate" else (1, 2, 4, 8)
        for size in sizes:
            if size > 1 and size > -(-samples // dp):
                continue
            slots = tuple(range(layout.ranks))
            shares = equal_shares(samples, dp)
            yield replace(present, layout=layout, slots=slots, shares=shares, micro_batch=size)


def brute_force(config: Config, horizon: float) -> float:
    """The least horizon x step + price of a plan that fits, every stage with its fastest micro-batch in each layout."""
    where = ground(config)
    pricing = Pricing(request=request(horizon), ground=where)
    lists: list[list[StagePlan]] = []
    for name in STAGES:
        fastest: dict[Layout, tuple[float, StagePlan]] = {}
        for stage in every_stage(name):
            plan = replace(FIRST, **{name: stage})
            known = JobOutlook(config=config, state=STATE, plans={plan.plan_id: plan})
            seconds = known.step(plan.plan_id).mean_seconds
            if stage.layout not in fastest or seconds < fastest[stage.layout][0]:
                fastest[stage.layout] = (seconds, stage)
        lists.append([stage for _, stage in fastest.values()])
    steps: list[tuple[float, Plan]] = []
    for stages in product(*lists):
        plan = Plan(**dict(zip(STAGES, stages, strict=True)))
        needs = [STATE.margin.safe_bytes(parts) for parts in memory_parts(config, plan, 136).values()]
        if plan != FIRST and max(needs) <= config.fleet.slot_budget_bytes:
            known = JobOutlook(config=config, state=STATE, plans={plan.plan_id: plan})
            steps.append((known.step(plan.plan_id).mean_seconds, plan))
    best = float("inf")
    for step, plan in sorted(steps, key=lambda pair: pair[0]):
        if horizon * step >= best:
            return best  # no price is below 0
        found = pricing.of(pricing.placed(plan))
        best = best if found is None else min(best, horizon * step + found.mean_seconds)
    return best


@pytest.mark.parametrize("horizon", [5.0, 60.0])
def test_the_first_candidate_costs_what_brute_force_finds(horizon: float) -> None:
    answer = propose(request(horizon), ground(CONFIG), 100_000)
    assert answer.finished
    known = ground(CONFIG).outlook.met(answer.candidates)
    costs = [horizon * known.step(c.plan_id).mean_seconds + c.price.mean_seconds for c in answer.candidates]
    assert costs == sorted(costs)
    assert costs[0] == pytest.approx(brute_force(CONFIG, horizon), abs=1e-9)
    assert all(c.price.bound_seconds <= c.price.mean_seconds for c in answer.candidates)


def test_the_same_question_has_the_same_answer() -> None:
    assert propose(request(8.0), ground(CONFIG), 500) == propose(request(8.0), ground(CONFIG), 500)


def test_without_a_slot_plans_use_the_others_only() -> None:
    answer = propose(request(8.0, slots=(1,), empty=(0,)), ground(CONFIG), 10_000)
    assert answer.candidates
    assert all(stage.slots == (1,) for c in answer.candidates for _, stage in c.plan.stages())
    assert answer.band is None


def test_where_nothing_fits_the_answer_says_so_with_bytes() -> None:
    small = replace(CONFIG, fleet=replace(CONFIG.fleet, slot_budget_bytes=1 << 20))
    answer = propose(request(8.0), ground(small), 10_000)
    assert answer.candidates == ()
    assert "1,048,576" in answer.reason


def test_plans_asked_for_are_priced_in_any_case() -> None:
    wide = replace(CONFIG, plan=PlanConfig(**{name: StageConfig(dp=2, micro_batch=1) for name in STAGES}))
    back = first_plan(wide)
    answer = propose(replace(request(0.1), include=(back,)), ground(CONFIG), 1)
    assert any(plan_kind(each.plan) == plan_kind(back) for each in answer.candidates)


@settings(deadline=None, max_examples=60)
@given(lists=st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=4), min_size=1, max_size=4))
def test_combinations_rise_and_come_once(lists: list[list[float]]) -> None:
    ordered = [sorted(each) for each in lists]
    found = list(rising(ordered))
    assert [total for total, _ in found] == sorted(total for total, _ in found)
    assert sorted(indices for _, indices in found) == sorted(product(*(range(len(each)) for each in ordered)))


def test_with_a_slow_slot_the_search_takes_fewer_samples_there_or_leaves_it_out() -> None:
    """Against every plan of two slots, each with equal shares and with all shares there are."""
    profile = STATE.profile
    assert profile is not None
    slow = replace(STATE, profile=replace(profile, slow=((0, 0.4),), together_slots=2.0))
    where = replace(ground(CONFIG), outlook=JobOutlook(config=CONFIG, state=slow, plans={FIRST.plan_id: FIRST}))
    answer = propose(request(1e5), where, 100_000)
    known = where.outlook.met(answer.candidates)
    best = answer.candidates[0].plan
    for _, stage in best.stages():
        if stage.layout.ranks == 1:
            assert stage.slots == (1,)
        elif stage.layout.dp == 2:
            assert stage.shares[stage.slots.index(0)] <= stage.shares[stage.slots.index(1)]
    lists: dict[str, list[StagePlan]] = {}
    for name in STAGES:
        listed = [each for each in every_stage(name) if each.layout.dp < 2]
        listed += [replace(each, slots=(1,)) for each in listed if each.layout.ranks == 1]
        for each in (each for each in every_stage(name) if each.layout.dp == 2):
            total = sum(each.shares)
            listed += [replace(each, shares=(first, total - first)) for first in range(1, total)]
        lists[name] = listed
    least = 0.0
    for name, listed in lists.items():  # a step is the sum of what the stages' own phases take
        plans = [replace(FIRST, **{name: each}) for each in listed]
        outlook = JobOutlook(config=CONFIG, state=slow, plans={plan.plan_id: plan for plan in plans})
        base = where.outlook.step(FIRST.plan_id).mean_seconds
        least += min(outlook.step(plan.plan_id).mean_seconds for plan in plans) - base
    least += where.outlook.step(FIRST.plan_id).mean_seconds
    assert known.step(best.plan_id).mean_seconds <= 1.05 * least
    assert known.step(best.plan_id).mean_seconds < 0.9 * where.outlook.step(FIRST.plan_id).mean_seconds
