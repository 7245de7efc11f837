"""The job of bench-adapt, its schedule, its plans, and one run of it on kept slots.

Every run has the same model, prompts and seeds, and samples its tokens anew (generation is part of a step); they differ
between plans at near ties alone. The model is not warmed up, so that responses are as long as allowed in every run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.adapt_slots import Cores, KeptPool, Throttle
from nereus.cli.folder import create_run_folder
from nereus.config import (
    AlgorithmConfig,
    ChangeConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    FleetConfig,
    FleetStepConfig,
    LoggerConfig,
    ModelConfig,
    NereusConfig,
    PlanChange,
    PlanConfig,
    ProbeConfig,
    ResponseStepConfig,
    RunConfig,
    StageConfig,
    WarmupConfig,
)
from nereus.report.display import QuietDisplay
from nereus.runtime.journal import Journal, read_journal
from nereus.runtime.metrics import open_metrics
from nereus.runtime.real import RealWorld
from nereus.runtime.run import commander, journal_start
from nereus.validate import validate
from nereus.world import drive

SLOTS = 4
BUDGET_BYTES = 82_000_000
"""Of a slot: DP4 with whole mini-batches fits while responses are short, and does not when they are long."""
SAMPLES = 200
MINI_BATCHES = 1
WHOLE, SMALL = 64, 16
"""Most rows of a micro-batch: all that a replica has, and so few that long ones fit."""
SHORT_TOKENS, LONG_TOKENS = 7, 23
S = StageConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Steps under one condition: `slots` of the fleet are there, `slow` is one that computes half the time, or -1."""

    name: str
    first_step: int
    slots: int = SLOTS
    slow: int = -1
    response_tokens: int = SHORT_TOKENS

    @property
    def condition(self) -> tuple[int, int, int]:
        """What a plan's time depends on."""
        return self.slots, self.slow, self.response_tokens


def schedule_of(steps: int) -> tuple[Segment, ...]:
    """The schedule, over so many steps."""
    at = [1 + steps * part // 20 for part in (0, 5, 8, 10, 14)]
    return (
        Segment(name="four slots", first_step=at[0]),
        Segment(name="slot 3 is away", first_step=at[1], slots=3),
        Segment(name="slot 3 is back", first_step=at[2]),
        Segment(name="long responses", first_step=at[3], response_tokens=LONG_TOKENS),
        Segment(name="slot 1 is slow", first_step=at[4], response_tokens=LONG_TOKENS, slow=1),
    )


def stages(train: StageConfig, engines: StageConfig | None = None) -> PlanConfig:
    """One cut for all models that train and infer, another for the engines."""
    return PlanConfig(
        actor_train=train,
        critic_train=train,
        reference_infer=train,
        actor_generate=engines or replace(train, pp=1),
    )


def wide(dp: int, micro_batch: int = SMALL, **more: Any) -> PlanConfig:
    """All stages DP."""
    return stages(S(dp=dp, micro_batch=micro_batch, **more))


USUAL = "TP2·PP2"
PLANS: dict[str, PlanConfig] = {
    USUAL: stages(S(tp=2, pp=2, micro_batch=SMALL), S(tp=2, dp=2)),
    f"DP4 mb{WHOLE}": wide(4, WHOLE),
    f"DP4 mb{SMALL}": wide(4),
    f"DP3 mb{SMALL}": wide(3),
    "DP3 without 1": wide(3, slots=(0, 2, 3)),
}
"""Static plans by name; on the first slots where nothing else is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """Who is measured: a policy from a start, named as in the table."""

    name: str
    start: str
    policy: str
    divisible: bool = False


def contestants(best: str, static: str) -> tuple[Contestant, ...]:
    """All of them; `best` is the fastest plan of the first segment that always fits, `static` the best over all segments."""
    return (
        Contestant(name=f"nereus from {USUAL}", start=USUAL, policy="nereus"),
        Contestant(name=f"dp-scaling from {USUAL}", start=USUAL, policy="dp-scaling", divisible=True),
        Contestant(name=f"nereus from {best}", start=best, policy="nereus"),
        Contestant(name=f"dp-scaling (any) from {best}", start=best, policy="dp-scaling"),
        Contestant(name=f"restart from {best}", start=best, policy="restart"),
        Contestant(name=f"fixed from {best}", start=best, policy="fixed"),
        Contestant(name=f"static {static}", start=static, policy="fixed"),
    )


def job(plan: PlanConfig, steps: int, seed: int, policy: NereusConfig, fleet: FleetConfig) -> Config:
    """The configuration of a run; its responses are short."""
    restarts = policy.policy == "restart"
    return Config(
        run=RunConfig(name="run", seed=seed, steps=steps),
        data=DataConfig(
            task="spell_backward",
            task_options={"min_word_len": 3, "max_word_len": 5},
            prompt_template="{word}>",
            prompts_per_step=SAMPLES,
            samples_per_prompt=1,
            max_prompt_tokens=8,
            max_response_tokens=SHORT_TOKENS,
        ),
        algorithm=AlgorithmConfig(mini_batches=MINI_BATCHES, actor_lr=1e-4, critic_lr=1e-4),
        model=ModelConfig(layers=2),
        warmup=WarmupConfig(steps=0),
        fleet=fleet,
        plan=plan,
        checkpoint=CheckpointConfig(keep_count=1 if restarts else 0),
        probe=ProbeConfig(seconds=4.0),
        logger=LoggerConfig(wandb="off"),
        nereus=policy,
    )


def fleet_steps(segments: tuple[Segment, ...], away_seconds: float | None) -> tuple[FleetStepConfig, ...]:
    """`fleet.schedule` of the segments; a job that waits does so for `away_seconds`."""
    found: list[FleetStepConfig] = []
    present = SLOTS
    for each in segments:
        if each.slots != present:
            away = away_seconds if each.slots > present else None
            found.append(FleetStepConfig(step=each.first_step, slots=each.slots, away_seconds=away))
            present = each.slots
    return tuple(found)


def response_steps(segments: tuple[Segment, ...]) -> tuple[ResponseStepConfig, ...]:
    """`data.response_schedule` of the segments."""
    return tuple(
        ResponseStepConfig(step=after.first_step, max_response_tokens=after.response_tokens)
        for before, after in pairwise(segments)
        if after.response_tokens != before.response_tokens
    )


class Conditions:
    """Has the face of a stop signal: asked before every event, it makes slots slow and says whether the user stopped."""

    def __init__(self, signal: Any, pool: KeptPool, cores: Cores, throttle: Throttle, slow: Mapping[int, int]) -> None:
        self._signal, self._pool, self._cores, self._throttle = signal, pool, cores, throttle
        self._slow = dict(slow)  # step -> the slot that is slow from then on
        self.world: RealWorld | None = None

    @property
    def requested(self) -> bool:
        """Whether the user asked to stop."""
        pids = self._pool.pids
        self._cores.hold(list(pids.values()))
        records = self.world.records if self.world is not None else []
        step = records[-1].step + 1 if records else 1
        begun = [at for at in self._slow if at <= step]
        slot = self._slow[max(begun)] if begun else -1
        self._throttle.hold(pids.get(slot, 0))
        return bool(self._signal.requested)

    def hold(self) -> None:
        """Takes the signals again."""
        self._signal.hold()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What runs share."""

    pool: KeptPool
    cores: Cores
    throttle: Throttle
    signal: Any
    folder: Path


def carry_out(bench: Bench, config: Config, slow: Mapping[int, int], name: str) -> list[dict[str, Any]]:
    """One run; the records of its journal. The slots are whole again before it."""
    pool = bench.pool
    bench.throttle.hold(0)
    if len(pool.numbers) != SLOTS or dict(pool.pids) != pool.as_begun:
        pool.restart(SLOTS)
    pool.call_all("as_new")
    folder = create_run_folder(config, bench.folder / name)
    conditions = Conditions(bench.signal, pool, bench.cores, bench.throttle, slow)
    with ExitStack() as ending:
        journal = Journal(folder.events)
        ending.callback(journal.close)
        ending.callback(lambda: bench.throttle.hold(0))
        journal_start(journal, config, None, None)
        metrics = open_metrics(config, folder, lambda _: None)
        ending.callback(metrics.close)
        world = RealWorld(
            config=config,
            folder=folder,
            pool=pool,
            journal=journal,
            metrics=metrics,
            display=QuietDisplay(),
            stop=conditions,
        )
        conditions.world = world
        ending.callback(world.close)
        drive(commander(world, ending), world)
    return list(read_journal(folder.events))


def measure(bench: Bench, who: Contestant, repeat: int, steps: int, away_seconds: float) -> dict[str, Any]:
    """One run of a contestant under the schedule: seconds of every step, and where they went."""
    segments = schedule_of(steps)
    policy = NereusConfig(policy=who.policy, divisible=who.divisible)
    schedule = fleet_steps(segments, away_seconds)
    fleet = FleetConfig(slots=SLOTS, slot_budget_bytes=BUDGET_BYTES, schedule=schedule)
    config = job(PLANS[who.start], steps, 1 + repeat, policy, fleet)
    config = replace(config, data=replace(config.data, response_schedule=response_steps(segments)))
    validate(config)
    before = os.getloadavg()[0]
    started = time.monotonic()
    records = carry_out(bench, config, {each.first_step: each.slow for each in segments}, f"{repeat}-{who.policy}")
    return {
        "name": who.name,
        "repeat": repeat,
        "complete": any(each["kind"] == "run_stopped" and each["reason"] == "done" for each in records),
        "load": [before, os.getloadavg()[0]],
        "run_seconds": time.monotonic() - started,
        **told(records),
    }


def told(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a journal: wall seconds from step to step (all that is between counts), and the parts that changes took."""
    started = next(each["at_seconds"] for each in records if each["kind"] == "state")
    ends = {each["step"]: each["at_seconds"] for each in records if each["kind"] == "step_done"}
    times = [started, *(ends[step] for step in sorted(ends))]
    done = [each for each in records if each["kind"] == "transition_done"]
    return {
        "step_seconds": [after - before for before, after in pairwise(times)],
        "plans": [each["plan_id"] for each in records if each["kind"] == "step_done"],
        "pause_seconds": sum(each["pause_seconds"] for each in done),
        "interleaved_seconds": sum(sum(each.get("interleaved_seconds", {}).values()) for each in done),
        "waited_seconds": sum(each["seconds"] for each in records if each["kind"] == "suspended"),
        "check_seconds": sum(each.get("took_seconds", 0.0) for each in records if each["kind"] == "speeds"),
        "changes": [{"step": each["step"], "to": each["to"], "pause_seconds": each["pause_seconds"]} for each in done],
        "reformed": sum(each["kind"] == "recovered" for each in records),
    }


def static_steps(bench: Bench, condition: Segment, names: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """Plan -> seconds of its steps under one condition, the first one left out, and the highest peak of a slot.

    One run without a budget goes through all plans.
    """
    changes = tuple(
        ChangeConfig(step=1 + at * steps, plan=PlanChange(**{n: getattr(PLANS[name], n) for n in STAGE_NAMES}))
        for at, name in enumerate(names)
        if at
    )
    script = NereusConfig(policy="script")
    config = replace(job(PLANS[names[0]], steps * len(names), 1, script, FleetConfig(slots=SLOTS)), changes=changes)
    config = replace(config, data=replace(config.data, max_response_tokens=condition.response_tokens))
    validate(config)
    records = carry_out(bench, config, {1: condition.slow}, "static")
    metrics = [each["metrics"] for each in records if each["kind"] == "step_done"]
    found = [each["timing_s/step"] - each.get("timing_s/interleaved", 0.0) for each in metrics]
    peaks = {r["step"]: max(r["peak_bytes"].values(), default=0) for r in records if r["kind"] == "observed"}
    parts = {name: range(at * steps + 2, (at + 1) * steps + 1) for at, name in enumerate(names)}
    return {
        name: {
            "seconds": [found[step - 1] for step in part if step <= len(found)],
            "peak_bytes": max((peaks.get(step, 0) for step in part), default=0),
        }
        for name, part in parts.items()
    }


STAGE_NAMES = ("actor_train", "critic_train", "reference_infer", "actor_generate")
