"""Process groups of one Megatron model: built, swapped in while it runs, destroyed.

Megatron keeps its groups in globals of `parallel_state`, and reads them in more places than its ProcessGroupCollection
covers (a model given only the collection is silently wrong: facts: engines, 7.1). So each model keeps its own copy of
the globals and they are exchanged around every use; it costs microseconds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from nereus.engines.world import ProcessWorld, destroy_groups
from nereus.layout import Layout

_LIST = "_global_process_group_list"


def _globals() -> dict[str, object]:
    return {
        key: value
        for key, value in vars(parallel_state).items()
        if (key.startswith("_") and key[1:2].isupper()) or key == _LIST
    }


_BLANK = {key: copy.copy(value) for key, value in _globals().items()}


def _put(values: dict[str, object]) -> None:
    parallel_state.__dict__.update({key: copy.copy(v) if isinstance(v, dict) else v for key, v in values.items()})


class ModelGroups:
    """The groups of one model on this slot. `inside` makes them, and the part's group as world, the current ones."""

    def __init__(self, world: ProcessWorld, part: ProcessGroup | None, layout: Layout) -> None:
        self._world, self._part = world, part
        with world.inside(part):
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
        """Destroys the groups; the model that used them must have been dropped."""
        RotaryEmbedding.forward.cache_clear()  # an lru_cache on a method: it holds modules and their groups
        groups = self._kept.get(_LIST) or ()
        destroy_groups(g for g in groups if g is not self._part)  # type: ignore[union-attr]
        self._kept = {}
