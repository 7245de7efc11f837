"""A Megatron torch_dist folder as the state of a model: weights, and masters and moments where all of them are there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from nereus.boxes import Box
from nereus.interchange.archive import Archive, SavedTensor
from nereus.interchange.dcp import DcpFolder
from nereus.interchange.megatron_names import Names, state_keys, style_of
from nereus.interchange.source import Found, UnreadableFolder
from nereus.interchange.unpickle import Record
from nereus.model import ModelSpec
from nereus.storage import MOMENTS

COMMON, CONFIG = "common.pt", "metadata.json"
SHARDED_MOMENTS = re.compile(r"optimizer\.(distributed\.dp_group_idx|state\.(bucket|gbuf))")


def is_torch_dist(path: Path) -> bool:
    """Whether the folder says that megatron-core wrote it in the torch_dist format."""
    try:
        said = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and said.get("sharded_backend") == "torch_dist"


def common_of(path: Path) -> Any:
    """What common.pt holds, listed classes as Records; {} without the file. Raises RefusedPickle."""
    file = path / COMMON
    return Archive(file).content if file.is_file() else {}


class MegatronFolder:
    """See the module; raises UnreadableFolder that lists what is missing or has another shape."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path, self.spec = path, spec
        self.folder = DcpFolder(path)
        found = self.folder.tensors()
        self.names = Names(spec, style_of(found, str(path)))
        wrong = list(self.names.missing(found))
        if wrong:
            raise UnreadableFolder(f"{path}: does not hold {spec.name}: {'; '.join(wrong[:4])}{_more(wrong)}")
        self._check_extra(found)
        self._state_keys = state_keys(found)
        present = [c for c in ("master", *MOMENTS) if all(self._key(key, c) for key in self.names.shapes)]
        complete = set(MOMENTS) <= set(present)
        self.components: tuple[str, ...] = ("weight", *(present if complete else ()))
        self.optimizer_steps = 0
        if complete:
            self.optimizer_steps = optimizer_steps(path, common_of(path))

    def _check_extra(self, found: Mapping[str, Found]) -> None:
        prefix = self.names.style.prefix
        extra = [
            k
            for k in found
            if k.startswith(prefix)
            and "optimizer." not in k
            and k not in self.names.shapes
            and k.removeprefix(prefix).startswith(("decoder.", "embedding.", "output_layer."))
        ]
        if extra:
            raise UnreadableFolder(
                f"{self.path}: holds {extra[0]}, which {self.spec.name} as configured has not{_more(extra)}"
            )

    def _key(self, key: str, component: str) -> str:
        """The key of a component, "" where the folder has none."""
        if component == "weight":
            return key
        bare = key.removeprefix(self.names.style.prefix)
        return self._state_keys.get((component, bare), "")  # type: ignore[arg-type]  # any other component is not there

    @property
    def unread_optimizer(self) -> str:
        """Why optimizer state in the folder is not read; "" when it is, or when there is none."""
        keys = [k for k in self.folder.tensors() if "optimizer." in k]
        if not keys or "exp_avg" in self.components:
            return ""
        if any(SHARDED_MOMENTS.search(k) for k in keys):
            return "its optimizer state was saved in a form that only its own layout can load"
        return "its optimizer state is not complete"

    def has(self, component: str, tensor: str) -> bool:
        """Whether the folder holds that component of a tensor: of all tensors or of none."""
        return component in self.components and tensor in self.spec.by_name

    def read(self, component: str, tensor: str, box: Box) -> Tensor:
        """The elements of `box` of a tensor's component, in the type of the folder."""
        target: Tensor | None = None
        for key, where, part in self.names.boxes(tensor, box):
            data = self.folder.read(self._key(key, component), where)
            if target is None:
                target = torch.empty(box.shape, dtype=data.dtype)
            target[part.slices(box.start)] = data.reshape(part.shape)
        if target is None:
            raise UnreadableFolder(f"{self.path}: has nothing of {tensor} {box}")
        return target


def _more(items: list[str]) -> str:
    return "" if len(items) == 1 else f" (and {len(items) - 1} more)"


def optimizer_steps(path: Path, common: Any) -> int:
    """The step counter in the optimizer's param_groups in common.pt. UnreadableFolder when there is none."""
    steps = {_whole(path, step) for group in _param_groups(common) if (step := group.get("step")) is not None}
    if not steps:
        raise UnreadableFolder(f"{path / COMMON}: no optimizer step beside the moments: expected it in param_groups")
    return max(steps)


def _whole(path: Path, step: Any) -> int:
    if isinstance(step, SavedTensor) and prod(step.shape) == 1:
        step = Archive(path / COMMON).read(step, Box((0,) * len(step.shape), step.shape)).item()
    if not isinstance(step, int | float) or not isfinite(step):
        raise UnreadableFolder(f"{path / COMMON}: optimizer step {step!r}, expected a whole number")
    return int(step)


def _param_groups(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping below a "param_groups" anywhere in `value`."""
    if isinstance(value, dict):
        for name, part in cast("dict[Any, Any]", value).items():
            if name == "param_groups" and isinstance(part, list):
                yield from (group for group in part if isinstance(group, dict))
            else:
                yield from _param_groups(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _param_groups(part)
    elif isinstance(value, Record):
        yield from _param_groups(value.fields)
