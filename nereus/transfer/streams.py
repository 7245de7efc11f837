"""What must be where, without who sends it: target boxes joined with present ones into streams.

An *atom* is the common part of a wanted box and a held one. Atoms with the same holders, the same wanters and the
same EMU form a *stream*: one row of bytes that any of the holders can give and that each wanter needs whole. The number
of streams grows with distinct cases (a cell of the TP x PP grid, a pair of optimizer shares), not with tensors times
slots. Wanters are ranks of the new plan, so streams do not depend on which slot takes which rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nereus.boxes import Box
from nereus.errors import TransferFailed
from nereus.transfer.boxtable import COL0, COL1, ROW0, ROW1, TRACK, BoxTable, box_of
from nereus.transfer.ports import Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Streams:
    """Atoms ordered by stream, and the streams.

    `atoms` are rows [target track, row0, row1, col0, col1]; `wanted` the target row of each, `held` [atoms, parts] the
    present row in each covering (-1: none). Stream s owns atoms first[s]..first[s + 1] and has holders
    `holder_sets[holders[s]]` (slots) and wanters `target.sets[wanters[s]]` (ranks).
    """

    present: BoxTable
    target: BoxTable
    atoms: Ints
    wanted: Ints
    held: Ints
    first: Ints
    holders: Ints
    wanters: Ints
    holder_sets: tuple[Ints, ...]

    def __len__(self) -> int:
        return len(self.holders)

    @cached_property
    def element_bytes(self) -> Ints:
        """Bytes of one element of each atom, over the components of its track."""
        sizes = np.array([t.element_bytes for t in self.target.tracks], dtype=np.int64)
        return sizes[self.atoms[:, TRACK]] if len(sizes) else np.zeros(0, dtype=np.int64)

    @cached_property
    def atom_bytes(self) -> Ints:
        """Bytes of each atom."""
        a = self.atoms
        return (a[:, ROW1] - a[:, ROW0]) * (a[:, COL1] - a[:, COL0]) * self.element_bytes

    @cached_property
    def ends(self) -> Ints:
        """[atoms + 1] running sum of atom bytes; a stream's bytes lie between the ends of its first and last atom."""
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.atom_bytes)])

    @cached_property
    def size_bytes(self) -> Ints:
        """Bytes of each stream."""
        return self.ends[self.first[1:]] - self.ends[self.first[:-1]]

    def holders_of(self, stream: int) -> Ints:
        """The slots that hold a stream, ascending."""
        return self.holder_sets[int(self.holders[stream])]

    def wanters_of(self, stream: int) -> Ints:
        """The ranks that need a stream, ascending."""
        return self.target.sets[int(self.wanters[stream])]

    def only(self, kept: Ints) -> Streams:
        """Some of the streams, given by ascending number."""
        counts = self.first[kept + 1] - self.first[kept]
        first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        start: Ints = self.first[kept] - first[:-1]
        atoms: Ints = np.repeat(start, counts) + np.arange(int(first[-1]), dtype=np.int64)
        return replace(
            self,
            atoms=self.atoms[atoms],
            wanted=self.wanted[atoms],
            held=self.held[atoms],
            first=first,
            holders=self.holders[kept],
            wanters=self.wanters[kept],
        )

    def snap(self, stream: int | Ints, offsets: Ints) -> Ints:
        """Offsets in bytes within a stream, or each within its own, moved to the nearest edge of an element."""
        base = self.ends[self.first[stream]]
        at = np.searchsorted(self.ends, base + offsets, side="right") - 1
        at = np.minimum(at, self.first[stream + 1] - 1)
        size = self.element_bytes[at]
        return self.ends[at] - base + (base + offsets - self.ends[at] + size // 2) // size * size


def streams(present: BoxTable, target: BoxTable, rename: Mapping[str, str] | None = None) -> Streams:
    """Joins what is wanted with what is held. `rename` gives the present EMU that a target EMU is filled from.

    TransferFailed names the first wanted box that nobody holds.
    """
    join = _Join(present, target, dict(rename or {}))
    for part in range(int(present.part.max(initial=-1)) + 1):
        join.with_part(part)
    join.check_cover()
    return join.result()


class _Join:
    """Atoms while they are cut: first the target's rows, then refined by each covering of the present."""

    def __init__(self, present: BoxTable, target: BoxTable, rename: Mapping[str, str]) -> None:
        self.present, self.target = present, target
        known = {(t.emu, t.tensor, t.components, t.dtype): i for i, t in enumerate(present.tracks)}
        key = [(rename.get(t.emu, t.emu), t.tensor, t.components, t.dtype) for t in target.tracks]
        self.track_of = np.array([known.get(k, -1) for k in key], dtype=np.int64)  # target track -> present track
        self.atoms = target.rows
        self.wanted = np.arange(len(target.rows), dtype=np.int64)
        parts = int(present.part.max(initial=-1)) + 1
        self.held = np.full((len(target.rows), max(parts, 1)), -1, dtype=np.int64)

    def with_part(self, part: int) -> None:
        rows = np.flatnonzero(self.present.part == part)
        atom, held = self._pairs(rows)
        boxes = _common(self.atoms[atom], self.present.rows[held])
        covered = np.bincount(atom, weights=_elements(boxes), minlength=len(self.atoms)).astype(np.int64)
        missing = _elements(self.atoms) - covered
        untouched = np.flatnonzero(covered == 0)
        rest, rest_of = self._rest(np.flatnonzero((covered > 0) & (missing > 0)), atom, boxes)
        held_columns = self.held[atom].copy()
        held_columns[:, part] = held
        self.held = np.concatenate([held_columns, self.held[untouched], self.held[rest_of]])
        self.wanted = np.concatenate([self.wanted[atom], self.wanted[untouched], self.wanted[rest_of]])
        self.atoms = np.concatenate([boxes, self.atoms[untouched], rest])

    def _pairs(self, rows: Ints) -> tuple[Ints, Ints]:
        """(atom, present row) for every overlap with the given present rows, which do not overlap each other.

        Rows of all tracks lie on one axis, each track after the other; the candidates of an atom are the present
        rows whose range of rows meets its own, found by bisection, then compared by column.
        """
        starts = np.zeros(len(self.present.tracks) + 1, dtype=np.int64)
        np.maximum.at(starts, self.present.rows[:, TRACK] + 1, self.present.rows[:, ROW1])
        usable = self.track_of[self.atoms[:, TRACK]] >= 0
        wanted_rows = self.atoms[usable]
        track = self.track_of[wanted_rows[:, TRACK]]
        np.maximum.at(starts, track + 1, wanted_rows[:, ROW1])
        starts = np.cumsum(starts)
        held = self.present.rows[rows]
        low = starts[held[:, TRACK]] + held[:, ROW0]
        order = np.argsort(low, kind="stable")
        low, held, rows = low[order], held[order], rows[order]
        reach = np.maximum.accumulate(starts[held[:, TRACK]] + held[:, ROW1]) if len(rows) else low
        first = np.searchsorted(reach, starts[track] + wanted_rows[:, ROW0], side="right")
        last = np.searchsorted(low, starts[track] + wanted_rows[:, ROW1], side="left")
        count = np.maximum(last - first, 0)
        atom = np.repeat(np.arange(len(wanted_rows)), count)
        offset = np.arange(len(atom)) - np.repeat(np.cumsum(count) - count, count)
        candidate = np.repeat(first, count) + offset
        common = _common(wanted_rows[atom], held[candidate])
        meets = (common[:, ROW0] < common[:, ROW1]) & (common[:, COL0] < common[:, COL1])
        return np.flatnonzero(usable)[atom[meets]], rows[candidate[meets]]

    def _rest(self, partly: Ints, atom: Ints, boxes: Ints) -> tuple[Ints, Ints]:
        """What a covering leaves of atoms that it covers only in part (rare: holders were lost)."""
        rest: list[tuple[int, ...]] = []
        rest_of: list[int] = []
        for index in partly:
            row = self.atoms[index]
            left = [Box((int(row[ROW0]), int(row[COL0])), (int(row[ROW1]), int(row[COL1])))]
            for box in boxes[atom == index]:
                taken = Box((int(box[ROW0]), int(box[COL0])), (int(box[ROW1]), int(box[COL1])))
                left = [part for whole in left for part in whole.subtract(taken)]
            rest += [(int(row[TRACK]), b.start[0], b.stop[0], b.start[1], b.stop[1]) for b in left]
            rest_of += [int(index)] * len(left)
        return np.array(rest, dtype=np.int64).reshape(-1, 5), np.array(rest_of, dtype=np.int64)

    def check_cover(self) -> None:
        bare = np.flatnonzero(np.all(self.held < 0, axis=1))
        if len(bare):
            index = int(bare[0])
            track = self.target.tracks[int(self.atoms[index, TRACK])]
            ranks = self.target.sets[int(self.target.holders[self.wanted[index]])]
            raise TransferFailed(
                f"no slot holds {'/'.join(track.components)} of {track.tensor} {box_of(track, self.atoms[index])} of "
                f"{track.emu} for rank {int(ranks[0])}"
            )

    def result(self) -> Streams:
        sets, holders = self._holder_sets()
        wanters = self.target.holders[self.wanted]
        emus = {emu: i for i, emu in enumerate(dict.fromkeys(t.emu for t in self.target.tracks))}
        emu = np.array([emus[t.emu] for t in self.target.tracks], dtype=np.int64)[self.atoms[:, TRACK]]
        order = np.lexsort((self.atoms[:, COL0], self.atoms[:, ROW0], self.atoms[:, TRACK], wanters, holders, emu))
        key = np.stack([emu, holders, wanters], axis=1)[order]
        new = np.ones(len(key), dtype=bool)
        new[1:] = np.any(key[1:] != key[:-1], axis=1)
        first = np.append(np.flatnonzero(new), len(key)).astype(np.int64)
        return Streams(
            present=self.present,
            target=self.target,
            atoms=self.atoms[order],
            wanted=self.wanted[order],
            held=self.held[order],
            first=first,
            holders=holders[order][first[:-1]],
            wanters=wanters[order][first[:-1]],
            holder_sets=sets,
        )

    def _holder_sets(self) -> tuple[tuple[Ints, ...], Ints]:
        """The slots that hold each atom in any covering, as an index into distinct sets."""
        by_part = np.where(self.held >= 0, self.present.holders[np.maximum(self.held, 0)], -1)
        if by_part.shape[1] == 1:
            return self.present.sets, by_part[:, 0]
        combined, inverse = np.unique(by_part, axis=0, return_inverse=True)
        sets = tuple(np.unique(np.concatenate([self.present.sets[int(h)] for h in row if h >= 0])) for row in combined)
        return sets, inverse.reshape(-1).astype(np.int64)


def _common(one: Ints, other: Ints) -> Ints:
    """The intersections of boxes, row by row; the track is the first's. Empty ones have a stop not above their start."""
    return np.stack(
        [
            one[:, TRACK],
            np.maximum(one[:, ROW0], other[:, ROW0]),
            np.minimum(one[:, ROW1], other[:, ROW1]),
            np.maximum(one[:, COL0], other[:, COL0]),
            np.minimum(one[:, COL1], other[:, COL1]),
        ],
        axis=1,
    )


def _elements(boxes: Ints) -> Ints:
    return (boxes[:, ROW1] - boxes[:, ROW0]) * (boxes[:, COL1] - boxes[:, COL0])
