"""How a system runs a job: a Cut for every model, where the models stand, the engines; and the job by its sizes.

A Setup is of any system, Nereus included, so that all are timed and judged by the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from nereus.config import Config
from nereus.costs.shape import Shape, shape_of
from nereus.sim.phases import critic_shape

Sharding = Literal["optimizer", "gradients", "full"]
Offload = Literal["nothing", "optimizer", "all"]
Sync = Literal["planned", "whole", "broadcast"]
SYSTEMS = ("nereus", "verl", "openrlhf")


@dataclass(frozen=True, kw_only=True, slots=True)
class RlJob:
    """One RL step by its sizes: the models' shapes, samples, mini-batches and epochs, caps of lengths.

    `critic` None: GRPO and the like. `padded` counts a sample as long as the cap (systems that do not pack).
    """

    actor: Shape
    critic: Shape | None
    reference: Shape | None
    samples: int
    samples_per_prompt: int = 1
    mini_batches: int = 1
    epochs: int = 1
    most_prompt_tokens: int
    most_response_tokens: int

    @property
    def longest_tokens(self) -> int:
        """The cap of a prompt and its response."""
        return self.most_prompt_tokens + self.most_response_tokens


def job_of(config: Config) -> RlJob:
    """The job of a run's configuration."""
    shape, data = shape_of(config.model), config.data
    return RlJob(
        actor=shape,
        critic=critic_shape(shape) if config.algorithm.adv_estimator == "gae" else None,
        reference=shape,
        samples=data.prompts_per_step * data.samples_per_prompt,
        samples_per_prompt=data.samples_per_prompt,
        mini_batches=config.algorithm.mini_batches,
        epochs=config.algorithm.epochs,
        most_prompt_tokens=data.max_prompt_tokens,
        most_response_tokens=data.max_response_tokens,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How samples become micro-batches: `samples` each, or with `tokens` above 0 as many as fit in that many tokens.

    `balanced` deals the samples of a batch so that replicas get about as many tokens. `forward_samples` and
    `forward_tokens` are of passes without gradients.
    """

    samples: int = 1
    tokens: int = 0
    forward_samples: int = 1
    forward_tokens: int = 0
    balanced: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a model that trains or infers runs on its slots: degrees, sharding over replicas, micro-batches, residency.

    `sharding`: optimizer state alone, gradients too (ZeRO-2), weights too (FSDP, ZeRO-3). `offload` is what waits in host
    memory between its phases; `on_host`: sharded weights come from host memory at every pass; `host_adam`: the optimizer
    runs there. `gradient_bytes` a parameter on the wire.
    """

    slots: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    pipeline: tuple[int, ...] = ()
    sharding: Sharding = "optimizer"
    packing: Packing = field(default_factory=Packing)
    recompute: bool = False
    offload: Offload = "nothing"
    on_host: bool = False
    host_adam: bool = False
    gradient_bytes: float = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """Generation: `replicas` engines of `tp` on `slots`; the share of a slot's memory that an engine takes.

    With `cache_bytes` the cache of a slot is given instead. `eager`: without graphs. `sleeps`: memory is given back between
    generations.
    """

    slots: tuple[int, ...]
    tp: int = 1
    replicas: int = 1
    memory_share: float = 0.9
    cache_bytes: float = 0.0
    eager: bool = False
    sleeps: bool = False
    most_sequences: int = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A system's configuration of a job on a fleet. `name` tells it from its siblings: what a table shows.

    `sync` says how new weights reach the engines: whole to every slot, tensor by tensor from one slot to all, or planned
    (as `nereus.sim.changes` routes them) in `planned_sync_seconds`.
    """

    system: str
    name: str
    actor: Cut
    critic: Cut | None
    reference: Cut | None
    engines: Engines
    sync: Sync
    planned_sync_seconds: float = 0.0
    on_policy: bool = True

    @property
    def colocated(self) -> bool:
        """Whether the engines stand on the actor's slots."""
        return bool(set(self.actor.slots) & set(self.engines.slots))

    def named(self, name: str) -> Setup:
        """The same under another name."""
        return replace(self, name=name)

    def __str__(self) -> str:
        cut, engines = self.actor, self.engines
        words = [self.system, self.name, _cut_text(cut)]
        if self.critic is not None and replace(self.critic, packing=cut.packing) != cut:
            words.append(f"critic {_cut_text(self.critic)}")
        words.append(f"gen {engines.replicas}xTP{engines.tp}{' eager' if engines.eager else ''}")
        return ", ".join(words)


def _cut_text(cut: Cut) -> str:
    kind = {
        "optimizer": f"TP{cut.tp}·PP{cut.pp}·DP{cut.dp}",
        "gradients": f"ZeRO-2 x{cut.dp}",
        "full": f"full x{cut.dp}",
    }
    packing = f"{cut.packing.tokens} tokens" if cut.packing.tokens else f"{cut.packing.samples} samples"
    words = [kind[cut.sharding], packing, *(["recompute"] if cut.recompute else [])]
    if cut.offload != "nothing":
        words.append(f"offload {cut.offload}")
    return " ".join(words)
