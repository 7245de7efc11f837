"""Writes the state of a model for others: a Hugging Face folder, a torch DCP folder, a Megatron torch_dist folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import yaml
from torch import Tensor

from nereus.boxes import Box, whole
from nereus.catalogue import hf_config
from nereus.checkpoint import chunks
from nereus.interchange.companions import carry, said_beside
from nereus.interchange.dcp_writer import Written, os_error, write_dcp
from nereus.interchange.huggingface import READ_BYTES, SHARD_BYTES, Entry, write_weights
from nereus.interchange.megatron import COMMON, CONFIG
from nereus.interchange.megatron_config import values_of
from nereus.interchange.megatron_names import KeyStyle, Names, component_key
from nereus.interchange.source import ModelState, kept, kept_components
from nereus.model import ModelSpec
from nereus.storage import MOMENTS, state_dtype


def export_hf(
    folder: Path, state: ModelState, spec: ModelSpec, *, beside: Path | None, shard_bytes: int = SHARD_BYTES
) -> None:
    """A Hugging Face folder that transformers loads. Weights keep the type that they are kept in (norms float32).

    `beside` is a folder with a config.json and the tokenizer's files, whose other keys and files are carried along.
    """
    config = _config(spec, beside)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    carry(beside, folder)
    if not (folder / "generation_config.json").exists():
        ids = {k: v for k, v in config.items() if k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        (folder / "generation_config.json").write_text(json.dumps(ids, indent=1), encoding="utf-8")
    entries = [Entry(name=t.name, shape=t.shape, dtype=t.dtype) for t in spec.tensors]

    def read(entry: Entry, box: Box) -> Tensor:
        return kept(state, spec.tensor(entry.name), "weight", box)

    write_weights(folder, entries, read, shard_bytes)


def _config(spec: ModelSpec, beside: Path | None) -> dict[str, object]:
    """config.json: what the model is, over whatever else the folder beside says of it."""
    made = hf_config(spec.config) | {"dtype": spec.config.dtype}
    return made | said_beside(beside, made)


# -- torch DCP and Megatron --------------------------------------------------------------------------------------


def export_dcp(folder: Path, state: ModelState, spec: ModelSpec, *, beside: Path | None = None) -> None:
    """A torch DCP folder: model.NAME, optim.state.NAME.{master, exp_avg, exp_avg_sq, step}, NAME as in Hugging Face."""
    carry(beside, folder)
    tensors: list[Written] = []
    for tensor in spec.tensors:
        for component in kept_components(state, tensor):
            tensors.append(
                Written(
                    key=dcp_key(tensor.name, component),
                    shape=tensor.shape,
                    dtype=state_dtype(component, tensor.dtype),
                    chunks=_row_chunks(tensor.shape),
                    read=partial(kept, state, tensor, component),
                )
            )
        if state.has(MOMENTS[0], tensor.name):
            tensors.append(_step(dcp_key(tensor.name, "step"), state.optimizer_steps))
    write_dcp(folder, tensors)


def dcp_key(name: str, component: str) -> str:
    """The key of a component in a DCP folder: torch's own names of a model's and an optimizer's state."""
    return f"model.{name}" if component == "weight" else f"optim.state.{name}.{component}"


def _row_chunks(shape: tuple[int, ...]) -> tuple[Box, ...]:
    return tuple(chunks(whole(shape), 4, READ_BYTES))


def _step(key: str, steps: int) -> Written:
    number = torch.tensor(float(steps))
    return Written(key=key, shape=(), dtype="float32", chunks=(Box((), ()),), read=lambda _: number)


def export_torch_dist(
    folder: Path, state: ModelState, spec: ModelSpec, *, prefix: str = "", beside: Path | None = None
) -> None:
    """A Megatron torch_dist folder with a layer axis; moments and masters in the fully reshardable form.

    `prefix` stands before every key ("module." in NeMo 2). Padding rows of the vocabulary are 0.
    """
    carry(beside, folder)
    names = Names(spec, KeyStyle(prefix=prefix))
    tensors: list[Written] = []
    trained = all(state.has(MOMENTS[0], tensor.name) for tensor in spec.tensors)
    for component in ("weight", *(("master", *MOMENTS) if trained else ())):
        tensors += megatron_tensors(names, state, component)
    write_dcp(folder, tensors)
    common: dict[str, object] = {"checkpoint_version": 3.0, "iteration": 0, "model_config": values_of(spec.config)}
    if trained:
        common["optimizer"] = {
            "optimizer": {"param_groups": [{"step": state.optimizer_steps}]},
            "param_state_sharding_type": "fully_reshardable",
        }
    _save(common, folder / COMMON)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _save(value: object, path: Path) -> None:
    """torch.save, which on a full disk raises OSError."""
    with path.open("wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            raise os_error(error) from error


def megatron_tensors(names: Names, state: ModelState, component: str) -> Iterator[Written]:
    """A component of every global tensor of Megatron's, a layer or an expert at a time."""
    for key, shape in names.shapes.items():
        yield Written(
            key=component_key(key, component),
            shape=shape,
            dtype=state_dtype(component, names.dtype(key)),
            chunks=names.chunks(key, READ_BYTES),
            read=partial(_global_box, names, state, component, key),
        )


def _global_box(names: Names, state: ModelState, component: str, key: str, box: Box) -> Tensor:
    """The elements of `box` of a global Megatron tensor, put together from canonical ones."""
    spec = names.spec
    target = torch.zeros(box.shape, dtype=getattr(torch, state_dtype(component, names.dtype(key))))
    for tensor, part, where in names.canonical(key, box):
        data = kept(state, spec.tensor(tensor), component, part)
        target[where.slices(box.start)] = data.reshape(where.shape)
    return target


def export_nemo2(folder: Path, state: ModelState, spec: ModelSpec, *, beside: Path | None) -> None:
    """A NeMo 2 folder: weights as torch_dist under "module.", and a context with the model's sizes and its tokenizer.

    The context has no io.json, in which NeMo keeps its own objects: give NeMo the model, and this folder to restore from.
    """
    weights, context = folder / "weights", folder / "context"
    tokenizer = context / "nemo_tokenizer"
    for made in (weights, tokenizer):
        made.mkdir(parents=True)
    export_torch_dist(weights, state, spec, prefix="module.")
    carry(beside, tokenizer)
    said = {"config": {"_target_": "nemo.collections.llm.gpt.model.base.GPTConfig", **values_of(spec.config)}}
    (context / "model.yaml").write_text(yaml.safe_dump(said), encoding="utf-8")
