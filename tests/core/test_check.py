"""The proof of a movement: it passes what `movement` makes and refuses each planted violation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nereus.boxes import Box
from nereus.config import ModelConfig
from nereus.errors import TransferFailed
from nereus.layout import Layout
from nereus.model import llama
from nereus.slices import Bucket, Movement, Slice, check, cut, movement
from nereus.storage import holding
from tests.strategies import stage_plan

BUCKET_BYTES = 4000
SPEC = llama("m", ModelConfig(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=4, ffn=16, vocab=40))
PRESENT = holding(SPEC, stage_plan(Layout(tp=2, pp=1, dp=2, pipeline=(2,))))
TARGET = holding(SPEC, stage_plan(Layout(tp=1, pp=2, dp=2, pipeline=(1, 1)), slots=(0, 1, 2, 4)))
GOOD = movement(cut(PRESENT, TARGET), BUCKET_BYTES)


def with_bucket(index: int, **changes: object) -> Movement:
    buckets = list(GOOD.buckets)
    buckets[index] = replace(buckets[index], **changes)  # type: ignore[arg-type]
    return replace(GOOD, buckets=tuple(buckets))


def with_slice(piece: Slice) -> Movement:
    """The first slice of the first bucket replaced."""
    return with_bucket(0, slices=(piece, *GOOD.buckets[0].slices[1:]))


FIRST = GOOD.buckets[0].slices[0]
TOGETHER = next(n for n, b in enumerate(GOOD.buckets) if n and b.turn == GOOD.buckets[0].turn)
OUTSIDE = Box((999,) * len(FIRST.box.start), (1000,) * len(FIRST.box.start))
NOT_ONCE = "not covered once"
LATER = max(b.turn for b in GOOD.buckets) + 1


def large(moved: Movement) -> Movement:
    """Two buckets of one pair joined: within no limit."""
    for n, one in enumerate(moved.buckets):
        for other in moved.buckets[n + 1 :]:
            if (one.source, one.destination) == (other.source, other.destination):
                joined = replace(one, slices=one.slices + other.slices)
                rest = tuple(b for b in moved.buckets if b not in (one, other))
                return replace(moved, buckets=(*rest, joined))
    raise AssertionError("no pair has two buckets")


def shrunk(piece: Slice) -> Slice:
    """Without its last row."""
    stop = (piece.box.stop[0] - 1, *piece.box.stop[1:])
    assert piece.box.shape[0] > 1
    return replace(piece, box=Box(piece.box.start, stop))


def first_row(piece: Slice) -> Slice:
    return replace(piece, box=Box(piece.box.start, (piece.box.start[0] + 1, *piece.box.stop[1:])))


def other_holder(piece: Slice) -> int:
    return next(s for s in PRESENT if piece.held not in PRESENT[s] and s != piece.destination)


TALL = next(s for b in GOOD.buckets for s in b.slices if s.box.shape[0] > 1)
TALL_BUCKET = next(n for n, b in enumerate(GOOD.buckets) if TALL in b.slices)


def tall_replaced(*pieces: Slice) -> Movement:
    slices = tuple(p for s in GOOD.buckets[TALL_BUCKET].slices for p in (pieces if s == TALL else (s,)))
    return with_bucket(TALL_BUCKET, slices=slices)


def extra_bucket(piece: Slice) -> Movement:
    bucket = Bucket(turn=LATER, source=piece.source, destination=piece.destination, slices=(piece,))
    return replace(GOOD, buckets=(*GOOD.buckets, bucket))


VIOLATIONS: dict[str, tuple[str, Callable[[], Movement]]] = {
    "a bucket is left out": (NOT_ONCE, lambda: replace(GOOD, buckets=GOOD.buckets[1:])),
    "a kept shard is left out": (NOT_ONCE, lambda: replace(GOOD, kept=GOOD.kept[1:])),
    "a row is missing": (NOT_ONCE, lambda: tall_replaced(shrunk(TALL))),
    "a row is sent twice": (NOT_ONCE, lambda: tall_replaced(TALL, first_row(TALL))),
    "one row twice, another not at all": ("written twice", lambda: tall_replaced(shrunk(TALL), first_row(TALL))),
    "a bucket is sent twice": (NOT_ONCE, lambda: extra_bucket(FIRST)),
    "the source does not hold it": ("not hold", lambda: with_slice(replace(FIRST, source=other_holder(FIRST)))),
    "the source is no slot of the present": ("not hold", lambda: with_slice(replace(FIRST, source=9))),
    "a box outside what is held": ("not hold", lambda: with_slice(replace(FIRST, box=OUTSIDE))),
    "a shard that no target wants": ("no target wants", lambda: extra_bucket(replace(FIRST, destination=3))),
    "a slot sends twice in a round": ("twice", lambda: with_bucket(TOGETHER, source=GOOD.buckets[0].source)),
    "a slot receives twice in a round": (
        "twice",
        lambda: with_bucket(TOGETHER, destination=GOOD.buckets[0].destination),
    ),
    "a bucket to its own slot": ("itself", lambda: with_bucket(0, turn=LATER, destination=GOOD.buckets[0].source)),
    "an oversized bucket": ("exceeds half", lambda: large(GOOD)),
}


def unlike(field: str) -> Movement:
    """A slice read from the same box of another component or tensor that its source holds too."""
    for n, bucket in enumerate(GOOD.buckets):
        for m, piece in enumerate(bucket.slices):
            for s in PRESENT[piece.source]:
                fits = s.dtype == piece.held.dtype and len(s.box.start) == len(piece.box.start)
                if fits and s.box.contains(piece.box) and getattr(s, field) != getattr(piece.held, field):
                    slices = (*bucket.slices[:m], replace(piece, held=s), *bucket.slices[m + 1 :])
                    return with_bucket(n, slices=slices)
    raise AssertionError("no slice fits another shard of its source")


def crossed_bucket() -> Movement:
    """A bucket that leaves from a slot which holds none of its slices."""
    return with_bucket(0, turn=LATER, source=9)


def redirected_bucket() -> Movement:
    """A bucket that arrives at a slot which wants none of its slices."""
    return with_bucket(0, turn=LATER, destination=9)


def sent_although_in_place() -> Movement:
    """A slice that its slot holds already, sent by another holder of the same shard."""
    for n, piece in enumerate(GOOD.kept):
        for slot in PRESENT:
            if slot != piece.destination and piece.held in PRESENT[slot]:
                kept = GOOD.kept[:n] + GOOD.kept[n + 1 :]
                return replace(extra_bucket(replace(piece, source=slot)), kept=kept)
    raise AssertionError("no kept shard has another holder")


def kept_from_elsewhere() -> Movement:
    """A slice that must travel, listed among those that stay."""
    bucket = with_bucket(0, slices=GOOD.buckets[0].slices[1:])
    return replace(bucket, kept=(*GOOD.kept, FIRST))


FURTHER: dict[str, Callable[[], Movement]] = {
    "the wrong component of a tensor": lambda: unlike("component"),
    "the wrong tensor": lambda: unlike("tensor"),
    "a bucket leaves from another slot than its slices": crossed_bucket,
    "a bucket arrives at another slot than its slices": redirected_bucket,
    "a slice that is in place is sent": sent_although_in_place,
    "a slice that must travel is listed as kept": kept_from_elsewhere,
}


def test_a_made_movement_passes() -> None:
    assert len(GOOD.buckets) > 4
    check(PRESENT, TARGET, GOOD, BUCKET_BYTES)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_planted_violations_are_refused(name: str) -> None:
    message, plant = VIOLATIONS[name]
    with pytest.raises(TransferFailed, match=message):
        check(PRESENT, TARGET, plant(), BUCKET_BYTES)


@pytest.mark.parametrize("name", FURTHER)
def test_further_planted_violations_are_refused(name: str) -> None:
    with pytest.raises(TransferFailed):
        check(PRESENT, TARGET, FURTHER[name](), BUCKET_BYTES)
