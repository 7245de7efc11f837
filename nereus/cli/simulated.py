"""A Run of an experiment in the simulated world: the same folder as a real run's, without display."""

from __future__ import annotations

from collections.abc import Iterator
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
from nereus.report.display import QuietDisplay
from nereus.report.record import Provenance, write_record
from nereus.runtime.journal import Journal
from nereus.runtime.metrics import MetricsWriter, NoMirror
from nereus.sim.changes import PLACINGS, Placing
from nereus.sim.edges import Delays
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """Where a simulated run writes."""

    journal: Journal
    metrics: MetricsWriter


def simulate_run(run: Run, parent: Path, provenance: Provenance) -> str:
    """Simulates `run` in a new folder of `parent`, and returns a line that says what it came to."""
    if run.scene is None:
        raise ConfigError("scene", None, "expected one: without it a run is real")
    known = (*POLICIES, *OWN_PLANS) if run.system == "nereus" else CONFIGURATIONS
    if run.scene.policy not in known:
        raise ConfigError("scene.policy", run.scene.policy, near(run.scene.policy, known))
    if run.scene.placing not in PLACINGS:
        raise ConfigError("scene.placing", run.scene.placing, near(run.scene.placing, PLACINGS))
    with _records(run, parent, provenance) as records:
        if run.system != "nereus" or run.scene.policy in OWN_PLANS:
            return _system_run(run, run.scene, records)
        return _world_run(run, run.scene, records)


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
    plan = starting_plan(config, moments[0].fleet)
    world = SimulatedWorld(
        config=config,
        first=plan,
        moments=moments,
        workload=workload_of(config, scene.mean_tokens, _with_curve(scene, trace), run.seed),
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


def _with_curve(scene: Scene, trace: FleetTrace | None) -> LengthCurve | None:
    """The curve that lengths follow where the scene gives no mean."""
    if scene.curve:
        return read_trace(Path(scene.curve)).lengths
    return trace.lengths if trace else None
