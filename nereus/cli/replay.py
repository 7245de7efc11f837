"""`nereus replay RUN`: makes every decision of a run's controller again from what it was told, and compares."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path

from nereus.errors import ConfigError
from nereus.runtime.journal import RunFolder, read_journal

SAME, DIFFERENT = 0, 1


def add_replay(parser: ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("run", metavar="RUN", help="a run folder")


def replay(arguments: Namespace) -> int:
    """The exit code: 1 with the first difference, 0 when every decision is equal or none was recorded."""
    from nereus.report.replay import first_difference, made_again, recorded  # numpy, only when there is something to do

    folder = RunFolder(path=Path(arguments.run))
    if not folder.is_run():
        raise ConfigError("RUN", arguments.run, "expected a run folder (one with config.yaml and events.jsonl)")
    records = read_journal(folder.events)
    difference = first_difference(records)
    if difference is not None and recorded(records):
        print(f"a decision is another: {difference}")
        return DIFFERENT
    counts = Counter(made.kind for made in made_again(records))
    equal = "equal to the recorded ones" if recorded(records) else "none is recorded to compare with"
    print(f"{counts['commanded']} commands and {counts['decision']} decisions made again: {equal}")
    return SAME
