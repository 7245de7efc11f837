"""A baseline's log as a `metrics.jsonl`: what the metrics.py of each does."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from nereus.errors import ConfigError
from nereus.report.peers.naming import Naming, PeerLog
from nereus.report.peers.reading import placed_as_seen, read_peer_log
from nereus.report.wandb_folder import find_wandb_file, read_wandb


def read_log(path: Path, naming: Naming) -> PeerLog:
    """The rows of a log, an export or an offline W&B folder. Raises ConfigError where `path` is none of that system."""
    if not path.exists():
        raise ConfigError("LOG", str(path), "there is no such file or folder")
    file = find_wandb_file(path)
    log = placed_as_seen(file, read_wandb(file).rows) if file else read_peer_log(path) if path.is_file() else None
    if log is None or log.system != naming.system:
        raise ConfigError("LOG", str(path), f"expected a log of {naming.system}")
    return log


def convert(naming: Naming, words: Sequence[str]) -> int:
    """Writes the rows of a log, and says which of its metrics are in none; the exit code."""
    parser = ArgumentParser(description=f"Read a log of {naming.system} into our rows.")
    parser.add_argument("log", metavar="LOG")
    parser.add_argument("--out", default="metrics.jsonl", metavar="FILE")
    taken = parser.parse_args(words)
    log = read_log(Path(taken.log), naming)
    lines = (
        json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()}) for row in log.rows
    )
    Path(taken.out).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{taken.out}: {len(log.rows)} steps of {log.system}")  # noqa: T201 - the command prints
    for name, why in log.unplaced.items():
        print(f"not in it: {name} ({why})")  # noqa: T201
    for name in log.unknown:
        print(f"not in it: {name} (not known of {log.system} {log.version})")  # noqa: T201
    return 0
