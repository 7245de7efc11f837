"""The real job adapts, beside baselines, under one schedule: `make bench-adapt` (about 28 minutes on two quiet cores).

    make bench-adapt ARGS="--folder F --json OUT.json"     what is finished in the folder is not done again
    make bench-adapt ARGS="--only nereus --repeats 1"      contestants whose name has the word

The schedule takes a slot away and gives it back, lets responses grow so that the widest plan exceeds the slots' budget, and
makes a slot slow. First static plans are measured under each condition: they say which plan is best when. Then every
contestant runs, in turn, `--repeats` times. "Best" is the fastest start that no growth stops: all but nereus need one.
Which is which:

  nereus            decides by itself from what it measures; told of nothing but the fleet
  dp-scaling        keeps TP and PP of its start, DP follows the slots: divisors of the batch alone from the usual start, as
                    a usual framework needs it, and any number ("any") from the best one
  restart           as dp-scaling (any) but each change through a checkpoint; the start of processes is not charged
  fixed             its first plan for ever; where a slot of it is away the job stands still, and that counts
  static            the static plan that is best over the whole schedule, known in hindsight only

dp-scaling from TP2·PP2 cannot use three slots and waits like `fixed`. A wait is as long as the fastest static plan takes for
the steps of that segment, which is kind to who waits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.adapt_job import (
    PLANS,
    USUAL,
    Bench,
    Contestant,
    Segment,
    contestants,
    measure,
    schedule_of,
    static_steps,
)
from benchmarks.adapt_report import (
    Static,
    best_by_segment,
    best_static,
    contest_text,
    lasting,
    segment_steps,
    static_rows,
    static_text,
    target_text,
)
from benchmarks.adapt_slots import CORE_SHARE, Cores, KeptPool, Throttle
from nereus.runtime.stop import StopSignal


class Stopped(Exception):
    """The user stopped the bench."""


def say(text: str) -> None:
    """A line, at once."""
    print(text, flush=True)


def kept(path: Path) -> Any:
    """What was finished before, or None."""
    return json.loads(path.read_text()) if path.exists() else None


def keep(path: Path, value: Any) -> None:
    """Written as a whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def static_table(bench: Bench, segments: tuple[Segment, ...], options: argparse.Namespace, folder: Path) -> Static:
    """Seconds and peaks of the static plans under each condition; a condition that comes again is measured once."""
    found: dict[str, dict[str, Any]] = {}
    known: dict[tuple[int, int, int], str] = {}
    for each in segments:
        if each.condition in known:
            found[each.name] = found[known[each.condition]]
            continue
        known[each.condition] = each.name
        path = folder / f"static-{'-'.join(str(part) for part in each.condition)}.json"
        names = [name for name, plan in PLANS.items() if runs_on(plan, each.slots) and name in options.plans]
        if (plans := kept(path)) is None:
            started = time.monotonic()
            plans = static_steps(bench, each, names, options.static_steps)
            if bench.signal.requested:
                raise Stopped
            keep(path, plans)
            say(f"  static plans, {each.name}: {time.monotonic() - started:.0f} s, load {os.getloadavg()[0]:.1f}")
        found[each.name] = plans
    return found


def runs_on(plan: Any, slots: int) -> bool:
    """Whether the plan needs none but the first `slots` slots."""
    stages = (plan.actor_train, plan.actor_generate, plan.critic_train, plan.reference_infer)
    return all(max(each.slots or (each.tp * each.pp * each.dp - 1,)) < slots for each in stages)


def contest(
    bench: Bench, who: tuple[Contestant, ...], options: argparse.Namespace, away_seconds: float, runs: list[Any]
) -> None:
    """All runs, interleaved: every contestant once, then again. `runs` gets each as it is finished."""
    folder = bench.folder.parent
    for repeat in range(options.repeats):
        for each in who:
            path = folder / f"run-{repeat}-{''.join(c if c.isalnum() else '-' for c in each.name)}.json"
            run = kept(path)
            if run is None and options.only in each.name:
                run = measure(bench, each, repeat, options.steps, away_seconds)
                if not run["complete"]:
                    raise Stopped
                keep(path, run)
                mean = sum(run["step_seconds"]) / len(run["step_seconds"])
                changes = ", ".join(f"step {c['step']} {c['to']}" for c in run["changes"])
                say(
                    f"  {repeat + 1}/{options.repeats} {each.name:<36}{mean:7.3f} s a step, {run['run_seconds']:4.0f} s in all, "
                    f"load {run['load'][0]:.1f} to {run['load'][1]:.1f}; {changes or 'no change'}"
                )
            runs += [run] if run is not None else []


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench-adapt", description="the real job adapts, beside baselines")
    parser.add_argument("--folder", type=Path, default=Path("build/bench-adapt"), help="finished runs are kept there")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    parser.add_argument("--only", default="", help="contestants whose name has this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="steps of a run")
    parser.add_argument("--static-steps", type=int, default=3, help="steps of a static plan under each condition")
    parser.add_argument(
        "--plans", nargs="+", default=tuple(PLANS), choices=tuple(PLANS), help="static plans to measure"
    )
    options = parser.parse_args(arguments)
    if options.static_steps < 3:
        parser.error(
            f"--static-steps {options.static_steps}: expected 3 at least: the first builds, the last carries a change"
        )
    return options


def main(arguments: list[str]) -> int:
    """0 when all was measured, 130 when the user stopped; what is finished is shown in any case."""
    options = options_of(arguments)
    folder: Path = options.folder / f"steps-{options.steps}"
    folder.mkdir(parents=True, exist_ok=True)
    segments = schedule_of(options.steps)
    static, runs, who, code = dict[str, Any](), list[Any](), tuple[Contestant, ...](), 0
    cores = Cores()
    throttle = Throttle(cores)
    with StopSignal() as signal:
        pool: KeptPool | None = None
        try:
            (folder / "logs").mkdir(exist_ok=True)
            pool = KeptPool(4, folder / "logs")
            signal.hold()
            share = (
                f"{CORE_SHARE} of a core each" if cores.capped else "sharing the cores (no control group can be set)"
            )
            say(
                f"four slots, {share}, {os.cpu_count()} cores; seeds 1 to {options.repeats}, prompts the same in all runs"
            )
            bench = Bench(pool=pool, cores=cores, throttle=throttle, signal=signal, folder=folder / "runs")
            static = static_table(bench, segments, options, folder)
            rows = static_rows(segments, static)
            always = {name: row for name, row in rows.items() if name in lasting(static)}
            counts = segment_steps(segments, options.steps)
            for line in static_text(segments, static, options.steps):
                say(line)
            first, hindsight = best_by_segment(always)[0], best_static(always, counts)
            who = contestants(first, hindsight)
            gap = [(n, min(r[at] for r in rows.values() if r[at])) for at, n in enumerate(counts)]  # pyright: ignore[reportArgumentType]
            away = sum(n * least for (n, least), each in zip(gap, segments, strict=True) if each.slots < 4)
            contest(bench, who, options, away, runs)
        except (Stopped, KeyboardInterrupt):
            code = 130
        finally:
            throttle.close()
            if pool is not None:
                pool.close()
            cores.close()
    names = [each.name for each in who]
    for line in ("", *contest_text(runs, names, segments), "", *target_text(runs, names, segments)) if runs else ():
        say(line)
    say("admission on synthetic traces, the other half of this table: make bench-admission")
    if options.json:
        keep(options.json, {"usual": USUAL, "steps": options.steps, "static": static, "runs": runs})
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
