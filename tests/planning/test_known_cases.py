"""Answers that are known: what fits and what does not, and scenarios of other systems' users.

Of their list: 2 (logits), 5 (host memory), 14 (first-step OOM), 15 (no layout found), 60 and 61 (degrees that do not
fit). Not 59 (a placement group that waits for CPUs for ever): a plan knows slots and memory, no CPUs; that is for what
starts processes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.costs.host import PROCESS_BYTES
from nereus.planning.evaluate import Evaluation, Problem, evaluate
from nereus.planning.plan import parse_plan
from nereus.planning.search import search
from tests.planning.scenes import problem_of


def checked(problem: Problem, text: str) -> Evaluation:
    job = problem.job
    models = {name: job.model(name).config for name in job.stages()}
    return evaluate(problem, parse_plan(text, job.stages(), models, problem.terrain.ordered()))


def test_70b_ppo_does_not_fit_on_eight_a100_40_and_the_state_binds() -> None:
    result = search(problem_of("llama-3.1-70b", "8xa100-40"))
    assert result.best is None
    (closest,) = result.near_misses
    misfit = closest.misfits[0]
    assert misfit.component.split(".")[1] in ("moments", "masters", "weights", "gradients")
    assert misfit.needed_bytes > misfit.room_bytes == 40 * 1024**3
    assert misfit.phase.startswith("update_")
    for word in (misfit.component, misfit.phase, "slot 0"):
        assert word in misfit.reason


def test_8b_ppo_fits_on_eight_h100_with_small_engines_and_tp_within_the_node() -> None:
    problem = problem_of("llama-3.1-8b", "8xh100")
    best = search(problem).best
    assert best is not None
    judged = evaluate(problem, best.plan)
    assert judged.fits
    assert all(choice.layout.tp <= 8 for _, choice in best.plan.stages)
    assert best.plan.stage("actor_generate").layout.tp <= 2
    assert 30 <= judged.step.mean_seconds <= 300


def test_tp_stays_within_nodes_of_four() -> None:
    best = search(problem_of("llama-3.1-70b", "32xgb200", "grpo")).best
    assert best is not None
    small = search(problem_of("qwen2.5-7b", "6xl40s,3xl40s,7xl40s", "grpo")).best
    assert small is not None
    problem = problem_of("qwen2.5-7b", "6xl40s,3xl40s,7xl40s", "grpo")
    ground = problem.terrain.ground(problem.terrain.ordered())
    assert ground.domain_slots == (6, 3, 7)
    assert [ground.seats(tp) for tp in (1, 2, 4, 8)] == [16, 14, 8, 16]
    judged = checked(problem, "actor_train tp=4 dp=3; reference_infer dp=16; actor_generate tp=2 dp=7")
    assert "expected at most 8 of its 16 slots" in judged.misfits[0].reason


def test_unequal_devices_are_used_and_the_slow_ones_do_not_slow_the_fast_ones() -> None:
    both, fast = problem_of("llama-3.1-8b", "8xh100,8xa100-40"), problem_of("llama-3.1-8b", "8xh100")
    mixed, alone = search(both).best, search(fast).best
    assert mixed is not None
    assert alone is not None
    assert mixed.step_seconds < alone.step_seconds
    assert not any({0, 8} <= set(pool) for pool in mixed.plan.pools)


def test_2_logits_of_a_large_vocabulary_bind_and_are_refused_before_anything_starts() -> None:
    problem = problem_of("qwen2.5-0.5b", "1xa100-40", "grpo")
    judged = checked(problem, "actor_train micro_batch=64 recompute=full; reference_infer; actor_generate")
    (misfit,) = judged.misfits
    assert (misfit.phase, misfit.component) == ("update_actor", "actor_train.logits")
    tokens = 64 * problem.job.sample_tokens
    assert judged.binding.components["actor_train.logits"] >= tokens * problem.job.actor.shape.vocab * 4


def test_5_host_memory_of_a_node_is_part_of_the_plan() -> None:
    problem = problem_of("llama-3.1-8b", "8xh100")
    text = "actor_train tp=2 dp=4 keep=nothing recompute=full; critic_train tp=2 dp=4 keep=nothing recompute=full; "
    text += "reference_infer tp=2 dp=4 keep=nothing; actor_generate tp=2 dp=4"
    assert checked(problem, text).fits
    scarce = replace(problem, terrain=replace(problem.terrain, host_bytes_per_slot=250e9 / 8))
    (misfit,) = checked(scarce, text).misfits
    assert misfit.phase == "host"
    best = search(scarce).best
    assert best is not None
    host = evaluate(scarce, best.plan).hosts[0]
    assert PROCESS_BYTES <= host.total_bytes <= 250e9 / 8


@pytest.mark.parametrize(
    ("model", "fleet", "text"),
    [
        ("llama-3.1-70b", "72xa800", ("actor_train tp=8 dp=9; critic_train tp=8 dp=9; reference_infer tp=8 dp=9; "
         "actor_generate tp=4 dp=18")),
        ("llama-3.1-8b", "8xh100", ("actor_train tp=2 dp=4 micro_batch=8; critic_train tp=2 dp=4 micro_batch=8; "
         "reference_infer dp=8; actor_generate tp=2 dp=4")),
    ],
)  # fmt: skip
def test_14_a_plan_that_fails_in_its_first_step_is_refused_and_one_that_fits_is_proposed(
    model: str, fleet: str, text: str
) -> None:
    problem = problem_of(model, fleet)
    judged = checked(problem, text)
    assert not judged.fits
    assert judged.misfits[0].needed_bytes > judged.misfits[0].room_bytes
    best = search(problem).best
    assert best is not None
    assert evaluate(problem, best.plan).fits


def test_15_four_a100_get_a_layout() -> None:
    problem = problem_of("qwen2.5-7b", "4xa100", "grpo", cap=4096, mean=2000)
    best = search(problem).best
    assert best is not None
    assert evaluate(problem, best.plan).fits


@pytest.mark.parametrize(
    ("stage", "words", "told"),
    [
        ("actor_train", "tp=8 pp=4 dp=1", "tp * cp * pp * dp = 32: expected at most 8 of its 8 slots"),
        ("actor_train", "tp=3 dp=1", "expected a divisor of heads = 32"),
        ("actor_generate", "tp=16 dp=1", "expected at most 8 of its 8 slots"),
        ("actor_generate", "tp=4 dp=3", "expected at most 8 of its 8 slots"),
        ("reference_infer", "tp=2 dp=8", "expected at most 8 of its 8 slots"),
    ],
)
def test_60_and_61_degrees_that_do_not_fit_are_refused_for_the_stage_that_has_them(
    stage: str, words: str, told: str
) -> None:
    parts = dict.fromkeys(("actor_train", "reference_infer", "actor_generate"), "dp=8") | {stage: words}
    text = "; ".join(f"{name} {part}" for name, part in parts.items())
    (misfit,) = checked(problem_of("llama-3.1-8b", "8xh100", "grpo"), text).misfits
    assert misfit.reason.startswith(f"{stage}: ")
    assert told in misfit.reason


def test_idle_slots_are_named_with_a_reason() -> None:
    problem = problem_of("llama-3.1-8b", "7xh100", "grpo")
    judged = checked(problem, "actor_train tp=2 dp=3; reference_infer tp=4 dp=1; actor_generate dp=7")
    assert [(each.stage, each.slots) for each in judged.idle] == [("actor_train", (6,)), ("reference_infer", (4, 5, 6))]
    assert "do not fill 7" in judged.idle[0].reason


def test_groups_stand_on_the_first_seats_that_no_domain_cuts() -> None:
    ground = replace(problem_of("llama-3.1-8b", "7xh100", "grpo").terrain.ground(tuple(range(7))), domain_slots=(3, 4))
    assert ground.first_seats(2, 6) == (0, 1, 3, 4, 5, 6)
    assert ground.first_seats(2, 4) == (0, 1, 3, 4)
    assert ground.first_seats(6, 6) == (0, 1, 2, 3, 4, 5)  # wider than a domain
