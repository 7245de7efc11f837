"""A run that starts from a folder: its model, read without torch, and its state, read by each slot for its boxes only.

The folder, `model.folder`, is a Hugging Face folder or a checkpoint of Nereus (an import is one).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nereus.catalogue import model_config
from nereus.checkpoint import Manifest, chunks, manifest_of
from nereus.config import Config, ModelConfig
from nereus.errors import ConfigError, NereusError
from nereus.model import ModelSpec, model_spec

if TYPE_CHECKING:
    from torch import Tensor

    from nereus.interchange.source import ModelState
    from nereus.storage import Shard

KEY = "model.folder"
FREE = ("folder", "dtype", "init_std")
"""Keys that may be stated beside a folder: where it is, the type to train in, what only a fresh model needs."""


def folder_model(folder: str) -> ModelConfig:
    """The model that a folder describes, by manifest.json or config.json. ConfigError with the key model.folder."""
    path = Path(folder)
    try:
        if (path / "manifest.json").is_file():
            return model_of(manifest_of((path / "manifest.json").read_text(encoding="utf-8")))
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, NereusError) as error:
        expected = f"expected a Hugging Face folder, or a checkpoint of Nereus: {error}"
        raise ConfigError(KEY, folder, expected) from error
    if not isinstance(values, dict):
        raise ConfigError(KEY, folder, "expected a mapping of keys in config.json")
    try:
        return model_config(values)
    except ConfigError as error:
        raise ConfigError(KEY, folder, f"its config.json says {error}") from error


def model_of(manifest: Manifest) -> ModelConfig:
    """The model of a checkpoint. ConfigError for one that has what this Nereus does not know."""
    known = {field.name for field in fields(ModelConfig)}
    odd = sorted(set(manifest.model) - known)
    if odd:
        raise ConfigError(f"model.{odd[0]}", manifest.model[odd[0]], f"expected one of {', '.join(sorted(known))}")
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in manifest.model.items()}
    return replace(ModelConfig(**plain), folder="")


def from_folder(config: Config, stated: Mapping[str, Any]) -> Config:
    """`config` with the model of its model.folder, if it names one; `stated` are the sections as they were written.

    A key of the model that is stated and says something else than the folder is a ConfigError. Without a stated
    warmup.steps there is no warm-up. A folder that has gone does not matter where every key is stated (a finished run).
    """
    folder = config.model.folder
    if not folder:
        return config
    said, warmup = stated.get("model") or {}, stated.get("warmup") or {}
    whole = {field.name for field in fields(ModelConfig)} <= set(said)
    if whole and not Path(folder).exists():
        return config
    found = folder_model(folder)
    for key in said:
        value, right = getattr(config.model, key), getattr(found, key)
        if key not in FREE and value != right:
            raise ConfigError(
                f"model.{key}", value, f"expected {right!r}, as {KEY} = {folder!r} says; leave the key out"
            )
    model = replace(found, **{key: getattr(config.model, key) for key in FREE if key in said})
    model = replace(model, folder=str(Path(folder).absolute()))  # slots have folders of their own to work in
    steps = config.warmup.steps if "steps" in warmup else 0
    return replace(config, model=model, warmup=replace(config.warmup, steps=steps))


def opened(model: ModelConfig) -> ModelState:
    """The state in a model's folder, checked tensor by tensor against its headers. UnreadableFolder names the first."""
    from nereus.interchange.huggingface import HfModel
    from nereus.interchange.native import NereusModel, is_checkpoint

    path, spec = Path(model.folder), model_spec("actor", model)
    return NereusModel(path, spec) if is_checkpoint(path) else HfModel(path, spec)


def check_folder(model: ModelConfig) -> None:
    """Nothing when model.folder is "" or holds the model. ConfigError names what does not fit.

    Of foreign folders only headers are read; every byte of a checkpoint of Nereus is, once, and again when it changed.
    """
    if not model.folder:
        return
    from nereus.interchange.native import is_checkpoint

    path = Path(model.folder)
    try:
        if is_checkpoint(path):
            _verify(path, tuple(sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir())))
        opened(model)
    except (NereusError, OSError) as error:
        raise ConfigError(KEY, model.folder, f"cannot start a run: {error}") from error


@cache
def _verify(path: Path, _written: tuple[tuple[str, int], ...]) -> None:
    """CheckpointError unless the checkpoint is whole; `_written` are its files with when they were written."""
    from nereus.runtime.checkpoints import verified  # Ray: only in the process that drives a run

    verified(path)


def first_steps(model: ModelConfig) -> int:
    """How many optimizer steps the state that a run starts with has seen."""
    return opened(model).optimizer_steps if model.folder else 0


def fill(spec: ModelSpec, shards: Iterable[Shard], limit_bytes: int) -> dict[Shard, Tensor]:
    """The shards of a model that starts from its folder, each read for itself, at most `limit_bytes` or a row at once."""
    import torch

    from nereus.interchange.source import kept
    from nereus.runtime.state import empty

    state = opened(spec.config)
    made = empty(shards)
    for shard, target in made.items():
        tensor = spec.tensor(shard.tensor)
        for box in chunks(shard.box, getattr(torch, shard.dtype).itemsize, limit_bytes):
            target[box.slices(shard.box.start)].copy_(kept(state, tensor, shard.component, box))
    return made
