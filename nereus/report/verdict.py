"""A decision of the controller in a sentence, for people: from its entry in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus.control.written import CLASS
from nereus.report.display import change_text

Record = Mapping[str, Any]


def is_change(entry: Record) -> bool:
    """Whether the plan was changed, or would be but for a dry run."""
    return "chosen" in entry["admission"]


def verdict(entry: Record, plans: Mapping[str, str]) -> str:
    """What was decided and why. `plans` are the texts of plans by name; one that is not there is told by its name."""
    admission: Record = entry["admission"]
    if not is_change(entry):
        return f"no change: {_refusal(entry, admission, plans)}"
    chosen = admission["chosen"]
    words = _difference(entry["plan_id"], chosen["plan_id"], plans)
    words = f"would change (dry run) {words}" if entry["dry"] else f"change {words}"
    cost = f"{chosen['price_seconds']:.2f} ± {chosen['price_deviation_seconds']:.2f} s"
    if admission[CLASS] == "Forced":
        return f"{words}; forced, for {cost}: {admission['reason']}"
    why = f"over {chosen['horizon_steps']:.0f} expected steps"
    if not admission["promised"]:
        why = f"staying has surely lost {admission['regret_seconds']:.2f} s by now"
    return f"{words}; saves {_saving(chosen)} a step for {cost}, {why}"


def _refusal(entry: Record, admission: Record, plans: Mapping[str, str]) -> str:
    best = admission["best"]
    if best is None:
        return f"{admission['reason']}, {admission['detail']}"
    words = _difference(entry["plan_id"], best["plan_id"], plans)
    match admission["reason"]:
        case "saving" if best["saving_seconds"] <= 0:
            return f"no plan is expected to be faster; the nearest, {words}, would take {_saving(best, -1)} more a step"
        case "saving":
            return f"no plan is surely faster; the nearest, {words}, saves {_saving(best)} a step"
        case "price":
            cost = f"{best['price_seconds']:.2f} ± {best['price_deviation_seconds']:.2f} s"
            return (
                f"{words} saves {_saving(best)} a step, which in the steps that are left does not surely repay {cost}"
            )
        case "regret":
            waits = f"when staying has surely lost {admission['threshold_seconds']:.2f} s, so far {admission['regret_seconds']:.2f} s"
            return f"{words} saves {_saving(best)} a step; it is taken {waits}"
        case reason:
            return f"{reason}, {admission['detail']}"


def _saving(weighed: Record, sign: int = 1) -> str:
    return f"{sign * weighed['saving_seconds']:.3f} ± {weighed['saving_deviation_seconds']:.3f} s"


def _difference(before_id: str, after_id: str, plans: Mapping[str, str]) -> str:
    """What of the plan would be another."""
    before, after = plans.get(before_id), plans.get(after_id)
    if after is None or before is None:
        return f"plan {after_id}"
    return f"the same layouts on other slots, plan {after_id}" if before == after else change_text(before, after)
