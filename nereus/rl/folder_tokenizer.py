"""The tokenizer of a Hugging Face folder, read from its tokenizer.json offline, behind the byte tokenizer's interface."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from nereus.errors import ConfigError
from nereus.rl.tokenizer import ByteTokenizer, tokenizer_json

FILE, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


class Tokenizer(Protocol):
    """Text to token ids and back."""

    eos_id: int

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Token ids of the text, with bos and eos around it where asked for (and where the tokenizer has a bos)."""
        ...

    def decode_response(self, token_ids: Iterable[int]) -> str:
        """The text up to the first eos: what a task scores."""
        ...


class FolderTokenizer:
    """See the module. ConfigError with the key model.folder for a tokenizer that cannot be read or names no eos."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Tokens

        try:
            self._tokens = Tokens.from_file(str(folder / FILE))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError("model.folder", str(folder), f"expected a tokenizer in {FILE}: {error}") from error
        settings = _json(folder / SETTINGS)
        self.bos_id = self._special(settings, "bos_token")
        generation = _json(folder / GENERATION) | _json(folder / "config.json")
        eos = self._special(settings, "eos_token")
        eos = _first_id(generation.get("eos_token_id")) if eos is None else eos
        if eos is None:
            raise ConfigError("model.folder", str(folder), f"expected an eos_token in {SETTINGS}")
        self.eos_id = eos

    def _special(self, settings: dict[str, Any], name: str) -> int | None:
        said = settings.get(name)
        text = said.get("content") if isinstance(said, dict) else said
        return self._tokens.token_to_id(text) if isinstance(text, str) else None

    @property
    def vocab_size(self) -> int:
        """How many rows of vocabulary the tokens need."""
        return max(self._tokens.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Token ids of the text; bos is left out where the tokenizer has none (Qwen)."""
        ids: list[int] = self._tokens.encode(text, add_special_tokens=False).ids
        first = [self.bos_id] if bos and self.bos_id is not None else []
        return first + ids + [self.eos_id] * eos

    def decode_response(self, token_ids: Iterable[int]) -> str:
        """The text up to the first eos, without special tokens."""
        kept: list[int] = []
        for token in token_ids:
            if token == self.eos_id:
                break
            kept.append(token)
        return self._tokens.decode(kept, skip_special_tokens=True)


def tokenizer_of(folder: str, vocab: int) -> Tokenizer:
    """The tokenizer in the folder of a model with `vocab` rows; the byte tokenizer for "" and where the folder has that.

    ConfigError with the key model.folder when it has none, or one with more tokens than the model has rows.
    """
    path = Path(folder)
    if not folder or _is_byte_level(path):
        return ByteTokenizer()
    if not (path / FILE).is_file():
        if vocab == ByteTokenizer.vocab_size:
            return ByteTokenizer()
        expected = f"expected {FILE} beside a model of {vocab:,} tokens (other kinds of tokenizer are not read)"
        raise ConfigError("model.folder", folder, expected)
    found = FolderTokenizer(path)
    if found.vocab_size > vocab:
        expected = f"its tokenizer has {found.vocab_size:,} tokens, its model {vocab:,}: expected as many or fewer"
        raise ConfigError("model.folder", folder, expected)
    return found


def _is_byte_level(folder: Path) -> bool:
    """Whether the folder's tokenizer is the byte tokenizer that Nereus exports."""
    mine: Any = tokenizer_json()
    model = _json(folder / FILE).get("model")
    return isinstance(model, dict) and {k: model.get(k) for k in ("vocab", "merges")} == {
        k: mine["model"][k] for k in ("vocab", "merges")
    }


def _json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _first_id(said: object) -> int | None:
    """The first of one or several ids."""
    value = said[0] if isinstance(said, list) and said else said
    return value if isinstance(value, int) else None
