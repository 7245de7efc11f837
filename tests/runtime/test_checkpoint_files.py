"""Checkpoint folders on a real disk: whole or not there, every damage refused by name, the one before it used."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from nereus.boxes import Box, whole
from nereus.checkpoint import CheckpointFile, Manifest, Part, StoredBox, folder_name, parts_to_write, reads
from nereus.config import ModelConfig
from nereus.errors import CheckpointError
from nereus.model import ModelSpec, llama
from nereus.runtime.checkpoints import (
    MANIFEST,
    SPARE_BYTES,
    clean,
    commit,
    new_draft,
    newest_good,
    retire,
    saved_steps,
    verified,
)
from nereus.runtime.digest import box_digest
from nereus.runtime.shards import Reader, Writing, bytes_of, fill, write_file, written
from nereus.runtime.state import empty, initial
from nereus.storage import Shard, holding
from tests.strategies import FEW_VOCABS, model_configs, stage_plans

SPEC = llama("m", ModelConfig(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=12, vocab=40, dtype="bfloat16"))
ARRAYS = {"a": np.arange(24, dtype=np.float32).reshape(4, 6), "b": np.linspace(0, 1, 7, dtype=np.float32)}


def boxes_of(array: np.ndarray, tensor: str) -> list[tuple[StoredBox, np.ndarray]]:
    """A tensor in two boxes along its first axis."""
    middle, found = array.shape[0] // 2, []
    for low, high in ((0, middle), (middle, array.shape[0])):
        box = Box((low, *[0] * (array.ndim - 1)), (high, *array.shape[1:]))
        digest = f"{box_digest(torch.from_numpy(array[low:high]).contiguous(), box):016x}"
        stored = StoredBox(
            emu="actor.train", component="weight", tensor=tensor, box=box, dtype="float32", digest=digest
        )
        found.append((stored, array[low:high]))
    return found


def save(folder: Path, step: int, scale: float = 1.0) -> Path:
    """A small checkpoint of two files; the state depends on the step."""
    draft = new_draft(folder, step)
    halves = [boxes_of(array * np.float32(scale + step), tensor) for tensor, array in ARRAYS.items()]
    files = []
    for number in (0, 1):
        boxes, data = zip(*(half[number] for half in halves), strict=True)
        name = f"slot-00{number}.safetensors"
        size_bytes, sha256 = write_file(draft / name, boxes, [bytes_of(torch.from_numpy(d.copy())) for d in data])
        files.append(CheckpointFile(name=name, size_bytes=size_bytes, sha256=sha256, boxes=boxes))
    return commit(draft, manifest(step, tuple(files)))


def manifest(step: int, files: tuple[CheckpointFile, ...]) -> Manifest:
    return Manifest(
        run_id="r", step=step, state_version=0, model={}, plan={}, plan_text="", seed=1, data_position=8 * step,
        kl_coef=0.0, optimizer_steps={}, files=files,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4."""
    for step in (2, 4):
        save(tmp_path / "checkpoints", step)
    return tmp_path / "checkpoints"


def test_a_folder_is_whole_and_plain_safetensors(folder: Path) -> None:
    found = newest_good(folder)
    assert (found.path.name, found.manifest.step, found.refused) == ("step-000004", 4, ())
    assert (folder / "latest").read_text() == "step-000004\n"
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-000002", "step-000004"]
    tensors = load_file(found.path / "slot-001.safetensors")
    assert torch.equal(tensors["actor.train/weight/a[2:4,0:6]"], torch.from_numpy(ARRAYS["a"][2:] * np.float32(5)))
    expected = {t: f"{box_digest(torch.from_numpy(a * np.float32(5)), whole(a.shape)):016x}" for t, a in ARRAYS.items()}
    assert found.manifest.digests == {"actor.train weight": expected}, "as if each tensor were one box"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "slot-001.safetensors: has "),
    "empty": (lambda path: os.truncate(path, 0), "slot-001.safetensors: has 0 bytes"),
    "missing": (lambda path: path.unlink(), "slot-001.safetensors: cannot be read: No such file"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "slot-001.safetensors: has "),
    "a bit of the data": (lambda path: flip(path, path.stat().st_size - 3), "slot-001.safetensors: its bytes differ"),
    "a bit of the header": (lambda path: flip(path, 11), "slot-001.safetensors: its bytes differ"),
    "torn manifest": (lambda path: os.truncate(path.parent / MANIFEST, 700), f"{MANIFEST}: it is torn"),
    "a bit of the manifest": (lambda path: flip(path.parent / MANIFEST, 90), MANIFEST),
    "no manifest": (lambda path: (path.parent / MANIFEST).unlink(), f"{MANIFEST}: cannot be read: No such file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "slot-001.safetensors: "),
    "of another step": (
        lambda path: shutil.copy(path.parents[1] / "step-000002" / MANIFEST, path.parent), f"{MANIFEST}: it is of step 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_is_named_and_the_checkpoint_before_it_used(folder: Path, name: str) -> None:
    damage, words = DAMAGES[name]
    damage(folder / "step-000004" / "slot-001.safetensors")
    found = newest_good(folder)
    assert found.manifest.step == 2
    assert len(found.refused) == 1
    assert f"step-000004/{words}" in found.refused[0]
    if name == "of another step":
        return
    damage(folder / "step-000002" / "slot-001.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint to go on from") as none:
        newest_good(folder)
    assert "step-000004" in str(none.value)
    assert "step-000002" in str(none.value)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_flipped_byte_of_any_file_is_found(tmp_path_factory, data: st.DataObject) -> None:
    made = save(tmp_path_factory.mktemp("flip"), 3)
    path = data.draw(st.sampled_from(sorted(made.iterdir())))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        verified(made)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to go on from"):
        newest_good(tmp_path / "checkpoints")


def test_retention_and_a_step_done_again(folder: Path) -> None:
    save(folder, 6)
    assert retire(folder, 6, keep=2) == ("step-000002",)
    flip(folder / "step-000006" / "slot-000.safetensors", 50)
    assert newest_good(folder).manifest.step == 4
    save(folder, 6, scale=3.0)
    assert newest_good(folder).manifest.step == 6
    save(folder, 5)
    assert retire(folder, 5, keep=2) == ("step-000006",), "what came later belongs to another history"
    assert saved_steps(folder) == (4, 5)
    assert (folder / "latest").read_text() == "step-000005\n"


def test_drafts_are_not_read_and_go_with_the_next_save(folder: Path) -> None:
    draft = new_draft(folder, 8)
    (draft / "slot-000.safetensors").write_bytes(b"half")
    assert newest_good(folder).manifest.step == 4
    save(folder, 9)
    assert not draft.exists()
    new_draft(folder, 10)
    clean(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-000002", "step-000004", "step-000009"]


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs; skips with the reason where it may not be mounted."""
    place.mkdir(exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {made.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_full_disk(tmp_path: Path) -> None:
    """The real thing: the write fails with the file's name, the draft can go, what was there stands."""
    with mounted(tmp_path / "small", "size=256k") as disk:
        folder = disk / "checkpoints"
        save(folder, 2)
        draft = new_draft(folder, 4)
        big = StoredBox(emu="actor.train", component="weight", tensor="a", box=whole((100_000,)), dtype="float32")
        state = written(draft / "slot-000.safetensors", (big,), [np.ones(400_000, dtype=np.uint8)])
        assert state.done
        assert state.error == f"{draft / 'slot-000.safetensors'}: {os.strerror(errno.ENOSPC)}"
        assert newest_good(folder).manifest.step == 2
        shutil.rmtree(draft)
        save(folder, 4)
        assert newest_good(folder).manifest.step == 4
        assert shutil.disk_usage(folder).free < SPARE_BYTES, "a running job would not even begin here"


def test_a_read_only_folder(tmp_path: Path) -> None:
    with mounted(tmp_path / "fixed", "size=1m") as disk:
        folder = disk / "checkpoints"
        save(folder, 2)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(OSError, match="Read-only"):
            new_draft(folder, 4)
        assert newest_good(folder).manifest.step == 2
        assert retire(folder, 9, keep=1) == (), "what cannot be removed stays"


KILLED = """
import sys, time
from pathlib import Path
import numpy as np
from nereus.boxes import whole
from nereus.checkpoint import StoredBox
from nereus.runtime.checkpoints import new_draft
from nereus.runtime.shards import Writing

def slowly():
    for _ in range(100):
        yield np.ones(4000, dtype=np.uint8)
        print("wrote", flush=True)
        time.sleep(0.05)

draft = new_draft(Path(sys.argv[1]), 6)
big = StoredBox(emu="actor.train", component="weight", tensor="a", box=whole((100_000,)), dtype="float32")
writing = Writing(draft / "slot-000.safetensors", (big,), slowly())
writing.join(60)
"""


def test_a_process_killed_while_it_writes(folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == b"wrote\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    draft = folder / f".{folder_name(6)}.draft"
    assert (draft / "slot-000.safetensors").stat().st_size > 4000
    assert newest_good(folder).manifest.step == 4
    save(folder, 6)
    assert newest_good(folder).manifest.step == 6
    assert not draft.exists()


@st.composite
def two_plans(draw: st.DrawFn):
    config = draw(model_configs(FEW_VOCABS))
    return llama("m", config), draw(stage_plans(config)), draw(stage_plans(config)), draw(st.integers(1, 200))


@given(two_plans())
@settings(max_examples=15, deadline=None)
def test_state_written_under_one_plan_is_read_bit_by_bit_under_another(tmp_path_factory, scene) -> None:
    spec, before, after, limit_bytes = scene
    folder = tmp_path_factory.mktemp("files")
    held = holding(spec, before)
    files, digests = [], {}
    for slot, parts in parts_to_write(held).items():
        store = filled(spec, tuple(part.shard for part in parts))
        reader = Reader(parts, store, limit_bytes)
        name = f"slot-{slot:03d}.safetensors"
        writing = Writing(folder / name, tuple(part.stored for part in parts), reader.data())
        writing.join(60)
        state = writing.state()
        assert state.done
        assert not state.error
        files.append(CheckpointFile(name=name, size_bytes=state.size_bytes, sha256=state.sha256, boxes=reader.boxes))
    made = manifest(1, tuple(files))
    for slot, mine in reads(made, holding(spec, after)).items():
        targets = empty(holding(spec, after)[slot])
        read_bytes = fill(folder, mine, targets, limit_bytes)
        assert read_bytes == sum(t.numel() * t.element_size() for t in targets.values()), "only what is wanted is read"
        expected = filled(spec, tuple(targets))
        assert all(torch.equal(bits(targets[s]), bits(expected[s])) for s in targets)
        digests |= {s: box_digest(t.contiguous(), s.box) for s, t in targets.items()}
    assert sums(digests) == made.digests, "digests of the same state are equal over layouts and files"


def filled(spec: ModelSpec, shards: tuple[Shard, ...]) -> dict[Shard, torch.Tensor]:
    """State that differs in every component: the initial one, moments made from weights."""
    twins = {s: replace(s, component="weight", dtype=spec.tensor(s.tensor).dtype) for s in shards}
    made = initial(spec, set(twins.values()), 5)
    factor = {"weight": 1.0, "master": 1.0, "exp_avg": 0.5, "exp_avg_sq": 0.25}
    return {s: (made[twin].float() * factor[s.component]).to(getattr(torch, s.dtype)) for s, twin in twins.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def sums(digests: dict[Shard, int]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, int]] = {}
    for shard, value in digests.items():
        tensors = found.setdefault(f"{shard.emu} {shard.component}", {})
        tensors[shard.tensor] = (tensors.get(shard.tensor, 0) + value) % 2**64
    return {key: {t: f"{v:016x}" for t, v in sorted(tensors.items())} for key, tensors in sorted(found.items())}


def test_a_writer_that_is_given_other_bytes_than_its_boxes_have_says_so(tmp_path: Path) -> None:
    part = Part(
        shard=Shard(emu="m.train", component="weight", tensor="a", box=whole((8,)), dtype="float32"), box=whole((8,))
    )
    state = written(tmp_path / "x.safetensors", (part.stored,), [np.zeros(28, dtype=np.uint8)])
    assert "28 bytes of data, the boxes have 32" in state.error
    with pytest.raises(CheckpointError, match=r"slot-000\.safetensors: cannot be read as its manifest says"):
        fill(
            tmp_path,
            reads(
                manifest(
                    1, (CheckpointFile(name="slot-000.safetensors", size_bytes=1, sha256="", boxes=(part.stored,)),)
                ),
                {0: (part.shard,)},
            )[0],
            empty([part.shard]),
            99,
        )
