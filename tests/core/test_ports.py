"""Balance against linear programmes: what ports carry, and the proof that they cannot carry less."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from nereus.transfer.ports import Load, bound, pour, spread

AMOUNTS = st.floats(0.1, 1e9) | st.sampled_from((1.0, 4096.0, 1e6))


@dataclass(frozen=True, kw_only=True)
class Instance:
    """What ports carry already, their rates, and the loads to divide."""

    fixed: np.ndarray
    rates: np.ndarray
    loads: list[Load]


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    count = draw(st.integers(1, 8))
    fixed = draw(st.lists(st.just(0.0) | AMOUNTS, min_size=count, max_size=count))
    rates = draw(st.lists(st.sampled_from((1.0, 0.25, 9.0)), min_size=count, max_size=count))
    some = st.sets(st.integers(0, count - 1), min_size=1).map(sorted)
    loads = draw(st.lists(st.tuples(some, AMOUNTS), min_size=1, max_size=12))
    return Instance(
        fixed=np.array(fixed),
        rates=np.array(rates),
        loads=[Load(ports=np.array(ports), amount_bytes=amount) for ports, amount in loads],
    )


def optimum(case: Instance) -> float:
    """Seconds of the busiest port at best: min t with fixed_p + sum of shares <= rate_p t."""
    variables = [(index, int(port)) for index, load in enumerate(case.loads) for port in load.ports]
    limits = np.zeros((len(case.fixed), len(variables) + 1))
    equal = np.zeros((len(case.loads), len(variables) + 1))
    limits[:, 0] = -1.0
    scale = max(load.amount_bytes for load in case.loads)
    for column, (index, port) in enumerate(variables, start=1):
        limits[port, column] = 1 / case.rates[port]
        equal[index, column] = 1.0
    found = linprog(
        np.eye(1, len(variables) + 1)[0],
        A_ub=limits,
        b_ub=-case.fixed / case.rates / scale,
        A_eq=equal,
        b_eq=[load.amount_bytes / scale for load in case.loads],
        method="highs",
    )
    assert found.status == 0
    return float(found.fun) * scale


def levels(case: Instance, shares: list[np.ndarray]) -> np.ndarray:
    level = case.fixed.copy()
    for load, share in zip(case.loads, shares, strict=True):
        np.add.at(level, load.ports, share)
    return level


@settings(max_examples=120, deadline=None)
@given(instances())
@example(
    Instance(
        fixed=np.zeros(1),
        rates=np.array([9.0]),
        loads=[Load(ports=np.array([0]), amount_bytes=amount) for amount in (1e9, 449175822.9562385, 0.25, 0.125)],
    )
)
def test_the_busiest_port_is_as_idle_as_can_be_and_the_bound_proves_it(case: Instance) -> None:
    shares = spread(case.fixed, case.rates, case.loads)
    for load, share in zip(case.loads, shares, strict=True):
        assert share.sum() == pytest.approx(load.amount_bytes)
        assert (share >= 0).all()
    level = levels(case, shares)
    busiest, best = float((level / case.rates).max()), optimum(case)
    seconds, amount = bound(case.fixed, case.rates, case.loads, level)
    assert busiest <= 1.01 * best
    assert 0.99 * best <= seconds <= best * (1 + 1e-6)
    assert amount == pytest.approx(seconds * case.rates.max())


@settings(max_examples=60, deadline=None)
@given(instances(), st.data())
def test_no_division_beats_the_bound(case: Instance, data: st.DataObject) -> None:
    """Also a bad division proves a true bound, only a weaker one."""
    shares = []
    for load in case.loads:
        parts = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(load.ports), max_size=len(load.ports))))
        shares.append(load.amount_bytes * (parts / parts.sum() if parts.any() else np.full(len(parts), 1 / len(parts))))
    assert bound(case.fixed, case.rates, case.loads, levels(case, shares))[0] <= optimum(case) * (1 + 1e-6)


@settings(max_examples=100, deadline=None)
@given(instances(), AMOUNTS | st.just(0.0))
def test_pouring_fills_the_lowest_first(case: Instance, amount: float) -> None:
    """Water: ports that get any end at the same height, no other port is below it."""
    poured = pour(case.fixed[None], case.rates[None], np.array([amount]))[0]
    assert poured.sum() == pytest.approx(amount)
    height = (case.fixed + poured) / case.rates
    wet = poured > 1e-9 * amount
    if wet.any():
        surface = height[wet].max()
        np.testing.assert_allclose(height[wet], surface, rtol=1e-6)
        assert (height[~wet] >= surface * (1 - 1e-6)).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(AMOUNTS, min_size=4, max_size=4), AMOUNTS | st.just(0.0)), min_size=2, max_size=6))
def test_rows_are_poured_as_if_each_were_alone(rows: list[tuple[list[float], float]]) -> None:
    levels, amounts = np.array([level for level, _ in rows]), np.array([amount for _, amount in rows])
    rates = np.tile((1.0, 9.0, 0.25, 1.0), (len(rows), 1))
    together = pour(levels, rates, amounts)
    for row in range(len(rows)):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(together[one], pour(levels[one], rates[one], amounts[one]))


@settings(max_examples=60, deadline=None)
@given(instances(), st.data())
def test_loads_that_share_no_port_do_not_hear_of_each_other(case: Instance, data: st.DataObject) -> None:
    """Two groups of ports side by side are divided like each group alone, whatever turns their loads take."""
    size = len(case.fixed)
    moved = [Load(ports=load.ports + size, amount_bytes=load.amount_bytes) for load in case.loads]
    order = data.draw(st.permutations(range(2 * len(moved))))
    both = [(case.loads + moved)[index] for index in order]
    found = spread(np.tile(case.fixed, 2), np.tile(case.rates, 2), both)
    level = levels(Instance(fixed=np.tile(case.fixed, 2), rates=np.tile(case.rates, 2), loads=both), found)
    np.testing.assert_allclose(level[:size].max(), level[size:].max(), rtol=1e-2)


def test_a_chain_of_shared_ports_evens_out() -> None:
    """Loads that overlap pairwise: 12 on ports 0 and 1, nothing else on 1 and 2 and so on; all end equal."""
    loads = [Load(ports=np.array([i, i + 1]), amount_bytes=12.0 if i == 0 else 1e-3) for i in range(5)]
    level = levels(Instance(fixed=np.zeros(6), rates=np.ones(6), loads=loads), spread(np.zeros(6), np.ones(6), loads))
    assert level.max() == pytest.approx(6.0, rel=1e-3)
    loads = [Load(ports=np.array([i, i + 1]), amount_bytes=6.0) for i in range(5)]
    level = levels(Instance(fixed=np.zeros(6), rates=np.ones(6), loads=loads), spread(np.zeros(6), np.ones(6), loads))
    np.testing.assert_allclose(level, 5.0, rtol=1e-3)
