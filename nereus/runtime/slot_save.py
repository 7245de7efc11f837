"""How a slot begins its file of a checkpoint: a copy in host memory that a thread writes, or the file here and now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nereus.checkpoint import Part
from nereus.errors import SlotOutOfMemory
from nereus.runtime.ledger import Ledger
from nereus.runtime.shards import Reader, SaveStarted, SaveState, Writing, written

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
