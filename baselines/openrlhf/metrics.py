"""A log of OpenRLHF as our rows: `python -m baselines.openrlhf.metrics LOG [--out metrics.jsonl]`.

LOG is its console log or export from W&B, from 0.10 on. Names and versions stand in
nereus/report/peers/names.py, which `nereus compare` reads logs by too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from baselines.logs import convert, read_log
from nereus.report.peers.names import OPENRLHF
from nereus.report.peers.naming import PeerLog

VERSION = OPENRLHF.version


def read(path: Path) -> PeerLog:
    """The rows of a log of OpenRLHF, under our names. Raises ConfigError where `path` is none, JournalError where it is damaged."""
    return read_log(path, OPENRLHF)


if __name__ == "__main__":
    sys.exit(convert(OPENRLHF, sys.argv[1:]))
