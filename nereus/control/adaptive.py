"""The policy `nereus`: the best plan that a search finds, taken when it is forced or worth its price."""

from __future__ import annotations

from math import log

from nereus.control.admission import (
    Admission,
    Admitted,
    Caution,
    Decision,
    Forced,
    Known,
    Rejected,
    Weighed,
    admit,
    force,
    nearest,
    weigh,
)
from nereus.control.horizon import History, Horizon
from nereus.control.policies import Choice, Entry, Question, Situation, barred
from nereus.control.probation import Noise, Offsets, Probation
from nereus.control.records import Candidate, Outlook, SearchDone, StepMeasured, plan_kind
from nereus.events import StepFinished
from nereus.layout import Plan

RECENT_COUNT = 4
"""How many plans that ran are priced again in every search."""
KEPT_COUNT = 32
"""How many plans that ran are remembered."""
AHEAD_STEPS = 3
"""So long before a change is forced by a plan that stops fitting, candidates are searched anew."""
WHOLE_STEPS = 4
"""All candidates are weighed at least so often, the nearest at every step."""
SLOWED_RATIO = 1.2
"""A plan that news make so much slower does not run before the search has answered: a search takes a small part of a step."""


class Adaptive:
    """Holds what was learnt on the job; every value in it is frozen, and follows from what it was told alone."""

    name = "nereus"
    by_restart = False

    def __init__(self, outlook: Outlook, first: Plan, caution: Caution | None = None) -> None:
        self.caution = caution or Caution()
        self.outlook = outlook
        self._plan_id: str = first.plan_id
        self._kind: str = plan_kind(first)
        self.offsets = Offsets().first(self._kind)
        self.noise = Noise()
        self.history = History()
        self.probation: Probation | None = None
        self.regret_seconds = 0.0
        self.measured_steps = 0
        self.evident = False
        self._due: str | None = None
        self._slowed = False  # by the last news, and no search has answered since
        self._answer: SearchDone | None = None
        self._answered_steps = 0  # how many were measured when it came
        self._near: tuple[str, int] | None = None  # the nearest when all were weighed, and how many steps ago
        self._foreseen = False  # a search was asked for because the plan stops fitting
        self._counted = True  # the regret of the last step
        self._ran: dict[str, Plan] = {self._plan_id: first}
        self._kinds: dict[str, str] = {self._plan_id: self._kind}  # of the plans that ran and the candidates
        self._bars: dict[str, str] | None = None
        self._entries: tuple[Entry, ...] = ()
        self._last: tuple[object, ...] = ()

    # -- what happened ------------------------------------------------------------------------------------------------

    def finished(self, step: StepFinished | StepMeasured, plan_id: str) -> None:
        """Learns from a step: the plan's ratio and the noise, then the coefficients from what the ratio leaves."""
        if not isinstance(step, StepMeasured):
            raise TypeError("the policy nereus needs StepMeasured: a step's tokens, not its seconds alone")
        expected, offset = self.outlook.expected(step, plan_id), self.offsets.of(self._kind)
        if self.probation is not None:
            self.probation = self.probation.observe(
                tokens=step.tokens,
                measured_seconds=step.step_seconds,
                predicted_seconds=expected.mean_seconds,
                before_seconds=self._expected_of(step, self.probation.before_id),
            )
        surprise = log(step.step_seconds / (expected.mean_seconds * offset.ratio))
        belief = expected.deviation_seconds / expected.mean_seconds
        self.noise = self.noise.observe(surprise, belief + offset.deviation_share)
        share = self.noise.share
        self.offsets = self.offsets.observe(self._kind, surprise, belief_share=belief, noise_share=share)
        ratio = self.offsets.of(self._kind).ratio
        before = self.outlook.step(plan_id).mean_seconds if step.news else 0.0
        self.outlook = self.outlook.observe(step, plan_id, ratio=ratio, noise_share=share)
        self.history = self.history.step()
        self.measured_steps += 1
        self._counted = False
        if self.probation is not None and self.probation.over:
            self._entries += (self.probation.ended(ratio, share),)
            self.probation = None
            self._due = "probation is over"
        elif not self.evident and self.measured_steps >= self.caution.wanted_steps(self.caution.least_steps, share):
            self.evident, self._due = True, "the first plan is measured"
        if step.news:
            self.happened(step.news, ended=True)
            self._slowed = self.outlook.step(plan_id).mean_seconds > SLOWED_RATIO * before
        self._watch(step, plan_id)

    def _expected_of(self, step: StepMeasured, plan_id: str) -> float:
        return self.outlook.expected(step, plan_id).mean_seconds * self.offsets.of(self._kinds[plan_id]).ratio

    def _watch(self, step: StepMeasured, plan_id: str) -> None:
        """A search is due when what is foreseen left the band of the last answer, or a change will be forced soon."""
        misfit = self.outlook.misfit(plan_id, step.step + 1)
        if not self._foreseen and misfit and misfit.within_steps <= self.caution.lead_steps + AHEAD_STEPS:
            self._foreseen = True
            self._due = f"the plan stops fitting in {misfit.within_steps} steps: {misfit.reason}"
        if self._answer is not None and self._answer.band is not None:
            seconds = self.outlook.step(plan_id).mean_seconds * self.offsets.of(self._kind).ratio
            if not self._answer.band.holds(seconds, step.tokens):
                self._due = f"a step of {seconds:.4g} s and {step.tokens} tokens is outside the last answer's band"

    def _forecast(self, situation: Situation) -> str | None:
        misfit = self.outlook.misfit(situation.plan_id, situation.step)
        if misfit is None or misfit.within_steps > self.caution.lead_steps:
            return None
        return f"the plan stops fitting in {misfit.within_steps} steps: {misfit.reason}"

    def happened(self, reason: str, *, ended: bool) -> None:
        """A search is due; the plan's life may have ended. What put it on probation no longer holds."""
        self._due, self._answer, self.probation, self._near = reason, None, None, None
        if ended:
            self.history = self.history.ended()

    def outgrown(self, step: int, width_tokens: int) -> None:
        """The present plan cannot hold the rows of the step: it does not fit now, and a search is due."""
        self.outlook = self.outlook.met_rows(step, width_tokens)
        self.happened(f"step {step} has rows of {width_tokens} tokens", ended=True)

    def overflowed(self, plan_id: str, used_bytes: int, budget_bytes: int) -> None:
        """Memory is predicted with that margin from now on, so that the same plan is not taken again."""
        if used_bytes > budget_bytes:
            self.outlook = self.outlook.overflowed(plan_id, used_bytes)

    def answered(self, answer: SearchDone) -> None:
        """Meets the candidates."""
        self._due, self._answer, self._bars, self._near, self._slowed = None, answer, None, None, False
        self._answered_steps = self.measured_steps
        ran = {name: kind for name, kind in self._kinds.items() if name in self._ran}
        self._kinds = {**ran, **{c.plan_id: c.kind for c in answer.candidates}}
        self.outlook = self.outlook.met(answer.candidates)

    def changed(self, plan: Plan, plan_id: str) -> None:
        """Another plan is live: on probation unless it was rebuilt in place; regret begins anew."""
        if plan_id != self._plan_id:
            wanted = self.caution.wanted_steps(self.caution.probation_steps, self.noise.share)
            self.probation = Probation(plan_id=plan_id, before_id=self._plan_id, wanted_steps=wanted)
        self._plan_id, self._kind = plan_id, self._kinds.get(plan_id) or plan_kind(plan)
        self._answer, self._due, self._foreseen, self._near, self._slowed = None, None, False, None, False
        self.regret_seconds, self._counted = 0.0, True
        self._ran.pop(plan_id, None)
        self._ran[plan_id] = plan
        while len(self._ran) > KEPT_COUNT:
            del self._ran[next(iter(self._ran))]
        self._kinds = {plan_id: self._kind} | {name: self._kinds[name] for name in self._ran if name != plan_id}

    # -- what to do ---------------------------------------------------------------------------------------------------

    def horizon(self, situation: Situation) -> Horizon:
        """The expected life of a plan taken now."""
        return self.history.horizon(situation.remaining_steps)

    def question(self, situation: Situation) -> Question | None:
        """The search that is due, or that a forced change waits for."""
        due, forecast = self._due, self._forecast(situation)
        if situation.answer is None and not situation.searching:
            due = situation.broken or due or situation.pressing or forecast
        elective = not (situation.broken or situation.pressing or situation.leaving_slots or forecast)
        early = not self.evident or self.probation is not None
        if due is None or (elective and early):
            return None
        recent = [plan for name, plan in self._ran.items() if name != situation.plan_id][-RECENT_COUNT:]
        return Question(
            reason=due,
            horizon_steps=self.horizon(situation).expected_steps,
            ratios=self.offsets.ratios(),
            include=tuple(recent),
        )

    def choose(self, situation: Situation) -> Choice:
        """Weighs the answer's candidates; without an answer the step runs if it can.

        While the nearest is rejected as before, the others wait: whatever is decided anew is decided among all.
        """
        if self._waits(situation):  # the last step's regret is counted by the answer
            entries, self._entries = self._entries, ()
            return Choice(action="wait", reason="the search about the news is under way", entries=entries)
        weighed = self._weighed(situation, self._near_id())
        self._count_regret(weighed)
        admission = self._admission(situation, weighed)
        if self._near is not None and self._said(situation, admission) != self._last:
            self._near = None
            weighed = self._weighed(situation)
            admission = self._admission(situation, weighed)
        self._weighed_all(weighed)
        if self._is_spent(situation, weighed):
            self._due = "no candidate of the last answer may be used any more"
        entries = self._take_entries(situation, admission, weighed)
        if isinstance(admission, Rejected):
            action = "wait" if situation.broken or self._misfit_now(situation) else "stay"
            return Choice(action=action, reason=admission.detail, entries=entries)
        if isinstance(admission, Admitted) and len(self._ran) > 1 and not situation.switches.dry_run:
            self.history = self.history.ended()  # the first plan's life says nothing: nobody searched for it
        answer = situation.answer
        assert answer is not None
        plan_id = admission.chosen.plan_id
        plan = next(c.plan for c in answer.candidates if c.plan_id == plan_id)
        return Choice(action="move", plan=plan, plan_id=plan_id, reason=_why(admission), entries=entries)

    def _waits(self, situation: Situation) -> bool:
        """Whether the step waits for the answer about a plan that news made slower, and which may be left."""
        if not self._slowed or situation.switches.dry_run or self._hindrance(situation, None) is not None:
            return False
        return situation.searching or self.question(situation) is not None

    def _is_spent(self, situation: Situation, weighed: tuple[Weighed, ...]) -> bool:
        """Whether steps since the answer have barred every candidate of it, and a change is needed: others may be left."""
        needed = situation.broken or situation.pressing or situation.leaving_slots or self._forecast(situation)
        return bool(needed and weighed and nearest(weighed) is None and self.measured_steps > self._answered_steps)

    def _near_id(self) -> str | None:
        """The one candidate to weigh; None for all of them."""
        if self._near is not None and self._near[1] >= WHOLE_STEPS:
            self._near = None
        return None if self._near is None else self._near[0]

    def _weighed_all(self, weighed: tuple[Weighed, ...]) -> None:
        """Counts the steps since all were weighed."""
        if self._near is not None:
            self._near = (self._near[0], self._near[1] + 1)
        elif (best := nearest(weighed)) is not None:
            self._near = (best.plan_id, 1)

    def _weighed(self, situation: Situation, near_id: str | None = None) -> tuple[Weighed, ...]:
        if situation.answer is None:
            return ()
        known = Known(
            outlook=self.outlook,
            offsets=self.offsets,
            present_id=situation.plan_id,
            present_kind=self._kind,
            present_seconds=self.outlook.step(situation.plan_id).mean_seconds,
            horizon=self.horizon(situation),
            caution=self.caution,
            step=situation.step,
        )
        if self._bars is None:
            usable = frozenset(situation.usable_slots)
            self._bars = {c.plan_id: barred(c, usable, situation.switches) for c in situation.answer.candidates}
        found = (c for c in situation.answer.candidates if near_id in (None, c.plan_id))
        return tuple(weigh(c, known, self._barred(c, situation)) for c in found)

    def _barred(self, candidate: Candidate, situation: Situation) -> str:
        if candidate.plan_id == situation.plan_id and not situation.broken:
            return "the present plan"
        if candidate.plan_id in situation.failed:
            return "the change failed on this fleet"
        misfit = self.outlook.misfit(candidate.plan_id, situation.step)
        if misfit is not None and misfit.within_steps == 0:
            return f"does not fit: {misfit.reason}"
        assert self._bars is not None
        return self._bars[candidate.plan_id]

    def _misfit_now(self, situation: Situation) -> str | None:
        misfit = self.outlook.misfit(situation.plan_id, situation.step)
        return f"the plan does not fit: {misfit.reason}" if misfit is not None and misfit.within_steps == 0 else None

    def _admission(self, situation: Situation, weighed: tuple[Weighed, ...]) -> Admission:
        must = situation.broken or self._misfit_now(situation)
        should = must or situation.pressing or self._forecast(situation)
        best = nearest(weighed)
        if should and (forced := force(weighed, should, self.caution)) is not None:
            return forced
        if must:
            why = situation.answer.reason if situation.answer is not None else "the search is under way"
            return Rejected(reason="no candidate", detail=f"{must}; {why or 'no candidate fits'}")
        return self._hindrance(situation, best) or admit(best, self.regret_seconds, self.caution)

    def _hindrance(self, situation: Situation, best: Weighed | None) -> Rejected | None:
        """What bars every change that is not forced."""
        switches = situation.switches
        most = switches.max_transitions_count
        if switches.freeze:
            return Rejected(reason="frozen", detail="nereus.freeze is on", best=best)
        if most is not None and situation.transitions_count >= most:
            return Rejected(reason="max transitions", detail=f"nereus.max_transitions = {most} are done", best=best)
        if not self.evident:
            wanted = self.caution.wanted_steps(self.caution.least_steps, self.noise.share)
            detail = f"{self.measured_steps} of {wanted} steps are measured"
            return Rejected(reason="evidence", detail=detail, best=best)
        if self.probation is not None:
            detail = f"{self.probation.steps} of {self.probation.wanted_steps} steps of probation are done"
            return Rejected(reason="probation", detail=detail, best=best)
        return None

    def _count_regret(self, weighed: tuple[Weighed, ...]) -> None:
        """The last step's regret of staying: what the nearest candidate surely would have saved, never below none in sum."""
        best = nearest(weighed)
        if self._counted or best is None:
            return
        self._counted = True
        self.regret_seconds = max(0.0, self.regret_seconds + best.sure_saving(self.caution))

    def _take_entries(
        self, situation: Situation, admission: Admission, weighed: tuple[Weighed, ...]
    ) -> tuple[Entry, ...]:
        """What to record: every change, and a rejection when its reason, its candidate or the answer is another."""
        entries, self._entries = self._entries, ()
        search = None if situation.answer is None else situation.answer.search_id
        now = self._said(situation, admission)
        if now == self._last or search is None:  # without an answer nothing was weighed
            return entries
        self._last = now
        decision = Decision(
            at_seconds=situation.at_seconds,
            step=situation.step,
            policy=self.name,
            plan_id=situation.plan_id,
            admission=admission,
            weighed=weighed,
            horizon=self.horizon(situation),
            present_seconds=self.outlook.step(situation.plan_id).mean_seconds * self.offsets.of(self._kind).ratio,
            noise_share=self.noise.share,
            search_id=search,
            dry=situation.switches.dry_run,
        )
        return (*entries, decision)

    def _said(self, situation: Situation, admission: Admission) -> tuple[object, ...]:
        """What of a decision is worth another record when it changes."""
        search = None if situation.answer is None else situation.answer.search_id
        if isinstance(admission, Rejected):
            best = None if admission.best is None else admission.best.plan_id
            return (admission.reason, best, search, situation.plan_id)
        return (type(admission).__name__, admission.chosen.plan_id, search, situation.plan_id)

    def check(self) -> None:
        """What it holds does not contradict itself."""
        assert self.regret_seconds >= 0.0, f"regret of {self.regret_seconds} s"
        assert self._plan_id in self._ran, f"the present plan {self._plan_id} is not among those that ran"
        probation = self.probation
        assert probation is None or probation.plan_id == self._plan_id, "a plan is on probation that is not live"
        assert probation is None or not probation.over, "a probation that is over goes on"
        assert all(offset.variance_ratio >= 0 for offset in self.offsets.known.values()), "negative variance"


def _why(admission: Admitted | Forced) -> str:
    chosen = admission.chosen
    if isinstance(admission, Forced):
        return f"forced: {admission.reason}"
    saves = f"saves {chosen.saving_seconds:.4g} ± {chosen.saving_deviation_seconds:.2g} s a step"
    return f"{saves} for {chosen.price_seconds:.4g} s, over {chosen.horizon_steps:.0f} expected steps"
