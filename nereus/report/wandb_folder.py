"""The metrics of a W&B run as its own files hold them, read without network: what a `.wandb` file says.

A `.wandb` file is a 7-byte header and then LevelDB's log format: blocks of 32 KiB, in them chunks of
crc32 (4 bytes, of type and data), size (2 bytes), type (1: a whole record, 2, 3, 4: its first, a middle, its last part) and data.
A record is a protobuf message of wandb's, which is the only thing of wandb that is needed here.
"""

from __future__ import annotations

import importlib
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from nereus.errors import ConfigError, JournalError
from nereus.runtime.metrics import STEP

MAGIC, HEADER_BYTES = b":W&B", 7
BLOCK_BYTES, CHUNK_HEADER_BYTES = 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
AXES = (STEP, "train/global_step")
"""What numbers the steps: Nereus and verl have the first, OpenRLHF the second."""
RUN_FOLDERS = ("run-*", "offline-run-*")


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbRun:
    """What a W&B run logged: its name and one row a step, in order; `torn` when the file ends within a record.

    Numbers only, by metric; what is not finite is NaN, as in metrics.jsonl. `settings`: the run's config in W&B.
    """

    path: Path
    name: str
    rows: tuple[dict[str, float], ...]
    torn: bool
    settings: dict[str, Any] = field(default_factory=dict[str, Any])


def find_wandb_file(path: Path) -> Path | None:
    """The one `.wandb` file that `path` is or has: itself, in it, in its W&B run folder, or in its `wandb/`; else None.

    Raises ConfigError where there are several.
    """
    if path.is_file():
        return path if path.suffix == ".wandb" else None
    found = wandb_files(path)
    if len(found) > 1:
        names = ", ".join(str(file.relative_to(path)) for file in found)
        raise ConfigError("RUN", str(path), f"has several W&B runs, expected one of {names}")
    return found[0] if found else None


def wandb_files(folder: Path) -> list[Path]:
    """The `.wandb` files of `folder`: in it, else in its W&B run folders or in those of its `wandb/`; sorted."""
    deeper = [f"{below}{run}/*.wandb" for below in ("", "wandb/") for run in RUN_FOLDERS]
    for patterns in (["*.wandb"], deeper):
        if found := sorted({file for pattern in patterns for file in folder.glob(pattern)}):
            return found
    return []


def read_wandb(path: Path) -> WandbRun:
    """The run in the `.wandb` file `path`. Raises JournalError where the file cannot be read or is damaged."""
    pb: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise JournalError(f"{path}: expected a W&B file, which begins with {MAGIC.decode()}")
    name, steps, torn = "", {}, False
    settings: dict[str, Any] = {}
    for message in _messages(data, path):
        if message is None:
            torn = True
            break
        try:
            record = pb.Record.FromString(message)
        except DecodeError as error:
            raise JournalError(f"{path}: holds a record that is not wandb's: {error}") from error
        kind = record.WhichOneof("record_type")
        if kind == "run":
            name = record.run.display_name or record.run.run_id
            settings = {item.key: json.loads(item.value_json) for item in record.run.config.update if item.key}
        elif kind == "history":
            row = _numbers(record.history.item)
            step = next((row[axis] for axis in AXES if axis in row), math.nan)
            if not math.isnan(step):
                steps.setdefault(step, {}).update(row)  # a step may be logged in several records
    return WandbRun(path=path, name=name or path.stem, rows=tuple(steps.values()), torn=torn, settings=settings)


def _numbers(items: Any) -> dict[str, float]:
    """The metrics of a history record; what wandb adds itself (`_step`, `_runtime`, ...) and what is no number is left out."""
    row: dict[str, float] = {}
    for item in items:
        key, value = item.key or "/".join(item.nested_key), json.loads(item.value_json)
        if not key.startswith("_") and isinstance(value, int | float):
            row[key] = value if math.isfinite(value) else math.nan
    return row


def _messages(data: bytes, path: Path) -> Iterator[bytes | None]:
    """The messages in a file; None, as the last one, where the file ends within one."""
    at, parts = HEADER_BYTES, []
    while at < len(data):
        left_bytes = BLOCK_BYTES - at % BLOCK_BYTES
        if left_bytes < CHUNK_HEADER_BYTES:  # the rest of a block is padding
            at += left_bytes
            continue
        head, start = data[at : at + CHUNK_HEADER_BYTES], at + CHUNK_HEADER_BYTES
        end = start + int.from_bytes(head[4:6], "little")
        if len(head) < CHUNK_HEADER_BYTES or end > len(data):
            yield None
            return
        kind, body = head[6], data[start:end]
        follows = kind in (MIDDLE, LAST)
        if zlib.crc32(body, zlib.crc32(head[6:])) != int.from_bytes(head[:4], "little") or follows != bool(parts):
            raise JournalError(f"{path}: is damaged at byte {at}")
        parts.append(body)
        if kind in (WHOLE, LAST):
            yield b"".join(parts)
            parts = []
        at = end
    if parts:
        yield None
