"""Tables of holdings: the same shards on the same slots as the list, in coverings that do not overlap; joined streams."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.boxes import Box
from nereus.errors import TransferFailed
from nereus.layout import Stage
from nereus.storage import Shard, holding
from nereus.transfer.boxtable import TRACK, BoxTable, box_of, joined, of_holding, of_stage
from nereus.transfer.streams import streams
from tests.strategies import general_specs, general_stage_plans

KINDS: tuple[Stage, ...] = ("train", "infer", "generate")


@st.composite
def stages(draw: st.DrawFn):
    spec = draw(general_specs())
    kind = draw(st.sampled_from((*KINDS, "train")))
    return spec, draw(general_stage_plans(spec.config, kind))


def listed(table: BoxTable) -> dict[int, set[Shard]]:
    """The shards of each slot, every one once."""
    found: dict[int, set[Shard]] = defaultdict(set)
    for row in range(len(table.rows)):
        for component in table.tracks[int(table.rows[row, TRACK])].components:
            for slot in table.sets[int(table.holders[row])].tolist():
                shard = table.shard(row, component)
                assert shard not in found[slot]
                found[slot].add(shard)
    return found


def assert_coverings_are_disjoint(table: BoxTable) -> None:
    boxes: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for row, part in zip(table.rows, table.part, strict=True):
        boxes[int(part), int(row[TRACK])].append(box_of(table.tracks[int(row[TRACK])], row))
    for some in boxes.values():
        ordered = sorted(some)
        for index, box in enumerate(ordered):
            for other in ordered[index + 1 :]:
                if other.start[0] >= box.stop[0]:
                    break
                assert box.intersect(other) is None


@settings(max_examples=60, deadline=None)
@given(stages())
def test_a_stages_table_is_its_holding(case) -> None:
    spec, stage = case
    table, expected = of_stage(spec, stage), holding(spec, stage)
    assert listed(table) == {slot: set(shards) for slot, shards in expected.items()}
    assert_coverings_are_disjoint(table)
    rows = np.unique(table.rows, axis=0)
    assert len(rows) == len(table.rows)  # distinct boxes
    again = of_holding(expected)
    assert listed(again) == listed(table)
    assert_coverings_are_disjoint(again)


@settings(max_examples=25, deadline=None)
@given(stages(), stages())
def test_joined_tables_and_overlapping_coverings(one, other) -> None:
    """Two models side by side; the shards of two layouts of one model overlap and take several coverings."""
    first = of_stage(*one)
    second = of_stage(replace(other[0], name="n"), replace(other[1], model="n"))
    both = listed(joined([first, second]))
    for slot, shards in both.items():
        assert shards == listed(first).get(slot, set()) | listed(second).get(slot, set())
    assert set(both) == set(one[1].slots) | set(other[1].slots)
    spec, stage = one
    mixed = {slot: tuple(dict.fromkeys(s)) for slot, s in holding(spec, stage).items()}
    turned = stage.slots[1:] + stage.slots[:1]
    for slot, shards in holding(spec, replace(stage, slots=turned)).items():
        mixed[slot] = tuple(dict.fromkeys((*mixed[slot], *shards)))
    table = of_holding(mixed)
    assert listed(table) == {slot: set(shards) for slot, shards in mixed.items()}
    assert_coverings_are_disjoint(table)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_streams_have_who_holds_and_who_needs_each_byte(data: st.DataObject) -> None:
    """Element by element: an atom's holders are all slots that hold all of it, its wanters those whose box it is in."""
    spec = data.draw(general_specs())
    before, after = (data.draw(general_stage_plans(spec.config)) for _ in range(2))
    present, target = of_stage(spec, before), of_stage(spec, after)
    held, wanted = holding(spec, before), holding(spec, after)
    found = streams(present, target)
    total = sum(s.size_bytes for shards in wanted.values() for s in shards)
    counts = np.array([len(found.wanters_of(i)) for i in range(len(found))])
    assert (found.size_bytes * counts).sum() == total
    for stream in data.draw(st.lists(st.integers(0, len(found) - 1), min_size=1, max_size=8)):
        atom = int(found.first[stream])
        track = found.target.tracks[int(found.atoms[atom, TRACK])]
        box = box_of(track, found.atoms[atom])

        def having(slots, track=track, box=box) -> list[int]:
            wants = (track.tensor, track.components[0])
            return sorted(
                slot
                for slot, shards in slots.items()
                if any((s.tensor, s.component) == wants and s.box.contains(box) for s in shards)
            )

        assert found.holders_of(stream).tolist() == having(held)
        assert found.wanters_of(stream).tolist() == having(wanted)


@settings(max_examples=30, deadline=None)
@given(stages(), st.data())
def test_offsets_snap_to_elements(case, data: st.DataObject) -> None:
    table = of_stage(*case)
    found = streams(table, table)
    stream = data.draw(st.integers(0, len(found) - 1))
    size = int(found.size_bytes[stream])
    offsets = np.array(sorted(data.draw(st.lists(st.integers(0, size), min_size=1, max_size=5))))
    snapped = found.snap(stream, offsets)
    atoms = range(int(found.first[stream]), int(found.first[stream + 1]))
    edges = {0} | {
        int(found.ends[a] - found.ends[atoms[0]]) + n * int(found.element_bytes[a])
        for a in atoms
        for n in range(1 + int(found.atom_bytes[a]) // int(found.element_bytes[a]))
    }
    assert set(snapped.tolist()) <= edges
    assert (np.abs(snapped - offsets) <= int(found.element_bytes.max())).all()
    assert (np.diff(snapped) >= 0).all()


def test_a_wanted_box_without_a_holder_is_named() -> None:
    box, other = Box((0, 0), (4, 2)), Box((4, 0), (8, 2))
    whole = Shard(emu="m.train", component="weight", tensor="w", box=Box((0, 0), (8, 2)), dtype="float32")
    half = replace(whole, box=box)
    with pytest.raises(TransferFailed) as raised:
        streams(of_holding({3: (half,)}), of_holding({5: (whole,)}))
    assert all(text in str(raised.value) for text in ("weight of w", str(other), "m.train", "rank 5"))
    with pytest.raises(TransferFailed, match="no slot holds"):
        streams(of_holding({}), of_holding({5: (whole,)}))
    for renamed in ({"m.train": "n.train"}, {"m.train": "m.infer"}):
        with pytest.raises(TransferFailed, match="no slot holds"):
            streams(of_holding({3: (whole,)}), of_holding({5: (whole,)}), renamed)
    assert len(streams(of_holding({3: (whole,)}), of_holding({}))) == 0
