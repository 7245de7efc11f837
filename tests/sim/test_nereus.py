"""The policy `nereus` on simulated GPUs: it follows a fleet, leaves a plan that stops fitting, and rests when nothing changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.cli.simulation import commander_of
from nereus.config import Config, RolloutConfig
from nereus.control.outset import FREEDOMS, VARIANTS, fleet_controller
from nereus.layout import first_plan
from nereus.report.explain import explained, render
from nereus.report.replay import first_difference, recorded
from nereus.report.summary import fold
from nereus.sim.changes import Asked
from nereus.sim.edges import Delays
from nereus.sim.play import inventory_of
from nereus.sim.searching import Changes, FleetSearcher
from nereus.sim.told import Told
from nereus.sim.traces import LengthCurve
from nereus.sim.truth import Truth
from nereus.sim.workload import LengthShape, SimWorkload
from nereus.world import drive
from tests.sim.scene import H100, Kept, job, plan_config, workload, world

EVEN = LengthShape(log_std=0.1, tail_share=0.0)


def run(
    points: list[tuple[float, int]],
    *,
    steps: int = 12,
    policy: str = "nereus",
    config: Config | None = None,
    curve: LengthCurve | None = None,
    **more: Any,
) -> Kept:
    """A run of a variant of nereus on nodes of 8 H100, checked after every event."""
    config = config or job(steps=steps)
    made, kept = world(config, points, memory_bytes=H100.memory_bytes, **more)
    if curve is not None:
        made.workload = replace(workload(config), curve=curve, shape=EVEN)
    inventory = inventory_of(made.moments)
    controller = fleet_controller(policy, config, first_plan(config), made.fleet, inventory)
    made.searcher = FleetSearcher(
        changes=made.changes,
        journal=kept,
        outlook=lambda: controller.policy.outlook,  # type: ignore[attr-defined]
        fleet=lambda: made.fleet,
        space=VARIANTS[policy].space(first_plan(config)),
        free=not VARIANTS[policy].priced,
        by_restart=not VARIANTS[policy].live,
        through_storage=VARIANTS[policy].storage,
    )
    made.keeps_processes = VARIANTS[policy].live or VARIANTS[policy].storage
    told = Told(controller=controller, journal=kept, policy=policy, inventory=inventory)

    class Checked:
        def handle(self, event):
            commands = told.handle(event)
            controller.check()
            return commands

    drive(Checked(), made)
    return kept


def read(kept: Kept) -> list[dict[str, Any]]:
    """The journal as it is read from a file."""
    return json.loads(json.dumps([{"seq": seq, **event} for seq, event in enumerate(kept.events, 1)]))


POOR = plan_config(8, 2, 1, 8)
"""A recipe on 16 slots that is far from the best one."""


def large(steps: int) -> Config:
    """A job whose steps are long enough for changes to pay within a few."""
    config = job(steps=steps, plan=POOR)
    return replace(config, data=replace(config.data, prompts_per_step=256))


def decided(kept: Kept) -> list[dict[str, Any]]:
    """Every Decision."""
    return [event["entry"] for event in kept.kinds("decision") if event["entry"]["is"] == "Decision"]


def admissions(kept: Kept, kind: str) -> list[dict[str, Any]]:
    """What was admitted, forced or rejected."""
    return [each["admission"] for each in decided(kept) if each["admission"]["is"] == kind]


def test_it_follows_a_fleet_that_grows_and_shrinks() -> None:
    config = replace(
        large(26), rollout=RolloutConfig(kv_cache_bytes=17 << 30)
    )  # the job fits on eight, with room to spare
    kept = run([(0, 2), (250, 4), (800, 1)], delays=Delays(notice_seconds=150.0), config=config)
    assert kept.rows[-1]["training/global_step"] == 26
    assert max(row["plan/slots"] for row in kept.rows) > 16
    assert kept.rows[-1]["plan/slots"] <= 8
    assert admissions(kept, "Admitted")  # for the new nodes
    assert admissions(kept, "Forced")  # for those that leave
    steps = [row["training/global_step"] for row in kept.rows]
    assert steps == sorted(set(steps))  # it left in time: nothing is done twice


def test_a_plan_that_stops_fitting_is_left_before_it_overflows() -> None:
    plan = plan_config(4, 1, 4, 2)
    wide = replace(plan.actor_train, micro_batch=8)
    config = job(steps=14, budget_bytes=82 << 30, plan=replace(plan, actor_train=wide, critic_train=wide))
    config = replace(config, data=replace(config.data, max_prompt_tokens=512, max_response_tokens=12288))
    curve = LengthCurve(name="grows", at_steps=(1, 14), mean_tokens=(800.0, 4800.0))
    kept = run([(0, 2)], config=config, curve=curve)
    (first, *_) = admissions(kept, "Forced")
    assert "stops fitting" in first["reason"]
    assert "bytes" in first["reason"]
    assert not kept.kinds("out_of_memory")
    assert kept.rows[-1]["training/global_step"] == 14
    dry = replace(config, nereus=replace(config.nereus, dry_run=True))
    assert run([(0, 2)], config=dry, curve=curve).kinds("out_of_memory")  # had nothing been changed


def test_under_constant_conditions_it_settles() -> None:
    kept = run([(0, 2)], config=large(30))
    changes = [int(event["step"]) for event in kept.kinds("transition_done")]
    assert changes
    assert max(changes) <= 20
    steps = [row["timing_s/step"] for row in kept.rows]
    assert sum(steps[-4:]) < 0.8 * sum(steps[:4])


def test_equal_seeds_decide_alike_and_a_replay_makes_the_same_decisions() -> None:
    one, same = (run([(0, 2), (200, 3)], config=large(9), truth=Truth(seed=4)) for _ in range(2))
    assert one.events == same.events
    records = read(one)
    assert len(recorded(records)) > 9
    assert first_difference(records) is None
    found = explained(records)
    assert found.decisions
    text = render(found)
    assert "nodes" in text
    assert fold(one.events, one.rows, Path("run")).outcome == "done"
    peak = found.peak_bytes[first_plan(large(9)).plan_id]
    assert peak == pytest.approx(one.rows[0]["perf/max_memory_allocated_gb"] * 2**30, rel=0.3)


def test_each_variant_leaves_out_what_its_name_says() -> None:
    steps = {"nereus": 14, "nereus-hasty": 14, "nereus-restart": 50, "nereus-storage": 50}
    whole = [name for name, variant in VARIANTS.items() if variant.frees == FREEDOMS]
    runs = {name: run([(0, 2)], policy=name, config=large(steps.get(name, 6))) for name in whole}
    commands = {name: {e["command"]["is"] for e in kept.kinds("commanded")} for name, kept in runs.items()}
    assert all(("Restart" in found) == (not VARIANTS[name].live) for name, found in commands.items())
    pauses = {
        name: runs[name].kinds("transition_done")[0]["pause_seconds"] for name in ("nereus-restart", "nereus-storage")
    }
    assert pauses["nereus-storage"] < pauses["nereus-restart"] - 0.8 * Delays().restart_seconds
    first = [min(int(e["step"]) for e in runs[name].kinds("transition_done")) for name in ("nereus-hasty", "nereus")]
    assert first[0] < first[1]
    weighed = [each for d in decided(runs["nereus-unpriced"]) for each in d["weighed"]]
    assert weighed
    assert not any(w["price_seconds"] for w in weighed)
    believed = [next(d["present_seconds"] for d in decided(runs[name])) for name in ("nereus", "nereus-uncalibrated")]
    measured = runs["nereus"].rows[0]["timing_s/step"]
    assert abs(believed[0] / measured - 1) < abs(believed[1] / measured - 1)


def test_what_is_not_free_stays_as_in_the_first_plan() -> None:
    config = replace(large(16), rollout=RolloutConfig(kv_cache_bytes=12 << 30), plan=plan_config(4, 1, 4, 2))
    degrees = {"nereus-shares": 0, "nereus-micro-batch": 1, "nereus-engines": 2}
    for policy, freed in degrees.items():
        kept = run([(0, 2), (120, 3)], policy=policy, config=config)
        plans = [
            event["command"]["plan"] for event in kept.kinds("commanded") if event["command"]["is"] == "ChangePlan"
        ]
        assert plans or freed < 1
        for plan in plans:
            trained = [plan[name] for name in ("actor_train", "critic_train", "reference_infer")]
            assert {(each["layout"]["tp"], each["layout"]["pp"]) for each in trained} == {(4, 1)}
            assert freed > 0 or {each["micro_batch"] for each in trained} == {4}
            assert freed > 1 or plan["actor_generate"]["layout"]["tp"] == 2


def test_a_plan_that_overflowed_is_not_taken_again() -> None:
    """The first plan cannot hold the first samples; what it used teaches how far off predictions are."""
    plan = plan_config(4, 1, 4, 2)
    wide = replace(plan.actor_train, micro_batch=16)
    config = job(steps=6, budget_bytes=82 << 30, plan=replace(plan, actor_train=wide, critic_train=wide))
    config = replace(config, data=replace(config.data, max_prompt_tokens=512, max_response_tokens=12288))
    kept = run([(0, 2)], config=config, curve=LengthCurve(name="long", at_steps=(1,), mean_tokens=(4000.0,)))
    assert len(kept.kinds("out_of_memory")) == 1
    assert kept.rows[-1]["training/global_step"] == 6


def test_free_dp_scaling_keeps_its_degrees_and_chooses_micro_batches() -> None:
    config = job(steps=10, plan=plan_config(4, 1, 4, 2))
    rows = {}
    for policy in ("dp-scaling-any", "dp-scaling-any-free"):
        made, kept = world(config, [(0, 2), (60, 3)], memory_bytes=H100.memory_bytes)
        drive(commander_of(policy, config, first_plan(config), made, kept), made)  # type: ignore[arg-type]
        rows[policy] = kept.rows
        plans = [
            event["command"]["plan"] for event in kept.kinds("commanded") if event["command"]["is"] == "ChangePlan"
        ]
        assert {(p["actor_train"]["layout"]["tp"], p["actor_generate"]["layout"]["tp"]) for p in plans} == {(4, 2)}
        assert max(p["actor_train"]["layout"]["dp"] for p in plans) == 6
    last = [found[-1]["timing_s/step"] for found in (rows["dp-scaling-any-free"], rows["dp-scaling-any"])]
    assert last[0] < last[1]


def test_a_workload_without_spread_has_no_tail() -> None:
    made = SimWorkload(
        prompts_per_step=4,
        samples_per_prompt=2,
        mean_prompt_tokens=100.0,
        most_prompt_tokens=128,
        most_response_tokens=4096,
        curve=LengthCurve(name="flat", at_steps=(1,), mean_tokens=(1000.0,)),
        shape=EVEN,
    )
    assert made.batch(1).response_tokens.max() < 1500


def test_no_change_costs_less_than_its_bound() -> None:
    jobs = [job(plan=plan_config(*degrees)) for degrees in ((8, 2, 1, 8), (4, 1, 4, 2), (2, 2, 4, 4))]
    fleet = world(jobs[0], [(0, 2)])[0].fleet
    bounds = set[float]()
    for config in jobs:
        before, changes = first_plan(config), Changes(config=config)
        for other in map(first_plan, jobs):
            engines = replace(before, actor_generate=other.actor_generate)
            for after in (other, engines, replace(before, actor_train=other.actor_train)):
                asked = Asked(before=before, after=after, fleet=fleet, holders=frozenset(fleet.slots))
                found = changes.price(asked)
                assert found is None or changes.bound(before, after) <= found.mean_seconds
                bounds.add(changes.bound(before, after))
    assert len(bounds) >= 4
