"""What a change of layout or a weight sync moves: bytes by component, busiest ports beside their bounds, slot by slot.

Everything here is a function of models, plans and fleet. Seconds are those of the busiest port at the rates of the
devices' data sheets: without groups, engines and latency, so a lower bound of the pause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.fleet import Fleet
from nereus.layout import StagePlan
from nereus.model import ModelSpec
from nereus.storage import emu_name
from nereus.transfer.boxtable import TRACK, BoxTable, Track, joined, of_stage
from nereus.transfer.demands import DESTINATION, HOP, SOURCE, START, STOP, STREAM
from nereus.transfer.placement import Objective, StageMove, place
from nereus.transfer.ports import Floats, Ints
from nereus.transfer.routes import Routes, routes
from nereus.transfer.streams import Streams, streams

COMPONENTS = {"weight": "weights", "master": "masters", "exp_avg": "moments", "exp_avg_sq": "moments"}
PORTS = ("slot send", "slot receive", "network send", "network receive")

Kind = tuple[str, tuple[str, ...]]  # an EMU, and components that are always cut alike


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentBytes:
    """Bytes of weights, masters or moments of one EMU, over all slots.

    Held before and after, copies counted; of those after: kept in place, moved to their slot, and moved between nodes.
    """

    emu: str
    component: str
    before_bytes: int
    after_bytes: int
    kept_bytes: int
    moved_bytes: int
    inter_node_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BusiestPort:
    """The busiest port of one of PORTS: of which slot (the first, where slots share it), and its load.

    `least_seconds` bounds from below how long the busiest port of this kind works under any choice of senders and
    relays, for the same placement.
    """

    kind: str
    slot: int
    node: int
    load_bytes: int
    rate_bytes_per_second: float
    seconds: float
    least_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotBytes:
    """One slot: state that it holds before and after, and what passes its ports; `seconds` of its busiest port."""

    slot: int
    node: int
    before_bytes: int
    after_bytes: int
    kept_bytes: int
    received_bytes: int
    sent_bytes: int
    inter_node_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStage:
    """A model-stage: its name in the plan, its plan now (of a sync: of the stage that sends), and its placed new plan."""

    name: str
    before: StagePlan
    after: StagePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class StandingSync:
    """The weight sync of every step into a generation that stays as it is: before and after the change."""

    generate: StagePlan
    before_bytes: int
    after_bytes: int
    before_seconds: float
    after_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MovementReport:
    """What a change (or, with `is_sync`, a weight sync) moves.

    `least_moved_bytes` bounds the bytes over all placements (None: not known), `exact` says that the placement is not
    by classes; `seconds` and `least_seconds` are of the busiest port. `hops` counts the times that a byte is handed on
    at most; `direct_send_bytes` bounds the busiest sender when nobody hands on. `horizon_steps` weighed the syncs.
    `routes` are what all this is counted from.
    """

    fleet: Fleet
    routes: Routes
    is_sync: bool
    stages: tuple[PlacedStage, ...]
    components: tuple[ComponentBytes, ...]
    ports: tuple[BusiestPort, ...]
    slots: tuple[SlotBytes, ...]
    objective: Objective
    exact: bool
    split_groups: int
    least_moved_bytes: int | None
    bottleneck: str
    seconds: float
    least_seconds: float
    direct_send_bytes: int
    hops_count: int
    horizon_steps: int
    sync: StandingSync | None = None

    def total(self, name: str) -> int:
        """The sum of a field of `components`, such as "moved_bytes"."""
        return sum(getattr(component, name) for component in self.components)

    @property
    def gap(self) -> float:
        """How far the busiest port is above its lower bound, as a part of it; 0 when nothing moves."""
        return self.seconds / self.least_seconds - 1 if self.least_seconds else 0.0

    @property
    def moved_gap(self) -> float | None:
        """Moved bytes above the least over all placements, as a part of it; None where that is not known or is 0."""
        return self.total("moved_bytes") / self.least_moved_bytes - 1 if self.least_moved_bytes else None


def change_report(
    moves: Mapping[str, StageMove],
    fleet: Fleet,
    *,
    objective: Objective,
    horizon_steps: int,
    generate: StagePlan | None = None,
) -> MovementReport:
    """Places and routes a change of one or more model-stages; each `before` is a plan.

    With `generate` the actor's weights go to that standing stage at every step, and the placement minds it.
    """
    before = {name: move.before for name, move in moves.items() if move.before is not None}
    actor = next((name for name, move in moves.items() if move.after.model == "actor"), None)
    standing: dict[str, tuple[ModelSpec, StagePlan]] = {}
    syncs: list[tuple[str, str]] = []
    if generate is not None and actor is not None:
        standing["actor_generate"] = (moves[actor].spec, generate)
        syncs.append((actor, "actor_generate"))
    placed = place(
        moves, fleet, objective=objective, syncs=syncs, standing=standing, horizon_steps=float(horizon_steps)
    )
    after = {name: replace(move.after, slots=placed.slots[name]) for name, move in moves.items()}
    tables = [of_stage(moves[name].spec, stage) for name, stage in before.items()]
    routed = _routed(joined(tables), [(moves[name].spec, stage) for name, stage in after.items()], fleet)
    report = _report(
        routed,
        tuple(PlacedStage(name=name, before=stage, after=after[name]) for name, stage in before.items()),
        objective=objective,
        horizon_steps=horizon_steps,
    )
    report = replace(
        report,
        exact=placed.exact,
        split_groups=placed.cost.split_groups,
        least_moved_bytes=placed.least_moved_bytes,
    )
    if generate is None or actor is None:
        return report
    old, new = (_sync(moves[actor].spec, stage, generate, fleet) for stage in (before[actor], after[actor]))
    sync = StandingSync(
        generate=generate,
        before_bytes=old.moved_bytes,
        after_bytes=new.moved_bytes,
        before_seconds=old.loads.seconds,
        after_seconds=new.loads.seconds,
    )
    return replace(report, sync=sync)


def sync_report(
    spec: ModelSpec, train: StagePlan, generate: StagePlan, fleet: Fleet, *, objective: Objective, horizon_steps: int
) -> MovementReport:
    """Places the generation stage beside a standing training stage and routes the weight sync of one step."""
    placed = place(
        {"actor_generate": StageMove(spec=spec, before=None, after=generate)},
        fleet,
        objective=objective,
        syncs=[("actor_train", "actor_generate")],
        standing={"actor_train": (spec, train)},
        horizon_steps=float(horizon_steps),
    )
    after = replace(generate, slots=placed.slots["actor_generate"])
    report = _report(
        _sync(spec, train, after, fleet),
        (PlacedStage(name="actor_generate", before=train, after=after),),
        objective=objective,
        horizon_steps=horizon_steps,
    )
    return replace(report, is_sync=True, exact=placed.exact, split_groups=placed.cost.split_groups)


def _sync(spec: ModelSpec, train: StagePlan, generate: StagePlan, fleet: Fleet) -> Routes:
    """The routes of one weight sync; of the training stage only its weights count."""
    weights = replace(train, stage="infer")  # cut by the same rules, without an optimizer
    return _routed(of_stage(spec, weights), [(spec, generate)], fleet, {emu_name(generate): emu_name(weights)})


def _routed(
    present: BoxTable,
    stages: Sequence[tuple[ModelSpec, StagePlan]],
    fleet: Fleet,
    rename: Mapping[str, str] | None = None,
) -> Routes:
    """The routes to placed stages from what is present."""
    target = joined([of_stage(spec, stage) for spec, stage in stages])
    return routes(streams(present, target, rename), np.arange(len(fleet.node_of), dtype=np.int64), fleet)


def _report(
    found: Routes, stages: tuple[PlacedStage, ...], *, objective: Objective, horizon_steps: int
) -> MovementReport:
    ports = _ports(found)
    busiest = max(ports, key=lambda port: port.seconds)
    return MovementReport(
        fleet=found.fleet,
        routes=found,
        is_sync=False,
        stages=stages,
        components=_components(found),
        ports=ports,
        slots=_slots(found),
        objective=objective,
        exact=True,
        split_groups=0,
        least_moved_bytes=None,
        bottleneck=busiest.kind if busiest.load_bytes else "",
        seconds=found.loads.seconds,
        least_seconds=found.least.seconds,
        direct_send_bytes=round(found.direct_send_bytes),
        hops_count=int(found.rows[:, HOP].max(initial=0)),
        horizon_steps=horizon_steps,
    )


# -- bytes by component --------------------------------------------------------------------------------------------------


def _components(found: Routes) -> tuple[ComponentBytes, ...]:
    """Rows by EMU of the target, and by component in the order of COMPONENTS."""
    s, node = found.streams, found.fleet.node_of
    rows = found.rows
    crosses = node[rows[:, SOURCE]] != node[rows[:, DESTINATION]]
    emus = list(dict.fromkeys(track.emu for track in s.target.tracks))
    held, wanted = _held_by_kind(s.present), _held_by_kind(s.target)
    renamed = {t.emu for t in s.present.tracks}.isdisjoint(emus)  # a sync's source has another name, and one EMU only
    sums: dict[tuple[str, str], list[int]] = {}
    for (emu, components), moved in moved_by_kind(s, rows).items():
        source = s.present.tracks[0].emu if renamed else emu
        after = wanted[emu, components]
        going, across = int(moved.sum()), int(moved[crosses].sum())
        amounts = (held.get((source, components), 0), after, after - going, going, across)
        for component in components:
            row = sums.setdefault((emu, COMPONENTS[component]), [0] * len(amounts))
            for index, amount in enumerate(amounts):
                row[index] += amount // len(components)
    order = list(dict.fromkeys(COMPONENTS.values()))
    return tuple(
        ComponentBytes(
            emu=emu,
            component=component,
            before_bytes=row[0],
            after_bytes=row[1],
            kept_bytes=row[2],
            moved_bytes=row[3],
            inter_node_bytes=row[4],
        )
        for (emu, component), row in sorted(sums.items(), key=lambda x: (emus.index(x[0][0]), order.index(x[0][1])))
    )


def _kind(track: Track) -> Kind:
    return track.emu, track.components


def row_bytes(table: BoxTable) -> Ints:
    """[rows] bytes of each row over the components of its track."""
    return table.elements * np.array([t.element_bytes for t in table.tracks], dtype=np.int64)[table.rows[:, TRACK]]


def _held_by_kind(table: BoxTable) -> dict[Kind, int]:
    """Bytes over all slots that hold them."""
    members = np.array([len(x) for x in table.sets], dtype=np.int64)
    by_row = row_bytes(table) * members[table.holders]
    by_track = np.zeros(len(table.tracks), dtype=np.int64)
    np.add.at(by_track, table.rows[:, TRACK], by_row)
    held: dict[Kind, int] = {}
    for track, amount in zip(table.tracks, by_track.tolist(), strict=True):
        held[_kind(track)] = held.get(_kind(track), 0) + amount
    return held


def moved_by_kind(s: Streams, rows: Ints) -> dict[Kind, Ints]:
    """For each kind [rows] how many bytes of each route row are of it."""
    numbers: dict[Kind, int] = {}
    by_track = [numbers.setdefault(_kind(track), len(numbers)) for track in s.target.tracks]
    kind_of = np.array(by_track, dtype=np.int64)[s.atoms[:, TRACK]]
    base = s.ends[s.first[rows[:, STREAM]]]
    found: dict[Kind, Ints] = {}
    for kind, number in numbers.items():
        own = np.where(kind_of == number, s.atom_bytes, 0)
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(own)])

        def below(at: Ints, ends: Ints = ends, own: Ints = own) -> Ints:
            """Bytes of the kind before each place in the line of all atoms."""
            atom = np.clip(np.searchsorted(s.ends, at, side="right") - 1, 0, len(own) - 1)
            return ends[atom] + np.minimum(at - s.ends[atom], own[atom])

        found[kind] = below(base + rows[:, STOP]) - below(base + rows[:, START]) if len(rows) else rows[:, STREAM]
    return found


# -- ports and slots -----------------------------------------------------------------------------------------------------


def sum_at(index: Ints, amounts: Ints, count: int) -> Ints:
    """[count] the amounts of each index added up."""
    totals = np.zeros(count, dtype=np.int64)
    np.add.at(totals, index, amounts)
    return totals


def _loads(found: Routes) -> dict[str, tuple[Ints, Floats]]:
    """For each of PORTS: bytes over every port of that kind, and the ports' rates."""
    fleet, rows, size = found.fleet, found.rows, found.row_bytes
    crosses = fleet.node_of[rows[:, SOURCE]] != fleet.node_of[rows[:, DESTINATION]]
    across, nics = size[crosses], len(fleet.nic_rates)
    return {
        "slot send": (found.sent_bytes(), fleet.link_rates),
        "slot receive": (found.received_bytes(), fleet.link_rates),
        "network send": (sum_at(fleet.nic_of[rows[crosses, SOURCE]], across, nics), fleet.nic_rates),
        "network receive": (sum_at(fleet.nic_of[rows[crosses, DESTINATION]], across, nics), fleet.nic_rates),
    }


def _ports(found: Routes) -> tuple[BusiestPort, ...]:
    fleet = found.fleet
    link, nic = float(fleet.link_rates.max()), float(fleet.nic_rates.max())
    least = {
        "slot send": found.least.slot_send_bytes / link,
        "network send": found.least.nic_send_bytes / nic,
        "network receive": found.least.nic_receive_bytes / nic,
    }
    made: list[BusiestPort] = []
    for kind, (loads, rates) in _loads(found).items():
        seconds = loads / np.where(rates > 0, rates, np.inf)
        port = int(seconds.argmax())
        slot = port if kind.startswith("slot") else int(np.flatnonzero(fleet.nic_of == port)[0])
        made.append(
            BusiestPort(
                kind=kind,
                slot=slot,
                node=int(fleet.node_of[slot]),
                load_bytes=int(loads[port]),
                rate_bytes_per_second=float(rates[port]),
                seconds=float(seconds[port]),
                least_seconds=least.get(kind, float(seconds[port])),  # what a slot misses it receives under any plan
            )
        )
    return tuple(made)


def held_by_slot(table: BoxTable, count: int, size_bytes: Ints | None = None) -> Ints:
    """[count] bytes that each slot holds; `size_bytes` [rows] counts others for each row."""
    by_set = sum_at(table.holders, row_bytes(table) if size_bytes is None else size_bytes, len(table.sets))
    members, counts = table.members
    return sum_at(members, np.repeat(by_set, counts), count)


def _slots(found: Routes) -> tuple[SlotBytes, ...]:
    """Every slot of the fleet, ascending."""
    fleet, rows, size = found.fleet, found.rows, found.row_bytes
    count, node = len(fleet.node_of), fleet.node_of
    crosses = node[rows[:, SOURCE]] != node[rows[:, DESTINATION]]
    across = sum_at(rows[crosses, SOURCE], size[crosses], count)
    across += sum_at(rows[crosses, DESTINATION], size[crosses], count)
    loads = _loads(found)
    busy = np.zeros(count)
    for kind, (amounts, rates) in loads.items():
        seconds = amounts / np.where(rates > 0, rates, np.inf)
        busy = np.maximum(busy, seconds if kind.startswith("slot") else np.where(node >= 0, seconds[fleet.nic_of], 0.0))
    before, after = (held_by_slot(table, count) for table in (found.streams.present, found.streams.target))
    return tuple(
        SlotBytes(
            slot=slot,
            node=int(node[slot]),
            before_bytes=int(before[slot]),
            after_bytes=int(after[slot]),
            kept_bytes=int(after[slot] - loads["slot receive"][0][slot]),
            received_bytes=int(loads["slot receive"][0][slot]),
            sent_bytes=int(loads["slot send"][0][slot]),
            inter_node_bytes=int(across[slot]),
            seconds=float(busy[slot]),
        )
        for slot in fleet.slots
    )
