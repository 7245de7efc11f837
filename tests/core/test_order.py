"""The order under memory: legal always, found whenever brute force finds one, optimal on one lane, bounded staging."""

from __future__ import annotations

from collections import deque
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.transitions.order import Claim, Infeasible, Release, Step, exchange, host_lane, lane_name, merged, order

Placing = dict[int, frozenset[str]]
HOST = host_lane(0)


def replay(
    capacity: dict[int, int], used: dict[int, int], claims: tuple[Claim, ...], releases: tuple[Release, ...], steps
) -> dict[int, int]:
    """Carries out an order by its definition and asserts every rule; returns the bytes in use at the end."""
    level = dict.fromkeys(capacity, 0) | used
    made: set[int] = set()
    parked: dict[int, int] = {}
    gone: set[int] = set()
    for step in steps:
        if step.kind == "claim":
            assert step.index not in made
            made.add(step.index)
            level[step.lane] += claims[step.index].size_bytes
        else:
            release = releases[step.index]
            if step.kind == "park":
                assert step.index not in gone
                assert step.index not in parked
                parked[step.index] = step.lane
                level[step.lane] += release.size_bytes
                level[release.lane] -= release.size_bytes
            else:
                assert set(release.after) <= made
                assert step.index not in gone
                gone.add(step.index)
                assert step.lane == (parked.get(step.index) if step.kind == "unpark" else release.lane)
                level[step.lane] -= release.size_bytes
        assert all(0 <= level[lane] <= capacity[lane] for lane in capacity), (step, level)
    assert len(made) == len(claims)
    assert len(gone) == len(releases)
    return level


def brute_force(present: Placing, target: Placing, capacity: dict[int, int], staging: int) -> bool:
    """Whether some sequence of copies and drops leads from one placing to the other, from the definition.

    A state is what each lane holds and what is in the staging (at most `staging` units). A unit may be copied from where
    it is to a lane that needs it and has room, or to the staging; it may be dropped where it is not needed if it is
    elsewhere too or nobody misses it.
    """
    lanes = sorted({*present, *target})
    want = [target.get(lane, frozenset()) for lane in lanes]
    start = (tuple(present.get(lane, frozenset()) for lane in lanes), frozenset())
    seen, queue = {start}, deque([start])
    while queue:
        held, staged = queue.popleft()
        if all(w <= h for w, h in zip(want, held, strict=True)):
            return True
        somewhere = frozenset().union(staged, *held)
        missing = frozenset().union(*(w - h for w, h in zip(want, held, strict=True)))
        nexts = []
        for at, lane in enumerate(lanes):
            room = capacity[lane] - len(held[at])
            for unit in (want[at] - held[at]) & somewhere if room > 0 else ():
                nexts.append(((*held[:at], held[at] | {unit}, *held[at + 1 :]), staged))
            for unit in held[at] - want[at]:
                others = staged.union(*(h for other, h in enumerate(held) if other != at))
                if unit in others or unit not in missing:
                    nexts.append(((*held[:at], held[at] - {unit}, *held[at + 1 :]), staged))
        if len(staged) < staging:
            nexts += [(held, staged | {unit}) for unit in somewhere - staged]
        nexts += [(held, staged - {unit}) for unit in staged if unit not in missing or any(unit in h for h in held)]
        for state in nexts:
            if state not in seen:
                seen.add(state)
                queue.append(state)
    return False


@st.composite
def placings(draw: st.DrawFn, lanes: int = 4, units: int = 5) -> tuple[Placing, Placing, dict[int, int]]:
    """Units on lanes before and after; capacities that hold at least the present, often nothing more."""
    count = draw(st.integers(2, lanes))
    names = [f"u{i}" for i in range(draw(st.integers(1, units)))]
    some = st.frozensets(st.sampled_from(names), max_size=3)
    present = {lane: draw(some) for lane in range(count)}
    held = sorted(frozenset().union(*present.values()))
    kept = st.frozensets(st.sampled_from(held), max_size=3) if held else st.just(frozenset())
    target = {lane: draw(kept) for lane in range(count)}
    spare = {lane: draw(st.sampled_from([0, 0, 0, 1])) for lane in range(count)}
    exact = draw(st.booleans())
    size = {lane: max(len(present[lane]), len(target[lane]) if exact else 0) + spare[lane] for lane in range(count)}
    return present, target, size


def attempt(present: Placing, target: Placing, capacity: dict[int, int], staging: int) -> list[Step] | None:
    claims, releases = exchange(present, target)
    used = {lane: len(units) for lane, units in present.items()}
    room = capacity | ({HOST: staging} if staging else {})
    try:
        steps = order(room, used, claims, releases, dict.fromkeys(capacity, HOST))
    except Infeasible:
        return None
    level = replay(room, used, claims, releases, steps)
    assert level == dict.fromkeys(room, 0) | {lane: len(units) for lane, units in target.items()}
    return list(steps)


@settings(max_examples=250, deadline=None)
@given(placings())
def test_an_order_is_found_whenever_brute_force_finds_one(case: tuple[Placing, Placing, dict[int, int]]) -> None:
    assert (attempt(*case, staging=1) is not None) == brute_force(*case, staging=1)


@settings(max_examples=100, deadline=None)
@given(placings())
def test_without_staging_nothing_impossible_is_found(case: tuple[Placing, Placing, dict[int, int]]) -> None:
    if (steps := attempt(*case, staging=0)) is not None and all(step.kind != "park" for step in steps):
        assert brute_force(*case, staging=0)


def ring(lanes: int, depth: int) -> tuple[Placing, Placing]:
    """Every lane's units go to the next lane."""
    units = {lane: frozenset(f"{lane}.{i}" for i in range(depth)) for lane in range(lanes)}
    return units, {lane: units[(lane - 1) % lanes] for lane in range(lanes)}


@pytest.mark.parametrize(("lanes", "depth"), [(2, 1), (2, 6), (5, 3), (8, 4)])
@pytest.mark.parametrize("staging", [1, 3, 20])
def test_a_full_cycle_parks_at_most_one_piece_of_each_lane(lanes: int, depth: int, staging: int) -> None:
    """The hole goes round: one cycle stages one piece, or one of each lane where the room allows, however deep it is."""
    present, target = ring(lanes, depth)
    steps = attempt(present, target, dict.fromkeys(range(lanes), depth), staging)
    assert steps is not None
    assert sum(step.kind == "park" for step in steps) == min(lanes, staging)


def test_no_room_to_park_is_refused_with_the_cycle() -> None:
    present, target = ring(3, 2)
    claims, releases = exchange(present, target, unit_bytes=5)
    capacity = dict.fromkeys(range(3), 10)
    with pytest.raises(Infeasible, match=r"slot 0 in phase order: needs 5 bytes, 0 are free.*no host") as told:
        order(capacity, capacity, claims, releases, {})
    assert told.value.cycle == ((0, 0), (1, 0), (2, 0))
    assert len(told.value.certificate) == 4
    assert "only after slot 1 has taken" in told.value.certificate[0]
    assert (told.value.lane, told.value.needed_bytes, told.value.free_bytes) == (0, 5, 0)


def test_a_slot_with_room_that_nothing_needs_serves_as_parking() -> None:
    present, target = ring(3, 2)
    claims, releases = exchange(present, target)
    capacity, used = {0: 2, 1: 2, 2: 2, 3: 1}, dict.fromkeys(range(3), 2)
    steps = order(capacity, used, claims, releases, {})
    assert [step.lane for step in steps if step.kind == "park"] == [3]
    with pytest.raises(Infeasible, match="no host and no slot"):
        order(capacity, used, claims, releases, {}, park=False)


def test_what_does_not_fit_at_the_ends_is_refused() -> None:
    claim = Claim(name="x", lane=0, size_bytes=7)
    with pytest.raises(Infeasible, match="the target state takes 12 of 10 bytes, 2 too many") as told:
        order({0: 10}, {0: 5}, (claim,), (), {})
    assert told.value.phase == "target"
    with pytest.raises(Infeasible, match="slot 0 in phase present"):
        order({0: 4}, {0: 5}, (), (), {})
    with pytest.raises(ValueError, match=r"unit u is needed on slot 1, but nobody holds it"):
        exchange({0: frozenset()}, {1: frozenset({"u"})})
    assert lane_name(host_lane(2)) == "host2"


jobs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


def peak(sequence) -> int:
    level = top = 0
    for need, gives in sequence:
        top = max(top, level + need)
        level += need - gives
    return top


@settings(max_examples=80, deadline=None)
@given(jobs)
def test_independent_jobs_on_one_lane_take_the_least_room(cases: list[tuple[int, int]]) -> None:
    """Each job takes a, then gives f: the order exists exactly when the best permutation's peak fits (Johnson's rule)."""
    best = min(map(peak, permutations(cases)))
    used = sum(gives for _, gives in cases)
    claims = tuple(Claim(name=f"j{i}", lane=0, size_bytes=need) for i, (need, _) in enumerate(cases))
    releases = tuple(Release(name=f"j{i}", lane=0, size_bytes=g, after=(i,)) for i, (_, g) in enumerate(cases))
    ends = max(0, sum(need for need, _ in cases) - used)
    steps = order({0: used + max(best, ends)}, {0: used}, claims, releases, {})
    assert all(step.kind in ("claim", "release") for step in steps)
    replay({0: used + max(best, ends)}, {0: used}, claims, releases, steps)
    if best - 1 >= ends:
        with pytest.raises(Infeasible):
            order({0: used + best - 1}, {0: used}, claims, releases, {})


@st.composite
def unequal(draw: st.DrawFn):
    """Claims and releases of any sizes over a few lanes and two hosts, with releases that wait for several claims."""
    lanes = draw(st.integers(2, 4))
    claims = tuple(
        Claim(name=f"c{i}", lane=draw(st.integers(0, lanes - 1)), size_bytes=draw(st.integers(1, 9)))
        for i in range(draw(st.integers(1, 6)))
    )
    after = st.lists(st.integers(0, len(claims) - 1), max_size=3, unique=True).map(lambda a: tuple(sorted(a)))
    releases = tuple(
        Release(
            name=f"r{i}", lane=draw(st.integers(0, lanes - 1)), size_bytes=draw(st.integers(1, 9)), after=draw(after)
        )
        for i in range(draw(st.integers(0, 6)))
    )
    used = {lane: sum(r.size_bytes for r in releases if r.lane == lane) for lane in range(lanes)}
    final = {lane: sum(c.size_bytes for c in claims if c.lane == lane) for lane in range(lanes)}
    capacity = {lane: max(used[lane], final[lane]) + draw(st.integers(0, 4)) for lane in range(lanes)}
    hosts = {host_lane(n): draw(st.integers(0, 30)) for n in range(2)}
    return capacity | hosts, used, claims, releases, {lane: host_lane(lane % 2) for lane in range(lanes)}


@settings(max_examples=150, deadline=None)
@given(unequal())
def test_unequal_sizes_are_legal_or_refused_with_a_certificate(case) -> None:
    capacity, used, claims, releases, host_of = case
    try:
        steps = order(capacity, used, claims, releases, host_of)
    except Infeasible as raised:
        refusal = raised
    else:
        refusal = None
    if refusal is not None:
        assert refusal.phase == "order"  # the ends fit by construction
        assert refusal.certificate
        assert refusal.cycle
        return
    replay(capacity, used, claims, releases, steps)
    assert steps == order(capacity, used, claims, releases, host_of)


@settings(max_examples=100, deadline=None)
@given(unequal())
def test_with_room_for_everything_on_a_host_no_order_is_refused(case) -> None:
    capacity, used, claims, releases, host_of = case
    capacity = capacity | {host_lane(0): 54}  # every release at once
    replay(capacity, used, claims, releases, order(capacity, used, claims, releases, host_of))


@settings(deadline=None)
@given(st.lists(st.integers(-5, 5).filter(bool), max_size=12), st.integers(0, 10), st.integers(0, 5))
def test_merged_lanes_stay_within_and_claim_early(deltas: list[int], start: int, spare: int) -> None:
    levels = [start]
    for delta in deltas:
        levels.append(levels[-1] + delta)
    start -= min(levels)
    capacity = max(levels) - min(levels) + spare
    positions = merged(start, capacity, deltas)
    assert sorted(positions) == list(range(len(deltas)))
    for sign in (1, -1):
        of_sign = [p for p in positions if deltas[p] * sign > 0]
        assert of_sign == sorted(of_sign)
    level = start
    for position in positions:
        level += deltas[position]
        assert 0 <= level <= capacity or deltas[position] < 0
    if capacity >= start + sum(d for d in deltas if d > 0):
        assert [deltas[p] > 0 for p in positions] == sorted((d > 0 for d in deltas), reverse=True)
