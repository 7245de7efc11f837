"""The score of a response for OpenRLHF: reasoning-gym's own, as Nereus takes it. Runs there, without Nereus.

OpenRLHF loads it by `reward.remote_url`; that environment needs the reasoning_gym of Nereus's requirements.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import torch

SPECIAL_TOKENS = re.compile(r"(?:<\|[^|<>]*\|>|</s>|\s)+$")
"""What a decoded response may end with: OpenRLHF decodes with special tokens (`<|eot_id|>`), Nereus without."""


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
    """The scores of `queries`, each a prompt and its response; a label is what `data.py` wrote."""
    scores = [
        _score(query.removeprefix(prompt), label) for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    rewards = torch.tensor(scores, dtype=torch.float32)
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}


def _score(response: str, label: str) -> float:
    truth = json.loads(label)
    task = _task(truth["task"], json.dumps(truth["data_set"]))
    return float(task.score_answer(SPECIAL_TOKENS.sub("", response), task[truth["index"]]))


@functools.cache
def _task(name: str, data_set: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, **json.loads(data_set))
