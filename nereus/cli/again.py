"""`nereus simulate RUN`: a real run played again in the simulated world, beside what it took."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nereus.errors import ConfigError
from nereus.runtime.journal import RunFolder, read_journal
from nereus.sim.again import played_again, real_run


class _Nowhere:
    """A journal and metrics that nobody reads."""

    def append(self, kind: str, *, sync: bool = False, at_seconds: float | None = None, **fields: object) -> int:
        """Writes nothing."""
        del kind, sync, at_seconds, fields
        return 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes nothing."""
        del step, metrics


def played_text(path: Path, learnt_steps: int | None = None) -> str:
    """What a run took and what the simulated world says of it; with the coefficients known before each step, or after some.

    ConfigError for a folder that is no run, JournalError for a run that cannot be played again.
    """
    if not RunFolder(path=path).events.is_file():
        raise ConfigError("RUN", str(path), "expected a run folder with events.jsonl")
    run = real_run(read_journal(RunFolder(path=path).events), learnt_steps)
    world = played_again(run, _Nowhere(), _Nowhere())
    taken = sum(float(done["pause_seconds"]) for done in world.transitions)
    rows = (
        ("steps", run.step_seconds, sum(world.step_seconds)),
        ("pauses of changes", run.pause_seconds, taken),
        ("first step to last", run.measured_seconds, world.env.now),
    )
    learnt = "before each step" if learnt_steps is None else f"after {learnt_steps} steps"
    lines = [
        f"{path}: {len(run.batches)} steps, {len(run.changes)} changes, with the coefficients known {learnt}",
        f"{'':<20} {'measured s':>11} {'simulated s':>12} {'error':>8}",
    ]
    for name, measured, simulated in rows:
        error = f"{simulated / measured - 1:+.1%}" if measured else ""
        lines.append(f"{name:<20} {measured:11.2f} {simulated:12.2f} {error:>8}".rstrip())
    return "\n".join(lines) + "\n"
