"""The plan that a job goes on with when slots are lost: every stage that used one is cut anew for those that are left."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import cast

from nereus.config import Config, PlanChange, StageConfig
from nereus.errors import InfeasiblePlan
from nereus.layout import Plan, changed_plan
from nereus.memory import plan_peaks
from nereus.resumption import fitted, plan_section


def renumbering(slots: int, lost: Collection[int]) -> dict[int, int]:
    """New numbers of the slots that are left, by old ones: dense, in order."""
    return {old: new for new, old in enumerate(slot for slot in range(slots) if slot not in lost)}


def surviving_plan(config: Config, plan: Plan, lost: Collection[int]) -> tuple[Config, Plan]:
    """The configuration and the plan without the slots `lost`, under the new numbers of `renumbering`.

    Stages without a lost slot stay as they are. InfeasiblePlan names what does not fit on the slots that are left.
    """
    numbers = renumbering(config.fleet.slots, lost)
    left = replace(config, fleet=replace(config.fleet, slots=len(numbers)))
    if not numbers:
        raise InfeasiblePlan("fleet.slots", 0, "at least one slot that is left")
    whole, cut = dict[str, object](), dict[str, StageConfig]()
    sections: Mapping[str, Mapping[str, object]] = plan_section(plan)
    for name, stage in plan.stages():
        if any(slot not in numbers for slot in stage.slots):
            section = {key: value for key, value in sections[name].items() if key not in ("slots", "shares")}
            cut[name] = _stage_config(fitted(name, {**section, "slots": [config.fleet.slots]}, len(numbers)))
        else:
            whole[name] = replace(stage, slots=tuple(numbers[slot] for slot in stage.slots))
    made = changed_plan(replace(plan, **whole), PlanChange(**cut), left)
    for peak in plan_peaks(left, made):
        if peak.total_bytes > left.fleet.slot_budget_bytes:
            expected = (
                f"a plan for {len(numbers)} slots: slot {peak.slot} would need {peak.total_bytes:,} bytes in {peak.phase}, "
                f"its budget is {left.fleet.slot_budget_bytes:,}"
            )
            raise InfeasiblePlan("fleet.slots", len(numbers), expected)
    return left, made


def _stage_config(section: Mapping[str, object]) -> StageConfig:
    values = {key: tuple(cast("list[int]", v)) if isinstance(v, list) else v for key, v in section.items()}
    return StageConfig(**values)  # type: ignore[arg-type]
