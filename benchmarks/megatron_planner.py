"""Megatron-core's own reshard planner (megatron.core.resharding, 0.16) in this process, without process groups.

Its rank 0 plans for all from metadata that it gathers. Here the gathering hands over metadata made from Nereus's
description of Megatron's parameters, and the sending of the plans does nothing: what is timed is planning alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from megatron.core.resharding import planner
from megatron.core.resharding.utils import ParameterMetadata, assign_resolved_name_inplace

from nereus.layout import Layout
from nereus.model import ModelSpec
from nereus.storage import megatron_params

_CUT = {"word_embeddings": 0, "output_layer": 0, "linear_qkv": 0, "linear_fc1": 0, "linear_proj": 1, "linear_fc2": 1}
Roster = list[list[ParameterMetadata]]


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """What the peer planned: operations, bytes between ranks, and those of the busiest sender."""

    moved_bytes: int
    busiest_bytes: int


def roster(spec: ModelSpec, layout: Layout) -> Roster:
    """The metadata of every rank's weights, as `extract_param_metadata` makes it from modules and groups."""
    at = [layout.coordinates(rank) for rank in range(layout.ranks)]
    groups: dict[str, dict[tuple[int, ...], list[int]]] = {name: defaultdict(list) for name in ("tp", "dp", "pp")}
    for rank, c in enumerate(at):
        groups["tp"][c.pp, c.dp].append(rank)
        groups["dp"][c.pp, c.tp].append(rank)
        groups["pp"][c.tp, c.dp].append(rank)
    found: Roster = []
    for rank, c in enumerate(at):
        first = layout.layers(c.pp).start
        layers = {f"decoder.layers.{i}": f"decoder.layers.{first + i}" for i in range(layout.pipeline[c.pp])}
        rows: list[ParameterMetadata] = []
        for param in megatron_params(spec, layout, c):
            module = param.name.split(".")[-2]
            cut = _CUT.get(module)
            meta = ParameterMetadata(
                name=param.name,
                shape=param.shape,
                dtype=torch.bfloat16 if param.dtype == "bfloat16" else torch.float32,
                element_size=2 if param.dtype == "bfloat16" else 4,
                is_tp=cut is not None,
                partition_dim=cut or 0,
                partition_stride=2 if module == "linear_fc1" else 1,
                owner_rank=rank,
                tensor_parallel_group_ranks=groups["tp"][c.pp, c.dp] if cut is not None else None,
                data_parallel_group_ranks=groups["dp"][c.pp, c.tp],
                pipeline_parallel_group_ranks=groups["pp"][c.tp, c.dp],
            )
            assign_resolved_name_inplace(meta, layer_module_prefix_map=layers)
            rows.append(meta)
        found.append(rows)
    return found


@contextmanager
def _alone(source: Roster, target: Roster, keep: Callable[[list], None]) -> Iterator[None]:
    """The planner's view of torch.distributed: rank 0 of a world whose metadata is `source`, then `target`."""
    world = max(len(source), len(target))
    waiting = [[*side, *([] for _ in range(world - len(side)))] for side in (source, target)]

    def gather(into: list, _: object) -> None:
        into[:] = waiting.pop(0)

    def broadcast(plans: list, src: int) -> None:
        assert src == 0
        keep(plans)

    known = planner.dist, planner.torch
    planner.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: world, all_gather_object=gather)
    planner.torch = SimpleNamespace(distributed=SimpleNamespace(broadcast_object_list=broadcast), nn=torch.nn)
    try:
        yield
    finally:
        planner.dist, planner.torch = known


class _Bare(torch.nn.Module):
    """A module without parameters: all of them are in the rosters. Its groups are asked for and not used."""

    pg_collection = SimpleNamespace()


def planned(source: Roster, target: Roster) -> list:
    """The peer's plans, one for each rank."""
    plans: list = []
    module = _Bare()
    with _alone(source, target, plans.extend):
        planner.build_centralized_reshard_plan(module, module)
    return plans


def summary(plans: list, source: Roster, target: Roster) -> PeerPlan:
    """Bytes of the peer's plans."""
    shapes = [{meta.name: meta for meta in rows} for rows in target]
    sent = [0] * max(len(source), len(target))
    for rank, plan in enumerate(plans):
        for op in plan.recv_ops:
            if op.peer_rank != rank:
                meta = shapes[rank][op.param_name]
                extents = [len(range(*cut.indices(size))) for cut, size in zip(op.my_slice, meta.shape, strict=True)]
                elements = 1
                for extent in extents:
                    elements *= extent
                sent[op.peer_rank] += elements * meta.element_size
    return PeerPlan(moved_bytes=sum(sent), busiest_bytes=max(sent))
