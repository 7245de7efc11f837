"""What the adaptive controller is told and commands beyond `nereus.events`, and what it is given to know of plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from nereus.events import StepFinished
from nereus.fleet import Fleet
from nereus.layout import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Predicted seconds and their standard deviation."""

    mean_seconds: float
    deviation_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceEstimate:
    """What a transition costs the job: of its graph, with the standard deviation and what no schedule goes below.

    `commit_seconds` of it are expected until the commit, after which slots that the new plan does not use may leave;
    0 where that is not told: all of it.
    """

    mean_seconds: float
    deviation_seconds: float
    bound_seconds: float
    commit_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """A plan that will not fit: in how many steps (0: the next one), and why (slot, phase, bytes)."""

    within_steps: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that a search proposes, its short name and kind (computed once) and its price from the present plan."""

    plan: Plan
    plan_id: str
    kind: str
    price: PriceEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """While the predicted step and its tokens stay within these, a search would answer the same again."""

    least_step_seconds: float
    most_step_seconds: float
    least_tokens: float
    most_tokens: float

    def holds(self, step_seconds: float, tokens: float) -> bool:
        """Whether the answer still stands."""
        in_time = self.least_step_seconds <= step_seconds <= self.most_step_seconds
        return in_time and self.least_tokens <= tokens <= self.most_tokens


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasured(StepFinished):
    """A step ended: also how many tokens (prompts and responses) it worked on.

    `news` says what is new of the slots since the last step, so that another plan may be best.
    """

    tokens: int
    news: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetChanged:
    """The fleet is now `fleet`. What `lost_slots` held is gone, also of those that are there again.

    When the present plan uses a lost slot, the step under way is void and no `StepFinished` follows for it.
    """

    at_seconds: float
    fleet: Fleet
    lost_slots: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNotice:
    """These slots leave at `deadline_seconds` (on the clock of `at_seconds`) at the latest; an infinite one takes it back."""

    at_seconds: float
    slots: tuple[int, ...]
    deadline_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryAlarm:
    """A slot came nearer to its budget than the margin allows."""

    at_seconds: float
    slot: int
    phase: str
    used_bytes: int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRefused:
    """Step `step` has rows of `width_tokens`, which the plan cannot hold: nothing was done on them, and they are kept."""

    at_seconds: float
    step: int
    width_tokens: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchDone:
    """The answer to `Search` number `search_id`; without candidates `reason` says why nothing fits."""

    at_seconds: float
    search_id: int
    candidates: tuple[Candidate, ...]
    band: Band | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRestored:
    """A restart, or a change in which state was lost, ended: `plan` is live and `step` (not after the present one) is next."""

    at_seconds: float
    plan: Plan
    step: int
    state_version: int


# -- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """What a search is asked: the best plans for `slots` from `present`, of which `empty_slots` hold nothing any more.

    `horizon_steps` weighs a step's seconds against the price. `ratios` are what measured steps of a plan are over their
    prediction, by kind; `include` are plans to price in any case (the way back). `allow` and `deny` are `Switches`'.
    """

    reason: str
    step: int
    present: Plan
    slots: tuple[int, ...]
    empty_slots: tuple[int, ...]
    horizon_steps: float
    remaining_steps: int
    ratios: tuple[tuple[str, float], ...] = ()
    include: tuple[Plan, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Search within a budget of evaluated nodes; `SearchDone` with the same number answers. An older search may be dropped."""

    search_id: int
    request: SearchRequest
    budget_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """Checkpoint what lives, stop, and resume under `plan` before step `step`; `StateRestored` or `TransitionDone` answers."""

    step: int
    plan: Plan
    reason: str


# -- switches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Switches:
    """What people need to hold the controller back.

    `freeze` and `max_transitions_count` bar changes that are not forced: a forced one stays, as the job ends without it.
    `allow` and `deny` are shell patterns over "stage layout", such as "actor_train TP2*": of a stage that `allow` names,
    one of its patterns has to match; no stage may match `deny`. With `dry_run` nothing changes, decisions are only recorded.
    """

    freeze: bool = False
    max_transitions_count: int | None = None
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    dry_run: bool = False

    def denies(self, plan: Plan) -> str | None:
        """Why the patterns bar this plan, or None."""
        if not self.allow and not self.deny:
            return None
        for name, stage in plan.stages():
            if (why := self.denies_stage(name, str(stage.layout))) is not None:
                return why
        return None

    def denies_stage(self, name: str, layout: str) -> str | None:
        """Why the patterns bar this layout of a model-stage, or None."""
        text = f"{name} {layout}"
        for pattern in self.deny:
            if fnmatchcase(text, pattern):
                return f"plans.deny has {pattern!r}, which is {text}"
        wanted = [pattern for pattern in self.allow if fnmatchcase(name, pattern.split(" ", maxsplit=1)[0])]
        if wanted and not any(fnmatchcase(text, pattern) for pattern in wanted):
            return f"{text} is none of plans.allow: {', '.join(map(repr, wanted))}"
        return None


# -- what is known of plans -------------------------------------------------------------------------------------------


class Outlook(Protocol):
    """What is believed of plans by name: a value; `observe` and `met` answer the next one.

    Names are of plans that it has met: the first plan and every candidate of an answer.
    """

    def met(self, candidates: tuple[Candidate, ...]) -> Outlook:
        """The same, knowing also these plans."""
        ...

    def observe(self, finished: StepMeasured, plan_id: str, *, ratio: float, noise_share: float) -> Outlook:
        """What is believed after a step under `plan_id`.

        `ratio` is what of the step's time is the plan's own deviation from the model: `step_seconds / ratio` is what
        the model's coefficients have to explain. `noise_share` is the deviation of a step about its expectation.
        """
        ...

    def expected(self, finished: StepMeasured, plan_id: str) -> Estimate:
        """What this very step, with its tokens, would have taken under `plan_id`; without noise."""
        ...

    def step(self, plan_id: str) -> Estimate:
        """A step to come under `plan_id`; without noise."""
        ...

    def saving(self, old_id: str, new_id: str, old_ratio: float, new_ratio: float) -> Estimate:
        """A step's old_ratio x old - new_ratio x new; the deviation is the joint one: what both share cancels."""
        ...

    def misfit(self, plan_id: str, step: int) -> Misfit | None:
        """When the plan will not fit from step `step` on, as far as it is foreseen."""
        ...

    def met_rows(self, step: int, width_tokens: int) -> Outlook:
        """The same, knowing also that the rows of step `step`, which has not run, are so wide."""
        ...

    def overflowed(self, plan_id: str, used_bytes: int) -> Outlook:
        """The same, knowing also that a slot used so many bytes under `plan_id`, more than it has."""
        ...


def plan_slots(plan: Plan) -> frozenset[int]:
    """Every slot that the plan uses."""
    return frozenset[int]().union(*(stage.slots for _, stage in plan.stages()))


def candidate(plan: Plan, price: PriceEstimate) -> Candidate:
    """A candidate with its name."""
    return Candidate(plan=plan, plan_id=plan.plan_id, kind=plan_kind(plan), price=price)


def plan_kind(plan: Plan) -> str:
    """A short name that plans share which differ in nothing but the numbers of their slots: what one shows, all have shown."""
    numbers: dict[int, int] = {}
    for _, stage in plan.stages():
        for slot in stage.slots:
            numbers.setdefault(slot, len(numbers))
    stages = {name: replace(s, slots=tuple(numbers[slot] for slot in s.slots)) for name, s in plan.stages()}
    return replace(plan, **stages).plan_id
