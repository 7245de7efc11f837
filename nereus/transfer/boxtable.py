"""Holdings as arrays: which box of which tensor is held by which set of slots, a row for each distinct box.

A plan's holding is regular: DP replicas hold the same boxes, TP ranks the same norms, and the distributed optimizer
cuts each rank's buffer at multiples of one length. So a table has a row for each distinct box, not for each box and
slot, and is made by array arithmetic over `nereus.storage`'s parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from nereus.boxes import Box
from nereus.layout import StagePlan
from nereus.model import DTYPE_BYTES, ModelSpec
from nereus.storage import MOMENTS, Param, Shard, buffers, emu_name, generation_box, megatron_params, state_dtype
from nereus.transfer.ports import Ints

Bools = npt.NDArray[np.bool_]
TRACK, ROW0, ROW1, COL0, COL1 = range(5)


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Track:
    """Components of one tensor of one EMU that share a type and are always cut alike; `axes` of its boxes, 1 or 2."""

    emu: str
    tensor: str
    components: tuple[str, ...]
    dtype: str
    axes: int

    @property
    def element_bytes(self) -> int:
        """Bytes of one element over all components."""
        return DTYPE_BYTES[self.dtype] * len(self.components)


@dataclass(frozen=True, kw_only=True, eq=False)
class BoxTable:
    """Rows [track, row0, row1, col0, col1] of distinct boxes, and for each row the index of the set of its holders.

    `part` numbers coverings: boxes of one part and track never overlap. A tensor with one axis has columns 0..1.
    """

    tracks: tuple[Track, ...]
    rows: Ints
    holders: Ints
    part: Ints
    sets: tuple[Ints, ...]

    @property
    def elements(self) -> Ints:
        """Elements of each row's box."""
        r = self.rows
        return (r[:, ROW1] - r[:, ROW0]) * (r[:, COL1] - r[:, COL0])

    @cached_property
    def members(self) -> tuple[Ints, Ints]:
        """The slots of all sets end to end, and how many each set has."""
        counts = np.array([len(slots) for slots in self.sets], dtype=np.int64)
        return np.concatenate([*self.sets, np.zeros(0, dtype=np.int64)]), counts

    def shard(self, row: int, component: str) -> Shard:
        """A row's box as a shard of one component."""
        track = self.tracks[int(self.rows[row, TRACK])]
        return Shard(
            emu=track.emu,
            component=component,
            tensor=track.tensor,
            box=box_of(track, self.rows[row]),
            dtype=track.dtype,
        )


def box_of(track: Track, row: Sequence[int] | Ints) -> Box:
    """The Box of a table row."""
    row0, row1, col0, col1 = (int(x) for x in row[1:])
    return Box((row0,), (row1,)) if track.axes == 1 else Box((row0, col0), (row1, col1))


def _bounds(box: Box) -> tuple[int, int, int, int]:
    if len(box.start) == 1:
        return box.start[0], box.stop[0], 0, 1
    return box.start[0], box.stop[0], box.start[1], box.stop[1]


def of_holding(holding: Mapping[int, Sequence[Shard]]) -> BoxTable:
    """The table of an explicit holding: any shards on any slots, overlapping or not."""
    tracks: dict[tuple[str, str, str, str, int], int] = {}
    found: dict[tuple[int, int, int, int, int], list[int]] = {}
    for slot in sorted(holding):
        for shard in holding[slot]:
            key = (shard.emu, shard.component, shard.tensor, shard.dtype, len(shard.box.start))
            track = tracks.setdefault(key, len(tracks))
            slots = found.setdefault((track, *_bounds(shard.box)), [])
            if not slots or slots[-1] != slot:
                slots.append(slot)
    ordered = sorted(found)
    sets = _SetIndex()
    rows = np.array(ordered, dtype=np.int64).reshape(-1, 5)
    return BoxTable(
        tracks=tuple(Track(emu=e, tensor=t, components=(c,), dtype=d, axes=a) for e, c, t, d, a in tracks),
        rows=rows,
        holders=np.array([sets.of_slots(tuple(found[row])) for row in ordered], dtype=np.int64),
        part=_parts(rows),
        sets=tuple(sets.sets),
    )


def _parts(rows: Ints) -> Ints:
    """The first covering in which each row overlaps no earlier row of its track."""
    part = np.zeros(len(rows), dtype=np.int64)
    for track in np.unique(rows[:, TRACK]):
        members = np.flatnonzero(rows[:, TRACK] == track)
        placed: list[list[int]] = []
        for index in members:
            row = rows[index]
            for number in range(len(placed) + 1):
                if number == len(placed):
                    placed.append([])
                others = rows[placed[number]]
                apart = (
                    (others[:, ROW0] >= row[ROW1])
                    | (others[:, ROW1] <= row[ROW0])
                    | (others[:, COL0] >= row[COL1])
                    | (others[:, COL1] <= row[COL0])
                )
                if bool(np.all(apart)):
                    placed[number].append(int(index))
                    part[index] = number
                    break
    return part


class _SetIndex:
    """Distinct sets of slots, each once."""

    def __init__(self) -> None:
        self.sets: list[Ints] = []
        self._known: dict[bytes, int] = {}

    def of_array(self, slots: Ints) -> int:
        """The index of a set given as ascending slots."""
        key = slots.tobytes()
        if key not in self._known:
            self._known[key] = len(self.sets)
            self.sets.append(slots)
        return self._known[key]

    def of_slots(self, slots: Iterable[int]) -> int:
        return self.of_array(np.unique(np.fromiter(slots, dtype=np.int64)))


# -- a plan's holding ----------------------------------------------------------------------------------------------------


def of_stage(spec: ModelSpec, stage: StagePlan) -> BoxTable:
    """The table of a model-stage under its plan: the same shards as `nereus.storage.holding`, by array arithmetic."""
    build = _StageTable(spec, stage)
    if stage.stage == "generate":
        build.generation()
    else:
        build.megatron()
    return build.table()


def joined(tables: Sequence[BoxTable]) -> BoxTable:
    """Tables of different EMUs as one."""
    sets = _SetIndex()
    rows: list[Ints] = []
    holders: list[Ints] = []
    tracks: list[Track] = []
    for table in tables:
        moved = table.rows.copy()
        moved[:, TRACK] += len(tracks)
        renumber = np.array([sets.of_array(s) for s in table.sets], dtype=np.int64)
        rows.append(moved)
        holders.append(renumber[table.holders] if len(table.sets) else table.holders)
        tracks += table.tracks
    empty = np.zeros(0, dtype=np.int64)
    return BoxTable(
        tracks=tuple(tracks),
        rows=np.concatenate(rows) if rows else np.zeros((0, 5), dtype=np.int64),
        holders=np.concatenate(holders) if holders else empty,
        part=np.concatenate([t.part for t in tables]) if tables else empty,
        sets=tuple(sets.sets),
    )


class _StageTable:
    """Collects the rows of one model-stage."""

    def __init__(self, spec: ModelSpec, stage: StagePlan) -> None:
        self.spec, self.stage = spec, stage
        self.emu = emu_name(stage)
        self.at = [stage.layout.coordinates(rank) for rank in range(stage.layout.ranks)]
        self.slots = np.array(stage.slots, dtype=np.int64)
        self.tracks: dict[tuple[str, bool], int] = {}
        self.made: list[Track] = []
        self.sets = _SetIndex()
        self.blocks: list[tuple[Ints, Ints, Ints]] = []
        self.flat: list[tuple[Ints, Ints, Ints]] = []
        """Of each buffer: its pieces as `flat_rows` wants them, its cuts, and the set that holds what follows each cut."""
        self.flat_end = 0

    def table(self) -> BoxTable:
        self._cut_buffers()
        rows = np.concatenate([b[0] for b in self.blocks])
        holders = np.concatenate([b[1] for b in self.blocks])
        part = np.concatenate([b[2] for b in self.blocks])
        rows, holders, part = self._merged(rows, holders, part)
        return BoxTable(tracks=tuple(self.made), rows=rows, holders=holders, part=part, sets=tuple(self.sets.sets))

    def track(self, tensor: str, *, optimizer: bool) -> int:
        key = (tensor, optimizer)
        if key not in self.tracks:
            logical = self.spec.tensor(tensor)
            components: tuple[str, ...] = ("weight",)
            if optimizer:
                components = MOMENTS if logical.dtype == "float32" else ("master", *MOMENTS)
            dtype = state_dtype(components[-1], logical.dtype)
            axes = len(logical.shape)
            self.tracks[key] = len(self.made)
            self.made.append(Track(emu=self.emu, tensor=tensor, components=components, dtype=dtype, axes=axes))
        return self.tracks[key]

    def _ranks(self, key: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, value in enumerate(key):
            groups.setdefault(value, []).append(rank)
        return groups

    def _add(self, rows: list[tuple[int, int, int, int, int]], ranks: Sequence[int], parts: list[int]) -> None:
        if rows:
            held = self.sets.of_array(np.sort(self.slots[list(ranks)]))
            self.blocks.append(
                (
                    np.array(rows, dtype=np.int64),
                    np.full(len(rows), held, dtype=np.int64),
                    np.array(parts, dtype=np.int64),
                )
            )

    def generation(self) -> None:
        """Weights cut by tensor (and expert) parallelism alone, in every DP replica."""
        layout = self.stage.layout
        for ranks in self._ranks([(a.tp,) for a in self.at]).values():
            rows = [
                (self.track(t.name, optimizer=False), *_bounds(box))
                for t in self.spec.tensors
                if (box := generation_box(self.spec, t, layout, self.at[ranks[0]].tp)) is not None
            ]
            self._add(rows, ranks, [0] * len(rows))

    def megatron(self) -> None:
        """Weights of every rank and, where trained, its optimizer's part: dense and expert parameters apart."""
        layout = self.stage.layout
        cut = self.spec.config.experts > 0 and layout.ep == 1  # then experts are reduced with all else
        dense = [(a.tp, a.pp, a.etp if cut else 0) for a in self.at]
        kinds = [(dense, False, [layout.optimizer_rank(a) for a in self.at], layout.optimizer_ranks)]
        if self.spec.config.experts and layout.ep > 1:
            experts = [(a.etp, a.ep, a.pp) for a in self.at]
            kinds.append((experts, True, [a.edp for a in self.at], layout.expert_dp))
        for keys, expert, share, shares in kinds:
            for ranks in self._ranks(keys).values():
                params = megatron_params(self.spec, layout, self.at[ranks[0]])
                members = [p for p in params if p.expert == expert]
                self._weights(members, ranks, optimizer=False)
                if self.stage.stage == "train" and layout.distributed_optimizer:
                    self._owned(params, expert, {share[r]: r for r in ranks}, shares)
                elif self.stage.stage == "train":
                    self._weights(members, ranks, optimizer=True)

    def _weights(self, params: Sequence[Param], ranks: Sequence[int], *, optimizer: bool) -> None:
        rows: list[tuple[int, int, int, int, int]] = []
        parts: list[int] = []
        for param in params:
            for piece in param.pieces:
                rows.append((self.track(piece.tensor, optimizer=optimizer), *_bounds(piece.box)))
                parts.append(self._part(param))
        self._add(rows, ranks, parts)

    def _part(self, param: Param) -> int:
        """1 for the last stage's copy of a tied embedding, which the optimizer cuts elsewhere than the first stage's."""
        return int(param.shared and param.name == "output_layer.weight")

    def _owned(self, params: tuple[Param, ...], expert: bool, rank_of: Mapping[int, int], shares: int) -> None:
        """The flat ranges of each buffer that some ranks own, as boxes; `rank_of` gives the rank of a share."""
        sets = np.full(shares, -1, dtype=np.int64)
        for share, rank in rank_of.items():
            sets[share] = self.sets.of_array(self.slots[[rank]])
        by_name = {p.name: p for p in params}
        for buffer in buffers(params, self.stage.layout):
            if buffer.expert != expert:
                continue
            pieces: list[tuple[int, ...]] = []
            for name, place in buffer.places.items():
                pieces += self._placed(by_name[name], place)
            starts = [a + (b - a) // shares * np.arange(shares, dtype=np.int64) for a, b in buffer.buckets]
            table = np.array(sorted(pieces), dtype=np.int64).reshape(-1, 7)
            table[:, :2] += self.flat_end  # buffers lie end to end, to be cut all at once
            self.flat.append((table, self.flat_end + np.concatenate(starts), np.tile(sets, len(starts))))
            self.flat_end += buffer.elements

    def _cut_buffers(self) -> None:
        """The rows of all buffers."""
        if not self.flat:
            return
        pieces, starts, held_of = (np.concatenate(columns) for columns in zip(*self.flat, strict=True))
        rows, owner, part = flat_rows(pieces, starts)
        held = held_of[owner]
        self.blocks.append((rows[held >= 0], held[held >= 0], part[held >= 0]))

    def _placed(self, param: Param, place: int) -> list[tuple[int, ...]]:
        """The pieces of a parameter that starts at `place` of a buffer, as `flat_rows` wants them."""
        part = self._part(param)
        found: list[tuple[int, ...]] = []
        for piece in param.pieces:
            row0, row1, col0, col1 = _bounds(piece.box)
            first, width = place + piece.row * param.width, col1 - col0
            track = self.track(piece.tensor, optimizer=True)
            found.append((first, first + (row1 - row0) * width, track, row0, col0, width, part))
        return found

    def _merged(self, rows: Ints, holders: Ints, part: Ints) -> tuple[Ints, Ints, Ints]:
        """Equal boxes as one row that all their holders hold."""
        order = np.lexsort(rows.T[::-1])
        ordered = rows[order]
        new = np.ones(len(rows), dtype=bool)
        new[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
        first = np.flatnonzero(new)
        counts = np.diff(np.append(first, len(rows)))
        merged = holders[order][first]
        joint: dict[bytes, int] = {}
        for index in np.flatnonzero(counts > 1):
            group = holders[order[first[index] : first[index] + counts[index]]]
            key = group.tobytes()
            if key not in joint:
                together: list[Ints] = [self.sets.sets[int(h)] for h in group]
                joint[key] = self.sets.of_array(np.unique(np.concatenate(together)))
            merged[index] = joint[key]
        lowest = np.minimum.reduceat(part[order], first) if len(first) else part
        return ordered[first], merged, lowest


def flat_rows(pieces: Ints, starts: Ints) -> tuple[Ints, Ints, Ints]:
    """The boxes of a buffer cut at `starts` (elements, ascending): rows, the share that each lies in, its part.

    `pieces` are [start, stop, track, row0, col0, width, part] in the buffer, ascending. A flat range of a piece is at
    most three boxes: a part row, whole rows, a part row (as `nereus.boxes.flat_boxes`).
    """
    cuts = np.unique(np.concatenate([pieces[:, 0], pieces[:, 1], starts]))
    start, stop = cuts[:-1], cuts[1:]
    inside = np.searchsorted(pieces[:, 0], start, side="right") - 1
    keep = (inside >= 0) & (stop <= pieces[np.maximum(inside, 0), 1])
    start, stop, piece = start[keep], stop[keep], pieces[inside[keep]]
    owner = np.searchsorted(starts, start, side="right") - 1
    width, zero = piece[:, 5], np.zeros(len(piece), dtype=np.int64)
    row_low, col_low = np.divmod(start - piece[:, 0], width)
    row_high, col_high = np.divmod(stop - piece[:, 0], width)
    same = row_low == row_high
    body = row_low + (col_low > 0)
    boxes: tuple[
        tuple[Ints, Ints, Ints, Ints, Bools], ...
    ] = (  # rows from and to, columns from and to, whether it exists
        (row_low, row_low + 1, col_low, np.where(same, col_high, width), same | (col_low > 0)),
        (body, row_high, zero, width, ~same & (row_high > body)),
        (row_high, row_high + 1, zero, col_high, ~same & (col_high > 0)),
    )
    track, row0, col0, part = (piece[:, column] for column in (2, 3, 4, 6))
    rows = [
        np.stack([track, row0 + row_from, row0 + row_to, col0 + col_from, col0 + col_to], axis=1)[exists]
        for row_from, row_to, col_from, col_to, exists in boxes
    ]
    owners = np.concatenate([owner[exists] for *_, exists in boxes])
    parts = np.concatenate([part[exists] for *_, exists in boxes])
    return np.concatenate(rows), owners, parts
