"""Movements carried out with arrays of unique ids, and what they must move, counted element by element; fleets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from nereus.config import ModelConfig
from nereus.fleet import CPU_SLOT, DEVICES, Fleet, Node
from nereus.layout import Layout, Stage, layout_problem
from nereus.model import ModelSpec
from nereus.slices import Holding, Movement, Slice
from nereus.storage import Shard
from tests.core import definition
from tests.strategies import general_layouts

Memory = dict[int, dict[Shard, np.ndarray]]
COMPONENTS = ("weight", "master", "exp_avg", "exp_avg_sq")
SLOW = replace(CPU_SLOT, name="slow", nic_bytes_per_second=1e6)
"""A device whose network is far slower than its links, so that relays pay."""


def filled(held: Holding, *specs: ModelSpec) -> Memory:
    """Storage by shard, holding the global state: element ids, told apart by component and model."""
    ids = {spec.name: definition.element_ids(spec) for spec in specs}
    order = {spec.name: index for index, spec in enumerate(specs)}

    def values(shard: Shard) -> np.ndarray:
        model = shard.emu.split(".")[0]
        box = shard.box.slices((0,) * len(shard.box.start))
        return ids[model][shard.tensor][box] + 0.25 * COMPONENTS.index(shard.component) + 1e9 * order[model]

    return {slot: {s: values(s) for s in shards} for slot, shards in held.items()}


def together(*holdings: Holding) -> dict[int, tuple[Shard, ...]]:
    """What slots hold under several plans at once."""
    joint: dict[int, tuple[Shard, ...]] = defaultdict(tuple)
    for held in holdings:
        for slot, shards in held.items():
            joint[slot] += shards
    return dict(joint)


def carried_out(present: Memory, target: Holding, moved: Movement) -> Memory:
    """What the target slots hold after every round; NaN where nothing was written.

    Within a round everything is read before anything is written, as the ports of a round work at once.
    """
    made: Memory = {slot: {s: np.full(s.box.shape, np.nan) for s in shards} for slot, shards in target.items()}

    def read(piece: Slice) -> np.ndarray:
        store = (made if piece.hop else present)[piece.source][piece.held]
        return store[piece.box.slices(piece.held.box.start)].copy()

    def write(piece: Slice, values: np.ndarray) -> None:
        into = made[piece.destination][piece.wanted][piece.box.slices(piece.wanted.box.start)]
        assert np.isnan(into).all()  # written once
        assert not np.isnan(values).any()  # what is handed on has come
        into[...] = values

    rounds: dict[int, list[Slice]] = defaultdict(list)
    for bucket in moved.buckets:
        rounds[bucket.turn] += bucket.slices
    for pieces in (moved.kept, *(rounds[turn] for turn in sorted(rounds))):
        for piece, values in [(piece, read(piece)) for piece in pieces]:
            write(piece, values)
    return made


def assert_same(made: Memory, wanted: Memory) -> None:
    """Bit for bit: the same slots, the same shards, the same values."""
    assert {slot: set(shards) for slot, shards in made.items()} == {slot: set(s) for slot, s in wanted.items()}
    for slot, shards in wanted.items():
        for shard, values in shards.items():
            np.testing.assert_array_equal(made[slot][shard], values, err_msg=f"slot {slot}: {shard}")


Ids = dict[int, dict[int, np.ndarray]]


def numbered(*holdings: Holding) -> tuple[Ids, ...]:
    """For each holding and slot the ids of its elements, by bytes of an element; the same element has the same id."""
    first: dict[tuple[str, str, str], int] = {}
    extent: dict[tuple[str, str, str], np.ndarray] = {}
    for shard in {s for held in holdings for shards in held.values() for s in shards}:
        key = (shard.emu.split(".")[0], shard.component, shard.tensor)
        extent[key] = np.maximum(extent.get(key, 1), shard.box.stop)
    for key in sorted(extent):
        first[key] = sum(map(int, map(np.prod, (extent[k] for k in first))))

    def ids(shard: Shard) -> np.ndarray:
        key = (shard.emu.split(".")[0], shard.component, shard.tensor)
        ranges = np.ix_(*map(np.arange, shard.box.start, shard.box.stop))
        return first[key] + np.ravel_multi_index(ranges, tuple(extent[key])).ravel()

    found: list[Ids] = []
    for held in holdings:
        by_slot: Ids = {}
        for slot, shards in held.items():
            parts: dict[int, list[np.ndarray]] = defaultdict(list)
            for shard in shards:
                parts[2 if shard.dtype == "bfloat16" else 4].append(ids(shard))
            by_slot[slot] = {size: np.unique(np.concatenate(arrays)) for size, arrays in parts.items()}
        found.append(by_slot)
    return tuple(found)


def missing_of(have: Mapping[int, np.ndarray], need: Mapping[int, np.ndarray]) -> int:
    """Bytes of what is needed and not had."""
    return sum(size * len(np.setdiff1d(ids, have.get(size, ()))) for size, ids in need.items())


def missing_bytes(present: Holding, target: Holding) -> int:
    """F1 of the formal facts: the sum over slots of |wanted without held|, counted element by element."""
    have, need = numbered(present, target)
    return sum(missing_of(have.get(slot, {}), ids) for slot, ids in need.items())


def assert_legal(moved: Movement, bucket_bytes: int) -> None:
    """Each round is a matching between different slots, and no bucket exceeds half of bucket_bytes."""
    sends = Counter((b.turn, b.source) for b in moved.buckets)
    receives = Counter((b.turn, b.destination) for b in moved.buckets)
    assert set(sends.values()) | set(receives.values()) <= {1}
    assert all(b.source != b.destination and 0 < b.size_bytes <= bucket_bytes // 2 for b in moved.buckets)
    assert {b.turn for b in moved.buckets} == set(range(moved.turns))


def degree(moved: Movement) -> int:
    """The most buckets that one port sends or receives."""
    sends, receives = Counter(b.source for b in moved.buckets), Counter(b.destination for b in moved.buckets)
    return max((*sends.values(), *receives.values()), default=0)


@st.composite
def layouts_within(draw: st.DrawFn, config: ModelConfig, ranks: int, stage: Stage = "train") -> Layout:
    """A layout of at most so many ranks: as drawn, or with fewer degrees until it fits."""
    drawn = draw(general_layouts(config, stage))
    one = replace(drawn, dp=1, cp=1, ep=1, etp=None)
    fewer = (
        drawn,
        replace(drawn, dp=1),
        replace(drawn, dp=1, cp=1),
        one,
        replace(one, pp=1, pipeline=(config.layers,)),
    )
    least = replace(one, tp=1, pp=1, pipeline=(config.layers,))
    fits = (found for found in fewer if found.ranks <= ranks and layout_problem(config, found, stage) is None)
    return next(fits, least)


@st.composite
def fleets(draw: st.DrawFn, slots: Iterable[int]) -> Fleet:
    """The slots in any order over nodes of 1 to 4, of mixed devices, some with network ports that slots share."""
    left = list(draw(st.permutations(sorted(slots))))
    nodes: list[Node] = []
    while left:
        size = draw(st.integers(1, min(4, len(left))))
        device = draw(st.sampled_from((CPU_SLOT, SLOW, DEVICES["h100"], DEVICES["v100"])))
        nodes.append(Node(slots=tuple(left[:size]), device=device, nics=draw(st.integers(0, size))))
        left = left[size:]
    return Fleet(nodes=tuple(nodes))
