"""Process groups of one Megatron model: built, swapped in while it runs, destroyed.

Megatron keeps its groups in globals of `parallel_state`, and reads them in more places than its ProcessGroupCollection
covers (a model given only the collection is silently wrong: facts: engines, 7.1). So each model keeps its own copy of
the globals and they are exchanged around every use; it costs microseconds.

Megatron asks for about 20 groups a rank, many over the same ranks (no context or expert parallelism, single ranks, all
ranks). Here equal ranks are one group, and all ranks are the part's own. That is right because a slot has one thread,
which issues every operation of a group in the same order on all its members: gradients are not reduced beside the
backward pass, and of P2P with collectives on one group neither overtakes: gloo matches collectives by a counter of the
group and P2P by its tag, apart from each other, and NCCL runs them in the order of issue, pairs on their own communicator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from nereus.engines.world import ProcessWorld, destroy_groups
from nereus.layout import Layout


def _globals() -> dict[str, object]:
    return {k: value for k, value in vars(parallel_state).items() if k.startswith("_") and k[1:2].isupper()}


_BLANK = {key: copy.copy(value) for key, value in _globals().items()}


def _put(values: dict[str, object]) -> None:
    parallel_state.__dict__.update({key: copy.copy(v) if isinstance(v, dict) else v for key, v in values.items()})


class _Shared:
    """Megatron's `create_group` of one model: a group for each set of ranks, `part` for all of them.

    All ranks of the part call it with the same ranks in the same order, so that each knows of the sets it is not in.
    """

    def __init__(self, part: ProcessGroup | None, timeout_seconds: float) -> None:
        self.made: dict[tuple[int, ...], object] = {}
        self._timeout = timedelta(seconds=timeout_seconds)
        self._part, self._all = part, tuple(range(dist.get_world_size()))

    def __call__(self, ranks: Sequence[int], **options: object) -> object:
        """The group of `ranks` (of the part), c10d's mark for a stranger where this rank is not among them.

        `options` are those of the first request for them; Megatron's differ in their descriptions alone. The limit of
        a collective is the world's, not Megatron's half an hour.
        """
        key = tuple(sorted(ranks))
        if key == self._all:
            return self._part
        if key not in self.made:
            self.made[key] = dist.new_group(list(key), **{**options, "timeout": self._timeout})  # pyright: ignore[reportArgumentType]
        return self.made[key]


@contextmanager
def _creating(create: Callable[..., object]) -> Iterator[None]:
    """While inside, Megatron makes its groups by `create`."""
    before = parallel_state.create_group
    parallel_state.create_group = create  # type: ignore[assignment]
    try:
        yield
    finally:
        parallel_state.create_group = before  # type: ignore[assignment]


class ModelGroups:
    """The groups of one model on this slot. `inside` makes them, and the part's group as world, the current ones."""

    def __init__(self, world: ProcessWorld, part: ProcessGroup | None, layout: Layout) -> None:
        self._world, self._part = world, part
        with world.inside(part), _creating(shared := _Shared(part, world.timeout_seconds)):
            _put(_BLANK)
            try:
                parallel_state.initialize_model_parallel(
                    tensor_model_parallel_size=layout.tp,
                    pipeline_model_parallel_size=layout.pp,
                    context_parallel_size=layout.cp,
                    expert_model_parallel_size=layout.ep,
                    expert_tensor_parallel_size=layout.expert_tp,
                    order=layout.order,
                    create_gloo_process_groups=False,
                )
                # a counter-based seed is set before every use (`seed`); here the tracker only has to exist
                model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
                self._kept = _globals()
                self._made = tuple(shared.made.values())
            finally:
                _put(_BLANK)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While inside, Megatron sees this model's groups."""
        before = _globals()
        with self._world.inside(self._part):
            parallel_state.__dict__.update(self._kept)
            try:
                yield
            finally:
                self._kept = _globals()
                parallel_state.__dict__.update(before)

    def tensor_group(self) -> ProcessGroup:
        """The TP group that this slot is in."""
        return self._kept["_TENSOR_MODEL_PARALLEL_GROUP"]  # type: ignore[return-value]

    def close(self) -> None:
        """Destroys the groups, once, but not the part's; the model that used them must have been dropped."""
        RotaryEmbedding.forward.cache_clear()  # an lru_cache on a method: it holds modules and their groups
        destroy_groups(self._made)
        self._made, self._kept = (), {}
