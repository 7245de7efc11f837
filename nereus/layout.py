"""How a model-stage is cut over slots: Layout, StagePlan, Plan."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import Literal

from nereus.config import Config, PlanChange, StageConfig

Stage = Literal["train", "generate", "infer"]
STAGES = ("actor_train", "actor_generate", "critic_train", "reference_infer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's place in each parallel dimension."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of tensor, pipeline and data parallelism; `pipeline` holds decoder layers per pipeline rank.

    Ranks are ordered tp, then dp, then pp (Megatron's default order tp-cp-ep-dp-pp).
    """

    tp: int
    pp: int
    dp: int
    pipeline: tuple[int, ...]
    distributed_optimizer: bool = True

    @property
    def ranks(self) -> int:
        """How many slots the layout takes."""
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        return Coordinates(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def rank(self, at: Coordinates) -> int:
        """The rank that stands there."""
        return at.tp + self.tp * (at.dp + self.dp * at.pp)

    def layers(self, pp_rank: int) -> range:
        """The decoder layers of a pipeline rank."""
        first = sum(self.pipeline[:pp_rank])
        return range(first, first + self.pipeline[pp_rank])

    def __str__(self) -> str:
        uneven = f"({'/'.join(map(str, self.pipeline))})" if len(set(self.pipeline)) > 1 else ""
        return f"TP{self.tp}·PP{self.pp}{uneven}·DP{self.dp}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One model-stage's Layout, the slots of its ranks in order, and how a mini-batch's samples are shared.

    `shares` are samples per DP replica of one mini-batch (train), of the batch (infer, generate).
    """

    model: str
    stage: Stage
    layout: Layout
    slots: tuple[int, ...]
    shares: tuple[int, ...]
    micro_batch: int

    def rank_of(self, slot: int) -> int | None:
        """The rank that `slot` takes, None when it idles in this stage."""
        return self.slots.index(slot) if slot in self.slots else None

    def replica_slots(self, dp_rank: int) -> tuple[int, ...]:
        """The slots of one DP replica, in rank order."""
        return tuple(s for r, s in enumerate(self.slots) if self.layout.coordinates(r).dp == dp_rank)

    def output_slot(self, dp_rank: int) -> int:
        """The slot whose results speak for a replica: last pipeline rank, first tensor rank."""
        return self.slots[self.layout.rank(Coordinates(tp=0, pp=self.layout.pp - 1, dp=dp_rank))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The global plan: a StagePlan for every model-stage."""

    actor_train: StagePlan
    actor_generate: StagePlan
    critic_train: StagePlan
    reference_infer: StagePlan

    def stages(self) -> tuple[tuple[str, StagePlan], ...]:
        """(name, StagePlan) of every model-stage, in a fixed order."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))

    @property
    def plan_id(self) -> str:
        """A short name that is a function of the plan's content."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:10]

    def __str__(self) -> str:
        train, generate, critic = self.actor_train.layout, self.actor_generate.layout, self.critic_train.layout
        reference = self.reference_infer.layout
        return f"train {train} · critic {critic} · ref {reference} · gen {generate.dp}xTP{generate.tp}"


def equal_shares(samples: int, replicas: int) -> tuple[int, ...]:
    """Samples per replica, as equal as possible, larger first: equal_shares(8, 3) == (3, 3, 2)."""
    base, more = divmod(samples, replicas)
    return tuple(base + (replica < more) for replica in range(replicas))


def batch_shares(stage: StagePlan, samples: int) -> tuple[int, ...]:
    """`samples` in the proportion of the plan's shares: largest remainders get what whole numbers leave over.

    Shares (6, 2) of 12 samples are (9, 3); with all shares 0 the parts are equal.
    """
    total = sum(stage.shares)
    if not total:
        return equal_shares(samples, stage.layout.dp)
    parts = [share * samples // total for share in stage.shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-(stage.shares[i] * samples % total), i))
    for index in by_remainder[: samples - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


def _stage_plan(config: Config, name: str, stage: StageConfig) -> StagePlan:
    model, kind = name.split("_")
    layout = Layout(
        tp=stage.tp,
        pp=stage.pp,
        dp=stage.dp,
        pipeline=stage.pipeline or equal_shares(config.model.layers, stage.pp),
        distributed_optimizer=stage.distributed_optimizer and kind == "train",
    )
    samples = config.data.prompts_per_step * config.data.samples_per_prompt
    if kind == "train":
        samples //= config.algorithm.mini_batches
    return StagePlan(
        model=model,
        stage=kind,  # type: ignore[arg-type]  # the names of STAGES end in a Stage
        layout=layout,
        slots=stage.slots or tuple(range(layout.ranks)),
        shares=stage.shares or equal_shares(samples, stage.dp),
        micro_batch=stage.micro_batch,
    )


def first_plan(config: Config) -> Plan:
    """The plan that a run starts with."""
    return Plan(**{name: _stage_plan(config, name, getattr(config.plan, name)) for name in STAGES})


def changed_plan(plan: Plan, change: PlanChange, config: Config) -> Plan:
    """The plan after a scripted change: named stages are cut anew, the others stay."""
    stages = {name: getattr(change, name) for name in STAGES if getattr(change, name) is not None}
    return replace(plan, **{name: _stage_plan(config, name, stage) for name, stage in stages.items()})
