"""Admission in numbers: `python -m benchmarks.admission [traces] [first seed]` prints one table.

The weights in `nereus.control` were tuned on seeds from 10,000 to 39,999; the table is over seeds from `FIRST_SEED`,
which no tuning saw. Every trace is played by the controller itself, event by event.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import process_time

import numpy as np

from benchmarks.switching import Played, Shape, SwitchingOutlook, SwitchingWorld, Trace, make
from nereus.control.adaptive import Adaptive
from nereus.control.admission import Caution
from nereus.control.controller import AdaptiveController
from nereus.control.policies import DpScaling, Policy
from nereus.fleet import uniform
from tests.hindsight import best_in_hindsight

FIRST_SEED = 70_000
TRACES = 200
SETTLED_STEPS = 50
"""A plan that was kept so long is settled."""
CHEAP, USUAL = (0.05, 0.5), (0.2, 10.0)
"""Prices in steps: from, to (log-uniform over traces)."""


def say(text: str) -> None:
    print(text, flush=True)


def play(trace: Trace, policy: Policy, late: int = 0, *, check: bool = False) -> Played:
    controller = AdaptiveController(
        plan=trace.plans[trace.first], fleet=uniform(int(trace.fleet[0])), last_step=len(trace.fleet), policy=policy
    )
    return SwitchingWorld(trace, controller, late).play(check=check)


def nereus(trace: Trace, late: int = 0, caution: Caution | None = None) -> Played:
    return play(trace, Adaptive(SwitchingOutlook.of(trace), trace.plans[trace.first], caution), late)


EAGER = Caution(caution_ratio=0.0, trust_share=1e-6, least_steps=1, probation_steps=1, evidence_share=1e9)
"""No admission to speak of: whatever is believed to repay its price in the expected horizon is done at once."""


def scaling(trace: Trace, *, divisible: bool) -> Played:
    return play(trace, DpScaling(trace.plans[trace.first], divisible=divisible))


def mixed_shape(seed: int) -> Shape:
    """Everything that may change does, or does not."""
    rng = np.random.default_rng([seed, 99])
    return Shape(
        steps=int(rng.integers(100, 500)),
        noise=float(rng.uniform(0, 0.15)),
        fleet_every=(None, None, 5.0, 20.0, 60.0, 2.0)[rng.integers(6)],
        jump_every=(None, 30.0, 80.0, 150.0)[rng.integers(4)],
        growth=float(rng.choice([1, 1, 1.5, 3])),
    )


@dataclass(frozen=True)
class Needless:
    """Changes of one constant trace: after a plan was settled, and such as never repay their price in truth."""

    changes: int
    after_settled: int
    needless: int
    ratio: float


def against_hindsight(seeds: Iterable[int], player: Callable[[Trace, int], Played]) -> tuple[list[float], int]:
    """Total seconds over the best sequence's for each trace, and how many steps were run that did not fit."""
    ratios, overruns = [], 0
    for seed in seeds:
        trace = make(seed, mixed_shape(seed))
        played = player(trace, seed % 3)
        best, _ = best_in_hindsight(trace.seconds, trace.prices, trace.first)
        ratios.append(played.seconds / best)
        overruns += played.overruns
    return ratios, overruns


def constant(seed: int, noise: float, steps: int, caution: Caution | None = None) -> Needless:
    """A trace in which nothing changes but the noise of steps."""
    trace = make(seed, Shape(steps=steps, noise=noise))
    played = nereus(trace, caution=caution)
    best, _ = best_in_hindsight(trace.seconds, trace.prices, trace.first)
    means, present, needless, settled, after, last = trace.seconds.mean(axis=0), trace.first, 0, False, 0, None
    for step, plan in played.changes:
        gain = (steps - step + 1) * (means[present] - means[plan])
        needless += int(gain < trace.prices[present, plan])
        settled = settled or (last is not None and step - last >= SETTLED_STEPS)
        after += int(settled)
        present, last = plan, step
    return Needless(len(played.changes), after, needless, played.seconds / best)


def churn(seed: int, price: tuple[float, float], steps: int = 200) -> tuple[float, float, float]:
    """Nereus over dp-scaling with any DP, with a divisor, and hindsight over dp-scaling; the fleet changes every 2 steps.

    The start is the plan that is best in truth: dp-scaling keeps what nobody could know to be the best TP and PP.
    """
    trace = make(seed, Shape(steps=steps, noise=0.05, fleet_every=2.0, start="best", price=price))
    any_dp, divisors = scaling(trace, divisible=False).seconds, scaling(trace, divisible=True).seconds
    best, _ = best_in_hindsight(trace.seconds, trace.prices, trace.first)
    mine = nereus(trace).seconds
    return mine / any_dp, mine / divisors, best / any_dp


def microseconds_per_event(seed: int) -> tuple[float, float]:
    """(median, 99th percentile) of `handle`'s CPU time on a busy trace, calibration and 12 plans' predictions included."""
    trace = make(seed, Shape(steps=300, noise=0.05, jump_every=80.0, fleet_every=20.0))
    events = nereus(trace).events
    policy = Adaptive(SwitchingOutlook.of(trace), trace.plans[trace.first])
    controller = AdaptiveController(
        plan=trace.plans[trace.first], fleet=uniform(int(trace.fleet[0])), last_step=len(trace.fleet), policy=policy
    )
    times = []
    for event in events:
        begin = process_time()
        controller.handle(event)
        times.append(1e6 * (process_time() - begin))
    return float(np.median(times)), float(np.percentile(times, 99))


def _line(name: str, values: Iterable[float], target: str) -> None:
    found = np.array(list(values))
    numbers = "".join(f"{np.percentile(found, p):>9.3f}" for p in (50, 90, 100))
    say(f"  {name:<58}{found.mean():>9.3f}{numbers}   {target}")


def main(arguments: list[str]) -> None:
    count = int(arguments[0]) if arguments else TRACES
    first = int(arguments[1]) if len(arguments) > 1 else FIRST_SEED
    seeds, quarter = range(first, first + count), max(count // 4, 1)
    say(f"Admission on random switching traces, seeds {first:,} to {seeds[-1]:,}; tuned on 10,000 to 39,999 alone")
    say(f"  {'':<58}{'mean':>9}{'median':>9}{'90 %':>9}{'worst':>9}   target")
    ratios, overruns = against_hindsight(seeds, nereus)
    _line(f"time over the best in hindsight, {count} mixed traces", ratios, "median 1.10, worst 1.5")
    eager, _ = against_hindsight(seeds[:quarter], lambda trace, late: nereus(trace, late, EAGER))
    _line(f"  the first {quarter} of them", ratios[:quarter], "")
    _line("  the same without caution, evidence, regret, probation", eager, "")
    for noise, steps in ((0.02, 300), (0.05, 300), (0.15, 1000)):
        found = [constant(seed, noise, steps) for seed in seeds[: 2 * quarter]]
        name = f"constant, noise {noise:.0%}, {steps:,} steps ({2 * quarter})"
        _line(f"{name}: changes", [f.changes for f in found], "")
        _line("  changes after a plan was settled", [f.after_settled for f in found], "0" if noise < 0.1 else "")
        _line("  changes that do not repay their price in truth", [f.needless for f in found], "at most 1 in 1,000")
        _line("  time over the best in hindsight", [f.ratio for f in found], "")
    found = [constant(seed, 0.15, 1000, EAGER) for seed in seeds[:quarter]]
    _line(f"  the same without caution, ... ({quarter}): needless changes", [f.needless for f in found], "")
    for name, price in (("0.05 to 0.5", CHEAP), ("0.2 to 10", USUAL)):
        found = [churn(seed, price) for seed in seeds[:quarter]]
        _line(f"fleet every 2 steps, price {name} steps: over dp-scaling", [f[0] for f in found], "mean 1.01")
        _line("  over dp-scaling with divisors", [f[1] for f in found], "")
        _line("  hindsight over dp-scaling", [f[2] for f in found], "")
    median, most = microseconds_per_event(first)
    say(
        f"  one event: median {median:,.0f} us of CPU, 99 % {most:,.0f} us (target 2,000); steps run that did not fit: {overruns}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
