"""A transition's timeline as a trace in the Chrome JSON format, which Perfetto and chrome://tracing open.

A process for each slot, with a track for its thread, its memory and each of its ports; one for the network ports that
slots share, one for the hosts, one for the job. A slice is one piece of work of one operation: its name is the
operation's id, its category the kind. Times are microseconds from the transition's beginning. What takes no time is an
instant; the bytes that a lane holds are a counter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from nereus.transitions.durations import NANOSECONDS_PER_SECOND, Durations
from nereus.transitions.graph import Operation, TransitionGraph
from nereus.transitions.order import Lane, lane_name
from nereus.transitions.timeline import Timeline

NANOSECONDS_PER_MICROSECOND = 1000
JOB, NETWORK, HOSTS = "job", "network", "hosts"
COLOURS = {
    "quiesce": "terrible",
    "allocate": "good",
    "copy": "thread_state_runnable",
    "transfer": "thread_state_running",
    "stage_out": "rail_load",
    "stage_in": "rail_response",
    "verify": "rail_idle",
    "build_groups": "vsync_highlight_color",
    "build_engine": "rail_animation",
    "commit": "black",
    "activate": "startup",
    "destroy_groups": "grey",
    "release": "bad",
}
"""Reserved names of chrome://tracing's colours; Perfetto chooses its own by name."""

Event = dict[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """One operation at work on one track, at whole nanoseconds; `process` and `track` are for people."""

    process: str
    track: str
    start_seconds: float
    end_seconds: float
    index: int


def trace(graph: TransitionGraph, schedule: Timeline, durations: Durations) -> dict[str, object]:
    """The trace as JSON values: metadata first, then slices, instants and counters by time. No track overlaps."""
    slices = _apart(list(_slices(graph, schedule, durations)))
    names: dict[str, list[str]] = defaultdict(list)
    for process in (JOB, *(lane_name(lane) for lane in sorted(graph.change.capacity_bytes) if lane >= 0)):
        names[process] = []
    for piece in slices:
        if piece.track not in names[piece.process]:
            names[piece.process].append(piece.track)
    numbers = {process: at for at, process in enumerate(names, 1)}
    threads = {(p, t): at for p, tracks in names.items() for at, t in enumerate(sorted(tracks, key=_track_rank), 1)}
    events = [_slice_event(piece, graph, numbers, threads) for piece in slices]
    events += _instants(graph, schedule, numbers)
    events += _counters(graph, schedule, numbers)
    events.sort(key=lambda event: (event["ts"], event["pid"], str(event["name"])))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"makespan_seconds": schedule.makespan_seconds, "bound_seconds": schedule.bound_seconds},
        "traceEvents": [*_metadata(numbers, threads), *events],
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS_PER_SECOND)


def _slices(graph: TransitionGraph, schedule: Timeline, durations: Durations) -> Iterator[Slice]:
    """Every span on all that it holds; of work that holds nothing on the lanes that it is about."""
    for index, start, end in schedule.spans:
        operation = graph.operations[index]
        begin, length = _nanoseconds(start), _nanoseconds(end) - _nanoseconds(start)
        whole = _nanoseconds(operation.seconds)
        if length <= 0 or whole <= 0:
            continue
        if operation.carries:
            for resource, busy in durations.holds(operation):
                process, track = _resource(durations.resource_name(resource))
                until = begin + min(-(-busy * length // whole), length)
                if until > begin:
                    yield _slice(process, track, start, until / NANOSECONDS_PER_SECOND, index)
            continue
        for process, track in _places(operation):
            yield _slice(process, track, start, end, index)


def _slice(process: str, track: str, start: float, end: float, index: int) -> Slice:
    return Slice(process=process, track=track, start_seconds=start, end_seconds=end, index=index)


def _resource(name: str) -> tuple[str, str]:
    """Process and track of a resource: "slot 3 link out", "net port 2 in", "host 0"."""
    words = name.split()
    if words[0] == "slot":
        return " ".join(words[:2]), " ".join(words[2:])
    return (HOSTS, name) if words[0] == "host" else (NETWORK, name)


def _places(operation: Operation) -> Iterator[tuple[str, str]]:
    """Process and track of what is no move: the thread of each slot, or its memory; of a host its memory alone."""
    if not operation.lanes:
        yield JOB, operation.kind
    memory = operation.kind in ("allocate", "release")
    work = "memory" if memory else "thread" if operation.place != "outside" else "outside"
    for lane in operation.lanes:
        if lane >= 0:
            yield lane_name(lane), work
        else:
            yield HOSTS, f"{lane_name(lane)} {work}"


def _apart(slices: list[Slice]) -> list[Slice]:
    """Pieces of one operation that follow each other as one; what overlaps on a track goes to a second, a third one."""
    by_track: dict[tuple[str, str], list[Slice]] = defaultdict(list)
    for piece in sorted(slices, key=lambda s: (s.start_seconds, s.end_seconds, s.index)):
        run = by_track[piece.process, piece.track]
        if run and run[-1].index == piece.index and run[-1].end_seconds == piece.start_seconds:
            run[-1] = _slice(*_name(run[-1]), run[-1].start_seconds, piece.end_seconds, piece.index)
        else:
            run.append(piece)
    found: list[Slice] = []
    for (process, track), run in by_track.items():
        ends: list[float] = []
        for piece in run:
            at = next((at for at, end in enumerate(ends) if end <= piece.start_seconds), len(ends))
            ends[at : at + 1] = [piece.end_seconds]
            name = track if at == 0 else f"{track} ({at + 1})"
            found.append(_slice(process, name, piece.start_seconds, piece.end_seconds, piece.index))
    return found


def _name(piece: Slice) -> tuple[str, str]:
    return piece.process, piece.track


def _track_rank(track: str) -> tuple[int, str]:
    """Thread, memory and outside before the ports."""
    order = ("thread", "memory", "outside")
    return next((at for at, name in enumerate(order) if track.startswith(name)), len(order)), track


def _slice_event(
    piece: Slice, graph: TransitionGraph, numbers: dict[str, int], threads: dict[tuple[str, str], int]
) -> Event:
    operation, begin = graph.operations[piece.index], _nanoseconds(piece.start_seconds)
    event: Event = {
        "name": graph.ids[piece.index],
        "cat": operation.kind,
        "ph": "X",
        "ts": begin / NANOSECONDS_PER_MICROSECOND,
        "dur": (_nanoseconds(piece.end_seconds) - begin) / NANOSECONDS_PER_MICROSECOND,
        "pid": numbers[piece.process],
        "tid": threads[piece.process, piece.track],
        "args": _arguments(operation),
    }
    return event | ({"cname": COLOURS[operation.kind]} if operation.kind in COLOURS else {})


def _arguments(operation: Operation) -> dict[str, object]:
    return {"bytes": operation.size_bytes, "place": operation.place, "emu": operation.emu}


def _instants(graph: TransitionGraph, schedule: Timeline, numbers: dict[str, int]) -> Iterator[Event]:
    """What takes no time, such as that all of an EMU's snapshots are complete."""
    for index, operation in enumerate(graph.operations):
        if _nanoseconds(operation.seconds) == 0:
            slot = next((lane for lane in operation.lanes if lane >= 0), None)
            yield {
                "name": graph.ids[index],
                "cat": operation.kind,
                "ph": "i",
                "s": "p",
                "ts": _nanoseconds(schedule.end_seconds[index]) / NANOSECONDS_PER_MICROSECOND,
                "pid": numbers[JOB if slot is None else lane_name(slot)],
                "tid": 0,
                "args": _arguments(operation),
            }


def _counters(graph: TransitionGraph, schedule: Timeline, numbers: dict[str, int]) -> Iterator[Event]:
    """The bytes that each slot holds, from the start on: room counts from the start of its allocate."""
    changes: dict[Lane, list[tuple[int, int]]] = defaultdict(list)
    for index, operation in enumerate(graph.operations):
        if operation.delta_bytes and operation.lanes[0] >= 0:
            times = schedule.start_seconds if operation.delta_bytes > 0 else schedule.end_seconds
            changes[operation.lanes[0]].append((_nanoseconds(times[index]), operation.delta_bytes))
    level = graph.change.used_bytes()
    for lane in sorted(changes):
        held, steps = level.get(lane, 0), sorted(changes[lane])
        yield _counter(numbers[lane_name(lane)], 0, held)
        for (at, delta), (following, _) in pairwise([*steps, (-1, 0)]):
            held += delta
            if following != at:
                yield _counter(numbers[lane_name(lane)], at, held)


def _counter(process: int, at: int, held: int) -> Event:
    return {
        "name": "held",
        "ph": "C",
        "ts": at / NANOSECONDS_PER_MICROSECOND,
        "pid": process,
        "args": {"bytes": held},
    }


def _metadata(numbers: dict[str, int], threads: dict[tuple[str, str], int]) -> Iterator[Event]:
    for process, number in numbers.items():
        yield {"name": "process_name", "ph": "M", "pid": number, "args": {"name": process}}
        yield {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}}
    for (process, track), number in threads.items():
        entry = {"ph": "M", "pid": numbers[process], "tid": number}
        yield {"name": "thread_name", **entry, "args": {"name": track}}
        yield {"name": "thread_sort_index", **entry, "args": {"sort_index": number}}
