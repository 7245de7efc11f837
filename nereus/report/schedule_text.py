"""A ScheduledChange as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from nereus.report.transition_graph import ScheduledChange
from nereus.report.transition_text import counted, seconds_text, size_text, table
from nereus.transitions.graph import PLACES
from nereus.transitions.order import lane_name


def schedule_text(change: ScheduledChange, files: Mapping[str, str | None]) -> str:
    """The graph, its memory, its price and what takes the time; `files` says what was written where."""
    written = [f"{'wrote':<8}{path}: {what}" for what, path in files.items() if path]
    blocks = [list(_graph(change)), _kinds(change), written]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _graph(change: ScheduledChange) -> Iterator[str]:
    capacity, peak = change.graph.change.capacity_bytes, change.proof.peak_bytes
    slots = [lane for lane in capacity if lane >= 0]
    fullest = max(slots, key=lambda lane: peak[lane] / capacity[lane])
    yield f"graph   {counted(len(change.graph.operations), 'operation')}, proven"
    for emu, words in change.proof.durability.items():
        yield f"        {emu} {words}"
    yield f"memory  at most {size_text(peak[fullest])} of {size_text(capacity[fullest])} ({lane_name(fullest)})"
    hosts = [lane for lane in capacity if lane < 0 and peak[lane]]
    if hosts:
        most = max(hosts, key=lambda lane: peak[lane])
        yield f"        at most {size_text(peak[most])} of host memory ({lane_name(most)})"
    cost, schedule = change.price, change.schedule
    yield f"price   {seconds_text(cost.seconds)} of the job, give or take {seconds_text(cost.deviation_seconds)}"
    parts = [(place, schedule.seconds_in(place)) for place in reversed(PLACES)]
    yield f"        {', '.join(f'{place} {seconds_text(seconds)}' for place, seconds in parts)}"
    yield f"        from start to end {seconds_text(schedule.makespan_seconds)}; no schedule of these operations takes"
    yield f"        less than {seconds_text(schedule.bound_seconds)}, gap {schedule.gap_ratio - 1:.1%}"
    yield f"        an engine is taken to be built in {seconds_text(change.engine_seconds)}"


def _kinds(change: ScheduledChange) -> list[str]:
    rows: list[tuple[str, ...]] = [("seconds", "", "operations", "bytes", "at work")]
    for row in change.by_kind:
        size = size_text(row.size_bytes) if row.size_bytes else "-"
        rows.append((row.place, row.kind, f"{row.operations_count:,}", size, seconds_text(row.seconds)))
    return table(rows, left=(0, 1))


def schedule_json(change: ScheduledChange) -> dict[str, object]:
    """The same under stable keys, units in their names."""
    cost, schedule = change.price, change.schedule
    return {
        "mode": change.mode,
        "engine_seconds": change.engine_seconds,
        "reserve_bytes": change.reserve_bytes,
        "operations": len(change.graph.operations),
        "makespan_seconds": schedule.makespan_seconds,
        "bound_seconds": schedule.bound_seconds,
        "gap_ratio": schedule.gap_ratio,
        "price": {"seconds": cost.seconds, **asdict(cost)},
        "windows": [asdict(window) for window in schedule.windows],
        "by_kind": [asdict(row) for row in change.by_kind],
        "durability": dict(change.proof.durability),
        "exposed_bytes": dict(change.proof.exposed_bytes),
        "peak_bytes": {lane_name(lane): size for lane, size in change.proof.peak_bytes.items()},
    }
