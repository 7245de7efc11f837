"""How a run stands: a fold of its journal, for a run that is under way as for one that has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nereus.config import Config
from nereus.control.written import CLASS, plan_of
from nereus.errors import JournalError
from nereus.layout import first_plan
from nereus.report.plan_text import bytes_text
from nereus.report.record import structured
from nereus.report.verdict import verdict
from nereus.workload import PHASES

Record = Mapping[str, Any]
RECENT_STEPS = 10


@dataclass(kw_only=True)
class Status:
    """What the journal knows at its end. Seconds of the journal's clock are of the epoch.

    `pending` is a change that has begun and neither ended nor failed; `writing` says whether a process holds the journal.
    """

    name: str
    steps: int
    slots: int
    budget_bytes: int
    plan: str
    writing: bool
    step: int = 0
    state_version: int = 0
    step_seconds: list[float] = field(default_factory=list[float])
    phase_seconds: dict[str, float] = field(default_factory=dict[str, float])
    peak_bytes: dict[int, int] = field(default_factory=dict[int, int])
    slow: dict[int, float] = field(default_factory=dict[int, float])
    pending: str = ""
    last_change: str = ""
    decided: Record | None = None
    last_decision: str = ""
    last_loss: str = ""
    attached: str = ""
    checkpoint_step: int | None = None
    ended: str = ""
    last_event: str = ""
    last_at_seconds: float = 0.0

    @property
    def state(self) -> str:
        """In a word or two: under way, ended (and how), or broken off without a last word."""
        if self.ended and not self.writing:
            return self.ended
        return "under way" if self.writing else "broken off: its process is gone"

    @property
    def recent_seconds(self) -> float | None:
        """Mean seconds of the last steps."""
        recent = self.step_seconds[-RECENT_STEPS:]
        return sum(recent) / len(recent) if recent else None

    @property
    def left_seconds(self) -> float | None:
        """What the steps that are left take at that pace."""
        return None if self.recent_seconds is None else (self.steps - self.step) * self.recent_seconds

    def as_json(self, now_seconds: float) -> dict[str, object]:
        """All of it, with the age of the last event."""
        return {
            "run": self.name,
            "state": self.state,
            "step": self.step,
            "steps": self.steps,
            "plan": self.plan,
            "state_version": self.state_version,
            "slots": self.slots,
            "step_seconds": self.step_seconds[-1] if self.step_seconds else None,
            "recent_step_seconds": self.recent_seconds,
            "left_seconds": self.left_seconds,
            "phase_seconds": self.phase_seconds,
            "peak_bytes": {str(slot): size for slot, size in self.peak_bytes.items()},
            "budget_bytes": self.budget_bytes,
            "slow_slots": {str(slot): speed for slot, speed in self.slow.items()},
            "pending_change": self.pending or None,
            "last_change": self.last_change or None,
            "last_decision": self.last_decision or None,
            "last_loss": self.last_loss or None,
            "attached": self.attached or None,
            "checkpoint_step": self.checkpoint_step,
            "last_event": self.last_event,
            "last_event_seconds_ago": now_seconds - self.last_at_seconds,
        }


def status_of(records: Sequence[Record], *, writing: bool) -> Status:
    """Folds a journal. JournalError for one that does not begin with a run."""
    if not records or records[0]["kind"] != "run_started":
        raise JournalError("the journal is empty: the run has not begun")
    config = structured(Config, records[0]["config"])
    status = Status(
        name=config.run.name,
        steps=config.run.steps,
        slots=config.fleet.slots,
        budget_bytes=config.fleet.slot_budget_bytes,
        plan=str(first_plan(config)),
        writing=writing,
    )
    for record in records:
        _take(status, record)
    status.last_decision = _decision_text(status.decided, records)
    status.last_event = str(records[-1]["kind"])
    status.last_at_seconds = float(records[-1]["at_seconds"])
    return status


def _take(status: Status, record: Record) -> None:
    match record["kind"]:
        case "resumed":
            config = structured(Config, record["config"])
            status.steps, status.slots, status.plan = config.run.steps, config.fleet.slots, str(first_plan(config))
            status.step, status.ended, status.pending = int(record["step"]), "", ""
        case "control_started":
            status.plan = status.plan if status.step else str(plan_of(record["plan"]))
        case "step_done":
            _take_step(status, record)
        case "told" if record["event"].get("profile"):
            status.slow = {int(slot): float(speed) for slot, speed in record["event"]["profile"].get("slow", ())}
        case "checkpoint_saved":
            status.checkpoint_step = int(record["step"])
        case "run_stopped":
            reason = str(record["reason"])
            why = str(record.get("error", "")).partition("\n")[0]
            status.ended = f"ended: {reason}" + (f" ({why})" if why else "")
        case "decision" if record["entry"][CLASS] == "Decision":
            status.decided = record["entry"]
        case "reattached":
            _take_attached(status, record)
        case "transition_started" | "transition_done" | "transition_failed" | "slots_lost" | "recovered":
            _take_change(status, record)
        case _:
            pass


def _decision_text(entry: Record | None, records: Sequence[Record]) -> str:
    """The last decision in a sentence, in the layouts of the plans that it speaks of."""
    if entry is None:
        return ""
    named = {entry["plan_id"], *(each["plan_id"] for each in entry["weighed"])}
    texts: dict[str, str] = {}
    for record in records:
        if record["kind"] == "control_started":
            known = [record["plan"]]
        elif record["kind"] == "told" and record["event"][CLASS] == "SearchDone":
            known = [each["plan"] for each in record["event"]["candidates"] if each["plan_id"] in named]
        else:
            continue
        plans = [plan_of(each) for each in known]
        texts |= {plan.plan_id: str(plan) for plan in plans}
    return f"before step {entry['step']}: {verdict(entry, texts)}"


def _take_step(status: Status, record: Record) -> None:
    metrics: Mapping[str, float] = record["metrics"]
    status.step, status.state_version = int(record["step"]), int(record["state_version"])
    status.step_seconds.append(float(metrics["timing_s/step"]))
    status.phase_seconds = {p: metrics[f"timing_s/{p}"] for p in PHASES if f"timing_s/{p}" in metrics}
    prefix = "perf/ledger_bytes/slot_"
    status.peak_bytes = {int(k.removeprefix(prefix)): int(v) for k, v in metrics.items() if k.startswith(prefix)}


def _take_change(status: Status, record: Record) -> None:
    kind = record["kind"]
    if kind == "transition_started":
        status.pending = f"before step {record['step']}: {record['to']} ({record['reason']})"
    elif kind == "transition_done":
        status.pending, status.plan = "", str(record["to"])
        status.state_version = int(record["state_version"])
        status.last_change = f"before step {record['step']}, pause {record['pause_seconds']:.3f} s"
    elif kind == "transition_failed":
        status.pending = ""
        status.last_change = f"before step {record['step']}, undone: {record['reason']}"
    elif kind == "slots_lost":
        lost = ", ".join(map(str, record["lost"])) or "none, but their world was torn"
        status.last_loss = f"after step {status.step}, slots {lost}: {str(record['reason']).partition(chr(10))[0]}"
    else:
        status.pending, status.plan, status.slots = "", str(record["plan_text"]), int(record["slots"])
        status.state_version, status.step = int(record["state_version"]), int(record["next_step"]) - 1
        sources = ", ".join(sorted(set(record["sources"].values())))
        status.last_loss += f"; went on with step {record['next_step']} from {sources}" if status.last_loss else ""


def _take_attached(status: Status, record: Record) -> None:
    status.plan, status.slots = str(record["plan_text"]), int(record["slots"])
    status.state_version, status.step = int(record["state_version"]), int(record["next_step"]) - 1
    sources = ", ".join(sorted(set(record["sources"].values())))
    lost = f", slots {', '.join(map(str, record['lost']))} lost" if record["lost"] else ""
    status.attached = (
        f"after step {status.step}: a new driver took over {status.slots} live slots{lost}, from {sources}"
    )


def render(status: Status, now_seconds: float) -> str:
    """The status as lines for a terminal."""
    age = f"{status.last_event}, {now_seconds - status.last_at_seconds:,.0f} s ago"
    rows = [
        ("run", f"{status.name}, {status.state}"),
        ("step", _step_text(status)),
        ("plan", f"{status.plan}, on {status.slots} slots, state version {status.state_version}"),
        ("phases", "  ".join(f"{phase} {seconds:.3f}" for phase, seconds in status.phase_seconds.items())),
        ("memory", _memory_text(status)),
        (
            "slow slots",
            ", ".join(f"slot {slot} at {speed:.2f} of the usual speed" for slot, speed in status.slow.items()),
        ),
        ("change", f"pending {status.pending}" if status.pending else ""),
        ("last change", status.last_change),
        ("decision", status.last_decision),
        ("last loss", status.last_loss),
        ("attached", status.attached),
        ("checkpoint", "" if status.checkpoint_step is None else f"of step {status.checkpoint_step}"),
        ("last event", age),
    ]
    return "".join(f"{name:12} {text}\n" for name, text in rows if text)


def _step_text(status: Status) -> str:
    text = f"{status.step} of {status.steps}"
    if status.recent_seconds is None:
        return f"{text}, preparing: slots, probe, warm-up, engines" if status.state == "under way" else text
    text += f", the last {status.step_seconds[-1]:.3f} s, of the last {RECENT_STEPS} on average {status.recent_seconds:.3f} s"
    return f"{text}, about {status.left_seconds:,.0f} s left" if status.state == "under way" else text


def _memory_text(status: Status) -> str:
    if not status.peak_bytes:
        return ""
    slot, size = max(status.peak_bytes.items(), key=lambda item: (item[1], -item[0]))
    share = size / status.budget_bytes
    return f"fullest slot {slot}: {bytes_text(size)} of {bytes_text(status.budget_bytes)} ({share:.0%})"
