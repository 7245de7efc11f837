"""A log of verl as our rows: `python -m baselines.verl.metrics LOG [--out metrics.jsonl]`.

LOG is its console log, file log (`trainer.logger=[console,file]`) or export from W&B. Names and versions stand in
nereus/report/peers/names.py, which `nereus compare` reads logs by too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from baselines.logs import convert, read_log
from nereus.report.peers.names import VERL
from nereus.report.peers.naming import PeerLog

VERSION = VERL.version


def read(path: Path) -> PeerLog:
    """The rows of a log of verl, under our names. Raises ConfigError where `path` is none, JournalError where it is damaged."""
    return read_log(path, VERL)


if __name__ == "__main__":
    sys.exit(convert(VERL, sys.argv[1:]))
