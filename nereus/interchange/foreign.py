"""A foreign folder of any format: what it is, what model it holds, and its state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from nereus.catalogue import model_config
from nereus.config import ModelConfig
from nereus.interchange.dcp import METADATA, DcpFolder
from nereus.interchange.dcp_model import DcpModel
from nereus.interchange.huggingface import INDEX, SINGLE, HfModel
from nereus.interchange.megatron import MegatronFolder, common_of, is_torch_dist
from nereus.interchange.megatron_config import config_of
from nereus.interchange.megatron_names import EMBEDDING_KEY, style_of
from nereus.interchange.native import ACTOR, NereusModel, is_checkpoint
from nereus.interchange.source import ModelState, UnreadableFolder
from nereus.interchange.start import model_of
from nereus.interchange.unpickle import Record
from nereus.model import DTYPE_BYTES, ModelSpec, model_spec
from nereus.runtime.checkpoints import verified

Format = Literal["nereus", "hf", "torch_dist", "dcp", "nemo2"]
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """An opened folder: its format, the model, its state, and the folder with a tokenizer beside it, if any."""

    format: Format
    spec: ModelSpec
    state: ModelState
    beside: Path | None
    note: str = ""


def format_of(path: Path) -> Format:
    """What kind of folder this is. UnreadableFolder when it is none of those that are read."""
    if not path.is_dir():
        raise UnreadableFolder(f"{path}: expected a folder")
    if is_checkpoint(path):
        return "nereus"
    if (path / "weights").is_dir() and (path / "context").is_dir():
        return "nemo2"
    if (path / "config.json").is_file() and any((path / name).is_file() for name in (SINGLE, INDEX)):
        return "hf"
    if is_torch_dist(_iteration(path)):
        return "torch_dist"
    if (path / METADATA).is_file():
        return "dcp"
    raise UnreadableFolder(
        f"{path}: expected a Hugging Face folder (config.json and {SINGLE}), a Megatron torch_dist folder "
        f"(metadata.json and .distcp files), a torch DCP folder ({METADATA}), a NeMo 2 folder (weights and context) or a "
        "checkpoint of Nereus (manifest.json)"
    )


def open_folder(path: Path, model: ModelConfig | None = None, said: Format | None = None) -> Foreign:
    """The folder, checked against the model that it describes, or against `model` where it describes none.

    Raises UnreadableFolder and RefusedPickle, which name the file, tensor or class; only headers are read. A checkpoint
    of Nereus is read in whole: CheckpointError names a file that is not what was written.
    """
    kind = said or format_of(path)
    if kind == "nereus":
        manifest = verified(path)
        spec = model_spec("actor", model_of(manifest))
        state = NereusModel(path, spec, ACTOR, manifest)
        return Foreign(format=kind, spec=spec, state=state, beside=beside_of(path))
    if kind == "hf":
        spec = model_spec("actor", config_of_hf(path))
        return Foreign(format=kind, spec=spec, state=HfModel(path, spec), beside=path)
    if kind == "dcp":
        if model is None:
            raise UnreadableFolder(f"{path}: a torch DCP folder does not say what model it holds: give --model")
        spec = model_spec("actor", model)
        return Foreign(format=kind, spec=spec, state=DcpModel(path, spec), beside=_tokenizer_in(path))
    return _open_megatron(path, model, kind)


def _open_megatron(path: Path, model: ModelConfig | None, kind: Format) -> Foreign:
    context = path / "context" if kind == "nemo2" else None
    weights = path / "weights" if kind == "nemo2" else _iteration(path)
    tokenizer = _tokenizer_in(context / "nemo_tokenizer" if context else weights)
    config = model or _megatron_config(weights, context, tokenizer)
    spec = model_spec("actor", config)
    state = MegatronFolder(weights, spec)
    note = f"{state.unread_optimizer}: it is left out" if state.unread_optimizer else ""
    return Foreign(format=kind, spec=spec, state=state, beside=tokenizer, note=note)


def _tokenizer_in(path: Path) -> Path | None:
    return path if (path / "tokenizer.json").is_file() else None


def _iteration(path: Path) -> Path:
    """The folder of the newest iteration below a Megatron-LM folder, or the folder itself."""
    try:
        return path / f"iter_{int((path / TRACKER).read_text()):07d}"
    except (OSError, ValueError):
        return path


# -- what model a folder holds -----------------------------------------------------------------------------------


def config_of_hf(path: Path) -> ModelConfig:
    """The model of config.json. UnreadableFolder when it is not JSON, ConfigError when it is not supported."""
    return model_config(hf_values(path))


def hf_values(path: Path) -> dict[str, object]:
    """The content of config.json."""
    file = path / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnreadableFolder(f"{file}: expected a Hugging Face configuration: {error}") from error
    if not isinstance(values, dict):
        raise UnreadableFolder(f"{file}: expected a Hugging Face configuration: a mapping of keys")
    return values


def beside_of(path: Path) -> Path | None:
    """Where a checkpoint's tokenizer lies: in its folder (an import), or in the run's folder for models."""
    for place in (path, path.parent.parent / "model"):
        if (place / "tokenizer.json").is_file() or (place / "config.json").is_file():
            return place
    return None


def _megatron_config(weights: Path, context: Path | None, tokenizer: Path | None) -> ModelConfig:
    found = DcpFolder(weights).tensors()
    embedding = found[style_of(found, str(weights)).prefix + EMBEDDING_KEY]
    dtype = embedding.dtype if embedding.dtype in DTYPE_BYTES else "float32"
    if context is not None:
        place, values = context / "model.yaml", _nemo_values(context / "model.yaml")
    else:
        place, values = weights / "common.pt", _arguments(weights)
    rows = embedding.shape[0]
    vocab = values.get("vocab_size") or tokenizer_rows(tokenizer) or rows
    if not isinstance(vocab, int) or not 0 < vocab <= rows:
        vocab = rows
    return config_of(values, vocab=vocab, dtype=dtype, place=str(place))


def _nemo_values(file: Path) -> Mapping[str, Any]:
    """The `config` of NeMo 2's model.yaml: plain YAML, in which no tag may name a Python object."""
    try:
        said = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableFolder(f"{file}: {error.strerror}; give --model where NeMo wrote none") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also bytes that are no text, dates that are none
        raise UnreadableFolder(f"{file}: refused: expected plain YAML: {error}") from error
    config = said.get("config") if isinstance(said, dict) else None
    if not isinstance(config, dict):
        raise UnreadableFolder(f"{file}: expected a section config; give --model where NeMo wrote none")
    return config


def _arguments(weights: Path) -> Mapping[str, Any]:
    """Megatron-LM's arguments in common.pt, or what Nereus writes there in their place."""
    common = common_of(weights)
    common = common if isinstance(common, dict) else {}
    if isinstance(common.get("model_config"), dict):
        return common["model_config"]
    arguments = common.get("args")
    if not isinstance(arguments, Record):
        raise UnreadableFolder(f"{weights}: holds no arguments of Megatron-LM: give --model")
    return arguments.fields


def tokenizer_rows(folder: Path | None) -> int | None:
    """How many rows of vocabulary the tokenizer.json in a folder needs."""
    try:
        said = json.loads(((folder or Path("-")) / "tokenizer.json").read_text(encoding="utf-8"))
        ids = [*said["model"]["vocab"].values(), *(token["id"] for token in said["added_tokens"])]
        return max(ids) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
