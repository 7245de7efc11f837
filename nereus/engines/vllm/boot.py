"""What a process needs before it can start and stop vLLM engines quickly: its environment, and `boot` once.

Nothing here imports vLLM at module level, so the driver can read ENVIRONMENT. Sources: facts/engines.md 3, 7.4.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

ENVIRONMENT: dict[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_PLUGINS": "",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines live inside the slots
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads stay the trainer's; the default binding dies on NUMA at TP 2
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # else each start warns of its NUMA binding
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""Set these in the driver before `ray.init` (workers inherit them) or in any process before it imports vLLM."""


@cache
def boot() -> None:
    """Prepares this process for engines; call it once, after all imports of the process (later calls do nothing).

    Imports vLLM where that has not happened. RuntimeError when vLLM was imported without ENVIRONMENT. Freezes the
    garbage collector's view of all that is imported and takes `gc.freeze` and `gc.unfreeze` away from the process:
    vLLM calls both, and each would do harm (7.4.1: slow collections ever after; models that never die).
    """
    wrong = {key: value for key, value in ENVIRONMENT.items() if os.environ.get(key) != value}
    if wrong and "vllm" in sys.modules:
        raise RuntimeError(f"vLLM was imported before its environment was set; set first: {wrong}")
    os.environ.update(ENVIRONMENT)
    silence = logging.getLogger("vllm")
    silence.addHandler(logging.NullHandler())
    silence.setLevel(logging.CRITICAL)
    _know_models()
    _register_kernels_once()
    _leave_the_world_standing()
    _no_message_queue()
    _share_memory_once_per_engine()
    _pack_experts_at_every_load()
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = _nothing


def _nothing() -> None:
    """Stands in for what must not happen again."""


def _know_models() -> None:
    """Gives vLLM the model classes themselves: by name each would be inspected in a sub-process (43 s, 7.4.2)."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.mixtral import MixtralForCausalLM
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    for model in (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM):
        ModelRegistry.register_model(model.__name__, model)


def _register_kernels_once() -> None:
    """Does the platform's scan of all modules for Triton overrides here instead of at every start (1.5 s, 7.4.3).

    On the CPU the worker's module is imported first: it replaces parts of torch.cuda and torch.accelerator, and that
    must not happen in the middle of a run.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # noqa: F401
    platform = type(current_platform)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the scan touches all that is deprecated
        platform.register_triton_kernel_overrides()
    setattr(platform, "register_triton_kernel_overrides", staticmethod(_nothing))  # noqa: B010


def _leave_the_world_standing() -> None:
    """Makes vLLM's shutdown destroy its own groups only; as shipped it destroys the process's default group.

    Also resets what it forgets (7.5): `_NODE_COUNT` and `_INNER_DP_WORLD`.
    """
    from vllm.distributed import parallel_state

    def destroy_own_groups() -> None:
        for coordinator in (parallel_state._WORLD, parallel_state._INNER_DP_WORLD):
            if coordinator is not None:
                coordinator.destroy()
        parallel_state._WORLD = parallel_state._INNER_DP_WORLD = None
        parallel_state._NODE_COUNT = None

    parallel_state.destroy_distributed_environment = destroy_own_groups


def _no_message_queue() -> None:
    """Leaves out the TP group's message queue, which only multi-process executors use: 24 MB of /dev/shm a start.

    A killed process would leave its file behind.
    """
    from vllm.distributed import parallel_state

    build = parallel_state.init_model_parallel_group

    def build_without_queue(*arguments: Any, **options: Any) -> parallel_state.GroupCoordinator:
        return build(*arguments, **{**options, "use_message_queue_broadcaster": False})

    parallel_state.init_model_parallel_group = build_without_queue


def _share_memory_once_per_engine() -> None:
    """Gives each run of slots of a world one shared memory for its TP sums, for the life of the process.

    As shipped (cpu_communicator.py) the memory of an external launcher's group is called "//-tp:N-[0-1]-cpushm", and
    ranks count within the part that the engine takes for the world: engines of two parts, or of two jobs on one
    host, would share it and mix their sums. So the world's port and the engine's slots are the name (`ENGINE_KEY`).
    And vLLM never gives the memory back (12 MB resident and 8 MB of /dev/shm for each start at TP 2, seen), so later
    engines of the same slots use it again: their ranks have done the same collectives, or the world is lost. The
    files are unlinked once all have opened them, so that nothing is left over however the process ends.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed

    def name(communicator: CpuCommunicator) -> str:
        kind = communicator.unique_name.partition(":")[0]
        return f"nereus-{os.environ['MASTER_PORT']}-{os.environ[ENGINE_KEY]}-{kind}"

    open_memory, handles = _CPUSHMDistributed._init_cpu_shm, dict[str, int]()

    def open_once(self: _CPUSHMDistributed) -> int:
        if self.group_name not in handles:
            handles[self.group_name] = open_memory(self)
            Path("/dev/shm", f"{self.group_name}_{self.communicator.rank_in_group}").unlink(missing_ok=True)  # noqa: S108
        return handles[self.group_name]

    _CPUSHMDistributed.make_group_name = staticmethod(name)
    _CPUSHMDistributed._init_cpu_shm = open_once


def _pack_experts_at_every_load() -> None:
    """Makes experts' weights follow each load on the CPU.

    As shipped (unquantized_fused_moe_method.py, 0.32) their CPU packing is part of the first load only: later loads put
    unpacked weights in its place, silently where the sizes need no padding.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    set_up = Method._setup_kernel

    def set_up_packed(self: Method, layer: Any, w13: Any, w2: Any) -> None:
        loaded_again = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if loaded_again and self.moe_kernel is not None:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    Method._setup_kernel = set_up_packed


ENGINE_KEY = "NEREUS_ENGINE_SLOTS"
"""The environment variable that carries an engine's slots to the names of its shared memory while it starts."""
