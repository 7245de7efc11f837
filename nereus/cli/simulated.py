"""A Run of an experiment in the simulated world: the same folder as a real run's, without display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nereus.cli.folder import create_run_folder
from nereus.cli.simulate import POLICIES
from nereus.cli.simulation import controller_for, fleet_of, starting_plan, workload_of
from nereus.errors import ConfigError, near
from nereus.experiment import Run, Scene
from nereus.report.display import QuietDisplay
from nereus.report.record import Provenance, write_record
from nereus.runtime.journal import Journal
from nereus.runtime.metrics import MetricsWriter, NoMirror
from nereus.sim.edges import Delays
from nereus.sim.play import Moment
from nereus.sim.traces import FleetTrace, LengthCurve, read_trace
from nereus.sim.truth import Truth
from nereus.sim.world import SimulatedWorld
from nereus.validate import validate
from nereus.world import drive


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """Where a simulated run writes."""

    journal: Journal
    metrics: MetricsWriter


def simulate_run(run: Run, parent: Path, provenance: Provenance) -> str:
    """Simulates `run` in a new folder of `parent`, and returns a line that says what it came to."""
    if run.scene is None:
        raise ConfigError("scene", None, "expected one: without it a run is real")
    if run.scene.policy not in POLICIES:
        raise ConfigError("scene.policy", run.scene.policy, near(run.scene.policy, POLICIES))
    with _records(run, parent, provenance) as records:
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
    config, truth = run.config("runs"), Truth(seed=run.seed)
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
    )
    drive(controller_for(scene.policy, config, plan, world.fleet), world)
    still = ", then stands still" if world.stands_still else ""
    return f"simulated {world.steps_done} steps in {world.env.now:,.0f} s{still}"


def scene_moments(scene: Scene, truth: Truth) -> tuple[tuple[Moment, ...], FleetTrace | None]:
    """The scene's fleet over time, and its trace if it has one."""
    trace = read_trace(Path(scene.trace)) if scene.trace else None
    return fleet_of(scene.fleet, trace, scene.device, truth), trace


def _with_curve(scene: Scene, trace: FleetTrace | None) -> LengthCurve | None:
    """The curve that lengths follow where the scene gives no mean."""
    if scene.curve:
        return read_trace(Path(scene.curve)).lengths
    return trace.lengths if trace else None
