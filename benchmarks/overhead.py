"""What deciding costs against the fleet's size, as a table for analysis/overhead.py: `python -m benchmarks.overhead --table FILE`.

Measured on this machine, in processes of their own, one after the other: the parts of `make bench-controller` that a fleet's
size matters to, and the simulated world's wall seconds and memory for experiments/scale.py's job.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.controller import SIZES, apart
from benchmarks.tables import Number, write_numbers
from nereus.cli.experiments import load_experiment
from nereus.cli.simulated import simulate_run
from nereus.experiment import Run
from nereus.report.record import provenance_of
from nereus.sim.traces import read_trace, scaled, write_trace

SEARCHES = 3
"""Processes of which the median search counts."""
SIMULATED = {1024: 1000, 16384: 20}
"""Most GPUs of the trace -> steps that are simulated."""


def deciding(sizes: tuple[int, ...]) -> Iterator[Number]:
    """Events, searches and prices."""
    for slots in sizes:
        fleet = f"{slots} GPUs"
        found = apart("events", slots)
        yield "event", fleet, "median_seconds", found["wall"][0]
        yield "event", fleet, "p99_seconds", found["wall"][1]
        searches = [apart("search", slots) for _ in range(SEARCHES)]
        for kind in searches[0]["times"]:
            yield "search", fleet, f"{kind}_seconds", median(each["times"][kind][1] for each in searches)
        yield "search", fleet, "memory_bytes", max(each["growth"] for each in searches)
        found = apart("price", slots)
        yield "price", fleet, "seconds", found["times"][1]
        yield "price", fleet, "operations_count", found["operations"]
        yield "price", fleet, "memory_bytes", found["growth"]
        print(f"{fleet}: measured", flush=True)


def simulating(sizes: tuple[int, ...]) -> Iterator[Number]:
    """The simulated world under nereus."""
    for slots in sizes:
        command = [sys.executable, "-m", "benchmarks.overhead", "--one", str(slots)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"simulating {slots} GPUs ended with {done.returncode}: {done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        for name, value in found.items():
            yield "simulate", f"{slots} GPUs", name, value
        print(f"{slots} GPUs: {found}", flush=True)


def simulated(slots: int) -> dict[str, Any]:
    """One simulation in this process: the trace of experiments/scale.py, scaled."""
    (run,) = (run for run in load_experiment("scale") if run.variant == "measured")
    assert run.scene is not None
    trace = read_trace(Path(run.scene.trace))
    factor = slots / (trace.slots_per_node * max(trace.nodes.counts))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(path, replace(trace, nodes=scaled(trace.nodes, factor)))
        workload = replace(run.workload, steps=SIMULATED[slots])
        asked: Run = replace(run, workload=workload, scene=replace(run.scene, trace=str(path)))
        began = time.perf_counter()
        simulate_run(asked, Path(folder), provenance_of("python -m benchmarks.overhead"))
        took = time.perf_counter() - began
        kinds = [json.loads(line)["kind"] for line in (Path(folder) / asked.run_id / "events.jsonl").open()]
    return {
        "steps_count": kinds.count("step_done"),
        "changes_count": kinds.count("transition_done"),
        "wall_seconds": took,
        "memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description="What deciding costs against the fleet's size.")
    parser.add_argument("--table", metavar="FILE", default="runs/overhead/table.parquet")
    parser.add_argument("--one", type=int, metavar="GPUS", help="simulate one fleet here and print what it took")
    parser.add_argument("--most", type=int, default=SIZES[-1], metavar="GPUS", help="leave larger fleets out")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(simulated(asked.one)))
        return
    sizes = tuple(size for size in SIZES if size <= asked.most)
    found = [*deciding(sizes), *simulating(tuple(size for size in SIMULATED if size <= asked.most))]
    write_numbers(Path(asked.table), "overhead", found, command="python -m benchmarks.overhead", measured=True)
    print(asked.table)


if __name__ == "__main__":
    main()
