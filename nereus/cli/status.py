"""`nereus status RUN`: how a run stands, while it runs or after."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from nereus.errors import ConfigError
from nereus.runtime.journal import RunFolder, is_being_written, read_journal


def add_status(parser: ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument("run", metavar="RUN", help="a run folder; the run may be under way")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def status(arguments: Namespace) -> int:
    """Prints how the run stands; the exit code."""
    from nereus.report.status import render, status_of  # a second of imports, only when there is something to do

    folder = RunFolder(path=Path(arguments.run))
    if not folder.is_run():
        raise ConfigError("RUN", arguments.run, "expected a run folder (one with config.yaml and events.jsonl)")
    found = status_of(read_journal(folder.events), writing=is_being_written(folder.events))
    now_seconds = time.time()
    print(json.dumps(found.as_json(now_seconds)) if arguments.json else render(found, now_seconds).rstrip("\n"))
    return 0
