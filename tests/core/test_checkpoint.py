"""Who writes what, what is read, what a manifest refuses, what is kept: as pure functions."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.boxes import Box
from nereus.checkpoint import (
    CheckpointFile,
    Manifest,
    Part,
    StoredBox,
    chunks,
    folder_name,
    lacking,
    manifest_of,
    manifest_text,
    parts_to_write,
    reads,
    step_of,
    steps_to_remove,
)
from nereus.errors import CheckpointError
from nereus.model import ModelSpec, llama
from nereus.storage import Shard, holding
from tests.strategies import FEW_VOCABS, model_configs, stage_plans


def file_of(slot: int, parts: tuple[Part, ...]) -> CheckpointFile:
    """A file with a made-up digest for each box: a function of the box alone."""
    boxes = tuple(replace(p.stored, digest=f"{hash(p.stored) & (1 << 64) - 1:016x}") for p in parts)
    return CheckpointFile(name=f"slot-{slot:03d}.safetensors", size_bytes=100 + slot, sha256="ab" * 32, boxes=boxes)


def manifest(files: tuple[CheckpointFile, ...]) -> Manifest:
    return Manifest(
        run_id="live",
        step=12,
        state_version=1,
        model={"layers": 2, "dense_layers": [], "dtype": "float32"},
        plan={"actor_train": {"tp": 2}},
        plan_text="train TP2·PP1·DP1",
        seed=3,
        data_position=96,
        kl_coef=0.01,
        optimizer_steps={"actor.train": 24},
        files=files,
    )


def written(held: dict[int, tuple[Shard, ...]]) -> Manifest:
    return manifest(tuple(file_of(slot, parts) for slot, parts in sorted(parts_to_write(held).items())))


def cover(spec: ModelSpec, boxes: list[tuple[str, str, Box]]) -> None:
    """Each element of each component's tensor is in exactly one box."""
    counts: dict[tuple[str, str], np.ndarray] = {}
    for component, tensor, box in boxes:
        array = counts.setdefault((component, tensor), np.zeros(spec.tensor(tensor).shape, dtype=int))
        array[box.slices((0,) * len(box.start))] += 1
    assert counts
    for key, array in counts.items():
        assert (array == 1).all(), key


@st.composite
def two_plans(draw: st.DrawFn):
    config = draw(model_configs(FEW_VOCABS))
    return llama("m", config), draw(stage_plans(config)), draw(stage_plans(config))


@given(two_plans())
@settings(max_examples=40, deadline=None)
def test_every_byte_is_written_once_and_every_shard_of_another_plan_is_read_once(scene) -> None:
    spec, before, after = scene
    held = holding(spec, before)
    parts = parts_to_write(held)
    cover(spec, [(p.shard.component, p.shard.tensor, p.box) for mine in parts.values() for p in mine])
    for slot, mine in parts.items():
        assert all(p.shard in held[slot] and p.shard.box.contains(p.box) for p in mine)
    made = written(held)
    assert manifest_of(manifest_text(made)) == made
    target = holding(spec, after)
    plan = reads(made, target)
    for slot, shards in target.items():
        filled: dict[Shard, np.ndarray] = {s: np.zeros(s.box.shape, dtype=int) for s in shards}
        for read in plan[slot]:
            assert read.stored.box.contains(read.box)
            assert (read.stored.emu, read.stored.component) == (read.wanted.emu, read.wanted.component)
            filled[read.wanted][read.box.slices(read.wanted.box.start)] += 1
        assert all((count == 1).all() for count in filled.values())


def shard(tensor: str, start: tuple[int, ...], stop: tuple[int, ...], dtype: str = "float32") -> Shard:
    return Shard(emu="actor.train", component="weight", tensor=tensor, box=Box(start, stop), dtype=dtype)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_boxes_that_overlap_in_any_way_are_written_once(data: st.DataObject) -> None:
    """Copies of a tied embedding on two pipeline ranks have optimizer ranges that are cut in other places."""
    rows = data.draw(st.integers(1, 12))
    held: dict[int, list[Shard]] = defaultdict(list)
    for copy in range(3):
        cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=4))})
        for low, high in pairwise(cuts):
            held[data.draw(st.integers(0, 3)) + 4 * copy].append(shard("e", (low, 0), (high, 3)))
    parts = parts_to_write(held)
    count = np.zeros((rows, 3), dtype=int)
    for slot, mine in parts.items():
        for part in mine:
            assert part.shard in held[slot]
            count[part.box.slices((0, 0))] += 1
    assert (count == 1).all()
    assert parts == parts_to_write(dict(reversed(held.items())))


def test_replicas_share_the_writing() -> None:
    """Eight equal tensors on four replicas: two each; what one slot alone holds counts first."""
    common = tuple(shard(f"t{i}", (0,), (8,)) for i in range(8))
    parts = parts_to_write(dict.fromkeys(range(4), common))
    assert {slot: len(mine) for slot, mine in parts.items()} == {0: 2, 1: 2, 2: 2, 3: 2}
    parts = parts_to_write({0: (*common, shard("own", (0,), (32,))), 1: common})
    assert {slot: sum(p.box.elements for p in mine) for slot, mine in parts.items()} == {0: 48, 1: 48}


def test_what_is_missing_is_named() -> None:
    made = written({0: (shard("a", (0,), (8,)),)})
    with pytest.raises(CheckpointError, match=r"actor.train weight of b"):
        reads(made, {0: (shard("b", (0,), (8,)),)})
    with pytest.raises(CheckpointError, match=r"does not hold .* of a"):
        reads(made, {0: (shard("a", (4,), (12,)),)})
    assert lacking(made, (shard("a", (0,), (8,)), shard("b", (0,), (8,)))) == (shard("b", (0,), (8,)),)
    copied = replace(shard("a", (2,), (5,)), emu="reference.infer")
    found = reads(made, {3: (copied,)}, origins={("reference.infer", "weight"): ("actor.train", "weight")})
    assert [(r.file, r.box) for r in found[3]] == [("slot-000.safetensors", Box((2,), (5,)))]


@given(st.integers(0, 3), st.integers(0, 9), st.integers(1, 9), st.integers(1, 60))
def test_chunks_are_consecutive_and_bounded(row: int, rows: int, width: int, limit_bytes: int) -> None:
    for box in (Box((row,), (row + rows,)), Box((row, 2), (row + rows, 2 + width))):
        parts = list(chunks(box, 4, limit_bytes))
        assert sum(p.elements for p in parts) == box.elements
        assert [p.start[0] for p in parts[1:]] == [p.stop[0] for p in parts[:-1]]
        assert all(p.elements * 4 <= limit_bytes or p.shape[0] == 1 for p in parts)


SMALL = written({0: (shard("a", (0,), (8,)), shard("b", (0, 0), (2, 2))), 1: (shard("a", (8,), (12,)),)})


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_manifest_with_any_byte_changed_or_cut_is_refused(data: st.DataObject) -> None:
    text = manifest_text(SMALL).encode()
    at = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        changed = text[:at]
    else:
        changed = text[:at] + bytes([text[at] ^ data.draw(st.integers(1, 255))]) + text[at + 1 :]
    with pytest.raises(CheckpointError):
        manifest_of(changed.decode(errors="replace"))


def forged(**fields: object) -> str:
    """A manifest with a right checksum and wrong content."""
    return manifest_text(replace(SMALL, **fields))  # type: ignore[arg-type]


def box(tensor: str, start: int, stop: int) -> StoredBox:
    return StoredBox(
        emu="actor.train",
        component="weight",
        tensor=tensor,
        box=Box((start,), (stop,)),
        dtype="float32",
        digest="0" * 16,
    )


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([box("a", 0, 4), box("a", 5, 8)], "exactly once"),
        ([box("a", 0, 4), box("a", 3, 8)], "exactly once"),
        ([box("a", 0, 4), box("a", 2, 6), box("a", 6, 8)], "exactly once"),
        ([box("a", 0, 4), replace(box("a", 4, 8), dtype="bfloat16")], "different types"),
    ],
)
def test_boxes_that_do_not_make_a_whole_are_refused(boxes: list[StoredBox], words: str) -> None:
    file = CheckpointFile(name="slot-000.safetensors", size_bytes=1, sha256="", boxes=tuple(boxes))
    with pytest.raises(CheckpointError, match=words):
        manifest_of(forged(files=(file,)))


@pytest.mark.parametrize("name", ["../slot", "/etc/passwd", "", ".hidden", "a/b"])
def test_a_file_outside_the_folder_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="not the name of a file"):
        manifest_of(forged(files=(replace(SMALL.files[0], name=name), SMALL.files[1])))


def test_other_versions_and_other_files_are_told_apart() -> None:
    raw = json.loads(manifest_text(SMALL))
    for key, value, words in (("version", 1, "version 1"), ("format", "other", "not a manifest")):
        with pytest.raises(CheckpointError, match=words):
            manifest_of(json.dumps({**raw, key: value}))


@given(st.sets(st.integers(0, 40)), st.integers(0, 40), st.integers(1, 5))
def test_retention_keeps_the_last_and_never_the_saved_one_goes(steps: set[int], saved: int, keep: int) -> None:
    gone = steps_to_remove({*steps, saved}, saved, keep)
    left = {*steps, saved} - set(gone)
    assert saved in left
    assert max(left) == saved, "what the run left behind in another history goes"
    assert len(left) <= keep
    assert all(step > saved or step <= min(left) for step in gone)
    assert steps_to_remove({1, 2, 3, 4}, 4, 2) == (1, 2)


@given(st.integers(0, 10**8))
def test_folder_names(step: int) -> None:
    assert step_of(folder_name(step)) == step
    assert step_of(f".{folder_name(step)}.draft") is None
