"""What Megatron-core 0.16 needs to run without CUDA; `apply` does nothing where CUDA is.

Each shim was shown necessary by leaving it out (facts: engines, 2). They are applied once per process and checked.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange")
_MODULES = (
    "pipeline_parallel.schedules",
    "transformer.utils",
    "optimizer.optimizer",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "tensor_parallel.data",
    "utils",
)
_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
}


class _TorchOnCpu(ModuleType):
    """`torch` as a Megatron module sees it: factories asked for "cuda" give CPU tensors."""

    def __getattr__(self, name: str) -> object:
        value = getattr(torch, name)
        if name not in _FACTORIES:
            return value

        def factory(*args: object, **kwargs: object) -> object:
            if kwargs.get("device") == "cuda":
                kwargs["device"] = _CPU
            return value(*args, **kwargs)

        return factory


def _type_as_if_on_gpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _TENSOR_TYPE(self, *args, **kwargs)
    return _TYPE_NAMES.get(found, found) if isinstance(found, str) else found


def _counts_as_numpy(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
    """MoEAlltoAllTokenDispatcher's move of its counts from GPU to CPU, without streams: only their type changes."""
    if point == self.cuda_dtoh_point and not self.drop_and_pad:
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            counts = getattr(self, name)
            if isinstance(counts, torch.Tensor):
                setattr(self, name, counts.numpy())
    return tokens_per_expert


_TENSOR_TYPE = torch.Tensor.type


def apply() -> None:
    """Applies the shims; RuntimeError when a self-check fails (a new Megatron moved something)."""
    if torch.cuda.is_available() or torch.Tensor.type is _type_as_if_on_gpu:
        return
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    torch.Tensor.type = _type_as_if_on_gpu  # type: ignore[method-assign,assignment]
    routers = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(routers, "te_general_gemm"):  # its import fails without Transformer Engine, its use asks for None
        routers.te_general_gemm = None  # type: ignore[attr-defined]
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher").MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = _CPU  # anything but None, which would make a stream
    dispatcher._maybe_dtoh_and_synchronize = _counts_as_numpy
    proxy = _TorchOnCpu("torch")
    for name in _MODULES:
        module = importlib.import_module(f"megatron.core.{name}")
        if not hasattr(module, "torch"):
            raise RuntimeError(f"megatron.core.{name} no longer uses the name torch: check {__name__}")
        module.torch = proxy  # type: ignore[attr-defined]
    mask = importlib.import_module("megatron.core.transformer.utils").get_default_causal_mask(2)
    if mask.device.type != "cpu" or torch.zeros(1).type() != "torch.cuda.FloatTensor":
        raise RuntimeError(f"the CPU shims do not hold: check {__name__}")
