"""The adaptive controller under random orders of events: invariants after each, and the same commands on a replay."""

from __future__ import annotations

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nereus.control.adaptive import Adaptive
from nereus.control.admission import Caution
from nereus.control.controller import AdaptiveCommand, AdaptiveController, AdaptiveEvent, Record
from nereus.control.policies import DpScaling, Fixed, Policy
from nereus.control.records import (
    Band,
    FleetChanged,
    MemoryAlarm,
    Misfit,
    PreemptionNotice,
    Restart,
    Search,
    SearchDone,
    StateRestored,
    StepMeasured,
    Switches,
    plan_slots,
)
from nereus.events import ChangePlan, Finish, JobReady, RunStep, StopRequested, TransitionDone, TransitionFailed
from nereus.fleet import Fleet, Node, uniform
from nereus.layout import Plan
from tests.core.control_scenes import TableOutlook, plan_on, shown

SLOTS = range(5)
LAST_STEP = 40
PLANS = [
    plan_on(slots, tp, pp)
    for slots in ((0,), (3,), (0, 1), (2, 3), (0, 1, 2), (1, 2, 4), (0, 1, 2, 3), (4, 3, 2, 1), (0, 1, 2, 3, 4))
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2))
    if len(slots) % (tp * pp) == 0
]
POLICIES = ("nereus", "fixed", "dp-scaling", "dp-divisible", "restart")
SWITCHES = (
    Switches(),
    Switches(),
    Switches(freeze=True),
    Switches(max_transitions_count=1),
    Switches(dry_run=True),
    Switches(deny=("* TP2*",)),
)


def fleet_of(slots: frozenset[int]) -> Fleet:
    device = uniform(1).nodes[0].device
    return Fleet(nodes=(Node(slots=tuple(sorted(slots)), device=device),)) if slots else Fleet(nodes=())


def policy_of(name: str, first: Plan, seconds: dict[str, float], misfits: dict[str, Misfit]) -> Policy:
    if name == "nereus":
        outlook = TableOutlook(seconds, joint_share=0.02, misfits=misfits, learns=True)
        return Adaptive(outlook, first, Caution(least_steps=1, probation_steps=2))
    if name == "fixed":
        return Fixed()
    return DpScaling(first, divisible=name == "dp-divisible", by_restart=name == "restart")


class RandomJob(RuleBasedStateMachine):
    """A world that answers in any order; it keeps its own account of what is under way."""

    @initialize(
        first=st.sampled_from(PLANS),
        name=st.sampled_from(POLICIES),
        switches=st.sampled_from(SWITCHES),
        seconds=st.lists(st.floats(1, 20), min_size=len(PLANS), max_size=len(PLANS)),
        misfit=st.dictionaries(st.sampled_from(PLANS), st.integers(0, 6), max_size=2),
    )
    def begin(self, first: Plan, name: str, switches: Switches, seconds: list[float], misfit: dict[Plan, int]) -> None:
        by_plan = {p.plan_id: s for p, s in zip(PLANS, seconds, strict=True)}
        misfits = {p.plan_id: Misfit(within_steps=n, reason="kv cache") for p, n in misfit.items()}

        def made() -> AdaptiveController:
            policy = policy_of(name, first, by_plan, misfits)
            fleet = fleet_of(frozenset(SLOTS))
            return AdaptiveController(plan=first, fleet=fleet, last_step=LAST_STEP, policy=policy, switches=switches)

        self.made, self.controller, self.name, self.switches = made, made(), name, switches
        self.now, self.present, self.plan, self.lost = 0.0, frozenset(SLOTS), first, frozenset[int]()
        self.leaving = frozenset[int]()
        self.running: int | None = None
        self.changing: ChangePlan | Restart | None = None
        self.searches: list[Search] = []
        self.next_step, self.ended = 1, False
        self.told: list[tuple[AdaptiveEvent, tuple[AdaptiveCommand, ...]]] = []
        self.tell(JobReady(at_seconds=0.0, step=1))

    def tell(self, event: AdaptiveEvent) -> None:
        commands = self.controller.handle(event)
        self.told.append((event, commands))
        self.controller.check()
        for command in commands:
            self.obey(command)

    def obey(self, command: AdaptiveCommand) -> None:
        match command:
            case RunStep(step=step):
                assert (self.running, self.changing, self.ended) == (None, None, False)
                assert step == self.next_step
                assert plan_slots(self.plan) <= self.present - self.lost
                self.running = step
            case ChangePlan() | Restart():
                assert (self.running, self.changing, self.ended) == (None, None, False)
                assert not self.switches.dry_run
                if self.name == "restart":
                    assert isinstance(command, Restart)
                elif isinstance(command, Restart):  # what is saved first would come too late
                    assert plan_slots(self.plan) & self.leaving
                assert plan_slots(command.plan) <= self.present
                assert self.switches.denies(command.plan) is None or self.name != "nereus"
                self.changing, self.lost_in_change = command, frozenset[int]()
            case Search():
                assert self.name == "nereus"
                assert set(command.request.slots) <= self.present
                assert command.request.present == self.plan
                self.searches.append(command)
            case Record():
                pass
            case Finish():
                assert (self.running, self.changing) == (None, None)
                self.ended = True

    def at(self) -> float:
        self.now += 1.0
        return self.now

    @precondition(lambda self: self.running is not None)
    @rule(seconds=st.floats(0.5, 30), tokens=st.integers(100, 2000))
    def step_ends(self, seconds: float, tokens: int) -> None:
        step, self.running = self.running, None
        assert step is not None
        self.next_step = step + 1
        self.tell(StepMeasured(at_seconds=self.at(), step=step, step_seconds=seconds, tokens=tokens))

    @precondition(lambda self: self.changing is not None)
    @rule(seconds=st.floats(0, 30))
    def change_ends(self, seconds: float) -> None:
        command, self.changing = self.changing, None
        assert command is not None
        self.plan, self.lost = command.plan, self.lost_in_change
        at = self.at()
        self.tell(TransitionDone(at_seconds=at, plan=self.plan, state_version=1, pause_seconds=seconds))

    @precondition(lambda self: self.changing is not None)
    @rule(back=st.integers(0, 3))
    def restart_ends(self, back: int) -> None:
        command, self.changing = self.changing, None
        assert command is not None
        self.plan, self.lost = command.plan, self.lost_in_change
        self.next_step = max(1, self.next_step - back)
        self.tell(StateRestored(at_seconds=self.at(), plan=self.plan, step=self.next_step, state_version=1))

    @precondition(lambda self: self.changing is not None)
    @rule()
    def change_fails(self) -> None:
        command, self.changing = self.changing, None
        assert command is not None
        self.tell(TransitionFailed(at_seconds=self.at(), plan=command.plan, reason="planned by the test"))

    @rule(slots=st.frozensets(st.sampled_from(SLOTS)), also=st.frozensets(st.sampled_from(SLOTS), max_size=1))
    def fleet_changes(self, slots: frozenset[int], also: frozenset[int]) -> None:
        lost = (self.present - slots) | (also & self.present)
        assume(slots != self.present or lost)
        self.present = slots
        self.lost |= lost
        if self.changing is not None:
            self.lost_in_change |= lost
        if not lost.isdisjoint(plan_slots(self.plan)):
            self.running = None
        self.tell(FleetChanged(at_seconds=self.at(), fleet=fleet_of(slots), lost_slots=tuple(sorted(lost))))

    @rule(
        slots=st.frozensets(st.sampled_from(SLOTS), min_size=1, max_size=2),
        seconds=st.floats(0, 60),
        held=st.booleans(),
    )
    def notice(self, slots: frozenset[int], seconds: float, held: bool) -> None:
        at = self.at()
        self.leaving = self.leaving | slots
        self.tell(PreemptionNotice(at_seconds=at, slots=tuple(sorted(slots)), deadline_seconds=at + seconds))

    @rule(slot=st.sampled_from(SLOTS))
    def alarm(self, slot: int) -> None:
        self.tell(MemoryAlarm(at_seconds=self.at(), slot=slot, phase="generate", used_bytes=99, budget_bytes=100))

    @precondition(lambda self: self.searches)
    @rule(
        which=st.integers(0, 3),
        plans=st.lists(st.sampled_from(PLANS), unique=True, max_size=6),
        price=st.floats(0, 50),
        wide=st.booleans(),
    )
    def search_ends(self, which: int, plans: list[Plan], price: float, wide: bool) -> None:
        search = self.searches.pop(max(0, len(self.searches) - 1 - which))
        least, most = (0.0, 1e9) if wide else (5.0, 6.0)
        band = Band(least_step_seconds=least, most_step_seconds=most, least_tokens=0, most_tokens=1e9)
        found = tuple(shown(plan, price, 0.1 * price) for plan in plans)
        self.tell(SearchDone(at_seconds=self.at(), search_id=search.search_id, candidates=found, band=band))

    @precondition(lambda self: len(self.told) > 25)
    @rule()
    def stop(self) -> None:
        self.tell(StopRequested(at_seconds=self.at()))

    @invariant()
    def the_job_is_never_forgotten(self) -> None:
        if not hasattr(self, "controller") or self.ended:
            return
        waits = self.controller.state in {"waiting", "searching"}
        assert waits or self.running is not None or self.changing is not None
        if self.controller.state == "searching":
            assert self.searches, "waits for an answer to a search that is not under way"

    def teardown(self) -> None:
        if hasattr(self, "made"):
            again = self.made()
            for event, commands in self.told:
                assert again.handle(event) == commands, event


TestRandomJob = RandomJob.TestCase
TestRandomJob.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
