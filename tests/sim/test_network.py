"""Fair sharing against closed forms: one link, two in series, two in parallel, and max-min's own definition."""

from __future__ import annotations

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.sim.network import Network, fair_rates

RATE = 10e9


def finish(flows: list[tuple[list[tuple[int, float]], float, float]]) -> list[float]:
    """When each flow (legs, bytes, beginning) is over."""
    env = simpy.Environment()
    network = Network(env)
    ends = [0.0] * len(flows)

    def one(index: int):
        legs, size, begin = flows[index]
        yield env.timeout(begin)
        yield network.flow(legs, size)
        ends[index] = env.now

    for index in range(len(flows)):
        env.process(one(index))
    env.run()
    return ends


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_one_link_with_n_flows(count: int) -> None:
    ends = finish([([(0, RATE)], 1e9, 0.0)] * count)
    assert ends == pytest.approx([count * 1e9 / RATE] * count, rel=1e-9)


def test_flows_of_unequal_size_share_until_they_end() -> None:
    ends = finish([([(0, 10.0)], 10.0, 0.0), ([(0, 10.0)], 30.0, 0.0)])
    assert ends == pytest.approx([2.0, 4.0], rel=1e-9)


def test_a_late_flow_slows_the_first_from_then_on() -> None:
    ends = finish([([(0, 10.0)], 100.0, 0.0), ([(0, 10.0)], 20.0, 6.0)])
    assert ends == pytest.approx([12.0, 10.0], rel=1e-9)


def test_two_links_in_series_take_the_slower() -> None:
    assert finish([([(0, 10.0), (1, 4.0)], 20.0, 0.0)]) == pytest.approx([5.0], rel=1e-9)
    ends = finish([([(0, 10.0), (1, 4.0)], 20.0, 0.0), ([(0, 10.0)], 30.0, 0.0)])
    assert ends == pytest.approx([5.0, 5.0], rel=1e-9)  # the second has the 6 that the first cannot use


def test_two_links_in_parallel_do_not_meet() -> None:
    ends = finish([([(0, 10.0)], 20.0, 0.0), ([(1, 5.0)], 20.0, 0.0)])
    assert ends == pytest.approx([2.0, 4.0], rel=1e-9)


def test_what_is_stopped_gives_its_share_back() -> None:
    env = simpy.Environment()
    network = Network(env)
    first, second = network.flow([(0, 10.0)], 100.0), network.flow([(0, 10.0)], 100.0)

    def stop():
        yield env.timeout(4.0)
        network.stop(second)
        yield first

    env.run(env.process(stop()))
    assert env.now == pytest.approx(4.0 + 80.0 / 10.0)
    assert network.flows_count == 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rates_are_max_min_fair(data: st.DataObject) -> None:
    """Feasible, and each flow has a full resource on which nobody is faster: that is the definition."""
    resources = data.draw(st.integers(1, 6))
    capacity = np.array([data.draw(st.sampled_from([1.0, 2.0, 5.0, 10.0])) for _ in range(resources)])
    ways = data.draw(st.lists(st.sets(st.integers(0, resources - 1), min_size=1, max_size=4), min_size=1, max_size=12))
    legs = np.array([[*sorted(way), *[-1] * (4 - len(way))] for way in ways])
    rates = fair_rates(legs, capacity)
    loads = [sum(rate for rate, way in zip(rates, ways, strict=True) if r in way) for r in range(resources)]
    assert all(load <= limit * (1 + 1e-9) for load, limit in zip(loads, capacity, strict=True))
    for rate, way in zip(rates, ways, strict=True):
        fastest = [max(q for q, other in zip(rates, ways, strict=True) if r in other) for r in way]
        full = [loads[r] >= capacity[r] * (1 - 1e-9) for r in way]
        assert any(f and rate >= most * (1 - 1e-9) for f, most in zip(full, fastest, strict=True))
