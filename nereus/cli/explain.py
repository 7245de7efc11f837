"""`nereus explain RUN`: what a run's controller knew, weighed and decided, and what became of it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nereus.errors import ConfigError
from nereus.report.explain import explained, render
from nereus.runtime.journal import RunFolder, read_journal


def add_explain(parser: ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("run", metavar="RUN", help="a run folder; the run may be under way")
    parser.add_argument("--step", type=int, metavar="N", help="only what was decided before step N")


def explain(arguments: Namespace) -> int:
    """Prints the explanation; the exit code."""
    folder = RunFolder(path=Path(arguments.run))
    if not folder.is_run():
        raise ConfigError("RUN", arguments.run, "expected a run folder (one with config.yaml and events.jsonl)")
    print(render(explained(read_journal(folder.events)), arguments.step), end="")
    return 0
