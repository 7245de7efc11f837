"""The policy nereus in the controller: when it searches, changes, waits and declines, event by event."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from nereus.control.adaptive import WHOLE_STEPS, Adaptive
from nereus.control.admission import Admitted, Caution, Decision, Forced, Rejected
from nereus.control.controller import AdaptiveCommand, AdaptiveController, AdaptiveEvent, Dropped, Record
from nereus.control.probation import ProbationEnded
from nereus.control.records import (
    Band,
    Candidate,
    Estimate,
    FleetChanged,
    MemoryAlarm,
    Misfit,
    PreemptionNotice,
    Restart,
    Search,
    SearchDone,
    StepMeasured,
    StepRefused,
    Switches,
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
from nereus.fleet import uniform
from nereus.layout import Plan
from tests.core.control_scenes import TableOutlook, entries, plan_on, shown

POOR, BETTER, SMALL = plan_on((0, 1, 2, 3), tp=2, pp=2), plan_on((0, 1, 2, 3)), plan_on((0, 1, 2))
SECONDS = {POOR.plan_id: 10.0, BETTER.plan_id: 8.0, SMALL.plan_id: 11.0}
CAUTION = Caution(least_steps=2, probation_steps=2, trust_share=0.5)


class Job:
    """A controller with its clock: each call tells it one thing and answers the commands."""

    def __init__(
        self,
        *,
        switches: Switches | None = None,
        misfits: dict[str, Misfit] | None = None,
        room_tokens: dict[str, int] | None = None,
        seconds: dict[str, float] | None = None,
        last_step: int = 200,
        caution: Caution = CAUTION,
        slowdown: float = 1.0,
    ) -> None:
        outlook = TableOutlook(seconds or SECONDS, 0.02, misfits or {}, room_tokens or {}, slowdown=slowdown)
        self.policy = Adaptive(outlook, POOR, caution)
        self.controller = AdaptiveController(
            plan=POOR, fleet=uniform(4), last_step=last_step, policy=self.policy, switches=switches
        )
        self.now, self.events = 0.0, list[AdaptiveEvent]()
        self.begun = self.tell(JobReady(at_seconds=0, step=1))

    def tell(self, event: AdaptiveEvent) -> tuple[AdaptiveCommand, ...]:
        self.events.append(event)
        commands = self.controller.handle(event)
        self.controller.check()
        return commands

    def step(self, seconds: float | None = None, tokens: int = 100) -> tuple[AdaptiveCommand, ...]:
        self.now += seconds or SECONDS[self.controller.plan_id]
        taken = seconds or SECONDS[self.controller.plan_id]
        step = self.controller.step
        return self.tell(StepMeasured(at_seconds=self.now, step=step, step_seconds=taken, tokens=tokens))

    def answer(self, search: Search, *found: Candidate, band: Band | None = None) -> tuple[AdaptiveCommand, ...]:
        return self.tell(
            SearchDone(at_seconds=self.now, search_id=search.search_id, candidates=found, band=band, reason="none fits")
        )

    def done(self, plan: Plan) -> tuple[AdaptiveCommand, ...]:
        return self.tell(TransitionDone(at_seconds=self.now, plan=plan, state_version=1, pause_seconds=1))

    def until_search(self) -> Search:
        for _ in range(30):
            if found := [command for command in self.step() if isinstance(command, Search)]:
                return found[0]
        raise AssertionError("no search")

    def until_change(self, limit: int = 60) -> tuple[ChangePlan, Decision]:
        for _ in range(limit):
            commands = self.step()
            if isinstance(commands[-1], ChangePlan):
                return commands[-1], [e for e in entries(commands) if isinstance(e, Decision)][-1]
        raise AssertionError("no change")


def test_evidence_search_regret_change_probation() -> None:
    job = Job()
    assert job.step() == (RunStep(step=2),)  # one step is no evidence
    search = job.until_search()
    assert search.request.reason == "the first plan is measured"
    assert (search.request.present, search.request.slots) == (POOR, (0, 1, 2, 3))
    assert job.answer(search, shown(BETTER, 12.0)) == ()  # weighed before the next step
    rejected = entries(job.step())[0]
    assert isinstance(rejected, Decision)
    assert isinstance(rejected.admission, Rejected)
    assert (rejected.admission.reason, rejected.admission.threshold_seconds) == ("regret", 6.0)
    change, decision = job.until_change()
    assert change.plan == BETTER
    assert isinstance(decision.admission, Admitted)
    assert decision.admission.regret_seconds >= 6.0
    assert decision.weighed[0].saving_seconds == pytest.approx(2.0)
    assert job.done(BETTER)[-1] == RunStep(step=change.step)
    first, second = job.step(), job.step()
    assert not entries(first)
    ended = entries(second)[0]
    assert isinstance(ended, ProbationEnded)
    assert (ended.steps, ended.verdict) == (2, "kept")
    assert ended.before_ratio == pytest.approx(0.8)
    (again,) = [command for command in second if isinstance(command, Search)]
    assert (again.request.reason, again.request.include) == ("probation is over", (POOR,))


def test_while_a_change_waits_only_the_nearest_is_weighed_at_every_step_and_all_when_anything_is_decided() -> None:
    seconds, asked = dict(SECONDS), Counter[str]()

    class Counting(TableOutlook):
        def step(self, plan_id: str) -> Estimate:
            asked[plan_id] += 1
            return super().step(plan_id)

    job = Job(seconds=seconds, last_step=400)
    job.policy.outlook = Counting(seconds, 0.02)
    job.answer(job.until_search(), shown(BETTER, 200.0), shown(SMALL, 200.0))
    (first,) = entries(job.step())
    assert isinstance(first, Decision)
    assert [w.plan_id for w in first.weighed] == [BETTER.plan_id, SMALL.plan_id]
    asked.clear()
    waited = 5 * WHOLE_STEPS
    for _ in range(waited):
        assert not entries(job.step())
    assert asked[BETTER.plan_id] >= waited
    assert asked[SMALL.plan_id] == waited // WHOLE_STEPS
    seconds[SMALL.plan_id] = 5.0
    said = next(found for found in (entries(job.step()) for _ in range(WHOLE_STEPS)) if found)[0]
    assert isinstance(said, Decision)
    assert isinstance(said.admission, Rejected)
    assert said.admission.best is not None
    assert said.admission.best.plan_id == SMALL.plan_id
    change, decision = job.until_change(200)
    assert change.plan == SMALL
    assert len(decision.weighed) == 2


def test_a_plan_that_is_worse_than_promised_is_left_again_like_any_other() -> None:
    job = Job(caution=replace(CAUTION, probation_steps=4))
    job.answer(job.until_search(), shown(BETTER, 2.0))
    job.until_change()
    commands = job.done(BETTER)
    while not entries(commands):
        commands = job.step(13.0)
    (ended,) = entries(commands)
    assert isinstance(ended, ProbationEnded)
    assert ended.verdict == "worse"
    assert ended.learnt_ratio > 1.1
    (search,) = [command for command in commands if isinstance(command, Search)]
    assert dict(search.request.ratios)[job.policy._kind] == pytest.approx(ended.learnt_ratio)
    job.answer(search, shown(POOR, 2.0))
    for _ in range(60):
        commands = job.step(13.0)
        if isinstance(commands[-1], ChangePlan):
            break
    assert isinstance(commands[-1], ChangePlan)
    assert commands[-1].plan == POOR


def test_a_lost_slot_voids_the_step_and_forces_the_best_that_is_left() -> None:
    job = Job()
    (search,) = job.tell(FleetChanged(at_seconds=1, fleet=uniform(3), lost_slots=(3,)))
    assert isinstance(search, Search)
    assert (job.controller.state, search.request.empty_slots) == ("searching", (3,))
    other = plan_on((0, 1))
    job.policy.outlook.seconds[other.plan_id] = 40.0  # pyright: ignore[reportAttributeAccessIssue]
    commands = job.answer(search, shown(other, 0.0), shown(SMALL, 5.0), shown(BETTER, 0.0))
    assert isinstance(commands[-1], ChangePlan)
    assert commands[-1].plan == SMALL
    (decision,) = entries(commands)
    assert isinstance(decision, Decision)
    assert isinstance(decision.admission, Forced)
    assert [w.barred for w in decision.weighed] == ["", "", "slot 3 is away or about to leave"]
    assert job.done(SMALL)[-1] == RunStep(step=1)


def test_without_a_plan_that_fits_it_waits_for_the_fleet() -> None:
    job = Job()
    (search,) = job.tell(FleetChanged(at_seconds=1, fleet=uniform(1), lost_slots=(1, 2, 3)))
    assert isinstance(search, Search)
    (decision,) = entries(job.answer(search))
    assert isinstance(decision, Decision)
    assert isinstance(decision.admission, Rejected)
    assert "slot 1 of the plan is gone; none fits" in decision.admission.detail
    assert job.controller.state == "waiting"
    (search,) = job.tell(FleetChanged(at_seconds=9, fleet=uniform(4)))
    assert isinstance(search, Search)
    (change,) = [c for c in job.answer(search, shown(POOR, 3.0)) if isinstance(c, ChangePlan)]
    assert change.plan == POOR  # rebuilt: its slots came back empty
    job.done(POOR)
    job.tell(StopRequested(at_seconds=9))
    assert job.step() == (Finish(reason="stopped"),)


def test_an_answer_for_another_fleet_is_dropped() -> None:
    job = Job()
    search = job.until_search()
    (again,) = job.tell(FleetChanged(at_seconds=30, fleet=uniform(5)))
    assert isinstance(again, Search)
    assert entries(job.answer(search, shown(BETTER, 0.0))) == [
        Dropped(at_seconds=job.now, step=job.controller.step, search_id=search.search_id)
    ]
    with pytest.raises(InvalidEvent, match="search 7"):
        job.tell(SearchDone(at_seconds=0, search_id=7, candidates=()))


def test_a_notice_is_used_until_the_last_step_that_fits_before_it() -> None:
    job = Job()
    job.step()
    (search,) = job.tell(PreemptionNotice(at_seconds=job.now, slots=(3,), deadline_seconds=job.now + 48))
    assert isinstance(search, Search)
    assert search.request.slots == (0, 1, 2)
    job.answer(search, shown(SMALL, 3.0))
    assert job.step()[-1] == RunStep(step=3)  # 38 s left, a step takes 10
    assert job.step()[-1] == RunStep(step=4)  # 28 s
    commands = job.step()  # 18 s: 1.5 steps and a change do not fit any more
    assert isinstance(commands[-1], ChangePlan)
    assert commands[-1].plan == SMALL
    assert "slot 3 of the plan leaves" in commands[-1].reason


@pytest.mark.parametrize(
    ("price", "commit", "saved"), [(11.0, 0.0, False), (13.0, 0.0, True), (30.0, 11.0, False), (30.0, 13.0, True)]
)
def test_a_change_that_commits_after_the_deadline_saves_first(price: float, commit: float, saved: bool) -> None:
    job = Job()
    job.step()
    (search,) = job.tell(PreemptionNotice(at_seconds=job.now, slots=(3,), deadline_seconds=job.now + 22))
    assert isinstance(search, Search)
    asked = shown(SMALL, price)
    job.answer(search, replace(asked, price=replace(asked.price, commit_seconds=commit)))
    (command,) = (each for each in job.step() if isinstance(each, ChangePlan | Restart))  # 12 s are left
    live = ChangePlan(step=command.step, plan=SMALL, reason=command.reason, urgent=True)
    assert isinstance(command, Restart) if saved else command == live
    assert command.plan == SMALL
    assert ("the state is saved first" in command.reason) == saved


def test_slots_that_wait_for_the_plan_to_leave_them_are_left_live() -> None:
    job = Job()
    job.step()
    (search,) = job.tell(PreemptionNotice(at_seconds=job.now, slots=(3,), deadline_seconds=job.now))
    assert isinstance(search, Search)
    job.answer(search, shown(SMALL, 30.0))
    assert isinstance(job.step()[-1], ChangePlan)


def test_what_is_lost_already_is_not_saved() -> None:
    pair = plan_on((0, 1))
    job = Job(seconds=SECONDS | {pair.plan_id: 12.0})
    job.step()
    job.tell(PreemptionNotice(at_seconds=job.now, slots=(2,), deadline_seconds=job.now + 5))
    fleet = uniform(4).without(frozenset({3}))
    commands = job.tell(FleetChanged(at_seconds=job.now, fleet=fleet, lost_slots=(3,)))
    (search,) = (each for each in commands if isinstance(each, Search))
    assert isinstance(job.answer(search, shown(pair, 30.0))[-1], ChangePlan)


def test_a_memory_alarm_forces_a_change_when_there_is_one() -> None:
    job = Job()
    alarm = MemoryAlarm(at_seconds=1, slot=2, phase="generate", used_bytes=950, budget_bytes=1000)
    (search,) = job.tell(alarm)
    assert isinstance(search, Search)
    job.answer(search)
    assert job.step()[-1] == RunStep(step=2)  # nothing else fits: it goes on
    job = Job()
    (search,) = job.tell(alarm)
    assert isinstance(search, Search)
    job.answer(search, shown(SMALL, 3.0))
    commands = job.step()
    assert isinstance(commands[-1], ChangePlan)
    assert "slot 2 used 950 of 1,000 bytes in generate" in commands[-1].reason


def test_a_memory_alarm_does_not_trust_the_last_answer() -> None:
    job = Job()
    job.answer(job.until_search(), shown(BETTER, 90.0))
    job.step()
    commands = job.tell(MemoryAlarm(at_seconds=1, slot=2, phase="train", used_bytes=950, budget_bytes=1000))
    assert [type(command) for command in commands] == [Search]
    assert job.step()[-1] == RunStep(step=job.controller.step)


def test_a_plan_that_will_not_fit_is_left_before() -> None:
    misfits = {POOR.plan_id: Misfit(within_steps=2, reason="kv cache 12 bytes short")}
    job = Job(misfits=misfits)
    search = job.begun[0]
    assert isinstance(search, Search)
    assert "stops fitting in 2 steps: kv cache" in search.request.reason
    job.answer(search, shown(SMALL, 90.0))
    commands = job.step()
    assert isinstance(commands[-1], ChangePlan)
    assert "kv cache 12 bytes short" in commands[-1].reason


def test_a_plan_that_does_not_fit_runs_no_step() -> None:
    job = Job(misfits={POOR.plan_id: Misfit(within_steps=0, reason="kv cache 12 bytes short")})
    assert job.controller.state == "searching"


def refused(job: Job, width_tokens: int) -> StepRefused:
    step = job.controller.step
    return StepRefused(at_seconds=job.now, step=step, width_tokens=width_tokens, reason="slot 2 needs more")


def test_a_step_whose_rows_are_too_wide_runs_under_a_plan_that_holds_them() -> None:
    job = Job(room_tokens={POOR.plan_id: 64, BETTER.plan_id: 80})
    job.step()
    step = job.controller.step
    (search,) = job.tell(refused(job, 96))
    assert isinstance(search, Search)
    assert search.request.reason == f"step {step} has rows of 96 tokens"
    assert job.controller.state == "searching"
    change = job.answer(search, shown(BETTER, 1.0), shown(SMALL, 90.0))[-1]
    assert isinstance(change, ChangePlan)
    assert (change.step, change.plan) == (step, SMALL)  # BETTER is faster, and too narrow as well
    assert "rows of 96 tokens" in change.reason
    assert job.done(SMALL)[-1] == RunStep(step=step)


def test_without_a_plan_that_holds_the_rows_the_job_waits() -> None:
    job = Job(room_tokens={POOR.plan_id: 64})
    (search,) = job.tell(refused(job, 96))
    assert isinstance(search, Search)
    assert not [command for command in job.answer(search) if isinstance(command, RunStep)]
    assert job.controller.state == "waiting"


def test_only_the_step_under_way_is_refused() -> None:
    job = Job()
    with pytest.raises(InvalidEvent, match="step 7 was refused while step 1 was running"):
        job.tell(replace(refused(job, 96), step=7))


@pytest.mark.parametrize(
    ("switches", "reason"),
    [
        (Switches(freeze=True), "frozen"),
        (Switches(max_transitions_count=0), "max transitions"),
        (Switches(deny=("actor_train TP1*",)), "no candidate"),
    ],
)
def test_switches_bar_what_is_not_forced(switches: Switches, reason: str) -> None:
    job = Job(switches=switches)
    job.answer(job.until_search(), shown(BETTER, 0.1))
    found = [entry for _ in range(20) for entry in entries(job.step())]
    assert [e.admission.reason for e in found] == [reason]  # pyright: ignore[reportAttributeAccessIssue]
    if reason != "no candidate":  # forced all the same
        (search,) = job.tell(FleetChanged(at_seconds=1, fleet=uniform(3), lost_slots=(3,)))
        assert isinstance(search, Search)
        assert isinstance(job.answer(search, shown(SMALL, 1.0))[-1], ChangePlan)


def test_a_dry_run_only_says_what_it_would_do() -> None:
    job = Job(switches=Switches(dry_run=True))
    job.answer(job.until_search(), shown(BETTER, 0.1))
    commands = [command for _ in range(20) for command in job.step()]
    assert not [command for command in commands if isinstance(command, ChangePlan)]
    found = [e for e in entries(tuple(commands)) if isinstance(e, Decision) and isinstance(e.admission, Admitted)]
    assert [(entry.admission.chosen.plan_id, entry.dry) for entry in found] == [(BETTER.plan_id, True)]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_failed_change_is_not_tried_again_here() -> None:
    job = Job()
    job.answer(job.until_search(), shown(BETTER, 1.0), shown(SMALL, 1.0))
    change, _ = job.until_change()
    commands = job.tell(TransitionFailed(at_seconds=job.now, plan=change.plan, reason="a peer did not answer"))
    assert commands[-1] == RunStep(step=change.step)
    search = next(command for command in commands if isinstance(command, Search))
    job.answer(search, shown(BETTER, 1.0))
    found = [entry for _ in range(20) for entry in entries(job.step())]
    assert found
    assert [w.barred for w in found[-1].weighed] == ["the change failed on this fleet"]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_search_is_due_outside_of_the_answers_band_alone() -> None:
    job = Job()
    band = Band(least_step_seconds=9, most_step_seconds=11, least_tokens=50, most_tokens=150)
    job.answer(job.until_search(), shown(SMALL, 5.0), band=band)
    for _ in range(10):
        assert not [command for command in job.step(tokens=140) if isinstance(command, Search)]
    (search,) = [command for command in job.step(tokens=160) if isinstance(command, Search)]
    assert "160 tokens" in search.request.reason


def test_one_changed_event_changes_a_decision() -> None:
    def play(factor: float) -> list[object]:
        job = Job()
        job.answer(job.until_search(), shown(BETTER, 12.0))
        return [entry for _ in range(4) for entry in entries(job.step(10.0 * factor))]

    assert play(1.0) == play(1.0)
    assert play(1.0) != play(1.001)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (JobReady(at_seconds=0, step=1), "belongs to starting"),
        (StepMeasured(at_seconds=0, step=5, step_seconds=1, tokens=1), "step 5 finished while step 1"),
        (TransitionDone(at_seconds=0, plan=BETTER, state_version=1, pause_seconds=1), "belongs to changing"),
        (FleetChanged(at_seconds=0, fleet=uniform(3)), "slot 3 left the fleet and is not in lost_slots"),
    ],
)
def test_what_cannot_be_is_refused(event: AdaptiveEvent, why: str) -> None:
    with pytest.raises(InvalidEvent, match=why):
        Job().tell(event)


def test_a_step_without_tokens_is_refused_by_nereus_alone() -> None:
    with pytest.raises(TypeError, match="StepMeasured"):
        Job().tell(StepFinished(at_seconds=0, step=1, step_seconds=1.0))


def test_news_of_a_slot_are_searched_for_even_when_the_step_is_as_before() -> None:
    job = Job()
    band = Band(least_step_seconds=9, most_step_seconds=11, least_tokens=50, most_tokens=150)
    job.answer(job.until_search(), shown(SMALL, 5.0), band=band)
    assert not [command for command in job.step() if isinstance(command, Search)]
    step, news = job.controller.step, "slot 3 computes at 0.46 of the usual speed"
    told = StepMeasured(at_seconds=job.now + 10, step=step, step_seconds=10.0, tokens=100, news=news)
    (search,) = [command for command in job.tell(told) if isinstance(command, Search)]
    assert search.request.reason == news


NEWS = "slot 3 computes at 0.46 of the usual speed"


def told_news(job: Job) -> tuple[AdaptiveCommand, ...]:
    step = job.controller.step
    return job.tell(StepMeasured(at_seconds=job.now + 10, step=step, step_seconds=10.0, tokens=100, news=NEWS))


def test_a_step_waits_for_the_search_when_news_made_the_plan_much_slower() -> None:
    """A search takes a small part of the step that is saved."""
    job = Job(slowdown=2.0)
    job.answer(job.until_search(), shown(SMALL, 5.0))
    commands = told_news(job)
    search = commands[-1]
    assert isinstance(search, Search)
    assert job.controller.state == "searching"
    commands = job.answer(search, shown(BETTER, 1.0))
    assert [type(each) for each in commands if not isinstance(each, Record)] == [ChangePlan]


@pytest.mark.parametrize("slowdown", [1.1, 0.5])
def test_a_step_does_not_wait_when_news_change_little_or_are_good(slowdown: float) -> None:
    job = Job(slowdown=slowdown)
    job.answer(job.until_search(), shown(SMALL, 5.0))
    assert [type(each) for each in told_news(job) if not isinstance(each, Record)] == [Search, RunStep]


def test_a_step_does_not_wait_where_no_change_may_follow() -> None:
    for switches in (Switches(freeze=True), Switches(dry_run=True)):
        job = Job(slowdown=2.0, switches=switches)
        job.answer(job.until_search(), shown(SMALL, 5.0))
        assert RunStep(step=job.controller.step) in told_news(job) or job.controller.state == "running"
    job = Job(slowdown=2.0)
    told_news(job)  # before there is evidence
    assert job.controller.state == "running"


def test_the_step_runs_once_the_search_found_nothing() -> None:
    job = Job(slowdown=2.0)
    job.answer(job.until_search(), shown(SMALL, 5.0))
    commands = told_news(job)
    search = commands[-1]
    assert isinstance(search, Search)
    assert RunStep(step=job.controller.step) in job.answer(search)
    assert job.controller.state == "running"
