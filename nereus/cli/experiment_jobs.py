"""Simulated runs of an experiment in processes of their own: several at a time, or again to see whether they are the same.

A simulated run depends on its Run alone, so it may be carried out beside others, and again anywhere with the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from nereus.errors import ConfigError
from nereus.experiment import Run
from nereus.report.record import Provenance
from nereus.runtime.journal import RunFolder

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS")


def simulate_here(run: Run, parent: Path, provenance: Provenance) -> str:
    """Simulates `run` in a new folder of `parent`, made now; what it came to."""
    from nereus.cli.simulated import simulate_run  # numpy, scipy and simpy

    return simulate_run(run, parent, replace(provenance, date=datetime.now(UTC).isoformat(timespec="seconds")))


@contextmanager
def pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """So many fresh processes with a thread each. Leaving it by an error drops what has not begun."""
    known = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    made = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        yield made
    finally:
        made.shutdown(wait=True, cancel_futures=True)
        for name, value in known.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def carried_out(runs: Sequence[Run], jobs: int, work: Callable[[Run], str]) -> Iterator[tuple[Run, str]]:
    """Each run and what `work` answered, as they end; `work` can be pickled. An error of one ends the rest."""
    with pool(jobs) as processes:
        asked: dict[Future[str], Run] = {processes.submit(work, run): run for run in runs}
        for future in as_completed(asked):
            yield asked[future], future.result()


def chosen_share(runs: Sequence[Run], share: float, seed: int) -> tuple[Run, ...]:
    """A share of the runs, rounded up: those whose hash with the seed is least. ConfigError for a share out of (0, 1]."""
    if not 0 < share <= 1:
        raise ConfigError("--share", share, "expected more than 0, at most 1")
    order = sorted(runs, key=lambda run: sha256(f"{seed} {run.run_id}".encode()).digest())
    return tuple(order[: ceil(share * len(order))])


def differences(run: Run, folder: RunFolder, provenance: Provenance) -> str:
    """Simulates `run` again, elsewhere, and says in which file the bytes differ from those in `folder`; "" for none.

    Journal and metrics are compared whole: a simulated run writes no wall-clock time into them.
    """
    with TemporaryDirectory() as place:
        simulate_here(run, Path(place), provenance)
        again = RunFolder(path=Path(place) / run.run_id)
        for name in ("events", "metrics"):
            one, other = (_bytes(getattr(each, name)) for each in (folder, again))
            if one != other:
                return f"{getattr(folder, name)} differs from line {_first_difference(one, other)} on"
    return ""


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _first_difference(one: bytes, other: bytes) -> int:
    lines = zip(one.splitlines(), other.splitlines(), strict=False)
    alike = next((number for number, (a, b) in enumerate(lines) if a != b), None)
    return 1 + (min(one.count(b"\n"), other.count(b"\n")) if alike is None else alike)
