"""What `nereus simulate` does: what a job would take on a fleet, or on a trace of one, under a policy or several side by side."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from nereus.cli.again import played_text
from nereus.cli.folder import create_run_folder
from nereus.cli.load import load_config
from nereus.cli.simulate import COMPARED, POLICIES
from nereus.config import Config, DataConfig
from nereus.control.outset import VARIANTS, fleet_controller
from nereus.control.policies import with_dp
from nereus.control.records import plan_slots
from nereus.controller import Controller
from nereus.errors import ConfigError, InfeasiblePlan, near
from nereus.fleet import DEVICES, Fleet, parse_fleet
from nereus.layout import Plan, first_plan
from nereus.lengths import response_limit
from nereus.report.display import Display, QuietDisplay, open_display
from nereus.runtime.journal import Journal
from nereus.runtime.metrics import MetricsWriter, NoMirror
from nereus.sim.edges import Delays
from nereus.sim.play import Moment, inventory_of, play, steady
from nereus.sim.searching import FleetSearcher
from nereus.sim.told import Told
from nereus.sim.traces import FleetTrace, LengthCurve, read_trace
from nereus.sim.truth import Truth
from nereus.sim.workload import SimWorkload, constant
from nereus.sim.world import SimulatedWorld
from nereus.validate import validate
from nereus.world import Commander, drive

MEAN_PROMPT_SHARE = 0.3
MEAN_RESPONSE_SHARE = 0.25
"""Without a curve prompts and responses are so much of their caps on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A simulated run: what it took and what of that was no step. `latency_seconds` is all its time over its steps."""

    policy: str
    folder: Path
    steps: int
    total_seconds: float
    latency_seconds: float
    step_seconds: float
    tokens_per_second: float
    transitions_count: int
    pause_seconds: float
    lost_seconds: float
    wall_seconds: float
    stands_still: bool = False


def simulate(arguments: Namespace) -> int:
    """Carries the command out; the exit code."""
    words: list[str] = arguments.words
    if not words or ("=" in words[0] and not Path(words[0]).exists()):
        raise ConfigError("CONFIG", words[:1], "expected a configuration first, such as experiments/traces/ppo_8b.yaml")
    if Path(words[0]).is_dir():
        print(played_text(Path(words[0]), arguments.learn_steps), end="")
        return 0
    config = load_config(Path(words[0]), words[1:])
    validate(config)
    names = list(COMPARED) if arguments.compare else str(arguments.policy).split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError("--policy", name, near(name, POLICIES))
    found = [_one(arguments, config, name, several=len(names) > 1) for name in names]
    print(table(found), end="")
    return 0


def _one(arguments: Namespace, config: Config, policy: str, *, several: bool) -> Outcome:
    truth = Truth(seed=arguments.seed)
    trace = read_trace(Path(arguments.trace)) if arguments.trace else None
    fleet = arguments.fleet or ("" if trace else f"{config.fleet.slots}x{arguments.device}")
    moments = fleet_of(fleet, trace, arguments.device, truth)
    plan = starting_plan(config, moments[0].fleet)
    if several:
        config = replace(config, run=replace(config.run, name=f"{config.run.name}-{policy}"))
    folder = create_run_folder(config, Path(config.run.folder))
    display: Display = QuietDisplay() if arguments.quiet or several else open_display(config.run.steps, sys.stdout)
    began = time.monotonic()
    with ExitStack() as ending:
        ending.callback(display.close)
        journal = Journal(folder.events)
        ending.callback(journal.close)
        metrics = MetricsWriter(folder.metrics, NoMirror())
        ending.callback(metrics.close)
        display.note(f"run folder {folder.path}")
        world = SimulatedWorld(
            config=config,
            first=plan,
            moments=moments,
            workload=workload_of(config, arguments.mean_tokens, trace.lengths if trace else None, arguments.seed),
            truth=truth,
            journal=journal,
            metrics=metrics,
            display=display,
            renumbered=policy == "script",
            delays=Delays(notice_seconds=arguments.notice_seconds),
        )
        drive(commander_of(policy, config, plan, world, journal), world)
    if several:
        print(f"{policy}: {folder.path}", flush=True)
    return outcome(policy, folder.path, world, time.monotonic() - began)


def commander_of(policy: str, config: Config, plan: Plan, world: SimulatedWorld, journal: Journal) -> Commander:
    """The controller of a policy, as the world speaks with it."""
    if policy == "script":
        return Controller(config)
    inventory = inventory_of(world.moments)
    controller = fleet_controller(policy, config, plan, world.fleet, inventory)
    variant = VARIANTS.get(policy)
    world.keeps_processes = not controller.policy.by_restart or (variant is not None and variant.storage)
    if variant is not None:
        world.searcher = FleetSearcher(
            changes=world.changes,
            journal=journal,
            outlook=lambda: controller.policy.outlook,  # type: ignore[attr-defined]  # Adaptive's
            fleet=lambda: world.fleet,
            space=variant.space(plan),
            free=not variant.priced,
            by_restart=not variant.live,
            through_storage=variant.storage,
        )
    return Told(controller=controller, journal=journal, policy=policy, inventory=inventory)


def fleet_of(fleet: str, trace: FleetTrace | None, device: str, truth: Truth) -> tuple[Moment, ...]:
    """The fleet over time: `fleet`, such as 16xh100, stays; a trace is played on `device`."""
    if device not in DEVICES:
        raise ConfigError("--device", device, near(device, DEVICES))
    if trace is None:
        return steady(parse_fleet(fleet))
    if fleet:
        raise ConfigError("--fleet", fleet, "expected either --fleet or --trace")
    return play(trace, DEVICES[device], truth)


def starting_plan(config: Config, fleet: Fleet) -> Plan:
    """The configuration's plan; with more or fewer replicas where the fleet begins with another number of slots."""
    plan = first_plan(config)
    if plan_slots(plan) <= set(fleet.slots) and len(fleet.slots) == config.fleet.slots:
        return plan
    found = with_dp(plan, fleet, fleet.slots, divisible=True)
    if found is None:
        raise InfeasiblePlan(
            "plan", str(plan), f"a plan of which at least one replica fits on {len(fleet.slots)} slots"
        )
    return found


def workload_of(config: Config, mean_tokens: float | None, curve: LengthCurve | None, seed: int) -> SimWorkload:
    """Lengths by the option, else by a curve, such as the trace's, else a share of the cap."""
    data = config.data
    if mean_tokens is not None:
        curve = constant(mean_tokens)
    elif curve is None:
        curve = share_of_limits(data)
    return SimWorkload(
        algorithm="ppo" if config.algorithm.adv_estimator == "gae" else "grpo",
        prompts_per_step=data.prompts_per_step,
        samples_per_prompt=data.samples_per_prompt,
        mean_prompt_tokens=MEAN_PROMPT_SHARE * data.max_prompt_tokens,
        most_prompt_tokens=data.max_prompt_tokens,
        most_response_tokens=data.max_response_tokens,
        limit_tokens=tuple((each.step, each.max_response_tokens) for each in data.response_schedule),
        curve=curve,
        seed=seed,
    )


def share_of_limits(data: DataConfig) -> LengthCurve:
    """Means that follow the limit of a response, step by step."""
    points = {1: data.max_response_tokens}
    for each in data.response_schedule:
        points |= {each.step - 1: response_limit(data, each.step - 1), each.step: each.max_response_tokens}
    means = tuple(MEAN_RESPONSE_SHARE * points[step] for step in sorted(points))
    return LengthCurve(name="a share of the limit", at_steps=tuple(sorted(points)), mean_tokens=means)


def outcome(policy: str, folder: Path, world: SimulatedWorld, wall_seconds: float) -> Outcome:
    """What a world's run came to."""
    steps, total = world.steps_done, world.env.now
    seconds = world.step_seconds
    return Outcome(
        policy=policy,
        folder=folder,
        steps=steps,
        total_seconds=total,
        latency_seconds=total / steps if steps else float("nan"),
        step_seconds=sum(seconds) / len(seconds) if seconds else float("nan"),
        tokens_per_second=world.tokens / total if total else 0.0,
        transitions_count=len(world.transitions),
        pause_seconds=sum(float(done["pause_seconds"]) for done in world.transitions),
        lost_seconds=world.lost_seconds,
        wall_seconds=wall_seconds,
        stands_still=world.stands_still,
    )


def table(found: Sequence[Outcome]) -> str:
    """The outcomes, one a line; the last column is the latency beside the first one's."""
    head = (
        "policy",
        "steps",
        "hours",
        "s/step all in",
        "s/step",
        "tokens/s",
        "changes",
        "pause s",
        "share",
        "void s",
        "beside",
    )
    rows: list[tuple[str, ...]] = [head]
    for one in found:
        beside = one.latency_seconds / found[0].latency_seconds - 1
        rows.append(
            (
                one.policy + (" (stands still)" if one.stands_still else ""),
                f"{one.steps}",
                f"{one.total_seconds / 3600:.2f}",
                f"{one.latency_seconds:.2f}",
                f"{one.step_seconds:.2f}",
                f"{one.tokens_per_second:,.0f}",
                f"{one.transitions_count}",
                f"{one.pause_seconds:.1f}",
                f"{one.pause_seconds / one.total_seconds:.2%}",
                f"{one.lost_seconds:.1f}",
                "" if one is found[0] or one.stands_still or found[0].stands_still else f"{beside:+.1%}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    wall = sum(one.wall_seconds for one in found)
    return "\n".join([*(line.rstrip() for line in lines), f"simulated in {wall:.1f} s"]) + "\n"
