"""Nereus's own checkpoint folders as the state of one model, and made from a foreign one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nereus.boxes import Box, whole
from nereus.checkpoint import (
    DIGEST_MASK,
    CheckpointFile,
    Manifest,
    StoredBox,
    chunks,
    manifest_text,
    model_section,
)
from nereus.interchange.huggingface import READ_BYTES, split
from nereus.interchange.source import ModelState, UnreadableFolder, kept, kept_components
from nereus.model import ModelSpec
from nereus.model import Tensor as ModelTensor
from nereus.runtime.digest import box_digest
from nereus.runtime.shards import MANIFEST, Bytes, bytes_of, manifest_in, write_file
from nereus.storage import state_dtype

ACTOR = "actor.train"


def is_checkpoint(path: Path) -> bool:
    """Whether the folder has the manifest of one of Nereus's checkpoints."""
    return (path / MANIFEST).is_file()


class NereusModel:
    """The state of one EMU in a checkpoint, whose manifest is read where it is not given.

    UnreadableFolder when it is not the state of `spec`, CheckpointError when the manifest is damaged.
    """

    def __init__(self, path: Path, spec: ModelSpec, emu: str = ACTOR, manifest: Manifest | None = None) -> None:
        self.path, self.emu = path, emu
        self.manifest = manifest or manifest_in(path)
        self._places = self.manifest.places()
        present = {component for of_emu, component, _ in self._places if of_emu == emu}
        if "weight" not in present:
            known = ", ".join(sorted({of_emu for of_emu, _, _ in self._places}))
            raise UnreadableFolder(f"{path}: has no weights of {emu}; it holds {known}")
        self._check(spec)
        self.optimizer_steps = int(self.manifest.optimizer_steps.get(emu, 0))
        self._open: dict[str, Any] = {}

    def _check(self, spec: ModelSpec) -> None:
        for tensor in spec.tensors:
            boxes = [stored.box for _, stored in self._places.get((self.emu, "weight", tensor.name), ())]
            shape = tuple(max(stop) for stop in zip(*(box.stop for box in boxes), strict=True))
            if shape != tensor.shape:
                found = f"has shape {shape}" if boxes else "is missing"
                raise UnreadableFolder(f"{self.path}: {self.emu}'s {tensor.name} {found}, expected {tensor.shape}")

    def has(self, component: str, tensor: str) -> bool:
        """Whether the checkpoint holds that component of a tensor."""
        return (self.emu, component, tensor) in self._places

    def _part(self, file: str, key: str, box: Box, start: tuple[int, ...]) -> Tensor:
        """The elements of `box` of what `file` holds under `key`, which begins at `start`."""
        path = self.path / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            return self._open[file].get_slice(key)[box.slices(start)]
        except (OSError, SafetensorError, IndexError, RuntimeError) as error:
            raise UnreadableFolder(f"{path}: cannot be read as its manifest says: {error}") from error

    def read(self, component: str, tensor: str, box: Box) -> Tensor:
        """The elements of `box`, in the type they were saved in."""
        target: Tensor | None = None
        for file, stored in self._places.get((self.emu, component, tensor), ()):
            part = stored.box.intersect(box)
            if part is None:
                continue
            if target is None:
                target = torch.empty(box.shape, dtype=getattr(torch, stored.dtype))
            data = self._part(file, stored.key, part, stored.box.start)
            target[part.slices(box.start)] = data
        if target is None:  # boxes of a manifest cover their tensor
            raise UnreadableFolder(f"{self.path}: has no {component} of {tensor}")
        return target


# -- writing -----------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, state: ModelState, spec: ModelSpec, run_id: str) -> Manifest:
    """Fills an empty folder with a checkpoint of step 0 of `state` as the actor, READ_BYTES in memory at a time."""
    entries = [(tensor, component) for tensor in spec.tensors for component in kept_components(state, tensor)]
    files: list[CheckpointFile] = []
    for number, group in enumerate(split(entries, lambda entry: _stored(*entry).size_bytes)):
        files.append(_write(folder / f"slot-{number:03d}.safetensors", state, group))
    manifest = Manifest(
        run_id=run_id,
        step=0,
        state_version=0,
        model=model_section(spec.config),
        plan={},
        plan_text="",
        seed=0,
        data_position=0,
        kl_coef=0.0,
        optimizer_steps={ACTOR: state.optimizer_steps},
        files=tuple(files),
    )
    (folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    return manifest


def _stored(tensor: ModelTensor, component: str) -> StoredBox:
    dtype = state_dtype(component, tensor.dtype)
    return StoredBox(emu=ACTOR, component=component, tensor=tensor.name, box=whole(tensor.shape), dtype=dtype)


def _write(path: Path, state: ModelState, group: list[tuple[ModelTensor, str]]) -> CheckpointFile:
    boxes = [_stored(tensor, component) for tensor, component in group]
    digests = dict.fromkeys(boxes, 0)

    def data() -> Iterator[Bytes]:
        for stored, (tensor, component) in zip(boxes, group, strict=True):
            for box in chunks(stored.box, getattr(torch, stored.dtype).itemsize, READ_BYTES):
                piece = kept(state, tensor, component, box)
                digests[stored] = (digests[stored] + box_digest(piece, box)) & DIGEST_MASK
                yield bytes_of(piece)

    size_bytes, sha256 = write_file(path, boxes, data())
    known = tuple(replace(stored, digest=f"{value:016x}") for stored, value in digests.items())
    return CheckpointFile(name=path.name, size_bytes=size_bytes, sha256=sha256, boxes=known)
