"""Other systems in the simulated world: the same truth as Nereus', orderings that must hold, memory, sources."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import AlgorithmConfig, Config, DataConfig
from nereus.fleet import Fleet, parse_fleet
from nereus.layout import first_plan
from nereus.sim import rivals
from nereus.sim.rivals import openrlhf, verl
from nereus.sim.rivals.choosing import Trial, configured
from nereus.sim.rivals.memory import misfit
from nereus.sim.rivals.passes import Passes, _by_samples, _by_tokens, _dealt, exposed
from nereus.sim.rivals.planned import ROUNDS, best_setup, problem_on, settled_setup
from nereus.sim.rivals.setups import Cut, Packing, RlJob, Setup, job_of
from nereus.sim.rivals.stepping import GENEROUS, PUBLISHED, Handling, SystemTimes
from nereus.sim.training import StageTimes
from nereus.sim.truth import Truth
from nereus.sim.workload import SimWorkload, StepSamples, constant
from tests.sim.scene import LLAMA_8B, job, plan_config

EXACT = Truth(exact=True)


def config(response: int = 1024, prompts: int = 512) -> Config:
    return Config(
        model=LLAMA_8B,
        data=DataConfig(
            prompts_per_step=prompts, samples_per_prompt=1, max_prompt_tokens=1024, max_response_tokens=response
        ),
        algorithm=AlgorithmConfig(mini_batches=4),
    )


def batch(response: int = 1024, prompts: int = 512) -> StepSamples:
    return lengths(response, prompts).batch(1)


def lengths(response: int = 1024, prompts: int = 512) -> SimWorkload:
    return SimWorkload(
        prompts_per_step=prompts,
        samples_per_prompt=1,
        mean_prompt_tokens=300.0,
        most_prompt_tokens=1024,
        most_response_tokens=response,
        curve=constant(0.4 * response),
    )


def trial(fleet: Fleet, response: int = 1024, handling: Handling = PUBLISHED) -> tuple[RlJob, Trial]:
    found = job_of(config(response))
    return found, Trial(found, fleet, EXACT, batch(response), handling)


@cache
def chosen(system: str, configuration: str, fleet: str) -> tuple[Setup, dict[str, float], float]:
    found, made = trial(parse_fleet(fleet))
    setup = configured(system, configuration, found, made.fleet, made)
    assert setup is not None
    step = SystemTimes(found, setup, made.fleet, EXACT).step(1, made.samples, made.even)
    return setup, dict(step.phases), step.seconds


@pytest.mark.parametrize(("tp", "pp", "dp"), [(4, 1, 4), (2, 4, 2), (1, 2, 8)])
def test_a_plain_cut_takes_what_the_simulated_world_says(tp: int, pp: int, dp: int) -> None:
    plan = first_plan(job(slots=16, plan=plan_config(tp, pp, dp, 1)))
    fleet, tokens = parse_fleet("16xh100"), np.random.default_rng(1).lognormal(6.5, 0.6, 256)
    slowness = 1 + 0.1 * np.random.default_rng(2).random(16)
    shape = job_of(job()).actor
    known = StageTimes(shape, plan.actor_train, fleet, 256, 2)
    cut = Cut(slots=plan.actor_train.slots, tp=tp, pp=pp, dp=dp, packing=Packing(samples=4, forward_samples=4))
    found = Passes(shape, cut, fleet, 256, 2, trains=True)
    assert found.forward_seconds(tokens, slowness) == pytest.approx(known.forward_seconds(tokens, slowness), rel=1e-9)
    expected = known.training_seconds(tokens, slowness, 1)
    assert found.training_seconds(tokens, slowness, 1) == pytest.approx(
        expected, rel=0.01
    )  # rows of the last micro-batch
    again = Passes(shape, replace(cut, recompute=True), fleet, 256, 2, trains=True)
    assert 1.2 < again.training_seconds(tokens, slowness, 1) / found.training_seconds(tokens, slowness, 1) < 1.36


def test_full_sharding_by_hand() -> None:
    """One micro-batch on each replica: its seconds, and what shows of gathers and of the gradients' way."""
    fleet, shape, tokens = parse_fleet("8xh100"), job_of(config()).actor, np.full(8, 800.0)
    cut = Cut(slots=tuple(range(8)), dp=8, sharding="full", packing=Packing(samples=1, forward_samples=1))
    passes, plain = (Passes(shape, c, fleet, 8, 1, trains=True) for c in (cut, replace(cut, sharding="optimizer")))
    even = np.ones(8)
    busy = plain.forward_seconds(tokens, even)
    gather, reduce = passes._gather_seconds, passes._reduce_seconds
    shown = max(0.12 * gather, gather - 0.6 * busy)
    assert passes.forward_seconds(tokens, even) == pytest.approx(busy + shown, rel=1e-9)
    micros = passes._micros(tokens, 1, cut.packing)
    work = float(plain._pass_seconds(micros, even, backward=True).sum())
    expected = work + max(0.12 * gather, gather - 0.6 * work / 3)
    expected += max(0.12 * (gather + reduce), gather + reduce - 0.6 * work * 2 / 3) + passes._optimizer_seconds
    assert passes.training_seconds(tokens, even, 1) == pytest.approx(expected, rel=1e-9)
    assert float(exposed(1.0, 10.0)) == pytest.approx(0.12)


def test_full_sharding_over_slow_links_is_slower_than_tensor_parallelism_within_nodes() -> None:
    """Few tokens a replica and a network of 100 Gbit/s a slot: gathers do not hide."""
    fleet, shape, tokens = parse_fleet("64xl40s"), job_of(config()).actor, np.full(512, 300.0)
    slots, packing = tuple(range(64)), Packing(samples=2, forward_samples=2)
    sharded = Passes(shape, Cut(slots=slots, dp=64, sharding="full", packing=packing), fleet, 512, 4, trains=True)
    tensor = Passes(shape, Cut(slots=slots, tp=8, dp=8, packing=packing), fleet, 512, 4, trains=True)
    even = np.ones(64)
    assert sharded.training_seconds(tokens, even, 1) > tensor.training_seconds(tokens, even, 1)
    near = parse_fleet("8xh100")  # where links are fast and work is long, it is the other way round
    long = np.full(512, 2000.0)
    one = Passes(shape, Cut(slots=slots[:8], dp=8, sharding="full", packing=packing), near, 512, 4, trains=True)
    other = Passes(shape, Cut(slots=slots[:8], tp=8, dp=1, packing=packing), near, 512, 4, trains=True)
    assert one.training_seconds(long, even[:8], 1) < other.training_seconds(long, even[:8], 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 7), st.integers(1, 9))
def test_micro_batches_hold_every_token_once(samples: int, minis: int, replicas: int, each: int) -> None:
    tokens = np.random.default_rng(samples).integers(1, 900, samples).astype(float)
    dealt = _dealt(tokens, replicas)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(samples))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    groups = [list(split) for split in zip(*(np.array_split(own, minis) for own in dealt), strict=True)]
    for made in (
        _by_samples(tokens, tokens**2, groups, each),
        _by_tokens(tokens, tokens**2, groups, 1000, together=True),
    ):
        assert made.rows.sum() == pytest.approx(tokens.sum())
        assert made.attention.sum() == pytest.approx((tokens**2).sum())
    packed = _by_tokens(tokens, tokens, groups, 1000, together=False)
    assert packed.rows.max() <= 1000


@pytest.mark.parametrize("fleet", ["8xh100", "32xa100"])
def test_tuned_is_never_slower_than_the_defaults(fleet: str) -> None:
    for system, plain in (("verl", ("default",)), ("openrlhf", ("default", "default, apart"))):
        _, _, tuned = chosen(system, "tuned", fleet)
        assert all(tuned <= chosen(system, name, fleet)[2] for name in plain)


def test_what_stands_apart_works_with_less_and_at_the_same_time() -> None:
    shared, ours, _ = chosen("openrlhf", "default", "8xh100")
    apart, theirs, seconds = chosen("openrlhf", "default, apart", "8xh100")
    assert set(apart.actor.slots) | set(apart.engines.slots) < set(shared.actor.slots)
    assert theirs["update_actor"] > 2 * ours["update_actor"]
    parts = max(theirs["old_log_prob"] + theirs["ref"], theirs["values"])
    parts += max(theirs["update_actor"], theirs["update_critic"])
    whole = theirs["update_weights"] + theirs["gen"] + theirs["reward"] + parts
    assert seconds == pytest.approx(whole)
    _, colocated, total = chosen("verl", "default", "8xh100")
    assert total == pytest.approx(sum(colocated.values()))


def test_published_handling_costs_and_a_generous_one_does_not() -> None:
    found, made = trial(parse_fleet("8xh100"))
    for system in ("verl", "openrlhf"):
        setup = chosen(system, "default", "8xh100")[0]
        seconds = [SystemTimes(found, setup, made.fleet, EXACT, h).sync_seconds for h in (GENEROUS, PUBLISHED)]
        assert 0 < seconds[0] < 0.8 < seconds[1]
    weights = 2 * found.actor.parameters_count
    assert seconds[1] > 291 * 0.033 + weights / 3.35e12


def test_memory_judges_the_defaults() -> None:
    for name, fits in (("8xh100", True), ("8xl40s", False), ("64xl40s", True)):
        fleet = parse_fleet(name)
        found = job_of(config())
        assert (verl.default(found, fleet) is not None) == fits
    found, fleet = job_of(config()), parse_fleet("8xl40s")
    packing = Packing(samples=1, forward_samples=1, balanced=True)
    setup = verl.setup_of("x", verl.fsdp(found, fleet.slots, packing), verl.engines_of(fleet.slots, 2, 0.5, 256))
    assert "generation needs" in str(misfit(found, setup, fleet))
    away = verl.setup_of(
        "x", verl.fsdp(found, fleet.slots, packing, offload="all"), verl.engines_of(fleet.slots, 2, 0.5, 256)
    )
    assert misfit(found, away, fleet) is None
    small = replace(away, engines=replace(away.engines, memory_share=0.2))
    assert "cache holds" in str(misfit(found, small, fleet))


def test_a_batch_that_replicas_do_not_divide_is_refused() -> None:
    found = job_of(config(prompts=500))
    assert verl.default(found, parse_fleet("8xh100")) is None
    made = verl.setup_of("x", verl.fsdp(found, range(8), Packing()), verl.engines_of(range(8), 2, 0.5, 256))
    assert "must be divisible" in str(verl.refusal(found, made, 8))
    assert openrlhf.default_colocated(found, parse_fleet("8xh100")) is None


def test_the_planner_never_sees_the_truth_and_its_plan_is_timed_like_the_others() -> None:
    fleet = parse_fleet("16xh100")
    problem = problem_on(config(), fleet, 300.0, 400.0)
    made = [best_setup(config(), fleet, problem, truth) for truth in (EXACT, replace(EXACT, decode_step_seconds=0.1))]
    assert made[0] is not None
    assert made[1] is not None
    assert made[0][1].best == made[1][1].best
    setup = made[0][0]
    assert misfit(job_of(config()), setup, fleet) is None
    found, tried = trial(fleet)
    step = SystemTimes(found, setup, fleet, EXACT).step(1, tried.samples, tried.even)
    assert set(step.phases) == {
        "update_weights", "gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor",
    }  # fmt: skip


def test_measured_steps_lead_to_another_plan() -> None:
    """Long responses on 8 A100: the priors take engines too wide, measured steps correct that."""
    fleet, job_config = parse_fleet("8xa100"), config(8192, 1024)
    workload = replace(lengths(8192, 1024), curve=constant(2500.0))
    problem = problem_on(job_config, fleet, 300.0, 2500.0)
    first = best_setup(job_config, fleet, problem, EXACT)
    found = settled_setup(job_config, fleet, problem, EXACT, workload)
    assert first is not None
    assert found is not None
    assert found == settled_setup(job_config, fleet, problem, EXACT, workload)
    setup, count = found
    assert 1 < count <= ROUNDS
    job, samples, even = job_of(job_config), workload.batch(1), np.ones(8)
    seconds = [SystemTimes(job, s, fleet, EXACT).step(1, samples, even).seconds for s in (setup, first[0])]
    assert seconds[0] < seconds[1]


def test_equal_seeds_take_equal_seconds() -> None:
    found, made = trial(parse_fleet("16xa100"))
    setup = chosen("verl", "tuned", "32xa100")[0]
    cuts = verl.fsdp(found, range(16), setup.actor.packing)
    setup = verl.setup_of("x", cuts, verl.engines_of(range(16), 2, 0.5, 256))
    steps = [
        SystemTimes(found, setup, made.fleet, Truth(seed=seed)).step(3, made.samples, Truth(seed=seed).slowness(16))
        for seed in (1, 1, 2)
    ]
    assert steps[0] == steps[1] != steps[2]


def test_every_assumption_has_a_source_and_its_value() -> None:
    entries = json.loads((Path(rivals.__file__).parent / "sources.json").read_text())
    for entry in entries:
        assert entry["system"]
        assert entry["assumption"]
        assert entry["source"]
        if "constant" in entry:
            module, _, name = entry["constant"].partition("PUBLISHED.")
            holder = importlib.import_module(
                (module or entry["constant"]).rstrip(".").rpartition(".")[0] if not name else module.rstrip(".")
            )
            found = getattr(holder.PUBLISHED, name) if name else getattr(holder, entry["constant"].rpartition(".")[2])
            assert found == entry["value"], entry["constant"]
    named = {entry.get("constant", "").rpartition(".")[2] for entry in entries}
    for module in (verl, openrlhf):
        defaults = {
            n for n in vars(module) if n.startswith(("DEFAULT_", "EXAMPLE_")) or n in ("SHARED_SHARE", "OWN_SHARE")
        }
        assert defaults <= named
