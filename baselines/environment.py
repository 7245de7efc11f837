"""A baseline's own environment, beside Nereus's: as small as what is asked of it allows, below build/, made once."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from nereus.errors import NereusError

INSTALL_SECONDS = 600
OUT_OF_REACH = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|timed out|Temporary failure|ProxyError|SSLError|from versions: none"
)
# What neither a parser nor a logger nor a step's mathematics opens, a quarter of it all: headers, tests, servers, a web page, Java.
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
    "pandas/tests",
    "sympy/**/tests",
    "numpy/**/tests",
    "networkx/**/tests",
)


class IndexOutOfReach(NereusError):
    """The packages cannot be had here and now: nothing can be said about the baseline."""


class EnvironmentFailed(NereusError):
    """The environment cannot be made, or is not what it should be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """A virtual environment in `folder` with what `requirements` pins, installed without their dependencies."""

    folder: Path
    requirements: Path
    most_bytes: int = 10**9  # a CUDA build of torch alone takes more

    def interpreter(self) -> Path:
        """Its Python; makes it where it is missing or old. Raises IndexOutOfReach, EnvironmentFailed."""
        python, stamp = self.folder / "bin/python", self.folder / "finished"
        parts = (self.requirements, Path(__file__))
        key = hashlib.sha256(b"\0".join(part.read_bytes() for part in parts)).hexdigest()
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != key:
            shutil.rmtree(self.folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", "--without-pip", str(self.folder)])
            install = ["install", "--no-deps", "--no-compile", "--no-input", "--retries", "1"]
            _run([sys.executable, "-m", "pip", "--python", str(python), *install, "-r", str(self.requirements)])
            self._leave_out()
            if self.size_bytes() > self.most_bytes:
                raise EnvironmentFailed(
                    f"{self.folder} takes {self.size_bytes():,} bytes, more than {self.most_bytes:,}: is its torch a CUDA"
                    " build? Have pip's extra index name PyTorch's CPU wheels"
                )
            stamp.write_text(key, encoding="utf-8")
        return python

    def size_bytes(self) -> int:
        """What its files take."""
        return sum(path.lstat().st_size for path in self.folder.rglob("*"))

    def _leave_out(self) -> None:
        (packages,) = self.folder.glob("lib/python*/site-packages")
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
