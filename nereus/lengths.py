"""How long a response may be at a step, and how wide the rows of a batch are then: pure."""

from __future__ import annotations

from nereus.config import DataConfig
from nereus.model import round_up

WIDTH_MULTIPLE_TOKENS = 8
"""Rows of a batch are padded to a multiple of this."""


def response_limit(data: DataConfig, step: int) -> int:
    """Tokens that a response of step `step` has at most."""
    begun = [each.max_response_tokens for each in data.response_schedule if each.step <= step]
    return begun[-1] if begun else data.max_response_tokens


def largest_limit(data: DataConfig, first_step: int = 1, end_step: int | None = None) -> int:
    """The largest limit of the steps from `first_step` on, to before `end_step` where that is given."""
    rises = [
        each.max_response_tokens
        for each in data.response_schedule
        if first_step <= each.step and (end_step is None or each.step < end_step)
    ]
    return max(response_limit(data, first_step), *rises, 0)


def row_tokens(data: DataConfig, response_tokens: int) -> int:
    """The width of rows whose longest holds the longest prompt allowed and such a response."""
    return round_up(data.max_prompt_tokens + response_tokens, WIDTH_MULTIPLE_TOKENS)


def limit_row_tokens(data: DataConfig, step: int) -> int:
    """The widest rows that step `step` may have."""
    return row_tokens(data, response_limit(data, step))


def largest_row_tokens(data: DataConfig, first_step: int = 1) -> int:
    """The widest rows that any step from `first_step` on may have."""
    return row_tokens(data, largest_limit(data, first_step))


def request_tokens(data: DataConfig) -> int:
    """Tokens of the longest request of the run, prompt and response: what its engines are started for.

    An engine's tables for so many tokens cost a few bytes a token and request; starting it anew at every rise would cost
    a pause.
    """
    return data.max_prompt_tokens + largest_limit(data)
