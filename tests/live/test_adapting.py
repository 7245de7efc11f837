"""The policy nereus on real slots: what it decided is made again from its journal, and a dry run changes nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nereus.cli.folder import create_run_folder
from nereus.config import NereusConfig, PlansConfig, RunConfig
from nereus.control.written import plan_of
from nereus.report.display import QuietDisplay
from nereus.report.explain import explained, render
from nereus.report.explain_page import page
from nereus.report.replay import first_difference, made_again, recorded
from nereus.report.status import status_of
from nereus.report.summary import summarise
from nereus.runtime.journal import Journal, RunFolder, read_journal
from nereus.runtime.metrics import open_metrics
from nereus.runtime.pool import SlotPool
from nereus.runtime.real import RealWorld
from nereus.runtime.run import commander, journal_start
from nereus.world import drive
from tests.live.scene import NeverStop, config
from tests.runtime.toy_world import told

STEPS = 80
"""At most: a run ends with the first step after its first decision, which comes when the noise of steps allows it."""
Records = list[dict[str, Any]]


class UntilDecided(NeverStop):
    """A user who ends the run when its journal holds a decision."""

    def __init__(self, events: Path) -> None:
        self._events = events

    @property
    def requested(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Asked between commands."""
        return any(record["kind"] == "decision" for record in read_journal(self._events))


def adapted(pool: SlotPool, folder: Path, nereus: NereusConfig) -> tuple[RunFolder, Records]:
    """A run with a controller on the shared slots, as `nereus train` makes it."""
    made = config(run=RunConfig(name="adapting", seed=3, steps=STEPS), nereus=nereus)
    place = create_run_folder(made, folder)
    with ExitStack() as ending:
        journal = Journal(place.events)
        ending.callback(journal.close)
        journal_start(journal, made, None, None)
        metrics = open_metrics(made, place, print)
        ending.callback(metrics.close)
        world = RealWorld(
            config=made,
            folder=place,
            pool=pool,
            journal=journal,
            metrics=metrics,
            display=QuietDisplay(),
            stop=UntilDecided(place.events),
        )
        ending.callback(world.close)
        drive(commander(world, ending), world)
    return place, read_journal(place.events)


@pytest.fixture(scope="module")
def run(pool: SlotPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Records]:
    allowed = PlansConfig(allow=("actor_train TP2*",))
    return adapted(pool, tmp_path_factory.mktemp("adapting"), NereusConfig(policy="nereus", plans=allowed))


def test_decisions_are_made_again_without_those_that_were_written(run: tuple[RunFolder, Records]) -> None:
    _, records = run
    bare = [record for record in records if record["kind"] not in ("commanded", "decision")]
    again = [(made.kind, made.content) for made in made_again(bare)]
    assert again == [(made.kind, made.content) for made in recorded(records)]
    assert any(kind == "decision" for kind, _ in again)
    assert first_difference(records) is None


def test_another_event_makes_another_decision(run: tuple[RunFolder, Records]) -> None:
    _, records = run
    events = [record["event"] for record in records if record["kind"] == "told"]
    index = next(i for i, event in enumerate(events) if event.get("step") == 2 and event["is"] == "StepObserved")
    phases = {phase: 3.0 * seconds for phase, seconds in events[index]["phase_seconds"].items()}
    other = told(records, index, step_seconds=3.0 * events[index]["step_seconds"], phase_seconds=phases)
    assert first_difference(other) is not None


def test_the_journal_tells_what_was_allowed_and_what_deciding_took(run: tuple[RunFolder, Records]) -> None:
    folder, records = run
    found = explained(records)
    plans = [plan_of(record["command"]["plan"]) for record in records if _is_change(record)]
    assert all(plan.actor_train.layout.tp == 2 for plan in [*plans, *found.plans.values()])
    assert "present" in render(found)
    assert page(found, records).count("<details") == len(found.decisions) > 0
    decided = summarise(folder.path).deciding
    assert decided is not None
    assert decided.decisions_count == len(found.decisions)
    assert decided.searches_count > 0
    assert 0 < decided.seconds < summarise(folder.path).training_seconds
    assert decided.search_processor_seconds > 0
    assert decided.process_processor_seconds > 0
    assert status_of(records, writing=False).last_decision


def _is_change(record: dict[str, Any]) -> bool:
    return record["kind"] == "commanded" and record["command"]["is"] == "ChangePlan"


def test_a_dry_run_decides_and_changes_nothing(pool: SlotPool, tmp_path: Path) -> None:
    _, records = adapted(pool, tmp_path, NereusConfig(policy="nereus", dry_run=True))
    found = explained(records)
    assert found.decisions
    assert all(one.entry["dry"] and one.outcome is None for one in found.decisions)
    assert not any(record["kind"] == "transition_started" for record in records)
    assert len({record["plan_id"] for record in records if record["kind"] == "step_done"}) == 1
    assert first_difference(records) is None
