"""A Run of an experiment in the simulated world: the same folder as a real run's, without display."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from nereus.cli.folder import create_run_folder
from nereus.cli.simulate import POLICIES
from nereus.cli.simulation import commander_of, fleet_of, starting_plan, workload_of
from nereus.config import Config
from nereus.errors import ConfigError, near
from nereus.experiment import Run, Scene
from nereus.fleet import Fleet, parse_fleet
from nereus.layout import Plan
from nereus.report.display import QuietDisplay
from nereus.report.record import Provenance, write_record
from nereus.runtime.journal import Journal, RunFolder, read_journal
from nereus.runtime.metrics import MetricsWriter, NoMirror
from nereus.sim.changes import PLACINGS, Placing
from nereus.sim.edges import Delays
from nereus.sim.hindsight import Hindsight, Past, best_layout
from nereus.sim.play import Moment
from nereus.sim.rivals.choosing import CONFIGURATIONS, Trial, configured
from nereus.sim.rivals.planned import best_setup, problem_on, settled_setup
from nereus.sim.rivals.setups import Setup, job_of
from nereus.sim.rivals.stepping import GENEROUS, SystemTimes, system_row
from nereus.sim.traces import FleetTrace, LengthCurve, paced, read_trace
from nereus.sim.truth import Truth
from nereus.sim.workload import SimWorkload
from nereus.sim.world import SimulatedWorld
from nereus.validate import validate
from nereus.world import drive

OWN_PLANS = ("best-plan", "settled-plan")
"""Policies of Nereus that keep a plan: the best of a search that knows no true times, or that on which searches settle."""
NO_FIT = "does not fit"
RUNS = Path("runs")
COLLECTED_OBJECTS = 70_000
"""So many new objects until garbage is looked for."""
ORACLE = "oracle"
"""The policy that knows the future: the best path over the plans that other runs of the scenario used and the planner's best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """Where a simulated run writes."""

    journal: Journal
    metrics: MetricsWriter


def simulate_run(run: Run, parent: Path, provenance: Provenance) -> str:
    """Simulates `run` in a new folder of `parent`, and returns a line that says what it came to."""
    if run.scene is None:
        raise ConfigError("scene", None, "expected one: without it a run is real")
    known = (*POLICIES, *OWN_PLANS, ORACLE) if run.system == "nereus" else CONFIGURATIONS
    if run.scene.policy not in known:
        raise ConfigError("scene.policy", run.scene.policy, near(run.scene.policy, known))
    if run.scene.placing not in PLACINGS:
        raise ConfigError("scene.placing", run.scene.placing, near(run.scene.placing, PLACINGS))
    with _records(run, parent, provenance) as records, _rarely_collected():
        if run.system != "nereus" or run.scene.policy in OWN_PLANS:
            return _system_run(run, run.scene, records)
        if run.scene.policy == ORACLE:
            return _oracle_run(run, run.scene, records, parent)
        return _world_run(run, run.scene, records)


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Garbage is looked for a hundredth as often: a run holds a million records and makes next to no cycles."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECTED_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _records(run: Run, parent: Path, provenance: Provenance) -> Iterator[Records]:
    config = run.config(str(parent))
    validate(config)
    folder = create_run_folder(config, parent)
    write_record(folder.path, run, provenance)
    journal, metrics = Journal(folder.events), MetricsWriter(folder.metrics, NoMirror())
    try:
        yield Records(journal=journal, metrics=metrics)
    finally:
        metrics.close()
        journal.close()


def _world_run(run: Run, scene: Scene, records: Records) -> str:
    """A policy of `nereus simulate` on the scene's fleet."""
    config = run.config("runs")
    truth = Truth(seed=run.seed).altered(
        noise_ratio=scene.noise_ratio, engine_ratio=scene.engine_ratio, link_ratio=scene.link_ratio
    )
    moments, trace = scene_moments(scene, truth)
    workload = workload_of(config, scene.mean_tokens, _with_curve(scene, trace, run.workload.steps), run.seed)
    plan = scene_start(scene, config, moments, workload)
    world = SimulatedWorld(
        config=config,
        first=plan,
        moments=moments,
        workload=workload,
        truth=truth,
        journal=records.journal,
        metrics=records.metrics,
        display=QuietDisplay(),
        renumbered=scene.policy == "script",
        delays=Delays(notice_seconds=scene.notice_seconds),
        placing=cast("Placing", scene.placing),
    )
    drive(commander_of(scene.policy, config, plan, world, records.journal), world)
    still = ", then stands still" if world.stands_still else ""
    return f"simulated {world.steps_done} steps in {world.env.now:,.0f} s{still}"


def scene_start(scene: Scene, config: Config, moments: tuple[Moment, ...], workload: SimWorkload) -> Plan:
    """The plan in which the run starts: the configuration's on the first fleet, or the best layout for that."""
    stated = starting_plan(config, moments[0].fleet)
    return stated if scene.start == "stated" else best_layout(config, moments, workload, stated)


def _oracle_run(run: Run, scene: Scene, records: Records, parent: Path) -> str:
    """What could have been had in the scenario of the runs that it looks back on, and if changes were free."""
    config, truth = run.config("runs"), Truth(seed=run.seed)
    moments, trace = scene_moments(scene, truth)
    workload = workload_of(config, scene.mean_tokens, _with_curve(scene, trace, run.workload.steps), run.seed)
    first = scene_start(scene, config, moments, workload)
    past = past_of(scene, (parent, RUNS / run.experiment))
    past.first.setdefault(first.plan_id, first)
    past.plans.setdefault(first.plan_id, first)
    found = Hindsight(config=config, moments=moments, workload=workload, truth=truth, past=past)
    oracle, ceiling = found.oracle(first), found.ceiling()
    others = [found.oracle(plan) for name, plan in past.first.items() if name != first.plan_id]
    free = ceiling.spent()
    best = min(others, key=lambda answer: answer.total_seconds, default=oracle).spent()
    records.journal.append(
        "run_started", config=asdict(config), slots=len(moments[0].fleet.slots), at_seconds=0.0, rollouts=None
    )
    for leg, spent, best_spent, free_spent in zip(oracle.legs, oracle.spent(), best, free, strict=True):
        row = {
            "training/global_step": float(leg.step),
            "timing_s/step": leg.ended_seconds - leg.began_seconds,
            "timing_s/transition": sum(seconds for _, seconds in leg.changes),
            "hindsight/oracle_seconds": spent,
            "hindsight/best_start_seconds": best_spent,
            "hindsight/ceiling_seconds": free_spent,
        }
        text = str(oracle.plans[leg.plan])
        records.journal.append("step_done", step=leg.step, plan_text=text, metrics=row, at_seconds=leg.ended_seconds)
        records.metrics.write(leg.step, row)
    records.journal.append("run_stopped", reason="done", steps=len(oracle.legs), at_seconds=oracle.total_seconds)
    changes = sum(len(leg.changes) for leg in oracle.legs)
    return (
        f"the best of {len(found.plans)} plans takes {oracle.total_seconds:,.0f} s with {changes} changes, "
        f"with free ones {ceiling.total_seconds:,.0f} s; {found.prices.carried_out_count} changes were carried out"
    )


def past_of(scene: Scene, parents: Sequence[Path]) -> Past:
    """What the runs did, in the first of `parents` that has them, that the scene looks back on. ConfigError for an unfinished one."""
    past = Past()
    for name in scene.hindsight:
        folders = [folder for folder in (RunFolder(path=parent / name) for parent in parents) if folder.is_run()]
        events = read_journal(folders[0].events) if folders else []
        if not events or events[-1]["kind"] != "run_stopped":
            raise ConfigError("scene.hindsight", name, f"expected a finished run in {parents[-1]}; carry it out first")
        past.read(events)
    return past


def _system_run(run: Run, scene: Scene, records: Records) -> str:
    """A Setup that stays, of any system, on a fleet that stays: its steps under the truth."""
    config, truth, fleet = run.config("runs"), Truth(seed=run.seed), parse_fleet(scene.fleet, "scene.fleet")
    workload = workload_of(config, scene.mean_tokens, None, run.seed)
    records.journal.append("run_started", config=asdict(config), slots=len(fleet.slots), at_seconds=0.0, rollouts=None)
    setup = system_setup(run, config, fleet, workload)
    if setup is None:
        records.journal.append("run_stopped", reason=NO_FIT, steps=0, at_seconds=0.0)
        return f"{run.system} {scene.policy} {NO_FIT} on {scene.fleet}"
    times = SystemTimes(job_of(config), setup, fleet, truth)
    free = SystemTimes(job_of(config), setup, fleet, truth, GENEROUS).sync_seconds
    slots, now = truth.slowness(max(fleet.slots) + 1), 0.0
    for step in range(1, run.workload.steps + 1):
        samples = workload.batch(step)
        done = times.step(step, samples, slots * truth.straggling(len(fleet.nodes), step)[fleet.node_of])
        now += done.seconds
        row = system_row(step, samples, done, setup, len(fleet.slots))
        row["perf/time_per_step_free_handover"] = done.seconds - done.phases["update_weights"] + free
        records.journal.append("step_done", step=step, plan_text=str(setup), metrics=row, at_seconds=now)
        records.metrics.write(step, row)
    records.journal.append("run_stopped", reason="done", steps=run.workload.steps, at_seconds=now)
    return f"{setup}: {now / run.workload.steps:.1f} s a step, simulated"


def system_setup(run: Run, config: Config, fleet: Fleet, workload: SimWorkload) -> Setup | None:
    """The setup that a run names: the planner's best or settled plan, a system's defaults, or the best of its grid on the first batch."""
    assert run.scene is not None
    exact, job, first = Truth(exact=True), job_of(config), workload.batch(1)
    if run.system == "nereus":
        problem = problem_on(config, fleet, workload.mean_prompt_tokens, workload.mean_at(1))
        if run.scene.policy == OWN_PLANS[0]:
            best = best_setup(config, fleet, problem, exact)
            return best[0] if best is not None else None
        settled = settled_setup(config, fleet, problem, Truth(seed=run.seed), workload)
        return settled[0] if settled is not None else None
    return configured(run.system, run.scene.policy, job, fleet, Trial(job, fleet, exact, first))


def scene_moments(scene: Scene, truth: Truth) -> tuple[tuple[Moment, ...], FleetTrace | None]:
    """The scene's fleet over time, and its trace if it has one."""
    trace = read_trace(Path(scene.trace)) if scene.trace else None
    if trace is not None and scene.pace_ratio != 1.0:
        trace = replace(trace, nodes=paced(trace.nodes, scene.pace_ratio))
    return fleet_of(scene.fleet, trace, scene.device, truth), trace


def _with_curve(scene: Scene, trace: FleetTrace | None, steps: int) -> LengthCurve | None:
    """The curve that lengths follow where the scene gives no mean; one of its own spans the run's steps."""
    if scene.curve:
        found = read_trace(Path(scene.curve)).lengths
        return found and found.over(steps)
    return trace.lengths if trace else None
