"""What a fleet and a workload did over time: Availability, LengthCurve, and FleetTrace, the derived file of both.

An availability is a step function: instances from each moment on, until the next. A FleetTrace is that for nodes of a
given size, together with the mean response length of every RL step and a statement of where it comes from.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nereus.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """Instances over time. `at_seconds` ascends from 0; `counts` holds from its moment to the next, the last to `until_seconds`."""

    name: str
    at_seconds: tuple[float, ...]
    counts: tuple[int, ...]
    until_seconds: float

    def count_at(self, seconds: float) -> int:
        """Instances at a moment: the last ones known, before the beginning the first."""
        return self.counts[max(bisect_right(self.at_seconds, seconds) - 1, 0)]

    @property
    def mean_count(self) -> float:
        """Instances on average over the whole time."""
        ends = (*self.at_seconds[1:], self.until_seconds)
        spans = [end - begin for begin, end in zip(self.at_seconds, ends, strict=True)]
        total = sum(spans)
        return sum(s * n for s, n in zip(spans, self.counts, strict=True)) / total if total else float(self.counts[0])

    @property
    def losses_count(self) -> int:
        """How often instances went."""
        return sum(b < a for a, b in zip(self.counts, self.counts[1:], strict=False))

    @property
    def gains_count(self) -> int:
        """How often instances came."""
        return sum(b > a for a, b in zip(self.counts, self.counts[1:], strict=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCurve:
    """Mean response length over RL steps, by points (`at_steps` ascends); between them it is a straight line."""

    name: str
    at_steps: tuple[int, ...]
    mean_tokens: tuple[float, ...]

    def mean_at(self, step: float) -> float:
        """Mean tokens of a response at a step; flat before the first point and after the last."""
        steps = self.at_steps
        after = bisect_right(steps, step)
        if after == 0:
            return self.mean_tokens[0]
        if after == len(steps):
            return self.mean_tokens[-1]
        share = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
        return self.mean_tokens[after - 1] * (1 - share) + self.mean_tokens[after] * share

    def over(self, steps: int, factor: float = 1.0) -> LengthCurve:
        """The whole curve within steps 1 to `steps`, lengths times `factor`. One point a step at most."""
        first, last = self.at_steps[0], self.at_steps[-1]
        span = max(last - first, 1)
        points: dict[int, float] = {}
        for at, mean in zip(self.at_steps, self.mean_tokens, strict=True):
            points[1 + round((at - first) / span * (steps - 1))] = mean * factor
        ordered = sorted(points)
        return replace(self, at_steps=tuple(ordered), mean_tokens=tuple(points[at] for at in ordered))


def step_function(name: str, points: Sequence[tuple[float, int]], until_seconds: float | None = None) -> Availability:
    """An availability from (seconds, count) in any order of equal moments; the last of a moment counts.

    Begins at 0; moments without a change are left out. ConfigError where there is nothing or time goes back.
    """
    if not points:
        raise ConfigError("trace", name, "at least one point")
    first = points[0][0]
    merged: list[tuple[float, int]] = []
    for seconds, count in points:
        at = seconds - first
        if merged and at < merged[-1][0]:
            raise ConfigError(
                "trace", name, f"time that does not go back: {seconds:g} s after {merged[-1][0] + first:g} s"
            )
        if count < 0:
            raise ConfigError("trace", name, f"counts of at least 0, not {count} at {seconds:g} s")
        if merged and merged[-1][0] == at:
            merged.pop()
        if not merged or merged[-1][1] != count:
            merged.append((at, count))
    end = points[-1][0] - first if until_seconds is None else until_seconds - first
    return Availability(
        name=name,
        at_seconds=tuple(at for at, _ in merged),
        counts=tuple(count for _, count in merged),
        until_seconds=max(end, merged[-1][0]),
    )


def scaled(found: Availability, factor: float, *, least_count: int = 0, most_count: int | None = None) -> Availability:
    """Counts times `factor`, rounded half up, within the bounds."""
    if factor <= 0:
        raise ConfigError("factor", factor, "expected more than 0")
    counts = [max(int(count * factor + 0.5), least_count) for count in found.counts]
    if most_count is not None:
        counts = [min(count, most_count) for count in counts]
    return step_function(found.name, list(zip(found.at_seconds, counts, strict=True)), found.until_seconds)


def window(found: Availability, begin_seconds: float, end_seconds: float) -> Availability:
    """What lies between two moments, as an availability of its own. ConfigError where that is nothing."""
    if not 0 <= begin_seconds < end_seconds <= found.until_seconds:
        inside = f"a window within 0 and {found.until_seconds:g} s"
        raise ConfigError("trace", f"{begin_seconds:g} to {end_seconds:g} s", inside)
    points = [(begin_seconds, found.count_at(begin_seconds))]
    pairs = zip(found.at_seconds, found.counts, strict=True)
    points += [(at, count) for at, count in pairs if begin_seconds < at < end_seconds]
    return step_function(found.name, points, end_seconds)


def paced(found: Availability, factor: float) -> Availability:
    """The same changes in `factor` times the time: below 1 they come faster."""
    if factor <= 0:
        raise ConfigError("pace", factor, "expected more than 0")
    at = tuple(seconds * factor for seconds in found.at_seconds)
    return replace(found, at_seconds=at, until_seconds=found.until_seconds * factor)


def coarse(found: Availability, least_change_count: int) -> Availability:
    """Only changes that lead at least so far from the last count that was kept: a fleet that ignores small ones."""
    kept = [(found.at_seconds[0], found.counts[0])]
    for at, count in zip(found.at_seconds, found.counts, strict=True):
        if abs(count - kept[-1][1]) >= least_change_count:
            kept.append((at, count))
    return step_function(found.name, kept, found.until_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOrigin:
    """Where a derived trace comes from: source, licence, what was done to it, and the command that did it."""

    source: str = ""
    licence: str = ""
    transformation: str = ""
    command: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetTrace:
    """Nodes of `slots_per_node` slots over time, and the mean response length over steps (none: as the workload has it)."""

    name: str
    slots_per_node: int
    nodes: Availability
    lengths: LengthCurve | None = None
    origin: TraceOrigin = field(default_factory=TraceOrigin)

    @property
    def most_slots(self) -> int:
        """The largest fleet."""
        return self.slots_per_node * max(self.nodes.counts)


def write_trace(path: Path, trace: FleetTrace) -> None:
    """The trace as a small JSON file, one point a line."""
    nodes, lengths = trace.nodes, trace.lengths
    points = [[round(at, 3), count] for at, count in zip(nodes.at_seconds, nodes.counts, strict=True)]
    record: dict[str, object] = {
        "name": trace.name,
        "origin": asdict(trace.origin),
        "slots_per_node": trace.slots_per_node,
        "until_seconds": round(nodes.until_seconds, 3),
        "nodes": points,
    }
    if lengths is not None:
        pairs = zip(lengths.at_steps, lengths.mean_tokens, strict=True)
        record |= {"lengths_name": lengths.name, "lengths": [[step, round(mean, 1)] for step, mean in pairs]}
    text = json.dumps(record, indent=1)
    for values in (points, record.get("lengths", [])):
        for pair in values if isinstance(values, list) else []:
            text = text.replace(json.dumps(pair, indent=1).replace("\n", "\n  "), json.dumps(pair))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def read_trace(path: Path) -> FleetTrace:
    """The trace that `write_trace` wrote. ConfigError that names the file for anything else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        nodes = [(float(at), int(count)) for at, count in record["nodes"]]
        lengths = None
        if "lengths" in record:
            steps = tuple(int(step) for step, _ in record["lengths"])
            means = tuple(float(mean) for _, mean in record["lengths"])
            lengths = LengthCurve(name=str(record["lengths_name"]), at_steps=steps, mean_tokens=means)
        return FleetTrace(
            name=str(record["name"]),
            slots_per_node=int(record["slots_per_node"]),
            nodes=step_function(str(record["name"]), nodes, float(record["until_seconds"])),
            lengths=lengths,
            origin=TraceOrigin(**record["origin"]),
        )
    except OSError as error:
        raise ConfigError("trace", str(path), f"a readable file: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("trace", str(path), f"a file that `nereus trace build` wrote: {error!r}") from error
