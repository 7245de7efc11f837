"""Where a change's operations run, and truths that are further from what the controller believes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from nereus.config import ChangeConfig, PlanChange, StageConfig
from nereus.controller import Controller
from nereus.fleet import DEVICES, uniform
from nereus.layout import first_plan
from nereus.sim.changes import Asked, Placing
from nereus.sim.phases import StepTimes
from nereus.sim.searching import Changes
from nereus.sim.truth import Truth
from nereus.world import drive
from tests.sim.scene import Kept, job, plan_config, workload, world

CHANGE = ChangeConfig(
    step=3,
    plan=PlanChange(actor_train=StageConfig(tp=2, pp=2, dp=4, micro_batch=4), actor_generate=StageConfig(tp=1, dp=16)),
)


def changed(placing: Placing, budget_bytes: int = 400 << 30) -> dict[str, Any]:
    """What the journal says of one change; a slot has room for old and new unless its budget says otherwise."""
    config = job(steps=3, changes=(CHANGE,), budget_bytes=budget_bytes)
    made, kept = world(config, [(0, 2)], renumbered=True, placing=placing, truth=Truth(exact=True))
    drive(Controller(config), made)
    (done,) = kept.kinds("transition_done")
    return done


def lost(done: dict[str, Any]) -> float:
    """Seconds of the job that a change takes: its pause, and what lengthens the step before."""
    return done["pause_seconds"] + sum(done["interleaved_seconds"].values())


def test_three_ways() -> None:
    measured, standby, pause = (changed(placing) for placing in ("measured", "standby", "pause"))
    assert pause["interleaved_seconds"] == pause["outside_seconds"] == {}
    assert "build_engine" in pause["seconds"]
    assert "build_engine" in measured["interleaved_seconds"]
    assert "build_engine" not in {**standby["seconds"], **standby["interleaved_seconds"]}
    assert standby["outside_seconds"]["build_engine"] == pytest.approx(pause["seconds"]["build_engine"])
    assert lost(standby) < lost(measured) == pytest.approx(lost(pause), rel=0.01)
    assert measured["pause_seconds"] < pause["pause_seconds"]  # the step before carries what is interleaved
    assert standby["pause_seconds"] < pause["pause_seconds"] - 40  # an engine of generation takes 45 s


def test_without_room_nothing_is_built_ahead() -> None:
    tight = changed("standby", budget_bytes=66 << 30)
    assert tight["pause_seconds"] > changed("standby")["pause_seconds"]


def test_slower_links_lengthen_what_goes_over_them_alone() -> None:
    config, fleet = job(), uniform(16, DEVICES["h100"])
    samples = workload(config).batch(1)

    def phases(truth: Truth) -> dict[str, float]:
        made, _ = world(config, [(0, 2)])
        return dict(StepTimes(config, made.plan, fleet, truth).phases(1, samples, truth.slowness(16)))

    exact = Truth(exact=True)
    usual, slow, engines = (
        phases(exact),
        phases(exact.altered(link_ratio=0.25)),
        phases(exact.altered(engine_ratio=4.0)),
    )
    assert slow["update_weights"] > 1.5 * usual["update_weights"]
    assert slow["update_actor"] > 1.2 * usual["update_actor"]  # TP4
    assert slow["reward"] == usual["reward"]
    assert engines["gen"] > 1.2 * usual["gen"]
    assert {name: engines[name] for name in usual if name != "gen"} == {n: s for n, s in usual.items() if n != "gen"}
    assert exact.fleet(fleet) is fleet


def test_noise_of_nothing_is_none() -> None:
    quiet = Truth(seed=3).altered(noise_ratio=0.0)
    assert quiet.noise(1, "gen") == 1.0
    assert set(quiet.slowness(8)) == {1.0}
    assert set(quiet.straggling(64, 5)) == {1.0}
    assert quiet == replace(Truth(seed=3), noise_log_std=0.0, slot_log_std=0.0, straggler_share=0.0)


def test_the_same_change_twice_is_the_same() -> None:
    def seen() -> Kept:
        config = job(steps=3, changes=(CHANGE,))
        made, kept = world(config, [(0, 2)], renumbered=True, placing="standby")
        drive(Controller(config), made)
        return kept

    assert seen().events == seen().events


@pytest.mark.parametrize("placing", ["measured", "pause"])
def test_a_price_without_a_graph_is_near_that_with_one(placing: Placing) -> None:
    config, fleet = job(slots=64), uniform(64, DEVICES["h100"])
    slots = frozenset(fleet.slots)
    plans = [first_plan(job(slots=64, plan=plan_config(*cut))) for cut in ((4, 1, 16, 2), (2, 2, 16, 2), (8, 1, 8, 4))]
    for before, after in pairwise(plans):
        changes = Changes(config=config, placing=placing)
        asked = Asked(before=before, after=after, fleet=fleet, holders=slots)
        for each in (asked, replace(asked, urgent=True)):
            with_graph, without = changes.price(each), changes.estimated(each)
            assert with_graph is not None
            assert without.mean_seconds == pytest.approx(with_graph.mean_seconds, rel=0.1)
            assert without.commit_seconds == pytest.approx(with_graph.commit_seconds, rel=0.15)
    assert changes.estimated(replace(asked, before=after)).mean_seconds == 0.0
    gone = replace(asked, before=after, after=before, holders=slots - set(fleet.nodes[0].slots))
    assert changes.estimated(gone) == changes.restored(fleet) == changes.price(gone)
