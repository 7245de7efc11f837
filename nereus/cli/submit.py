"""`nereus submit`: one run as one Slurm job, from the template scripts/slurm/nereus.sbatch.

Everything of a submission lies in a folder of its own below `submissions`: the resolved configuration, the script, the
job's number and, once it runs, its output and Ray's.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from nereus.cli.experiments import EXPERIMENTS, folder_of, load_experiment, overridden, progress
from nereus.cli.load import dump_config, load_config
from nereus.config import Config
from nereus.errors import ConfigError, NereusError
from nereus.runtime.metrics import check_mirror
from nereus.validate import validate

TEMPLATE = Path(__file__).parents[2] / "scripts" / "slurm" / "nereus.sbatch"
SUBMISSIONS = "submissions"
CONFIG, SCRIPT, RECORD, OUTPUT = "config.yaml", "nereus.sbatch", "slurm_job.json", "job.out"
NOTICE_SECONDS = 90  # before the time limit: a step and the stop
DONE = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What runs: a configuration, and the words of the `nereus` command that carries it out; CONFIG among them stands
    for the written configuration. `parent` is the folder that gets the run's folder.
    """

    config: Config
    parent: Path
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is asked of Slurm; `gpu_count` is per node, 0 for none; "" leaves it to Slurm."""

    nodes: int
    slots_per_node: int
    gpu_count: int = 0
    partition: str = ""
    time_limit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition as sinfo tells it: how many nodes, and the kinds of generic resources that they have."""

    name: str
    nodes: int
    resources: tuple[str, ...]

    @property
    def gpu_count(self) -> int:
        """The GPUs of its best node."""
        found = (re.match(r"gpu(?::[^:(]+)?:(\d+)", entry) for each in self.resources for entry in each.split(","))
        return max((int(gpus[1]) for gpus in found if gpus), default=0)

    def __str__(self) -> str:
        kinds = " or ".join(sorted({each.replace("(null)", "no GPUs") for each in self.resources}))
        return f"{self.name} ({self.nodes} nodes with {kinds})"


def add_submit(parser: ArgumentParser) -> None:
    """The arguments of `nereus submit`."""
    parser.usage = (
        "nereus submit CONFIG_OR_RUN [--nodes N] [--slots-per-node S] [--gpus-per-node G] [--partition P] [--time T] "
        "[--dry-run] [key=value ...]"
    )
    help_run = "a YAML file, or the (beginning of the) id of an experiment's run; then overrides"
    parser.add_argument("words", nargs="+", metavar="CONFIG_OR_RUN", help=help_run)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job (default 1)")
    parser.add_argument("--slots-per-node", type=int, metavar="S", help="default: fleet.slots spread over the nodes")
    parser.add_argument(
        "--gpus-per-node", type=int, default=0, metavar="G", help="at least a GPU for each slot, or none"
    )
    parser.add_argument("--partition", default="", metavar="P", help="default: Slurm's")
    parser.add_argument(
        "--time", default="", metavar="T", help="limit, such as 2:00:00; the run stops safely before it"
    )
    parser.add_argument("--dry-run", action="store_true", help="write and print the script, submit nothing")


def submit(arguments: Namespace) -> int:
    """Checks the run, writes the submission and gives it to Slurm. Raises ConfigError, or NereusError from Slurm."""
    submission = _submission(arguments.words[0], arguments.words[1:])
    validate(submission.config)
    check_mirror(submission.config)
    request = _request(submission.config, arguments)
    from nereus.runtime.run import check_job  # seconds, and much memory

    check_job(submission.config, None, in_cluster=True)
    folder = _write(submission, request)
    if arguments.dry_run:
        print(f"# {folder / CONFIG}\n# {folder / SCRIPT}\n{(folder / SCRIPT).read_text(encoding='utf-8')}", end="")
        return DONE
    try:
        number = _sbatch(folder / SCRIPT, request)
    except NereusError:
        shutil.rmtree(folder)
        raise
    record = {"job": number, "submitted_at_seconds": time.time(), "command": shlex.join(submission.words)}
    (folder / RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(
        f"job {number}: {submission.config.run.name} on {request.nodes} nodes with {request.slots_per_node} slots each\n"
        f"  written   {folder}\n"
        f"  watch     squeue --jobs={number}; tail -F {folder / OUTPUT}\n"
        f"  stop      scancel --batch --signal=TERM {number}   (after the step; a plain scancel ends it at once)"
    )
    return DONE


def _submission(word: str, overrides: Sequence[str]) -> Submission:
    """The run that `word` names: a configuration file, or a run of an experiment."""
    if Path(word).exists() or Path(word).suffix in (".yaml", ".yml"):
        config = load_config(Path(word), list(overrides))
        return Submission(config=config, parent=Path(config.run.folder), words=("train", CONFIG))
    names = sorted(path.stem for path in EXPERIMENTS.glob("*.py") if not path.stem.startswith("_"))
    runs = [run for name in names for run in load_experiment(name)]
    found = [run for run in runs if run.run_id.startswith(word)]
    if len(found) != 1:
        known = ", ".join(run.run_id for run in found or runs) or "none"
        what = "the beginning of one run's id" if found else "a configuration file or the beginning of a run's id"
        raise ConfigError("CONFIG_OR_RUN", word, f"expected {what}: {known}")
    run = overridden(found[0], overrides)
    folder = folder_of(run).path
    if run.system != "nereus":
        raise ConfigError("CONFIG_OR_RUN", word, f"expected a run of nereus, this is one of {run.system}")
    if (state := progress(run).state) in ("finished", "running"):
        raise ConfigError("CONFIG_OR_RUN", word, f"expected a run that is not {state}: see {folder}")
    words = ("experiment", "run", run.experiment, "--only", run.run_id, *overrides)
    return Submission(config=run.config(str(folder.parent)), parent=folder.parent, words=words)


def _request(config: Config, arguments: Namespace) -> Request:
    """What the options ask for. Raises ConfigError where the run's slots, and their GPUs, do not fit in."""
    nodes, slots, gpus = arguments.nodes, config.fleet.slots, arguments.gpus_per_node
    if nodes < 1:
        raise ConfigError("--nodes", nodes, "expected at least 1")
    each: int = -(-slots // nodes) if arguments.slots_per_node is None else arguments.slots_per_node
    if nodes * each < slots:
        expected = f"expected at least {-(-slots // nodes)}: {nodes} nodes hold fleet.slots = {slots}"
        raise ConfigError("--slots-per-node", each, expected)
    if gpus < 0 or 0 < gpus < each:
        raise ConfigError("--gpus-per-node", gpus, f"expected at least {each}, a GPU for each slot, or 0 for none")
    return Request(
        nodes=nodes, slots_per_node=each, gpu_count=gpus, partition=arguments.partition, time_limit=arguments.time
    )


def _write(submission: Submission, request: Request) -> Path:
    """The new folder of the submission, with the configuration and the script."""
    parent = (submission.parent / SUBMISSIONS).absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        name = submission.config.run.name
        folder = next(path for n in count(1) if not (path := parent / (f"{name}-{n}" if n > 1 else name)).exists())
        folder.mkdir()
        (folder / CONFIG).write_text(dump_config(submission.config), encoding="utf-8")
        (folder / SCRIPT).write_text(script(submission, request, folder), encoding="utf-8")
    except OSError as error:
        raise ConfigError("run.folder", str(parent), f"expected a folder to write in: {error.strerror}") from error
    return folder


def script(submission: Submission, request: Request, folder: Path) -> str:
    """The batch script: the template filled in."""
    from nereus.engines.vllm.boot import ENVIRONMENT
    from nereus.runtime.cluster import RAY_ENVIRONMENT

    words = [str(folder / CONFIG) if word == CONFIG else word for word in submission.words]
    values: Mapping[str, str] = {
        "DIRECTIVES": "\n".join(f"#SBATCH {option}" for option in _options(submission, request, folder)),
        "FOLDER": shlex.quote(str(folder)),
        "PYTHON": shlex.quote(sys.executable),
        "SLOTS_PER_NODE": str(request.slots_per_node),
        "START_SECONDS": str(round(submission.config.fleet.start_timeout_seconds)),
        "ENVIRONMENT": "\n".join(f"export {k}={shlex.quote(v)}" for k, v in {**ENVIRONMENT, **RAY_ENVIRONMENT}.items()),
        "COMMAND": shlex.join(words),
    }
    if not TEMPLATE.is_file():
        raise NereusError(f"{TEMPLATE} is missing: submit from a checkout of the repository")
    return re.sub("@([A-Z_]+)@", lambda found: values[found[1]], TEMPLATE.read_text(encoding="utf-8"))


def _options(submission: Submission, request: Request, folder: Path) -> list[str]:
    """What sbatch shall know; its SBATCH_* variables (account, QOS, ...) go over these."""
    asked = {"partition": request.partition, "time": request.time_limit, "gpus-per-node": request.gpu_count}
    return [
        f"--job-name={submission.config.run.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={request.slots_per_node}",
        *(f"--{name}={value}" for name, value in asked.items() if value),
        f"--output={_escaped(folder / OUTPUT)}",
        f"--chdir={Path.cwd()}",
        f"--signal=B:USR1@{NOTICE_SECONDS}",
        "--no-requeue",
    ]


def _escaped(path: Path) -> str:
    return str(path).replace("%", "%%")


def _sbatch(path: Path, request: Request) -> str:
    """The number of the new job. Raises NereusError with Slurm's reason, ConfigError where an option is to blame."""
    if shutil.which("sbatch") is None:
        raise NereusError("sbatch is not on the PATH: submit from a machine of a Slurm cluster, or look with --dry-run")
    partitions = _partitions()
    asked = [each for each in partitions if request.partition in ("", each.name)]
    if asked and request.nodes > max(each.nodes for each in asked):  # Slurm would take the job and never start it
        raise _refusal("more nodes than a partition has", request, partitions)
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]
    reason = "; ".join(dict.fromkeys(line.partition("error: ")[2] or line for line in done.stderr.splitlines()))
    raise _refusal(f"Slurm refused it: {reason}", request, partitions)


def _refusal(reason: str, request: Request, partitions: Sequence[Partition]) -> NereusError:
    """`reason`, with the option that the partitions do not hold, where there is one."""
    if not partitions:
        return NereusError(reason)
    there = f"{reason}. There is {', '.join(map(str, partitions))}"
    asked = [each for each in partitions if request.partition in ("", each.name)]
    if not asked:
        return ConfigError("--partition", request.partition, there)
    if request.gpu_count > max(each.gpu_count for each in asked):
        return ConfigError("--gpus-per-node", request.gpu_count, there)
    if request.nodes > max(each.nodes for each in asked):
        return ConfigError("--nodes", request.nodes, there)
    return NereusError(there)


def _partitions() -> list[Partition]:
    """The partitions of the cluster; none where sinfo does not answer."""
    command = ["sinfo", "--noheader", "--format=%R|%D|%G"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return []
    rows = [tuple(line.split("|")) for line in done.stdout.splitlines() if line.count("|") == 2]
    return [
        Partition(
            name=name,
            nodes=sum(int(row[1]) for row in rows if row[0] == name),
            resources=tuple(row[2] for row in rows if row[0] == name),
        )
        for name in dict.fromkeys(row[0] for row in rows)
    ]
