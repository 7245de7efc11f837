"""Batches: the alignment convention, padding, and that any split joins to the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.rl import batch as batches
from nereus.rl.tokenizer import PAD_ID

torch.set_num_threads(1)

Samples = list[tuple[list[int], list[int]]]
TOKENS = st.integers(0, 258)
SAMPLES = st.lists(
    st.tuples(st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, max_size=4)), min_size=1, max_size=9
)


def built(samples: Samples, **options: int) -> batches.Batch:
    return batches.build([prompt for prompt, _ in samples], [response for _, response in samples], **options)


def test_convention_by_example() -> None:
    batch = built([([257, 97], [98, 258]), ([257], [])])
    assert batch.tokens.tolist() == [[257, 97, 98, 258] + [PAD_ID] * 4, [257] + [PAD_ID] * 7]
    assert batch.mask.tolist() == [[0, 1, 1, 0, 0, 0, 0, 0], [0] * 8]
    assert batch.labels[0].tolist() == [97, 98, 258] + [PAD_ID] * 5


@given(samples=SAMPLES)
@settings(deadline=None)
def test_labels_under_the_mask_are_the_response(samples: Samples) -> None:
    batch = built(samples)
    assert batch.width_tokens % 8 == 0
    for row, (prompt, response) in enumerate(samples):
        assert batch.labels[row][batch.mask[row] > 0].tolist() == response
        assert batch.tokens[row, : len(prompt) + len(response)].tolist() == prompt + response
    numbers = [[float(token) for token in response] for _, response in samples]
    aligned = batch.align(numbers)
    torch.testing.assert_close(aligned, batch.labels * batch.mask)
    assert batch.ragged(aligned) == numbers


@given(data=st.data(), samples=SAMPLES, micro_rows=st.integers(1, 4))
@settings(deadline=None)
def test_shares_and_micro_batches_join_to_the_whole(data: st.DataObject, samples: Samples, micro_rows: int) -> None:
    batch = built(samples)
    batch = batch.with_columns(score=torch.arange(batch.rows).double() + 1, logp=torch.rand(batch.tokens.shape) + 1)
    cuts = sorted(data.draw(st.lists(st.integers(0, batch.rows), max_size=3)))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, batch.rows], strict=True)]
    rejoined: dict[str, list[torch.Tensor]] = {"tokens": [], "score": [], "logp": [], "mask": []}
    for share, size in zip(batches.split(batch, sizes), sizes, strict=True):
        micros = batches.micro_batches(share, micro_rows)
        assert len(micros) == max(1, -(-size // micro_rows))
        rows = micros[0].rows
        assert rows <= micro_rows
        assert len(micros) * rows - max(size, 1) < len(micros), "fewer rows are padding than there are micro-batches"
        assert all(micro.rows == rows and micro.width_tokens == batch.width_tokens for micro in micros)
        spare = [micro for micro in micros[:-1] if float(micro.prompt_lengths.min()) == 0]
        assert not spare, "zero-weight rows only at the end of a replica's last micro-batch"
        rejoined["tokens"].append(batches.join_rows([micro.tokens for micro in micros], size))
        rejoined["mask"].append(batches.join_rows([micro.mask for micro in micros], size))
        for name in ("score", "logp"):
            rejoined[name].append(batches.join_rows([micro.columns[name] for micro in micros], size))
        padding = batches.select(micros[-1], slice(size - (len(micros) - 1) * rows, None))
        assert padding.tokens.eq(PAD_ID).all()
        assert float(padding.mask.sum() + padding.columns["score"].sum() + padding.columns["logp"].sum()) == 0.0
        assert int(padding.prompt_lengths.sum() + padding.response_lengths.sum()) == 0
    whole = {"tokens": batch.tokens, "mask": batch.mask, **batch.columns}
    for name, parts in rejoined.items():
        assert torch.equal(torch.cat(parts), whole[name])


def test_select_keeps_the_given_order_and_leaves_the_batch_alone() -> None:
    batch = built([([1], [2]), ([3], [4]), ([5], [6])])
    assert batches.select(batch, [2, 0]).tokens[:, 0].tolist() == [5, 1]
    padded = batches.pad_rows(batch, 3)
    padded.tokens[:] = 0
    assert batch.tokens[:, 0].tolist() == [1, 3, 5]


def test_fixed_width_and_refusals() -> None:
    assert built([([1], [2])], width_tokens=12).width_tokens == 12
    assert built([([1], [2])], multiple_tokens=5).width_tokens == 5
    with pytest.raises(ValueError, match="sample of 3 tokens does not fit in width_tokens = 2"):
        built([([1], [2, 3])], width_tokens=2)
    with pytest.raises(ValueError, match="a prompt is empty"):
        built([([], [2])])
    with pytest.raises(ValueError, match="1 prompts and 2 responses"):
        batches.build([[1]], [[2], [3]])
    batch = built([([1], [2]), ([3], [4])])
    with pytest.raises(ValueError, match=r"sizes \(1, 2\) do not add up to the batch's 2 rows"):
        batches.split(batch, [1, 2])
    with pytest.raises(ValueError, match="at least 1 row"):
        batches.micro_batches(batch, 0)
    with pytest.raises(ValueError, match="column scores has 3 rows, the batch has 2"):
        batch.with_columns(scores=torch.zeros(3))
    with pytest.raises(ValueError, match="are not the response lengths"):
        batch.align([[1.0], []])
