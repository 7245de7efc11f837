"""Under what configuration a run goes on from a checkpoint: its plan, what of the script is left, what must stay. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nereus.checkpoint import Manifest, model_section
from nereus.config import Config, StageConfig
from nereus.errors import CheckpointError, ConfigError
from nereus.layout import STAGES, Plan, StagePlan, equal_shares

Section = Mapping[str, Any]
DEGREES = ("tp", "pp", "dp")
EXPERTS = ("ep", "etp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """From what a run goes on: the checkpoint's folder and manifest, and what the journal counts so far.

    `refused` says why newer checkpoints are not used. `state_version` is the last committed one, also where its steps
    are done again: versions only advance. `transition_count` counts those begun, `applied_count` those whose result
    the checkpoint holds.
    """

    folder: str
    manifest: Manifest
    refused: tuple[str, ...]
    state_version: int
    transition_count: int
    applied_count: int


def plan_section(plan: Plan) -> dict[str, dict[str, object]]:
    """The plan in the words of a configuration: degrees, and what is not the default."""
    return {name: _stage_section(stage) for name, stage in plan.stages()}


def _stage_section(stage: StagePlan) -> dict[str, object]:
    layout, section = stage.layout, dict[str, object]()
    defaults = StageConfig()
    unsaid: dict[str, object] = {
        "slots": tuple(range(layout.ranks)),
        "shares": equal_shares(sum(stage.shares), layout.dp),
        "pipeline": layout.pipeline if len(set(layout.pipeline)) == 1 else None,
        "distributed_optimizer": layout.distributed_optimizer if stage.stage != "train" else True,
    }
    for field in fields(StageConfig):
        value = getattr(stage if hasattr(stage, field.name) else layout, field.name)
        if field.name in DEGREES or value != unsaid.get(field.name, getattr(defaults, field.name)):
            section[field.name] = list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType]
    return section


def fitted(name: str, section: Section, slot_count: int) -> dict[str, Any]:
    """The stage `name` as it is where it fits on `slot_count` slots; else cut anew for them.

    Of the ways that keep TP and PP, TP alone, PP alone or none of them, with DP for the rest, the one that uses most
    slots is taken, of several the first. Whether it fits in memory is judged elsewhere.
    """
    tp, pp, dp = (int(section.get(degree, 1)) for degree in DEGREES)
    cp = int(section.get("cp", 1))
    listed: Sequence[int] = section.get("slots") or range(tp * cp * pp * dp)
    if max(listed) < slot_count:
        return dict(section)
    ways = [(tp, pp), (tp, 1), (1, pp), (1, 1)]
    used = [t * p * (slot_count // (t * p)) for t, p in ways]
    tp, pp = ways[used.index(max(used))]
    kept = {key: value for key, value in section.items() if key not in ("slots", "shares", "cp", *DEGREES, *EXPERTS)}
    if pp != int(section.get("pp", 1)):
        kept.pop("pipeline", None)
    return {**kept, "tp": tp, "pp": pp if name != "actor_generate" else 1, "dp": slot_count // (tp * pp)}


def agreeing(section: Section, stated: StageConfig, slot_count: int) -> dict[str, Any]:
    """The saved section without the slots, shares and pipeline that do not fit the degrees `stated` over it."""
    slots: Sequence[int] = section.get("slots") or ()
    ranks = stated.tp * stated.cp * stated.pp * stated.dp
    gone: set[str] = set()
    if len(slots) != ranks or max(slots, default=-1) >= slot_count:  # a degree of 0 is judged elsewhere
        gone.add("slots")
    if len(section.get("shares") or ()) != stated.dp:
        gone.add("shares")
    if len(section.get("pipeline") or ()) != stated.pp:
        gone.add("pipeline")
    return {key: value for key, value in section.items() if key not in gone}


def stated_stages(overrides: Sequence[str]) -> frozenset[str]:
    """The stages whose plan the overrides (key=value) say anything about."""
    keys = [override.partition("=")[0].strip() for override in overrides]
    if "plan" in keys:
        return frozenset(STAGES)
    return frozenset(name for name in STAGES if any(f"{key}.".startswith(f"plan.{name}.") for key in keys))


def remaining(config: Config, step: int) -> Config:
    """The configuration without the scripted changes that the state after `step` steps has behind it."""
    return replace(config, changes=tuple(change for change in config.changes if change.step > step))


def check_same_job(config: Config, before: Config, manifest: Manifest) -> None:
    """ConfigError or CheckpointError when what must stay over a resumption is not what it was."""
    model = model_section(config.model)
    for key, value in model_section(before.model).items():
        if key != "folder" and model[key] != value:
            raise ConfigError(f"model.{key}", model[key], f"expected {value!r}: a resumed run keeps its model")
    for key, found in manifest.model.items():
        if key != "folder" and model.get(key) != found:  # where the weights first came from
            raise CheckpointError(
                f"the checkpoint has model.{key} = {found!r}, the run's config has {model.get(key)!r}"
            )
    if config.run.seed != manifest.seed:
        expected = f"expected {manifest.seed}: a resumed run keeps its seed, random numbers follow from it"
        raise ConfigError("run.seed", config.run.seed, expected)
    if config.run.name != before.run.name:
        raise ConfigError("run.name", config.run.name, f"expected {before.run.name!r}: a resumed run keeps its folder")
