"""What a slot writes: its file of a checkpoint, from a copy in a thread or here and now; and stages that wait in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nereus.checkpoint import Part
from nereus.errors import SlotOutOfMemory
from nereus.runtime.ledger import Ledger
from nereus.runtime.shards import Reader, SaveStarted, SaveState, Writing, written
from nereus.runtime.transformation import snapshot_name

if TYPE_CHECKING:
    from nereus.runtime.slot import Slot

SNAPSHOT = "checkpoint.snapshot"


def save(
    path: Path, parts: Sequence[Part], reader: Reader, ledger: Ledger, limit_bytes: int, *, counted: bool
) -> tuple[Writing | SaveState, SaveStarted]:
    """Writes `parts` to the new file `path`: in a thread from a copy, which is booked where it is `counted`.

    Where the budget has no room for the copy the file is written here and now, `limit_bytes` at a time.
    """
    boxes = tuple(part.stored for part in parts)
    with ledger.in_phase("save_checkpoint"):
        try:
            if counted:
                ledger.hold(SNAPSHOT, sum(stored.size_bytes for stored in boxes))
        except SlotOutOfMemory as error:
            with ledger.during("staging", limit_bytes):
                done = written(path, boxes, reader.data())
            return done, SaveStarted(boxes=reader.boxes, reason=str(error))
        copied = list(reader.data())
    return Writing(path, boxes, copied), SaveStarted(boxes=reader.boxes)


def offload(slot: Slot, emu: str, folder: Path) -> int:
    """The weights of an inference-only stage go to a file in `folder`; the bytes, 0 where there is no room."""
    if emu not in slot.live:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    slot.keep(folder)
    try:
        size_bytes = slot.live[emu].offload(folder / f"offloaded-{snapshot_name(emu, slot.number)}")
    except OSError:  # no room there: it stays here
        return 0
    slot.ledger.release(emu)
    return size_bytes
