"""The batch scripts of a submission: the templates of scripts/slurm filled in."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nereus.cli.slurm import Request
from nereus.cli.submission import EXIT, OUTPUT, THEN_EXIT, THEN_OUTPUT, Submission
from nereus.errors import NereusError

ROOT = Path(__file__).parents[2]
"""The checkout."""
TEMPLATES = ROOT / "scripts" / "slurm"
RAY_TEMPLATE, COMMAND_TEMPLATE = "ray.sbatch", "command.sbatch"
OWN_RAY = '--num-cpus=1 --resources="{\\"slot\\": $slots}" --object-store-memory=$((100 << 20))'
"""A slot is a resource of that name; blocks travel outside Ray's store."""
THEIR_RAY = "--num-gpus=$gpus"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a job ends: `notice_seconds` before its limit it is told, and then it may be `requeued`."""

    notice_seconds: int
    requeued: bool


def run_script(submission: Submission, request: Request, folder: Path, ending: Ending, start_seconds: float, python: str) -> str:  # fmt: skip
    """The script of the runs. `python` is that of the environment whose Ray the allocation gets."""
    own = submission.kind == "nereus"
    values = {
        "DIRECTIVES": _directives(_options(submission, request, folder, ending)),
        "FOLDER": _place(submission, folder),
        "COMMAND": f"{shlex.quote(sys.executable)} -m nereus.cli.submitted {shlex.quote(str(folder))}",
        "EXIT": EXIT,
    }
    if submission.kind == "sim":
        return filled(COMMAND_TEMPLATE, {**values, "ENVIRONMENT": "export OMP_NUM_THREADS=1"})
    values |= {
        "RAY": shlex.quote(str(Path(python).parent / "ray")),
        "RAY_OPTIONS": OWN_RAY if own else THEIR_RAY,
        "PACKAGE": "nereus" if own else submission.kind,
        "SLOTS_PER_NODE": str(request.slots_per_node),
        "GPUS_PER_NODE": str(request.gpu_count),
        "START_SECONDS": str(round(start_seconds)),
        "REQUEUE": "yes" if ending.requeued else "",
        "ENVIRONMENT": _environment() if own else "",
    }
    return filled(RAY_TEMPLATE, values)


def then_script(submission: Submission, request: Request, folder: Path, command: str) -> str:
    """The script of the job after the runs, which carries out a shell command."""
    options = [f"--job-name={submission.name}-then", "--nodes=1", "--ntasks=1"]
    options += [f"--{name}={value}" for name, value in _stated(request).items()]
    options += [f"--output={_escaped(folder / THEN_OUTPUT)}", f"--chdir={submission.where}"]
    values = {
        "DIRECTIVES": _directives(options),
        "FOLDER": shlex.quote(str(folder)),
        "COMMAND": command,
        "EXIT": THEN_EXIT,
        "ENVIRONMENT": "export OMP_NUM_THREADS=1",
    }
    return filled(COMMAND_TEMPLATE, values)


def filled(template: str, values: Mapping[str, str]) -> str:
    """A template with the values for its @NAME@s. Raises NereusError where it is not there."""
    path = TEMPLATES / template
    if not path.is_file():
        raise NereusError(f"{path} is missing: submit from a checkout of the repository")
    return re.sub("@([A-Z_]+)@", lambda found: values[found[1]], path.read_text(encoding="utf-8"))


def _options(submission: Submission, request: Request, folder: Path, ending: Ending) -> list[str]:
    """What sbatch shall know; its SBATCH_* variables (account, QOS, ...) go over these."""
    output = _escaped(folder) + ("/%a" if submission.is_array else "") + f"/{OUTPUT}"
    return [
        f"--job-name={submission.name}",
        *([f"--array=0-{len(submission.parts) - 1}"] if submission.is_array else []),
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        *([] if request.whole_nodes else [f"--cpus-per-task={request.slots_per_node}"]),
        *(["--exclusive"] if request.whole_nodes else []),
        *([f"--gpus-per-node={request.gpu_count}"] if request.gpu_count else []),
        *(f"--{name}={value}" for name, value in _stated(request).items()),
        f"--output={output}",
        "--open-mode=append",
        f"--chdir={submission.where}",
        *([f"--signal=B:USR1@{ending.notice_seconds}"] if submission.kind == "nereus" else []),
        "--requeue" if ending.requeued else "--no-requeue",
    ]


def _stated(request: Request) -> dict[str, str]:
    asked = {"partition": request.partition, "time": request.time_limit}
    return {name: value for name, value in asked.items() if value}


def _place(submission: Submission, folder: Path) -> str:
    return shlex.quote(str(folder)) + ("/$SLURM_ARRAY_TASK_ID" if submission.is_array else "")


def _environment() -> str:
    from nereus.engines.vllm.boot import ENVIRONMENT
    from nereus.runtime.cluster import RAY_ENVIRONMENT

    return "\n".join(f"export {k}={shlex.quote(v)}" for k, v in {**ENVIRONMENT, **RAY_ENVIRONMENT}.items())


def _directives(options: list[str]) -> str:
    return "\n".join(f"#SBATCH {option}" for option in options)


def _escaped(path: Path) -> str:
    return str(path).replace("%", "%%")
