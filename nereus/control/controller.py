"""The adaptive controller: `handle(event) -> commands`, with no clock, thread or socket of its own.

    state      event              next state          commands
    starting   JobReady           settled (below)     what is due before the step
    running    StepFinished       settled             what is due before the next step
    changing   TransitionDone     settled             what is due before the step
    changing   StateRestored      settled             the same, `step` goes back to the restored one
    changing   TransitionFailed   settled             the same under the old plan; this change is not tried again here
    running    StepRefused        settled             the step has not run: what is due before it
    running    FleetChanged       settled             when the plan lost a slot: the step under way is void
    running    FleetChanged       running             else: a search when the policy wants one
    searching  FleetChanged       settled             weighed anew; an answer for the old fleet is dropped
    waiting    FleetChanged       settled             weighed anew
    changing   FleetChanged       changing            none: the transition ends first, one way or the other
    searching  SearchDone         settled             what the answer allows
    other      SearchDone         same                none: it is weighed before the next step; a stale one is recorded
    any        PreemptionNotice   same                a search without these slots
    any        MemoryAlarm        same                a search that forces a change when it finds one
    any        StopRequested      same                none; Finish at the next safe point, at once in searching and waiting

`settled` is before a step, and asks the policy:

    stop was requested, or no step is left      finished     Finish
    the policy stays                            running      RunStep
    the policy moves                            changing     ChangePlan, or Restart
    the policy waits, its search is under way   searching    Search, if not yet commanded
    the policy waits                            waiting      none

A Search may be under way in any state; at most one counts. Starting and finished take no other events than listed
(fleet, notice and alarm are noted while starting). What happens in any other cell is InvalidEvent. Decisions come as
`Record` commands, so that the world journals them and a replay of the events gives them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from nereus.control.policies import Entry, Policy, Question, Situation
from nereus.control.records import (
    FleetChanged,
    MemoryAlarm,
    PreemptionNotice,
    PriceEstimate,
    Restart,
    Search,
    SearchDone,
    SearchRequest,
    StateRestored,
    StepMeasured,
    StepRefused,
    Switches,
    plan_slots,
)
from nereus.errors import InvalidEvent
from nereus.events import (
    ChangePlan,
    Finish,
    JobReady,
    RunStep,
    StepFinished,
    StopRequested,
    TransitionDone,
    TransitionFailed,
)
from nereus.fleet import Fleet
from nereus.layout import Plan

State = Literal["starting", "running", "searching", "waiting", "changing", "finished"]
SETTLING = ("searching", "waiting")
"""States in which no step and no change is under way: whatever happens is weighed at once."""
NOTICE_STEPS = 1.5
"""A change before a notice's deadline starts when so many of the slowest recent steps, and one change, no longer fit."""
PACE_COUNT = 8
SEARCH_BUDGET_COUNT = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """An answer that came too late: its plan or fleet is no longer the present one."""

    at_seconds: float
    step: int
    search_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Journal what was decided or found."""

    entry: Entry | Dropped


AdaptiveEvent = (
    JobReady
    | StepFinished
    | StepMeasured
    | StepRefused
    | TransitionDone
    | TransitionFailed
    | StateRestored
    | FleetChanged
    | PreemptionNotice
    | MemoryAlarm
    | SearchDone
    | StopRequested
)
AdaptiveCommand = RunStep | ChangePlan | Restart | Search | Record | Finish


class AdaptiveController:
    """Decides what happens next; see the table of the module."""

    def __init__(
        self,
        *,
        plan: Plan,
        fleet: Fleet,
        last_step: int,
        policy: Policy,
        switches: Switches | None = None,
        search_budget_count: int = SEARCH_BUDGET_COUNT,
    ) -> None:
        self.plan, self.plan_id, self.fleet, self.policy = plan, plan.plan_id, fleet, policy
        self.switches = switches or Switches()
        self.state: State = "starting"
        self.step = 1
        self.last_step = last_step
        self.stopping = False
        self.transitions_count = 0
        self._slots = plan_slots(plan)
        self._wanted: Plan | None = None
        self._wanted_id = ""
        self._present = frozenset(fleet.slots)
        self._usable = fleet.slots
        self._leaving: dict[int, float] = {}  # slot -> deadline on the events' clock
        self._empty: frozenset[int] = frozenset()
        self._lost_in_change: frozenset[int] = frozenset()
        self._failed: frozenset[str] = frozenset()
        self._pressing: str | None = None
        self._search: Search | None = None
        self._answer: SearchDone | None = None
        self._budget_count = search_budget_count
        self._searches_count = 0
        self._pace_seconds: tuple[float, ...] = ()
        self._change_seconds = 0.0
        self._at_seconds = 0.0

    def handle(self, event: AdaptiveEvent) -> tuple[AdaptiveCommand, ...]:
        """Commands that follow from `event`; InvalidEvent when it cannot be true in this state."""
        if self.state == "finished":
            if isinstance(event, SearchDone | FleetChanged | PreemptionNotice | MemoryAlarm | StopRequested):
                return ()
            raise InvalidEvent(f"{type(event).__name__} came after the run was finished")
        self._at_seconds = max(self._at_seconds, event.at_seconds)
        match event:
            case StopRequested():
                self.stopping = True
                return self._settled() if self.state in SETTLING else ()
            case JobReady() | StepFinished() | StepRefused():
                return self._stepped(event)
            case TransitionDone() | TransitionFailed() | StateRestored():
                return self._changed(event)
            case FleetChanged():
                return self._fleet_changed(event)
            case PreemptionNotice():
                return self._noticed(event)
            case MemoryAlarm():
                return self._alarmed(event)
            case SearchDone():
                return self._answered(event)

    # -- events -------------------------------------------------------------------------------------------------------

    def _stepped(self, event: JobReady | StepFinished | StepRefused) -> tuple[AdaptiveCommand, ...]:
        if isinstance(event, JobReady):
            self._expect(event, "starting")
            self.step = event.step
            return self._settled()
        self._expect(event, "running")
        if event.step != self.step:
            ended = "finished" if isinstance(event, StepFinished) else "was refused"
            raise InvalidEvent(f"step {event.step} {ended} while step {self.step} was running")
        if isinstance(event, StepRefused):
            self._forget_answers()
            self.policy.outgrown(event.step, event.width_tokens)
            return self._settled()
        self._pace_seconds = (*self._pace_seconds, event.step_seconds)[-PACE_COUNT:]
        self.policy.finished(event, self.plan_id)
        self.step += 1
        return self._settled()

    def _changed(self, event: TransitionDone | TransitionFailed | StateRestored) -> tuple[AdaptiveCommand, ...]:
        self._expect(event, "changing")
        if event.plan != self._wanted:
            raise InvalidEvent(f"{type(event).__name__} speaks of plan {event.plan.plan_id}, which was not commanded")
        self._wanted, plan_id = None, self._wanted_id
        if isinstance(event, TransitionFailed):
            if not self._lost_in_change:  # else it says nothing of the fleet that is left
                self._failed |= {plan_id}
            self.policy.happened(f"the change to {plan_id} failed: {event.reason}", ended=False)
            return self._settled()
        if isinstance(event, StateRestored):
            if not 1 <= event.step <= self.step:
                raise InvalidEvent(f"step {event.step} was restored before step {self.step}: expected 1 to {self.step}")
            self.step = event.step
        else:
            self._change_seconds = max(self._change_seconds, event.pause_seconds)
        self.plan, self.plan_id, self._slots = event.plan, plan_id, plan_slots(event.plan)
        self.transitions_count += 1
        self._empty = self._lost_in_change
        self._pressing, self._failed = None, frozenset()
        self._forget_answers()
        self.policy.changed(self.plan, self.plan_id)
        return self._settled()

    def _fleet_changed(self, event: FleetChanged) -> tuple[AdaptiveCommand, ...]:
        present, before = frozenset(event.fleet.slots), self._present
        gone = before - present
        if not gone <= set(event.lost_slots):
            raise InvalidEvent(
                f"slot {min(gone - set(event.lost_slots))} left the fleet and is not in lost_slots = {event.lost_slots}"
            )
        lost = frozenset(event.lost_slots)
        self.fleet, self._present = event.fleet, present
        self._empty |= lost
        if self.state == "changing":
            self._lost_in_change |= lost
        self._leave({slot: at for slot, at in self._leaving.items() if slot in present and slot not in lost})
        self._failed = frozenset()
        self._forget_answers()
        hit = not lost.isdisjoint(self._slots)
        self.policy.happened(f"the fleet is now {len(present)} slots", ended=hit)
        if self.state in SETTLING or (self.state == "running" and hit):
            return self._settled()
        return self._asked()

    def _noticed(self, event: PreemptionNotice) -> tuple[AdaptiveCommand, ...]:
        before = self._leaving
        told = before | {slot: event.deadline_seconds for slot in event.slots if slot in self._present}
        self._leave({slot: deadline for slot, deadline in told.items() if deadline < inf})
        if self._leaving.keys() != before.keys():
            self._forget_answers()
            what = "are about to leave" if event.deadline_seconds < inf else "stay"
            self.policy.happened(f"slots {', '.join(map(str, event.slots))} {what}", ended=False)
        return self._settled() if self.state in SETTLING else self._asked()

    def _alarmed(self, event: MemoryAlarm) -> tuple[AdaptiveCommand, ...]:
        if event.slot in self._slots and self.state != "changing":
            used, budget = event.used_bytes, event.budget_bytes
            self.policy.overflowed(self.plan_id, used, budget)
            if self._pressing is None:
                self._forget_answers()
                self.policy.happened(f"memory alarm on slot {event.slot}", ended=True)
            self._pressing = f"slot {event.slot} used {used:,} of {budget:,} bytes in {event.phase}"
        return self._settled() if self.state in SETTLING else self._asked()

    def _answered(self, event: SearchDone) -> tuple[AdaptiveCommand, ...]:
        if self._search is None or event.search_id != self._search.search_id:
            if event.search_id > self._searches_count:
                raise InvalidEvent(f"search {event.search_id} was answered, {self._searches_count} were commanded")
            dropped = Dropped(at_seconds=event.at_seconds, step=self.step, search_id=event.search_id)
            return (Record(entry=dropped),)
        self._search, self._answer = None, event
        self.policy.answered(event)
        return self._settled() if self.state in SETTLING else ()

    def _leave(self, leaving: dict[int, float]) -> None:
        self._leaving = leaving
        self._usable = tuple(slot for slot in self.fleet.slots if slot not in leaving)

    def _expect(self, event: AdaptiveEvent, state: State) -> None:
        if self.state != state:
            raise InvalidEvent(f"{type(event).__name__} came in state {self.state}, it belongs to {state}")

    def _forget_answers(self) -> None:
        self._search = self._answer = None

    # -- what follows -------------------------------------------------------------------------------------------------

    def situation(self) -> Situation:
        """What is true before the next step."""
        return Situation(
            at_seconds=self._at_seconds,
            step=self.step,
            last_step=self.last_step,
            plan=self.plan,
            plan_id=self.plan_id,
            fleet=self.fleet,
            usable_slots=self._usable,
            leaving_slots=tuple(sorted(self._slots & self._leaving.keys())),
            empty_slots=tuple(sorted(self._empty)),
            broken=self._broken(),
            pressing=self._pressing,
            answer=self._answer,
            searching=self._search is not None,
            transitions_count=self.transitions_count,
            failed=self._failed,
            switches=self.switches,
        )

    def _broken(self) -> str | None:
        """Why the present plan cannot run the next step: a slot is away or empty, or leaves before the step is over."""
        away = self._slots - self._present
        if away:
            return f"slot {min(away)} of the plan is gone"
        if empty := self._slots & self._empty:
            return f"slot {min(empty)} of the plan lost its state"
        leaving = sorted(self._slots & self._leaving.keys())
        pace = max(self._pace_seconds, default=0.0)
        needed = NOTICE_STEPS * pace + max(self._change_seconds, pace)
        for slot in leaving:
            if self._at_seconds + needed >= self._leaving[slot]:
                return f"slot {slot} of the plan leaves before the next step is sure to end"
        return None

    def _too_late(self, plan_id: str) -> str:
        """Why the state is saved before the change: slots of the plan leave before a live one is sure to end. Else "".

        With a price it is what a live change takes until its commit, else the longest change so far. What is lost already cannot be saved; a slot that is there after
        its deadline stays until the plan has left it, as the real world's scheduled ones do.
        """
        leaving = [self._leaving[slot] for slot in self._slots & self._leaving.keys()]
        if not leaving or self._slots & self._empty or not self._slots <= self._present:
            return ""
        prices = (c.price for c in (self._answer.candidates if self._answer else ()) if c.plan_id == plan_id)
        needed = next((_until_commit(price) for price in prices), 0.0) or self._change_seconds
        left = min(leaving) - self._at_seconds
        if left <= 0 or needed <= left:
            return ""
        return f"the state is saved first: slots leave in {left:.1f} s, a live change may commit after {needed:.1f} s"

    def _settled(self) -> tuple[AdaptiveCommand, ...]:
        """What is due before the step."""
        if self.stopping or self.step > self.last_step:
            self.state = "finished"
            self._forget_answers()
            return (Finish(reason="stopped" if self.stopping else "done"),)
        choice = self.policy.choose(self.situation())
        records: tuple[AdaptiveCommand, ...] = tuple(Record(entry=entry) for entry in choice.entries)
        if choice.action == "move" and not self.switches.dry_run:
            assert choice.plan is not None
            self.state, self._lost_in_change = "changing", frozenset()
            self._wanted, self._wanted_id = choice.plan, choice.plan_id
            late = self._too_late(choice.plan_id)
            reason = f"{choice.reason}; {late}" if late else choice.reason
            if self.policy.by_restart or late:
                return (*records, Restart(step=self.step, plan=choice.plan, reason=reason))
            urgent = not self._slots.isdisjoint(self._leaving)
            return (*records, ChangePlan(step=self.step, plan=choice.plan, reason=reason, urgent=urgent))
        self.state = "waiting"
        asked = self._asked()
        if choice.action == "stay" or (choice.action == "move" and not self._broken()):
            self.state = "running"
            return (*records, *asked, RunStep(step=self.step))
        if self._search is not None:
            self.state = "searching"
        return (*records, *asked)

    def _asked(self) -> tuple[AdaptiveCommand, ...]:
        """The search that the policy wants and that is not under way."""
        if self.state in {"changing", "starting"} or self._search is not None:
            return ()
        situation = self.situation()
        question = self.policy.question(situation)
        if question is None:
            return ()
        self._searches_count += 1
        request = self._request(question, situation)
        self._search = Search(search_id=self._searches_count, request=request, budget_count=self._budget_count)
        if self.state == "waiting":
            self.state = "searching"
        return (self._search,)

    def _request(self, question: Question, situation: Situation) -> SearchRequest:
        return SearchRequest(
            reason=question.reason,
            step=self.step,
            present=self.plan,
            slots=situation.usable_slots,
            empty_slots=situation.empty_slots,
            horizon_steps=question.horizon_steps,
            remaining_steps=situation.remaining_steps,
            ratios=question.ratios,
            include=question.include,
            allow=self.switches.allow,
            deny=self.switches.deny,
        )

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError when the state contradicts itself; called after every event by tests, cheap enough for runs."""
        assert (self._wanted is not None) == (self.state == "changing"), f"{self.state} with wanted {self._wanted}"
        assert self.state != "searching" or self._search is not None, "searching without a search"
        assert self._search is None or self._search.search_id <= self._searches_count, "a search nobody commanded"
        assert self.state != "finished" or self._search is None, "a search counts after the end"
        assert 1 <= self.step <= self.last_step + 1, f"step {self.step} of {self.last_step}"
        assert self.state == "finished" or self.step <= self.last_step, f"{self.state} at step {self.step}"
        assert self.plan_id == self.plan.plan_id, "the plan's name is another plan's"
        assert self._slots == plan_slots(self.plan), "the plan's slots are another plan's"
        assert self._present == set(self.fleet.slots), "the fleet's slots are another fleet's"
        assert self._usable == tuple(s for s in self.fleet.slots if s not in self._leaving), "usable slots are stale"
        if self.state == "running":
            away = self._slots - frozenset(self.fleet.slots)
            assert not away, f"a step runs while slot {min(away)} is away"
            assert not self._slots & self._empty, "a step runs on a slot that lost its state"
        if self._search is not None:
            request = self._search.request
            assert request.present == self.plan, "a search from another plan counts"
            assert set(request.slots) <= set(self.fleet.slots), "a search for slots that are gone counts"
        assert self._leaving.keys() <= set(self.fleet.slots), "slots are about to leave that are gone"
        self.policy.check()


def _until_commit(price: PriceEstimate) -> float:
    """Seconds after which a change is all but sure to have committed."""
    share = price.commit_seconds / price.mean_seconds if price.commit_seconds else 1.0
    return share * (price.mean_seconds + price.deviation_seconds)
