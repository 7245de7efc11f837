"""The probe on live slots, and predictions beside measurements of a short run: journalled, replayable, reused."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.config import Config, ProbeConfig, RunConfig, StageConfig
from nereus.errors import ConfigError
from nereus.observe import fold
from nereus.report.summary import render, summarise
from nereus.runtime.journal import Journal, read_journal
from nereus.runtime.observer import Observer
from nereus.runtime.pool import SlotPool
from nereus.runtime.probe import group_sizes
from nereus.validate import validate
from tests.live.scene import changes, config, run_job

S = StageConfig


def test_a_run_predicts_what_it_measures_and_its_journal_replays(pool: SlotPool, tmp_path: Path) -> None:
    job = config(
        run=RunConfig(name="probed", seed=3, steps=3),
        probe=ProbeConfig(seconds=6.0),
        changes=changes((3, {"actor_train": S(pp=2, dp=2, micro_batch=4)})),
    )
    world = run_job(pool, job, tmp_path)
    records: list[Any] = list(read_journal(world.folder.events))
    probes = [r for r in records if r["kind"] == "probe"]
    assert len(probes) == 1
    profile = world.observer.state.profile
    assert profile is not None
    assert profile.record() == probes[0]["profile"]
    assert {sample["kind"] for sample in probes[0]["samples"]} >= {"call", "layer", "units", "gemm", "copy"}
    assert 1.0 <= profile.together_slots <= 4.0
    assert 1e8 < profile.flops_per_second < 1e15

    state = fold(records)
    assert state == world.observer.state, "the journal replays to the state"
    assert state.calibrations["train"].observation_count == 6
    rows = [record.metrics for record in world.records]
    assert all(row["plan/predicted/step_s"] > 0 and "plan/error/update_actor" in row for row in rows)
    assert "plan/error/memory/slot_3" in rows[0]
    assert rows[2]["plan/error/step"] == pytest.approx(
        rows[2]["plan/predicted/step_s"] / sum(records_of(records, 3).values()) - 1
    )
    assert state.tolls, "the change taught prices"
    told = render(summarise(world.folder.path))
    assert "before calibration" in told
    assert "first steps of plans not run before" in told

    again = Observer(config=job, pool=pool, journal=Journal(world.folder.events))
    started = time.monotonic()
    again.begin(records)
    assert "samples" not in read_journal(world.folder.events)[-1], "equal slots are not timed again"
    assert time.monotonic() - started < 5.0
    assert again.state.calibrations == state.calibrations


def records_of(records: list[Any], step: int) -> dict[str, float]:
    return next(r for r in records if r["kind"] == "observed" and r["step"] == step)["seconds"]


def test_without_a_probe_the_catalogue_speaks(pool: SlotPool, tmp_path: Path) -> None:
    job = config(probe=ProbeConfig(seconds=0.0))
    journal = Journal(tmp_path / "events.jsonl")
    observer = Observer(config=job, pool=pool, journal=journal)
    observer.begin()
    journal.close()
    (record,) = read_journal(tmp_path / "events.jsonl")
    assert record["samples"] == []
    profile = observer.state.profile
    assert profile is not None
    assert (profile.device, profile.slots) in (("cpu", 4), (profile.device, 4))


def test_group_sizes_follow_the_fleet() -> None:
    assert group_sizes(1, 1) == ()
    assert group_sizes(4, 4) == (2, 4)
    assert group_sizes(6, 6) == (2, 4, 6)
    assert group_sizes(64, 8) == (8, 64)


@pytest.mark.parametrize("seconds", [-1.0, 10.5, float("nan")])
def test_a_senseless_budget_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"probe\.seconds.*a number from 0 \(no probe\) to 10"):
        validate(replace(Config(), probe=ProbeConfig(seconds=seconds)))
