"""Policies: what plan to use when. The controller asks one before every step; `fixed`, `dp-scaling` and `restart` are here.

fixed        the first plan for ever; waits while a slot of it is away
dp-scaling   keeps TP, PP and placement within nodes; DP follows the fleet, over divisors of the samples or any number
restart      dp-scaling's plans, each reached by a checkpoint, a stop and a resume
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from nereus.control.admission import Decision, Rejected
from nereus.control.probation import ProbationEnded
from nereus.control.records import Candidate, SearchDone, StepMeasured, Switches, plan_slots
from nereus.errors import ConfigError
from nereus.events import StepFinished
from nereus.fleet import Fleet
from nereus.layout import Plan, StagePlan, equal_shares

NAMES = ("nereus", "fixed", "dp-scaling", "restart")


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What is true before step `step`, of which `last_step` is the last.

    `usable_slots` are the fleet's slots that are not about to leave, ascending; `leaving_slots` the plan's that are;
    `empty_slots` those whose state was lost since the last change. `broken` says why the present plan cannot run the
    next step, `pressing` why it should not for long. `failed` are the changes that failed on this fleet. `answer` is the
    last search's, when it is of this plan and fleet.
    """

    at_seconds: float
    step: int
    last_step: int
    plan: Plan
    plan_id: str
    fleet: Fleet
    usable_slots: tuple[int, ...]
    leaving_slots: tuple[int, ...]
    empty_slots: tuple[int, ...]
    broken: str | None
    pressing: str | None
    answer: SearchDone | None
    searching: bool
    transitions_count: int
    failed: frozenset[str]
    switches: Switches

    @property
    def remaining_steps(self) -> int:
        """Steps that are still to run, this one included."""
        return self.last_step - self.step + 1


Entry = Decision | ProbationEnded


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What to do before the step: run it, go to `plan` (named `plan_id`) first, or wait; `entries` to record."""

    action: Literal["stay", "move", "wait"]
    plan: Plan | None = None
    plan_id: str = ""
    reason: str = ""
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A search that a policy wants: why, and how it weighs steps against the price."""

    reason: str
    horizon_steps: float
    ratios: tuple[tuple[str, float], ...] = ()
    include: tuple[Plan, ...] = ()


class Policy(Protocol):
    """A rule for plans. It is told what happens and asked before every step; it owns no clock and commands nothing."""

    name: str
    by_restart: bool

    def finished(self, step: StepFinished | StepMeasured, plan_id: str) -> None:
        """A step ended."""
        ...

    def happened(self, reason: str, *, ended: bool) -> None:
        """Something else changed (fleet, notice, memory, failed change); `ended`: it ended the present plan's life."""
        ...

    def outgrown(self, step: int, width_tokens: int) -> None:
        """The rows of the step, which has not run, are too wide for the present plan."""
        ...

    def overflowed(self, plan_id: str, used_bytes: int, budget_bytes: int) -> None:
        """A slot of the present plan used so many of its bytes, perhaps more than it has."""
        ...

    def answered(self, answer: SearchDone) -> None:
        """A search that is not stale was answered."""
        ...

    def changed(self, plan: Plan, plan_id: str) -> None:
        """Another plan is live."""
        ...

    def question(self, situation: Situation) -> Question | None:
        """The search that should be under way now, or None."""
        ...

    def choose(self, situation: Situation) -> Choice:
        """What to do before the next step."""
        ...

    def check(self) -> None:
        """Raises AssertionError when what it holds contradicts itself."""
        ...


class RulePolicy:
    """What policies without a search share: they learn nothing and ask nothing."""

    name = "rule"
    by_restart = False

    def finished(self, step: StepFinished | StepMeasured, plan_id: str) -> None:
        """Nothing is learnt."""

    def happened(self, reason: str, *, ended: bool) -> None:
        """Nothing is learnt."""

    def outgrown(self, step: int, width_tokens: int) -> None:
        """The rule has no other plan for it."""

    def overflowed(self, plan_id: str, used_bytes: int, budget_bytes: int) -> None:
        """Nothing is learnt."""

    def answered(self, answer: SearchDone) -> None:
        """No search is asked for."""

    def changed(self, plan: Plan, plan_id: str) -> None:
        """The plan is in the situation."""

    def question(self, situation: Situation) -> Question | None:  # noqa: ARG002 - the protocol's
        """None."""
        return None

    def check(self) -> None:
        """There is nothing to contradict."""

    def wanted(self, situation: Situation) -> Plan | None:  # noqa: ARG002 - for those who follow
        """The plan for the situation, None when there is none: this one has no rule."""
        return None

    def choose(self, situation: Situation) -> Choice:
        """Goes to what is wanted; without that, or when the change failed here, stays if the present plan can run."""
        plan = self.wanted(situation)
        if plan is not None and (plan is situation.plan or plan == situation.plan) and not situation.broken:
            return Choice(action="stay")
        if plan is None:
            return self._without(
                situation, "no candidate", f"no {self.name} plan for {len(situation.usable_slots)} slots"
            )
        plan_id = plan.plan_id
        if plan_id in situation.failed:
            return self._without(situation, "failed", f"the change to {plan_id} failed on this fleet")
        return Choice(
            action="move",
            plan=plan,
            plan_id=plan_id,
            reason=f"{self.name}: {plan} on {len(situation.usable_slots)} slots",
        )

    def _without(self, situation: Situation, reason: Literal["no candidate", "failed"], detail: str) -> Choice:
        if not situation.broken:
            return Choice(action="stay")
        decision = Decision(
            at_seconds=situation.at_seconds,
            step=situation.step,
            policy=self.name,
            plan_id=situation.plan_id,
            admission=Rejected(reason=reason, detail=f"{situation.broken}; {detail}"),
        )
        return Choice(action="wait", reason=situation.broken, entries=(decision,))


class Fixed(RulePolicy):
    """The first plan for ever: when a slot of it is away the job waits, when it is back its state is rebuilt there."""

    name = "fixed"

    def wanted(self, situation: Situation) -> Plan | None:
        """The present plan, while all its slots are in the fleet and none is about to leave at once."""
        there = plan_slots(situation.plan) <= set(situation.fleet.slots)
        return situation.plan if there and not situation.leaving_slots else None


class DpScaling(RulePolicy):
    """Keeps each stage's TP, PP and CP; DP follows the fleet. `divisible` as frameworks need it whose DP divides a batch."""

    def __init__(self, first: Plan, *, divisible: bool, by_restart: bool = False) -> None:
        self.first, self.divisible, self.by_restart = first, divisible, by_restart
        self.name = "restart" if by_restart else "dp-scaling"
        self._known: tuple[Fleet, tuple[int, ...], Plan | None] | None = None

    def wanted(self, situation: Situation) -> Plan | None:
        """The first plan, scaled to the usable slots."""
        fleet, usable = situation.fleet, situation.usable_slots
        if self._known is None or self._known[0] is not fleet or self._known[1] != usable:
            self._known = (fleet, usable, with_dp(self.first, fleet, usable, divisible=self.divisible))
        return self._known[2]


def with_dp(plan: Plan, fleet: Fleet, usable: Iterable[int], *, divisible: bool) -> Plan | None:
    """The plan with as many DP replicas as the usable slots allow, its tensor groups within nodes where there is room.

    Stages that share a slot in `plan` share all of theirs; separate ones divide the slots in proportion. With `divisible`
    DP divides the samples that `shares` sum to; a replica has at least one. None when a stage's replica does not fit.
    """
    slots = set(usable)
    ordered = [slot for node in fleet.nodes for slot in sorted(node.slots) if slot in slots]
    groups = _groups(plan)
    total, first = sum(len(used) for _, used in groups), 0
    stages: dict[str, StagePlan] = {}
    for index, (names, used) in enumerate(groups):
        count = len(ordered) - first if index == len(groups) - 1 else len(ordered) * len(used) // total
        mine = ordered[first : first + count]
        first += count
        for name in names:
            scaled = _stage_with_dp(getattr(plan, name), fleet, mine, divisible=divisible)
            if scaled is None:
                return None
            stages[name] = scaled
    return replace(plan, **stages)


def _groups(plan: Plan) -> list[tuple[list[str], set[int]]]:
    """(names, slots) of stages that share slots, directly or over others."""
    groups: list[tuple[list[str], set[int]]] = []
    for name, stage in plan.stages():
        touching = [group for group in groups if not group[1].isdisjoint(stage.slots)]
        names = [other for group in touching for other in group[0]] + [name]
        slots = set(stage.slots).union(*(group[1] for group in touching))
        groups = [group for group in groups if group not in touching] + [(names, slots)]
    return groups


def _stage_with_dp(stage: StagePlan, fleet: Fleet, slots: list[int], *, divisible: bool) -> StagePlan | None:
    layout, samples = stage.layout, sum(stage.shares)
    width = layout.tp * layout.cp * layout.pp
    experts = layout.expert_tp * layout.ep
    for dp in range(min(len(slots) // width, samples), 0, -1):
        if divisible and samples % dp:
            continue
        if (width // layout.pp * dp) % experts:
            continue
        ranks = _node_by_node(slots, fleet, layout.tp)[: width * dp]
        new = replace(layout, dp=dp)
        same = dp == layout.dp
        return replace(
            stage, layout=new, slots=tuple(ranks), shares=stage.shares if same else equal_shares(samples, dp)
        )
    return None


def _node_by_node(slots: list[int], fleet: Fleet, tp: int) -> list[int]:
    """The slots in groups of `tp`: first groups within a node, then those that what is left over makes."""
    whole: list[int] = []
    rest: list[int] = []
    by_node: dict[int, list[int]] = {}
    for slot in slots:
        by_node.setdefault(int(fleet.node_of[slot]), []).append(slot)
    for members in by_node.values():
        cut = len(members) - len(members) % tp
        whole += members[:cut]
        rest += members[cut:]
    return whole + rest


def barred(candidate: Candidate, usable: frozenset[int], switches: Switches) -> str:
    """Why the candidate may not be used on these slots, or nothing."""
    away = plan_slots(candidate.plan) - usable
    if away:
        return f"slot {min(away)} is away or about to leave"
    return switches.denies(candidate.plan) or ""


def policy_problem(name: str) -> ConfigError | None:
    """What is wrong with `nereus.policy`, or None."""
    return None if name in NAMES else ConfigError("nereus.policy", name, f"expected one of {', '.join(NAMES)}")
