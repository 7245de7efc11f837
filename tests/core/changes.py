"""Changes of plan from what is where, byte by byte: named scenes, random ones, and a world that carries graphs out.

Every byte of an EMU has a number; a lane holds a set of them before and after. From that follow residencies and flows
(each missing byte once), and the world can check at every moment what a graph only counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from nereus.fleet import CPU_SLOT, Fleet, Node, uniform
from nereus.transitions.change import Change, EmuChange, Flow, Mode, Residency
from nereus.transitions.durations import Durations
from nereus.transitions.graph import MOVES, Operation, TransitionGraph, lane_id
from nereus.transitions.order import Lane, host_lane

Bytes = frozenset[int]
Places = dict[Lane, Bytes]
NOTHING: Bytes = frozenset()


@dataclass
class Scene:
    """A change, and which bytes it is about: by EMU the placing before and after, by flow its bytes in order."""

    change: Change
    fleet: Fleet
    before: dict[str, Places]
    after: dict[str, Places]
    carried: dict[tuple[str, Lane, Lane, int], list[int]]

    @property
    def durations(self) -> Durations:
        return Durations(fleet=self.fleet)


def flows_of(
    emu: str, before: Places, after: Places, *, relay: bool, chain: bool = False
) -> tuple[list[Flow], dict[tuple[str, Lane, Lane, int], list[int]]]:
    """Each missing byte once, from a holder that keeps it, else from the least loaded.

    With `relay` the first needer passes on what nobody keeps, with `chain` everything.
    """
    carried: dict[tuple[str, Lane, Lane, int], list[int]] = defaultdict(list)
    load: dict[Lane, int] = defaultdict(int)
    readers: dict[tuple[Lane, int], int] = defaultdict(int)
    for byte in sorted(frozenset().union(*after.values())):
        needers = [lane for lane in sorted(after) if byte in after[lane] and byte not in before.get(lane, NOTHING)]
        holders = [lane for lane in sorted(before) if byte in before[lane]]
        keepers = [lane for lane in holders if byte in after.get(lane, NOTHING)]
        hop, source = 0, None
        for needer in needers:
            passes_on = chain or (relay and not keepers)
            if source is None or not passes_on:
                source = min(keepers or holders, key=lambda lane: (load[lane], lane))
            carried[emu, source, needer, hop].append(byte)
            readers[source, byte] += hop == 0
            load[source] += 1
            if passes_on:
                source, hop = needer, hop + 1
    flows = []
    for (name, source, destination, hop), numbers in sorted(carried.items()):
        kept = after.get(source, NOTHING)
        alone = [b for b in numbers if hop == 0 and b not in kept and readers[source, b] == 1]
        carried[name, source, destination, hop] = [*alone, *(b for b in numbers if b not in set(alone))]
        flows.append(
            Flow(
                emu=name,
                source=source,
                destination=destination,
                size_bytes=len(numbers),
                hop=hop,
                frees_bytes=len(alone),
            )
        )
    return flows, dict(carried)


def guarded(before: Places, after: Places, copied: Mapping[Lane, int], lane: Lane, *, held: bool = False) -> int:
    """Old bytes of a lane that another lane keeps in place, or, where all is `held` until the commit, has."""
    if held:
        return len(before.get(lane, NOTHING) & frozenset().union(*(before[o] for o in before if o != lane)))
    others = [before[o] & after.get(o, NOTHING) for o in before if o != lane and not copied.get(o)]
    return len(before.get(lane, NOTHING) & frozenset().union(*others))


def scene(
    emus: Mapping[str, tuple[Places, Places]],
    fleet: Fleet,
    capacity: Mapping[Lane, int],
    *,
    modes: Mapping[str, Mode] | None = None,
    relay: bool = True,
    chain: bool = False,
    copied: Mapping[tuple[str, Lane], int] | None = None,
    blank: Mapping[tuple[str, Lane], tuple[int, int]] | None = None,
    shells: Collection[str] = (),
    through: Collection[str] = (),
    **more: object,
) -> Scene:
    """A scene from placings; `copied` and `blank` (before, after) by EMU and lane; `more` goes to Change.

    EMUs of `shells` arrive in new engines, those of `through` by way of the hosts.
    """
    modes, copied, blank = modes or {}, copied or {}, blank or {}
    residencies, flows, carried = [], [], {}
    for emu, (before, after) in emus.items():
        some, bytes_of = flows_of(emu, before, after, relay=relay, chain=chain)
        flows += some
        carried |= bytes_of
        moved = {lane: size for (name, lane), size in copied.items() if name == emu}
        if emu in {*shells, *through}:
            moved = {lane: len(old) for lane, old in before.items() if lane >= 0}
        held = emu in through or (emu in shells and modes.get(emu, "beside") == "beside")
        for lane in sorted({*before, *after}):
            here = blank.get((emu, lane), (0, 0))
            guard = guarded(before, after, moved, lane, held=held)
            residencies.append(_residency(emu, lane, before, after, moved.get(lane, 0), guard, here))
    options: dict[str, object] = {"chunk_bytes": 1 << 20, "least_chunk_bytes": 1} | more
    change = Change(
        emus=tuple(
            replace(_emu_change(emu, modes.get(emu, "beside")), shell=emu in shells, through_host=emu in through)
            for emu in emus
        ),
        residencies=tuple(residencies),
        flows=tuple(flows),
        capacity_bytes=dict(capacity),
        host_of={slot: host_lane(int(fleet.node_of[slot])) for slot in fleet.slots},
        **options,  # type: ignore[arg-type]
    )
    return Scene(change, fleet, {e: b for e, (b, _) in emus.items()}, {e: a for e, (_, a) in emus.items()}, carried)


def _residency(
    emu: str, lane: Lane, before: Places, after: Places, copied: int, guard: int, blank: tuple[int, int]
) -> Residency:
    old, new = before.get(lane, NOTHING), after.get(lane, NOTHING)
    return Residency(
        emu=emu,
        lane=lane,
        present_bytes=len(old),
        target_bytes=len(new),
        kept_bytes=len(old & new),
        copied_bytes=min(copied, len(old & new)),
        guarded_bytes=guard,
        blank_present_bytes=blank[0],
        blank_target_bytes=blank[1],
    )


def _emu_change(emu: str, mode: Mode) -> EmuChange:
    return EmuChange(emu=emu, mode=mode, checkpoint="state version 7", old_groups=2, new_groups=2, engine_seconds=0.5)


def split(first: int, size: int, lanes: list[Lane]) -> Places:
    """A range of bytes cut evenly over lanes."""
    edges = [first + size * i // len(lanes) for i in range(len(lanes) + 1)]
    return {lane: frozenset(range(a, b)) for lane, a, b in zip(lanes, edges, edges[1:], strict=False)}


def joined(*parts: Places) -> Places:
    """Placings of several parts of one EMU together."""
    lanes = sorted({lane for part in parts for lane in part})
    return {lane: frozenset().union(*(part.get(lane, NOTHING) for part in parts)) for lane in lanes}


@dataclass
class World:
    """What a graph's operations do to bytes, by EMU and lane; `parked` and `snapshot` by EMU, where they are and whence.

    An operation changes something when it ends; room is taken when an allocate ends. It asserts that nothing is read
    that is not there, that no lane ever holds more than its capacity, and that a shell is built in all its memory
    before anything arrives in it.
    """

    scene: Scene
    graph: TransitionGraph
    old: dict[tuple[str, Lane], set[int]] = field(default_factory=dict)
    new: dict[tuple[str, Lane], set[int]] = field(default_factory=lambda: defaultdict(set))
    snapshot: dict[tuple[str, Lane, Lane], set[int]] = field(default_factory=lambda: defaultdict(set))
    parked: dict[tuple[str, Lane, Lane], set[int]] = field(default_factory=lambda: defaultdict(set))
    level: dict[Lane, int] = field(default_factory=dict)
    lost: set[Lane] = field(default_factory=set)
    room: dict[tuple[str, Lane, str], int] = field(default_factory=lambda: defaultdict(int))
    built: set[tuple[str, Lane]] = field(default_factory=set)
    stripped: set[tuple[str, Lane]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.level = self.scene.change.used_bytes()
        self.modes = {emu.emu: emu.mode for emu in self.scene.change.emus}
        self.shells = {emu.emu for emu in self.scene.change.emus if emu.shell}
        self.through = {emu.emu for emu in self.scene.change.emus if emu.through_host}
        self.places = {(r.emu, r.lane): r for r in self.scene.change.residencies}
        for emu, places in self.scene.before.items():
            for lane, numbers in places.items():
                self.old[emu, lane] = set(numbers)
        for (emu, lane), r in self.places.items():  # what stays in place is new state as well
            kept = self.scene.before[emu].get(lane, NOTHING) & self.scene.after[emu].get(lane, NOTHING)
            stays = r.present_bytes == r.kept_bytes == r.target_bytes and not r.copied_bytes
            if self.modes[emu] != "beside" or stays:
                self.new[emu, lane] |= set(sorted(kept)[r.copied_bytes :])

    def copied(self, emu: str, lane: Lane) -> set[int]:
        """Kept bytes that are copied on their lane: all beside, in place the first `copied_bytes`."""
        kept = sorted(self.scene.before[emu].get(lane, NOTHING) & self.scene.after[emu].get(lane, NOTHING))
        return set(kept if self.modes[emu] == "beside" else kept[: self.places[emu, lane].copied_bytes])

    def flow_bytes(self, emu: str, source: Lane, destination: Lane, hop: int, start: int, size: int) -> set[int]:
        return set(self.scene.carried[emu, source, destination, hop][start : start + size])

    def own(self, op: Operation) -> set[int]:
        """Bytes that a release or a parking stage_out of old state is about."""
        emu, lane = op.key
        if op.peer is not None:
            return self.flow_bytes(emu, lane, op.peer, 0, op.start, op.size_bytes)
        if self.modes[emu] == "beside":
            return set(self.scene.before[emu].get(lane, NOTHING))
        apart: set[int] = set()
        for release in map(self.graph.operations.__getitem__, self.graph.by_kind["release"]):
            if release.key == op.key and release.note == "" and release.peer is not None:
                apart |= self.flow_bytes(emu, lane, release.peer, 0, release.start, release.size_bytes)
        leaves = self.scene.before[emu].get(lane, NOTHING) - self.scene.after[emu].get(lane, NOTHING)
        return (set(leaves) - apart) | self.copied(emu, lane)

    def end(self, op: Operation) -> None:
        """Carries out an operation."""
        emu = op.emu
        if op.delta_bytes:
            self.level[op.lanes[0]] = self.level.get(op.lanes[0], 0) + op.delta_bytes
            assert 0 <= self.level[op.lanes[0]] <= self.scene.change.capacity_bytes[op.lanes[0]], op.id
            self.room[(*op.key, op.note)] += op.size_bytes if op.kind == "allocate" else 0
        if emu in self.shells:
            self._shell(op)
        if op.kind == "copy":
            held = self._read(op) if op.via is None or emu in self.through else self.parked[emu, op.via, op.lanes[0]]
            assert self.copied(*op.key) <= held, op.id
            assert len(self.copied(*op.key)) == op.size_bytes
            self.new[op.key] |= self.copied(*op.key)
        elif op.kind == "release":
            self._release(op)
        elif op.note == "snapshot" and op.kind == "stage_out":
            self.snapshot[emu, op.lanes[1], op.lanes[0]] |= self.old[op.key]
        elif op.note == "parked" and op.kind == "stage_out":
            assert self.own(op) <= self.old[op.key], op.id
            self.parked[emu, op.lanes[1], op.lanes[0]] |= self.own(op)
        elif op.kind in MOVES:
            source, destination = op.lanes
            numbers = self.flow_bytes(emu, source, destination, op.hop, op.start, op.size_bytes)
            assert numbers <= (self._read(op) if op.hop == 0 else self.new[emu, source]), op.id
            assert not numbers & self.new[emu, destination], op.id
            self.new[emu, destination] |= numbers
        elif op.kind == "verify":
            assert self.new[op.key] == set(self.scene.after[emu][op.lanes[0]]), op.id

    def _read(self, op: Operation) -> set[int]:
        """Old bytes where a move or a copy reads them: on the lane or parked; in the snapshot what goes through it."""
        emu, lane = op.key
        if emu in self.through and lane >= 0:
            assert op.via is not None, op.id
            return self.snapshot[emu, op.via, lane]
        return self.old.get(op.key, set()) | (self.parked[emu, op.via, lane] if op.via is not None else set())

    def _shell(self, op: Operation) -> None:
        end = op.emu, op.lanes[-1] if op.lanes else 0
        if op.kind == "build_engine":
            r = self.places[end]
            assert (self.room[(*end, "")], self.room[(*end, "blank")]) == (r.target_bytes, r.blank_target_bytes), op.id
            self.built.add(end)
        elif op.kind == "release" and op.note == "blank":
            self.stripped.add(end)
        elif end[1] >= 0 and (op.kind == "copy" or (op.kind in MOVES and op.note == "")):
            assert end in self.built, op.id

    def _release(self, op: Operation) -> None:
        if op.note == "":
            numbers = self.own(op)
            assert len(numbers) == op.size_bytes, op.id
            assert numbers <= self.old[op.key], op.id
            self.old[op.key] -= numbers
        elif op.note.startswith("snapshot"):
            for key, numbers in self.snapshot.items():
                if key[:2] == op.key and op.note == f"snapshot {lane_id(key[2])}":
                    numbers.clear()
        elif op.note.startswith("parked"):
            outs = [
                o
                for o in map(self.graph.operations.__getitem__, self.graph.by_kind["stage_out"])
                if o.note == "parked" and o.emu == op.emu and o.lanes[1] == op.lanes[0] and o.start == op.start
            ]
            names = {out.id: f"parked {lane_id(out.lanes[0])}" + _for(out) for out in outs}
            (out,) = [o for o in outs if names[o.id] == op.note]
            self.parked[(*op.key, out.lanes[0])] -= self.own(out)

    def lose(self, lanes: tuple[Lane, ...]) -> None:
        """The memory of the lanes is gone."""
        self.lost |= set(lanes)
        for held in (self.old, self.new, self.snapshot, self.parked):
            for key, numbers in held.items():
                if key[1] in self.lost:
                    numbers.clear()

    def anywhere(self, emu: str, *kinds: str) -> set[int]:
        """Bytes of an EMU that some lane holds, by kind of holder."""
        return {n for kind in kinds for key, numbers in getattr(self, kind).items() if key[0] == emu for n in numbers}


def _for(out: Operation) -> str:
    return "" if out.peer is None else f" for {lane_id(out.peer)}"


def two_nodes(slots: int) -> Fleet:
    """Slots of two nodes, the first half on the first."""
    half = (slots + 1) // 2
    return (
        Fleet(
            nodes=(
                Node(slots=tuple(range(half)), device=CPU_SLOT),
                Node(slots=tuple(range(half, slots)), device=CPU_SLOT),
            )
        )
        if slots > 1
        else uniform(1)
    )


Choose = Callable[[int, int], int]
"""A number between two, ends included: hypothesis's or a seeded generator's."""


def any_scene(choose: Choose) -> Scene:
    """Several EMUs over a few slots and their hosts, random placings, modes and copies, memory often full; some urgent."""
    slots = choose(2, 5)
    fleet = two_nodes(slots)
    hosts = [host_lane(n) for n in range(len(fleet.nodes))]
    lanes = [*range(slots), *(host for host in hosts if choose(0, 3) == 0)]
    emus: dict[str, tuple[Places, Places]] = {}
    modes: dict[str, Mode] = {}
    copied: dict[tuple[str, Lane], int] = {}
    blank: dict[tuple[str, Lane], tuple[int, int]] = {}
    shells, through = set[str](), set[str]()
    for index in range(choose(1, 3)):
        emu, size = f"emu{index}", choose(1, 8)
        before = {lane: _some(range(size), choose) for lane in lanes if choose(0, 1)}
        held = sorted(frozenset().union(*before.values()))
        after = {lane: _some(held, choose) for lane in lanes if choose(0, 1)}
        if choose(0, 3) == 0:  # a round of swaps: every lane's bytes go to the next
            after = {lanes[(lanes.index(lane) + 1) % len(lanes)]: numbers for lane, numbers in before.items()}
        for lane, numbers in before.items():  # state is never given up
            after[lane] = after.get(lane, NOTHING) | (numbers - frozenset().union(*after.values()))
        emus[emu] = before, after
        modes[emu] = ("beside", "snapshot", "checkpoint", "checkpoint")[choose(0, 3)]
        shells |= {emu} if choose(0, 2) == 0 else set()
        through |= {emu} if modes[emu] == "snapshot" and choose(0, 1) else set()
        for lane in lanes[:slots]:
            if choose(0, 4) == 0:
                copied[emu, lane] = choose(1, 3)
            if choose(0, 4) == 0 and (lane in before or lane in after):
                blank[emu, lane] = choose(0, 3), choose(0, 3)
    engine = choose(0, 2)
    slots_of_engine = lanes[: slots if engine else 0]  # nothing but blank memory, as engines of generation have
    emus["engine"], modes["engine"] = ({**(blanks := dict.fromkeys(slots_of_engine, NOTHING))}, blanks), "beside"
    blank |= {("engine", lane): (choose(0, 3), choose(0, 3)) for lane in slots_of_engine}
    relay, exact = bool(choose(0, 1)), bool(choose(0, 1))
    level, top = defaultdict(int), defaultdict(int)
    for emu, (before, after) in emus.items():
        for lane in lanes:
            here = blank.get((emu, lane), (0, 0))
            level[lane] += len(before.get(lane, NOTHING)) + here[0]
            top[lane] += len(after.get(lane, NOTHING)) + here[1]
            if modes[emu] == "beside" and lane >= 0 and choose(0, 1):
                top[lane] += len(before.get(lane, NOTHING)) + (here[0] if emu in shells else 0)
    capacity = {lane: max(level[lane], top[lane]) + (0 if exact else choose(0, 2)) for lane in range(slots)}
    capacity |= {host: max(level[host], top[host]) + choose(0, 40) for host in hosts}
    phases = {lane: choose(0, 5) for lane in range(slots)}
    outside = (("build_groups", "allocate"), ("build_engine",), (), ())[choose(0, 3)]
    ways = {"modes": modes, "shells": shells, "through": through, "copied": copied, "blank": blank}
    urgent = choose(0, 2) == 0
    made = scene(emus, fleet, capacity, relay=relay, phase_bytes=phases, outside=outside, urgent=urgent, **ways)  # type: ignore[arg-type]
    return idle(made, "engine") if engine > 1 else made


def idle(made: Scene, emu: str) -> Scene:
    """The scene in which no phase of the running step touches the EMU any more."""
    emus = tuple(replace(each, idle=each.emu == emu) for each in made.change.emus)
    return replace(made, change=replace(made.change, emus=emus))


def _some(numbers: Sequence[int], choose: Choose) -> Bytes:
    mask = choose(0, (1 << len(numbers)) - 1)
    return frozenset(number for at, number in enumerate(numbers) if mask >> at & 1)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    """`any_scene` by hypothesis."""
    return any_scene(lambda low, high: draw(st.integers(low, high)))
