"""A submission: what its job does, or each element of its array, and the folder in which all of it lies.

submission.json is written before the job exists, and once more with the job's number; everything else there is read by
people, but `run`, which leads to the run's folder, and `exit_code`, the job's last word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path

from nereus.errors import ConfigError, JournalError

SUBMISSIONS = "submissions"
RECORD, CONFIG, RUN, LINK, OUTPUT, EXIT = "submission.json", "config.yaml", "run.json", "run", "job.out", "exit_code"
SCRIPT, THEN_SCRIPT, THEN_OUTPUT, THEN_EXIT = "job.sbatch", "then.sbatch", "then.out", "then.exit_code"
KINDS = ("nereus", "verl", "openrlhf", "sim")
"""Who carries a run out: nereus or another system on the allocation, or the simulated world."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one job, or one element of an array, carries out.

    `words` are those of the `nereus` command, or of verl and openrlhf the whole command line. `run` is the run's
    folder where that is known before ("" else).
    """

    name: str
    words: tuple[str, ...]
    run: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What was submitted, from which folder; `job` and `then_job` are Slurm's numbers, "" before it has them.

    `experiment`, `overrides` and `only` are what the user said of an experiment, for its table.
    """

    name: str
    kind: str
    parts: tuple[Part, ...]
    where: str
    experiment: str = ""
    overrides: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    job: str = ""
    then_job: str = ""
    submitted_at_seconds: float = 0.0

    @property
    def is_array(self) -> bool:
        """Whether its parts are elements of an array."""
        return len(self.parts) > 1

    @property
    def jobs(self) -> tuple[str, ...]:
        """Slurm's name of each part."""
        return tuple(f"{self.job}_{index}" for index in range(len(self.parts))) if self.is_array else (self.job,)

    def place(self, folder: Path, index: int) -> Path:
        """The folder of a part within that of the submission."""
        return folder / str(index) if self.is_array else folder


def new_folder(parent: Path, name: str) -> Path:
    """A new folder `name`, or name-2, name-3, ..., among the submissions of `parent`; absolute. Raises ConfigError."""
    folder = (parent / SUBMISSIONS).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = next(path for n in count(1) if not (path := folder / (f"{name}-{n}" if n > 1 else name)).exists())
        made.mkdir()
    except OSError as error:
        raise ConfigError("run.folder", str(folder), f"expected a folder to write in: {error.strerror}") from error
    return made


def write_submission(folder: Path, submission: Submission) -> None:
    """Writes submission.json, whole or not at all."""
    draft = folder / f".{RECORD}"
    draft.write_text(json.dumps(asdict(submission), indent=1) + "\n", encoding="utf-8")
    draft.replace(folder / RECORD)


def read_submission(folder: Path) -> Submission:
    """The submission in `folder`. Raises JournalError."""
    path = folder / RECORD
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        parts = tuple(Part(**{**part, "words": tuple(part["words"])}) for part in raw.pop("parts"))
        lists = {key: tuple(raw.pop(key)) for key in ("overrides", "only")}
        return Submission(parts=parts, **lists, **raw)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JournalError(f"{path}: is no submission: {error}") from error


def submissions(runs: Path) -> list[Path]:
    """The folders of all submissions below `runs`, oldest first."""
    found = [*runs.glob(f"{SUBMISSIONS}/*/{RECORD}"), *runs.glob(f"*/{SUBMISSIONS}/*/{RECORD}")]
    return [path.parent for path in sorted(found, key=lambda path: path.stat().st_ctime)]


def matching(folders: Sequence[Path], known: Mapping[Path, Submission], word: str) -> list[Path]:
    """Those that `word` means: the folder's name, or the number of the job or of the one after it."""
    return [f for f in folders if word in (f.name, known[f].job, known[f].then_job)]


def with_jobs(submission: Submission, job: str, then_job: str, at_seconds: float) -> Submission:
    """The submission with Slurm's numbers."""
    return replace(submission, job=job, then_job=then_job, submitted_at_seconds=at_seconds)
