"""What deciding cost a run: the seconds that its controller held the job up, and the processor's seconds of searches beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
SO_FAR = "controller/deciding_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deciding:
    """`seconds` of the job's way; `search_processor_seconds` of searches, `process_processor_seconds` of their process beyond."""

    seconds: float
    decisions_count: int
    searches_count: int
    search_processor_seconds: float
    process_processor_seconds: float


def deciding(events: Sequence[Event]) -> Deciding | None:
    """What the journal says of it; None where no controller decided, or simulated time passed meanwhile.

    Of a part that did not end, what its steps had told.
    """
    started = [event for event in events if event.get("kind") == "control_started"]
    if not started or "inventory" in started[0]:
        return None
    searches = [event for event in events if event.get("kind") == "search_done"]
    return Deciding(
        seconds=_seconds(events),
        decisions_count=sum(
            event.get("kind") == "decision" and event["entry"].get("is") == "Decision" for event in events
        ),
        searches_count=len(searches),
        search_processor_seconds=sum(float(each["processor_seconds"]) for each in searches),
        process_processor_seconds=sum(float(each.get("between_processor_seconds", 0.0)) for each in searches),
    )


def _seconds(events: Sequence[Event]) -> float:
    total = so_far = 0.0
    for event in events:
        match event.get("kind"):
            case "control_started":
                total, so_far = total + so_far, 0.0
            case "step_done":
                so_far = float(event["metrics"].get(SO_FAR, so_far))
            case "control_ended":
                so_far = float(event["seconds"])
            case _:
                pass
    return total + so_far


def deciding_lines(found: Deciding | None, training_seconds: float) -> list[str]:
    """The text, with the share of the training."""
    if found is None:
        return []
    share = ""
    if math.isfinite(training_seconds) and training_seconds > 0:
        share = f", {found.seconds / training_seconds:.3%} of the {training_seconds:.1f} s of training"
    searches, decisions = _counted(found.searches_count, "search", "es"), _counted(found.decisions_count, "decision")
    started = f", starting their process {found.process_processor_seconds:.2f} s"
    return [
        f"deciding: {decisions}; the job waited {found.seconds:.3f} s for it{share}",
        f"  {searches} beside the job took {found.search_processor_seconds:.2f} s of processor{started}",
    ]


def _counted(count: int, word: str, ending: str = "s") -> str:
    return f"{count} {word}{'' if count == 1 else ending}"
