"""The global plan as data: GlobalPlan, its StageChoices; the compact text that people write, and its reading.

    actor_train tp=2 pp=2 dp=4 micro_batch=2 recompute=full keep=weights; actor_generate tp=1 dp=16; ...

Stages are divided by semicolons or lines. `slots=0-7` puts a stage on a pool of its own; stages with equal slots share
them. What is left out has its default: degrees 1, all slots.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from nereus.config import ModelConfig
from nereus.costs.training import Recompute, Sharding
from nereus.errors import ConfigError, near
from nereus.layout import Layout, equal_shares
from nereus.planning.job import STAGE_NAMES

Keep = Literal["all", "weights", "nothing"]
"""What a model-stage leaves on its slots between its phases: everything; weights alone; nothing."""
DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp", "micro_batch")
WORDS: dict[str, tuple[str, ...]] = {
    "recompute": get_args(Recompute),
    "sharding": get_args(Sharding),
    "keep": get_args(Keep),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChoice:
    """How one model-stage is cut and what it leaves on its slots; `pool` is the index of the plan's pool it runs on.

    `micro_batch` is in samples of mean length. Generation takes `tp` and `dp` (its replicas) alone; its engine gives
    its memory back when others share its slots.
    """

    layout: Layout
    pool: int = 0
    micro_batch: int = 1
    recompute: Recompute = "none"
    sharding: Sharding = "optimizer"
    keep: Keep = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalPlan:
    """A StageChoice for every model-stage, and the pools: disjoint ordered slots that some stages share."""

    pools: tuple[tuple[int, ...], ...]
    stages: tuple[tuple[str, StageChoice], ...]

    def stage(self, name: str) -> StageChoice:
        """The choice for a model-stage. KeyError where the plan has none."""
        for known, choice in self.stages:
            if known == name:
                return choice
        raise KeyError(f"the plan has no {name}")

    def sharing(self, pool: int) -> tuple[str, ...]:
        """The model-stages of a pool."""
        return tuple(name for name, choice in self.stages if choice.pool == pool)

    @property
    def plan_id(self) -> str:
        """A short name that is a function of the plan's content."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:10]

    def __str__(self) -> str:
        return "; ".join(_stage_text(self, name, choice) for name, choice in self.stages)


def _stage_text(plan: GlobalPlan, name: str, choice: StageChoice) -> str:
    layout = choice.layout
    degrees = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "ep": layout.ep}
    words = [name, *(f"{key}={value}" for key, value in degrees.items() if value > 1 or key in ("tp", "dp"))]
    if layout.expert_tp != layout.tp:
        words.append(f"etp={layout.expert_tp}")
    if len(set(layout.pipeline)) > 1:
        words.append(f"pipeline={'/'.join(map(str, layout.pipeline))}")
    if name != "actor_generate":
        words += [f"micro_batch={choice.micro_batch}", f"keep={choice.keep}"]
    if name in ("actor_train", "critic_train"):
        words += [f"recompute={choice.recompute}", f"sharding={choice.sharding}"]
    elif choice.sharding == "full":
        words.append("sharding=full")
    words.append(f"slots={ranges_text(plan.pools[choice.pool])}")
    return " ".join(words)


def ranges_text(slots: Sequence[int]) -> str:
    """Slots in their order as ranges: 0-7,12."""
    parts: list[list[int]] = []
    for slot in slots:
        if parts and slot == parts[-1][1] + 1:
            parts[-1][1] = slot
        else:
            parts.append([slot, slot])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)


def parse_plan(text: str, stages: Sequence[str], layers_of: dict[str, ModelConfig], slots: Sequence[int]) -> GlobalPlan:
    """The plan that `text` says, for a job of these model-stages on these slots.

    Raises ConfigError, naming stage and key, for what is missing, unknown or malformed. Whether the layouts can hold
    the models is `evaluate`'s to say.
    """
    found: dict[str, dict[str, str]] = {}
    for line in re.split(r"[;\n]", text):
        words = line.split("#")[0].split()
        if words:
            name = words[0].rstrip(":")
            found[name] = _settings(name, words[1:], stages)
    missing = [name for name in stages if name not in found]
    if missing:
        raise ConfigError("plan", text, f"is missing {', '.join(missing)}: such as `{missing[0]} tp=1 dp=1`")
    pools: list[tuple[int, ...]] = []
    choices: list[tuple[str, StageChoice]] = []
    for name in stages:
        settings = found[name]
        taken = _slots(name, settings.pop("slots", ""), slots)
        if taken not in pools:
            pools.append(taken)
        choices.append((name, _choice(name, settings, layers_of[name].layers, pools.index(taken))))
    _check_disjoint(pools)
    return GlobalPlan(pools=tuple(pools), stages=tuple(choices))


def _settings(name: str, words: Sequence[str], stages: Sequence[str]) -> dict[str, str]:
    if name not in stages:
        other = "; the job has no such model" if name in STAGE_NAMES else ""
        raise ConfigError("plan", name, f"is not a model-stage of this job{other}; {near(name, stages)}")
    settings: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        known = (*DEGREES, "pipeline", "slots", *WORDS)
        if not equals or key not in known:
            raise ConfigError(f"plan.{name}", word, f"expected key=value; {near(key, known)}")
        settings[key] = value
    return settings


def _slots(name: str, text: str, slots: Sequence[int]) -> tuple[int, ...]:
    if not text:
        return tuple(slots)
    taken: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            raise ConfigError(f"plan.{name}.slots", text, "expected ranges such as 0-7,12")
        taken += range(int(match[1]), int(match[2] or match[1]) + 1)
    strange = sorted(set(taken) - set(slots))
    if strange or len(set(taken)) < len(taken) or not taken:
        raise ConfigError(f"plan.{name}.slots", text, f"expected slots of the fleet, each once: {ranges_text(slots)}")
    return tuple(taken)


def _check_disjoint(pools: Sequence[tuple[int, ...]]) -> None:
    seen: set[int] = set()
    for pool in pools:
        if seen & set(pool):
            raise ConfigError(
                "plan.slots", ranges_text(pool), "expected the same slots as another stage, or none of its"
            )
        seen |= set(pool)


def _choice(name: str, settings: dict[str, str], layers: int, pool: int) -> StageChoice:
    numbers: dict[str, int] = {}
    for key in DEGREES:
        value = settings.get(key, "1" if key != "etp" else settings.get("tp", "1"))
        if not re.fullmatch(r"[1-9]\d{0,5}", value):
            raise ConfigError(f"plan.{name}.{key}", value, "expected a whole number, at least 1")
        numbers[key] = int(value)
    for key, allowed in WORDS.items():
        if settings.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"plan.{name}.{key}", settings[key], f"expected one of {', '.join(allowed)}")
    if numbers["pp"] > layers:
        raise ConfigError(f"plan.{name}.pp", numbers["pp"], f"expected at most the model's layers, {layers}")
    pipeline = settings.get("pipeline")
    if pipeline is not None and not re.fullmatch(r"\d{1,4}(/\d{1,4})*", pipeline):
        raise ConfigError(f"plan.{name}.pipeline", pipeline, "expected layers of each pipeline rank, such as 17/15")
    cut = tuple(map(int, pipeline.split("/"))) if pipeline else equal_shares(layers, numbers["pp"])
    layout = Layout(
        tp=numbers["tp"],
        pp=numbers["pp"],
        dp=numbers["dp"],
        pipeline=cut,
        cp=numbers["cp"],
        ep=numbers["ep"],
        etp=numbers["etp"] if numbers["etp"] != numbers["tp"] else None,
    )
    return StageChoice(
        layout=layout,
        pool=pool,
        micro_batch=numbers["micro_batch"],
        recompute=cast("Recompute", settings.get("recompute", "none")),
        sharding=cast("Sharding", settings.get("sharding", "optimizer")),
        keep=cast("Keep", settings.get("keep", "all")),
    )
