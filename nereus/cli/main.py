"""The command `nereus` and its sub-commands. Exit codes: 0 done, 1 failed, 2 wrong configuration, 130 stopped.

argparse rather than tyro: only its intermixed parsing takes options between a configuration and its overrides.
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from nereus.cli.accuracy import accuracy, add_accuracy
from nereus.cli.compare import add_compare, compare
from nereus.cli.doctor import examine, findings_text
from nereus.cli.experiments import Trainer, add_experiment, experiment
from nereus.cli.explain import add_explain, explain
from nereus.cli.export import add_export, export
from nereus.cli.folder import create_run_folder, discard_unused, link_to
from nereus.cli.imports import add_import, import_folder
from nereus.cli.jobs import add_jobs, jobs
from nereus.cli.load import QUICKSTART, load_config
from nereus.cli.plan import add_plan, plan
from nereus.cli.replay import add_replay, replay
from nereus.cli.resume import ResumedRun, add_resume, resumed_run
from nereus.cli.simulate import add_simulate, simulate
from nereus.cli.status import add_status, status
from nereus.cli.submit import add_submit, submit
from nereus.cli.trace import add_trace, trace
from nereus.cli.transition import add_transition, transition
from nereus.config import Config
from nereus.errors import ConfigError, NereusError
from nereus.report.display import Display, open_display
from nereus.report.summary import render, summarise
from nereus.runtime.journal import RunFolder
from nereus.runtime.metrics import check_mirror
from nereus.runtime.stop import StopSignal
from nereus.validate import validate

DONE, FAILED, WRONG, STOPPED = 0, 1, 2, 130
RunJob = Callable[[Config, RunFolder, Display, StopSignal, Path | None], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A subcommand: what it takes and what it does; `run` returns the exit code."""

    help: str
    add: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command line and return its exit code; errors are one line on stderr, no traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments, command = _parsed(words)
    try:
        code = command.run(arguments)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG
    except NereusError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # the reader of the output has gone, as with `| head`
        _silence()
        return FAILED
    except OSError as error:
        _silence()
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def _silence() -> None:
    """Sends what is left in the output's buffer nowhere, so that the exit does not fail over it once more."""
    with contextlib.suppress(OSError, ValueError):  # an output without a descriptor has nothing left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parsed(words: list[str]) -> tuple[Namespace, Command]:
    """The arguments and the command of `words`; argparse shows help or what is wrong and exits itself."""
    parser = ArgumentParser(prog="nereus", description="RL post-training whose parallel layouts change live.")
    choices = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parsers: dict[str, ArgumentParser] = {}
    for name, command in COMMANDS.items():
        parsers[name] = choices.add_parser(name, help=command.help, description=command.help)
        command.add(parsers[name])
    if not words or words[0] not in parsers:
        parser.parse_args(words or ["--help"])
        parser.error(f"expected one of {', '.join(parsers)}")
    return parsers[words[0]].parse_intermixed_args(words[1:]), COMMANDS[words[0]]


def _add_train(parser: ArgumentParser) -> None:
    parser.usage = "nereus train CONFIG [--rollouts RUN] [--link PATH] [key=value ...]"
    parser.add_argument("words", nargs="*", metavar="CONFIG", help=f"a YAML file, such as {QUICKSTART}, then overrides")
    parser.add_argument("--rollouts", metavar="RUN", help="train on the rollouts that this run folder has recorded")
    parser.add_argument(
        "--link", metavar="PATH", help="make PATH a link to the run folder, in place of one that is there"
    )


def _train(arguments: Namespace) -> int:
    config, rollouts = _job(arguments)
    _check_real_job(config, rollouts)
    return carry_out(config, rollouts, _run_real_job, None if arguments.link is None else Path(arguments.link))


def _check_real_job(config: Config, rollouts: Path | None, first_step: int = 1) -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # layouts are written with a middle dot
    from nereus.runtime.run import check_job  # seconds, and much memory

    check_job(config, rollouts, first_step)


def _experiment(arguments: Namespace) -> int:
    def check(config: Config) -> None:
        validate(config)
        check_mirror(config)
        _check_real_job(config, None)

    return experiment(arguments, Trainer(check=check, run_job=_run_real_job, carry_out=carry_out))


def _job(arguments: Namespace) -> tuple[Config, Path | None]:
    """What to run, with everything judged that needs no process. Raises ConfigError."""
    words: list[str] = arguments.words
    named = words[:1] if words and ("=" not in words[0] or Path(words[0]).exists()) else []
    config = load_config(Path(named[0]) if named else None, words[len(named) :])
    validate(config)
    check_mirror(config)
    return config, None if arguments.rollouts is None else _run_folder("--rollouts", arguments.rollouts)


def _run_real_job(config: Config, folder: RunFolder, display: Display, stop: StopSignal, rollouts: Path | None) -> None:
    """The job on Megatron, vLLM and Ray."""
    display.phase("importing the runtime")
    from nereus.runtime.run import run_job  # seconds, and much memory

    run_job(config, folder, display, stop, rollouts)


def carry_out(config: Config, rollouts: Path | None, run_job: RunJob, link: Path | None = None) -> int:
    """Run a job in a new run folder, to which `link` leads then, print its summary and return the exit code.

    What `run_job` raises is raised on, after the terminal is given back and the run folder told on stderr; a
    ConfigError before the first event takes the folder away again.
    """
    folder = create_run_folder(config, Path(config.run.folder))
    try:
        if link is not None:
            link_to(folder, link)
        return _told(folder, config.run.steps, [f"run folder {folder.path}"], partial(run_job, config), rollouts)
    except ConfigError:
        discard_unused(folder)
        raise


def _told(
    folder: RunFolder,
    steps: int,
    lines: Sequence[str],
    run_job: Callable[[RunFolder, Display, StopSignal, Path | None], None],
    rollouts: Path | None,
) -> int:
    """Carries a job out in `folder`, after `lines` on its display, and prints the summary; the exit code."""
    display = open_display(steps, sys.stdout)
    try:
        for line in lines:
            display.note(line)
        with StopSignal() as stop:
            run_job(folder, display, stop, rollouts)
    except ConfigError:
        raise
    except (NereusError, KeyboardInterrupt):
        display.close()
        print(f"what was recorded is in {folder.path}", file=sys.stderr)
        raise
    finally:
        display.close()
    print(f"\n{render(summarise(folder.path))}", end="")
    return STOPPED if stop.requested else DONE


def _resume(arguments: Namespace) -> int:
    run = resumed_run(arguments)
    check_mirror(run.config)
    if run.nothing_left:
        print("\n".join(run.told()))
        return DONE
    if run.attaching is None:
        return _go_on(run)
    from nereus.cli.attach import in_touch

    with in_touch(run.attaching):
        return _go_on(run)


def _go_on(run: ResumedRun) -> int:
    _check_real_job(run.config, run.rollouts, run.resumption.manifest.step + 1)

    def go_on(folder: RunFolder, display: Display, stop: StopSignal, rollouts: Path | None) -> None:
        display.phase("importing the runtime")
        from nereus.runtime.run import run_job  # seconds, and much memory

        run_job(run.config, folder, display, stop, rollouts, run.resumption, run.claimed, run.attaching)

    return _told(run.folder, run.config.run.steps, run.told(), go_on, run.rollouts)


def _add_report(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder")


def _report(arguments: Namespace) -> int:
    print(render(summarise(_run_folder("RUN", arguments.run))), end="")
    return DONE


def _add_doctor(parser: ArgumentParser) -> None:
    parser.set_defaults(folder=".")


def _doctor(arguments: Namespace) -> int:
    findings = examine(Path(arguments.folder).resolve())
    print(findings_text(findings), end="")
    return FAILED if any(finding.missing for finding in findings) else DONE


def _run_folder(key: str, name: str) -> Path:
    """The run folder `name`. Raises ConfigError with `key` where no run has written."""
    folder = RunFolder(path=Path(name))
    if not folder.is_run():
        raise ConfigError(key, name, "expected a run folder (one with config.yaml and events.jsonl)")
    return folder.path


COMMANDS = {
    "train": Command(help="run PPO; its layout changes live", add=_add_train, run=_train),
    "resume": Command(
        help="go on with a run, on its live slots or from its newest good checkpoint", add=add_resume, run=_resume
    ),
    "experiment": Command(help="carry out the runs of an experiment", add=add_experiment, run=_experiment),
    "submit": Command(help="give runs to Slurm", add=add_submit, run=submit),
    "jobs": Command(help="say how submitted jobs stand, stop them, collect what they made", add=add_jobs, run=jobs),
    "export": Command(help="write a checkpoint's model for others", add=add_export, run=export),
    "import": Command(help="make a checkpoint of a foreign one", add=add_import, run=import_folder),
    "report": Command(help="print the summary of a run", add=_add_report, run=_report),
    "status": Command(help="say how a run stands", add=add_status, run=status),
    "explain": Command(help="say why a run's plan is what it is", add=add_explain, run=explain),
    "replay": Command(help="make a run's decisions again and compare", add=add_replay, run=replay),
    "compare": Command(help="show runs side by side", add=add_compare, run=compare),
    "plan": Command(help="find the best layouts for a job, or judge one", add=add_plan, run=plan),
    "accuracy": Command(help="show the cost model's errors on public tables", add=add_accuracy, run=accuracy),
    "simulate": Command(help="run a job on a simulated fleet", add=add_simulate, run=simulate),
    "trace": Command(help="make or show a trace of a fleet and of response lengths", add=add_trace, run=trace),
    "transition": Command(help="say what a change of layout would move", add=add_transition, run=transition),
    "doctor": Command(help="say what this machine has and what a run would miss", add=_add_doctor, run=_doctor),
}

if __name__ == "__main__":
    sys.exit(main())
