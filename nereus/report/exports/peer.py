"""What every export has: the plan with its job and fleet, which plans a peer can express at all, and its refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from nereus.costs.generation import WORKSPACE_BYTES
from nereus.errors import ConfigError
from nereus.fleet import Fleet
from nereus.planning.evaluate import Evaluation
from nereus.planning.job import Job
from nereus.planning.plan import GlobalPlan, StageChoice
from nereus.planning.space import Space

Value = str | float | bool
Settings = Mapping[str, Value]
TRAINED = ("actor_train", "critic_train")


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A judged plan to be written, for a job on a fleet; `model_path` names the actor's model as the peer shall load it."""

    job: Job
    judged: Evaluation
    fleet: Fleet
    model_path: str
    samples_per_prompt: int

    @property
    def plan(self) -> GlobalPlan:
        """The plan."""
        return self.judged.plan

    def choice(self, name: str) -> StageChoice:
        """The choice of a model-stage that the job has."""
        return self.plan.stage(name)

    @property
    def trained(self) -> tuple[str, ...]:
        """The stages of the job that train or infer."""
        return tuple(name for name in self.job.stages() if name != "actor_generate")

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return self.job.samples // self.samples_per_prompt

    @property
    def nodes(self) -> tuple[int, int]:
        """(nodes, slots of each). ConfigError where nodes differ in size or device."""
        kinds = {(len(node.slots), node.device.name) for node in self.fleet.nodes}
        if len(kinds) > 1:
            raise ConfigError(
                "--fleet", str(self.fleet), "expected equal nodes of one device: peers place ranks evenly"
            )
        return len(self.fleet.nodes), len(self.fleet.nodes[0].slots)

    def packed_tokens(self, name: str) -> int:
        """Tokens of a stage's micro-batch: packed samples of mean length, or the longest one."""
        return ceil(max(self.choice(name).micro_batch * self.job.sample_tokens, self.job.longest_tokens))

    @property
    def engine_share(self) -> float:
        """The share of a slot's memory that an engine takes: weights, workspace and cache."""
        for peak in self.judged.peaks:
            if peak.phase == "generate":
                own = (size for part, size in peak.components.items() if part.startswith("actor_generate."))
                return ceil(100 * sum(own) / peak.room_bytes) / 100
        return WORKSPACE_BYTES / self.fleet.nodes[0].device.memory_bytes


def even_spaces(job: Job, fleet: Fleet) -> Iterator[Space]:
    """Spaces of plans as peers have them: all models cut alike over all slots, fully sharded or by TP and PP."""
    slots = len(fleet.slots)
    yield Space(shardings=("full",), only_tp_pp=((1, 1),), pools=False, every_slot=True)
    for tp in (1, 2, 4, 8):
        for pp in range(1, job.actor.config.layers + 1):
            if slots % (tp * pp) == 0 and job.actor.config.layers % pp == 0:
                yield Space(shardings=("optimizer",), only_tp_pp=((tp, pp),), pools=False, every_slot=True)


def check_even(export: Export, peer: str) -> None:
    """ConfigError for what no peer expresses: pools apart, idle slots, uneven pipelines, models cut differently."""
    _, _ = export.nodes
    if len(export.plan.pools) > 1:
        raise ConfigError("plan.slots", str(export.plan), f"expected one pool: {peer} shares all slots here")
    actor = export.choice("actor_train")
    slots = len(export.fleet.slots)
    for name, choice in export.plan.stages:
        layout, key = choice.layout, f"plan.{name}"
        if layout.ranks != slots:
            raise ConfigError(key, str(layout), f"expected all {slots} slots: {peer} leaves none idle")
        if len(set(layout.pipeline)) > 1:
            raise ConfigError(f"{key}.pipeline", list(layout.pipeline), f"expected equal parts: {peer} cuts evenly")
        if name == "actor_generate":
            continue
        if (layout.tp, layout.pp, layout.cp, layout.ep) != (
            actor.layout.tp, actor.layout.pp, actor.layout.cp, actor.layout.ep,
        ):  # fmt: skip
            raise ConfigError(key, str(layout), f"expected the actor's {actor.layout}: {peer} cuts all models alike")
        if name in TRAINED and choice.sharding != actor.sharding:
            raise ConfigError(
                f"{key}.sharding", choice.sharding, f"expected {actor.sharding}: one engine trains in {peer}"
            )
    if export.job.reward is not None:
        raise ConfigError("--reward", "a model", f"expected rule: a reward model of {peer} is not exported")


def check_plain_shards(export: Export, peer: str) -> None:
    """ConfigError where fully sharded models are cut otherwise too."""
    for name in export.trained:
        layout = export.choice(name).layout
        if (layout.tp, layout.pp, layout.cp, layout.ep) != (1, 1, 1, 1):
            expected = f"expected tp=1 pp=1 cp=1 ep=1: a fully sharded model of {peer} is cut no further here"
            raise ConfigError(f"plan.{name}", str(layout), expected)


def hydra(settings: Settings) -> str:
    """Settings as key=value overrides, one a line, to be continued by a shell."""
    words = (f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items())
    return " \\\n  ".join(words)
