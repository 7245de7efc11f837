"""`nereus explain RUN`: what a run's controller knew, weighed and decided, and what became of it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from nereus.errors import ConfigError
from nereus.runtime.journal import RunFolder, read_journal


def add_explain(parser: ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("run", metavar="RUN", help="a run folder; the run may be under way")
    parser.add_argument("--html", metavar="FILE", help="write it as a page that stands by itself")
    parser.add_argument("--step", type=int, metavar="N", help="only what was decided before step N")


def explain(arguments: Namespace) -> int:
    """Prints the explanation; the exit code."""
    from nereus.report.explain import explained, render  # numpy, only when there is something to do
    from nereus.report.explain_page import page

    folder = RunFolder(path=Path(arguments.run))
    if not folder.is_run():
        raise ConfigError("RUN", arguments.run, "expected a run folder (one with config.yaml and events.jsonl)")
    records = read_journal(folder.events)
    explanation = explained(records)
    if arguments.html:
        target = Path(arguments.html)
        try:
            target.write_text(page(explanation, records), encoding="utf-8")
        except OSError as error:
            raise ConfigError("--html", arguments.html, f"a file that can be written: {error.strerror}") from error
        print(f"written to {arguments.html}")
    else:
        print(render(explanation, arguments.step), end="")
    return 0
