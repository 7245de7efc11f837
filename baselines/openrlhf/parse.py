"""OpenRLHF's own judgement of command lines; runs in OpenRLHF's environment, without Nereus (see check.py).

Reads JSON from stdin, {"commands": [[word, ...], ...]}, and writes JSON to the file named as its argument: for every
command "job", what `python -m openrlhf.cli.train_ppo_ray` makes of it, and "refused": what its argparse says, or one of
its assertions; "" when accepted. The program runs until it would start its trainer: its parser, its checks of the values
and of the layout (`train`); then the policy's loss and the schedules of the rates are made of the job, as its workers do.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIVEN: list[Any] = []  # the job, as the program hands it to its strategy


class Accepted(Exception):
    """The program would start its trainer now."""


def main() -> None:
    """Judges what stdin holds."""
    asked = json.load(sys.stdin)
    absent = runpy.run_path(str(Path(__file__).with_name("absent.py")))
    absent["install"]()
    with contextlib.redirect_stdout(sys.stderr):
        _hold_back(absent["Inert"])
        answers = [_judged(command) for command in asked["commands"]]
    Path(sys.argv[1]).write_text(json.dumps(answers), encoding="utf-8")


def _hold_back(inert: type[Any]) -> None:
    """No Ray, no engine and no worker is started: what would start them does nothing, and the trainer ends the program."""
    import openrlhf.trainer.ppo_trainer as trainer  # pyright: ignore[reportMissingImports]
    import openrlhf.trainer.ray as engines  # pyright: ignore[reportMissingImports]
    import openrlhf.utils  # pyright: ignore[reportMissingImports]
    import ray
    from openrlhf.trainer.ray import launcher  # pyright: ignore[reportMissingImports]

    ray.is_initialized = lambda: True
    ray.get = inert()
    of_groups: Any = importlib.import_module("ray.util.placement_group")  # ray.util has a function of that name
    of_groups.placement_group = inert()
    launcher.RayActorGroup = inert
    engines.create_vllm_engines = inert()
    openrlhf.utils.get_strategy = _strategy
    trainer.PPOTrainer = SimpleNamespace(remote=_accept)


def _strategy(args: Any) -> Any:
    GIVEN.append(args)
    return SimpleNamespace(args=args, print=lambda *_: None)


def _accept(*_: object, **__: object) -> None:
    raise Accepted


def _judged(words: list[str]) -> dict[str, Any]:
    argv, sys.argv = sys.argv, ["train_ppo_ray", *words]
    errors = io.StringIO()
    GIVEN.clear()
    try:
        with contextlib.redirect_stderr(errors):
            _started()
    except SystemExit:
        return {"job": {}, "refused": errors.getvalue().strip().splitlines()[-1]}
    except Exception as error:  # noqa: BLE001 - whatever OpenRLHF raises is its answer
        return {"job": {}, "refused": "".join(traceback.format_exception_only(error)).strip()}
    finally:
        sys.argv = argv
    return {"job": _plain(GIVEN[0]), "refused": ""}


def _started() -> None:
    """Runs the program until its trainer and its workers would start."""
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=False)
    except Accepted:
        _as_the_workers(GIVEN[0])
    else:
        raise RuntimeError("it ended before it made a trainer")


def _as_the_workers(args: Any) -> None:
    """What ppo_actor.py, ppo_critic.py and deepspeed.py make of the job when they start, as far as it needs no GPU."""
    import torch
    from openrlhf.models import PolicyLoss, ValueLoss  # pyright: ignore[reportMissingImports]
    from transformers.trainer import get_scheduler  # pyright: ignore[reportPrivateImportUsage]

    low, high = args.actor.eps_clip_low_high
    PolicyLoss(
        clip_eps_low=low,
        clip_eps_high=high,
        dual_clip=args.actor.dual_clip,
        policy_loss_type=args.actor.policy_loss_type,
    )
    ValueLoss(args.critic.value_clip)
    for model in (args.actor, args.critic):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=model.adam.lr)
        get_scheduler(model.lr_scheduler, optimizer, num_warmup_steps=0, num_training_steps=1)


def _plain(value: Any) -> Any:
    if isinstance(value, SimpleNamespace):
        return {key: _plain(part) for key, part in vars(value).items()}
    return list(value) if isinstance(value, tuple) else value


if __name__ == "__main__":
    main()
