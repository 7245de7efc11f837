"""One job from start to end: slots up, controller and world driven, everything written and ended whatever happens."""

from __future__ import annotations

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
from nereus.runtime.journal import Journal, RunFolder
from nereus.runtime.metrics import open_metrics
from nereus.runtime.phases import task_of
from nereus.runtime.pool import SlotPool
from nereus.runtime.real import RealWorld, Stop
from nereus.runtime.rollouts import recorded_steps
from nereus.runtime.steering import Steering
from nereus.world import Commander, drive


def check_job(config: Config, rollouts: Path | None, first_step: int = 1) -> None:
    """What can be judged before any process starts, beyond `nereus.validate`: memory, the task, recorded rollouts."""
    check_memory(config, first_step)
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


def run_job(
    config: Config,
    folder: RunFolder,
    display: Display,
    stop: Stop,
    rollouts: Path | None,
    resumption: Resumption | None = None,
    on_claimed: Callable[[], None] = lambda: None,
) -> None:
    """Trains to the end or to the first safe point after a stop. Raises NereusError; no process outlives it.

    InfeasiblePlan and other ConfigErrors come before anything is written or started. With `resumption` the run in
    `folder` goes on from that checkpoint. `on_claimed` is called once no other process can write the run any more.
    """
    check_job(config, rollouts, resumption.manifest.step + 1 if resumption else 1)
    with ExitStack() as ending:
        journal = Journal(folder.events)
        ending.callback(journal.close)
        journal.claim()
        on_claimed()
        journal_start(journal, config, rollouts, resumption)
        try:
            metrics = open_metrics(config, folder, display.note)
            ending.callback(metrics.close)
            pool = SlotPool(
                config.fleet.slots,
                folder.logs,
                start_timeout_seconds=config.fleet.start_timeout_seconds,
                phase_timeout_seconds=config.fleet.phase_timeout_seconds,
                note=display.phase,
            )
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
            )
            ending.callback(world.close)
            drive(commander(world, ending), world)
        except (NereusError, KeyboardInterrupt) as error:
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            journal.append("run_stopped", reason=reason, error=str(error), sync=True)
            raise


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
    ending.callback(steering.close)
    return steering


def journal_start(journal: Journal, config: Config, rollouts: Path | None, resumption: Resumption | None) -> None:
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
        checkpoint=resumption.folder,
        refused=resumption.refused,
        state_version=max(resumption.state_version, resumption.manifest.state_version),
        **facts,
    )
