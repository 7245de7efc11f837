"""Prompts and scores from reasoning-gym: procedural tasks whose entries are functions of (seed, prompt id) only."""

from __future__ import annotations

import difflib
import functools
import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

from nereus.errors import ConfigError
from nereus.rl.folder_tokenizer import Tokenizer
from nereus.rl.tokenizer import ByteTokenizer

RESERVED_OPTIONS = ("seed", "size")  # set by Task
CHUNK_PROMPTS = 500  # some data sets are bounded by their size; prompt ids beyond it come from a data set seeded anew


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of a task.

    prompt_id: its number in the task. question: reasoning-gym's own text. text: what the model sees (the template
    filled in). token_ids: bos and the tokens of `text`. answer: reasoning-gym's oracle answer, None where it has none.

    Example: Prompt(prompt_id=0, question="Spell this word backward (example: sun -> nus): cup", text="cup>",
    token_ids=(257, 99, 117, 112, 62), answer="puc").
    """

    prompt_id: int
    question: str
    text: str
    token_ids: tuple[int, ...]
    answer: str | None


class Task:
    """A reasoning-gym data set, seen as numbered prompts and a score.

    Two tasks with the same arguments are equal prompt by prompt, in any order and in any process.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, object],
        seed: int,
        *,
        template: str = "{question}",
        stream: str = "train",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`options` are those of reasoning-gym's config of the task; `stream` names an independent sequence of prompts
        ("train", "warmup", "test", ...) of the same seed.

        `template` makes the prompt from `{question}` or from the entry's metadata, e.g. "{word}>" for spell_backward,
        so that a byte-level model need not read a long constant preamble. It must not name metadata that gives the
        answer away. `tokenizer` is the byte tokenizer by default.
        Errors: ConfigError naming data.task, data.task_options.* or data.prompt_template.
        """
        self.name, self.seed, self.template = name, seed, template
        self.tokenizer: Tokenizer = tokenizer or ByteTokenizer()
        self.chunk = functools.lru_cache(maxsize=8)(
            lambda number: open_dataset(name, options, dataset_seed(name, seed, stream, number))
        )
        self.prompt(0)

    def prompt(self, prompt_id: int) -> Prompt:
        """The prompt with this number (any integer from 0)."""
        entry = self.entry(prompt_id)
        text = self.filled_in(entry)
        return Prompt(
            prompt_id=prompt_id,
            question=entry["question"],
            text=text,
            token_ids=tuple(self.tokenizer.encode(text, bos=True)),
            answer=None if entry["answer"] is None else str(entry["answer"]),
        )

    def target(self, prompt_id: int) -> tuple[int, ...]:
        """The oracle answer's bytes and eos, for supervised warm-up. Errors: ValueError for a task without oracle."""
        answer = self.entry(prompt_id)["answer"]
        if answer is None:
            raise ValueError(f"task {self.name} has no single answer for prompt {prompt_id}: it cannot warm up a model")
        return tuple(self.tokenizer.encode(str(answer), eos=True))

    def demonstration(self, prompt_id: int, *, wrong_share: float = 0.0) -> tuple[int, ...]:
        """The target as an imperfect teacher shows it: a function of (seed, prompt id, wrong_share) only.

        Each byte of the answer is replaced, with probability `wrong_share`, by a byte of some other prompt's answer.
        A model warmed up on these knows the task but samples unsurely, which leaves PPO something to find.
        """
        *answer, eos = self.target(prompt_id)
        rng = random.Random(f"{self.name}/{self.seed}/{prompt_id}")
        for position in range(len(answer)):
            wrong, other = rng.random() < wrong_share, self.target(rng.randrange(CHUNK_PROMPTS))
            if wrong and len(other) > 1:
                answer[position] = rng.choice(other[:-1])
        return (*answer, eos)

    def score(self, prompt_id: int, response_text: str) -> float:
        """reasoning-gym's own score of the response, usually in [0, 1]."""
        return float(self.chunk(prompt_id // CHUNK_PROMPTS).score_answer(response_text, self.entry(prompt_id)))

    def score_tokens(self, prompt_id: int, response_ids: tuple[int, ...] | list[int]) -> float:
        """`score` of the response's text up to its first eos."""
        return self.score(prompt_id, self.tokenizer.decode_response(response_ids))

    def entry(self, prompt_id: int) -> dict[str, Any]:
        """reasoning-gym's entry: question, answer, metadata. Errors: ValueError for a negative number."""
        if prompt_id < 0:
            raise ValueError(f"prompt ids count from 0, got {prompt_id}")
        return self.chunk(prompt_id // CHUNK_PROMPTS)[prompt_id % CHUNK_PROMPTS]

    def filled_in(self, entry: Mapping[str, Any]) -> str:
        """The template with the entry's question and metadata. Errors: ConfigError for a field the entry lacks."""
        known = {**entry["metadata"], "question": entry["question"]}
        try:
            return self.template.format_map(known)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                "data.prompt_template", self.template, f"may use only {{{'}, {'.join(sorted(known))}}} ({error!r})"
            ) from error


def dataset_seed(name: str, seed: int, stream: str, chunk: int) -> int:
    """A 32-bit seed for the data set of prompts chunk * 500 ... chunk * 500 + 499.

    reasoning-gym draws entry i from `Random(seed + i)`, so neighbouring seeds would share entries: a hash parts them.
    """
    return int.from_bytes(hashlib.sha256(f"{name}/{seed}/{stream}/{chunk}".encode()).digest()[:4], "big")


def open_dataset(name: str, options: Mapping[str, object], seed: int) -> Any:
    """reasoning-gym's data set. Errors: ConfigError naming the task or the option, and what would be right."""
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)[:5]
        raise ConfigError(
            "data.task", name, f"is no reasoning-gym task; near it: {', '.join(near)} ({len(DATASETS)} in all)"
        )
    allowed = sorted(field.name for field in fields(DATASETS[name][1]) if field.name not in RESERVED_OPTIONS)
    for key, value in options.items():
        if key not in allowed:
            raise ConfigError(f"data.task_options.{key}", value, f"{name} takes {', '.join(allowed)}")
    try:
        return create_dataset(name, seed=seed, size=CHUNK_PROMPTS, **options)
    except (AssertionError, TypeError, ValueError) as error:
        named = next((key for key in options if key in str(error)), None)
        key = f"data.task_options.{named}" if named else "data.task_options"
        value = options[named] if named else dict(options)
        raise ConfigError(key, value, f"{name} refuses it: {error}") from error
