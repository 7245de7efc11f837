"""Placement: which slot takes which rank of a new plan.

In this order: tensor and expert groups stay in one node; least `horizon_steps` x seconds of a weight sync + seconds of
the movement; fewest bytes between nodes; fewest bytes. Fewest bytes alone is a linear assignment: what moves is what is
needed less what is in place, and what is in place is a sum over (slot, rank) pairs. Groups go to nodes by an assignment
of groups to seats, then ranks to slots by one in each node. Each stage is placed given the others until none improves.

Above EXACT_SLOTS slots there are no matrices: `nereus.transfer.matching` places by classes, entries and local search, candidates
are compared by estimates of their ports, and the least moved bytes are a bound that no placement beats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal

import numpy as np

from nereus.errors import ConfigError
from nereus.fleet import Fleet
from nereus.layout import StagePlan
from nereus.model import ModelSpec
from nereus.storage import emu_name
from nereus.transfer.boxtable import TRACK, BoxTable, joined, of_stage
from nereus.transfer.gains import Pairings, of_streams
from nereus.transfer.matching import assignment, most_bytes
from nereus.transfer.ports import Floats, Ints
from nereus.transfer.routes import routes
from nereus.transfer.seating import Seating, group_ranks, port_estimate, rank_groups, replica_ranks
from nereus.transfer.streams import Streams, streams

Objective = Literal["cost", "total_bytes", "inter_node_bytes", "identity"]
EXACT_SLOTS = 1024
EVALUATED_SLOTS = 256
"""Up to so many slots candidates are compared by all they move; above without the small streams."""
SMALL_SHARE = 1e-2
"""Of a slot's mean share of the bytes: smaller streams with several wanters are small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMove:
    """A model-stage to place: how it is cut now (None: it holds nothing that lasts) and how it shall be.

    `after.slots` are the slots that it may take, at least as many as its ranks; their order is the identity placement,
    which a `pinned` stage keeps.
    """

    spec: ModelSpec
    before: StagePlan | None
    after: StagePlan
    pinned: bool = False


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class PlacementCost:
    """What a placement costs, compared in this order."""

    split_groups: int
    seconds: float
    inter_node_bytes: int
    moved_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Slots of each stage in rank order, what they cost, and a lower bound of the bytes that any placement moves."""

    slots: Mapping[str, tuple[int, ...]]
    cost: PlacementCost
    least_moved_bytes: int
    exact: bool

    @property
    def gap(self) -> float:
        """Moved bytes above the least possible, as a part of it (0 when nothing has to move)."""
        least = self.least_moved_bytes
        return self.cost.moved_bytes / least - 1 if least else float(self.cost.moved_bytes > 0)


def place(
    moves: Mapping[str, StageMove],
    fleet: Fleet,
    *,
    objective: Objective = "cost",
    syncs: Sequence[tuple[str, str]] = (),
    standing: Mapping[str, tuple[ModelSpec, StagePlan]] | None = None,
    horizon_steps: float = 100.0,
    exact_slots: int = EXACT_SLOTS,
) -> Placement:
    """Slots for every stage of `moves`, by exact assignments on fleets of at most `exact_slots`.

    `syncs` are (from, to) stages whose weights are copied at every step; a stage that does not change may take part
    through `standing`. "identity" keeps the given order; "total_bytes" and "inter_node_bytes" look at one movement only.
    """
    for name, move in moves.items():
        gone = () if move.before is None else sorted({*move.before.slots} - {*fleet.slots})
        if gone:
            raise ConfigError(
                f"{name}.before.slots", gone, "expected slots of the fleet: one that is gone holds nothing"
            )
    exact = len(fleet.slots) <= exact_slots
    problem = (_Problem if exact else _LargeProblem)(moves, fleet, syncs, dict(standing or {}), horizon_steps)
    chosen = {name: problem.identity(name) for name in moves}
    if objective == "cost":
        found = _descend(problem, chosen)
        chosen = found if exact else min(found, chosen, key=problem.cost)  # estimates may mislead
    elif objective != "identity":
        chosen = {name: problem.fewest(name, objective) for name in moves}
    return Placement(
        slots=chosen,
        cost=problem.cost(chosen),
        least_moved_bytes=problem.least_moved_bytes(),
        exact=exact,
    )


def _descend(problem: _Problem, chosen: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Takes for one stage after the other the candidate that costs least given the others, until none improves.

    It starts from the best of: everything as it stands, fewest bytes, fewest bytes between nodes, groups in nodes.
    """
    best = min([chosen, *problem.starts()], key=problem.estimate)
    lowest = problem.estimate(best)
    improved = bool(problem.syncs)
    while improved:
        improved = False
        for name in best:
            for candidate in problem.candidates(name, best):
                trial = {**best, name: candidate}
                cost = problem.estimate(trial)
                if cost < lowest:
                    best, lowest, improved = trial, cost, True
    return best


class _Problem:
    """The stages to place over virtual ranks: stage i's rank r is number `offset[i] + r`."""

    def __init__(
        self,
        moves: Mapping[str, StageMove],
        fleet: Fleet,
        syncs: Sequence[tuple[str, str]],
        standing: Mapping[str, tuple[ModelSpec, StagePlan]],
        horizon_steps: float,
    ) -> None:
        self.moves, self.fleet, self.standing, self.horizon_steps = moves, fleet, standing, horizon_steps
        self.syncs = [(a, b) for a, b in syncs if a in moves or b in moves]
        self.offset: dict[str, int] = {}
        count = 0
        for name, move in moves.items():
            self.offset[name] = count
            count += move.after.layout.ranks
        self.ranks_total = count
        kept = [(name, m) for name, m in moves.items() if m.before is not None]
        present = [of_stage(m.spec, m.before) for _, m in kept if m.before is not None]
        self.streams = streams(joined(present), joined([self._by_rank(name) for name, _ in kept]))
        self._known: dict[tuple[bool, tuple[tuple[str, tuple[int, ...]], ...]], PlacementCost] = {}

    def _by_rank(self, name: str) -> BoxTable:
        """The table of a stage with virtual ranks in place of slots."""
        if name in self.moves:
            move, first = self.moves[name], self.offset[name]
            numbers = tuple(range(first, first + move.after.layout.ranks))
            return of_stage(move.spec, replace(move.after, slots=numbers))
        spec, stage = self.standing[name]
        return of_stage(spec, stage)

    @cached_property
    def _sync_streams(self) -> list[tuple[str, str, Streams]]:
        made: list[tuple[str, str, Streams]] = []
        for source, target in self.syncs:
            rename = {self._emu(target): self._emu(source)}
            made.append((source, target, streams(_weights(self._by_rank(source)), self._by_rank(target), rename)))
        return made

    def _emu(self, name: str) -> str:
        return emu_name(self.moves[name].after if name in self.moves else self.standing[name][1])

    # -- what is in place ------------------------------------------------------------------------------------------

    @cached_property
    def in_place(self) -> Floats:
        """[slots, ranks] bytes that a slot holds of what a rank needs."""
        return _common_bytes(self.streams, len(self.fleet.node_of), self.ranks_total, None)

    @cached_property
    def in_node(self) -> Floats:
        """[nodes, ranks] bytes that some slot of a node holds of what a rank needs."""
        return _common_bytes(self.streams, len(self.fleet.nodes), self.ranks_total, self.fleet.node_of)

    def _columns(self, name: str) -> slice:
        return slice(self.offset[name], self.offset[name] + self.moves[name].after.layout.ranks)

    def matrix(self, name: str, objective: Objective) -> Floats:
        """[allowed slots, ranks] what a stage gains from each pairing, in bytes."""
        allowed = list(self.moves[name].after.slots)
        total = self.in_place[allowed, self._columns(name)]
        if objective == "total_bytes":
            return total
        near = self.in_node[self.fleet.node_of[allowed], self._columns(name)]
        return near + total * 1e-6  # bytes between nodes first, then all bytes

    def fewest(self, name: str, objective: Objective) -> tuple[int, ...]:
        """Slots in rank order by one movement alone."""
        return self.assigned(name, self.matrix(name, objective))

    def starts(self) -> list[dict[str, tuple[int, ...]]]:
        """Placements of all stages to begin with: fewest bytes, fewest between nodes, groups in nodes."""
        names = list(self.moves)
        return [
            {name: self.fewest(name, "total_bytes") for name in names},
            {name: self.fewest(name, "inter_node_bytes") for name in names},
            {name: self.grouped(name, self.matrix(name, "total_bytes")) for name in names},
            {name: self._together(name, [self._pairings]) for name in names},
        ]

    def least_moved_bytes(self) -> int:
        """Fewest bytes that any placement moves: each stage by its own best assignment (they do not interact)."""
        most = 0.0
        for name in self.moves:
            gain = self.matrix(name, "total_bytes")
            rows, columns = assignment(gain)
            most += float(gain[rows, columns].sum())
        return self.needed_bytes - round(most)

    @cached_property
    def needed_bytes(self) -> int:
        """Bytes of all stages over all ranks."""
        s = self.streams
        wanters = np.array([len(x) for x in s.target.sets], dtype=np.int64)
        return int((s.size_bytes * wanters[s.wanters]).sum()) if len(s) else 0

    # -- candidates ------------------------------------------------------------------------------------------------

    def identity(self, name: str) -> tuple[int, ...]:
        """Slots in the order in which they were given."""
        return self.moves[name].after.slots[: self.moves[name].after.layout.ranks]

    def assigned(self, name: str, gain: Floats) -> tuple[int, ...]:
        """Slots in rank order by the best assignment."""
        if self.moves[name].pinned:
            return self.identity(name)
        allowed = np.array(self.moves[name].after.slots, dtype=np.int64)
        rows, columns = assignment(gain)
        slots = np.empty(gain.shape[1], dtype=np.int64)
        slots[columns] = allowed[rows]
        return tuple(slots.tolist())

    def grouped(self, name: str, gain: Floats, *, replicas: bool = False) -> tuple[int, ...]:
        """Slots in rank order with every group in one node; the plain assignment where nodes are too small.

        With `replicas` a whole model replica is kept together: then each node holds all that a weight sync takes.
        """
        if self.moves[name].pinned:
            return self.identity(name)
        allowed = np.array(self.moves[name].after.slots, dtype=np.int64)
        groups = (
            replica_ranks(self.moves[name].after.layout) if replicas else rank_groups(self.moves[name].after.layout)
        )
        nodes, members = np.unique(self.fleet.node_of[allowed], return_inverse=True)
        seats = np.bincount(members) // groups.shape[1]
        if groups.shape[1] == 1 or int(seats.sum()) < len(groups):
            return self.assigned(name, gain)
        order = np.argsort(members, kind="stable")
        first = np.searchsorted(members[order], np.arange(len(nodes)))
        best = np.maximum.reduceat(gain[order], first, axis=0)[:, groups].sum(axis=2)
        seat_node = np.repeat(np.arange(len(nodes)), seats)
        rows, columns = assignment(best[seat_node])
        node_of_group = np.empty(len(groups), dtype=np.int64)
        node_of_group[columns] = seat_node[rows]
        slots = np.empty(groups.size, dtype=np.int64)
        for node in np.unique(node_of_group):
            inside = np.flatnonzero(members == node)
            ranks = groups[node_of_group == node].ravel()
            rows, columns = assignment(gain[np.ix_(inside, ranks)])
            slots[ranks[columns]] = allowed[inside[rows]]
        return tuple(slots.tolist())

    def candidates(self, name: str, chosen: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Placements of a stage worth a look, given the others: by the movement, by the sync, and by both."""
        moving = self.matrix(name, "total_bytes")
        syncing = self._sync_gain(name, chosen)
        mixed = moving + self.horizon_steps * syncing
        gains = (moving, syncing, mixed)
        found: list[tuple[int, ...]] = []
        for gain in gains:
            found += [self.grouped(name, gain), self.grouped(name, gain, replicas=True), self.assigned(name, gain)]
        found += [self._together(name, self._syncing(name, chosen), replicas=whole) for whole in (False, True)]
        return list(dict.fromkeys(found))

    def _sync_gain(self, name: str, chosen: Mapping[str, tuple[int, ...]]) -> Floats:
        """[allowed slots, ranks] bytes of a weight sync that are in place when a slot takes a rank."""
        allowed = self.moves[name].after.slots
        ranks = self.moves[name].after.layout.ranks
        gain = np.zeros((len(allowed), ranks))
        for (source, target, _), common in zip(self._sync_streams, self._sync_common, strict=True):
            if name not in (source, target):
                continue
            other = target if name == source else source
            table = common if name == source else common.T  # [own ranks, other ranks]
            slots = chosen[other] if other in chosen else self.standing[other][1].slots
            rank_at = {slot: rank for rank, slot in enumerate(slots)}
            for row, slot in enumerate(allowed):
                if slot in rank_at:
                    gain[row] += table[:, rank_at[slot]]
        return gain

    @cached_property
    def _sync_common(self) -> list[Floats]:
        """[source ranks, target ranks] common bytes of each sync."""
        return [
            _common_bytes(s, self._span(a), self._span(b), None)[self._own(a), self._own(b)]
            for a, b, s in self._sync_streams
        ]

    def _span(self, name: str) -> int:
        return self.ranks_total if name in self.moves else max(self.standing[name][1].slots) + 1

    def _own(self, name: str) -> slice | list[int]:
        return self._columns(name) if name in self.moves else list(self.standing[name][1].slots)

    # -- cost ------------------------------------------------------------------------------------------------------

    def estimate(self, chosen: Mapping[str, tuple[int, ...]]) -> PlacementCost:
        """The cost; on large fleets without the many small streams that hardly load a port (norms)."""
        return self.cost(chosen, coarse=len(self.fleet.slots) > EVALUATED_SLOTS)

    def cost(self, chosen: Mapping[str, tuple[int, ...]], *, coarse: bool = False) -> PlacementCost:
        """The cost of a placement: everything routed."""
        key = (coarse, tuple(sorted(chosen.items())))
        if key not in self._known:
            moved = routes(self._coarse if coarse else self.streams, self._place(chosen), self.fleet)
            seconds = moved.loads.seconds
            for source, target, found in self._sync_streams:
                by_rank = _placed(found, self._numbers(source, chosen))
                synced = routes(by_rank, self._numbers(target, chosen), self.fleet)
                seconds += self.horizon_steps * synced.loads.seconds
            self._known[key] = PlacementCost(
                split_groups=self._split(chosen),
                seconds=seconds,
                inter_node_bytes=moved.inter_node_bytes,
                moved_bytes=moved.moved_bytes,
            )
        return self._known[key]

    @cached_property
    def _coarse(self) -> Streams:
        s = self.streams
        shared = np.array([len(x) > 1 for x in s.target.sets], dtype=bool)[s.wanters]
        small = s.size_bytes < SMALL_SHARE * s.size_bytes.sum() / max(len(self.fleet.slots), 1)
        return s.only(np.flatnonzero(~(shared & small)))

    def _place(self, chosen: Mapping[str, tuple[int, ...]]) -> Ints:
        numbers = np.zeros(self.ranks_total, dtype=np.int64)
        for name, slots in chosen.items():
            numbers[self._columns(name)] = slots
        return numbers

    def _numbers(self, name: str, chosen: Mapping[str, tuple[int, ...]]) -> Ints:
        """The slot of every number that a table of this stage uses for its ranks."""
        if name in chosen:
            return self._place(chosen)
        return np.arange(self._span(name), dtype=np.int64)

    def _split(self, chosen: Mapping[str, tuple[int, ...]]) -> int:
        """Tensor or expert groups that span nodes although they would fit into one."""
        split = 0
        largest = max(len(node.slots) for node in self.fleet.nodes)
        for name, slots in chosen.items():
            size = group_ranks(self.moves[name].after.layout)
            if 1 < size <= largest and len(slots) % size == 0:
                nodes = self.fleet.node_of[list(slots)].reshape(-1, size)
                split += int((nodes != nodes[:, :1]).any(axis=1).sum())
        return split

    # -- without matrices: seats by class -------------------------------------------------------------------------

    def _together(self, name: str, parts: list[Pairings], *, replicas: bool = False) -> tuple[int, ...]:
        if self.moves[name].pinned:
            return self.identity(name)
        seating = self._seating(name, replicas=replicas)
        return seating.together(seating.gains(*parts))

    def _seating(self, name: str, *, replicas: bool = False) -> Seating:
        move = self.moves[name]
        return Seating(
            fleet=self.fleet,
            slots=np.array(move.after.slots, dtype=np.int64),
            first_rank=self.offset[name],
            total_ranks=self.ranks_total,
            groups=(replica_ranks if replicas else rank_groups)(move.after.layout),
        )

    def _moving(self, objective: Objective) -> list[Pairings]:
        """What the movement gains by an objective; bytes between nodes first, then all bytes."""
        total = self._pairings
        return [total] if objective == "total_bytes" else [total.near(self.fleet), total.weighed(1e-6)]

    def _syncing(self, name: str, chosen: Mapping[str, tuple[int, ...]]) -> list[Pairings]:
        """What a stage gains in the weight syncs that it takes part in, given the other stages."""
        parts: list[Pairings] = []
        for (source, target, _), found in zip(self._sync_streams, self._sync_pairings, strict=True):
            if name == target:
                parts.append(found.placed(slots=self._numbers(source, chosen)))
            elif name == source:
                parts.append(found.turned().placed(slots=self._numbers(target, chosen)))
        return parts

    @cached_property
    def _pairings(self) -> Pairings:
        return of_streams(self.streams)

    @cached_property
    def _sync_pairings(self) -> list[Pairings]:
        return [of_streams(found) for *_, found in self._sync_streams]


class _LargeProblem(_Problem):
    """The same without matrices."""

    def fewest(self, name: str, objective: Objective) -> tuple[int, ...]:
        if self.moves[name].pinned:
            return self.identity(name)
        seating = self._seating(name)
        return seating.apart(seating.gains(*self._moving(objective)), by_node=objective == "inter_node_bytes")

    def starts(self) -> list[dict[str, tuple[int, ...]]]:
        """Groups in nodes, by all bytes and by those between nodes."""
        found: list[dict[str, tuple[int, ...]]] = []
        for objective in ("total_bytes", "inter_node_bytes"):
            parts = self._moving(objective)
            found.append({name: self._together(name, parts) for name in self.moves})
        return found

    def candidates(self, name: str, chosen: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
        syncing = self._syncing(name, chosen)
        mixed = [self._pairings, *(part.weighed(self.horizon_steps) for part in syncing)]
        gains = ([self._pairings], syncing, mixed)
        found = [self._together(name, parts, replicas=whole) for parts in gains for whole in (False, True)]
        return list(dict.fromkeys(found))

    def least_moved_bytes(self) -> int:
        """A bound: no placement moves less."""
        most = sum(ceil(most_bytes(self._seating(name).gains(self._pairings))) for name in self.moves)
        return max(self.needed_bytes - most, 0)

    @cached_property
    def _coarse_pairings(self) -> Pairings:
        return of_streams(self._coarse)

    def estimate(self, chosen: Mapping[str, tuple[int, ...]]) -> PlacementCost:
        """The cost by an estimate of the ports, without the many small streams."""
        moved = port_estimate(self._coarse_pairings.placed(ranks=self._place(chosen)), self.fleet)
        seconds = moved.seconds
        for (source, target, _), found in zip(self._sync_streams, self._sync_pairings, strict=True):
            synced = found.placed(slots=self._numbers(source, chosen), ranks=self._numbers(target, chosen))
            seconds += self.horizon_steps * port_estimate(synced, self.fleet).seconds
        return PlacementCost(
            split_groups=self._split(chosen),
            seconds=seconds,
            inter_node_bytes=moved.inter_node_bytes,
            moved_bytes=moved.moved_bytes,
        )


def _common_bytes(found: Streams, holders: int, ranks: int, node_of: Ints | None) -> Floats:
    """[holders, ranks] bytes that each holder has of what each rank needs; with `node_of` a node counts as a holder."""
    common = np.zeros((holders, ranks))
    sizes = found.size_bytes
    for index in range(len(found)):
        held = found.holders_of(index)
        if node_of is not None:
            held = np.unique(node_of[held])
        common[np.ix_(held, found.wanters_of(index))] += sizes[index]
    return common


def _weights(table: BoxTable) -> BoxTable:
    """Only the rows of weights."""
    kept = np.array([t.components == ("weight",) for t in table.tracks], dtype=bool)[table.rows[:, TRACK]]
    return replace(table, rows=table.rows[kept], holders=table.holders[kept], part=table.part[kept])


def _placed(found: Streams, numbers: Ints) -> Streams:
    """The streams with their holders' ranks replaced by slots."""
    sets = tuple(np.unique(numbers[held]) for held in found.holder_sets)
    return replace(found, holder_sets=sets)
