"""Random transitions in numbers: `python -m tests.core.bench_transition [instances] [first seed]`, 10,000 by default.

Each instance is a change over a few slots and hosts with tight memory: graph, proof, execution with random order,
failures and losses, judged byte by byte (tests/core/settling.py); and an order problem of equal units against brute
force (tests/core/test_order.py). Then one scene of 1,024 slots and four models, timed. An instance that breaks a rule raises with its seed.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from tests.core.settling import trial
from tests.core.test_order import attempt, brute_force
from tests.core.test_timeline import scale

FAULTS = (0, 12, 40, 150)
ORDERS_PER_INSTANCE = 0.2


def order_trial(rng: random.Random) -> Counter[str]:
    """Full or nearly full lanes, half of them a permutation of what they hold: is an order found when there is one?"""
    lanes = range(rng.randint(2, 4))
    names = [f"u{i}" for i in range(rng.randint(2, 5))]
    room = {lane: rng.randint(1, 2) for lane in lanes}
    present = {lane: frozenset(rng.sample(names, min(len(names), room[lane]))) for lane in lanes}
    held = sorted(frozenset().union(*present.values()))
    target = {lane: frozenset(rng.sample(held, min(len(held), rng.randint(0, room[lane])))) for lane in lanes}
    if rng.random() < 0.5:
        target = {lane: present[(lane + 1) % len(lanes)] for lane in lanes}
        room = {lane: max(len(present[lane]), len(target[lane])) for lane in lanes}
    steps = attempt(present, target, room, staging=1)
    exists = brute_force(present, target, room, staging=1)
    if (steps is not None) != exists:
        raise AssertionError(f"order found: {steps is not None}, exists: {exists}: {present} to {target} in {room}")
    parked = steps is not None and any(step.kind == "park" for step in steps)
    return Counter({"orders": 1, "orders that exist and are found": exists, "orders with a cycle": parked})


def instance(rng: random.Random, faults: int) -> Counter[str]:
    """One transition, and now and then one order."""
    found = trial(rng.randint, faults)
    return found + order_trial(rng) if rng.random() < ORDERS_PER_INSTANCE else found


def seeded(seed: int, run: Callable[[random.Random], Counter[str]]) -> Counter[str]:
    """What came of an instance; AssertionError with its seed for whatever it raises."""
    try:
        return run(random.Random(seed))
    except Exception as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


def main() -> int:
    """Runs and prints the counts."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    found: Counter[str] = Counter()
    began = time.perf_counter()
    for seed in range(first, first + count):
        found += seeded(seed, partial(instance, faults=FAULTS[seed % len(FAULTS)]))
    print(f"{count:,} transitions in {time.perf_counter() - began:.1f} s, no rule broken")
    for name, number in sorted(found.items()):
        print(f"{number:>10,}  {name}")
    print(scale(1024)[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
