"""`nereus submit`: runs as Slurm jobs, one job or an array of them, and a job after them that makes table and figure.

Everything of a submission lies in a folder of its own below `submissions`: the resolved configurations, the scripts (from
scripts/slurm), the jobs' numbers and, once they run, their output and Ray's.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from nereus.cli import slurm
from nereus.cli.batch import Ending, run_script, then_script
from nereus.cli.chosen import WHAT, Chosen, check, chosen, submission_of, write_parts
from nereus.cli.slurm import Request
from nereus.cli.submission import (
    CONFIG,
    KINDS,
    OUTPUT,
    SCRIPT,
    THEN_OUTPUT,
    THEN_SCRIPT,
    Submission,
    new_folder,
    with_jobs,
    write_submission,
)
from nereus.cli.systems import nodes_of
from nereus.errors import ConfigError, NereusError

NOTICE_SECONDS = 90  # before the time limit: a step, the checkpoint and the stop
MOST_NOTICE_SECONDS = 65535  # Slurm's
DONE = 0


def add_submit(parser: ArgumentParser) -> None:
    """The arguments of `nereus submit`."""
    parser.usage = (
        "nereus submit CONFIG|EXPERIMENT|RUN [--system S] [--only RUN] [--nodes N] [--slots-per-node S] "
        "[--gpus-per-node G] [--partition P] [--time T] [--notice-seconds N] [--no-requeue] [--then COMMAND] "
        "[--python FILE] [--dry-run] [key=value ...]"
    )
    add = parser.add_argument
    help_run = "a YAML file, an experiment (an array of its runs), or the beginning of a run's id; then overrides"
    add("words", nargs="+", metavar=WHAT, help=help_run)
    add("--system", choices=KINDS, metavar="S", help=f"whose runs: {', '.join(KINDS)} (simulated ones of any system)")
    add(
        "--only", metavar="RUN", action="append", help="of an experiment: the runs with this id or variant (repeatable)"
    )
    add("--nodes", type=int, metavar="N", help="nodes of a job (default 1; of verl and openrlhf as the run says)")
    add("--slots-per-node", type=int, metavar="S", help="default: fleet.slots spread over the nodes")
    add("--gpus-per-node", type=int, metavar="G", help="at least a GPU for each slot, or none (the default)")
    add("--partition", default="", metavar="P", help="default: Slurm's")
    add("--time", default="", metavar="T", help="limit, such as 2:00:00; the run saves and stops before it")
    help_notice = f"so long before the limit (default {NOTICE_SECONDS}): more than a step and a checkpoint take"
    add("--notice-seconds", type=int, default=NOTICE_SECONDS, metavar="N", help=help_notice)
    add("--no-requeue", action="store_true", help="do not go on in another allocation after the limit or a lost node")
    help_then = 'a shell command for a job after all runs, "" for none; default, of an experiment: its table and figure'
    add("--then", metavar="COMMAND", help=help_then)
    add("--python", default="python", metavar="FILE", help="of verl's or openrlhf's environment (default: python)")
    add("--dry-run", action="store_true", help="write and print the scripts, submit nothing")


def submit(arguments: Namespace) -> int:
    """Checks the runs, writes the submission and gives it to Slurm. Raises ConfigError, or NereusError from Slurm."""
    given = chosen(arguments)
    request = request_of(given, arguments)
    check(given)
    python = sys.executable if given.kind in ("nereus", "sim") else shutil.which(arguments.python) or arguments.python
    ending = Ending(
        notice_seconds=arguments.notice_seconds,
        requeued=not arguments.no_requeue and given.kind in ("nereus", "sim"),
    )
    if not arguments.dry_run:
        slurm.needed()
        if error := slurm.unfit(request, slurm.partitions()):  # Slurm may take such a job and never start it
            raise error
    folder = new_folder(given.parent, given.name)
    try:
        submission = submission_of(given, folder, python)
        write_parts(given, submission, folder)
        seconds = given.configs[0].fleet.start_timeout_seconds
        scripts = {SCRIPT: run_script(submission, request, folder, ending, seconds, python)}
        if command := then_command(given, arguments.then):
            alone = Request(nodes=1, slots_per_node=1, partition=request.partition, time_limit=request.time_limit)
            scripts[THEN_SCRIPT] = then_script(submission, alone, folder, command)
        for name, text in scripts.items():
            (folder / name).write_text(text, encoding="utf-8")
        write_submission(folder, submission)
        if arguments.dry_run:
            print(f"# {folder / CONFIG}" if not submission.is_array else f"# {folder}: {len(submission.parts)} runs")
            print("".join(f"# {folder / name}\n{text}" for name, text in scripts.items()), end="")
            return DONE
        submission = _submitted(folder, submission, request)
    except (NereusError, OSError):
        shutil.rmtree(folder)
        raise
    print(told(submission, request, folder))
    return DONE


def then_command(given: Chosen, stated: str | None) -> str:
    """The command after the runs: what is stated, or of several runs of an experiment their table and, if any, figure."""
    if stated is not None:
        return stated
    if not given.experiment or given.only == (given.name,) or given.kind in ("verl", "openrlhf"):
        return ""
    python = shlex.quote(sys.executable)
    only = [word for each in given.only for word in ("--only", each)]
    collect = shlex.join(["-m", "nereus.cli.main", "experiment", "collect", given.experiment, *only, *given.overrides])
    analysis = Path("analysis") / f"{given.experiment}.py"
    return f"{python} {collect}" + (f" && {python} {analysis}" if analysis.is_file() else "")


def request_of(given: Chosen, arguments: Namespace) -> Request:
    """What the options ask for. Raises ConfigError where the runs' slots, and their GPUs, do not fit in."""
    limit_seconds = slurm.limit_seconds_of(arguments.time)
    notice = arguments.notice_seconds
    if not 0 < notice <= MOST_NOTICE_SECONDS:
        raise ConfigError("--notice-seconds", notice, f"expected 1 to {MOST_NOTICE_SECONDS}")
    if given.kind == "nereus" and limit_seconds is not None and limit_seconds <= notice:
        expected = f"expected more than --notice-seconds = {notice}: the run is told to stop so long before the limit"
        raise ConfigError("--time", arguments.time, expected)
    nodes, each, gpus = _shape(given, arguments)
    return Request(
        nodes=nodes,
        slots_per_node=each,
        gpu_count=gpus,
        partition=arguments.partition,
        time_limit=arguments.time,
        limit_seconds=limit_seconds,
        whole_nodes=given.kind in ("verl", "openrlhf"),
    )


def _shape(given: Chosen, arguments: Namespace) -> tuple[int, int, int]:
    """Nodes, slots and GPUs on each."""
    stated = (("--nodes", arguments.nodes), ("--slots-per-node", arguments.slots_per_node), ("--gpus-per-node", arguments.gpus_per_node))  # fmt: skip
    if given.kind == "nereus":
        return _own_shape(given.configs[0].fleet.slots, *(value for _, value in stated))
    nodes, gpus = (1, 0) if given.kind == "sim" else nodes_of(given.runs[0])
    each = gpus or 1
    for (key, value), right in zip(stated, (nodes, each, gpus), strict=True):
        if value not in (None, right):
            raise ConfigError(key, value, f"expected {right}, as the run of {given.kind} says, or nothing")
    return nodes, each, gpus


def _own_shape(slots: int, nodes: int | None, each: int | None, gpus: int | None) -> tuple[int, int, int]:
    nodes, gpus = 1 if nodes is None else nodes, gpus or 0
    if nodes < 1:
        raise ConfigError("--nodes", nodes, "expected at least 1")
    each = -(-slots // nodes) if each is None else each
    if nodes * each < slots:
        expected = f"expected at least {-(-slots // nodes)}: {nodes} nodes hold fleet.slots = {slots}"
        raise ConfigError("--slots-per-node", each, expected)
    if gpus < 0 or 0 < gpus < each:
        raise ConfigError("--gpus-per-node", gpus, f"expected at least {each}, a GPU for each slot, or 0 for none")
    return nodes, each, gpus


def _submitted(folder: Path, submission: Submission, request: Request) -> Submission:
    """The submission with its numbers, once Slurm has it. NereusError where it never starts; nothing of it is left then."""
    job = slurm.sbatch(folder / SCRIPT, request)
    then = ""
    try:
        if (folder / THEN_SCRIPT).exists():
            then = slurm.sbatch(folder / THEN_SCRIPT, request, [f"--dependency=afterany:{job}"])
        waiting = slurm.why_waiting(job)
        if waiting is not None and waiting.reason in slurm.NEVER:
            reason = f"Slurm would never start it: {waiting.reason}"
            raise slurm.unfit(request, slurm.partitions(), reason) or NereusError(reason)
        submission = with_jobs(submission, job, then, time.time())
        write_submission(folder, submission)
    except (NereusError, OSError):
        slurm.cancel(*filter(None, (job, then)))
        raise
    print(f"job {job} {waiting or 'waits; Slurm has not said why'}")
    return submission


def told(submission: Submission, request: Request, folder: Path) -> str:
    """What was submitted, and how to follow and stop it."""
    job = submission.job
    what = f"an array of {len(submission.parts)} runs of {submission.kind}" if submission.is_array else submission.name
    where = "" if submission.kind == "sim" else f" on {request.nodes} nodes with {request.slots_per_node} slots each"
    output = folder / "0" / OUTPUT if submission.is_array else folder / OUTPUT
    lines = [
        f"job {job}: {what}{where}",
        *([f"  then      job {submission.then_job}, {folder / THEN_OUTPUT}"] if submission.then_job else []),
        f"  written   {folder}",
        f"  watch     nereus jobs status {folder.name}; tail -F {output}",
        f"  stop      nereus jobs cancel {folder.name}",
    ]
    return "\n".join(lines)
