"""The score of a response for verl: reasoning-gym's own, as Nereus takes it. Runs in verl's environment, without Nereus.

verl loads it by `reward.custom_reward_function.path`; that environment needs the reasoning_gym of Nereus's requirements.
"""

from __future__ import annotations

import functools
import json
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """The score of `solution_str`; `ground_truth` is what `data.py` wrote: JSON that says which entry of which data set."""
    del extra_info
    truth = json.loads(ground_truth)
    task = _task(data_source, json.dumps(truth["data_set"]))
    return float(task.score_answer(solution_str, task[truth["index"]]))


@functools.cache
def _task(name: str, data_set: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, **json.loads(data_set))
