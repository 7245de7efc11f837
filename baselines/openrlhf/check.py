"""Has OpenRLHF's own parser and assertions judge the command lines of experiments/ppo_8b.py: `make baselines-check`.

Then its own logging code writes logs, and every metric in them must have a place in our rows or be named as unplaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import eq
from pathlib import Path
from typing import Any

from baselines.judging import Asked, ask, carry_out, judged, logs, unequal
from baselines.openrlhf.command import PROGRAM, argv
from baselines.openrlhf.environment import ENVIRONMENT
from baselines.openrlhf.metrics import read
from experiments import ppo_8b
from nereus.experiment import Run

PARSE, SAMPLE = Path(__file__).with_name("parse.py"), Path(__file__).with_name("sample.py")
ANSWERS, LOGS = ENVIRONMENT.folder.with_name("answers.json"), ENVIRONMENT.folder.with_name("sample")
BAD = {  # commands that OpenRLHF must refuse, else this check shows nothing: what is wrong, and words of its answer
    "an unknown flag": (["--train.no_such_flag", "1"], "unrecognized arguments: --train.no_such_flag"),
    "an unknown aggregation": (["--actor.loss_agg_mode", "mean"], "argument --actor.loss_agg_mode: invalid choice"),
    "a dual clip below 1": (["--actor.dual_clip", "0.5"], "dual_clip must be > 1.0"),
    "engines on fewer GPUs than the actor's": (
        ["--vllm.num_engines", "3"],
        "vllm_num_engines * vllm_tensor_parallel_size",
    ),
    "a reference on more GPUs than the actor's": (
        ["--ref.num_nodes", "2"],
        "must be the same when colocate actor and ref",
    ),
    "an unknown schedule": (["--actor.lr_scheduler", "steady"], "is not a valid SchedulerType"),
}


def main() -> int:
    """Makes the environment, asks OpenRLHF, and says what it answered."""
    shared = ppo_8b.runs("openrlhf")
    cases = [*shared, *map(ppo_8b.apart, shared)]
    words = argv(shared[0])[len(PROGRAM) :]
    return carry_out(
        "OpenRLHF",
        ENVIRONMENT,
        lambda python: chain(judge(python, cases), logs(python, SAMPLE, LOGS, read, words)),
    )


def judge(python: Path, cases: Sequence[Run]) -> Iterator[str]:
    """What is wrong with OpenRLHF's answers to these cases, and to commands that it must refuse."""
    return judged(
        "OpenRLHF",
        [_asked(run) for run in cases],
        BAD,
        lambda commands: ask(python, PARSE, {"commands": commands}, ANSWERS),
        lambda case, job: different(stated(case.words), case.wanted, job),
    )


def _asked(run: Run) -> Asked:
    words = argv(run)[len(PROGRAM) :]
    return Asked(run_id=run.run_id, words=words, settings=stated(words), wanted=expected(run))


def stated(words: Sequence[str]) -> dict[str, list[str]]:
    """The flags of a command line, without dashes, each with the words after it."""
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flags[word.removeprefix("--")] = []
        else:
            flags[list(flags)[-1]].append(word)
    return flags


def expected(run: Run) -> dict[str, object]:
    """What the parsed job must say of the Run, written independently of command.py."""
    data, a, plan = run.workload.data, run.workload.algorithm, run.plan
    samples = data.prompts_per_step * data.samples_per_prompt
    values: dict[str, object] = {
        "rollout.batch_size": data.prompts_per_step,
        "rollout.n_samples_per_prompt": data.samples_per_prompt,
        "rollout.max_new_tokens": data.max_response_tokens,
        "rollout.vllm_generate_batch_size": data.prompts_per_step,
        "rollout.top_p": 1.0,
        "train.batch_size": samples // a.mini_batches,
        "train.max_epochs": a.epochs,
        "train.async_enable": False,
        "data.max_len": data.max_prompt_tokens + data.max_response_tokens,
        "actor.eps_clip_low_high": [a.clip_ratio_low, a.clip_ratio_high],
        "actor.adam.lr": a.actor_lr,
        "critic.adam.lr": a.critic_lr,
        "critic.value_clip": a.value_clip,
        "actor.max_norm": a.clip_grad,
        "algo.kl.init_coef": a.kl_coef,
        "algo.kl.use_loss": False,
        "algo.advantage.lambd": a.lam,
        "algo.advantage.is_correction_level": "off",
        "reward.normalize_enable": False,
        "actor.model_name_or_path": run.workload.model_path,
        "critic.model_name_or_path": run.workload.model_path,
        "vllm.num_engines": plan.actor_generate.dp,
        "vllm.tensor_parallel_size": plan.actor_generate.tp,
        "ds.zero_stage": 3,
        "ds.tensor_parallel_size": 1,
    }
    for model, stage in (("actor", plan.actor_train), ("ref", plan.reference_infer), ("critic", plan.critic_train)):
        values[f"{model}.num_gpus_per_node"] = min(8, stage.dp)
        values[f"{model}.num_nodes"] = -(-stage.dp // 8)
    return values


def different(
    settings: Mapping[str, Sequence[str]], wanted: Mapping[str, object], job: Mapping[str, Any]
) -> Iterator[str]:
    """The values of the parsed job that are not the wanted ones, or not what the command line's words say."""
    yield from unequal("OpenRLHF", settings, job, same, lambda words: " ".join(words) or "True")
    yield from unequal("OpenRLHF", wanted, job, eq)


def same(words: Sequence[str], found: object) -> bool:
    """Whether `found` is what argparse reads from the words after a flag."""
    if not words:
        return found is True
    parts = found if isinstance(found, list) else [found]
    return len(parts) == len(words) and all(map(_is, words, parts))


def _is(word: str, found: object) -> bool:
    if isinstance(found, int | float) and not isinstance(found, bool):
        return float(word) == found
    return word == found


if __name__ == "__main__":
    sys.exit(main())
