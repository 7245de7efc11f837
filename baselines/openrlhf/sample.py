"""A sample of OpenRLHF's logs, made by OpenRLHF's own code; runs in OpenRLHF's environment, without Nereus.

`build/openrlhf/env/bin/python -P baselines/openrlhf/sample.py FOLDER < WORDS` (a command line's words as JSON) writes
console.log and run.wandb to FOLDER. Its PPOTrainer.fit, experience maker, actor's and critic's trainers, losses, replay
buffers and loggers (console, W&B offline) work off three steps in this process. Not theirs are the models (one embedding
each), the responses (random tokens), the strategy (plain backward and step in place of DeepSpeed) and the engines (none).
The numbers are nobody's performance; tests/baselines/samples has what this wrote.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

STEPS, PROMPTS, SAMPLES_PER_PROMPT, VOCABULARY, PROMPT_TOKENS, LONGEST = 3, 4, 2, 32, 5, 12
SMALLER = {  # in place of what the command line says, so that one process on a CPU can do it
    "--rollout.batch_size": [PROMPTS],
    "--rollout.n_samples_per_prompt": [SAMPLES_PER_PROMPT],
    "--rollout.micro_batch_size": [1],
    "--train.batch_size": [PROMPTS],
    "--train.micro_batch_size": [2],
    "--data.max_len": [PROMPT_TOKENS + LONGEST],
}
LEFT_OUT = ("--train.dynamic_batch_enable", "--ds.packing_samples")  # they want process groups and flash attention
BASIC = ("WANDB_MODE", "offline"), ("WANDB_API_KEY", "0" * 40), ("WANDB_SILENT", "true"), ("WANDB_CONSOLE", "off")
QUIET = (
    "WANDB__DISABLE_STATS",
    "WANDB__DISABLE_META",
    "WANDB__DISABLE_MACHINE_INFO",
    "WANDB_DISABLE_GIT",
    "WANDB_DISABLE_CODE",
)


def main() -> None:
    """Writes the sample to the folder that is named."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    absent, parse = (runpy.run_path(str(Path(__file__).with_name(name))) for name in ("absent.py", "parse.py"))
    absent["install"]()
    import openrlhf.trainer.ppo_trainer as of_trainer  # pyright: ignore[reportMissingImports]

    trainer_class = of_trainer.PPOTrainer.__ray_metadata__.modified_class
    with tempfile.TemporaryDirectory() as wandb_folder:
        os.environ.update({**dict(BASIC), **dict.fromkeys(QUIET, "true"), "WANDB_DIR": wandb_folder})
        parse["_hold_back"](absent["Inert"])
        judged = parse["_judged"](_smaller(json.load(sys.stdin)))
        if judged["refused"]:
            raise SystemExit(f"OpenRLHF refuses the command line: {judged['refused']}")
        console = logging.FileHandler(folder / "console.log", mode="w", encoding="utf-8")
        console.setFormatter(of_trainer.logger.handlers[0].formatter)
        of_trainer.logger.addHandler(console)
        _trainer(trainer_class, parse["GIVEN"][0]).fit()
        importlib.import_module("wandb").teardown()  # its process has written everything when it has ended
        (file,) = Path(wandb_folder).glob("wandb/offline-run-*/*.wandb")
        shutil.copy(file, folder / "run.wandb")


def _smaller(words: list[str]) -> list[str]:
    for flag, values in SMALLER.items():
        words += [flag, *map(str, values)]
    return [word for word in words if word not in LEFT_OUT]


class Embedding(torch.nn.Module):
    """Called like OpenRLHF's actor or critic: log-probabilities of the tokens, or values."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, outputs)

    def forward(self, sequences: torch.Tensor, action_mask: torch.Tensor, **_: Any) -> tuple[torch.Tensor, Any]:
        """(batch, actions) of either, and an output with the entropy of every token."""
        found = self.table(sequences[:, :-1])
        if found.shape[-1] == 1:
            return found[:, -action_mask.shape[1] :, 0] * action_mask, SimpleNamespace()
        logs = found.log_softmax(-1)
        taken = logs.gather(-1, sequences[:, 1:, None])[..., 0]
        entropy = -(logs.exp() * logs).sum(-1)
        return taken[:, -action_mask.shape[1] :] * action_mask, SimpleNamespace(entropy=entropy)


class Strategy:
    """What the trainers ask of a strategy, without DeepSpeed."""

    ring_attn_group = None

    def __init__(self, args: Any) -> None:
        self.args = args
        self.accumulated_gradient = args.train.batch_size // args.train.micro_batch_size
        self.turn, self.norm = 0, 0.0

    def is_rank_0(self) -> bool:
        """The only one."""
        return True

    def print(self, *words: Any) -> None:
        """Nothing."""
        del words

    def all_reduce(self, data: Any) -> Any:
        """Of one process."""
        return data

    def backward(self, loss: torch.Tensor, model: torch.nn.Module, optimizer: Any) -> None:
        """Adds to the gradients, as an accumulating engine does."""
        del model, optimizer
        (loss / self.accumulated_gradient).backward()

    def optimizer_step(self, optimizer: Any, model: torch.nn.Module, scheduler: Any, name: str) -> None:
        """A step at the end of an accumulation."""
        del name
        self.turn += 1
        if self.turn % self.accumulated_gradient == 0:
            self.norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    def get_grad_norm(self, model: torch.nn.Module) -> float:
        """That of the last step."""
        del model
        return self.norm


class Group:
    """A RayActorGroup of one model in this process; `fit` is that of the trainer it is given."""

    def __init__(self, model: torch.nn.Module, trainer: Any = None) -> None:
        self.model, self.trainer = model, trainer

    def async_run_method(self, method_name: str, **words: Any) -> list[Any]:
        """What each worker answers: there is one."""
        if method_name != "fit":
            return [None]
        status = self.trainer.ppo_train(**({"kl_ctl": words["kl_ctl"]} if "kl_ctl" in words else {}))
        self.trainer.replay_buffer.clear()
        return [status]

    def async_run_method_batch(self, method_name: str, **lists: Any) -> list[Any]:
        """One answer for each batch."""
        if method_name == "append":
            for experience in lists["experience"]:
                self.trainer.replay_buffer.append(experience)
            return [None]
        with torch.no_grad():
            return [[self.model(*one)[0]] for one in zip(lists["sequences"], lists["action_mask"], strict=True)]


class Samples:
    """A generator of samples: random responses, made into experiences by OpenRLHF's own generator."""

    def __init__(self, process: Any) -> None:
        self.process, self.turn = process, 0

    def generate_samples(self, **words: Any) -> tuple[list[Any], None, int, bool]:
        """Samples, no pass rate, how many prompts were taken, and whether none are left."""
        self.turn += 1
        made = [self.process(self._response(), **words) for _ in range(PROMPTS * SAMPLES_PER_PROMPT)]
        return made, None, PROMPTS, self.turn == STEPS

    def _response(self) -> dict[str, Any]:
        count = int(torch.randint(2, LONGEST + 1, ()))
        tokens = torch.randint(0, VOCABULARY, (PROMPT_TOKENS + count,)).tolist()
        reward = torch.rand(1)
        return {
            "prompt": "prompt", "label": "label", "images": None, "mm_train_inputs": None, "observation_tokens": tokens,
            "action_ranges": [(PROMPT_TOKENS, len(tokens))], "rollout_log_probs": None, "truncated": count == LONGEST,
            "reward": reward, "scores": reward, "extra_logs": {},
        }  # fmt: skip


class Loader:
    """As much of a data loader as `fit` asks for."""

    def __len__(self) -> int:
        return STEPS * PROMPTS

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save."""
        return {}


def _trainer(trainer_class: type[Any], args: Any) -> Any:
    """OpenRLHF's trainer with its own parts, all in this process."""
    import openrlhf.trainer.ray.ppo_actor as of_actor  # pyright: ignore[reportMissingImports]
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer  # pyright: ignore[reportMissingImports]
    from openrlhf.trainer.ppo_utils.experience import Experience  # pyright: ignore[reportMissingImports]
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # pyright: ignore[reportMissingImports]
    from openrlhf.trainer.ray.ppo_critic import CriticPPOTrainer  # pyright: ignore[reportMissingImports]

    _without_gpu(of_actor, Experience)
    torch.manual_seed(1)
    args.eval.steps = args.ckpt.save_steps = float("inf")
    strategy = Strategy(args)
    actor, critic, reference = Embedding(VOCABULARY), Embedding(1), Embedding(VOCABULARY)
    reference.load_state_dict({key: value + 0.1 * torch.randn_like(value) for key, value in actor.state_dict().items()})
    parts = [(model, *_optimizer(model, rates)) for model, rates in ((actor, args.actor), (critic, args.critic))]
    (_, *of_the_actor), (_, *of_the_critic) = parts
    common = {"micro_train_batch_size": args.train.micro_batch_size, "dataloader_pin_memory": False}
    actor_trainer = of_actor.ActorPPOTrainer(strategy, actor, None, *of_the_actor, **common)
    critic_trainer = CriticPPOTrainer(strategy, critic, *of_the_critic, value_clip=args.critic.value_clip, **common)
    tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda *_, **__: ["a sample"])
    trainer = object.__new__(trainer_class)
    trainer.generate_kwargs = {"max_len": args.data.max_len}
    trainer.prompts_dataloader, trainer.eval_dataloader = Loader(), None
    trainer.samples_generator = Samples(SamplesGenerator._process_response_into_experience.__get__(trainer))  # noqa: SLF001
    groups = (Group(actor, actor_trainer), Group(critic, critic_trainer), None, Group(reference))
    BasePPOTrainer.__init__(trainer, strategy, *groups, None, tokenizer)
    return trainer


def _optimizer(model: torch.nn.Module, rates: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rates.adam.lr)
    return optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)


def _without_gpu(of_actor: Any, experience: Any) -> None:
    """Nothing goes to a GPU; Ray hands over what it is given."""
    import ray

    ray.get = ray.put = lambda value: value
    torch.cuda.current_device = lambda: 0
    torch.cuda.empty_cache = lambda: None
    experience.to_device = lambda self, device: None  # noqa: ARG005
    of_actor.torch_dist_barrier_and_cuda_sync = lambda: None


if __name__ == "__main__":
    main()
