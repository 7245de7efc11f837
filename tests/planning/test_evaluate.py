"""What a plan costs and needs: phases sum to the step, longer responses never help, totals do not depend on DP."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import ModelConfig
from nereus.costs.generation import equal_lengths
from nereus.errors import ConfigError
from nereus.planning.evaluate import Evaluation, Problem, evaluate
from nereus.planning.plan import GlobalPlan, parse_plan
from nereus.planning.stagework import update_work
from tests.planning.scenes import job_of, problem_of, small_problem

SHARED = "actor_train tp=2 pp=2 dp=2 micro_batch=2 recompute=full keep=weights; critic_train tp=2 dp=4 keep=nothing; "
SHARED += "reference_infer tp=2 dp=4 micro_batch=4 keep=nothing; actor_generate tp=2 dp=4"
APART = "actor_train tp=2 dp=2 slots=0-3; critic_train tp=2 dp=2 slots=4-7 keep=weights; "
APART += "reference_infer tp=4 dp=1 slots=4-7; actor_generate tp=2 dp=2 slots=0-3"


def plan_of(problem: Problem, text: str) -> GlobalPlan:
    job = problem.job
    models = {name: job.model(name).config for name in job.stages()}
    return parse_plan(text, job.stages(), models, problem.terrain.ordered())


def judged(problem: Problem, text: str) -> Evaluation:
    return evaluate(problem, plan_of(problem, text))


@pytest.mark.parametrize("text", [SHARED, APART])
def test_critical_phases_sum_to_the_step(text: str) -> None:
    found = judged(problem_of("llama-3.1-8b", "8xh100"), text)
    critical = sum(phase.time.mean_seconds for phase in found.phases if phase.critical)
    assert found.step.mean_seconds == pytest.approx(critical, rel=1e-12)
    assert 0 < found.step.deviation_seconds < found.step.mean_seconds
    waiting = {phase.phase for phase in found.phases if not phase.critical}
    assert bool(waiting) == (text == APART)


def test_models_apart_run_beside_each_other() -> None:
    problem = problem_of("llama-3.1-8b", "8xh100")
    found = judged(problem, APART)
    seconds = {phase.phase: phase.time.mean_seconds for phase in found.phases}
    slower = max(seconds["update_actor"], seconds["update_critic"])
    infer = max(seconds["forward_actor"], seconds["forward_critic"] + seconds["forward_reference"])
    rest = seconds["update_weights"] + seconds["generate"] + seconds["framework"]
    assert found.step.mean_seconds == pytest.approx(rest + infer + slower, rel=1e-12)


def test_generation_hides_behind_training_only_one_step_off() -> None:
    problem = problem_of("llama-3.1-8b", "16xh100", "grpo")
    text = "actor_train tp=2 dp=4 slots=0-7; reference_infer tp=2 dp=4 slots=0-7; actor_generate tp=2 dp=4 slots=8-15"
    on = judged(problem, text)
    off = judged(replace(problem, job=replace(problem.job, on_policy=False)), text)
    seconds = {phase.phase: phase.time.mean_seconds for phase in on.phases}
    after = seconds["forward_actor"] + seconds["forward_reference"] + seconds["update_actor"]
    saved = min(seconds["generate"], after)
    assert on.step.mean_seconds - off.step.mean_seconds == pytest.approx(saved, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    mean=st.integers(50, 900),
    more=st.integers(1, 600),
    text=st.sampled_from([SHARED, APART.replace("slots=4-7", "slots=4-7 micro_batch=3")]),
)
def test_longer_responses_are_never_faster_nor_smaller(mean: int, more: int, text: str) -> None:
    problem = small_problem(8, 40, critic=True, reference=True, layers=3, samples=24)

    def at(tokens: int) -> Evaluation:
        job = replace(problem.job, lengths=equal_lengths(tokens), longest_tokens=300 + 1.5 * tokens)
        return judged(replace(problem, job=job), text)

    short, long = at(mean), at(mean + more)
    assert long.step.mean_seconds >= short.step.mean_seconds * (1 - 1e-12)
    for before, after in zip(short.peaks, long.peaks, strict=True):
        assert (before.pool, before.phase) == (after.pool, after.phase)
        assert after.total_bytes >= before.total_bytes * (1 - 1e-12)


@pytest.mark.parametrize("name", ["gemm", "attention", "memory", "head"])
def test_a_stages_arithmetic_over_all_replicas_does_not_depend_on_their_number(name: str) -> None:
    problem = problem_of("llama-3.1-8b", "8xh100")
    totals = []
    for dp in (1, 2, 4, 8):
        text = SHARED.replace("tp=2 pp=2 dp=2 micro_batch=2", f"tp=1 dp={dp} micro_batch=2")
        choice = plan_of(problem, text).stage("actor_train")
        terms = update_work(problem.job, problem.job.actor.shape, choice, problem.terrain.ground(range(8)).rates)
        totals.append(dp * terms[name])
    assert totals == pytest.approx([totals[0]] * 4, rel=1e-9)


def test_state_bytes_over_all_replicas_do_not_depend_on_their_number() -> None:
    problem = problem_of("llama-3.1-8b", "8xh100")
    totals = []
    for dp in (2, 4, 8):
        choice = plan_of(problem, SHARED.replace("tp=2 pp=2 dp=2", f"tp=1 dp={dp} sharding=full")).stage("actor_train")
        sizes = problem.memory.stage(problem.job, "actor_train", replace(choice, keep="all"))
        totals.append(dp * (sizes.resident["masters"] + sizes.resident["moments"]))
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-9)


def test_offloading_frees_the_slot_fills_the_host_and_takes_time() -> None:
    problem = problem_of("llama-3.1-8b", "8xh100", "grpo")
    texts = [
        f"actor_train tp=2 dp=4 keep={keep}; reference_infer tp=2 dp=4; actor_generate tp=2 dp=4"
        for keep in ("all", "weights", "nothing")
    ]
    found = [judged(problem, text) for text in texts]

    def held(each: Evaluation) -> float:
        return sum(
            size
            for peak in each.peaks
            if peak.phase == "forward_reference"
            for part, size in peak.components.items()
            if part.startswith("actor_train")
        )

    assert held(found[0]) > held(found[1]) > held(found[2])
    assert found[0].hosts[0].total_bytes < found[1].hosts[0].total_bytes < found[2].hosts[0].total_bytes
    updates = [next(p.time.mean_seconds for p in each.phases if p.phase == "update_actor") for each in found]
    assert updates[0] < updates[1] < updates[2]


def test_a_cache_that_others_leave_little_room_makes_generation_slower() -> None:
    problem = problem_of("llama-3.1-8b", "8xh100", "grpo", samples=8192)
    times = []
    for keep in ("all", "nothing"):
        text = f"actor_train tp=1 dp=8 keep={keep} recompute=full; reference_infer tp=1 dp=8 keep={keep}; "
        found = judged(problem, text + "actor_generate tp=1 dp=8")
        times.append(next(p.time.mean_seconds for p in found.phases if p.phase == "generate"))
    assert times[0] > 1.1 * times[1]


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 4),
    dp=st.integers(1, 4),
    micro=st.integers(1, 9),
    recompute=st.sampled_from(["none", "selective", "half", "full"]),
    keep=st.sampled_from(["all", "weights", "nothing"]),
    slots=st.sampled_from(["", " slots=0-3", " slots=1,3,5-7"]),
)
def test_a_plans_text_reads_back_equal(
    tp: int, pp: int, dp: int, micro: int, recompute: str, keep: str, slots: str
) -> None:
    config = ModelConfig(layers=7)
    words = f"tp={tp} pp={pp} dp={dp} micro_batch={micro} keep={keep}"
    text = f"actor_train {words} recompute={recompute}{slots}\nactor_generate tp={tp} dp={dp}{slots}  # the engines"
    stages = ("actor_train", "actor_generate")
    plan = parse_plan(text, stages, dict.fromkeys(stages, config), range(8))
    assert parse_plan(str(plan), stages, dict.fromkeys(stages, config), range(8)) == plan
    assert plan.stage("actor_train").layout.tp == tp
    assert plan.stage("actor_train").recompute == recompute


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("actor_train tp=2", "is missing actor_generate"),
        ("actor_train tp=2; actor_generate; critic_train", "no such model"),
        ("actor_train recompte=full; actor_generate", "did you mean recompute"),
        ("actor_train tp=two; actor_generate", "expected a whole number"),
        ("actor_train keep=some; actor_generate", "expected one of all, weights, nothing"),
        ("actor_train slots=0-9; actor_generate", "expected slots of the fleet"),
        ("actor_train slots=0-4; actor_generate slots=4-7", "expected the same slots"),
        ("actor_train pp=99; actor_generate", "at most the model's layers"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(text: str, told: str) -> None:
    stages = ("actor_train", "actor_generate")
    with pytest.raises(ConfigError, match=told):
        parse_plan(text, stages, dict.fromkeys(stages, ModelConfig()), range(8))


def test_a_job_names_its_stages() -> None:
    job = job_of("qwen2.5-0.5b", "grpo")
    assert job.stages() == ("actor_train", "reference_infer", "actor_generate")
    with pytest.raises(KeyError, match="critic_train"):
        job.model("critic_train")
