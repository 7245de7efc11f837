"""Admission on random switching traces: the figures of `benchmarks.admission`, on fewer and shorter ones."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.admission import CHEAP, constant, mixed_shape, nereus, play, scaling
from benchmarks.switching import Shape, SwitchingOutlook, make
from nereus.control.adaptive import Adaptive
from nereus.control.controller import AdaptiveController
from nereus.fleet import uniform
from tests.hindsight import best_in_hindsight

FIRST = 90_000  # no weight was tuned on seeds from here


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 5))
def test_hindsight_is_the_best_of_all_sequences(seed: int, plans: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    seconds, prices = rng.uniform(1, 5, (steps, plans)), rng.uniform(0, 4, (plans, plans))
    seconds[rng.random(seconds.shape) < 0.2] = np.inf
    np.fill_diagonal(prices, 0.0)
    for over in range(plans):  # a change over a third plan is allowed, before one step
        prices = np.minimum(prices, prices[:, over, None] + prices[None, over, :])

    def total(path: tuple[int, ...]) -> float:
        before = (0, *path)
        return sum(prices[before[t], path[t]] + seconds[t, path[t]] for t in range(steps))

    best = min(map(total, product(range(plans), repeat=steps)))
    if not np.isfinite(best):
        with pytest.raises(ValueError, match="no sequence"):
            best_in_hindsight(seconds, prices, 0)
        return
    found, path = best_in_hindsight(seconds, prices, 0)
    assert found == pytest.approx(best)
    assert total(tuple(path)) == pytest.approx(best)


def test_time_is_near_the_best_in_hindsight() -> None:
    ratios = []
    for seed in range(FIRST, FIRST + 10):
        trace = make(seed, mixed_shape(seed))
        played = nereus(trace, seed % 3)
        best, _ = best_in_hindsight(trace.seconds, trace.prices, trace.first)
        assert played.overruns == 0
        ratios.append(played.seconds / best)
    assert min(ratios) >= 1 - 1e-9
    assert np.median(ratios) <= 1.10
    assert max(ratios) <= 1.5


@pytest.mark.parametrize(("noise", "steps"), [(0.02, 150), (0.15, 300)])
def test_constant_conditions_leave_a_settled_plan_alone(noise: float, steps: int) -> None:
    found = [constant(seed, noise, steps) for seed in range(FIRST, FIRST + 4)]
    assert sum(f.changes for f in found) > 0  # it does find better plans than the first
    assert max(f.after_settled for f in found) == 0
    assert max(f.needless for f in found) <= 1


def test_a_fleet_that_always_changes_costs_no_more_than_dp_scaling() -> None:
    ratios = []
    for seed in range(FIRST, FIRST + 8):
        trace = make(seed, Shape(steps=100, noise=0.05, fleet_every=2.0, start="best", price=CHEAP))
        ratios.append(nereus(trace).seconds / scaling(trace, divisible=False).seconds)
    assert np.mean(ratios) <= 1.01


def test_a_played_trace_replays_bit_for_bit_and_its_invariants_hold() -> None:
    trace = make(FIRST, Shape(steps=80, fleet_every=5.0, jump_every=30.0, growth=2.0))

    def policy() -> Adaptive:
        return Adaptive(SwitchingOutlook.of(trace), trace.plans[trace.first])

    played = play(trace, policy(), 1, check=True)
    assert len(played.changes) >= 3
    again = AdaptiveController(
        plan=trace.plans[trace.first], fleet=uniform(int(trace.fleet[0])), last_step=80, policy=policy()
    )
    assert [again.handle(event) for event in played.events] == played.commands
