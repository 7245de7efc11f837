"""Why a run's plan is what it is: every decision with what was known, what was weighed, and what it turned out to be.

A fold of the journal. Nothing is computed again but the memory of candidates, which follows from the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from nereus.config import Config
from nereus.control.written import CLASS, plan_of
from nereus.errors import JournalError
from nereus.layout import Plan
from nereus.memory import plan_peaks
from nereus.report.deciding import Deciding, deciding, deciding_lines
from nereus.report.plan_text import bytes_text
from nereus.report.record import structured
from nereus.report.summary import seconds_of_training

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a change: its pause, and the steps under its plan (measured and predicted means, in seconds)."""

    state: str
    pause_seconds: float = 0.0
    lost_seconds: float = 0.0
    steps: int = 0
    measured_seconds: float = 0.0
    predicted_seconds: float = 0.0
    probation: Record | None = None


@dataclass(frozen=True, kw_only=True)
class Explained:
    """One decision: the entry as the journal has it, the search before it, and the outcome where the plan was changed."""

    line_id: int
    entry: Record
    search: Record | None
    asked: Record | None
    outcome: Outcome | None

    @property
    def step(self) -> int:
        """The step before which it was made."""
        return int(self.entry["step"])

    @property
    def admission(self) -> Record:
        """What was decided, and why."""
        return self.entry["admission"]

    @property
    def chosen(self) -> Record | None:
        """The candidate that was taken, or came nearest."""
        return self.admission.get("chosen") or self.admission.get("best")

    @property
    def taken(self) -> bool:
        """Whether the plan was changed."""
        return "chosen" in self.admission and not self.entry["dry"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Every decision of a run, and the plans that its journal speaks of, by name."""

    config: Config
    plans: Mapping[str, Plan]
    decisions: tuple[Explained, ...]
    deciding: Deciding | None
    training_seconds: float
    searches: tuple[Record, ...]

    def peak_bytes(self, plan_id: str) -> int:
        """The predicted peak of the fullest slot under a plan, without margin."""
        return max(peak.total_bytes for peak in plan_peaks(self.config, self.plans[plan_id]))


def explained(records: Sequence[Record]) -> Explanation:
    """The explanation of a journal. JournalError where its run has no controller that decides."""
    config: Config | None = None
    plans: dict[str, Plan] = {}
    decisions: list[Explained] = []
    asked: dict[int, Record] = {}
    told: dict[int, Record] = {}
    done: list[Record] = []
    for index, record in enumerate(records):
        kind = record["kind"]
        if kind in ("run_started", "resumed"):
            config = structured(Config, record["config"])
        elif kind == "control_started":
            first = plan_of(record["plan"])
            plans[first.plan_id] = first
        elif kind == "told" and record["event"][CLASS] == "SearchDone":
            told[record["event"]["search_id"]] = record["event"]
            plans |= {each["plan_id"]: plan_of(each["plan"]) for each in record["event"]["candidates"]}
        elif kind == "commanded" and record["command"][CLASS] == "Search":
            asked[record["command"]["search_id"]] = record["command"]
        elif kind == "search_done":
            done.append(record)
        elif kind == "decision" and record["entry"][CLASS] == "Decision":
            number = record["entry"]["search_id"]
            decisions.append(
                Explained(
                    line_id=int(record["seq"]),
                    entry=record["entry"],
                    search=next((each for each in done if each["search_id"] == number), None),
                    asked=asked.get(number),
                    outcome=_outcome(records[index + 1 :], record["entry"]),
                )
            )
    if config is None or not plans:
        raise JournalError("the run has no controller to explain: its nereus.policy is script")
    return Explanation(
        config=config,
        plans=plans,
        decisions=tuple(decisions),
        deciding=deciding(records),
        training_seconds=seconds_of_training(records),
        searches=tuple(done),
    )


def _outcome(later: Sequence[Record], entry: Record) -> Outcome | None:
    """What the records after a change say of it."""
    if "chosen" not in entry["admission"] or entry["dry"]:
        return None
    steps: list[Record] = []
    state, pause, lost, probation = "under way", 0.0, 0.0, None
    for record in later:
        event: Record = record.get("event", {})
        name = event.get(CLASS, "")
        if record["kind"] == "transition_done" and state == "under way":
            lost = sum(record.get("interleaved_seconds", {}).values()) + float(record["pause_seconds"])
        if name in ("TransitionDone", "StateRestored"):
            if state != "under way":
                break
            state, pause = "done", float(event.get("pause_seconds", 0.0))
        elif name == "TransitionFailed":
            return Outcome(state=f"failed: {event['reason']}")
        elif name == "StepObserved":
            steps.append(event)
        elif record["kind"] == "decision" and record["entry"][CLASS] == "ProbationEnded":
            probation = record["entry"]
    predicted = float(entry["admission"]["chosen"]["step_seconds"])
    return Outcome(
        state=state,
        pause_seconds=pause,
        lost_seconds=lost or pause,
        steps=len(steps),
        measured_seconds=mean(float(each["step_seconds"]) for each in steps) if steps else 0.0,
        predicted_seconds=predicted,
        probation=probation,
    )


def render(explanation: Explanation, step: int | None = None) -> str:
    """The text: all decisions, or those before `step` (the last one before it where there is none)."""
    chosen = explanation.decisions
    if step is not None:
        known = [each.step for each in chosen if each.step <= step]
        chosen = tuple(each for each in chosen if known and each.step == max(known))
        if not chosen:
            return f"nothing was decided before step {step} or earlier\n"
    lines = [line for each in chosen for line in (*_lines(explanation, each), "")]
    return "\n".join([*lines, *deciding_lines(explanation.deciding, explanation.training_seconds)]) + "\n"


def _lines(explanation: Explanation, one: Explained) -> Iterator[str]:
    entry = one.entry
    yield f"before step {one.step}, policy {entry['policy']}: {verdict(explanation, one)}"
    present = explanation.plans.get(entry["plan_id"])
    yield f"  present     {present or entry['plan_id']}"
    if entry["present_seconds"] is not None:
        yield (
            f"              {entry['present_seconds']:.3f} s a step expected, steps scatter by {entry['noise_share']:.1%}, "
            f"{bytes_text(explanation.peak_bytes(entry['plan_id']))} on the fullest slot"
        )
    if (horizon := entry["horizon"]) is not None:
        ends = f"{horizon['seen_count']:.1f} plans' lives ended in {horizon['seen_steps']:.0f} steps"
        yield f"  horizon     {horizon['expected_steps']:.1f} of {horizon['remaining_steps']} steps that are left ({ends})"
    if one.asked is not None:
        found = one.search
        took = f": {found['evaluated_count']:,} nodes, {found['priced_count']} graphs" if found else ""
        beside = f", {found['processor_seconds']:.2f} s of processor beside the job" if found else ""
        yield f"  search {one.asked['search_id']:<4} {one.asked['request']['reason']}{took}{beside}"
    if entry["weighed"]:
        yield from _table(explanation, one)
    if one.outcome is not None:
        yield from _turned_out(one, one.outcome)


def verdict(explanation: Explanation, one: Explained) -> str:
    """What was decided, in a line."""
    admission, chosen = one.admission, one.chosen
    plan = explanation.plans.get(chosen["plan_id"], chosen["plan_id"]) if chosen else None
    dry = " (dry run: nothing is changed)" if one.entry["dry"] else ""
    match admission[CLASS]:
        case "Admitted":
            why = "its horizon promises it" if admission["promised"] else "regret alone"
            regret = f"staying lost {admission['regret_seconds']:.2f} s of {admission['threshold_seconds']:.2f} s"
            return f"to {plan}, {why}; {regret}{dry}"
        case "Forced":
            return f"to {plan}, forced: {admission['reason']}{dry}"
        case _:
            return f"stays ({admission['reason']}): {admission['detail']}"


def _table(explanation: Explanation, one: Explained) -> Iterator[str]:
    yield "  candidates     step s           saves s          price s        gain s (least)        fullest slot  plan"
    chosen = one.chosen or {}
    for each in sorted(one.entry["weighed"], key=lambda w: (bool(w["barred"]), -w["least_gain_seconds"], w["plan_id"])):
        mark = "*" if each["plan_id"] == chosen.get("plan_id") else " "
        gain = (
            f"{each['gain_seconds']:8.2f} ± {each['gain_deviation_seconds']:<6.2f} ({each['least_gain_seconds']:.2f})"
        )
        note = f"  [{each['barred']}]" if each["barred"] else ""
        if each["fits_steps"] is not None:
            note += f"  [fits for {each['fits_steps']} steps]"
        yield (
            f"  {mark} {each['plan_id']}  {each['step_seconds']:6.3f} ± {each['step_deviation_seconds']:<6.3f} "
            f"{each['saving_seconds']:7.3f} ± {each['saving_deviation_seconds']:<6.3f} "
            f"{each['price_seconds']:6.2f} ± {each['price_deviation_seconds']:<5.2f} {gain:<28} "
            f"{bytes_text(explanation.peak_bytes(each['plan_id'])):>10}  {explanation.plans[each['plan_id']]}{note}"
        )


def _turned_out(one: Explained, outcome: Outcome) -> Iterator[str]:
    if outcome.state != "done":
        yield f"  turned out  {outcome.state}"
        return
    expected = one.admission["chosen"]["price_seconds"]
    yield f"  turned out  the change cost {outcome.lost_seconds:.2f} s (expected {expected:.2f})"
    if outcome.steps:
        yield (
            f"              {outcome.steps} steps of {outcome.measured_seconds:.3f} s measured, "
            f"{outcome.predicted_seconds:.3f} expected, {one.entry['present_seconds'] or 0.0:.3f} under the plan before"
        )
    if outcome.probation is not None:
        ended = outcome.probation
        yield (
            f"              probation: {ended['verdict']}, {ended['predicted_ratio']:.2f} of the prediction, "
            f"{ended['before_ratio']:.2f} of the plan before on the same tokens"
        )
