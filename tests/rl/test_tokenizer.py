"""The byte tokenizer, and that Hugging Face loads its export with the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nereus.rl.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, ByteTokenizer

OURS = ByteTokenizer()
AWKWARD = ["", " ", "a  b\n\tc", "é😀", "\x00\x7f\xa0\xad", "<|eos|> is text", "Ġ", "don't 12+3="]


@pytest.fixture(scope="module", params=[AutoTokenizer, PreTrainedTokenizerFast])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    OURS.export(folder)
    return request.param.from_pretrained(folder, local_files_only=True)


@given(text=st.text(max_size=40))
def test_round_trip(text: str) -> None:
    assert OURS.decode(OURS.encode(text, bos=True, eos=True)) == text
    assert OURS.encode(text, bos=True, eos=True) == [BOS_ID, *text.encode(), EOS_ID]


def test_export_agrees_on_awkward_text(exported: Any) -> None:
    assert len(exported) == VOCAB_SIZE
    assert (exported.pad_token_id, exported.bos_token_id, exported.eos_token_id) == (PAD_ID, BOS_ID, EOS_ID)
    for text in AWKWARD:
        assert exported.encode(text) == OURS.encode(text)
        assert exported(text)["input_ids"] == OURS.encode(text)


@given(text=st.text(max_size=40), ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20))
@settings(max_examples=200, deadline=None)
def test_export_agrees_on_any_text_and_any_ids(exported: Any, text: str, ids: list[int]) -> None:
    assert exported.encode(text) == OURS.encode(text)
    assert exported.decode(ids, skip_special_tokens=True) == OURS.decode(ids)


def test_response_ends_at_its_first_eos() -> None:
    assert OURS.decode_response([104, 105, EOS_ID, 106]) == "hi"
    assert OURS.decode_response([104, 105]) == "hi"
    assert OURS.decode_response([EOS_ID]) == ""
    assert OURS.decode([104, PAD_ID, 300, 255]) == "h\ufffd"


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        OURS.export(tmp_path / "file" / "folder")
