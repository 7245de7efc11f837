"""verl's own environment, beside Nereus's: as small as its parser and trainer functions allow, below build/, made once."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from nereus.errors import NereusError

FOLDER = Path("build/verl/env")
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
MAX_BYTES, INSTALL_SECONDS = 10**9, 600
OUT_OF_REACH = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|timed out|Temporary failure|ProxyError|SSLError|from versions: none"
)
# What neither a parser nor a step's mathematics opens, a quarter of it all: headers, tests, servers, a web page, Java.
LEFT_OUT = (
    "torch/include",
    "torch/test",
    "torch/bin/[!t]*",
    "torch/bin/test_*",
    "ray/jars",
    "ray/rllib",
    "ray/dashboard/client",
    "ray/core/src/ray/gcs/gcs_server",
    "ray/core/src/ray/raylet/raylet",
    "pyarrow/include",
    "pyarrow/tests",
    "pyarrow/libarrow_flight*",
    "numpy/**/tests",
    "networkx/**/tests",
    "pandas/tests",
    "sympy/**/tests",
)


class IndexOutOfReach(NereusError):
    """The packages cannot be had here and now: nothing can be said about verl."""


class EnvironmentFailed(NereusError):
    """The environment cannot be made, or is not what it should be."""


def interpreter() -> Path:
    """The environment's Python; makes it where it is missing or old. Raises IndexOutOfReach, EnvironmentFailed."""
    python, stamp = FOLDER / "bin/python", FOLDER / "finished"
    key = hashlib.sha256(b"\0".join(p.read_bytes() for p in (REQUIREMENTS, Path(__file__)))).hexdigest()
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != key:
        shutil.rmtree(FOLDER, ignore_errors=True)
        _run([sys.executable, "-m", "venv", "--without-pip", str(FOLDER)])
        install = ["install", "--no-deps", "--no-compile", "--no-input", "--retries", "1", "-r", str(REQUIREMENTS)]
        _run([sys.executable, "-m", "pip", "--python", str(python), *install])
        _leave_out()
        if size_bytes() > MAX_BYTES:
            raise EnvironmentFailed(
                f"{FOLDER} takes {size_bytes():,} bytes, more than {MAX_BYTES:,}: is its torch a CUDA build? Have pip's"
                " extra index name PyTorch's CPU wheels"
            )
        stamp.write_text(key, encoding="utf-8")
    return python


def size_bytes() -> int:
    """What the environment's files take."""
    return sum(path.lstat().st_size for path in FOLDER.rglob("*"))


def _leave_out() -> None:
    (packages,) = FOLDER.glob("lib/python*/site-packages")
    for pattern in LEFT_OUT:
        for path in list(packages.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "torch_shm_manager":  # torch asks for it when it is imported
                path.unlink()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise IndexOutOfReach(f"packages did not come within {INSTALL_SECONDS} s") from error
    if done.returncode == 0:
        return
    said = done.stdout + done.stderr
    last = next((line for line in reversed(said.splitlines()) if line.startswith("ERROR")), said.strip()[-300:])
    if found := OUT_OF_REACH.search(said):
        raise IndexOutOfReach(f"the package index is out of reach ({found[0]}): {last}")
    raise EnvironmentFailed(f"{' '.join(command[:4])} failed: {last}")
