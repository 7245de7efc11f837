"""A checkpoint as data: which slot writes which box, what a manifest says, what a slot reads, what is kept. Pure.

State is written in the boxes of the plan that holds it, each byte once, and read back as the boxes of any other plan.
`nereus.runtime.shards` writes and reads the files, `nereus.runtime.checkpoints` makes a folder of them durable.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, cast

from nereus.boxes import Box
from nereus.errors import CheckpointError
from nereus.model import DTYPE_BYTES
from nereus.storage import Shard

FORMAT, VERSION = "nereus-checkpoint", 2  # 1 had digests of another function
DIGEST_MASK = (1 << 64) - 1
TensorKey = tuple[str, str, str]  # EMU, component, tensor
Origin = tuple[str, str]  # EMU, component
Held = Mapping[int, Sequence[Shard]]


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class StoredBox:
    """A box of a tensor's component as a file holds it; `digest` as 16 hexadecimal digits ("" before it is known)."""

    emu: str
    component: str
    tensor: str
    box: Box
    dtype: str
    digest: str = ""

    @property
    def key(self) -> str:
        """Its name in the file, e.g. "actor.train/weight/lm_head.weight[0:64,0:128]"."""
        ranges = ",".join(f"{a}:{b}" for a, b in zip(self.box.start, self.box.stop, strict=True))
        return f"{self.emu}/{self.component}/{self.tensor}[{ranges}]"

    @property
    def of(self) -> TensorKey:
        """Which component of which tensor it is a box of."""
        return self.emu, self.component, self.tensor

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return self.box.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFile:
    """A file of a checkpoint: its name in the folder, its size, the SHA-256 of all of it, the boxes in it."""

    name: str
    size_bytes: int
    sha256: str
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds: the state of a job after `step` steps.

    `model` and `plan` are the mappings of a configuration's sections (`plan` is empty where no plan is known).
    `data_position` counts prompts. Random numbers are a function of (seed, EMU, optimizer steps): they need no bytes.
    """

    run_id: str
    step: int
    state_version: int
    model: Mapping[str, object]
    plan: Mapping[str, object]
    plan_text: str
    seed: int
    data_position: int
    kl_coef: float
    optimizer_steps: Mapping[str, int]
    files: tuple[CheckpointFile, ...]

    @property
    def digests(self) -> dict[str, dict[str, str]]:
        """The digest of every component of every tensor: {"actor.train weight": {tensor: hex}}."""
        return whole_digests(stored for file in self.files for stored in file.boxes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size_bytes for file in self.files)

    def places(self) -> dict[TensorKey, tuple[tuple[str, StoredBox], ...]]:
        """(file name, box) of every box, by component of tensor."""
        found: dict[TensorKey, list[tuple[str, StoredBox]]] = defaultdict(list)
        for file in self.files:
            for stored in file.boxes:
                found[stored.of].append((file.name, stored))
        return {key: tuple(places) for key, places in found.items()}


def whole_digests(boxes: Iterable[StoredBox]) -> dict[str, dict[str, str]]:
    """Digests of disjoint boxes added to digests of tensors, mod 2^64."""
    sums: dict[str, dict[str, int]] = defaultdict(dict)
    for stored in boxes:
        tensors = sums[f"{stored.emu} {stored.component}"]
        tensors[stored.tensor] = (tensors.get(stored.tensor, 0) + int(stored.digest, 16)) & DIGEST_MASK
    return {name: {t: f"{v:016x}" for t, v in sorted(tensors.items())} for name, tensors in sorted(sums.items())}


# -- who writes what ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Part:
    """What a slot writes: `box` of a shard that it holds (mostly all of it)."""

    shard: Shard
    box: Box

    @property
    def stored(self) -> StoredBox:
        """The box as the file names it."""
        s = self.shard
        return StoredBox(emu=s.emu, component=s.component, tensor=s.tensor, box=self.box, dtype=s.dtype)


def parts_to_write(held: Held) -> dict[int, tuple[Part, ...]]:
    """Which slot writes which part of what it holds, so that each byte is written once and writers share the bytes.

    What one slot alone holds is its own; then the largest first goes to the holder that has least to write so far.
    The answer depends on `held` alone. A slot with nothing to write is left out.
    """
    holders: dict[TensorKey, dict[Box, list[tuple[int, Shard]]]] = defaultdict(dict)
    for slot in sorted(held):
        for shard in held[slot]:
            boxes = holders[shard.emu, shard.component, shard.tensor]
            boxes.setdefault(shard.box, []).append((slot, shard))
    choices: list[tuple[Part, dict[int, Shard]]] = []
    for key in sorted(holders):
        for box, owners in _disjoint(holders[key]):
            choices.append((Part(shard=owners[0][1], box=box), dict(owners)))
    load_bytes: dict[int, int] = dict.fromkeys(sorted(held), 0)
    chosen: dict[int, list[Part]] = {slot: [] for slot in sorted(held)}
    order = sorted(choices, key=lambda choice: (len(choice[1]) > 1, -choice[0].stored.size_bytes))
    for part, owners in order:
        slot = min(owners, key=lambda number: (load_bytes[number], number))
        load_bytes[slot] += part.stored.size_bytes
        chosen[slot].append(Part(shard=owners[slot], box=part.box))
    return {slot: tuple(sorted(parts)) for slot, parts in chosen.items() if parts}


def _disjoint(boxes: Mapping[Box, list[tuple[int, Shard]]]) -> list[tuple[Box, list[tuple[int, Shard]]]]:
    """The boxes without what earlier ones cover: copies of tied tensors are cut in other places on each holder."""
    found: list[tuple[Box, list[tuple[int, Shard]]]] = []
    covered: list[Box] = []
    for box in sorted(boxes, key=lambda b: (-b.elements, b)):
        rest = [box]
        for other in covered:
            rest = [piece for part in rest for piece in part.subtract(other)]
        found += [(piece, boxes[box]) for piece in rest]
        covered.append(box)
    return found


# -- who reads what ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class Read:
    """`box`, a part of `stored` in `file`, fills its place in the shard `wanted`."""

    file: str
    stored: StoredBox
    wanted: Shard
    box: Box


def reads(
    manifest: Manifest, target: Held, *, origins: Mapping[Origin, Origin] | None = None
) -> dict[int, tuple[Read, ...]]:
    """What each slot of `target` reads so that its shards are filled, each element once; in the order of the files.

    `origins` maps (EMU, component) of `target` to what of the manifest fills it. CheckpointError names what the
    manifest lacks.
    """
    places = manifest.places()
    names: Mapping[Origin, Origin] = origins or {}
    found: dict[int, tuple[Read, ...]] = {}
    for slot in sorted(target):
        mine: list[Read] = []
        for shard in target[slot]:
            emu, component = names.get((shard.emu, shard.component), (shard.emu, shard.component))
            mine += _reads_of(shard, places.get((emu, component, shard.tensor), ()))
        found[slot] = tuple(sorted(mine))
    return found


def _reads_of(shard: Shard, places: Sequence[tuple[str, StoredBox]]) -> list[Read]:
    found: list[Read] = []
    for file, stored in places:
        part = stored.box.intersect(shard.box)
        if part is not None:
            found.append(Read(file=file, stored=stored, wanted=shard, box=part))
    if sum(read.box.elements for read in found) != shard.box.elements:  # boxes of a manifest are disjoint
        raise CheckpointError(
            f"the checkpoint does not hold {shard.emu} {shard.component} of {shard.tensor} {shard.box}"
        )
    return found


def chunks(box: Box, item_bytes: int, limit_bytes: int) -> Iterator[Box]:
    """Consecutive row-major parts of `box`, whole rows where it has two axes, each of at most `limit_bytes` or one row."""
    row_bytes = prod(box.shape[1:]) * item_bytes
    rows = max(limit_bytes // max(row_bytes, 1), 1)
    for first in range(box.start[0], box.stop[0], rows):
        yield Box((first, *box.start[1:]), (min(first + rows, box.stop[0]), *box.stop[1:]))


def lacking(manifest: Manifest, shards: Iterable[Shard]) -> tuple[Shard, ...]:
    """The shards of whose component of their tensor the manifest has nothing."""
    known = {stored.of for file in manifest.files for stored in file.boxes}
    return tuple(s for s in shards if (s.emu, s.component, s.tensor) not in known)


# -- the manifest as text ----------------------------------------------------------------------------------------


def manifest_text(manifest: Manifest) -> str:
    """The manifest as one line of JSON, with a checksum over all the rest of it."""
    body = _body(manifest)
    return _canonical({**body, "checksum": _checksum(body)}) + "\n"


def manifest_of(text: str) -> Manifest:
    """The manifest of what `manifest_text` wrote. CheckpointError says how the text is torn, changed or contradictory."""
    try:
        found: object = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"it is torn: not JSON to its end ({error})") from error
    raw = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    if raw.get("format") != FORMAT:
        raise CheckpointError(f'it is not a manifest: no "format": "{FORMAT}" in it')
    if raw.get("version") != VERSION:
        raise CheckpointError(f"it has version {raw.get('version')!r}, this Nereus reads version {VERSION}")
    checksum = raw.pop("checksum", None)
    if checksum != _checksum(raw):
        raise CheckpointError("its bytes differ from what was written: the checksum does not agree")
    try:
        manifest = _manifest(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"it lacks what version {VERSION} has: {error!r}") from error
    if _canonical({**raw, "checksum": checksum}) + "\n" != text:
        raise CheckpointError("its bytes differ from what was written")
    check_manifest(manifest)
    if raw["digests"] != manifest.digests:
        raise CheckpointError("digests of tensors are not the sums of their boxes' digests")
    return manifest


def _body(manifest: Manifest) -> dict[str, object]:
    files: list[object] = []
    for file in manifest.files:
        boxes: list[object] = []
        for stored in file.boxes:
            start, stop = list(stored.box.start), list(stored.box.stop)
            names = {"emu": stored.emu, "component": stored.component, "tensor": stored.tensor}
            boxes.append({**names, "start": start, "stop": stop, "dtype": stored.dtype, "digest": stored.digest})
        files.append({"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256, "boxes": boxes})
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(manifest, name) for name in _PLAIN},
        "files": files,
        "digests": manifest.digests,
    }


_PLAIN = (
    "run_id",
    "step",
    "state_version",
    "model",
    "plan",
    "plan_text",
    "seed",
    "data_position",
    "kl_coef",
    "optimizer_steps",
)


def _canonical(body: object) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _checksum(body: object) -> str:
    return hashlib.sha256(_canonical(body).encode()).hexdigest()


def _manifest(raw: Mapping[str, Any]) -> Manifest:
    files: list[CheckpointFile] = []
    for file in raw["files"]:  # a wrong type is a TypeError, which the caller tells
        boxes = [
            StoredBox(
                emu=str(b["emu"]),
                component=str(b["component"]),
                tensor=str(b["tensor"]),
                box=Box(tuple(map(int, b["start"])), tuple(map(int, b["stop"]))),
                dtype=str(b["dtype"]),
                digest=str(b["digest"]),
            )
            for b in file["boxes"]
        ]
        files.append(
            CheckpointFile(
                name=str(file["name"]),
                size_bytes=int(file["size_bytes"]),
                sha256=str(file["sha256"]),
                boxes=tuple(boxes),
            )
        )
    return Manifest(files=tuple(files), **{name: raw[name] for name in _PLAIN})


def check_manifest(manifest: Manifest) -> None:
    """CheckpointError unless file names are plain and unique and the boxes of each tensor are one whole, once."""
    names = [file.name for file in manifest.files]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise CheckpointError(f"{name!r} is not the name of a file in the checkpoint's folder")
    if len(set(names)) != len(names):
        raise CheckpointError("a file is listed twice")
    for key, places in manifest.places().items():
        boxes = [stored.box for _, stored in places]
        what = f"{key[0]} {key[1]} of {key[2]}"
        if len({stored.dtype for _, stored in places} | {len(box.start) for box in boxes}) != 2:
            raise CheckpointError(f"{what}: boxes of different types or ranks")
        shape = [max(box.stop[axis] for box in boxes) for axis in range(len(boxes[0].start))]
        if prod(shape) != sum(box.elements for box in boxes) or _overlap(boxes):
            raise CheckpointError(f"{what}: its boxes do not cover {shape} exactly once")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of the boxes share an element; boxes far apart on the first axis are not compared."""
    open_boxes: list[Box] = []
    for box in sorted(boxes):
        open_boxes = [other for other in open_boxes if other.stop[0] > box.start[0]]
        if any(box.intersect(other) for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


# -- names and retention -----------------------------------------------------------------------------------------


def folder_name(step: int) -> str:
    """The name of the folder of the checkpoint after `step` steps."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder name; None for any other name."""
    found = re.fullmatch(r"step-(\d{6,})", name)
    return int(found[1]) if found else None


def steps_to_remove(steps: Iterable[int], saved_step: int, keep: int) -> tuple[int, ...]:
    """Which checkpoints go after the one of `saved_step` is durable: all but the last `keep` (at least it) up to it.

    Those of later steps go too: the run went on from before them, so they are not of its history any more.
    """
    before = sorted((step for step in set(steps) if step < saved_step), reverse=True)
    later = sorted(step for step in set(steps) if step > saved_step)
    return tuple(sorted(before[max(keep - 1, 0) :]) + later)


def model_section(model: object) -> dict[str, object]:
    """A configuration's model section as JSON gives it back."""
    return json.loads(json.dumps(asdict(model)))  # type: ignore[call-overload]  # a dataclass
