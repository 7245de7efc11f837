"""What a driver that takes over live slots learns of them: from the journal what stands, from the slots what they hold.

Pure. A driver that was killed leaves the slots where they were: between steps, in a step, in a change of plan, or in a
recovery. Its journal says which state version stands and which step was the last; whether the slots hold exactly that
state, or that of one step more, follows from their counts of optimizer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nereus.control.written import plan_of
from nereus.layout import Plan
from nereus.storage import emu_name

Event = Mapping[str, Any]
Held = Literal["whole", "step done", "torn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """What stands by the journal: the state of version `state_version` after `step` steps, under `plan`.

    `digests` are those that are known of this very state, one of each EMU's component. `change` has the fields of a
    change that has begun and not ended; `committed` says whether it has brought about this version. `changed_step` is
    the step before which the plan was last changed.
    """

    step: int
    plan: Plan
    state_version: int
    data_position: int
    kl_coef: float
    optimizer_steps: Mapping[str, int]
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    change: Mapping[str, Any] | None = None
    committed: bool = False
    changed_step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """What a slot says once all it did is ended: the optimizer steps of each EMU that it holds a part of.

    `torn` says whether an optimizer step was cut short on it.
    """

    optimizer_steps: Mapping[str, int]
    torn: bool


def last_stand(events: Iterable[Event]) -> Stand | str:
    """What stands at the end of a journal; where nothing does on the slots, why."""
    stand: Stand | None = None
    why, changed_step = "its journal says too little", 0
    for event in events:
        match event["kind"]:
            case "run_started":
                stand, why = None, "the driver died before the first state was built"
            case "resumed" if not event.get("attached"):
                stand, why, changed_step = None, "the driver died before the checkpoint was on the slots", 0
            case "recovering":
                stand, why = None, "the driver died while the slots recovered"
            case "state" | "recovered" | "reattached" if "plan" in event:
                stand = _begun(event, changed_step)
            case _:
                stand = stand and _after(stand, event)
        changed_step = stand.changed_step if stand else changed_step
    return stand or why


def _begun(event: Event, changed_step: int) -> Stand:
    """The state that an event tells whole."""
    step, plan = event["step"] if "step" in event else event["next_step"] - 1, plan_of(event["plan"])
    return Stand(step=step, plan=plan, digests=event["digests"], changed_step=changed_step, **_counters(event))


def _after(stand: Stand, event: Event) -> Stand:
    match event["kind"]:
        case "step_done":
            return replace(stand, step=event["step"], digests={}, **_counters(event))
        case "checkpoint_saved" if event["step"] == stand.step and event["state_version"] == stand.state_version:
            return replace(stand, digests={**stand.digests, **event["digests"]})
        case "transition_started":
            return replace(stand, change=event)
        case "commit":
            return replace(
                stand,
                plan=plan_of(event["plan"]),
                digests={**stand.digests, **event["digests"]},
                committed=True,
                changed_step=stand.change["step"] if stand.change else stand.changed_step,
                **_counters(event),
            )
        case "transition_done" | "transition_failed":
            return replace(stand, change=None, committed=False)
        case _:
            return stand


def _counters(event: Event) -> dict[str, Any]:
    names = ("state_version", "data_position", "kl_coef", "optimizer_steps")
    return {name: event[name] for name in names}


def trained(plan: Plan) -> tuple[str, ...]:
    """The EMUs that optimizer steps change."""
    return tuple(emu_name(stage) for _, stage in plan.stages() if stage.stage == "train")


def held(stand: Stand, holds: Collection[Hold], updates: int) -> Held:
    """What the slots hold of what stands: that state whole, the one a step later, or one of no step.

    A step makes `updates` optimizer steps of each trained EMU. What a slot never held counts nowhere.
    """
    if any(hold.torn for hold in holds):
        return "torn"
    ahead: set[int] = set()
    for emu in trained(stand.plan):
        known = {hold.optimizer_steps[emu] for hold in holds if hold.optimizer_steps.get(emu, -1) >= 0}
        ahead |= {steps - stand.optimizer_steps.get(emu, 0) for steps in known}
    if ahead <= {0}:
        return "whole"
    return "step done" if ahead == {updates} and not stand.committed else "torn"


def one_step_more(stand: Stand, updates: int, prompts: int) -> Stand:
    """What stands where the slots have done a step of which the driver could not write down that it was done."""
    steps = {emu: stand.optimizer_steps.get(emu, 0) + updates for emu in trained(stand.plan)}
    return replace(
        stand,
        step=stand.step + 1,
        data_position=stand.data_position + prompts,
        optimizer_steps={**stand.optimizer_steps, **steps},
        digests={},
    )
