"""What Slurm is asked and told, by its own commands. The reading of its answers is pure."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nereus.errors import ConfigError, NereusError

ANSWER_SECONDS = 30.0  # for Slurm's daemon to answer a command
REASON_SECONDS, POLL_SECONDS = 8.0, 0.2  # for its scheduler to say why a new job waits
SQUEUE = ("--noheader", "--states=all", "--array", "--format=%i|%T|%r|%N")
SACCT = ("--noheader", "--parsable2", "--allocations", "--array", "--format=JobID,State,Reason,NodeList")
VAGUE = "PartitionConfig"  # time or nodes beyond the partition's; the scheduler says which, a few seconds later
NEVER = (
    "AccountNotAllowed",
    "AssocMaxWallDurationPerJobLimit",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    VAGUE,
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "QOSMaxWallDurationPerJobLimit",
    "QOSNotAllowed",
)
"""Slurm's reasons for which a job waits for ever."""
UNLIMITED = ("infinite", "unlimited", "0")
TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?)|(?:(?:(\d+):)?(\d+):(\d+))|(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is asked of Slurm; `gpu_count` is per node, 0 for none; "" leaves it to Slurm.

    `limit_seconds` is what `time_limit` means, None for no limit or Slurm's; `whole_nodes` shares them with nobody.
    """

    nodes: int
    slots_per_node: int
    gpu_count: int = 0
    partition: str = ""
    time_limit: str = ""
    limit_seconds: float | None = None
    whole_nodes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition as sinfo tells it: its nodes, the kinds of generic resources that they have, the longest time of a job.

    A job that names no partition goes to the `default` one.
    """

    name: str
    nodes: int
    resources: tuple[str, ...]
    limit: str = "infinite"
    default: bool = False

    @property
    def gpu_count(self) -> int:
        """The GPUs of its best node."""
        found = (re.match(r"gpu(?::[^:(]+)?:(\d+)", entry) for each in self.resources for entry in each.split(","))
        return max((int(gpus[1]) for gpus in found if gpus), default=0)

    def allows(self, limit_seconds: float | None) -> bool:
        """Whether a job may take so long; None: as long as the partition lets it."""
        longest = None if self.limit in UNLIMITED else seconds_of(self.limit)
        return limit_seconds is None or longest is None or limit_seconds <= longest

    def __str__(self) -> str:
        kinds = " or ".join(sorted({each.replace("(null)", "no GPUs") for each in self.resources}))
        longest = "" if self.limit in UNLIMITED else f", at most {self.limit}"
        return f"{self.name} ({self.nodes} nodes with {kinds}{longest})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How a job, or an element of its array, stands with Slurm: its state, why it waits, where it is."""

    state: str
    reason: str = ""
    nodes_text: str = ""

    @property
    def ended(self) -> bool:
        """Whether Slurm has done with it."""
        return self.state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "STOPPED")

    def __str__(self) -> str:
        where = f" on {self.nodes_text}" if self.nodes_text and not self.ended else ""
        return self.state + where + (f" ({self.reason})" if self.reason and self.state == "PENDING" else "")


def seconds_of(text: str) -> float | None:
    """Seconds of a time as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None where it is none."""
    found = TIME.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds, clock_hours, clock_minutes, clock_seconds, bare_minutes = (
        int(part or 0) for part in found.groups()
    )
    return (
        86400.0 * days
        + 3600 * (hours + clock_hours)
        + 60 * (minutes + clock_minutes + bare_minutes)
        + seconds
        + clock_seconds
    )


def limit_seconds_of(text: str) -> float | None:
    """Seconds of a stated time limit; None for none. Raises ConfigError."""
    if not text or text.lower() in UNLIMITED:
        return None
    seconds = seconds_of(text)
    if seconds is None:
        raise ConfigError("--time", text, "expected minutes, or such as 2:00:00, 1-12 (days-hours) or 1-12:30:00")
    return seconds


def read_partitions(text: str) -> list[Partition]:
    """The partitions of sinfo's lines NAME|NODES|RESOURCES|LIMIT, one for each kind of node; the default's NAME has a star."""
    rows = [tuple(line.strip().split("|")) for line in text.splitlines() if line.count("|") == 3]
    return [
        Partition(
            name=name.removesuffix("*"),
            default=name.endswith("*"),
            nodes=sum(int(row[1]) for row in rows if row[0] == name),
            resources=tuple(row[2] for row in rows if row[0] == name),
            limit=next(row[3] for row in rows if row[0] == name),
        )
        for name in dict.fromkeys(row[0] for row in rows)
    ]


def read_standings(text: str) -> dict[str, Standing]:
    """Of lines ID|STATE|REASON|NODES, as squeue and sacct are asked for; ID is JOB or JOB_ELEMENT.

    Elements that squeue tells as one, such as 7_[2-4,9%2], are told apart. sacct's CANCELLED by 0 is CANCELLED.
    """
    found: dict[str, Standing] = {}
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) != 4 or not parts[1]:
            continue
        reason = "" if parts[2] in ("None", "(null)", "NonZeroExitCode", "RaisedSignal") else parts[2]
        nodes = "" if parts[3] in ("None assigned", "(null)") else parts[3]
        standing = Standing(state=parts[1].split()[0], reason=reason, nodes_text=nodes)
        for job in elements_of(parts[0]):
            found[job] = standing
    return found


def elements_of(job: str) -> list[str]:
    """The ids that Slurm's id of a job or of several elements of an array stands for."""
    number, underscore, inside = job.partition("_[")
    if not underscore:
        return [job]
    ranges = inside.rstrip("]").partition("%")[0].split(",")
    ends = [[int(end) for end in each.split("-")] for each in ranges if re.fullmatch(r"\d+(-\d+)?", each)]
    return [f"{number}_{index}" for end in ends for index in range(end[0], end[-1] + 1)]


def unfit(request: Request, partitions: Sequence[Partition], reason: str = "") -> NereusError | None:
    """Which option asks for more than the partitions have, as a ConfigError with what there is; None where none does.

    With `reason`, Slurm's, there is an error in any case.
    """
    told = reason or "Slurm cannot give it"
    if not partitions:
        return NereusError(told) if reason else None
    there = f". There is {', '.join(map(str, partitions))}"
    asked = [each for each in partitions if (each.name == request.partition if request.partition else each.default)]
    if not asked and not request.partition:
        asked = list(partitions)
    if not asked:
        return ConfigError("--partition", request.partition, (reason or "no such partition") + there)
    if request.gpu_count > max(each.gpu_count for each in asked):
        return ConfigError("--gpus-per-node", request.gpu_count, (reason or "more GPUs than a node has") + there)
    if request.nodes > max(each.nodes for each in asked):
        return ConfigError("--nodes", request.nodes, (reason or "more nodes than a partition has") + there)
    if not any(each.allows(request.limit_seconds) for each in asked):
        return ConfigError("--time", request.time_limit, (reason or "longer than a partition allows") + there)
    return NereusError(told + there) if reason else None


def needed() -> None:
    """NereusError where this machine has no Slurm."""
    if shutil.which("sbatch") is None:
        raise NereusError("sbatch is not on the PATH: submit from a machine of a Slurm cluster, or look with --dry-run")


def partitions() -> list[Partition]:
    """The partitions of the cluster; none where sinfo does not answer."""
    return read_partitions(asked("sinfo", "--noheader", "--format=%P|%D|%G|%l"))


def standings(jobs: Iterable[str]) -> dict[str, Standing]:
    """How jobs and their elements stand, also those that ended lately; what Slurm has forgotten is left out.

    squeue knows what runs and what ended in the last minutes; sacct also the rest, where there is accounting.
    """
    numbers = list(dict.fromkeys(jobs))
    if not numbers:
        return {}
    old = asked("sacct", *SACCT, f"--jobs={','.join(numbers)}")
    now = [asked("squeue", *SQUEUE, f"--jobs={job}") for job in numbers]  # an unknown one among several fails them all
    return read_standings(old) | read_standings("\n".join(now))


def asked(*command: str) -> str:
    """What a command of Slurm's prints; "" where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def sbatch(path: Path, request: Request, options: Sequence[str] = ()) -> str:
    """The number of the new job. Raises NereusError with Slurm's reason, ConfigError where an option is to blame."""
    command = ["sbatch", "--parsable", *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]
    said = "; ".join(dict.fromkeys(line.partition("error: ")[2] or line for line in done.stderr.splitlines()))
    reason = f"Slurm refused it: {said}"
    raise unfit(request, partitions(), reason) or NereusError(reason)


def why_waiting(job: str, clock: Callable[[], float] = time.monotonic) -> Standing | None:
    """How a new job stands, as soon as it runs or Slurm says why it waits; None where it says nothing in time."""
    deadline, last = clock() + REASON_SECONDS, None
    while clock() < deadline:
        for each in standings([job]).values():
            if each.state != "PENDING" or each.reason not in ("", VAGUE):
                return each
            last = each if each.reason else last
        time.sleep(POLL_SECONDS)
    return last


def cancel(*words: str) -> None:
    """scancel. Raises NereusError with its reason."""
    done = subprocess.run(["scancel", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NereusError(f"scancel: {done.stderr.strip()}")
