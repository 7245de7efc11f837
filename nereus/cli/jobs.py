"""`nereus jobs status | cancel | collect [NAME]`: what became of submissions, as Slurm and their run folders say."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from nereus.cli import slurm
from nereus.cli.slurm import Standing
from nereus.cli.submission import (
    EXIT,
    LINK,
    OUTPUT,
    THEN_EXIT,
    Submission,
    matching,
    read_submission,
    submissions,
)
from nereus.errors import ConfigError, NereusError
from nereus.runtime.journal import RunFolder, is_being_written, read_journal

RUNS = "runs"
ACTIONS = ("status", "cancel", "collect")
DONE = 0
EXITS = {0: "done", 1: "failed", 2: "wrong configuration", 130: "stopped"}
GONE = "unknown to Slurm"


def add_jobs(parser: ArgumentParser) -> None:
    """The arguments of `nereus jobs`."""
    parser.usage = "nereus jobs status | cancel | collect [NAME] [--runs FOLDER] [--now]"
    add = parser.add_argument
    add("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    add("name", nargs="?", metavar="NAME", help="a submission: its folder, or that's last part, or a job's number")
    add("--runs", default=RUNS, metavar="FOLDER", help=f"where runs and their submissions are (default {RUNS})")
    add("--now", action="store_true", help="cancel: at once; else a run of nereus saves and stops after its step")


def jobs(arguments: Namespace) -> int:
    """Carries the action out and returns the exit code."""
    known = _chosen(arguments.name, Path(arguments.runs))
    if arguments.action == "status":
        return _status(known)
    if arguments.name is None:
        raise ConfigError("NAME", None, f"expected a submission: {', '.join(f.name for f in known) or 'there is none'}")
    folder, submission = next(iter(known.items()))
    if arguments.action == "cancel":
        return _cancel(submission, at_once=arguments.now)
    return _collect(folder, submission)


def _chosen(word: str | None, runs: Path) -> dict[Path, Submission]:
    """The submissions that `word` names: exactly one, or all where it is None. Raises ConfigError."""
    if word is not None and Path(word).is_dir():
        return {Path(word): read_submission(Path(word))}
    known = {folder: read_submission(folder) for folder in submissions(runs)}
    known = {folder: submission for folder, submission in known.items() if submission.job}  # else: of a dry run
    if word is None:
        return known
    found = matching(list(known), known, word)
    if len(found) != 1:
        there = ", ".join(map(str, found)) or ", ".join(folder.name for folder in known) or f"none below {runs}"
        raise ConfigError("NAME", word, f"expected one submission: {there}")
    return {found[0]: known[found[0]]}


def _status(known: Mapping[Path, Submission]) -> int:
    if not known:
        print("no submissions")
    told = slurm.standings(job for each in known.values() for job in (each.job, each.then_job) if job)
    for folder, submission in known.items():
        print("\n".join(status_lines(folder, submission, told)))
    return DONE


def status_lines(folder: Path, submission: Submission, told: Mapping[str, Standing]) -> list[str]:
    """How a submission stands, in lines; of an array the parts are counted, and those named that have not got on."""
    standings = [_part_text(folder, submission, index, told) for index in range(len(submission.parts))]
    if not submission.is_array:
        lines = [f"{folder.name}: job {submission.job} {standings[0]}"]
        if run := _run_text(folder / LINK):
            lines.append(f"  run       {run}")
    else:
        counts = ", ".join(f"{count} {state}" for state, count in Counter(standings).most_common())
        lines = [f"{folder.name}: job {submission.job}, {len(standings)} runs: {counts}"]
        failed = [
            f"  failed    {part.name}: {submission.place(folder, index) / OUTPUT}"
            for index, (part, text) in enumerate(zip(submission.parts, standings, strict=True))
            if text.startswith(("FAILED", "failed", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY"))
        ]
        lines += failed
    if submission.then_job:
        then = told.get(submission.then_job)
        lines.append(f"  then      job {submission.then_job} {then or _exit_text(folder / THEN_EXIT)}")
    return lines


def _part_text(folder: Path, submission: Submission, index: int, told: Mapping[str, Standing]) -> str:
    found = told.get(submission.jobs[index])
    exit_text = _exit_text(submission.place(folder, index) / EXIT)
    if found is None:
        return exit_text
    return f"{found}, {exit_text}" if found.state == "FAILED" and exit_text != GONE else str(found)


def _exit_text(path: Path) -> str:
    """What the job's last word meant, where Slurm remembers nothing of it."""
    try:
        code = int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return GONE
    return EXITS.get(code, f"failed with exit code {code}")


def _run_text(link: Path) -> str:
    """How far the run is to which `link` leads; "" before there is one."""
    folder = RunFolder(path=link.resolve())
    if not folder.is_run():
        return ""
    from nereus.report.status import status_of

    found = status_of(read_journal(folder.events), writing=is_being_written(folder.events))
    saved = "" if found.checkpoint_step is None else f", checkpoint of step {found.checkpoint_step}"
    return f"{folder.path}: step {found.step} of {found.steps}, {found.state}{saved}"


def _cancel(submission: Submission, *, at_once: bool) -> int:
    told = slurm.standings(filter(None, (submission.job, submission.then_job)))
    active = [job for job in (*submission.jobs, submission.then_job) if job in told and not told[job].ended]
    if not active:
        print(f"job {submission.job}: nothing is left to cancel")
        return DONE
    gently, plainly = to_cancel(submission, active, told, at_once=at_once)
    if plainly:  # those that wait first, so that none of them starts in place of one that stops
        slurm.cancel(*plainly)
        print(f"cancelled: {', '.join(plainly)}")
    if gently:
        slurm.cancel("--batch", "--signal=TERM", *gently)
        print(f"told to save and stop after the step: {', '.join(gently)}")
    return DONE


def to_cancel(
    submission: Submission, active: Sequence[str], told: Mapping[str, Standing], *, at_once: bool
) -> tuple[list[str], list[str]]:
    """The jobs that are told to stop, and those that are ended at once: all but running runs of nereus."""
    gently = [job for job in active if told[job].state == "RUNNING" and job != submission.then_job]
    if at_once or submission.kind != "nereus":
        gently = []
    return gently, [job for job in active if job not in gently]


def _collect(folder: Path, submission: Submission) -> int:
    """The table of an experiment's runs, or the summary of a run; what another system printed is named."""
    told = slurm.standings([submission.job])
    running = [job for job in submission.jobs if job in told and not told[job].ended]
    if running:
        print(f"note: {len(running)} of {len(submission.jobs)} jobs have not ended", file=sys.stderr)
    if submission.kind in ("verl", "openrlhf"):
        places = [submission.place(folder, index) / OUTPUT for index in range(len(submission.parts))]
        print("\n".join(f"{submission.kind}'s log: {place}" for place in places))
        return DONE
    from nereus.cli.main import main

    words = collect_words(folder, submission)
    print(f"nereus {shlex.join(words)}", flush=True)
    return main(words)


def collect_words(folder: Path, submission: Submission) -> list[str]:
    """The words of the `nereus` command that shows what a submission made. NereusError where nothing has begun."""
    if submission.experiment:
        only = [word for each in submission.only for word in ("--only", each)]
        return ["experiment", "collect", submission.experiment, *only, *submission.overrides]
    run = (folder / LINK).resolve()
    if not RunFolder(path=run).is_run():
        raise NereusError(f"{folder}: its run has not begun; see {folder / OUTPUT}")
    return ["report", str(run)]
