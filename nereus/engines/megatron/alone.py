"""Building Megatron's objects on one slot without waiting for its peers.

Slots build the engines of several models in the order that each one's memory allows, which is not one order for all: who
waited for a peer inside a constructor could wait for ever. Megatron's constructors wait in two places. First and last
pipeline rank add up tied embeddings to begin alike (`LanguageModule.setup_embeddings_and_output_layer`): here state comes
from the mover. All ranks tell each other what kinds of parameters they have, so that all make the same optimizers
(`megatron.core.optimizer._get_param_groups`): here that is known, because every pipeline rank has a layer, every layer
has matrices and norms, and only experts over several ranks may be on some alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

EXPERTS = (None, True)
"""Megatron's name for the matrices of experts that are spread over ranks: no override of a setting, expert-parallel."""


@contextmanager
def alone(*, experts: bool) -> Iterator[None]:
    """While inside, tied embeddings are not added up, and peers are taken to have this rank's kinds, and experts if told.

    One thread of a slot uses torch.distributed, so nobody else sees it.
    """

    def add_nothing(tensor: object, *_: object, **__: object) -> None:
        del tensor

    def told(found: list[Any], kinds: list[Any], *_: object, **__: object) -> None:
        found[:] = [[*kinds, *([EXPERTS] if experts and EXPERTS not in kinds else [])]] * len(found)

    before = dist.all_reduce, dist.all_gather_object
    dist.all_reduce, dist.all_gather_object = add_nothing, told  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_reduce, dist.all_gather_object = before
