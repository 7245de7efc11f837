"""What a plan is made for: the models of one RL step, its samples and lengths, and the phases in their order.

A step is blocks in sequence, and phases within a block run at once where their slots are apart:

  update_weights  the actor's new weights to the engines
  generate        responses
  infer           forward_actor, forward_reference, forward_critic, forward_reward: advantages wait for all of them
  train           update_actor, update_critic
  framework       what no device does

Generation waits for the last update, so the algorithm stays on-policy. Only with `on_policy` false (one step off) may the
next step's generation run beside this step's `infer` and `train`, and only on slots of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nereus.config import ModelConfig
from nereus.costs.generation import Lengths
from nereus.costs.shape import Shape, shape_of

MODELS = ("actor", "critic", "reference", "reward")
STAGE_NAMES = ("actor_train", "critic_train", "reference_infer", "reward_infer", "actor_generate")
"""Model-stages in the order in which the search decides them."""
BLOCK_OF = {
    "update_weights": "update_weights",
    "generate": "generate",
    "forward_actor": "infer",
    "forward_reference": "infer",
    "forward_critic": "infer",
    "forward_reward": "infer",
    "update_critic": "train",
    "update_actor": "train",
    "framework": "framework",
}
"""Phase -> the block that it belongs to; phases in the order of a step."""
PHASES_OF: dict[str, tuple[str, ...]] = {
    "actor_train": ("forward_actor", "update_actor"),
    "critic_train": ("forward_critic", "update_critic"),
    "reference_infer": ("forward_reference",),
    "reward_infer": ("forward_reward",),
    "actor_generate": ("generate",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """A model of the job: its configuration, and its shape with the head that it has."""

    config: ModelConfig
    shape: Shape


def language_model(config: ModelConfig) -> PlannedModel:
    """A model that gives logits: actor, reference."""
    return PlannedModel(config=config, shape=shape_of(config))


def scalar_model(config: ModelConfig) -> PlannedModel:
    """A model that gives one number a token: critic, reward. Its embedding is counted as rows that are looked up only."""
    shape = shape_of(config)
    rows = shape.position_rows + shape.vocab - 1
    return PlannedModel(config=config, shape=replace(shape, vocab=1, position_rows=rows, tied=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One RL step: `samples` responses to prompts of `prompt_tokens`, trained in `mini_batches` x `epochs`.

    PPO has a critic, GRPO none; a reward that is a rule has no model. `lengths` are of responses, `longest_tokens` is
    the cap of a prompt and its response together: memory must hold that whatever the mean is. `fullest_ratios` are (samples of
    a micro-batch, tokens of the fullest one over those of an average one); without them micro-batches are packed to the average.
    """

    actor: PlannedModel
    critic: PlannedModel | None = None
    reference: PlannedModel | None = None
    reward: PlannedModel | None = None
    samples: int
    prompt_tokens: float
    lengths: Lengths
    longest_tokens: float
    mini_batches: int = 4
    epochs: int = 1
    on_policy: bool = True
    fullest_ratios: tuple[tuple[int, float], ...] = ()

    @property
    def sample_tokens(self) -> float:
        """Mean tokens of a prompt and its response."""
        return self.prompt_tokens + self.lengths.mean_tokens

    def fullest_tokens(self, micro_batch: int) -> float:
        """Tokens of the fullest micro-batch of so many samples: by the ratio of the next smaller size that is told, none above the cap."""
        ratio = max((told for told in self.fullest_ratios if told[0] <= micro_batch), default=(1, 1.0))[1]
        return max(min(ratio * self.sample_tokens, self.longest_tokens) * micro_batch, self.longest_tokens)

    def model(self, stage: str) -> PlannedModel:
        """The model of a model-stage. KeyError names a stage that the job does not have."""
        found = {"actor": self.actor, "critic": self.critic, "reference": self.reference, "reward": self.reward}
        model = found[stage.partition("_")[0]]
        if model is None:
            raise KeyError(f"the job has no {stage}")
        return model

    def stages(self) -> tuple[str, ...]:
        """The model-stages of the job, in STAGE_NAMES' order."""
        return tuple(self._stages())

    def _stages(self) -> Iterator[str]:
        has = {"actor": True, "critic": self.critic, "reference": self.reference, "reward": self.reward}
        for name in STAGE_NAMES:
            if has[name.partition("_")[0]]:
                yield name
