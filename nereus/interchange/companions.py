"""What lies beside a model's weights in a Hugging Face folder and is carried along: tokenizer, generation settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from nereus.config import ModelConfig
from nereus.interchange.source import UnreadableFolder
from nereus.rl.folder_tokenizer import tokenizer_of
from nereus.rl.tokenizer import EOS_ID, PAD_ID, ByteTokenizer

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def carry(beside: Path | None, folder: Path, names: tuple[str, ...] = COMPANIONS) -> tuple[str, ...]:
    """Copies the companions that are in `beside` into `folder`, which may be the same; their names.

    UnreadableFolder names one that cannot be read, OSError comes from writing.
    """
    if beside is None:
        return ()
    found = tuple(name for name in names if (beside / name).is_file())
    for name in found:
        source, target = beside / name, folder / name
        if target.exists() and source.samefile(target):
            continue
        try:
            content = source.read_bytes()
        except OSError as error:
            raise UnreadableFolder(f"{source}: cannot be read: {error.strerror}") from error
        target.write_bytes(content)
    return found


def said_beside(folder: Path | None, known: Mapping[str, object]) -> dict[str, object]:
    """What config.json in `folder` says beyond the keys of `known`, such as lengths and special tokens; {} without one."""
    try:
        said = json.loads(((folder or Path("-")) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in said.items() if key not in known} if isinstance(said, dict) else {}


def settings_beside(model: ModelConfig, made: Mapping[str, object]) -> dict[str, object]:
    """Lengths and special tokens for the config.json `made` of a run's model: its folder's own, else the byte tokenizer's."""
    if not model.folder:
        return {"max_position_embeddings": 4096, "pad_token_id": PAD_ID, "eos_token_id": EOS_ID}
    said = {"max_position_embeddings": 4096} | said_beside(Path(model.folder), made)
    if said.get("eos_token_id") is None:
        said["eos_token_id"] = tokenizer_of(model.folder, model.vocab).eos_id
    return said


def carry_tokenizer(model_folder: str, folder: Path) -> None:
    """The tokenizer of the folder that a run's model comes from, or the byte tokenizer where it has none."""
    if not model_folder or "tokenizer.json" not in carry(Path(model_folder), folder):
        ByteTokenizer().export(folder)
