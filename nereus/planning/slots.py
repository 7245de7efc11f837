"""Planning for slots as this project's runtime has them: their ledgers' memory model, and plans from and to its own form.

The runtime offloads and recomputes nothing, its engines stay awake, and its optimizer state is sharded over replicas or
not at all; so there is one residency and fewer choices than a GPU job has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from nereus.config import Config
from nereus.costs.generation import equal_lengths
from nereus.fleet import CPU_SLOT, uniform
from nereus.layout import Layout, Plan, Stage, StagePlan, equal_shares
from nereus.lengths import largest_limit, largest_row_tokens, request_tokens
from nereus.memory import (
    OVERHEAD_BYTES,
    activation_bytes,
    engine_bytes,
    kv_bytes_per_token,
    logit_bytes,
    stage_weight_bytes,
)
from nereus.memory import resident as held_between
from nereus.model import ModelSpec, models_of
from nereus.planning.bytes import EngineBytes, StageBytes
from nereus.planning.evaluate import Problem
from nereus.planning.ground import Terrain
from nereus.planning.job import PHASES_OF, Job, language_model, scalar_model
from nereus.planning.plan import GlobalPlan, Keep, StageChoice
from nereus.planning.space import Space


@dataclass(frozen=True, kw_only=True)
class SlotMemory:
    """The memory model of a run's slots: what `nereus.memory` predicts, stage by stage, against the slot budget."""

    config: Config
    specs: Mapping[str, ModelSpec]
    margin_share: float = 0.0
    engine_share: float = 1.0
    keeps: tuple[Keep, ...] = ("all",)
    known: dict[tuple[str, Layout], tuple[dict[str, int], ...]] = field(
        default_factory=dict[tuple[str, Layout], tuple[dict[str, int], ...]], repr=False, compare=False
    )

    def stage(self, job: Job, name: str, choice: StageChoice) -> StageBytes:
        """The bytes of a stage that trains or infers: state always, activations and logits in its phases."""
        del job
        plan = stage_plan(self.config, name, choice, tuple(range(choice.layout.ranks)))
        spec, width = self.specs[plan.model], largest_row_tokens(self.config.data)
        kept: dict[str, float] = {}
        for held in self._held(spec, plan):
            kept = {part: max(kept.get(part, 0.0), float(size)) for part, size in held.items()}
        ranks = range(plan.layout.ranks)
        samples = self.config.data.prompts_per_step * self.config.data.samples_per_prompt
        logits = max(logit_bytes(spec, plan, rank, width, samples) for rank in ranks)
        phases: dict[str, dict[str, float]] = {PHASES_OF[name][0]: {**kept, "logits": float(logits)}}
        if name.endswith("_train"):
            part = samples // self.config.algorithm.mini_batches
            active = max(activation_bytes(spec, plan, rank, width, part) for rank in ranks)
            phases[PHASES_OF[name][1]] = {**kept, "activations": float(active)}
        return StageBytes(phases=phases, resident=kept, offloaded={}, moved=dict.fromkeys(phases, 0.0))

    def _held(self, spec: ModelSpec, plan: StagePlan) -> tuple[dict[str, int], ...]:
        key = (plan.model + plan.stage, plan.layout)
        if key not in self.known:
            self.known[key] = tuple(held_between(spec, plan, rank) for rank in range(plan.layout.ranks))
        return self.known[key]

    def engine(self, job: Job, layout: Layout) -> EngineBytes:
        """The bytes of the actor's engine, which stays awake, with the process's overhead and the weight sync's staging."""
        del job
        one = replace(layout, dp=1)
        plan = stage_plan(self.config, "actor_generate", StageChoice(layout=one), tuple(range(one.ranks)))
        key = ("engine", one)
        if key not in self.known:
            self.known[key] = ({"weights": max(stage_weight_bytes(self.config.model, plan).values())},)
        data = self.config.data
        requests = -(-data.prompts_per_step * data.samples_per_prompt // layout.dp)
        own = engine_bytes(self.config, self.known[key][0]["weights"], layout.tp, requests)
        fixed = {
            "weights": float(own["weights"]),
            "tables": float(own["tables"]),
            "workspace": float(own["workspace"]),
            "overhead": float(OVERHEAD_BYTES),
            "staging": float(self.config.transfer.bucket_bytes),
        }
        cache = float(own["kv_cache"])
        return EngineBytes(
            fixed=fixed,
            token_bytes=float(kv_bytes_per_token(self.config.model, layout.tp)),
            resident={**fixed, "cache": cache},
            least_bytes=cache,
            most_bytes=cache,
        )


def stage_plan(config: Config, name: str, choice: StageChoice, slots: tuple[int, ...]) -> StagePlan:
    """A choice in the runtime's own form, with equal shares."""
    model, kind = name.split("_")
    samples = config.data.prompts_per_step * config.data.samples_per_prompt
    if kind == "train":
        samples //= config.algorithm.mini_batches
    sharded = kind == "train" and choice.sharding != "none"
    return StagePlan(
        model=model,
        stage=cast("Stage", kind),
        layout=replace(choice.layout, distributed_optimizer=sharded),
        slots=slots,
        shares=equal_shares(samples, choice.layout.dp),
        micro_batch=choice.micro_batch,
    )


def runtime_plan(config: Config, plan: GlobalPlan) -> Plan:
    """A global plan in the runtime's own form: each stage on the first seats of its pool."""
    stages = {
        name: stage_plan(config, name, choice, plan.pools[choice.pool][: choice.layout.ranks])
        for name, choice in plan.stages
    }
    return Plan(
        actor_train=stages["actor_train"],
        actor_generate=stages["actor_generate"],
        critic_train=stages["critic_train"],
        reference_infer=stages["reference_infer"],
    )


def global_plan(config: Config, plan: Plan) -> GlobalPlan:
    """The runtime's plan as a global plan on one pool: stages that leave slots idle are taken to stand on its first."""
    stages = {
        name: StageChoice(
            layout=replace(stage.layout, distributed_optimizer=True),  # said by `sharding` here
            micro_batch=stage.micro_batch,
            sharding="optimizer" if stage.layout.distributed_optimizer or stage.stage != "train" else "none",
        )
        for name, stage in plan.stages()
    }
    order = ("actor_train", "critic_train", "reference_infer", "actor_generate")
    return GlobalPlan(pools=(tuple(range(config.fleet.slots)),), stages=tuple((name, stages[name]) for name in order))


def problem_of(config: Config) -> Problem:
    """What a run's configuration asks to plan: its models and batch on its slots. Responses count as long as allowed."""
    data = config.data
    device = replace(CPU_SLOT, memory_bytes=config.fleet.slot_budget_bytes)
    job = Job(
        actor=language_model(config.model),
        critic=scalar_model(config.model),
        reference=language_model(config.model),
        samples=data.prompts_per_step * data.samples_per_prompt,
        prompt_tokens=data.max_prompt_tokens,
        lengths=equal_lengths(largest_limit(data)),
        longest_tokens=request_tokens(data),
        mini_batches=config.algorithm.mini_batches,
        epochs=config.algorithm.epochs,
    )
    fleet = uniform(config.fleet.slots, device, slots_per_node=config.fleet.slots)
    memory = SlotMemory(config=config, specs=models_of(config.model))
    return Problem(job=job, terrain=Terrain(fleet=fleet), memory=memory)


def space_of(config: Config) -> Space:
    """What the runtime can carry out: all stages share the slots, nothing is recomputed or fully sharded."""
    most = max(1, config.data.prompts_per_step * config.data.samples_per_prompt)
    sizes = tuple(2**i for i in range(most.bit_length()) if 2**i <= min(most, 64))
    return Space(recomputes=("none",), shardings=("optimizer",), micro_batches=sizes, pools=False)
