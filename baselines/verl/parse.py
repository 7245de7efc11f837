"""verl's own judgement of command lines; runs in verl's environment, without Nereus (see check.py).

Reads JSON from stdin, {"commands": [[override, ...], ...], "model_folder": path}, and writes JSON to the file named as
its argument: for every command the job that `python -m verl.trainer.main_ppo --cfg job` composes, as `main` would get it,
and "refused": the last lines of the error of Hydra, or of verl's validation and its dataclasses; "" when accepted.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

SECTIONS = ("algorithm", "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic")
# not actor_rollout_ref.ref: a worker renames keys of it before they fit its dataclass; not reward: verl 0.9.1 never makes
# its dataclass, and cannot (its __post_init__ calls one that is not there)


def main() -> None:
    """Judges what stdin holds."""
    asked = json.load(sys.stdin)
    answers = [_judged(command, asked["model_folder"]) for command in asked["commands"]]
    Path(sys.argv[1]).write_text(json.dumps(answers), encoding="utf-8")


def _judged(overrides: list[str], model_folder: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    text, refused = _composed(overrides)
    if refused:
        return {"job": {}, "refused": refused}
    config: Any = OmegaConf.create(text)
    job = OmegaConf.to_container(config, resolve=True)
    try:
        _validate(config, model_folder)
    except Exception as error:  # noqa: BLE001 - whatever verl raises is its answer
        return {"job": job, "refused": "".join(traceback.format_exception_only(error)).strip()}
    return {"job": job, "refused": ""}


def _composed(overrides: list[str]) -> tuple[str, str]:
    """What verl's program prints for `--cfg job`, and the last lines of its error."""
    argv, sys.argv = sys.argv, ["main_ppo", "--cfg", "job", *overrides]
    job, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(job), contextlib.redirect_stderr(errors):
            runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=False)
    except SystemExit as ended:
        if ended.code:
            return "", "\n".join(errors.getvalue().strip().splitlines()[-4:])
    finally:
        sys.argv = argv
    return job.getvalue(), ""


def _validate(config: Any, model_folder: str) -> None:
    """verl's `validate_config`, as its `main` calls it, and every section as its dataclass.

    The critic's dataclass opens the model: a folder with the model's config.json stands for the one that is not here.
    """
    from omegaconf import OmegaConf, open_dict
    from verl.trainer.ppo.utils import need_critic, need_reference_policy  # pyright: ignore[reportMissingImports]
    from verl.utils.config import omega_conf_to_dataclass, validate_config  # pyright: ignore[reportMissingImports]

    with open_dict(config):
        config.critic.model.path = model_folder
        config.critic.model.load_tokenizer = False
    with contextlib.redirect_stdout(sys.stderr):
        validate_config(config, need_reference_policy(config), need_critic(config))
        for section in SECTIONS:
            omega_conf_to_dataclass(OmegaConf.select(config, section))


if __name__ == "__main__":
    main()
