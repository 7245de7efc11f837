"""Tasks are functions of (seed, prompt id); wrong names and options are named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nereus.errors import ConfigError
from nereus.rl.tasks import CHUNK_PROMPTS, Task
from nereus.rl.tokenizer import BOS_ID, EOS_ID

WORDS = {"min_word_len": 3, "max_word_len": 5}


def backward(seed: int = 1, template: str = "{word}>", **others: str) -> Task:
    return Task("spell_backward", WORDS, seed, template=template, **others)  # pyright: ignore[reportArgumentType]


def test_prompt_is_a_function_of_seed_and_id() -> None:
    one, other = backward(), backward()
    ids = [0, 1, CHUNK_PROMPTS - 1, CHUNK_PROMPTS, 123_456]
    forward = [one.prompt(i) for i in ids]
    assert forward == [other.prompt(i) for i in reversed(ids)][::-1]
    assert len({prompt.text for prompt in forward}) > 3


def test_another_process_agrees() -> None:
    script = (
        "from nereus.rl.tasks import Task\n"
        "task = Task('spell_backward', {'min_word_len': 3, 'max_word_len': 5}, 1, template='{word}>')\n"
        "print([task.prompt(i).text for i in (3, 700)])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str([backward().prompt(i).text for i in (3, 700)])


def test_seeds_and_streams_are_independent() -> None:
    texts = [
        [task.prompt(i).text for i in range(200)]
        for task in (backward(1), backward(2), backward(stream="warmup"), backward(stream="test"))
    ]
    for one in range(4):
        for other in range(one):
            assert sum(a == b for a, b in zip(texts[one], texts[other], strict=True)) < 5
            assert len(set(texts[one]) & set(texts[other])) < 20


@pytest.mark.parametrize(
    ("name", "options", "template"),
    [
        ("spell_backward", WORDS, "{word}>"),
        ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "{expression}="),
        ("basic_arithmetic", {"max_terms": 2, "max_digits": 1}, "{question}"),
        ("letter_counting", {}, "{question}"),
    ],
)
def test_oracle_scores_1_and_silence_0(name: str, options: dict[str, object], template: str) -> None:
    task = Task(name, options, 5, template=template)
    for prompt_id in range(20):
        prompt = task.prompt(prompt_id)
        assert prompt.token_ids == (BOS_ID, *prompt.text.encode())
        assert prompt.answer is not None
        assert task.score(prompt_id, prompt.answer) == 1.0
        assert task.score_tokens(prompt_id, task.target(prompt_id)) == 1.0
        assert task.score_tokens(prompt_id, [EOS_ID]) == 0.0


def test_demonstrations_are_wrong_as_often_as_asked() -> None:
    one, other = backward(), backward()
    assert [one.demonstration(i) for i in range(20)] == [one.target(i) for i in range(20)]
    shown = [one.demonstration(i, wrong_share=0.5) for i in range(400)]
    assert shown == [other.demonstration(i, wrong_share=0.5) for i in range(400)]
    assert all(len(tokens) == len(one.target(i)) and tokens[-1] == EOS_ID for i, tokens in enumerate(shown))
    mean = sum(one.score_tokens(i, tokens) for i, tokens in enumerate(shown)) / len(shown)
    assert 0.48 < mean < 0.60, "half stays, and of the other half a byte in about 15 is right by chance"


def test_reward_needs_the_prompt() -> None:
    """Perfect answers to other prompts score the base rate."""
    task = backward()
    scores = [task.score(i, str(task.prompt(i + 1).answer)) for i in range(300)]
    assert 0.0 < sum(scores) / len(scores) < 0.15


def test_default_template_is_the_question() -> None:
    prompt = Task("chain_sum", {}, 1).prompt(4)
    assert prompt.text == prompt.question
    assert prompt.question.startswith("State the final answer")


def test_task_without_an_oracle_scores_but_cannot_warm_up() -> None:
    task = Task("graph_color", {}, 1)
    assert task.prompt(0).answer is None
    assert task.score(0, "nonsense") < 1.0
    with pytest.raises(ValueError, match="cannot warm up"):
        task.target(0)


@pytest.mark.parametrize(
    ("name", "options", "template", "message"),
    [
        ("spell_backwards", {}, "{question}", r"data\.task = 'spell_backwards'.*near it: spell_backward"),
        ("chain_sum", {"terms": 2}, "{question}", r"data\.task_options\.terms = 2: chain_sum takes .*min_terms"),
        ("chain_sum", {"seed": 2}, "{question}", r"data\.task_options\.seed = 2: chain_sum takes"),
        ("chain_sum", {"min_terms": 0}, "{question}", r"data\.task_options\.min_terms = 0: .*must be positive"),
        ("chain_sum", {"min_terms": "x"}, "{question}", r"data\.task_options = \{'min_terms': 'x'\}"),
        ("chain_sum", {}, "{word}=", r"data\.prompt_template = '\{word\}=': .*\{expression\}"),
        ("chain_sum", {}, "{answer}=", r"data\.prompt_template"),
    ],
)
def test_errors_name_key_value_and_what_is_right(
    name: str, options: dict[str, object], template: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Task(name, options, 1, template=template)


def test_negative_prompt_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="count from 0"):
        backward().prompt(-1)
