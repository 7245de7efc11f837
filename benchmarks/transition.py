"""Live transitions beside what one would do without them: `python -m benchmarks.transition [--json FILE] [--pairs N]`.

Four slots hold actor and critic of about 30 M parameters with Adam and go from layout to layout and back: live; (a) saved with
torch.distributed.checkpoint and loaded in the new layout in the same processes; (b) stopped and restarted from that checkpoint,
once. Beside that the move alone: (c) of weights against Megatron-core's `swap_model_weights`, and of all state against raw gloo.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import transition_peers as peers
from benchmarks.transition_job import PAIRS, SLOTS, TRAINED, BenchJob, bench_config, build_engine
from benchmarks.transition_report import text
from nereus.config import ModelConfig
from nereus.layout import Plan
from nereus.runtime.fabric import program_of
from nereus.runtime.host_memory import PLACES
from nereus.runtime.job import combined
from nereus.runtime.pool import SlotPool
from nereus.storage import emu_name
from nereus.transition import build

STAGES = ("actor_train", "critic_train")
WEIGHTS = ("reference_infer",)
REPETITIONS = 3
Seconds = dict[str, float]


@contextmanager
def folder_in(base: Path | None) -> Iterator[str]:
    """A new folder that is removed at the end."""
    made = tempfile.mkdtemp(prefix="nereus-bench-", dir=base)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def live(bench: BenchJob, plan: Plan, way: dict[str, Any]) -> None:
    """One live change, added to what is known of this way."""
    record, seconds = bench.timed_change(plan)
    way["live_seconds"].append(seconds)
    way["pause_seconds"].append(record.pause_seconds)
    way["pause"].append(record.seconds)
    way["interleaved"].append(record.interleaved_seconds)
    way["moved_bytes"] = record.moved.planned_bytes if record.moved else 0


def saved(bench: BenchJob, plan: Plan, base: Path | None) -> Seconds:
    """(a) Save, engines of the new layout in the same processes, load."""
    with folder_in(base) as folder:
        save = bench.measured(peers.dcp_save, folder, TRAINED).driver_seconds
        engines = bench.rebuilt(plan).driver_seconds
        load = bench.measured(peers.dcp_load, folder, TRAINED).driver_seconds
    return {"save": save, "engines": engines, "load": load}


def there_and_back(bench: BenchJob, one: str, two: str) -> list[dict[str, Any]]:
    """Both ways of a pair, each by every means; the state is checked after each means."""
    first, second = bench.job.plan, bench.placed(two)
    blank: dict[str, Any] = {"live_seconds": [], "pause_seconds": [], "pause": [], "interleaved": []}
    ways = [{"from": a, "to": b, **{k: list(v) for k, v in blank.items()}} for a, b in ((one, two), (two, one))]
    for way in ways:
        way["saved"] = {"memory": [], "disk": []}
    for _ in range(REPETITIONS):
        for way, plan in zip(ways, (second, first), strict=True):
            live(bench, plan, way)
    bench.check()
    for place, base in (("memory", next(place for place in PLACES if place.is_dir())), ("disk", bench.folder.path)):
        for way, plan in zip(ways, (second, first), strict=True):
            way["saved"][place].append(saved(bench, plan, base))
        bench.check()
    return ways


def moves(bench: BenchJob, one: str, two: str, stages: tuple[str, ...], repetitions: int = 5) -> dict[str, Any]:
    """The move alone, into engines beside the live ones: by the fabric, raw, its digests, and for weights the peer."""
    plan, weights = bench.placed(two, stages), stages == WEIGHTS
    emus = tuple(emu_name(getattr(plan, name)) for name in stages)
    for name in stages:
        bench.job.align([getattr(plan, name)])
        bench.pool.call_all("apply", peers.build_beside, getattr(plan, name))
    moved = build(bench.job.specs, bench.job.plan, plan, bench.config.transfer.bucket_bytes).moved
    programs = {slot: program_of(moved, slot, ()) for slot in bench.pool.numbers}
    totals = Counter[tuple[int, int]]()
    for bucket in moved.buckets:
        totals[bucket.source, bucket.destination] += bucket.size_bytes

    def run(function: Any, *arguments: object) -> list[float]:
        return worst(bench.pool.call_all("apply", function, *arguments))

    def moving(*, kept: bool) -> list[float]:
        given = {n: (peers.move, p if kept else replace(p, kept=()), emus, repetitions) for n, p in programs.items()}
        return worst(bench.pool.call("apply", given))

    found: dict[str, Any] = {
        "from": one,
        "to": two,
        "weights": weights,
        "busiest_port_bytes": max(max(moved.sent_bytes(n), moved.received_bytes(n)) for n in bench.pool.numbers),
        "slices": sum(len(b.slices) for b in moved.buckets),
        "rounds": moved.turns,
        "move_seconds": moving(kept=True),
        "wire_seconds": moving(kept=False),
        "raw_seconds": run(peers.raw, dict(totals), repetitions),
        "digest_seconds": run(peers.digest_both, emus, repetitions),
    }
    if weights:
        check_beside(bench, emus)
        swapped = run(peers.swap, emus[0], repetitions)
        found |= {"swap_first_seconds": swapped[0], "swap_again_seconds": swapped[1:]}
    check_beside(bench, emus)
    bench.pool.call_all("apply", peers.drop_beside)
    return found


def worst(by_slot: Mapping[int, list[float]]) -> list[float]:
    """Of each repetition the slot that took longest; the first warms up."""
    return [max(seconds) for seconds in zip(*by_slot.values(), strict=True)]


def check_beside(bench: BenchJob, emus: tuple[str, ...]) -> None:
    """AssertionError where the engines beside do not hold the live state."""
    found = combined(bench.job.specs, bench.pool.call_all("apply", peers.same_digests, emus))
    if found != bench.job.digests(emus, ""):
        raise AssertionError(f"what arrived of {emus} is not what was sent")


def pool_in(folder: Path) -> SlotPool:
    """Four slots."""
    return SlotPool(SLOTS, folder, start_timeout_seconds=400.0, phase_timeout_seconds=300.0, note=lambda _: None)


def restart(bench: BenchJob, folder: Path) -> tuple[Seconds, SlotPool]:
    """(b) The job is saved to the disk, its processes end, new ones start, build their engines and load."""
    clock: Seconds = {}

    def part(name: str, begun: float) -> float:
        clock[name] = perf_counter() - begun
        return perf_counter()

    saved_in, plan = str(folder / "restart"), bench.job.plan
    at = perf_counter()
    bench.pool.call_all("apply", peers.dcp_save, saved_in, TRAINED)
    at = part("save", at)
    bench.pool.close()
    at = part("stop", at)
    pool = pool_in(folder)
    at = part("processes", at)
    bench.pool = bench.job.pool = pool
    try:
        pool.call_all("configure", bench.config, str(bench.folder.model))
        for name in (*STAGES, *WEIGHTS):
            bench.job.align([getattr(plan, name)])
            pool.call_all("apply", build_engine, getattr(plan, name))
        at = part("engines", at)
        pool.call_all("apply", peers.dcp_load, saved_in, TRAINED)
        part("load", at)
        bench.check()
    except BaseException:
        pool.close()
        raise
    return clock, pool


def measure(
    pairs: tuple[tuple[str, str], ...], model: ModelConfig | None = None, *, again: bool = True
) -> dict[str, Any]:
    """All measurements; `again` with the restart."""
    found: dict[str, Any] = {"changes": [], "moves": []}
    config = bench_config(first=pairs[0][0]) if model is None else bench_config(model, pairs[0][0])
    with folder_in(None) as folder:
        pool = pool_in(Path(folder))
        try:
            bench = BenchJob(pool, config, Path(folder))
            for one, two in pairs:
                measure_pair(bench, one, two, found)
            if again:
                found["restart"], pool = restart(bench, Path(folder))
        finally:
            pool.close()
    return found


def measure_pair(bench: BenchJob, one: str, two: str, found: dict[str, Any]) -> None:
    """Adds one pair; the job ends in its second layout."""
    found["changes"] += there_and_back(bench, one, two)
    found["moves"] += [moves(bench, one, two, stages) for stages in (STAGES, WEIGHTS)]
    bench.timed_change(bench.placed(two))
    bench.timed_change(bench.placed(two, WEIGHTS))


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="benchmarks.transition", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the measurements there")
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="how many pairs of layouts")
    given = parser.parse_args()
    found = measure(PAIRS[: given.pairs])
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    print(text(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
