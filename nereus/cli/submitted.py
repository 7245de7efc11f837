"""What a job of `nereus submit` runs in its allocation: `python -m nereus.cli.submitted FOLDER`, from the batch script.

It starts the part of the submission that the job, or the element of its array, stands for; in a job that was requeued the
run goes on from its newest checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nereus.cli.submission import LINK, Part, Submission, read_submission
from nereus.errors import NereusError
from nereus.runtime.journal import RunFolder


def words_for(part: Part, link: Path, *, requeued: bool) -> tuple[tuple[str, ...], str]:
    """The words of the `nereus` command that carries `part` out now, and what is to be said of it.

    `link` leads to the run's folder, if there is one yet. A requeued run without a checkpoint begins anew.
    """
    first = (*part.words, "--link", str(link)) if part.words[0] == "train" else part.words
    if not requeued or not link.exists():
        return first, ""
    from nereus.runtime.checkpoints import LATEST  # torch: seconds

    run = RunFolder(path=link.resolve())
    if (run.checkpoints / LATEST).is_file():
        return ("resume", str(run.path)), f"requeued: {run.path} goes on"
    return first, f"requeued: {run.path} has no checkpoint yet, so the run begins anew"


def carry_out(folder: Path, submission: Submission, index: int, *, requeued: bool) -> int:
    """Does what the part with number `index` says and returns its exit code; another system's program takes over."""
    part, place = submission.parts[index], submission.place(folder, index)
    if submission.kind not in ("nereus", "sim"):
        _become(part.words)
    link = place / LINK
    if part.run and not link.is_symlink():
        link.symlink_to(Path(part.run).absolute())
    words, said = words_for(part, link, requeued=requeued)
    if said:
        print(said, flush=True)
    from nereus.cli.main import main  # all commands

    return main(words)


def _become(words: Sequence[str]) -> None:
    try:
        os.execvp(words[0], list(words))  # noqa: S606 - the program is the submission's
    except OSError as error:
        raise NereusError(f"{words[0]} does not start: {error.strerror}") from error


def main(argv: Sequence[str], environment: os._Environ[str]) -> int:
    """The exit code of the part that this process is."""
    folder = Path(argv[0])
    index = int(environment.get("SLURM_ARRAY_TASK_ID", "0"))
    requeued = environment.get("SLURM_RESTART_COUNT", "0") != "0"
    try:
        return carry_out(folder, read_submission(folder), index, requeued=requeued)
    except NereusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
