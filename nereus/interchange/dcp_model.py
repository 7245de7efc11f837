"""A torch DCP folder in Hugging Face's names as the state of a model: what torch saves of a model and its optimizer."""

from __future__ import annotations

from math import isfinite, nan, prod
from pathlib import Path

from torch import Tensor

from nereus.boxes import Box, whole
from nereus.interchange.dcp import DcpFolder
from nereus.interchange.huggingface import wrong_tensors
from nereus.interchange.source import UnreadableFolder
from nereus.model import EMBEDDING, ModelSpec
from nereus.storage import MOMENTS

OPTIMIZERS = ("optim.state.", "optimizer.state.", "optimizer.optim.state.")


class DcpModel:
    """Weights under any one prefix, optimizer state as PREFIX.NAME.exp_avg. UnreadableFolder when tensors are missing."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path, self.spec = path, spec
        self.folder = DcpFolder(path)
        found = self.folder.tensors()
        ends = sorted((k for k in found if k.endswith(EMBEDDING)), key=len)
        if not ends:
            shown = ", ".join(sorted(found)[:3]) or "nothing"
            raise UnreadableFolder(f"{path}: no key ends in {EMBEDDING}: expected Hugging Face's names, found {shown}")
        self._prefix = ends[0].removesuffix(EMBEDDING)
        weights = {k.removeprefix(self._prefix): f for k, f in found.items() if k.startswith(self._prefix)}
        mine = {k: f for k, f in weights.items() if not k.startswith(OPTIMIZERS)}
        wrong = wrong_tensors(mine, spec)
        if wrong:
            raise UnreadableFolder(f"{path}: does not hold {spec.name}: {wrong}")
        self._optimizer = next((p for p in OPTIMIZERS if self._moments(p)), "")
        self.optimizer_steps = self._steps() if self._optimizer else 0

    def _key(self, prefix: str, component: str, tensor: str) -> str | None:
        """The key of a component under an optimizer's prefix: with the model's prefix inside, or without."""
        inner = self._prefix.removeprefix("model.") if self._prefix.startswith("model.") else self._prefix
        keys = (f"{prefix}{self._prefix}{tensor}.{component}", f"{prefix}{inner}{tensor}.{component}")
        return next((key for key in keys if key in self.folder.tensors()), None)

    def _moments(self, prefix: str) -> bool:
        return all(self._key(prefix, component, t.name) for component in MOMENTS for t in self.spec.tensors)

    def _steps(self) -> int:
        keys = (self._key(self._optimizer, "step", t.name) for t in self.spec.tensors)
        steps: set[int] = set()
        for key in keys:
            if key is None:
                raise UnreadableFolder(f"{self.path}: moments without a step: expected {self._optimizer}NAME.step")
            shape = self.folder.tensors()[key].shape
            step = self.folder.read(key, whole(shape)).item() if prod(shape) == 1 else nan
            if not isfinite(step):
                raise UnreadableFolder(f"{self.path}: {key} of shape {shape}, expected a whole number")
            steps.add(int(step))
        return max(steps)

    def has(self, component: str, tensor: str) -> bool:
        """Whether the folder holds that component of a tensor."""
        if component == "weight":
            return tensor in self.spec.by_name
        return bool(self._optimizer) and self._key(self._optimizer, component, tensor) is not None

    def read(self, component: str, tensor: str, box: Box) -> Tensor:
        """The elements of `box` of a tensor's component, in the type of the folder."""
        key = self._prefix + tensor if component == "weight" else self._key(self._optimizer, component, tensor)
        if key is None:
            raise UnreadableFolder(f"{self.path}: has no {component} of {tensor}")
        return self.folder.read(key, box)
