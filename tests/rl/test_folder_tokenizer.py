"""The tokenizer of a Hugging Face folder against transformers' own reading of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.errors import ConfigError
from nereus.rl.folder_tokenizer import FolderTokenizer, tokenizer_of
from nereus.rl.tasks import Task
from nereus.rl.tokenizer import ByteTokenizer

WORDS = ["spell the word backward", "the words spell drow", "a b c 1 2 3", "backward backward spell"]


def written(folder: Path, *, bos: bool = True) -> Path:
    """A byte-level BPE of 287 tokens as a Hugging Face folder holds it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|begin|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator(WORDS, trainer)
    folder.mkdir(exist_ok=True)
    tokens.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    settings |= {"bos_token": {"__type": "AddedToken", "content": "<|begin|>"}} if bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("tokenizer"))


def test_as_transformers_reads_it(folder: Path) -> None:
    from transformers import AutoTokenizer

    mine, theirs = FolderTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in WORDS:
        assert mine.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert mine.encode(text, bos=True, eos=True) == [theirs.bos_token_id, *mine.encode(text), theirs.eos_token_id]
    assert mine.vocab_size == len(theirs)


@given(text=st.text(max_size=30))
def test_round_trip_up_to_eos(folder: Path, text: str) -> None:
    mine = FolderTokenizer(folder)
    assert mine.decode_response([*mine.encode(text), mine.eos_id, *mine.encode("more")]) == text


def test_without_bos(tmp_path: Path) -> None:
    mine = FolderTokenizer(written(tmp_path / "t", bos=False))
    assert mine.encode("a", bos=True) == mine.encode("a")


def test_a_task_in_its_tokens(folder: Path) -> None:
    tokenizer = tokenizer_of(str(folder), 300)
    task = Task("spell_backward", {}, 1, template="{word}>", tokenizer=tokenizer)
    prompt = task.prompt(3)
    assert prompt.token_ids == tuple(FolderTokenizer(folder).encode(prompt.text, bos=True))
    assert task.score_tokens(3, task.target(3)) == 1.0
    assert len(prompt.token_ids) < len(Task("spell_backward", {}, 1, template="{word}>").prompt(3).token_ids) + 1


def test_which_tokenizer_a_folder_has(folder: Path, tmp_path: Path) -> None:
    ByteTokenizer().export(tmp_path / "bytes")
    (tmp_path / "none").mkdir()
    assert isinstance(tokenizer_of("", 5000), ByteTokenizer)
    assert isinstance(tokenizer_of(str(tmp_path / "bytes"), 320), ByteTokenizer)
    assert isinstance(tokenizer_of(str(tmp_path / "none"), 259), ByteTokenizer)
    assert isinstance(tokenizer_of(str(folder), 320), FolderTokenizer)
    with pytest.raises(ConfigError, match=r"expected tokenizer\.json beside a model of 5,000 tokens"):
        tokenizer_of(str(tmp_path / "none"), 5000)
    with pytest.raises(ConfigError, match="its tokenizer has 287 tokens, its model 280"):
        tokenizer_of(str(folder), 280)


def test_broken_ones_are_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"expected a tokenizer in tokenizer\.json"):
        FolderTokenizer(tmp_path)
    made = written(tmp_path / "t")
    (made / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="expected an eos_token"):
        FolderTokenizer(made)
    (made / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert FolderTokenizer(made).eos_id == 7
