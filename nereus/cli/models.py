"""Models by name: the shipped Hugging Face configurations, a config.json, or a folder that holds one."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import nereus
from nereus.catalogue import model_config
from nereus.config import ModelConfig
from nereus.errors import ConfigError

SHIPPED = Path(nereus.__file__).parent / "models"


def model_names() -> tuple[str, ...]:
    """The names of the shipped models, such as llama-3.1-8b."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def load_hf_config(name_or_path: str) -> dict[str, object]:
    """The Hugging Face configuration of a shipped model, of a config.json, or of a folder with one.

    Raises ConfigError with the key model: for an unknown name, with those that are near; for a file that is not a
    configuration.
    """
    path = SHIPPED / f"{name_or_path.lower()}.json"
    try:
        if name_or_path.lower() not in model_names():
            path = Path(name_or_path)
            path = path.expanduser()
            path = path / "config.json" if path.is_dir() else path
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError("model", name_or_path, _unknown(name_or_path)) from error
    except (OSError, ValueError, RuntimeError) as error:  # a home that is not there, JSON too deep
        raise ConfigError("model", str(path), f"expected a Hugging Face config.json: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError("model", str(path), "expected a Hugging Face config.json: a mapping of keys")
    return loaded


def load_model(name_or_path: str) -> ModelConfig:
    """The ModelConfig of a model by name or path; ConfigError as `load_hf_config` and `catalogue.model_config` say."""
    return model_config(load_hf_config(name_or_path))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], model_names(), n=4, cutoff=0.5)
    told = f"did you mean {' or '.join(near)}? " if near else ""
    return f"no such model, file or folder; {told}Shipped are {', '.join(model_names())}"
