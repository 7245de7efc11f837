"""The answer to a search on a fleet of GPUs: which changes are priced by their graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.control.fleet_outlook import FleetOutlook
from nereus.control.fleet_search import ALTERNATIVES_COUNT, PRICED_COUNT, Pricer, propose_fleet
from nereus.control.proposals import Proposal
from nereus.control.records import PriceEstimate, SearchRequest
from nereus.layout import Plan, first_plan
from nereus.sim.phases import batch_of, observed
from nereus.sim.training import Batching
from nereus.sim.workload import StepSamples
from tests.sim.scene import H100, job, plan_config, workload, world

ESTIMATE_SECONDS = 50.0


def taking(seconds: float) -> PriceEstimate:
    return PriceEstimate(mean_seconds=seconds, deviation_seconds=1.0, bound_seconds=seconds)


def proposed(graph: Callable[[int], PriceEstimate | None]) -> tuple[Proposal, list[str]]:
    """The answer from a poor plan on 16 slots, and the plans whose graphs were asked for; `graph` prices the n-th of them."""
    config = job(plan=plan_config(8, 2, 1, 8))
    fleet = world(config, [(0, 2)], memory_bytes=H100.memory_bytes)[0].fleet
    present, asked = first_plan(config), list[str]()

    def price(plan: Plan) -> PriceEstimate | None:
        asked.append(plan.plan_id)
        return graph(len(asked))

    found = propose_fleet(
        SearchRequest(
            reason="a test", step=1, present=present, slots=fleet.slots, empty_slots=(), horizon_steps=5.0,
            remaining_steps=5, ratios=(),
        ),
        FleetOutlook(config=config, inventory=fleet, plans={present.plan_id: present}),
        Pricer(price=price, estimate=lambda _: taking(ESTIMATE_SECONDS), bound=lambda _: 40.0),
        100_000,
    )  # fmt: skip
    return found, asked


def test_one_graph_is_enough_when_the_estimate_holds() -> None:
    found, asked = proposed(lambda _: taking(ESTIMATE_SECONDS))
    assert asked == [found.candidates[0].plan_id]
    assert ALTERNATIVES_COUNT <= len(found.candidates) <= PRICED_COUNT


def test_the_first_is_priced_by_its_graph_though_graphs_are_dearer() -> None:
    found, asked = proposed(lambda count: taking(1000.0 if count < 3 else ESTIMATE_SECONDS - 1))
    first = found.candidates[0]
    assert len(asked) == 3
    assert first.plan_id == asked[-1]
    assert first.price.mean_seconds == ESTIMATE_SECONDS - 1
    assert {each.plan_id: each.price.mean_seconds for each in found.candidates[1:]}[asked[0]] == 1000.0


def test_where_no_change_leads_is_no_candidate() -> None:
    found, asked = proposed(lambda _: None)
    assert not found.candidates
    assert found.reason
    assert len(set(asked)) == len(asked) == PRICED_COUNT


def lately(mean_tokens: float, steps: int = 4) -> FleetOutlook:
    """What is believed after steps whose responses have so many tokens on average."""
    config = job(plan=plan_config(8, 2, 1, 8), steps=40)
    made = world(config, [(0, 2)], memory_bytes=H100.memory_bytes)[0]
    present, batches = first_plan(config), workload(config, mean_tokens)
    outlook = FleetOutlook(config=config, inventory=made.fleet, plans={present.plan_id: present})
    times = made.times()
    for step in range(1, steps + 1):
        samples = batches.batch(step)
        seconds = dict(times.phases(step, samples, made.slowness(step)))
        peak = times.memory.peak((samples.prompt_tokens + samples.response_tokens).astype(np.float64))
        seconds["step"] = sum(seconds.values())
        told = observed(float(step), step, samples, seconds, present.plan_id, peak)
        outlook = outlook.observe(told, present.plan_id, ratio=1.0, noise_share=0.03)
    return outlook


@pytest.mark.parametrize("mean_tokens", [300.0, 700.0, 1100.0, 1500.0])
def test_no_answer_is_a_plan_that_does_not_fit_the_next_step(mean_tokens: float) -> None:
    outlook = lately(mean_tokens)
    present = next(iter(outlook.plans.values()))
    request = SearchRequest(
        reason="a test", step=5, present=present, slots=outlook.inventory.slots, empty_slots=outlook.inventory.slots,
        horizon_steps=5.0, remaining_steps=5, ratios=(),
    )  # fmt: skip
    constant = taking(ESTIMATE_SECONDS)
    pricer = Pricer(price=lambda _: constant, estimate=lambda _: constant, bound=lambda _: 0.0)
    found = propose_fleet(request, outlook, pricer, 100_000)
    assert found.candidates
    assert all(outlook.fits(each.plan, 5) for each in found.candidates)
    strict = replace(outlook, missed_share=0.2)  # the search meets less of what fits
    again = propose_fleet(request, strict, pricer, 100_000)
    assert all(strict.fits(each.plan, 5) for each in again.candidates)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=32, max_size=32),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(1, 1), (2, 1), (3, 2), (5, 2)]),
)
def test_what_is_told_of_the_fullest_micro_batch_is_never_less(
    tokens: list[int], micro_batch: int, cut: tuple[int, int]
) -> None:
    lengths = np.array(tokens, dtype=np.int64)
    told = dict(batch_of(StepSamples(prompt_tokens=0 * lengths, response_tokens=lengths)).fullest_tokens)
    replicas, mini_batches = cut
    plan = first_plan(job(slots=replicas, plan=plan_config(1, 1, replicas, 1)))
    batching = Batching.of(replace(plan.actor_train, micro_batch=micro_batch), 32, mini_batches)
    assert np.bincount(batching.micro_of, lengths).max() <= told[micro_batch]
    assert told[1] == lengths.max()
    assert told[micro_batch] <= micro_batch * lengths.max()


def test_the_fullest_micro_batch_is_what_memory_has_to_hold() -> None:
    outlook = lately(700.0)
    problem = outlook.problem(outlook.present_batch, outlook.inventory, 1)
    ratios, job_of = dict(outlook.fullest_ratios()), problem.job
    assert ratios[1] > ratios[4] > ratios[16] >= 1.0
    for size, ratio in ratios.items():
        job_of = replace(problem.job, longest_tokens=1e4)
        assert job_of.fullest_tokens(size) == max(ratio * size * problem.job.sample_tokens, 1e4)
        assert replace(problem.job, longest_tokens=100).fullest_tokens(size) == 100 * size  # none is longer
    assert job_of.fullest_tokens(3) == max(ratios[2] * 3 * problem.job.sample_tokens, 1e4)
    plain = replace(problem.job, fullest_ratios=(), longest_tokens=1e6)
    assert plain.fullest_tokens(4) == 1e6
