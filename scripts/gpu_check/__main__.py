"""Checks one GPU or one node in minutes: `.venv/bin/python -m scripts.gpu_check [--cpu] [--slots N] [--report FILE]`.

On a small model and one slot a GPU (four at most): the fabric, digests on the device, pinned staging, one live change of layout
there and back, sampling beside the trainer's log-probabilities. A step that fails is told with its traceback and the next one is
tried. Attach the report (default: build/gpu_check.txt) to a bug. `--cpu` takes the same steps over gloo on the CPU.
Exit codes: 0 every step passed, 1 one failed, 2 there is no GPU and `--cpu` was not given.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nereus.cli.doctor import examine, findings_text
from nereus.runtime.pool import SlotPool
from scripts.gpu_check.job import Check, Steps

MOST_SLOTS, START_SECONDS, PHASE_SECONDS = 4, 240.0, 120.0


def report(arguments: argparse.Namespace, tell: Callable[[str], None]) -> bool:
    """Tells what is here and what each step found; whether all passed."""
    tell(f"gpu_check on {'the CPU' if arguments.cpu else 'GPUs'}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        peers = [other for other in range(torch.cuda.device_count()) if other != number]
        direct = [other for other in peers if torch.cuda.can_device_access_peer(number, other)]
        tell(f"GPU {number}: {found.name}, {found.total_memory / 2**30:.0f} GiB, direct access to {direct or 'none'}")
    tell(findings_text(examine(Path.cwd())))
    with tempfile.TemporaryDirectory(prefix="nereus-gpu-check-") as made:
        began = time.monotonic()
        pool = SlotPool(
            arguments.slots, Path(made), start_timeout_seconds=START_SECONDS, phase_timeout_seconds=PHASE_SECONDS, note=tell
        )  # fmt: skip
        try:
            tell(f"{arguments.slots} slots in one world after {time.monotonic() - began:.0f} s")
            return carried_out(Check(pool, Path(made)).checks(), tell)
        finally:
            pool.close()


def carried_out(steps: Steps, tell: Callable[[str], None]) -> bool:
    """Takes the steps one after the other and tells what each found; whether all passed."""
    passed = True
    for name, step in steps.items():
        began = time.monotonic()
        try:
            lines = list(step())
        except Exception:  # noqa: BLE001 - whatever it is belongs in the report
            passed, lines = False, traceback.format_exc().splitlines()
            tell(f"FAILED  {name}, {time.monotonic() - began:.1f} s")
        else:
            tell(f"passed  {name}, {time.monotonic() - began:.1f} s")
        tell("\n".join(f"        {line}" for line in lines))
    return passed


def main(words: Sequence[str]) -> int:
    """Prints the report and writes it to a file; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description="check one GPU or one node")
    parser.add_argument("--cpu", action="store_true", help="take the same steps over gloo on the CPU")
    parser.add_argument("--slots", type=int, help=f"default: one a GPU, {MOST_SLOTS} at most; 2 with --cpu")
    parser.add_argument("--report", type=Path, default=Path("build/gpu_check.txt"), metavar="FILE")
    arguments = parser.parse_args(words)
    if arguments.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        built = torch.version.cuda or "a CPU build"
        print(
            f"gpu_check: torch {torch.__version__} ({built}) sees no GPU: it wants an NVIDIA driver and the packages of"
            " requirements-gpu.txt (docs/gpu_cluster.md); --cpu takes the same steps on the CPU", file=sys.stderr,
        )  # fmt: skip
        return 2
    arguments.slots = arguments.slots or (2 if arguments.cpu else min(torch.cuda.device_count(), MOST_SLOTS))
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    with arguments.report.open("w", encoding="utf-8") as file:

        def tell(text: str) -> None:
            print(text, flush=True)
            print(text, file=file, flush=True)

        passed = report(arguments, tell)
    print(f"gpu_check: {'every step passed' if passed else 'FAILED'}; the report is {arguments.report}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
