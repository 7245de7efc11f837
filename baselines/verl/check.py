"""Has verl's own parser judge the command lines of experiments/ppo_8b.py: `make baselines-check`.

Then its own logging code writes logs, and every metric in them must have a place in our rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from baselines.environment import Environment
from baselines.judging import MISSING, Asked, ask, carry_out, judged, logs, unequal
from baselines.verl import environment
from baselines.verl.command import PROGRAM, Engine, argv
from baselines.verl.metrics import read
from experiments import ppo_8b
from nereus.experiment import Run

PARSE, SAMPLE = Path(__file__).with_name("parse.py"), Path(__file__).with_name("sample.py")
LOGS = environment.FOLDER.with_name("sample")
MODEL_FOLDER, ANSWERS = environment.FOLDER.with_name("model"), environment.FOLDER.with_name("answers.json")
Case = tuple[Run, Engine]
BAD = {  # commands that verl must refuse, else this check shows nothing: what is wrong, and words of verl's answer
    "an unknown key": (["trainer.no_such_key=1"], "trainer.no_such_key"),
    "an unknown aggregation": (["actor_rollout_ref.actor.loss_agg_mode=mean"], "Invalid loss_agg_mode"),
    "a mini-batch larger than the batch": (["data.train_batch_size=16"], "must be >= actor.ppo_mini_batch_size (64)"),
    "a layout that does not divide the GPUs": (
        ["actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=3"],
        "must be divisible by model_parallel_size (12)",
    ),
}


def main() -> int:
    """Makes the environment, asks verl, and says what it answered."""
    megatron = ppo_8b.runs("verl")
    cases: list[Case] = [*((run, "megatron") for run in megatron), (sharded(megatron[0]), "fsdp")]
    where = Environment(folder=environment.FOLDER, requirements=environment.REQUIREMENTS)
    return carry_out("verl", where, lambda python: chain(judge(python, cases), logs(python, SAMPLE, LOGS, read)))


def sharded(run: Run) -> Run:
    """The run with every model sharded over all its GPUs, as FSDP has it."""
    stage = replace(run.plan.actor_train, tp=1, pp=1, dp=run.fleet.slots)
    plan = replace(run.plan, actor_train=stage, critic_train=stage, reference_infer=stage)
    return replace(run, variant=f"{run.variant}-fsdp", plan=plan)


def judge(python: Path, cases: Sequence[Case]) -> Iterator[str]:
    """What is wrong with verl's answers to these cases, and to commands that it must refuse."""
    asked = [_asked(run, engine) for run, engine in cases]
    write_model(cases[0][0], MODEL_FOLDER)
    folder = str(MODEL_FOLDER.resolve())
    return judged(
        "verl",
        asked,
        BAD,
        lambda commands: ask(python, PARSE, {"commands": commands, "model_folder": folder}, ANSWERS),
        lambda case, job: different({**case.settings, **case.wanted}, job),
    )


def _asked(run: Run, engine: Engine) -> Asked:
    words = argv(run, engine)[len(PROGRAM) :]
    return Asked(run_id=run.run_id, words=words, settings=stated(words), wanted=expected(run, engine))


def write_model(run: Run, folder: Path) -> None:
    """A config.json with the Run's shapes, for verl's critic, whose dataclass opens the model; no weights."""
    model = run.workload.model
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def expected(run: Run, engine: Engine) -> dict[str, object]:
    """What the composed job must say of the Run, written independently of command.py; verl's interpolations included."""
    data, a, plan = run.workload.data, run.workload.algorithm, run.plan
    mini_batch = data.prompts_per_step // a.mini_batches
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    values: dict[str, object] = {
        "data.train_batch_size": data.prompts_per_step,
        f"{actor}.rollout_n": data.samples_per_prompt,
        "critic.rollout_n": data.samples_per_prompt,
        f"{rollout}.prompt_length": data.max_prompt_tokens,
        f"{rollout}.response_length": data.max_response_tokens,
        f"{rollout}.tensor_model_parallel_size": plan.actor_generate.tp,
        f"{actor}.clip_ratio_low": a.clip_ratio_low,
        f"{actor}.clip_ratio_high": a.clip_ratio_high,
        f"{actor}.optim.lr": a.actor_lr,
        "critic.optim.lr": a.critic_lr,
        "critic.cliprange_value": a.value_clip,
        "algorithm.lam": a.lam,
        "algorithm.kl_ctrl.kl_coef": a.kl_coef,
        "algorithm.use_kl_in_reward": a.kl_coef > 0,
    }
    for model in (actor, "critic"):
        values[f"{model}.ppo_mini_batch_size"] = mini_batch
        values[f"{model}.ppo_epochs"] = a.epochs
        values[f"{model}.loss_agg_mode"] = a.loss_agg_mode
        values[f"{model}.use_dynamic_bsz"] = False
        values[f"{model}.ppo_micro_batch_size_per_gpu"] = plan.actor_train.micro_batch
    for model in (actor, "actor_rollout_ref.ref", "critic"):
        values[f"{model}.strategy"] = "megatron" if engine == "megatron" else "fsdp2"
        if engine == "megatron":
            values[f"{model}.megatron.tensor_model_parallel_size"] = plan.actor_train.tp
            values[f"{model}.megatron.pipeline_model_parallel_size"] = plan.actor_train.pp
            values[f"{model}.megatron.context_parallel_size"] = 1
    return values


def stated(overrides: Sequence[str]) -> dict[str, object]:
    """The settings of a command line, each as its text says it."""
    pairs = (override.lstrip("+").split("=", 1) for override in overrides)
    return {key: value for key, value in pairs if key != "model_engine"}


def different(wanted: Mapping[str, object], job: Mapping[str, Any]) -> Iterator[str]:
    """The values of the composed job that are not the wanted ones; the text of a command line stands for its value."""
    return unequal("verl", wanted, job, same)


def same(value: object, found: object) -> bool:
    """Whether they are equal, or `value` is the text that Hydra reads as `found`."""
    if value == found or not isinstance(value, str) or found is MISSING:
        return value == found
    if isinstance(found, list):
        return value.strip("[]").split(",") == [str(part) for part in found]
    if isinstance(found, bool):
        return value == str(found).lower()
    return isinstance(found, int | float) and float(value) == found


if __name__ == "__main__":
    sys.exit(main())
