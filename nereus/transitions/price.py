"""The price of a transition: predicted seconds by place with an error bar, and a lower bound of it from flows alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import sqrt

from nereus.transitions.change import Change
from nereus.transitions.durations import NANOSECONDS_PER_SECOND, Durations
from nereus.transitions.graph import MOVES, Operation, TransitionGraph
from nereus.transitions.order import Lane
from nereus.transitions.timeline import Timeline, timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Predicted seconds of a transition: in the pause, interleaved with a step, and outside of steps; what admission weighs.

    `commit_seconds` of these are over when the commit is. `deviation_seconds` is the standard deviation of `seconds`, from the factors of the kinds on the longest chain;
    `bound_seconds` is what no schedule of the graph goes below.
    """

    pause_seconds: float
    interleaved_seconds: float
    outside_seconds: float
    deviation_seconds: float
    bound_seconds: float
    commit_seconds: float

    @property
    def seconds(self) -> float:
        """What the job loses: pause and interleaved time."""
        return self.pause_seconds + self.interleaved_seconds


def price(graph: TransitionGraph, durations: Durations, schedule: Timeline | None = None) -> Price:
    """The price of a checked graph; `schedule` saves computing its timeline again."""
    schedule = schedule or timeline(graph, durations)
    lost = [w for w in schedule.windows if w.place != "outside"]
    after = schedule.makespan_seconds - schedule.end_seconds[graph.by_kind["commit"][0]]
    return Price(
        pause_seconds=schedule.seconds_in("pause"),
        interleaved_seconds=schedule.seconds_in("interleaved"),
        outside_seconds=schedule.seconds_in("outside"),
        deviation_seconds=deviation_seconds(graph, durations, schedule),
        bound_seconds=sum(w.bound_seconds for w in lost),
        commit_seconds=schedule.seconds_in("pause") + schedule.seconds_in("interleaved") - after,
    )


def deviation_seconds(graph: TransitionGraph, durations: Durations, schedule: Timeline) -> float:
    """Standard deviation of the makespan: each kind's factor times its seconds on the chain that makes it, squared, summed.

    A kind's operations share one factor (they were calibrated together), so their seconds add before they are squared.
    """
    shares = durations.tolls.deviation_share
    by_factor: dict[str, float] = defaultdict(float)
    for index in critical_chain(graph, schedule):
        kind = graph.operations[index].kind
        moves_bytes = kind in MOVES or kind in ("copy", "verify")
        by_factor["rate" if moves_bytes and kind not in shares else kind] += graph.operations[index].seconds
    return sqrt(sum((shares.get(factor, 0.0) * seconds) ** 2 for factor, seconds in by_factor.items()))


def critical_chain(graph: TransitionGraph, schedule: Timeline) -> list[int]:
    """Operations from the last to end back to the first: of each, what ended last of what it waited for or stood behind.

    What it stood behind ended when it started, and shares a lane with it or is what the pause waited for.
    """
    ended: dict[int, list[int]] = defaultdict(list)
    for index in range(len(graph.operations)):
        ended[_tick(schedule.end_seconds[index])].append(index)
    chain = [max(range(len(graph.operations)), key=lambda i: schedule.end_seconds[i])]
    seen = set(chain)
    while True:
        index = chain[-1]
        start, lanes, place = (
            schedule.start_seconds[index],
            graph.operations[index].lanes,
            graph.operations[index].place,
        )
        before = [o for o in graph.predecessors[index] if o not in seen]
        for other in ended[_tick(start)]:
            operation = graph.operations[other]
            if other not in seen and (operation.place != place or not set(lanes).isdisjoint(operation.lanes)):
                before.append(other)
        if not before:
            return chain
        chain.append(max(before, key=lambda o: (schedule.end_seconds[o], o)))
        seen.add(chain[-1])


def _tick(seconds: float) -> int:
    return round(seconds * NANOSECONDS_PER_SECOND)


def least_seconds(change: Change, durations: Durations) -> float:
    """A lower bound of the price from the change alone, without order or graph: what search may use.

    Every resource carries the flows and the thread work of its slot; nothing before an activation takes less than its
    quiesce, its verification and the commit. Snapshots and parked bytes come on top and are left out; so is what may
    happen outside of steps.
    """
    outside = set(change.outside)
    emus = {emu.emu: emu for emu in change.emus}
    load: dict[int, int] = defaultdict(int)
    slots: dict[Lane, int] = defaultdict(int)
    through = change.through()
    for flow in change.flows:
        if emus[flow.emu].frozen and outside & MOVES:
            continue
        read = change.host_of[flow.source] if flow.emu in through and flow.source >= 0 and flow.hop == 0 else None
        move = Operation(kind="transfer", lanes=(flow.source, flow.destination), size_bytes=flow.size_bytes, via=read)
        for resource, busy in durations.holds(move):
            load[resource] += busy
    chain = 0.0
    for r in change.residencies:
        if r.lane < 0:
            continue
        apart = emus[r.emu].frozen and "verify" in outside
        verify = durations.seconds("verify", (r.lane,), r.target_bytes) if r.target_bytes and not apart else 0.0
        quiesce = durations.tolls.quiesce_seconds if r.present_bytes or r.blank_present_bytes else 0.0
        engine = activate = 0.0
        if r.target_bytes or r.blank_target_bytes:
            emu = emus[r.emu]
            activate = durations.tolls.activate_seconds
            engine = emu.engine_seconds * ("build_engine" not in outside)
            engine += durations.tolls.group_seconds * emu.new_groups * ("build_groups" not in outside)
        frozen = emus[r.emu].frozen
        slots[r.lane] += sum(_tick(part) for part in (verify, quiesce, engine, activate))
        before = verify if frozen else quiesce + verify
        chain = max(chain, before + durations.tolls.commit_seconds + activate if activate else 0.0)
    busiest = max(load.values(), default=0)
    for lane, busy in slots.items():
        ports = max((load.get(port, 0) for port in durations.ports(lane)), default=0)
        busiest = max(busiest, busy + ports)
    return max(busiest / NANOSECONDS_PER_SECOND, chain)
