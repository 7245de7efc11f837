"""What a foreign folder offers, whatever its format: named tensors that can be read box by box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nereus.boxes import Box
from nereus.errors import NereusError
from nereus.model import Tensor as ModelTensor
from nereus.storage import MOMENTS, state_dtype


class UnreadableFolder(NereusError):
    """A foreign folder cannot be taken: names the file or tensor, what was found and what would be right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A tensor as a folder's headers describe it: its shape, and its type by torch's name, e.g. "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str


class ModelState(Protocol):
    """The state of one model in canonical names, wherever it lies."""

    optimizer_steps: int
    """How many optimizer steps the moments have seen."""

    def has(self, component: str, tensor: str) -> bool:
        """Whether a tensor's weight, master, exp_avg or exp_avg_sq is there."""
        ...

    def read(self, component: str, tensor: str, box: Box) -> Tensor:
        """The elements of `box`, in the type they are stored in."""
        ...


def kept(state: ModelState, tensor: ModelTensor, component: str, box: Box) -> Tensor:
    """The elements of `box` as Nereus keeps them, from whatever of them `state` has.

    A float32 weight comes from its master where there is one (its weight may be rounded), and is its own master; any
    other master that is not there comes from its weight. Moments that are not there are 0.
    """
    dtype = getattr(torch, state_dtype(component, tensor.dtype))
    origin = component
    if component in ("weight", "master"):
        exact = component == "master" or tensor.dtype == "float32"
        origin = "master" if exact and state.has("master", tensor.name) else "weight"
    elif not state.has(component, tensor.name):
        return torch.zeros(box.shape, dtype=dtype)
    return state.read(origin, tensor.name, box).to(dtype)


def kept_components(state: ModelState, tensor: ModelTensor) -> tuple[str, ...]:
    """What a checkpoint of `state` holds of a tensor; a float32 weight is its own master."""
    mine = ("weight", *MOMENTS) if tensor.dtype == "float32" else ("weight", "master", *MOMENTS)
    return tuple(component for component in mine if state.has(component, tensor.name))
