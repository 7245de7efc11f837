"""One job from start to end: slots up, controller and world driven, everything written and ended whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from nereus.config import Config
from nereus.controller import Controller
from nereus.errors import ConfigError, NereusError
from nereus.interchange.start import check_folder
from nereus.memory import check_memory
from nereus.report.display import Display
from nereus.resumption import Resumption
from nereus.runtime.attachment import Attaching, Keep
from nereus.runtime.journal import Journal, RunFolder
from nereus.runtime.metrics import open_metrics
from nereus.runtime.phases import task_of
from nereus.runtime.pool import SlotPool
from nereus.runtime.real import RealWorld, Stop
from nereus.runtime.rollouts import recorded_steps
from nereus.runtime.steering import Steering
from nereus.world import Commander, drive


def check_job(config: Config, rollouts: Path | None, first_step: int = 1, *, in_cluster: bool = False) -> None:
    """What can be judged before any process starts, beyond `nereus.validate`: memory, the task, recorded rollouts.

    `in_cluster` says that it will run in a Ray cluster which is not there yet.
    """
    check_memory(config, first_step)
    if not in_cluster:
        check_reattach(config)
    data = config.data
    if first_step == 1:
        check_folder(config.model)
    task = task_of(data.task, data.task_options, config.run.seed, data.prompt_template, "train", config.model)
    longest = max(len(task.prompt(i).token_ids) for i in range(min(200, config.run.steps * data.prompts_per_step)))
    if longest > data.max_prompt_tokens:
        raise ConfigError(
            "data.max_prompt_tokens", data.max_prompt_tokens, f"prompts of {data.task} reach {longest} tokens; raise it"
        )
    if rollouts is not None:
        missing = sorted(
            set(range(first_step, config.run.steps + 1)) - set(recorded_steps(RunFolder(path=rollouts).rollouts))
        )
        if missing:
            raise ConfigError(
                "--rollouts",
                str(rollouts),
                f"a run that recorded steps {first_step} to {config.run.steps}; it lacks {missing[:5]}",
            )


def check_reattach(config: Config) -> None:
    """ConfigError where slots are to outlive their driver but would end with the Ray that it starts."""
    if config.fleet.reattach_seconds and not os.environ.get("RAY_ADDRESS"):
        expected = "set RAY_ADDRESS: slots outlive their driver in a Ray cluster that does (`ray start --head`)"
        raise ConfigError("fleet.reattach_seconds", config.fleet.reattach_seconds, expected)


def run_job(
    config: Config,
    folder: RunFolder,
    display: Display,
    stop: Stop,
    rollouts: Path | None,
    resumption: Resumption | None = None,
    on_claimed: Callable[[], None] = lambda: None,
    attaching: Attaching | None = None,
) -> None:
    """Trains to the end or to the first safe point after a stop. Raises NereusError; no process outlives it.

    InfeasiblePlan and other ConfigErrors come before anything is written or started. With `resumption` the run in
    `folder` goes on from that checkpoint, with `attaching` on the slots that live. `on_claimed` is called once no other process can write the run any more.
    """
    check_job(config, rollouts, resumption.manifest.step + 1 if resumption else 1)
    with ExitStack() as ending:
        journal = Journal(folder.events)
        ending.callback(journal.close)
        journal.claim()
        on_claimed()
        journal_start(journal, config, rollouts, resumption, attached=attaching is not None)
        try:
            metrics = open_metrics(config, folder, display.note)
            ending.callback(metrics.close)
            pool = _pool(config, folder, display, attaching)
            ending.callback(pool.close)
            stop.hold()
            world = RealWorld(
                config=config,
                folder=folder,
                pool=pool,
                journal=journal,
                metrics=metrics,
                display=display,
                stop=stop,
                recorded=None if rollouts is None else RunFolder(path=rollouts).rollouts,
                resumption=resumption,
                attaching=attaching,
            )
            ending.callback(world.close)
            drive(commander(world, ending), world)
        except (NereusError, KeyboardInterrupt) as error:
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            journal.append("run_stopped", reason=reason, error=str(error), sync=True)
            raise


def _pool(config: Config, folder: RunFolder, display: Display, attaching: Attaching | None) -> SlotPool:
    fleet = config.fleet
    return SlotPool(
        fleet.slots,
        folder.logs,
        start_timeout_seconds=fleet.start_timeout_seconds,
        phase_timeout_seconds=fleet.phase_timeout_seconds,
        note=display.phase,
        keep=Keep(path=folder.slots, limit_seconds=fleet.reattach_seconds) if fleet.reattach_seconds else None,
        attachment=attaching.attachment if attaching else None,
    )


def commander(world: RealWorld, ending: ExitStack) -> Commander:
    """Who decides: the script of the configuration, or the controller of `nereus.policy`, closed when the run ends."""
    if world.config.nereus.policy == "script":
        return Controller(world.config)
    steering = Steering(
        config=world.config,
        plan=world.job.plan,
        journal=world.journal,
        beliefs=lambda: world.observer.state,
        hosts=lambda: world.pool.hosts,
        asked_seconds=lambda: world.searches.seconds,
    )
    world.deciding_seconds = lambda: steering.spent_seconds
    world.why = lambda: steering.why
    ending.callback(steering.close)
    return steering


def journal_start(
    journal: Journal, config: Config, rollouts: Path | None, resumption: Resumption | None, *, attached: bool = False
) -> None:
    """The journal's first line of a run, or of its resumption: the configuration and from where."""
    facts = {
        "config": asdict(config),
        "slots": config.fleet.slots,
        "rollouts": None if rollouts is None else str(rollouts),
    }
    if resumption is None:
        journal.append("run_started", **facts)
        return
    journal.append(
        "resumed",
        sync=True,
        step=resumption.manifest.step,
        attached=attached,
        checkpoint=resumption.folder,
        refused=resumption.refused,
        state_version=max(resumption.state_version, resumption.manifest.state_version),
        **facts,
    )
