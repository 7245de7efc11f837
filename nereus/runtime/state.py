"""Detached state on a slot: plain tensors by shard, grouped under labels; their creation from a seed and digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nereus.model import ModelSpec, seed_of
from nereus.runtime.digest import box_digest
from nereus.storage import Shard

Store = dict[Shard, Tensor]


def device() -> torch.device:
    """Where this slot keeps its state."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def empty(shards: Iterable[Shard]) -> Store:
    """Unfilled tensors for these shards."""
    return {s: torch.empty(s.box.shape, dtype=getattr(torch, s.dtype), device=device()) for s in shards}


def size_bytes(store: Mapping[Shard, Tensor]) -> int:
    """Bytes that a store holds."""
    return sum(t.numel() * t.element_size() for t in store.values())


def initial(spec: ModelSpec, shards: Iterable[Shard], seed: int) -> Store:
    """The state a model starts with: a function of (seed, tensor) alone, so every layout starts the same.

    Norms are 1, biases and value heads 0, matrices normal with `init_std`, scaled by 1/sqrt(2 layers) where they write to the
    residual stream (GPT-2, Radford et al. 2019, section 2.3); moments are 0; masters are the float32 of the weights.
    """
    store: Store = {}
    made: dict[str, Tensor] = {}
    for shard in sorted(shards):
        target = torch.zeros(shard.box.shape, dtype=getattr(torch, shard.dtype), device=device())
        if shard.component in ("weight", "master"):
            if shard.tensor not in made:
                made.clear()
                made[shard.tensor] = _initial_tensor(spec, shard.tensor, seed)
            value = made[shard.tensor]
            if spec.tensor(shard.tensor).dtype == "bfloat16":
                value = value.bfloat16()  # a fresh master is exactly its weight
            target.copy_(value[shard.box.slices((0,) * len(shard.box.start))])
        store[shard] = target
    return store


def _initial_tensor(spec: ModelSpec, name: str, seed: int) -> Tensor:
    shape = spec.tensor(name).shape
    if name.startswith("value_head") or name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    deviation = spec.config.init_std
    if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
        deviation /= (2 * spec.config.layers) ** 0.5
    generator = torch.Generator().manual_seed(seed_of(seed, "init", name))
    return torch.randn(shape, generator=generator) * deviation


def digests(store: Mapping[Shard, Tensor]) -> dict[Shard, int]:
    """The digest of every shard in the store."""
    return {shard: box_digest(data, shard.box) for shard, data in store.items()}
