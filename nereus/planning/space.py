"""Which plans there are: the layouts of a model-stage on a pool, and how model-stages are divided among pools.

On at most `exact_slots` slots every degree counts: all TP, PP, DP whose product fits, and every division of the slots.
Above, DP is the most that fits and has work, and pools end at devices and at eighths of the fleet (quarters above 64
slots).

Left out, for they are never better: optimizer state not sharded (each collective is as long and none is hidden),
selective recomputation (kernels that fuse attention keep nothing of what it repeats), offloading in a pool that nobody
shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from math import ceil
from typing import Literal

import numpy as np
import numpy.typing as npt

from nereus.config import ModelConfig
from nereus.costs.training import Recompute, Sharding
from nereus.layout import Layout, equal_shares, first_problem
from nereus.planning.bytes import MemoryModel
from nereus.planning.ground import Ground, seats
from nereus.planning.job import Job
from nereus.planning.plan import Keep, StageChoice

LONG_TOKENS = 16_384
"""From this length on sequences are cut too (context parallelism)."""
LIGHTER_LAYERS = (1, 2, 3, 4, 6, 8)
"""By so many layers a pipeline's last rank, which has the head, may be lighter."""
APART: tuple[tuple[tuple[str, ...], ...], ...] = (
    (),
    (("actor_generate",),),
    (("critic_train", "reward_infer"),),
    (("reference_infer", "reward_infer"),),
    (("actor_generate",), ("critic_train", "reward_infer")),
)
"""Divisions of the model-stages: those of each group stand on a pool of their own, all others share one."""
MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What may be chosen. `micro_batches` in samples; none but 1 holds more than `most_packed_tokens`.

    `only_tp_pp` are the (TP, PP) that stages which train or infer may have, `only_engine_tps` the TP of engines (none named:
    all); with `every_slot` no stage may leave one idle, and pipelines are even.
    """

    recomputes: tuple[Recompute, ...] = ("none", "full")
    shardings: tuple[Sharding, ...] = ("optimizer", "full")
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    most_packed_tokens: int = 32_768
    exact_slots: int = 8
    pools: bool = True
    only_tp_pp: tuple[tuple[int, int], ...] = ()
    only_engine_tps: tuple[int, ...] = ()
    every_slot: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Pools of the ordered slots and the pool of each model-stage."""

    pools: tuple[tuple[int, ...], ...]
    pool_of: tuple[tuple[str, int], ...]

    def of(self, stage: str) -> int:
        """The pool of a model-stage."""
        return dict(self.pool_of)[stage]


def placements(
    stages: Sequence[str], slots: Sequence[int], borders: Sequence[int], space: Space
) -> Iterator[Placement]:
    """Every placement: the division of the stages, then where pools end. `borders` are where devices change.

    The first placement shares all slots. Where devices differ, all may also share the faster ones alone.
    """
    count, seen = len(slots), set[Placement]()
    cuts = range(1, count) if count <= space.exact_slots else _cuts(count, borders)
    for apart in APART if space.pools else APART[:1]:
        groups = [tuple(name for name in group if name in stages) for group in apart]
        if not all(groups):
            continue
        shared = tuple(name for name in stages if not any(name in group for group in groups))
        for order in _orders((shared, *groups), mixed=bool(borders)):
            for ends in combinations(cuts, len(order) - 1):
                starts = (0, *ends)
                pools = tuple(tuple(slots[a:b]) for a, b in zip(starts, (*ends, count), strict=True))
                pool_of = tuple((name, pool) for name in stages for pool, group in enumerate(order) if name in group)
                placement = Placement(pools=pools, pool_of=pool_of)
                if placement not in seen:
                    seen.add(placement)
                    yield placement
    for border in borders:
        yield Placement(pools=(tuple(slots[:border]),), pool_of=tuple((name, 0) for name in stages))


def _orders(groups: tuple[tuple[str, ...], ...], *, mixed: bool) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Who gets the first, fastest slots: on equal slots only one order is of interest."""
    yield groups
    if mixed and len(groups) == 2:
        yield groups[::-1]


def _cuts(count: int, borders: Sequence[int]) -> list[int]:
    grain = max(1, count // (8 if count <= 64 else 4))
    return sorted({*range(grain, count, grain), *borders})


def stage_layouts(job: Job, name: str, ground: Ground, space: Space) -> Iterator[Layout]:
    """Every layout of a stage that trains or infers which the model and the ground admit."""
    yield from _layouts(_asked(job, name), ground.domain_slots, space)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What of a job the choices of one stage follow from; `sequences` of a mini-batch, or of the batch."""

    config: ModelConfig
    kind: Literal["train", "infer"]
    sequences: int
    is_long: bool


def _asked(job: Job, name: str) -> _Asked:
    trains = name.endswith("_train")
    return _Asked(
        config=job.model(name).config,
        kind="train" if trains else "infer",
        sequences=max(1, ceil(job.samples / job.mini_batches)) if trains else job.samples,
        is_long=job.longest_tokens >= LONG_TOKENS,
    )


def _layouts(asked: _Asked, domain_slots: Sequence[int], space: Space) -> Iterator[Layout]:
    config, count = asked.config, sum(domain_slots)
    exact = count <= space.exact_slots
    for tp in range(1, max(domain_slots) + 1):
        if first_problem(config, Layout(tp=tp, pp=1, dp=1, pipeline=(config.layers,)), asked.kind) is not None:
            continue
        places = seats(domain_slots, tp)
        for cp in (1, 2, 4, 8) if asked.is_long else (1,):
            for pp in range(1, min(config.layers, places // (tp * cp)) + 1):
                if space.only_tp_pp and (tp, pp) not in space.only_tp_pp:
                    continue
                most = places // (tp * cp * pp)
                for pipeline in splits(config.layers, pp, turned=exact):
                    for dp in range(1, most + 1) if exact else _most_replicas(asked, most):
                        layout = Layout(tp=tp, pp=pp, dp=dp, pipeline=pipeline, cp=cp)
                        if not space.every_slot or (layout.ranks == count and len(set(pipeline)) == 1):
                            yield from _with_experts(asked, layout)


def _most_replicas(asked: _Asked, most: int) -> Sequence[int]:
    return (min(most, asked.sequences),) if most else ()


def splits(layers: int, pp: int, *, turned: bool = True) -> Iterator[tuple[int, ...]]:
    """Pipelines of these layers: as even as can be with more layers first; `turned` round; with a lighter last rank."""
    even = equal_shares(layers, pp)
    cuts = [even, even[::-1]] if turned else [even]
    for less in LIGHTER_LAYERS if pp > 1 else ():
        padded = equal_shares(layers + less, pp)
        cuts.append((*padded[:-1], padded[-1] - less))
    yield from dict.fromkeys(cut for cut in cuts if cut[-1] >= 1)


def _with_experts(asked: _Asked, layout: Layout) -> Iterator[Layout]:
    config = asked.config
    yield layout
    ep = 2
    while config.experts and ep <= config.experts:
        etp = 1 if layout.tp > 1 else None
        spread = Layout(
            tp=layout.tp, pp=layout.pp, dp=layout.dp, pipeline=layout.pipeline, cp=layout.cp, ep=ep, etp=etp
        )
        if first_problem(config, spread, asked.kind) is None:
            yield spread
        ep *= 2


def micro_batches(job: Job, space: Space) -> tuple[int, ...]:
    """The sizes of micro-batches that are not too many tokens."""
    most = space.most_packed_tokens
    return tuple(size for size in space.micro_batches if size == 1 or size * job.sample_tokens <= most)


def stage_choices(job: Job, name: str, layout: Layout, space: Space) -> Iterator[StageChoice]:
    """Every way to run a layout, with everything resident."""
    yield from _choices(_asked(job, name), layout, replace(space, micro_batches=micro_batches(job, space)))


def _choices(asked: _Asked, layout: Layout, space: Space) -> Iterator[StageChoice]:
    most = ceil(asked.sequences / layout.dp)
    for sharding in space.shardings:
        if sharding == "full" and (layout.tp > 1 or layout.pp > 1 or layout.optimizer_ranks == 1):
            continue
        for micro_batch in space.micro_batches:
            if micro_batch > 1 and micro_batch > most:
                continue
            for recompute in space.recomputes if asked.kind == "train" else space.recomputes[:1]:
                yield StageChoice(layout=layout, micro_batch=micro_batch, recompute=recompute, sharding=sharding)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageList:
    """Choices of a stage, and their degrees as an array: tp, cp, ep, micro-batch, index of the recomputation in the space,
    pp, dp, fully sharded, layers of the fullest rank before the last, layers of the last.
    """

    choices: tuple[StageChoice, ...]
    degrees: npt.NDArray[np.int64]


def stage_list(job: Job, name: str, ground: Ground, space: Space) -> StageList:
    """Every choice of a stage that trains or infers on a ground, with everything resident; what was asked before is at hand."""
    return _listed(_asked(job, name), ground.domain_slots, replace(space, micro_batches=micro_batches(job, space)))


@lru_cache(maxsize=256)
def _listed(asked: _Asked, domain_slots: tuple[int, ...], space: Space) -> StageList:
    choices = tuple(
        choice for layout in _layouts(asked, domain_slots, space) for choice in _choices(asked, layout, space)
    )
    rows: list[tuple[int, ...]] = []
    for choice in choices:
        layout = choice.layout
        rows.append(
            (
                layout.tp,
                layout.cp,
                layout.ep,
                choice.micro_batch,
                space.recomputes.index(choice.recompute),
                layout.pp,
                layout.dp,
                choice.sharding == "full",
                max(layout.pipeline[:-1], default=0),
                layout.pipeline[-1],
            )
        )
    return StageList(choices=choices, degrees=np.array(rows, dtype=np.int64).reshape(-1, 10))


def stage_keeps(memory: MemoryModel, name: str, *, alone: bool) -> tuple[Keep, ...]:
    """The residencies of a stage; of one that only infers weights are everything."""
    if alone:
        return memory.keeps[:1]
    return memory.keeps if name.endswith("_train") else tuple(keep for keep in memory.keeps if keep != "weights")


def engine_layouts(job: Job, ground: Ground, *, every_slot: bool = False, fewer: bool = False) -> Iterator[Layout]:
    """Engines of every TP that the model admits, as many as fit; above a domain only if no smaller one holds the weights.

    `fewer` adds fewer engines than fit: never faster, but perhaps cheaper to reach.
    """
    config, layers = job.actor.config, job.actor.config.layers
    widest = max(ground.domain_slots)
    wide = [widest * count for count in (2, 4, 8) if widest * count <= len(ground.slots)]
    for tp in (*range(1, widest + 1), *wide):
        most = ground.seats(tp) // tp
        for dp in range(most, 0, -1) if fewer else (most,):
            layout = Layout(tp=tp, pp=1, dp=dp, pipeline=(layers,))
            if not dp or (every_slot and layout.ranks < len(ground.slots)):
                continue
            if first_problem(config, layout, "generate") is None:
                yield layout
