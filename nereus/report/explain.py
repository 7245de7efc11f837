"""Why a run's plan is what it is: every decision with what was known, what was weighed, and what it turned out to be.

A fold of the journal. Nothing is computed again but the memory of candidates, which follows from the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from nereus.config import Config
from nereus.control.fleet_outlook import FleetOutlook
from nereus.control.outlook import StepObserved
from nereus.control.written import CLASS, event_of, fleet_of, plan_of
from nereus.errors import JournalError
from nereus.fleet import Fleet
from nereus.layout import Plan
from nereus.memory import plan_peaks
from nereus.report.deciding import Deciding, deciding, deciding_lines
from nereus.report.plan_text import bytes_text
from nereus.report.record import structured
from nereus.report.summary import seconds_of_training
from nereus.report.verdict import is_change, verdict

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
        return is_change(self.entry) and not self.entry["dry"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Every decision of a run, and the plans that its journal speaks of, by name.

    `peak_bytes` is the predicted peak of the fullest slot under each plan, without margin.
    """

    config: Config
    plans: Mapping[str, Plan]
    peak_bytes: Mapping[str, int]
    decisions: tuple[Explained, ...]
    deciding: Deciding | None
    training_seconds: float

    @property
    def texts(self) -> dict[str, str]:
        """The plans as text, by name."""
        return {name: str(plan) for name, plan in self.plans.items()}


def explained(records: Sequence[Record]) -> Explanation:
    """The explanation of a journal. JournalError where its run has no controller that decides."""
    config: Config | None = None
    plans: dict[str, Plan] = {}
    decisions: list[Explained] = []
    asked: dict[int, Record] = {}
    told: dict[int, Record] = {}
    done: list[Record] = []
    inventory: Fleet | None = None
    for index, record in enumerate(records):
        kind = record["kind"]
        if kind in ("run_started", "resumed"):
            config = structured(Config, record["config"])
        elif kind == "control_started":
            first = plan_of(record["plan"])
            plans[first.plan_id] = first
            inventory = fleet_of(record["inventory"]) if "inventory" in record else None
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
                    search=next((each for each in reversed(done) if each["search_id"] == number), None),
                    asked=asked.get(number),
                    outcome=_outcome(records[index + 1 :], record["entry"]),
                )
            )
    if config is None or (config.nereus.policy == "script" and not plans):
        raise JournalError("the run has no controller to explain: its nereus.policy is script")
    return Explanation(
        config=config,
        plans=plans,
        peak_bytes=_peaks(config, plans, inventory, records),
        decisions=tuple(decisions),
        deciding=deciding(records),
        training_seconds=seconds_of_training(records),
    )


def _peaks(
    config: Config, plans: Mapping[str, Plan], inventory: Fleet | None, records: Sequence[Record]
) -> dict[str, int]:
    """Plan -> predicted peak of its fullest slot without margin; on a simulated fleet with the lengths of its last step."""
    if inventory is None:
        return {name: max(peak.total_bytes for peak in plan_peaks(config, plan)) for name, plan in plans.items()}
    steps = (r["event"] for r in reversed(records) if r["kind"] == "told" and r["event"][CLASS] == "StepObserved")
    last = next((event_of(each) for each in steps), None)
    outlook = FleetOutlook(config=config, inventory=inventory, plans=plans, learns=False)
    if isinstance(last, StepObserved):
        outlook = outlook.observe(last, last.plan_id, ratio=1.0, noise_share=0.0)
    return {name: outlook.peak_bytes(name) for name in plans}


def _outcome(later: Sequence[Record], entry: Record) -> Outcome | None:
    """What the records after a change say of it."""
    if not is_change(entry) or entry["dry"]:
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
    if any(each.entry["weighed"] for each in chosen):
        lines += [LEGEND, ""]
    if not chosen:
        lines = [undecided(explanation), ""]
    return "\n".join([*lines, *deciding_lines(explanation.deciding, explanation.training_seconds)]) + "\n"


def undecided(explanation: Explanation) -> str:
    """Why there is no decision."""
    policy = explanation.config.nereus.policy
    return (
        "nothing has been decided yet" if policy == "nereus" else f"the policy {policy} has a rule and weighs nothing"
    )


LEGEND = (
    "step: expected of a plan, ± its deviation; gain: what it saves over the expected steps, less the price; surely: "
    "that less its deviation;\nfullest slot: expected peak memory; *: the plan that was taken or came nearest"
)


def _lines(explanation: Explanation, one: Explained) -> Iterator[str]:
    yield f"before step {one.step}: {verdict(one.entry, explanation.texts)}"
    for name, text in facts(explanation, one):
        yield f"  {name:<11} {text}"
    if one.entry["weighed"]:
        yield from _table(explanation, one)
    if one.outcome is not None:
        lines = turned_out(one, one.outcome)
        yield f"  {'turned out':<11} {lines[0]}"
        yield from (f"  {'':<11} {line}" for line in lines[1:])


def facts(explanation: Explanation, one: Explained) -> Iterator[tuple[str, str]]:
    """(name, text) of what was known: the present plan, how long a plan is expected to last, the search."""
    entry = one.entry
    present = entry["plan_id"]
    yield "present", f"{present}  {explanation.plans.get(present, '')}"
    if entry["present_seconds"] is not None:
        expected = f"{entry['present_seconds']:.3f} s a step expected, steps scatter by {entry['noise_share']:.1%}"
        yield "", f"{expected}, {bytes_text(explanation.peak_bytes[present])} on the fullest slot"
    if (horizon := entry["horizon"]) is not None:
        seen = f"{horizon['seen_count']:.1f} plans' lives ended in {horizon['seen_steps']:.0f} steps"
        yield "horizon", f"{horizon['expected_steps']:.1f} of {horizon['remaining_steps']} steps that are left ({seen})"
    if one.asked is not None:
        found = one.search
        took = f": {found['evaluated_count']:,} nodes, {found['priced_count']} graphs" if found else ""
        spent = (found or {}).get("processor_seconds")
        beside = "" if spent is None else f", {spent:.2f} s of processor beside the job"
        yield f"search {one.asked['search_id']}", f"{one.asked['request']['reason']}{took}{beside}"


HEAD = ("plan", "step s", "saves s", "price s", "gain s", "surely s", "fullest slot", "layouts")


def table(explanation: Explanation, one: Explained) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """Every candidate, best first, those that may not be used last: whether it was taken or came nearest, and its cells."""
    chosen = one.chosen or {}
    for each in sorted(one.entry["weighed"], key=lambda w: (bool(w["barred"]), -w["least_gain_seconds"], w["plan_id"])):
        notes = [each["barred"]] if each["barred"] else []
        notes += [f"fits for {each['fits_steps']} steps"] if each["fits_steps"] is not None else []
        plan_id = each["plan_id"]
        cells = (
            plan_id,
            f"{each['step_seconds']:.3f} ± {each['step_deviation_seconds']:.3f}",
            f"{each['saving_seconds']:.3f} ± {each['saving_deviation_seconds']:.3f}",
            f"{each['price_seconds']:.2f} ± {each['price_deviation_seconds']:.2f}",
            f"{each['gain_seconds']:.2f} ± {each['gain_deviation_seconds']:.2f}",
            f"{each['least_gain_seconds']:.2f}",
            bytes_text(explanation.peak_bytes[plan_id]),
            " ".join([str(explanation.plans[plan_id]), *(f"[{note}]" for note in notes)]),
        )
        yield plan_id == chosen.get("plan_id"), cells


def _table(explanation: Explanation, one: Explained) -> Iterator[str]:
    rows = [(False, HEAD), *table(explanation, one)]
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(HEAD) - 1)]
    for marked, cells in rows:
        right = "  ".join(cell.rjust(width) for cell, width in zip(cells[:-1], widths, strict=True))
        yield f"  {'*' if marked else ' '} {right}  {cells[-1]}"


def turned_out(one: Explained, outcome: Outcome) -> list[str]:
    """What became of a change, as lines."""
    if outcome.state != "done":
        return [outcome.state]
    expected = one.admission["chosen"]["price_seconds"]
    lines = [f"the change cost {outcome.lost_seconds:.2f} s (expected {expected:.2f})"]
    if outcome.steps:
        before = f", {one.entry['present_seconds']:.3f} under the plan before" if one.entry["present_seconds"] else ""
        steps = f"{outcome.steps} step{'' if outcome.steps == 1 else 's'} of {outcome.measured_seconds:.3f} s measured"
        lines.append(f"{steps}, {outcome.predicted_seconds:.3f} expected{before}")
    if outcome.probation is not None:
        ended = outcome.probation
        than = "slower" if ended["before_ratio"] > 1 else "faster"
        lines.append(
            f"its first {ended['steps']} steps took {ended['predicted_ratio']:.2f} of what was expected of it, and "
            f"{ended['before_ratio']:.2f} of what was expected of the plan before ({than}"
            f"{'; it counts as worse' if ended['verdict'] == 'worse' else ''})"
        )
    return lines
