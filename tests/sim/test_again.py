"""A real run's journal played again in the simulated world: its time within 15 %, from nothing that was measured later."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nereus.cli.main import main
from nereus.errors import ConfigError, JournalError
from nereus.sim.again import played_again, real_run
from tests.sim.scene import Kept
from tests.sim.test_world import scaled

JOURNAL = Path(__file__).parent / "journals" / "quickstart.jsonl.gz"
GOAL_SHARE = 0.15


def journal() -> list[dict[str, Any]]:
    with gzip.open(JOURNAL, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def steps_of(events: list[dict[str, Any]], learnt_steps: int | None = None) -> list[float]:
    return played_again(real_run(events, learnt_steps), Kept(), Kept()).step_seconds


def test_a_real_quickstart_takes_what_the_simulated_world_says() -> None:
    run, kept = real_run(journal()), Kept()
    world = played_again(run, kept, kept)
    assert len(world.step_seconds) == 24
    assert [done["step"] for done in kept.kinds("transition_done")] == sorted(run.changes) == [6, 13]
    assert all(done["pause_seconds"] > 0 for done in kept.kinds("transition_done"))
    assert abs(world.env.now / run.measured_seconds - 1) < GOAL_SHARE
    assert abs(sum(world.step_seconds) / run.step_seconds - 1) < GOAL_SHARE


def test_a_step_is_foretold_from_what_was_measured_before_it() -> None:
    events = journal()
    before = steps_of(events)
    for event in events:
        if event["kind"] == "observed" and event["step"] >= 20:
            event["seconds"] = {phase: 10 * seconds for phase, seconds in event["seconds"].items()}
    changed = steps_of(events)
    assert changed[:20] == before[:20]
    assert changed[20] > 1.1 * before[20]  # one surprise is weighed down, not followed


def test_coefficients_of_the_first_steps_serve_all() -> None:
    events = journal()
    first = steps_of(events, 12)
    for event in events:
        if event["kind"] == "observed" and event["step"] > 12:
            event["seconds"] = {phase: 10 * seconds for phase, seconds in event["seconds"].items()}
    assert steps_of(events, 12) == first


@pytest.mark.parametrize("kind", ["probe", "observed", "control_started"])
def test_a_journal_without_what_it_is_made_of_is_refused(kind: str) -> None:
    with pytest.raises(JournalError, match=f"no {kind}"):
        real_run([event for event in journal() if event["kind"] != kind])


def test_losses_and_wrong_steps_are_refused() -> None:
    with pytest.raises(JournalError, match="slots_lost"):
        real_run([*journal(), {"kind": "slots_lost"}])
    with pytest.raises(ConfigError, match="expected 1 to 24"):
        real_run(journal(), 25)


def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gzip.open(JOURNAL, "rb") as file:
        (tmp_path / "events.jsonl").write_bytes(file.read())
    assert main(["simulate", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "24 steps, 2 changes" in told
    assert "first step to last" in told
    assert main(["simulate", str(tmp_path), "--learn-steps", "99"]) == 2
    assert main(["simulate", str(tmp_path.parent / "none")]) == 2


def test_nothing_is_outside_the_pause_that_the_real_world_has_inside() -> None:
    """A controller's changes stop the job in both worlds: what of a change is beside the steps is its planning alone."""
    real = [event for event in journal() if event["kind"] == "transition_done"]
    beside = {kind for done in real for place in ("interleaved", "outside") for kind in done[f"{place}_seconds"]}
    kept = scaled([(0, 2), (40, 4)], steps=8)
    made = [event for event in kept.kinds("transition_done") if "restored_step" not in event]
    assert made
    for done in made:
        assert {kind for place in ("interleaved", "outside") for kind in done[f"{place}_seconds"]} <= beside
        assert sum(done["seconds"].values()) <= done["pause_seconds"] * (1 + 1e-9)
        assert "build_engine" in done["seconds"]
