"""How long the transfer planner takes, how much memory, how far its plans are from the bounds; beside Megatron-core's.

`make bench-planner`, or `python -m benchmarks.planner [PART ...]` with parts of PARTS. Every timed run is a process of
its own; CPU seconds stand beside wall seconds, for the machine may be shared. Nothing is asserted: the tests do that.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import numpy as np

from nereus.cli.models import load_model
from nereus.fleet import DEVICES, Fleet, uniform
from nereus.layout import Layout, Stage, StagePlan, equal_shares
from nereus.model import ModelSpec, model_spec
from nereus.slices import slices_of
from nereus.transfer.boxtable import joined, of_stage
from nereus.transfer.placement import Placement, StageMove, place
from nereus.transfer.routes import Routes, routes
from nereus.transfer.streams import streams

H100 = DEVICES["h100"]
BUCKET_BYTES = 64 << 20
RUNS = 5
MIB = 1 << 20
Timings = dict[str, tuple[float, float]]


def say(line: str = "") -> None:
    """Prints a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Clock:
    """Seconds of CPU and of the wall by part, in the order of first use."""

    def __init__(self) -> None:
        self.seconds: Timings = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Counts what is done within it."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        spent = time.process_time() - cpu, time.perf_counter() - wall
        known = self.seconds.get(part, (0.0, 0.0))
        self.seconds[part] = known[0] + spent[0], known[1] + spent[1]


Degrees = dict[str, int]


def stage(spec: ModelSpec, degrees: Degrees, kind: Stage = "train", slots: int | None = None) -> StagePlan:
    """A model-stage with layers spread evenly, on the first slots, or with the choice of `slots` slots."""
    layout = Layout(
        tp=degrees.get("tp", 1),
        pp=degrees.get("pp", 1),
        dp=degrees.get("dp", 1),
        ep=degrees.get("ep", 1),
        etp=degrees.get("etp"),
        pipeline=equal_shares(spec.config.layers, degrees.get("pp", 1)),
        distributed_optimizer=kind == "train",
    )
    return StagePlan(
        model=spec.name,
        stage=kind,
        layout=layout,
        slots=tuple(range(slots or layout.ranks)),
        shares=(1,) * layout.dp,
        micro_batch=1,
    )


# -- large changes --------------------------------------------------------------------------------------------------


def change(models: Callable[[], list[ModelSpec]], before: Degrees, after: Degrees) -> None:
    """One run of a whole plan of training state: prints its seconds, its peak memory and its gaps as JSON."""
    start_bytes = _resident_bytes()
    clock = Clock()
    with clock("models"):
        specs = models()
        slots = max(stage(specs[0], degrees).layout.ranks for degrees in (before, after))
        moves = {s.name: StageMove(spec=s, before=stage(s, before), after=stage(s, after, slots=slots)) for s in specs}
        fleet = uniform(slots, H100)
    with clock("placement"):
        placed = place(moves, fleet)
    found = _plan(moves, fleet, placed, clock)
    with clock("buckets"):
        buckets = int(found.buckets(BUCKET_BYTES).sum())
    total = tuple(sum(part[i] for part in clock.seconds.values()) for i in (0, 1))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {
        "seconds": {**clock.seconds, "total": total},
        "peak": peak - start_bytes,
        "streams": len(found.streams),
        "rows": len(found.rows),
        "buckets": buckets,
        "moved": found.moved_bytes,
        "kept": found.kept_bytes,
        "least_moved": placed.least_moved_bytes,
        "port": found.loads.port,
        "port_seconds": found.loads.seconds,
        "port_gap": found.gap,
        "placement_gap": placed.gap,
    }
    say(json.dumps(result))


def _plan(moves: dict[str, StageMove], fleet: Fleet, placed: Placement, clock: Clock) -> Routes:
    """The movement for a placement, from the stages on."""
    with clock("tables"):
        present = joined([of_stage(m.spec, m.before) for m in moves.values() if m.before is not None])
        target = joined([of_stage(m.spec, replace(m.after, slots=placed.slots[n])) for n, m in moves.items()])
    with clock("join"):
        found = streams(present, target)
    with clock("routes"):
        return routes(found, np.arange(len(fleet.node_of)), fleet)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - a kernel table
        return int(file.read().split()[1]) * resource.getpagesize()


def llama_pair() -> list[ModelSpec]:
    """An actor and a critic of Llama-3.1-8B."""
    config = load_model("llama-3.1-8b")
    return [model_spec("actor", config), model_spec("critic", config, "value")]


def qwen_moe() -> list[ModelSpec]:
    """An actor of Qwen3-30B-A3B."""
    return [model_spec("actor", load_model("qwen3-30b-a3b"))]


TARGETED = "1,024 -> 768 slots"
CHANGES = {
    TARGETED: (llama_pair, {"tp": 8, "pp": 2, "dp": 64}, {"tp": 4, "pp": 2, "dp": 96}, RUNS),
    "1,024 -> 16,384 slots": (llama_pair, {"tp": 8, "pp": 2, "dp": 64}, {"tp": 8, "pp": 2, "dp": 1024}, 1),
    "256 slots, EP8 -> EP16": (
        qwen_moe,
        {"tp": 2, "pp": 2, "dp": 64, "ep": 8, "etp": 1},
        {"tp": 2, "pp": 2, "dp": 64, "ep": 16, "etp": 1},
        3,
    ),
}


def _degrees(found: Degrees) -> str:
    return "·".join(f"{name.upper()}{degree}" for name, degree in found.items())


def changes() -> None:
    """Full training state with ZeRO-1, from the models' configurations to the bucket counts."""
    for name, (models, before, after, runs) in CHANGES.items():
        say(f"\n{name}: {' + '.join(f'{s.name} ({s.config.layers} layers)' for s in models())}, full training state")
        say(
            f"  {_degrees(before)} -> {_degrees(after)} on H100 nodes of 8; medians of {runs} fresh process{'es' * (runs > 1)}"
        )
        results = [json.loads(_fresh("change", name)) for _ in range(runs)]
        parts = list(results[0]["seconds"])
        say("  part        " + "".join(f"{part:>11}" for part in parts))
        for index, label in enumerate(("CPU s", "wall s")):
            values = [median(r["seconds"][part][index] for r in results) for part in parts]
            say(f"  {label:<12}" + "".join(f"{value:>11.3f}" for value in values))
        r = results[0]
        peak = median(result["peak"] for result in results) / MIB
        target = " (target: 1 s in all, 1,024 MiB)" if name == TARGETED else ""
        say(f"  peak memory above the start {peak:,.0f} MiB{target}")
        say(
            f"  {r['streams']:,} streams, {r['rows']:,} rows, {r['buckets']:,} buckets of {BUCKET_BYTES // MIB} MiB;"
            f" moved {r['moved'] / 1e9:,.1f} GB, kept {r['kept'] / 1e9:,.1f} GB"
        )
        say(
            f"  moved bytes {r['placement_gap']:.3%} above the placement bound; busiest port {r['port']}"
            f" {r['port_seconds'] * 1e3:,.1f} ms, {r['port_gap']:.3%} above its bound"
        )


# -- gaps -----------------------------------------------------------------------------------------------------------


def gaps() -> None:
    """How far the busiest port is from the LP (direct plans) and from the bound over all plans, over many cases."""
    from tests.lower_bound import classes, direct_seconds
    from tests.published import published_streams, random_streams

    percents = (50, 75, 90, 95, 99, 100)
    for name, made in (("published pairs", published_streams), ("random cases", random_streams)):
        one_node, nodes, relayed, count = [], [], [], 0
        for found, slots in made():
            count += 1
            single = uniform(slots, H100, slots_per_node=slots)
            direct = routes(found, np.arange(slots), single, relay_least_bytes=None)
            one_node.append(_ratio(direct.loads.slot_send_bytes, direct.direct_send_bytes))
            fleet = uniform(slots, H100)
            across = routes(found, np.arange(slots), fleet, relay_least_bytes=None)
            if slots <= 32:
                nodes.append(_ratio(across.loads.seconds, direct_seconds(classes(found), fleet)))
            best = routes(found, np.arange(slots), fleet)
            relayed.append(_ratio(best.loads.seconds, best.least.seconds))
        say(f"\nGaps over {count} {name} (percentiles, %)" + "".join(f"{p:>9}" for p in percents))
        for label, values in (
            ("busiest sender, one node, above the LP", one_node),
            ("busiest port, nodes of 8, above the LP, to 32 slots", nodes),
            ("with relays, above the bound over all plans", relayed),
        ):
            found = np.percentile(values, percents)
            say(f"  {label:<52}" + "".join(f"{100 * (value - 1):>9.3f}" for value in found))


def _ratio(value: float, bound: float) -> float:
    return value / bound if bound else 1.0


# -- the peer -------------------------------------------------------------------------------------------------------

PEER_PAIRS = (
    (8, {"tp": 2, "pp": 1, "dp": 4}, {"tp": 4, "pp": 1, "dp": 2}),
    (8, {"tp": 2, "pp": 2, "dp": 2}, {"tp": 1, "pp": 1, "dp": 8}),
    (16, {"tp": 4, "pp": 2, "dp": 2}, {"tp": 2, "pp": 1, "dp": 8}),
    (32, {"tp": 8, "pp": 2, "dp": 2}, {"tp": 4, "pp": 2, "dp": 4}),
    (64, {"tp": 8, "pp": 2, "dp": 4}, {"tp": 4, "pp": 2, "dp": 8}),
    (128, {"tp": 8, "pp": 2, "dp": 8}, {"tp": 4, "pp": 2, "dp": 16}),
    (256, {"tp": 8, "pp": 2, "dp": 16}, {"tp": 4, "pp": 2, "dp": 32}),
    (1024, {"tp": 8, "pp": 2, "dp": 64}, {"tp": 4, "pp": 2, "dp": 128}),
)


def peer() -> None:
    """Weights of Llama-3.1-8B, collocated, by both planners in one run: ranks as they are, no placement."""
    say(
        "\nBeside Megatron-core 0.16.1's planner: weights of Llama-3.1-8B, same slots, ranks not relabelled; CPU seconds"
    )
    say(
        "  of tables, join and routes (plan), with every slot's slices as objects (all), and of the peer, whose metadata"
    )
    say("  is given to it; then GB that travel, and GB of the busiest sender, ours and the peer's.")
    titles = (("plan", 8), ("all", 8), ("peer", 9), ("peer/plan", 11), ("peer/all", 10))
    titles += (("moved", 10), ("peer's", 9), ("busiest", 9), ("peer's", 9))
    say(f"  {'ranks':>5} {'change':<28}" + "".join(f"{title:>{width}}" for title, width in titles))
    for index in range(len(PEER_PAIRS)):
        r = json.loads(_fresh("peer-one", str(index)))
        ranks, before, after = PEER_PAIRS[index]
        plan, listed, other = r["plan"], r["plan"] + r["slices"], r["peer"]
        say(
            f"  {ranks:>5} {_degrees(before) + ' > ' + _degrees(after):<28}{plan:>8.3f}{listed:>8.3f}{other:>9.3f}"
            f"{other / plan:>10.1f}x{other / listed:>9.1f}x{r['moved'] / 1e9:>10.1f}{r['peer_moved'] / 1e9:>9.1f}"
            f"{r['busiest'] / 1e9:>9.2f}{r['peer_busiest'] / 1e9:>9.2f}"
        )


def peer_one(index: int) -> None:
    """One pair by both planners in this process: prints JSON."""
    from benchmarks import megatron_planner

    ranks, before, after = PEER_PAIRS[index]
    spec = model_spec("m", load_model("llama-3.1-8b"))
    clock = Clock()
    with clock("plan"):
        old, new = (of_stage(spec, stage(spec, degrees, "infer")) for degrees in (before, after))
        found = routes(streams(old, new), np.arange(ranks), uniform(ranks, H100))
    with clock("slices"):
        for _ in slices_of(found):
            pass
    rosters = [megatron_planner.roster(spec, stage(spec, d, "infer").layout) for d in (before, after)]
    with clock("peer"):
        plans = megatron_planner.planned(rosters[0], rosters[1])
    other = megatron_planner.summary(plans, rosters[0], rosters[1])
    result = {part: cpu for part, (cpu, _) in clock.seconds.items()} | {
        "moved": found.moved_bytes,
        "busiest": int(found.sent_bytes().max()),
        "peer_moved": other.moved_bytes,
        "peer_busiest": other.busiest_bytes,
    }
    say(json.dumps(result))


# -- the command ----------------------------------------------------------------------------------------------------

PARTS = {"changes": changes, "gaps": gaps, "peer": peer}


def _fresh(*arguments: str) -> str:
    """What a new process of this module prints last."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planner", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1]


def main(arguments: list[str]) -> None:
    """Runs the parts that are named, or all."""
    match arguments:
        case ["change", name]:
            models, before, after, _ = CHANGES[name]
            change(models, before, after)
        case ["peer-one", index]:
            peer_one(int(index))
        case _:
            unknown = [name for name in arguments if name not in PARTS]
            if unknown:
                sys.exit(f"unknown part {unknown[0]}: expected some of {', '.join(PARTS)}")
            for name in arguments or PARTS:
                PARTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
