"""The controller at scale: `make bench-controller`, or `python -m benchmarks.controller [PART ...]` with parts of PARTS.

Llama-3.1-8B PPO with seven model-stages: actor train, infer and generate, critic train and infer, reference infer, reward
infer. The planner's Job has them as five stages, for a model's training and inference share a layout; a run's own Plan has
four, its reward is a rule. Every measured part is a process of its own. Seconds are of CPU, wall seconds beside.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any

import numpy as np

from nereus.cli.models import load_model
from nereus.control.adaptive import Adaptive
from nereus.control.controller import AdaptiveCommand, AdaptiveController, AdaptiveEvent
from nereus.control.records import (
    Candidate,
    Estimate,
    FleetChanged,
    MemoryAlarm,
    Misfit,
    PreemptionNotice,
    PriceEstimate,
    Search,
    SearchDone,
    StepMeasured,
    candidate,
)
from nereus.costs.calibrate import Calibration, moments, observe, predict
from nereus.costs.generation import lognormal_lengths
from nereus.events import ChangePlan, Finish, JobReady, RunStep, TransitionDone
from nereus.fleet import DEVICES, Fleet, parse_fleet, uniform
from nereus.layout import Layout, Plan, Stage, StagePlan, equal_shares
from nereus.planning.evaluate import Problem, evaluate
from nereus.planning.ground import Terrain
from nereus.planning.job import Job, language_model, scalar_model
from nereus.planning.objective import SearchResult
from nereus.planning.plan import GlobalPlan
from nereus.planning.search import search
from nereus.planning.space import Space

SIZES = (64, 1024, 16384)
RUNS = 5
EVENTS, MANY_EVENTS = 2_000, 10_000
MIB = 1 << 20
SEARCH_TARGETS = {64: (0.2, 0.02), 1024: (1.5, 0.3)}
EVENT_TARGET_SECONDS = {1024: 0.002}
SHARED = Space(recomputes=("none",), shardings=("optimizer",), pools=False)
"""What a run's own Plan can say."""
GAP_FLEETS = ("64xh100", "61xh100", "100xh100", "72xa100", "96xh20", "128xl40s", "250xh100", "256xh100", "511xa100",
              "1000xh100", "1024xh100", "32xh100,32xa100", "64xh100,36xh20", "96xa100,32xl40s", "512xh100,488xa100")  # fmt: skip
GAP_JOBS = (
    ("llama-3.1-8b", 2048),
    ("llama-3.1-8b", 8192),
    ("qwen2.5-7b", 4096),
    ("qwen3-30b-a3b", 4096),
    ("llama-3.1-70b", 2048),
)
INSTANCES = 500


def say(line: str = "") -> None:
    """Prints a line at once."""
    print(line, flush=True)


def job_of(model: str = "llama-3.1-8b", cap_tokens: float = 2048, samples: int = 1024) -> Job:
    """PPO with four models of one size."""
    config = load_model(model)
    return Job(
        actor=language_model(config),
        critic=scalar_model(config),
        reference=language_model(config),
        reward=scalar_model(config),
        samples=samples,
        prompt_tokens=512,
        lengths=lognormal_lengths(cap_tokens / 2, cap_tokens),
        longest_tokens=512 + cap_tokens,
    )


def problem_of(slots: int) -> Problem:
    return Problem(job=job_of(), terrain=Terrain(fleet=uniform(slots, DEVICES["h100"])))


def runtime_plan(found: GlobalPlan, fleet: Fleet) -> Plan:
    """A planner's plan on one pool in a run's own form."""
    stages: dict[str, StagePlan] = {}
    for name, choice in found.stages:
        model, kind = name.split("_")
        if model == "reward":
            continue
        stages[name] = StagePlan(
            model=model,
            stage=kind,  # pyright: ignore[reportArgumentType]
            layout=replace(choice.layout, distributed_optimizer=kind == "train"),
            slots=fleet.slots[: choice.layout.ranks],
            shares=equal_shares(1024, choice.layout.dp),
            micro_batch=choice.micro_batch,
        )
    return Plan(**stages)


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannerOutlook:
    """What is believed of plans: the planner's terms of a whole step, with one calibration."""

    terms: Mapping[str, Mapping[str, float]]
    belief: Calibration

    def _believed(self, terms: Mapping[str, float]) -> Estimate:
        mean, variance = moments(self.belief, terms)
        return Estimate(mean_seconds=mean, deviation_seconds=variance**0.5)

    def met(self, candidates: tuple[Candidate, ...]) -> PlannerOutlook:
        del candidates
        return self

    def observe(self, finished: StepMeasured, plan_id: str, *, ratio: float, noise_share: float) -> PlannerOutlook:
        belief = replace(self.belief, prior=replace(self.belief.prior, noise_share=max(noise_share, 0.01)))
        return replace(self, belief=observe(belief, self.terms[plan_id], finished.step_seconds / ratio))

    def expected(self, finished: StepMeasured, plan_id: str) -> Estimate:
        del finished
        return self.step(plan_id)

    def step(self, plan_id: str) -> Estimate:
        return self._believed(self.terms[plan_id])

    def saving(self, old_id: str, new_id: str, old_ratio: float, new_ratio: float) -> Estimate:
        old, new = self.terms[old_id], self.terms[new_id]
        names = {**old, **new}
        return self._believed({n: old_ratio * old.get(n, 0.0) - new_ratio * new.get(n, 0.0) for n in names})

    def misfit(self, plan_id: str, step: int) -> Misfit | None:
        del plan_id, step
        return None

    def met_rows(self, step: int, width_tokens: int) -> PlannerOutlook:  # noqa: ARG002
        return self

    def overflowed(self, plan_id: str, used_bytes: int) -> PlannerOutlook:  # noqa: ARG002
        return self


class EventWorld:
    """Answers commands at once; a node comes and goes, notices and alarms come in between. Searches are answered from a list."""

    def __init__(self, slots: int, seed: int = 0) -> None:
        self.rng, self.now = Random(seed), 0.0
        whole = uniform(slots, DEVICES["h100"])
        lost = frozenset(whole.nodes[-1].slots)
        self.fleets = (whole, whole.without(lost))
        self.lost = tuple(sorted(lost))
        self.answers: dict[int, tuple[Candidate, ...]] = {}
        terms: dict[str, Mapping[str, float]] = {}
        self.means: dict[str, float] = {}
        belief: Calibration | None = None
        for fleet in self.fleets:
            problem = Problem(job=job_of(), terrain=Terrain(fleet=fleet))
            found = search(problem, space=SHARED, top_count=12)
            shown: list[Candidate] = []
            for each in found.candidates:
                judged = evaluate(problem, each.plan)
                total: dict[str, float] = {}
                for phase in judged.phases:
                    for name, value in phase.terms.items():
                        total[name] = total.get(name, 0.0) + value
                price = PriceEstimate(mean_seconds=5.0, deviation_seconds=1.0, bound_seconds=2.0)
                shown.append(candidate(runtime_plan(each.plan, fleet), price))
                terms[shown[-1].plan_id], self.means[shown[-1].plan_id] = total, judged.step.mean_seconds
            self.answers[len(fleet.slots)] = tuple(shown)
            belief = problem.terrain.ground(fleet.slots).beliefs
        assert belief is not None
        self.first = self.answers[slots][-1].plan
        self.outlook = PlannerOutlook(terms, belief)
        self.is_whole = True

    def controller(self, steps: int) -> AdaptiveController:
        return AdaptiveController(
            plan=self.first, fleet=self.fleets[0], last_step=steps, policy=Adaptive(self.outlook, self.first)
        )

    def events(self, controller: AdaptiveController, count: int) -> Iterator[tuple[AdaptiveEvent, float, float]]:
        """`count` events, each with the CPU and wall seconds that handling it took."""
        pending: deque[AdaptiveEvent] = deque([JobReady(at_seconds=0.0, step=1)])
        running: int | None = None
        for _ in range(count):
            if not pending:
                pending.append(self._happens(controller, running))
            event = pending.popleft()
            cpu, wall = time.process_time(), time.perf_counter()
            commands = controller.handle(event)
            spent = time.process_time() - cpu, time.perf_counter() - wall
            controller.check()
            if isinstance(event, StepMeasured):
                running = None
            running = self._obey(commands, pending, running)
            yield event, *spent

    def _happens(self, controller: AdaptiveController, running: int | None) -> AdaptiveEvent:
        self.now += 1.0
        kind = self.rng.random()
        if kind < 0.02 or running is None:
            self.is_whole = not self.is_whole
            fleet = self.fleets[0 if self.is_whole else 1]
            lost = () if self.is_whole else self.lost
            return FleetChanged(at_seconds=self.now, fleet=fleet, lost_slots=lost)
        if kind < 0.03:
            return PreemptionNotice(at_seconds=self.now, slots=(self.lost[0],), deadline_seconds=self.now + 1e6)
        if kind < 0.04:
            slot = self.fleets[1].slots[0]
            return MemoryAlarm(at_seconds=self.now, slot=slot, phase="generate", used_bytes=99, budget_bytes=100)
        assert running is not None
        seconds = self.means[controller.plan_id] * self.rng.lognormvariate(0, 0.03)
        return StepMeasured(at_seconds=self.now, step=running, step_seconds=seconds, tokens=1_500_000)

    def _obey(
        self, commands: tuple[AdaptiveCommand, ...], pending: deque[AdaptiveEvent], running: int | None
    ) -> int | None:
        for command in commands:
            match command:
                case RunStep(step=step):
                    running = step
                case Search(search_id=number, request=request):
                    there = len(request.slots) - len(request.slots) % 8
                    size = (
                        len(self.fleets[0].slots) if there == len(self.fleets[0].slots) else len(self.fleets[1].slots)
                    )
                    found = tuple(c for c in self.answers[size] if _slots(c.plan) <= set(request.slots))
                    pending.append(SearchDone(at_seconds=self.now, search_id=number, candidates=found))
                case ChangePlan(plan=plan):
                    running = None
                    done = TransitionDone(at_seconds=self.now, plan=plan, state_version=1, pause_seconds=5.0)
                    pending.append(done)
                case Finish():
                    raise AssertionError("the run ended before its events did")
                case _:
                    pass
        return running


def _slots(plan: Plan) -> set[int]:
    return {slot for _, stage in plan.stages() for slot in stage.slots}


def measure_events(slots: int) -> dict[str, Any]:
    """Handling EVENTS events, by kind."""
    world = EventWorld(slots)
    controller = world.controller(10 * EVENTS)
    start = _resident_bytes()
    spent = list(world.events(controller, EVENTS))
    cpus = np.array([cpu for _, cpu, _ in spent])
    slowest: dict[str, float] = {}
    for event, cpu, _ in spent:
        name = type(event).__name__
        slowest[name] = max(slowest.get(name, 0.0), cpu)
    return {
        "cpu": [float(np.percentile(cpus, p)) for p in (50, 99)],
        "wall": [float(np.percentile([wall for *_, wall in spent], p)) for p in (50, 99)],
        "slowest": slowest,
        "changes": controller.transitions_count,
        "growth": _resident_bytes() - start,
    }


def measure_growth(slots: int) -> dict[str, Any]:
    """Memory over MANY_EVENTS events: after the first tenth, and at the end."""
    world = EventWorld(slots)
    controller = world.controller(10 * MANY_EVENTS)
    sizes: list[int] = []
    for at, _ in enumerate(world.events(controller, MANY_EVENTS)):
        if at + 1 in (MANY_EVENTS // 10, MANY_EVENTS):
            sizes.append(_resident_bytes())
    return {"growth": sizes[1] - sizes[0], "changes": controller.transitions_count}


# -- searches ---------------------------------------------------------------------------------------------------------


def measure_search(slots: int) -> dict[str, Any]:
    """A first search of this process, then warm ones: from the plan found, with other beliefs, lengths, fleet."""
    problem = problem_of(slots)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times: dict[str, tuple[float, float]] = {}
    first, times["cold"] = _timed(problem, ())
    assert first.best is not None
    known = (first.best.plan,)
    variants = {"same": problem, "beliefs": _other_beliefs(problem), "lengths": _other_lengths(problem)}
    for name, changed in variants.items():
        times[name] = _timed(changed, known)[1]
    fleet = problem.terrain.fleet
    fewer = replace(problem, terrain=Terrain(fleet=fleet.without(frozenset(fleet.nodes[-1].slots))))
    times["node"] = _timed(fewer, ())[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "times": times,
        "nodes": first.evaluated_nodes,
        "growth": 1024 * (peak - start),
        "step": first.best.step_seconds,
    }


def _timed(problem: Problem, known: tuple[GlobalPlan, ...]) -> tuple[SearchResult, tuple[float, float]]:
    cpu, wall = time.process_time(), time.perf_counter()
    found = search(problem, known=known, with_bound=False)
    return found, (time.process_time() - cpu, time.perf_counter() - wall)


def _other_beliefs(problem: Problem) -> Problem:
    """As after a step that took 10 % longer than was thought."""
    ground = problem.terrain.ground(problem.terrain.ordered())
    terms: dict[str, float] = dict.fromkeys(("gemm", "decode_gemm", "attention", "tp"), 1.0)
    belief = observe(ground.beliefs, terms, 1.1 * predict(ground.beliefs, terms).mean_seconds)
    return replace(problem, terrain=replace(problem.terrain, beliefs={ground.devices[0]: belief}))


def _other_lengths(problem: Problem) -> Problem:
    return replace(problem, job=replace(problem.job, lengths=problem.job.lengths.scaled(1.1)))


# -- prices -----------------------------------------------------------------------------------------------------------


def measure_price(slots: int) -> dict[str, Any]:
    """The transition graph of one change of the actor, ordered, proved and priced; the bound of a price."""
    from nereus.model import model_spec
    from nereus.report.transition import change_report
    from nereus.report.transition_graph import scheduled
    from nereus.transfer.placement import StageMove

    fleet, spec = uniform(slots, DEVICES["h100"]), model_spec("actor", load_model("llama-3.1-8b"))

    def stage(tp: int, pp: int, kind: Stage = "train") -> StagePlan:
        layout = Layout(tp=tp, pp=pp, dp=slots // (tp * pp), pipeline=equal_shares(32, pp), distributed_optimizer=True)
        return StagePlan(
            model="actor", stage=kind, layout=layout, slots=fleet.slots, shares=(1,) * layout.dp, micro_batch=1
        )

    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, wall = time.process_time(), time.perf_counter()
    moves = {"actor_train": StageMove(spec=spec, before=stage(4, 2), after=stage(2, 1))}
    report = change_report(moves, fleet, objective="cost", horizon_steps=100)
    change = scheduled(report, mode="beside", reserve_bytes=0, engine_seconds=None)
    spent = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"times": spent, "operations": len(change.graph.operations), "growth": 1024 * (peak - start)}


# -- exactness --------------------------------------------------------------------------------------------------------


def instances(count: int) -> None:
    """Random small instances against brute force from the definition."""
    from tests.planning.instances import cost_mismatch

    begin, worst, mismatches = time.perf_counter(), 0.0, 0
    for seed in range(5_000, 5_000 + count):
        difference = cost_mismatch(seed)
        mismatches += difference > 1e-9
        worst = max(worst, difference)
    say(
        f"\nagainst brute force: {count} instances, {mismatches} mismatches beyond 1e-9 (largest difference {worst:.1e});"
    )
    say(
        f"  2 to 8 slots, 1 to 3 models, 9 to 60 GB a slot, two of three with a price and a horizon; {time.perf_counter() - begin:.0f} s"
    )


def gaps() -> None:
    """How much better any plan could be than the one found."""
    shares: dict[str, float] = {}
    for model, cap in GAP_JOBS:
        for fleet in GAP_FLEETS:
            problem = Problem(job=job_of(model, cap), terrain=Terrain(fleet=parse_fleet(fleet)))
            found = search(problem)
            if found.best is not None:
                shares[f"{model}, {cap} tokens, {fleet}"] = found.gap_share
    worst = max(shares, key=lambda name: shares[name])
    values = sorted(shares.values())
    say(
        f"\nbound on the loss, {len(shares)} jobs that fit of {len(GAP_JOBS) * len(GAP_FLEETS)} ({', '.join(GAP_FLEETS)}):"
    )
    say(
        f"  median {median(values):.2%} (target 3 %), 90 % {values[int(0.9 * len(values))]:.2%}, worst {values[-1]:.2%} (target 10 %): {worst}"
    )
    say("  on mixed fleets against every plan on the pools that are listed, else against every plan there is")


# -- the whole --------------------------------------------------------------------------------------------------------

MEASURED = {"events": measure_events, "growth": measure_growth, "search": measure_search, "price": measure_price}
PARTS = (*MEASURED, "instances", "gaps")


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - a kernel table
        return int(file.read().split()[1]) * resource.getpagesize()


def apart(part: str, slots: int) -> dict[str, Any]:
    """The part's result from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.controller", "one", part, str(slots)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part} at {slots} slots ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _said(seconds: float, target: float | None) -> str:
    if target is None:
        return ""
    return f" (target {1000 * target:g} ms: {'met' if seconds <= target else 'MISSED'})"


def events() -> None:
    say(f"\nhandle(event) without a search, {EVENTS:,} events: microseconds of CPU, wall beside")
    for slots in SIZES:
        found = apart("events", slots)
        (p50, p99), (wall50, wall99) = found["cpu"], found["wall"]
        slowest = max(found["slowest"], key=lambda name: found["slowest"][name])
        told = f"{slots:>7,} slots: median {1e6 * p50:6,.0f} ({1e6 * wall50:,.0f}), 99 % {1e6 * p99:7,.0f} ({1e6 * wall99:,.0f})"
        say(
            f"{told}{_said(p99, EVENT_TARGET_SECONDS.get(slots))}; slowest {slowest} {1e3 * found['slowest'][slowest]:.1f} ms; "
            f"{found['changes']} changes, {found['growth'] / MIB:.0f} MiB more"
        )


def growth() -> None:
    say(f"\nmemory from event {MANY_EVENTS // 10:,} to {MANY_EVENTS:,}")
    for slots in SIZES[:2]:
        found = apart("growth", slots)
        say(f"{slots:>7,} slots: {found['growth'] / MIB:+.1f} MiB, {found['changes']} changes")


def searches() -> None:
    say(f"\na search, {RUNS} processes each: median milliseconds of CPU (wall)")
    for slots in SIZES:
        runs = [apart("search", slots) for _ in range(RUNS)]
        cold_target, warm_target = SEARCH_TARGETS.get(slots, (None, None))
        parts: list[str] = []
        for name in runs[0]["times"]:
            cpu, wall = (median(run["times"][name][i] for run in runs) for i in (0, 1))
            target = cold_target if name == "cold" else None if name == "node" else warm_target
            parts.append(f"{name} {1e3 * cpu:.0f} ({1e3 * wall:.0f}){_said(cpu, target)}")
        say(f"{slots:>7,} slots: {', '.join(parts)};")
        say(
            f"          {runs[0]['nodes']:,} nodes, {max(run['growth'] for run in runs) / MIB:.0f} MiB, step {runs[0]['step']:.2f} s"
        )
    say(
        "  cold: nothing known; warm from the plan found: same question, other beliefs, other lengths; node: a node less, its plan gone"
    )


def prices() -> None:
    say("\nplacing, routing, ordering, proving and pricing one change of the actor (TP4·PP2 to TP2·PP1)")
    for slots in SIZES:
        found = apart("price", slots)
        cpu, wall = found["times"]
        say(
            f"{slots:>7,} slots: {cpu:.2f} s of CPU ({wall:.2f}), {found['operations']:,} operations, {found['growth'] / MIB:.0f} MiB"
        )


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["one"]:
        say(json.dumps(MEASURED[arguments[1]](int(arguments[2]))))
        return
    parts = arguments or list(PARTS)
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise SystemExit(f"{', '.join(sorted(unknown))}: expected parts of {', '.join(PARTS)}")
    say("8B PPO, model-stages: actor train, infer, generate; critic train, infer; reference infer; reward infer")
    shown = {"events": events, "growth": growth, "search": searches, "price": prices}
    for part in parts:
        if part in shown:
            shown[part]()
        elif part == "gaps":
            gaps()
        else:
            instances(INSTANCES)


if __name__ == "__main__":
    main(sys.argv[1:])
