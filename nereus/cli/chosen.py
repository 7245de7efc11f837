"""What `nereus submit` is to submit: a configuration, one run of an experiment, or the runs of one, as parts of a submission."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nereus.cli.experiments import EXPERIMENTS, chosen_runs, folder_of, load_experiment, overridden, progress
from nereus.cli.load import dump_config, load_config
from nereus.cli.submission import CONFIG, KINDS, RUN, Part, Submission
from nereus.cli.systems import command_line, run_of_system, write_prompts
from nereus.config import Config
from nereus.errors import ConfigError
from nereus.experiment import Run
from nereus.runtime.metrics import check_mirror
from nereus.validate import validate

WHAT = "CONFIG_OR_EXPERIMENT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What runs: `configs`, one a part, and their Runs, if they are an experiment's or another system's.

    `parent` is the folder below which the submission gets its folder.
    """

    kind: str
    name: str
    parent: Path
    configs: tuple[Config, ...]
    runs: tuple[Run, ...] = ()
    experiment: str = ""
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


def chosen(arguments: Namespace) -> Chosen:
    """What the words name. Raises ConfigError."""
    word, *overrides = arguments.words
    if Path(word).is_file() or Path(word).suffix in (".yaml", ".yml"):
        if arguments.only:
            raise ConfigError("--only", arguments.only[0], "expected an experiment with it, not a configuration")
        return _of_config(load_config(Path(word), list(overrides)), arguments.system or "nereus")
    if (EXPERIMENTS / f"{word}.py").is_file():
        there = chosen_runs(word, overrides, arguments.only)
        runs = _of_kind(there, arguments.system)
        only = tuple(arguments.only or ()) if len(runs) == len(there) else tuple(run.run_id for run in runs)
        return _of_runs(runs, word, overrides, only)
    run = _named(word)
    run = overridden(run, overrides)
    if (state := progress(run).state) in ("finished", "running"):
        raise ConfigError(WHAT, word, f"expected a run that is not {state}: see {folder_of(run).path}")
    return _of_runs(_of_kind((run,), arguments.system), run.run_id, overrides, (run.run_id,))


def _named(word: str) -> Run:
    """The run whose id begins with `word`."""
    names = sorted(path.stem for path in EXPERIMENTS.glob("*.py") if not path.stem.startswith("_"))
    runs = [run for name in names for run in load_experiment(name)]
    found = [run for run in runs if run.run_id.startswith(word)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(WHAT, word, f"expected the beginning of one run's id: {', '.join(r.run_id for r in found)}")
    expected = f"expected a configuration file, an experiment ({', '.join(names) or 'none here'}) or the beginning of a run's id"
    raise ConfigError(WHAT, word, expected)


def kind_of(run: Run) -> str:
    """Who carries it out."""
    return run.system if run.scene is None else "sim"


def _of_kind(runs: Sequence[Run], kind: str | None) -> tuple[Run, ...]:
    """The runs of a kind; where none is stated there must be one kind only."""
    kinds = [each for each in KINDS if any(kind_of(run) == each for run in runs)]
    if kind is None and len(kinds) > 1:
        raise ConfigError("--system", None, f"expected one of {', '.join(kinds)}, whose runs these are")
    if kind is not None and kind not in kinds:
        raise ConfigError("--system", kind, f"expected {' or '.join(kinds)}, whose runs these are")
    return tuple(run for run in runs if kind_of(run) == (kind or kinds[0]))


def _of_config(config: Config, kind: str) -> Chosen:
    if kind == "sim":
        expected = "expected an experiment whose runs have a Scene; a configuration is simulated by nereus simulate"
        raise ConfigError("--system", kind, expected)
    runs = () if kind == "nereus" else (run_of_system(config, kind),)  # type: ignore[arg-type]
    return Chosen(kind=kind, name=config.run.name, parent=Path(config.run.folder), configs=(config,), runs=runs)


def _of_runs(runs: Sequence[Run], name: str, overrides: Sequence[str], only: tuple[str, ...]) -> Chosen:
    """The runs that are still to do."""
    left = tuple(run for run in runs if progress(run).state not in ("finished", "running"))
    experiment = runs[0].experiment
    if not left:
        raise ConfigError(
            WHAT, name, f"expected runs to do: all are finished or running, see nereus experiment status {experiment}"
        )
    if len({run.fleet.slots for run in left}) > 1 and kind_of(left[0]) != "sim":
        slots = ", ".join(f"{run.variant} {run.fleet.slots}" for run in left)
        raise ConfigError("--only", list(only), f"expected runs with equal fleet.slots, elements of one array: {slots}")
    parent = folder_of(left[0]).path.parent
    return Chosen(
        kind=kind_of(left[0]),
        name=name,
        parent=parent,
        configs=tuple(run.config(str(parent)) for run in left),
        runs=left,
        experiment=experiment,
        overrides=tuple(overrides),
        only=only,
    )


def check(given: Chosen) -> None:
    """Everything that can be judged of the runs before anything starts. Raises ConfigError."""
    for config in given.configs:
        validate(config)
        if given.kind == "nereus":
            check_mirror(config)
            from nereus.runtime.run import check_job  # seconds, and much memory

            check_job(config, None, in_cluster=True)


def submission_of(given: Chosen, folder: Path, python: str) -> Submission:
    """The submission in `folder`."""
    made = Submission(
        name=given.name,
        kind=given.kind,
        parts=tuple(Part(name=config.run.name, words=()) for config in given.configs),
        where=str(Path.cwd()),
        experiment=given.experiment,
        overrides=given.overrides,
        only=given.only,
    )
    parts = [_part(given, index, made.place(folder, index), python) for index in range(len(given.configs))]
    return replace(made, parts=tuple(parts))


def _part(given: Chosen, index: int, place: Path, python: str) -> Part:
    if given.kind in ("verl", "openrlhf"):
        run = given.runs[index]
        return Part(name=run.run_id, words=command_line(run, place / "prompts", python))
    if not given.runs:
        return Part(name=given.name, words=("train", str(place / CONFIG)))
    run = given.runs[index]
    words = ("experiment", "run", run.experiment, "--only", run.run_id, *given.overrides)
    return Part(name=run.run_id, words=words, run=str(folder_of(run).path))


def write_parts(given: Chosen, submission: Submission, folder: Path) -> None:
    """The resolved configuration of each part, its Run, and another system's prompts."""
    for index, config in enumerate(given.configs):
        place = submission.place(folder, index)
        place.mkdir(exist_ok=True)
        (place / CONFIG).write_text(dump_config(config), encoding="utf-8")
        if given.runs:
            (place / RUN).write_text(json.dumps(asdict(given.runs[index]), indent=1) + "\n", encoding="utf-8")
        if given.kind in ("verl", "openrlhf"):
            write_prompts(given.runs[index], place / "prompts")
