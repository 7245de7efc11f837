"""Between the adaptive controller and the real world: slot numbers, losses, and the journal of what was told and decided.

Inside, slots have stable numbers: those that they started with. Beliefs, bars and the plans that ran speak of the same
place for the whole run, and so does the journal, which a replay reads without knowing what the pool did. At the edge they
are dense, because a world of torch.distributed has ranks from 0 on: after a loss the pool's slot i is `ids[i]`.

  world's event    controller's
  StepObserved     the same, under the controller's names
  SlotsLost        FleetChanged, and in a change its end: TransitionDone where it was committed, else TransitionFailed
  Recovered        TransitionDone; StateRestored where steps are done again
  SlotsLeaving     PreemptionNotice, and FleetChanged once the plan no longer uses them
  SlotsArrived     FleetChanged; they are in no world until a plan wants them
  SlotsStay        PreemptionNotice that takes the earlier one back
  SearchDone       the same
  StepRefused      the same

  controller's command    world's
  ChangePlan              the same; Recover while slots are lost, which needs a plan for those that are left, and to a plan
                          on slots that wait to join: one new world for both
  Search                  Seek
  Restart                 Relaunch; Recover from a saved state where the policy changes plans live
  Record                  a line of the journal
  (none, waiting for slots that leave)   Suspend
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from math import inf

from nereus.config import Config
from nereus.control.adaptive import Adaptive
from nereus.control.admission import Decision, Rejected
from nereus.control.controller import AdaptiveCommand, AdaptiveController, AdaptiveEvent, Record
from nereus.control.outlook import JobOutlook, StepObserved
from nereus.control.outset import controller_of
from nereus.control.records import (
    FleetChanged,
    PreemptionNotice,
    Restart,
    Search,
    SearchDone,
    StateRestored,
    StepRefused,
    plan_slots,
)
from nereus.control.written import written
from nereus.costs.speeds import Slow, news_of
from nereus.errors import InvalidEvent
from nereus.events import (
    ChangePlan,
    Command,
    Event,
    Finish,
    JobReady,
    Recover,
    Recovered,
    RunStep,
    SlotsLost,
    StepFinished,
    StopRequested,
    TransitionDone,
    TransitionFailed,
)
from nereus.fleet import CPU_SLOT, Fleet, Node
from nereus.layout import Plan
from nereus.observe import Observed
from nereus.runtime.fleet_schedule import Relaunch, SlotsArrived, SlotsLeaving, SlotsStay, Suspend
from nereus.runtime.journal import Journal
from nereus.runtime.searches import Seek

Told = Event | SearchDone | StepRefused | SlotsLeaving | SlotsArrived | SlotsStay
Order = Command | Seek | Relaunch | Suspend


@dataclass(kw_only=True)
class Steering:
    """Has the face of the scripted controller: `handle(event) -> commands`. `seconds` is what that took in all.

    `asked_seconds` says what asking for searches, and waiting for them, took of the job beyond that.
    """

    config: Config
    plan: Plan
    journal: Journal
    beliefs: Callable[[], Observed]
    hosts: Callable[[], Mapping[int, int]]
    asked_seconds: Callable[[], float] = lambda: 0.0
    seconds: float = 0.0
    ids: tuple[int, ...] = ()
    lost_slots: tuple[int, ...] | None = None  # in the pool's numbers, until the job has recovered
    again: bool = False  # the step under way runs once more after recovery; the controller never heard of it
    wanted: Plan | None = None
    leaving_slots: tuple[int, ...] = ()
    waiting_slots: tuple[int, ...] = ()  # processes that are in no world yet
    slow: Slow = ()
    stopped: StopRequested | None = None
    why: str = ""  # the last decision's reason to stay
    controller: AdaptiveController | None = field(default=None, init=False)

    def handle(self, event: Told) -> tuple[Order, ...]:
        """The world's commands that follow from the world's event; InvalidEvent as the controller's."""
        started = time.perf_counter()
        try:
            return self._handled(event)
        finally:
            self.seconds += time.perf_counter() - started

    @property
    def spent_seconds(self) -> float:
        """What deciding held the job up so far: all of `handle`, its journal included, and what searches were waited for."""
        return self.seconds + self.asked_seconds()

    def _handled(self, event: Told) -> tuple[Order, ...]:
        match event:
            case JobReady():
                return self._begun(event)
            case StepFinished():
                return self._stepped(event)
            case TransitionDone() | TransitionFailed():
                return self._tell(replace(event, plan=self._wanted()))
            case SlotsLost():
                return self._slots_lost(event)
            case Recovered():
                return self._recovered(event)
            case SearchDone() | StopRequested() | StepRefused():
                return self._passed_on(event)
            case SlotsLeaving() | SlotsStay():
                return self._tell(self._notice(event))
            case SlotsArrived():
                return self._arrived(event)

    def close(self) -> None:
        """Writes down what deciding took."""
        if self.controller is not None:
            self.journal.append(
                "control_ended", seconds=self.spent_seconds, transitions=self.controller.transitions_count
            )

    # -- events -------------------------------------------------------------------------------------------------------

    def _begun(self, event: JobReady) -> tuple[Order, ...]:
        self.ids = tuple(sorted(self.hosts()))
        fleet = self._fleet()
        self.controller = controller_of(self.config, self.plan, fleet, self.beliefs())
        self.journal.append(
            "control_started", policy=self.config.nereus.policy, plan=written(self.plan), fleet=written(fleet)
        )
        return (*(self._tell(self.stopped) if self.stopped else ()), *self._tell(event))

    def _passed_on(self, event: SearchDone | StopRequested | StepRefused) -> tuple[Order, ...]:
        if self.controller is None and isinstance(event, StopRequested):
            self.stopped = event  # told once the job is ready, which then ends
            return ()
        return self._tell(event)

    def _stepped(self, event: StepFinished) -> tuple[Order, ...]:
        """What follows; a policy that has no plan without slots that leave waits for them."""
        orders = self._tell(self._step(event))
        stuck = self._controller.state == "waiting" and self.leaving_slots
        return (*orders, Suspend(step=self._controller.step)) if stuck else orders

    def _notice(self, event: SlotsLeaving | SlotsStay) -> PreemptionNotice:
        at, slots = event.at_seconds, self.leaving_slots
        if isinstance(event, SlotsStay):
            self.leaving_slots = ()
            return PreemptionNotice(at_seconds=at, slots=slots, deadline_seconds=inf)
        self.leaving_slots = tuple(self.ids[slot] for slot in event.slots)
        return PreemptionNotice(at_seconds=at, slots=self.leaving_slots, deadline_seconds=at)

    def _step(self, event: StepFinished) -> StepFinished:
        if not isinstance(event, StepObserved):
            return event
        profile, news = event.profile, ""
        if profile is not None:
            slow = tuple(sorted((self.ids[slot], speed) for slot, speed in profile.slow))
            profile, news, self.slow = replace(profile, slow=slow), news_of(self.slow, slow), slow
        return replace(
            event,
            plan_id=self._controller.plan_id,
            peak_bytes={str(self.ids[int(slot)]): peak for slot, peak in event.peak_bytes.items()},
            profile=profile,
            news=news,
        )

    def _slots_lost(self, event: SlotsLost) -> tuple[Order, ...]:
        controller = self._controller
        if self.lost_slots is not None and event.slot_count < len(
            self.ids
        ):  # the pool goes on without the earlier ones
            self.ids, self.lost_slots = self._left(), None
        self.lost_slots = tuple(sorted({*(self.lost_slots or ()), *event.lost_slots}))
        gone = frozenset(self.ids[slot] for slot in self.lost_slots)
        void = gone if event.whole else gone | plan_slots(controller.plan)
        changing = controller.state == "changing"
        orders = self._tell(
            FleetChanged(
                at_seconds=event.at_seconds,
                fleet=controller.fleet.without(gone),
                lost_slots=tuple(sorted(void)),
            )
        )
        if changing:
            wanted = self._wanted()
            committed = self._dense(wanted, self.ids) == event.plan
            end: AdaptiveEvent
            if committed:
                end = TransitionDone(at_seconds=event.at_seconds, plan=wanted, state_version=0, pause_seconds=0.0)
            else:
                end = TransitionFailed(at_seconds=event.at_seconds, plan=wanted, reason=event.reason)
            return (*orders, *self._tell(end))
        if controller.state == "running":  # no slot of the plan was lost: the same plan in a new world, the step again
            self.again = True
            return (*orders, self._recover(controller.plan))
        return orders

    def _arrived(self, event: SlotsArrived) -> tuple[Order, ...]:
        """So many slots wait now: the fleet has them, and the world once a plan, or a restart, takes them in."""
        fleet, known = self._controller.fleet, self.waiting_slots
        self.waiting_slots = (*known[: event.slots], *self._new_ids(event.slots - len(known)))
        gone, new = frozenset(known) - frozenset(self.waiting_slots), self.waiting_slots[len(known) :]
        if not gone and not new:
            return ()
        fleet = fleet.without(gone)
        last = replace(fleet.nodes[-1], slots=(*fleet.nodes[-1].slots, *new))
        changed = Fleet(nodes=(*fleet.nodes[:-1], last))
        return self._tell(FleetChanged(at_seconds=event.at_seconds, fleet=changed, lost_slots=tuple(sorted(gone))))

    def _recovered(self, event: Recovered) -> tuple[Order, ...]:
        self.ids, self.lost_slots = self._left(), None
        step = self._controller.step
        if self.again:
            self.again = False
            if event.next_step != step:
                raise InvalidEvent(f"step {event.next_step} is next after recovery, {step} was under way")
            return (RunStep(step=step),)
        plan, at = self._wanted(), event.at_seconds
        gone = frozenset(self.leaving_slots) - frozenset(self.ids)
        if gone:  # the job went on without them
            self.leaving_slots = ()
            fleet = self._controller.fleet.without(gone)
            self._tell(FleetChanged(at_seconds=at, fleet=fleet, lost_slots=tuple(sorted(gone))))
        if event.next_step != step:
            return self._tell(
                StateRestored(at_seconds=at, plan=plan, step=event.next_step, state_version=event.state_version)
            )
        return self._tell(
            TransitionDone(
                at_seconds=at, plan=plan, state_version=event.state_version, pause_seconds=event.pause_seconds
            )
        )

    def _step_or_fleet(self, command: RunStep) -> tuple[Order, ...]:
        """The step; before it a world without the slots that leave, which the plan no longer uses."""
        controller = self._controller
        if self.leaving_slots:
            gone, self.leaving_slots = frozenset(self.leaving_slots) & frozenset(self.ids), ()
            fleet = controller.fleet.without(gone)
            orders = self._tell(FleetChanged(at_seconds=time.time(), fleet=fleet, lost_slots=tuple(sorted(gone))))
            self.lost_slots = tuple(slot for slot, stable in enumerate(self.ids) if stable in gone)
            self.again = True
            return (*orders, self._recover(controller.plan))
        return (command,)

    # -- commands -----------------------------------------------------------------------------------------------------

    def _tell(self, event: AdaptiveEvent) -> tuple[Order, ...]:
        """Tells the controller, writes down what it was told and what came of it, and gives the world its orders."""
        commands: tuple[AdaptiveCommand, ...] = ()
        try:
            commands = self._controller.handle(event)
        finally:
            self.journal.append("told", event=written(event))
        orders: list[Order] = []
        for command in commands:
            if isinstance(command, Record):
                if isinstance(command.entry, Decision) and isinstance(command.entry.admission, Rejected):
                    self.why = command.entry.admission.detail
                self.journal.append("decision", entry=written(command.entry))
                continue
            self.journal.append("commanded", command=written(command))
            orders += self._orders(command)
        return tuple(orders)

    def _orders(self, command: AdaptiveCommand) -> tuple[Order, ...]:
        match command:
            case ChangePlan():
                self.wanted = command.plan
                if self.lost_slots is None and not plan_slots(command.plan).isdisjoint(self.waiting_slots):
                    self._join()
                    return (self._recover(command.plan),)
                if self.lost_slots is not None:
                    return (self._recover(command.plan),)
                return (replace(command, plan=self._dense(command.plan, self.ids)),)
            case Search():
                return (self._seek(command),)
            case RunStep():
                return self._step_or_fleet(command)
            case Finish():
                return (command,)
            case Restart() if self._controller.policy.by_restart or self.lost_slots is not None:
                return (self._relaunch(command.plan),)
            case Restart():
                return (self._saved_first(command.plan),)
            case Record():
                raise InvalidEvent("a decision is no order")

    def _relaunch(self, plan: Plan) -> Relaunch:
        """All processes anew, without slots that leave and with those that wait to join."""
        torn = self.lost_slots is not None
        gone = frozenset(self.leaving_slots)
        away = tuple(slot for slot, stable in enumerate(self.ids) if stable in gone)
        self.wanted, self.lost_slots = plan, tuple(sorted({*(self.lost_slots or ()), *away}))
        self._join()
        ids = self._left()
        return Relaunch(slots=len(ids), plan=self._dense(plan, ids), torn=torn)

    def _join(self) -> None:
        """Slots that wait are the pool's last ones from now on."""
        self.ids, self.waiting_slots = (*self.ids, *self.waiting_slots), ()

    def _saved_first(self, plan: Plan) -> Recover:
        """In the same processes, without the slots that leave, whose part of the state is saved before they do."""
        gone = frozenset(self.leaving_slots)
        self.wanted = plan
        self.lost_slots = tuple(slot for slot, stable in enumerate(self.ids) if stable in gone)
        return replace(self._recover(plan), saved=True)

    def _seek(self, search: Search) -> Seek:
        policy = self._controller.policy
        if not isinstance(policy, Adaptive) or not isinstance(policy.outlook, JobOutlook):
            raise InvalidEvent(f"the policy {policy.name} asked for a search")
        return Seek(search=search, outlook=policy.outlook, ids=self.ids, torn=self.lost_slots is not None)

    def _recover(self, plan: Plan) -> Recover:
        return Recover(lost_slots=self.lost_slots or (), plan=self._dense(plan, self._left()))

    @property
    def _controller(self) -> AdaptiveController:
        if self.controller is None:
            raise InvalidEvent("the job is not ready yet")
        return self.controller

    def _wanted(self) -> Plan:
        if self.wanted is None:
            raise InvalidEvent("no change of plan was commanded")
        return self.wanted

    def _fleet(self) -> Fleet:
        """The pool's slots by their stable numbers, host by host."""
        hosts = {self.ids[slot]: host for slot, host in self.hosts().items()}
        nodes = sorted(set(hosts.values()))
        members = [tuple(sorted(slot for slot in self.ids if hosts[slot] == node)) for node in nodes]
        return Fleet(nodes=tuple(Node(slots=each, device=CPU_SLOT) for each in members))

    def _new_ids(self, slots: int) -> tuple[int, ...]:
        """Numbers for new slots: those of slots that are gone first."""
        free = (number for number in count() if number not in self.ids and number not in self.waiting_slots)
        return tuple(islice(free, max(slots, 0)))

    def _left(self) -> tuple[int, ...]:
        return tuple(stable for slot, stable in enumerate(self.ids) if slot not in (self.lost_slots or ()))

    @staticmethod
    def _dense(plan: Plan, ids: tuple[int, ...]) -> Plan:
        """The plan in the pool's numbers when its slot i is ids[i]; a slot that is not there is an InvalidEvent."""
        numbers = {stable: dense for dense, stable in enumerate(ids)}
        away = plan_slots(plan) - numbers.keys()
        if away:
            raise InvalidEvent(f"plan {plan.plan_id} uses slot {min(away)}, which is not there")
        stages = {n: replace(s, slots=tuple(numbers[slot] for slot in s.slots)) for n, s in plan.stages()}
        return replace(plan, **stages)
