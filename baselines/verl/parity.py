"""One PPO step of verl's trainer beside one of Nereus, from the same weights on the same rollouts: `make verl-parity`.

Nereus samples and records rollouts, then both update actor and critic on them under each of SETTINGS; the table has the
largest differences. What runs of verl and what not: parity_step.py; of Nereus: parity_job.py. Exit codes: 0 within the bounds,
or skipped because the package index is out of reach; 1 beyond a bound, or where the comparison shows nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from baselines.verl.environment import FOLDER, IndexOutOfReach, interpreter
from baselines.verl.parity_records import MICRO_BATCH, Recorded, StepOfVerl, StepOutcome, base_config
from nereus.config import AlgorithmConfig
from nereus.engines.vllm.boot import ENVIRONMENT
from nereus.errors import NereusError

if TYPE_CHECKING:
    from torch import Tensor

STEP = Path(__file__).with_name("parity_step.py")
WORK = FOLDER.with_name("parity")
STEP_SECONDS = 600
BASE = AlgorithmConfig(gamma=1.0, lam=0.95, mini_batches=2, actor_lr=1e-3, critic_lr=1e-3, adam_eps=1e-6)
"""Adam's first step is the gradient over its own size plus epsilon: with 1e-8 float32's noise in gradients that are nearly zero
becomes a fifth of a whole step, 2e-4 at this rate. One setting has 1e-8, at a rate nearer to that of real jobs."""
GRPO = replace(BASE, adv_estimator="grpo")
SETTINGS: dict[str, AlgorithmConfig] = {
    "gae, token-mean": BASE,
    "gae, token-sum": replace(BASE, loss_agg_mode="token-sum"),
    "gae, seq-mean-token-mean": replace(BASE, loss_agg_mode="seq-mean-token-mean"),
    "gae, seq-mean-token-sum": replace(BASE, loss_agg_mode="seq-mean-token-sum"),
    "gae, seq-mean-token-sum-norm": replace(BASE, loss_agg_mode="seq-mean-token-sum-norm"),
    "gae, discounts, KL in reward": replace(BASE, gamma=0.99, lam=0.9, kl_coef=0.1),
    "gae, tight clips (dual, value)": replace(
        BASE, clip_ratio_low=0.1, clip_ratio_high=0.28, dual_clip_ratio=1.5, value_clip=0.05
    ),
    "gae, entropy bonus, 2 epochs": replace(BASE, entropy_coef=0.01, epochs=2),
    "gae, weight decay, norm clipped": replace(BASE, weight_decay=0.1, clip_grad=0.05),
    "gae, Adam's epsilon 1e-8": replace(BASE, adam_eps=1e-8, actor_lr=1e-4, critic_lr=1e-4),
    "grpo, token-mean": GRPO,
    "grpo, seq-mean-token-mean, KL": replace(GRPO, loss_agg_mode="seq-mean-token-mean", kl_coef=0.1),
    "rloo, token-mean": replace(BASE, adv_estimator="rloo"),
    "reinforce++, token-mean": replace(BASE, adv_estimator="reinforce++", gamma=0.99),
}
FIRST, OTHER = "gae, token-mean", "gae, tight clips (dual, value)"
WITH_RETURNS = ("gae", "reinforce++")  # of the others verl gives the advantages once more, and nothing uses them
BOUNDS = {
    "advantages": 1e-5,
    "returns": 1e-5,
    "policy loss": 1e-5,
    "value loss": 1e-5,
    "entropy": 1e-5,
    "gradient norm": 1e-5,
    "weights": 1e-4,
}
LOSSES = (("policy loss", "actor/pg_loss"), ("entropy", "actor/entropy"), ("value loss", "critic/vf_loss"))
NAMES_OF_VERL = {"actor/entropy": "actor/entropy_loss"}
CLIPS = ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac")


def main() -> int:
    """Records, has both take the steps, and prints the table."""
    os.environ.update(ENVIRONMENT)
    warnings.simplefilter("ignore")
    began = time.monotonic()
    try:
        python = interpreter()
    except IndexOutOfReach as error:
        say(f"skipped: {error}")
        return 0
    except NereusError as error:
        say(f"failed: {error}")
        return 1
    say(f"verl's environment is there, {time.monotonic() - began:.0f} s")
    from baselines.verl.parity_job import one_slot, record, step_of_nereus  # after the environment is set

    began = time.monotonic()
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    with one_slot() as pool:
        recorded = record(pool, WORK)
        ours = [step_of_nereus(pool, recorded, algorithm) for algorithm in SETTINGS.values()]
    tokens = int(recorded.batch.mask.sum())
    say(
        f"recorded: {recorded.batch.rows} samples, {tokens} response tokens, mean score "
        f"{float(recorded.scores.mean()):.2f}; {len(ours)} steps of Nereus, {time.monotonic() - began:.0f} s"
    )
    began = time.monotonic()
    theirs = ask(python, recorded)
    say(f"{len(theirs)} steps of verl, {time.monotonic() - began:.0f} s")
    found = {
        name: differences(recorded, mine, other, SETTINGS[name].adv_estimator in WITH_RETURNS)
        for name, mine, other in zip(SETTINGS, ours, theirs, strict=True)
    }
    clipped = {name: shares(mine) for name, mine in zip(SETTINGS, ours, strict=True)}
    sys.stdout.write(table(found, clipped))
    first, other = list(SETTINGS).index(FIRST), list(SETTINGS).index(OTHER)
    control = differences(recorded, ours[first], theirs[other], with_returns=True)
    complaints = [*beyond(found), *shows_nothing(clipped, control)]
    for complaint in complaints:
        say(complaint)
    say("FAILED" if complaints else "ok: every difference is within its bound")
    return 1 if complaints else 0


def say(text: str) -> None:
    """One line of the check."""
    print(f"verl-parity: {text}", flush=True)  # noqa: T201 - the command prints


def ask(python: Path, recorded: Recorded) -> list[StepOfVerl]:
    """What verl computes under each of SETTINGS."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    data = recorded.folder / "recorded.safetensors", recorded.folder / "answers.safetensors"
    save_file(flat(recorded), data[0], metadata={"asked": json.dumps(asked(recorded))})
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VERL", "RAY"))}
    done = subprocess.run(
        [str(python), "-W", "ignore", "-P", str(STEP), *map(str, data)],
        capture_output=True, text=True, check=False, timeout=STEP_SECONDS,
        env={**kept, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"verl-parity: verl's environment fails:\n{done.stderr[-3000:]}")
    with safe_open(data[1], framework="pt") as file:
        numbers = json.loads(file.metadata()["numbers"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    return [answer(index, row, tensors) for index, row in enumerate(numbers)]


def flat(recorded: Recorded) -> dict[str, Tensor]:
    """The recorded tensors by the names that parity_step.py reads."""
    batch = recorded.batch
    rollouts = {
        "tokens": batch.tokens,
        "prompt_lengths": batch.prompt_lengths,
        "response_lengths": batch.response_lengths,
        "scores": recorded.scores,
        "groups": recorded.groups,
        **recorded.columns,
    }
    weights = {f"{model}/{name}": data for model, held in recorded.weights.items() for name, data in held.items()}
    return {name: tensor.contiguous() for name, tensor in {**rollouts, **weights}.items()}


def asked(recorded: Recorded) -> dict[str, Any]:
    """The settings, and what else verl's side must know."""
    more = {"micro_batch": MICRO_BATCH, "samples_per_prompt": base_config().data.samples_per_prompt}
    return {
        "settings": [{**asdict(algorithm), **more} for algorithm in SETTINGS.values()],
        "weights": {model: list(held) for model, held in recorded.weights.items()},
        "model_folder": str(recorded.folder / "model"),
        "horizon_tokens": recorded.horizon_tokens,
    }


def answer(index: int, updates: dict[str, list[dict[str, float]]], tensors: dict[str, Tensor]) -> StepOfVerl:
    """The answer to the settings `index`."""
    weights: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, rest = key.partition("/")
        model, _, name = rest.partition("/")
        if name and int(number) == index:
            weights.setdefault(model, {})[name] = tensor
    advantages, returns = tensors[f"{index}/advantages"], tensors[f"{index}/returns"]
    return StepOfVerl(advantages=advantages, returns=returns, updates=updates, weights=weights)


def differences(recorded: Recorded, ours: StepOutcome, theirs: StepOfVerl, with_returns: bool) -> dict[str, float]:
    """The largest difference of each kind: absolute, of losses over max(1, |loss|), of gradient norms relative.

    "of update": the distance of the new weights over the length of the step that was taken, actor and critic. What is not a
    number stays one.
    """
    found: dict[str, list[float]] = defaultdict(list)
    found["advantages"] = per_token(recorded, ours.advantages, theirs.advantages)
    if with_returns:
        found["returns"] = per_token(recorded, ours.returns, theirs.returns)
    for model, rows in theirs.updates.items():
        for mine, row in zip(ours.updates, rows, strict=True):
            found["gradient norm"].append(abs(mine[f"{model}/grad_norm"] - row["grad_norm"]) / row["grad_norm"])
            for what, key in LOSSES:
                if key.startswith(model):
                    value = row[NAMES_OF_VERL.get(key, key)]
                    found[what].append(abs(mine[key] - value) / max(1.0, abs(value)))
    for model, held in theirs.weights.items():
        gaps = [ours.weights[model][name] - tensor for name, tensor in held.items()]
        found["weights"] += [float(gap.abs().max()) for gap in gaps]
        taken = [held[name] - recorded.weights[model][name] for name in held]
        found["of update"].append(length(gaps) / length(taken))
    return {kind: float(np.max(gaps)) for kind, gaps in found.items()}


def length(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of many tensors."""
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


def per_token(recorded: Recorded, ours: Tensor, theirs: Tensor) -> list[float]:
    """The largest difference at a response token of each row, of [rows, S] and verl's [rows, longest response]."""
    batch = recorded.batch
    return [
        float((ours[row][kept > 0] - theirs[row][: int(batch.response_lengths[row])]).abs().max())
        for row, kept in enumerate(batch.mask)
    ]


def shares(ours: StepOutcome) -> dict[str, float]:
    """The largest share of tokens over the optimizer steps at which each clip was active."""
    return {name: max(row[name] for row in ours.updates) for name in CLIPS}


def beyond(found: dict[str, dict[str, float]]) -> Iterator[str]:
    """What differs by more than its bound, not-a-number included."""
    for name, kinds in found.items():
        for kind, bound in BOUNDS.items():
            if kind in kinds and not kinds[kind] <= bound:
                yield f"{name}: {kind} differ by {kinds[kind]:.1e}, the bound is {bound:.0e}"


def shows_nothing(clipped: Mapping[str, Mapping[str, float]], control: Mapping[str, float]) -> Iterator[str]:
    """Why the comparison would miss an error: a clip that is never active, or other settings that pass too."""
    for clip in CLIPS:
        if not any(kinds[clip] > 0 for kinds in clipped.values()):
            yield f"{clip} is 0 under all settings: nothing is said of that clip"
    for kind in ("policy loss", "value loss", "gradient norm", "weights"):
        if control[kind] <= BOUNDS[kind]:
            yield f"{kind} of '{FIRST}' and '{OTHER}' agree to {control[kind]:.1e}: this check cannot fail"


def table(found: dict[str, dict[str, float]], clipped: dict[str, dict[str, float]]) -> str:
    """The differences by settings; below, the largest of each kind and its bound."""
    kinds = (*BOUNDS, "of update")
    worst = {kind: max((row[kind] for row in found.values() if kind in row), default=0.0) for kind in kinds}
    rows: list[Sequence[str]] = [("", *kinds, "clipped: ratio, dual, value")]
    for name, row in found.items():
        cells = (f"{row[kind]:.1e}" if kind in row else "-" for kind in kinds)
        rows.append((name, *cells, ", ".join(f"{clipped[name][clip]:.0%}" for clip in CLIPS)))
    rows.append(("largest", *(f"{worst[kind]:.1e}" for kind in kinds), ""))
    rows.append(("bound", *(f"{BOUNDS[kind]:.0e}" if kind in BOUNDS else "" for kind in kinds), ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
