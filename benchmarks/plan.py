"""What `nereus plan` takes as a whole command, imports included: `make bench-plan`.

Llama-3.1-8B PPO on 16 and on 1,024 H100, five runs each: seconds of the wall and of CPU, and resident memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

RUNS = 5
JOB = ("--model", "llama-3.1-8b", "--algo", "ppo", "--prompt", "512", "--response", "2048", "--batch", "1024")
TARGET_SECONDS = {"16xh100": 1.0, "1024xh100": 3.0}


def run(fleet: str) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and resident KiB of one command."""
    command = [sys.executable, "-m", "nereus.cli.main", "plan", *JOB, "--fleet", fleet]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"nereus plan ended with {process.returncode}")
    return time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss


def main() -> None:
    """Prints a line a fleet."""
    for fleet, target in TARGET_SECONDS.items():
        walls, cpus, sizes = zip(*(run(fleet) for _ in range(RUNS)), strict=True)
        said = "met" if median(walls) <= target else "MISSED"
        print(
            f"{fleet:10} wall {median(walls):.3f} s ({min(walls):.3f} to {max(walls):.3f}), target {target:.0f} s: {said}; "
            f"CPU {median(cpus):.3f} s, {max(sizes) / 1024:.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
