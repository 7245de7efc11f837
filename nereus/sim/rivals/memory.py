"""Whether a Setup fits: bytes of a slot by phase from `nereus.costs.footprint`, the closed forms that judge Nereus' plans too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import ceil

from nereus.costs.footprint import (
    COMMUNICATOR_BYTES,
    MARGIN,
    activation_components,
    layer_activation_bytes,
    owned_parameters,
    state_components,
)
from nereus.costs.generation import WORKSPACE_BYTES, Generator, cache_bytes_per_token, weight_bytes_per_slot
from nereus.costs.host import HOST_BYTES_PER_SLOT
from nereus.costs.shape import Shape
from nereus.costs.training import BatchWork
from nereus.fleet import Fleet
from nereus.layout import Layout, equal_shares
from nereus.planning.bytes import ASLEEP_BYTES
from nereus.sim.rivals.setups import Cut, Engines, RlJob, Setup

Parts = Mapping[str, float]
INFER_LOGIT_BYTES = 6


def misfit(job: RlJob, setup: Setup, fleet: Fleet) -> str | None:
    """Why the setup does not run on the fleet's smallest slot: what is short in which phase; None where it fits."""
    room = min(fleet.device_of[slot].memory_bytes for slot in fleet.slots)
    for phase, parts in phases(job, setup, room):
        total = sum(parts.values()) * (1 + MARGIN)
        if total > room:
            largest = max(parts, key=lambda name: parts[name])
            return (
                f"{phase} needs {total / 1e9:.1f} GB of {room / 1e9:.1f}, {largest} most ({parts[largest] / 1e9:.1f})"
            )
    cached = cache_tokens(job, setup.engines, room)
    if cached < job.longest_tokens:
        return f"the engine's cache holds {max(cached, 0):,.0f} tokens, the longest sample has {job.longest_tokens:,}"
    host = sum(_offloaded(shape, cut) for shape, cut in _models(job, setup))
    if host > HOST_BYTES_PER_SLOT:
        return f"host memory: {host / 1e9:.1f} GB of a slot's {HOST_BYTES_PER_SLOT / 1e9:.1f}"
    return None


def phases(job: RlJob, setup: Setup, room: float) -> Iterator[tuple[str, dict[str, float]]]:
    """(phase, bytes by part) of a slot: generation and each model's training beside what the others leave."""
    resident = {name: _resident(shape, cut) for name, shape, cut in _named(job, setup)}
    engine = setup.engines
    if setup.colocated:
        asleep = ASLEEP_BYTES + (COMMUNICATOR_BYTES if engine.tp > 1 else 0)
        held = asleep if engine.sleeps else engine.memory_share * room
        share = (
            engine.cache_bytes + _engine_fixed(job.actor, engine) if engine.cache_bytes else engine.memory_share * room
        )
        yield "generation", {**resident, "engine": share}
    else:
        held = 0.0
    for name, shape, cut in _named(job, setup):
        beside = {
            other: resident[other]
            for other, _, their in _named(job, setup)
            if other != name and set(their.slots) & set(cut.slots)
        }
        if setup.colocated and set(cut.slots) & set(engine.slots):
            beside["engine asleep"] = held
        active = _training(job, shape, cut) if name != "reference" else _inference(job, shape, cut)
        yield name, {**active, **beside}


def cache_tokens(job: RlJob, engine: Engines, room: float) -> float:
    """Tokens that an engine's cache holds."""
    generator = Generator(tp=engine.tp)
    free = engine.cache_bytes or engine.memory_share * room - _engine_fixed(job.actor, engine)
    return free / cache_bytes_per_token(job.actor, generator)


def _engine_fixed(shape: Shape, engine: Engines) -> float:
    return weight_bytes_per_slot(shape, Generator(tp=engine.tp)) + WORKSPACE_BYTES


def _named(job: RlJob, setup: Setup) -> list[tuple[str, Shape, Cut]]:
    found = [("actor", job.actor, setup.actor)]
    if setup.critic is not None and job.critic is not None:
        found.append(("critic", job.critic, setup.critic))
    if setup.reference is not None and job.reference is not None:
        found.append(("reference", job.reference, setup.reference))
    return found


def _models(job: RlJob, setup: Setup) -> list[tuple[Shape, Cut]]:
    return [(shape, cut) for _, shape, cut in _named(job, setup)]


def _layout(shape: Shape, cut: Cut) -> Layout:
    return Layout(
        tp=cut.tp, pp=cut.pp, dp=cut.dp, cp=cut.cp, ep=cut.ep, etp=1 if cut.ep > 1 else None,
        pipeline=cut.pipeline or equal_shares(shape.layers, cut.pp),
    )  # fmt: skip


def _batch(job: RlJob, cut: Cut, tokens: int) -> BatchWork:
    return BatchWork(
        sequences=max(1, job.samples // job.mini_batches),
        tokens=tokens,
        recompute="full" if cut.recompute else "none",
        sharding="full" if cut.sharding == "full" else "optimizer",
    )


def _packed(job: RlJob, samples: int, tokens: int) -> int:
    """Tokens of the largest micro-batch: its budget, or its samples as long as they may be (half as long: packed ones)."""
    return max(tokens, job.longest_tokens) if tokens else samples * job.longest_tokens


@lru_cache(maxsize=8192)
def _state(shape: Shape, cut: Cut) -> dict[str, float]:
    """The fullest rank's weights, gradients, masters and moments on the slot."""
    layout = _layout(shape, cut)
    kept: dict[str, float] = {}
    for rank in {0, layout.pp - 1}:
        found = state_components(
            shape,
            layout,
            BatchWork(sequences=1, tokens=1, sharding="full" if cut.sharding == "full" else "optimizer"),
            rank,
        )
        if sum(found.values()) > sum(kept.values()):
            kept = found
    if cut.sharding == "gradients":  # ZeRO-2: whole weights, gradients in parts
        kept["gradients"] = 2.0 * shape.parameters_count / layout.optimizer_ranks
    if cut.host_adam:
        kept["masters"] = kept["moments"] = 0.0
        if cut.sharding == "full":
            kept["weights"] = 2.0 * shape.parameters_count / layout.optimizer_ranks
            kept["gradients"] /= 2
    return kept


@lru_cache(maxsize=8192)
def _resident(shape: Shape, cut: Cut) -> float:
    """What a model leaves on its slots between its phases; gradients are freed."""
    state = _state(shape, cut)
    if cut.on_host or cut.offload == "all":
        return float(COMMUNICATOR_BYTES)
    weights = state["weights"] + (state["masters"] if cut.sharding == "full" and not cut.host_adam else 0.0)
    if cut.sharding == "full" and cut.offload == "optimizer":
        weights = 2.0 * shape.parameters_count / _layout(shape, cut).optimizer_ranks
    if cut.packing.samples == 0 and not cut.packing.tokens:  # a reference: weights alone
        return weights + COMMUNICATOR_BYTES
    kept = (
        0.0 if cut.offload == "optimizer" else state["moments"] + (state["masters"] if cut.sharding != "full" else 0.0)
    )
    return weights + kept + COMMUNICATOR_BYTES


def _offloaded(shape: Shape, cut: Cut) -> float:
    """A slot's share of what its host's memory keeps."""
    layout = _layout(shape, cut)
    owned = shape.parameters_count / (layout.tp * layout.pp) / layout.optimizer_ranks
    if cut.on_host:
        return 2.0 * owned
    state = 12.0 * owned if cut.offload != "nothing" or cut.host_adam else 0.0
    return state + (2.0 * owned if cut.offload == "all" else 0.0)


@lru_cache(maxsize=8192)
def _training(job: RlJob, shape: Shape, cut: Cut) -> dict[str, float]:
    layout = _layout(shape, cut)
    tokens = _packed(job, cut.packing.samples, cut.packing.tokens)
    batch = _batch(job, cut, tokens)
    worst: dict[str, float] = {}
    for rank in {0, layout.pp - 1}:
        found = activation_components(shape, layout, batch, rank)
        if shape.vocab <= 1 and cut.sharding == "optimizer" and rank == 0:
            found["ends"] = 2.0 * shape.embedding_parameters_count / layout.tp
        if sum(found.values()) > sum(worst.values()):
            worst = found
    return {**_state(shape, cut), **worst, "communicators": float(COMMUNICATOR_BYTES)}


@lru_cache(maxsize=8192)
def _inference(job: RlJob, shape: Shape, cut: Cut) -> dict[str, float]:
    layout = _layout(shape, cut)
    tokens = ceil(_packed(job, cut.packing.forward_samples, cut.packing.forward_tokens) / layout.cp)
    batch = _batch(job, cut, tokens)
    held = max(sum(owned_parameters(shape, layout, rank)) for rank in {0, layout.pp - 1})
    gathered = 0.0
    if cut.sharding == "full":
        ends = shape.embedding_parameters_count + shape.head_parameters_count
        gathered = 2.0 * (2 * (held - ends) / shape.layers + ends)
        held = 0.0 if cut.on_host else held / layout.optimizer_ranks
    return {
        "weights": 2.0 * held,
        "gathered": gathered,
        "working": layer_activation_bytes(shape, layout, batch, sparse=bool(shape.expert_count), kept="none"),
        "logits": float(tokens * INFER_LOGIT_BYTES * shape.vocab / layout.tp),
        "communicators": float(COMMUNICATOR_BYTES),
    }
