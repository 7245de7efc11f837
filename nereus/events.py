"""What a world reports to the controller, and what the controller commands. Time comes in with events."""

from __future__ import annotations

from dataclasses import dataclass

from nereus.layout import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class JobReady:
    """Slots are up, models are built under the first plan, warm-up is done; `step` is the next PPO step."""

    at_seconds: float
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFinished:
    """A PPO step ended and its state is live."""

    at_seconds: float
    step: int
    step_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionDone:
    """The state version `state_version` is committed and live under `plan`."""

    at_seconds: float
    plan: Plan
    state_version: int
    pause_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionFailed:
    """The change to `plan` was undone; the plan before it is live again."""

    at_seconds: float
    plan: Plan
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsLost:
    """Slot processes died while `plan` was live; the job stands still until it is told to recover. Numbers are the old ones.

    `whole` is False where a step was half done, so that the state is of no step.
    """

    at_seconds: float
    lost_slots: tuple[int, ...]
    slot_count: int
    plan: Plan
    reason: str
    whole: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """The job is live under `plan` on `slots` slots; `next_step` is the next PPO step, a done one again after a loss."""

    at_seconds: float
    plan: Plan
    slots: int
    next_step: int
    state_version: int = 0
    pause_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested:
    """The user asked the run to stop at its next safe point."""

    at_seconds: float


Event = JobReady | StepFinished | TransitionDone | TransitionFailed | SlotsLost | Recovered | StopRequested


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """Carry out PPO step `step` under the present plan."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangePlan:
    """Bring the job to `plan` before step `step`, as one transaction; prepared during a step that is commanded with it.

    `urgent`: slots of the present plan are about to leave, so it commits as early as it can.
    """

    step: int
    plan: Plan
    reason: str
    urgent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recover:
    """Go on without the slots `lost_slots` under `plan`, whose slots have the numbers of `nereus.survivors.renumbering`.

    With `saved` the state is whole and is saved first: what only those slots have comes from there.
    """

    lost_slots: tuple[int, ...]
    plan: Plan
    saved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """End the run; `reason` is done or stopped."""

    reason: str


Command = RunStep | ChangePlan | Recover | Finish
