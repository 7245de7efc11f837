"""The byte-level tokenizer: token b is byte b, then pad, bos and eos. It exports itself in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

BYTE_COUNT = 256
PAD_ID, BOS_ID, EOS_ID = 256, 257, 258
VOCAB_SIZE = 259
SPECIAL_TOKENS = {"<|pad|>": PAD_ID, "<|bos|>": BOS_ID, "<|eos|>": EOS_ID}


class ByteTokenizer:
    """Text to UTF-8 bytes and back; stateless, so two of them always agree.

    Example: ByteTokenizer().encode("ab", bos=True) == [257, 97, 98].
    """

    vocab_size = VOCAB_SIZE
    pad_id = PAD_ID
    bos_id = BOS_ID
    eos_id = EOS_ID

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Token ids of the text's UTF-8 bytes. Text that spells a special token is still only bytes."""
        return [BOS_ID] * bos + list(text.encode("utf-8")) + [EOS_ID] * eos

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of the ids; special and out-of-vocabulary ids vanish, invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in token_ids if 0 <= token < BYTE_COUNT).decode("utf-8", errors="replace")

    def decode_response(self, token_ids: Iterable[int]) -> str:
        """The text up to the first eos: what a task scores."""
        kept: list[int] = []
        for token in token_ids:
            if token == EOS_ID:
                break
            kept.append(token)
        return self.decode(kept)

    def export(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json into the folder (made if missing).

        `AutoTokenizer.from_pretrained(folder)` then gives the same ids, offline. Errors: OSError when not writable.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("tokenizer.json", tokenizer_json()), ("tokenizer_config.json", tokenizer_config())):
            (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE files, indexed by byte.

    A printable Latin-1 byte stands for itself; the others take the code points from 256 on, in order.
    Source: GPT-2's byte encoder, which the tokenizers library's ByteLevel follows.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, spare = [], BYTE_COUNT
    for byte in range(BYTE_COUNT):
        characters.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return characters


def tokenizer_json() -> dict[str, object]:
    """The content of tokenizer.json: byte-level BPE without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [
        {"id": token_id, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for text, token_id in SPECIAL_TOKENS.items()
    ]
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model | {"vocab": vocab | SPECIAL_TOKENS, "merges": []},
    }


def tokenizer_config() -> dict[str, object]:
    """The content of tokenizer_config.json."""
    pad, bos, eos = SPECIAL_TOKENS
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "bos_token": bos,
        "eos_token": eos,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
