"""`nereus experiment list | run | status | collect | verify`: the runs of `experiments/NAME.py`, carried out in `runs/NAME/`.

A run is finished when its journal says so; what was interrupted is set aside and done again. Nothing else is kept.
"""

from __future__ import annotations

import fcntl
import importlib.util
import shlex
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

from nereus.cli.load import dump_config, load_config
from nereus.config import Config
from nereus.errors import ConfigError, NereusError
from nereus.experiment import Run, run_of
from nereus.report.display import Display
from nereus.report.record import Provenance, discard_record, provenance_of, write_record
from nereus.runtime.journal import RunFolder, is_being_written, read_journal
from nereus.runtime.stop import StopSignal

EXPERIMENTS, RUNS, TABLE = Path("experiments"), Path("runs"), "table.parquet"
ACTIONS = ("list", "run", "status", "collect", "verify")
OVERRIDABLE = ("model", "data", "rollout", "algorithm", "warmup", "fleet", "plan")  # the sections that a Run has
DONE, FAILED = 0, 1
SIMULATED_ENDS = ("done", "stands still", "does not fit", "out of memory")
"""A fleet that never comes back; no configuration that runs; a plan that overflows again and again."""

RunJob = Callable[[Config, RunFolder, Display, StopSignal, Path | None], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """What `nereus train` does with a configuration.

    `check` refuses what cannot run, `run_job` is the job, `carry_out` runs a job in a new run folder, shows it and
    returns the exit code.
    """

    check: Callable[[Config], None]
    run_job: RunJob
    carry_out: Callable[[Config, Path | None, RunJob], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is. `running`: a process has it in hand now."""

    state: Literal["finished", "unfinished", "running", "to do"]
    done_steps: int


def add_experiment(parser: ArgumentParser) -> None:
    """The arguments of `nereus experiment`."""
    parser.usage = (
        "nereus experiment list | run | status | collect | verify [NAME] [--only RUN] [--jobs N] [key=value ...]"
    )
    parser.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("words", nargs="*", metavar="NAME", help="an experiment, then overrides of all its runs")
    parser.add_argument("--only", metavar="RUN", action="append", help="the runs with this id or variant (repeatable)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="run, verify: so many simulated runs at a time (default: 1)"
    )
    parser.add_argument("--out", metavar="FILE", help=f"collect: write here instead of {RUNS}/NAME/{TABLE}")
    parser.add_argument("--share", type=float, default=0.05, metavar="S", help="verify: of the runs (default: 0.05)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="verify: which of the runs (default: 1)")
    parser.add_argument(
        "--metric",
        metavar="PATTERN",
        action="append",
        help="collect: of steps only metrics such as 'timing_s/*' (repeatable); runs have all theirs",
    )
    parser.add_argument("--sample", action="store_true", help="collect: mark the table as a sample, not to be quoted")


def experiment(arguments: Namespace, trainer: Trainer) -> int:
    """Carries the action out and returns the exit code."""
    words: list[str] = arguments.words
    if arguments.action == "list":
        return _list()
    if not words or "=" in words[0]:
        raise ConfigError("NAME", words[0] if words else None, f"expected an experiment: {_known()}")
    runs = chosen_runs(words[0], words[1:], arguments.only)
    if arguments.jobs < 1:
        raise ConfigError("--jobs", arguments.jobs, "expected at least 1")
    if arguments.action == "run":
        return _run(words[0], runs, trainer, _command(arguments), arguments.jobs)
    if arguments.action == "verify":
        return _verify(runs, arguments)
    if arguments.action == "status":
        return _status(runs)
    return _collect(words[0], runs, arguments)


def load_experiment(name: str) -> tuple[Run, ...]:
    """The runs of `experiments/NAME.py`. Raises ConfigError where that is not an experiment."""
    path = EXPERIMENTS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"experiments.{name}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError("NAME", name, f"no such experiment; there are: {_known()}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "runs"):
        raise ConfigError("NAME", name, f"expected a function runs() in {path}")
    runs: tuple[Run, ...] = tuple(module.runs())
    ids = {run.run_id for run in runs}
    if not runs or len(ids) < len(runs) or any(run.experiment != name for run in runs):
        raise ConfigError("NAME", name, f"expected of runs() in {path}: different Runs, all of the experiment {name}")
    return runs


def chosen_runs(name: str, overrides: Sequence[str], only: Sequence[str] | None) -> tuple[Run, ...]:
    """The runs of an experiment with overrides, which change their ids; those whose id or variant is in `only`.

    Raises ConfigError for an override that is wrong or not part of a Run, and for words that choose nothing.
    """
    runs = _overridden_together(load_experiment(name), overrides)
    for word in only or ():
        if not any(word in (run.run_id, run.variant) for run in runs):
            there = sorted({run.variant for run in runs}) + [run.run_id for run in runs]
            raise ConfigError("--only", word, f"expected a variant or a run's id: {', '.join(there)}")
    return tuple(run for run in runs if only is None or run.run_id in only or run.variant in only)


def _overridden_together(runs: Sequence[Run], overrides: Sequence[str]) -> tuple[Run, ...]:
    """The runs with overrides; those that look back on others look back on them as they are then."""
    known: dict[str, Config] = {}
    changed = [overridden(run, overrides, known) for run in runs]
    ids = {old.run_id: new.run_id for old, new in zip(runs, changed, strict=True)}
    found: list[Run] = []
    for run in changed:
        scene = run.scene
        if scene is not None and scene.hindsight:
            scene = replace(scene, hindsight=tuple(ids.get(name, name) for name in scene.hindsight))
        found.append(replace(run, scene=scene))
    return tuple(found)


def overridden(run: Run, overrides: Sequence[str], known: dict[str, Config] | None = None) -> Run:
    """`run` with overrides such as `run.steps=3`. Raises ConfigError for a key that is not part of a Run.

    `known` keeps configurations with these overrides: most runs of an experiment differ in their scene alone, and YAML is slow.
    """
    if not overrides:
        return run
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key != "run.steps" and key.partition(".")[0] not in OVERRIDABLE:
            expected = f"expected run.steps or a key of {', '.join(OVERRIDABLE)}; the rest is what tells the runs apart"
            raise ConfigError(key, override.partition("=")[2], expected)
    config = run.config(str(RUNS))
    nameless = replace(config, run=replace(config.run, name=""))
    known = {} if known is None else known
    if repr(nameless) not in known:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:
            file.write(dump_config(nameless))
            file.flush()
            known[repr(nameless)] = load_config(Path(file.name), list(overrides))
    changed = run_of(known[repr(nameless)], experiment=run.experiment, variant=run.variant, seed=run.seed)
    workload = replace(changed.workload, model_path=run.workload.model_path)
    return replace(changed, system=run.system, workload=workload, scene=run.scene)


def folder_of(run: Run) -> RunFolder:
    """Where a run is carried out."""
    return RunFolder(path=RUNS / run.experiment / run.run_id)


def progress(run: Run) -> Progress:
    """How far `run` is. Raises JournalError where its journal cannot be read."""
    folder = folder_of(run)
    events = read_journal(folder.events) if folder.is_run() else []
    done_steps = sum(event["kind"] == "step_done" for event in events)
    ends = ("done",) if run.scene is None else SIMULATED_ENDS
    if events and events[-1]["kind"] == "run_stopped" and events[-1].get("reason") in ends:
        return Progress(state="finished", done_steps=done_steps)
    if _resumed_elsewhere(folder):
        return Progress(state="running", done_steps=done_steps)
    with _lock(run, fcntl.LOCK_SH) as free:
        if not free:
            return Progress(state="running", done_steps=done_steps)
    return Progress(state="unfinished" if folder.path.exists() else "to do", done_steps=done_steps)


def _list() -> int:
    rows = []
    for name in _names():
        runs = load_experiment(name)
        finished = sum(progress(run).state == "finished" for run in runs)
        rows.append((name, f"{len(runs)} runs", f"{finished} finished"))
    print("\n".join(_aligned(rows)) if rows else f"no experiments in {EXPERIMENTS.resolve()}")
    return DONE


def _status(runs: Sequence[Run]) -> int:
    rows = []
    for run in runs:
        known = progress(run)
        steps = f"{known.done_steps}/{run.workload.steps} steps"
        aside = len(list(folder_of(run).path.parent.glob(f"{run.run_id}-interrupted-*")))
        rows.append((run.run_id, known.state, steps, f"{aside} set aside" if aside else ""))
    print("\n".join(_aligned(rows)))
    return DONE


def _run(name: str, runs: Sequence[Run], trainer: Trainer, command: str, jobs: int) -> int:
    """Carries out what is not finished; what is wrong is told before the first starts.

    Real runs go one after the other, and simulated ones too, unless `jobs` of them may go at a time.
    """
    if jobs > 1 and all(run.scene is not None for run in runs):
        return _run_beside(runs, command, jobs)
    for run in runs:
        if run.system == "nereus" and run.scene is None and progress(run).state != "finished":
            trainer.check(run.config(str(RUNS / name)))
    for number, run in enumerate(sorted(runs, key=_looks_back), start=1):
        head = f"run {number} of {len(runs)}, {run.run_id}"
        if run.system != "nereus" and run.scene is None:
            print(f"{head}: is {run.system}'s, not carried out here")
            continue
        with _lock(run, fcntl.LOCK_EX) as free:
            if not free or _resumed_elsewhere(folder_of(run)):
                print(f"{head}: another process carries it out, skipped")
            elif progress(run).state == "finished":
                print(f"{head}: finished, skipped")
            elif (code := _run_one(head, run, trainer, command)) != DONE:
                print("stopped; the same command goes on from here", file=sys.stderr)
                return code
    return DONE


def _looks_back(run: Run) -> bool:
    """Whether a run needs others to be finished before it."""
    return run.scene is not None and bool(run.scene.hindsight)


def _run_beside(runs: Sequence[Run], command: str, jobs: int) -> int:
    """Simulated runs, several at a time; those that look back on others when these are finished."""
    from nereus.cli.experiment_jobs import carried_out

    left = [run for run in runs if progress(run).state != "finished"]
    if len(left) < len(runs):
        print(f"{len(runs) - len(left)} of {len(runs)} runs: finished, skipped", flush=True)
    work = partial(_locked_run, provenance=provenance_of(command))
    number = count(1)
    for looking in (False, True):
        for run, told in carried_out([run for run in left if _looks_back(run) == looking], jobs, work):
            print(f"{next(number)} of {len(left)}, {run.run_id}: {told}", flush=True)
    return DONE


def _locked_run(run: Run, provenance: Provenance) -> str:
    """One simulated run, in a process of its own."""
    from nereus.cli.experiment_jobs import simulate_here

    with _lock(run, fcntl.LOCK_EX) as free:
        if not free:
            return "another process carries it out, skipped"
        if progress(run).state == "finished":
            return "finished, skipped"
        aside = _set_aside(folder_of(run).path)
        told = simulate_here(run, RUNS / run.experiment, provenance)
        return told + (f" (what was interrupted is now {aside})" if aside else "")


def _verify(runs: Sequence[Run], arguments: Namespace) -> int:
    """Simulates a share of the finished runs again, elsewhere; 1 where any byte of journal or metrics differs."""
    from nereus.cli.experiment_jobs import carried_out, chosen_share

    known = [run for run in runs if run.scene is not None and progress(run).state == "finished"]
    if not known:
        raise NereusError("no simulated run is finished; carry them out: nereus experiment run NAME")
    chosen = chosen_share(known, arguments.share, arguments.seed)
    work = partial(_again, provenance=provenance_of(_command(arguments)))
    differing = 0
    for run, told in carried_out(chosen, arguments.jobs, work):
        print(f"{run.run_id}: {told or 'the same bytes'}", flush=True)
        differing += bool(told)
    print(f"{len(chosen)} of {len(known)} runs done again: {differing or 'none'} differ{'s' * (differing == 1)}")
    return FAILED if differing else DONE


def _again(run: Run, provenance: Provenance) -> str:
    from nereus.cli.experiment_jobs import differences

    return differences(run, folder_of(run), provenance)


def _run_one(head: str, run: Run, trainer: Trainer, command: str) -> int:
    aside = _set_aside(folder_of(run).path)
    line = f"{head}{f' (what was interrupted is now {aside})' if aside else ''}"
    provenance = provenance_of(command)
    if run.scene is not None:
        from nereus.cli.simulated import simulate_run  # numpy, scipy and simpy

        print(f"{line}: {simulate_run(run, RUNS / run.experiment, provenance)}", flush=True)
        return DONE
    print(f"\n{line}", flush=True)
    assert trainer is not None, "a real run needs a trainer"

    def job(config: Config, folder: RunFolder, display: Display, stop: StopSignal, rollouts: Path | None) -> None:
        write_record(folder.path, run, provenance)
        try:
            trainer.run_job(config, folder, display, stop, rollouts)
        except ConfigError:
            if not folder.events.exists():  # nothing happened: `carry_out` takes the empty folder away
                discard_record(folder.path)
            raise

    try:
        return trainer.carry_out(run.config(str(folder_of(run).path.parent)), None, job)
    except NereusError:
        print(f"{run.run_id} failed; the same command starts it again and goes on", file=sys.stderr)
        raise


def _collect(name: str, runs: Sequence[Run], arguments: Namespace) -> int:
    from nereus.report.table import collected, source_of, write_table  # polars: a fifth of a second

    finished = [run for run in runs if progress(run).state == "finished"]
    for run in runs:
        if run not in finished:
            print(f"left out: {run.run_id} is {progress(run).state}", file=sys.stderr)
    if not finished:
        raise NereusError(f"no run of {name} is finished; carry them out: nereus experiment run {name}")
    pairs = [(run, folder_of(run).path) for run in finished]
    table = collected(pairs, arguments.metric)
    for pattern in arguments.metric or ():
        if not any(fnmatchcase(name, pattern) for name in table["metric"].unique()):
            raise ConfigError("--metric", pattern, "expected a pattern that a metric of these runs matches")
    path = Path(arguments.out) if arguments.out else RUNS / name / TABLE
    source = source_of(pairs, command=_command(arguments), sample=arguments.sample)
    write_table(table, source, path)
    if len({(each.commit, each.machine) for each in source.runs.values()}) > 1:
        print("note: these runs were made by different commits or on different machines", file=sys.stderr)
    print(f"{path}: {len(finished)} of {len(runs)} runs, {table.height:,} rows")
    return DONE


def _command(arguments: Namespace) -> str:
    """The command line, for the record; where its result was written is no part of it."""
    words = ["nereus", "experiment", arguments.action, *arguments.words]
    words += ["--jobs", str(arguments.jobs)] if arguments.jobs > 1 else []
    words += [word for metric in arguments.metric or () for word in ("--metric", metric)]
    words += [word for only in arguments.only or () for word in ("--only", only)]
    return shlex.join([*words, "--sample"] if arguments.sample else words)


def _set_aside(path: Path) -> Path | None:
    """Renames what is at `path`, if anything, and returns its new place."""
    if not path.exists():
        return None
    for number in count(1):
        aside = path.with_name(f"{path.name}-interrupted-{number}")
        if not aside.exists():
            return path.rename(aside)
    raise AssertionError("count() does not end")


def _resumed_elsewhere(folder: RunFolder) -> bool:
    """Whether a process writes the run, perhaps `nereus resume`, which has no lock of this command."""
    return folder.is_run() and is_being_written(folder.events)


@contextmanager
def _lock(run: Run, kind: int) -> Iterator[bool]:
    """Holds the lock of `run`, exclusive (LOCK_EX) to carry it out, and says whether that was to be had."""
    path = folder_of(run).path.parent / ".locks" / run.run_id
    if kind == fcntl.LOCK_SH and not path.exists():
        yield True  # looking leaves no trace
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield free


def _names() -> list[str]:
    return sorted(path.stem for path in EXPERIMENTS.glob("*.py") if not path.stem.startswith("_"))


def _known() -> str:
    return ", ".join(_names()) or f"none in {EXPERIMENTS.resolve()}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
