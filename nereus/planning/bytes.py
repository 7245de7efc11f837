"""Bytes of one model-stage on a slot: in each of its phases, between them, in host memory, and over the PCIe port.

Every figure is that of the pipeline rank that has most. Which slot takes which rank is decided later, by what moves
least, so a plan must fit wherever the worst ranks of its model-stages meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Protocol

from nereus.costs.footprint import (
    COMMUNICATOR_BYTES,
    MARGIN,
    VOCABULARY_PARALLEL_LOSS_BYTES,
    activation_components,
    layer_activation_bytes,
    state_components,
)
from nereus.costs.generation import (
    MEMORY_SHARE,
    WORKSPACE_BYTES,
    Generator,
    cache_bytes_per_token,
    weight_bytes_per_slot,
)
from nereus.costs.shape import Shape
from nereus.costs.training import BatchWork, Sharding, layer_counts, owned_parameters
from nereus.layout import Layout
from nereus.planning.job import PHASES_OF, Job
from nereus.planning.plan import Keep, StageChoice

ASLEEP_BYTES = 800_000_000
"""What an engine keeps of a slot while it sleeps (NeMo-RL 223, at TP1; its communicators come to it above)."""

Components = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes:
    """A model-stage on a slot: bytes by component in each of its phases (all that it holds then), and between them.

    `offloaded` is what host memory keeps of it, per slot; `moved` the bytes that a phase brings from host and back.
    """

    phases: Mapping[str, Components]
    resident: Components
    offloaded: Components
    moved: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBytes:
    """A generation engine on a slot: what it holds whatever it caches, a token's keys and values, and what it keeps asleep.

    `least_bytes` is the cache without which it cannot run; more than `most_bytes` it has no use for.
    """

    fixed: Components
    token_bytes: float
    resident: Components
    least_bytes: float
    most_bytes: float


class MemoryModel(Protocol):
    """How bytes are counted: on GPUs at scale, or as the ledgers of CPU slots count them."""

    @property
    def margin_share(self) -> float:
        """What is added to every peak."""
        ...

    @property
    def engine_share(self) -> float:
        """The share of a slot's memory that an engine and what it shares with may take."""
        ...

    @property
    def keeps(self) -> tuple[Keep, ...]:
        """The residencies that the runtime can carry out."""
        ...

    def stage(self, job: Job, name: str, choice: StageChoice) -> StageBytes:
        """The bytes of a stage that trains or infers."""
        ...

    def engine(self, job: Job, layout: Layout) -> EngineBytes:
        """The bytes of the actor's engine."""
        ...


def rank_tokens(job: Job, choice: StageChoice) -> int:
    """Tokens of a sample slot in the micro-batch that memory must hold: the fullest, or the longest sample alone."""
    return ceil(job.fullest_tokens(choice.micro_batch) / choice.micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """The memory model of GPUs: nereus.costs.footprint with residency."""

    margin_share: float = MARGIN
    engine_share: float = MEMORY_SHARE
    keeps: tuple[Keep, ...] = ("all", "weights", "nothing")

    def stage(self, job: Job, name: str, choice: StageChoice) -> StageBytes:
        """The bytes of a stage that trains or infers."""
        shape = job.model(name).shape
        sequences = max(1, ceil(job.samples / job.mini_batches))
        batch = BatchWork(
            sequences=sequences,
            tokens=rank_tokens(job, choice),
            micro_batch=choice.micro_batch,
            recompute=choice.recompute,
            sharding=choice.sharding,
        )
        if name.endswith("_train"):
            return _trained(shape, choice, batch, PHASES_OF[name])
        return _inferred(shape, choice, batch, PHASES_OF[name][0])

    def engine(self, job: Job, layout: Layout) -> EngineBytes:
        """The bytes of the actor's engine: asleep it drops weights and cache, for a weight sync follows."""
        shape, engine = job.actor.shape, Generator(tp=layout.tp)
        token = cache_bytes_per_token(shape, engine)
        return EngineBytes(
            fixed={"weights": weight_bytes_per_slot(shape, engine), "workspace": WORKSPACE_BYTES},
            token_bytes=token,
            resident={"asleep": ASLEEP_BYTES + (COMMUNICATOR_BYTES if layout.tp > 1 else 0)},
            least_bytes=token * job.longest_tokens,
            most_bytes=token * job.longest_tokens * ceil(job.samples / layout.dp),
        )


def _ranks(layout: Layout) -> list[int]:
    """Pipeline ranks that may have most: the ends, and of ranks with equally many layers the one nearest the start."""
    picked: dict[int, int] = {}
    for rank in range(1, layout.pp - 1):
        picked.setdefault(layout.pipeline[rank], rank)
    return sorted({0, layout.pp - 1, *picked.values()})


def _most(parts: list[dict[str, float]]) -> dict[str, float]:
    return max(parts, key=lambda part: sum(part.values()))


def _kept_names(choice: StageChoice) -> tuple[str, ...]:
    """The components of training state that stay on the slot between phases; fully sharded masters are the weights."""
    weights = ("weights", "masters") if choice.sharding == "full" else ("weights",)
    every = ("weights", "gradients", "masters", "moments")
    return {"all": every, "weights": weights, "nothing": ()}[choice.keep]


Parts = dict[str, float]


@lru_cache(maxsize=4096)
def _states(shape: Shape, layout: Layout, sharding: Sharding) -> tuple[Parts, ...]:
    """Training state of each rank of `_ranks`."""
    batch = BatchWork(sequences=1, tokens=1, sharding=sharding)
    return tuple(state_components(shape, layout, batch, rank) for rank in _ranks(layout))


@lru_cache(maxsize=4096)
def _working(shape: Shape, layout: Layout, batch: BatchWork) -> tuple[tuple[Parts, Parts], ...]:
    """(update, forward) bytes of each rank of `_ranks` beside its state."""
    found: list[tuple[Parts, Parts]] = []
    for rank in _ranks(layout):
        update = {**activation_components(shape, layout, batch, rank), **_ends(shape, layout, batch, rank)}
        found.append((update, _pass_bytes(shape, layout, batch, rank)))
    return tuple(found)


def _trained(shape: Shape, choice: StageChoice, batch: BatchWork, phases: tuple[str, ...]) -> StageBytes:
    """Between phases gradients are freed with the moments, never copied; weights on host stay valid after a forward."""
    kept = _kept_names(choice)
    weights = ("weights", "masters") if choice.sharding == "full" else ("weights",)
    states = _states(shape, choice.layout, choice.sharding)
    always = {"communicators": float(COMMUNICATOR_BYTES)}
    forward: list[Parts] = []
    update: list[Parts] = []
    for state, (updating, passing) in zip(states, _working(shape, choice.layout, batch), strict=True):
        update.append({**state, **updating, **always})
        forward.append({**{name: state[name] for name in (*kept, *weights)}, **passing, **always})
    resident = _most([{**{name: state[name] for name in kept}, **always} for state in states])
    away = [name for name in states[0] if name not in (*kept, "gradients")]
    offloaded = _most([{name: state[name] for name in away} for state in states])
    again = sum(offloaded.get(name, 0.0) for name in weights) if choice.keep == "nothing" else 0.0
    return StageBytes(
        phases=dict(zip(phases, (_most(forward), _most(update)), strict=True)),
        resident=resident,
        offloaded=offloaded,
        moved=dict(zip(phases, (again, 2 * sum(offloaded.values())), strict=True)),
    )


def _inferred(shape: Shape, choice: StageChoice, batch: BatchWork, phase: str) -> StageBytes:
    active, weights = _passing(shape, choice.layout, batch)
    stays = choice.keep != "nothing"
    return StageBytes(
        phases={phase: active},
        resident={"weights": weights if stays else 0.0, "communicators": float(COMMUNICATOR_BYTES)},
        offloaded={} if stays else {"weights": weights},
        moved={phase: 0.0 if stays else weights},
    )


@lru_cache(maxsize=4096)
def _passing(shape: Shape, layout: Layout, batch: BatchWork) -> tuple[Parts, float]:
    """(bytes in a pass without gradients, bytes of weights), each of the rank of `_ranks` that has most."""
    active: list[Parts] = []
    held: list[float] = []
    for rank in _ranks(layout):
        body, experts = owned_parameters(shape, layout, rank)
        if batch.sharding == "full":
            body, experts = body / layout.optimizer_ranks, experts / layout.expert_dp
        weights = 2 * (body + experts)
        working = _pass_bytes(shape, layout, batch, rank)
        active.append({"weights": weights, **working, "communicators": float(COMMUNICATOR_BYTES)})
        held.append(weights)
    return _most(active), max(held)


def _ends(shape: Shape, layout: Layout, batch: BatchWork, rank: int) -> dict[str, float]:
    """The gradient of an embedding whose rows are counted as positions (a model with a scalar head)."""
    if shape.vocab > 1 or rank or batch.sharding == "full":
        return {}
    return {"ends": 2 * shape.embedding_parameters_count / layout.tp}


def _pass_bytes(shape: Shape, layout: Layout, batch: BatchWork, rank: int) -> dict[str, float]:
    """A pass without gradients: one layer's work, logits on the last rank, what full sharding gathers."""
    plain, sparse = layer_counts(shape, layout, rank)
    rows = batch.micro_batch * batch.tokens / layout.cp
    work = {"working": layer_activation_bytes(shape, layout, batch, sparse=bool(sparse), kept="none")}
    if layout.tp > 1 and batch.sequence_parallel:
        work["working"] += 2 * 2 * rows * shape.hidden
    if rank == layout.pp - 1:
        work["logits"] = rows * VOCABULARY_PARALLEL_LOSS_BYTES * shape.vocab / layout.tp
    if batch.sharding == "full":
        body, experts = owned_parameters(shape, layout, rank)
        ends = (shape.embedding_parameters_count + shape.head_parameters_count) / layout.tp
        work["gathered"] = 2 * (2 * max(0.0, body + experts - ends) / max(1, plain + sparse) + ends)
    return work
