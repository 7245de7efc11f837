"""A world without processes for the edge between controller and world: steps take what a table says, changes succeed.

Given a journal it writes what the real world does: predictions, steps, searches, changes, the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nereus.config import Config, DataConfig, FleetConfig, ModelConfig, NereusConfig, PlanConfig, RunConfig, StageConfig
from nereus.control.outlook import StepObserved
from nereus.control.proposals import Ground, propose
from nereus.control.records import SearchDone
from nereus.costs.profile import supposed
from nereus.events import (
    ChangePlan,
    Finish,
    JobReady,
    Recover,
    Recovered,
    RunStep,
    SlotsLost,
    StopRequested,
    TransitionDone,
    TransitionFailed,
)
from nereus.layout import Plan, first_plan
from nereus.observe import Observed, after, expect
from nereus.runtime.fleet_schedule import Relaunch, SlotsArrived, SlotsStay, Suspend
from nereus.runtime.journal import Journal, read_journal
from nereus.runtime.searches import Seek
from nereus.runtime.steering import Order, Steering
from nereus.transitions.durations import Tolls
from nereus.transitions.planned import SlotRoom
from nereus.workload import StepBatch, largest_batch, step_terms
from nereus.world import drive

POOR = PlanConfig(
    actor_train=StageConfig(tp=2, pp=2),
    actor_generate=StageConfig(tp=2, dp=2),
    critic_train=StageConfig(pp=2, dp=2),
    reference_infer=StageConfig(dp=4),
)
PROFILE = supposed("cpu", 4, 4, 4)
ROOM = SlotRoom(budget_bytes=1 << 30, held_bytes=1 << 26, phase_bytes=1 << 26, generation_bytes=1 << 24)


def job(policy: str = "nereus", steps: int = 16, **nereus: Any) -> Config:
    return Config(
        run=RunConfig(steps=steps),
        plan=POOR,
        model=ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn=128),
        fleet=FleetConfig(slots=4),
        data=DataConfig(prompts_per_step=8),
        nereus=NereusConfig(policy=policy, **nereus),
    )


@dataclass
class ToyWorld:
    """Carries out orders at once. `losses` is step -> the pool's slots that die in it; `refused` counts failing changes."""

    config: Config
    losses: dict[int, tuple[int, ...]] = field(default_factory=dict)
    half_done: bool = False
    fleet: dict[int, Any] = field(default_factory=dict)  # step -> what happens to the fleet before it
    slow: dict[int, tuple[tuple[int, float], ...]] = field(
        default_factory=dict
    )  # step -> the pool's slow slots from it on
    back_steps: int = 0
    refused: int = 0
    factor: Callable[[int], float] = lambda step: 1.0 + 0.01 * (step % 3)
    journal: Journal | None = None
    stopped: bool = False

    def __post_init__(self) -> None:
        self.plan: Plan = first_plan(self.config)
        self.slots = self.config.fleet.slots
        self.state: Observed = after(Observed(), {"kind": "probe", "profile": PROFILE.record()})
        self._profile = PROFILE
        self.orders: list[Order] = []
        self.ran: list[tuple[int, str]] = []
        self._queue: list[Any] = []
        self._waiting = 0
        self._clock = 0.0
        self._ended = False
        self._fresh: tuple[str, ...] = ()

    def hosts(self) -> Mapping[int, int]:
        return dict.fromkeys(range(self.slots), 0)

    def events(self) -> Iterator[Any]:
        if self.stopped:
            yield StopRequested(at_seconds=0.0)
        yield JobReady(at_seconds=0.0, step=1)
        while not self._ended:
            assert self._queue, f"nothing is left to happen after {self.orders[-3:]}"
            yield self._queue.pop(0)

    def submit(self, command: Any) -> None:
        self.orders.append(command)
        self._clock += 1.0
        self._write_before(command)
        match command:
            case RunStep():
                event = self._ran_step(command.step)
                if isinstance(news := self.fleet.get(command.step + 1), SlotsArrived):
                    self._waiting = news.slots
                self._queue += [*([replace(news, at_seconds=self._clock)] if news else []), event]
            case ChangePlan() if self.refused:
                self.refused -= 1
                self._queue.append(TransitionFailed(at_seconds=self._clock, plan=command.plan, reason="no room"))
            case ChangePlan():
                self._write(
                    "transition_done", step=command.step, pause_seconds=0.5, state_version=1, **self._ends(command)
                )
                self.plan = command.plan
                done = TransitionDone(at_seconds=self._clock, plan=command.plan, state_version=1, pause_seconds=0.5)
                self._queue.append(done)
            case Recover():
                self.plan = command.plan
                self.slots += -len(command.lost_slots) or self._waiting
                self._waiting = 0
                self._queue.append(self._recovered())
            case Relaunch():
                self.plan, self.slots, self._waiting = command.plan, command.slots, 0
                self._queue.append(self._recovered())
            case Suspend():
                self._queue.append(SlotsStay(at_seconds=self._clock))
            case Seek():
                self._queue.append(self._found(command))
            case Finish():
                self._write("run_stopped", reason=command.reason)
                self._ended = True

    def _write(self, kind: str, **fields: Any) -> None:
        if self.journal is not None:
            self.journal.append(kind, **fields)

    def _ends(self, command: ChangePlan) -> dict[str, str]:
        return {"from": str(self.plan), "to": str(command.plan)}

    def _write_before(self, command: Any) -> None:
        if isinstance(command, RunStep):
            expected = expect(self.state, self.config, self.plan, command.step, sampled=True)
            self._write("prediction", **expected.record())
        elif isinstance(command, ChangePlan):
            self._write("transition_started", step=command.step, reason=command.reason, **self._ends(command))

    def _ran_step(self, step: int) -> Any:
        assert all(slot < self.slots for _, stage in self.plan.stages() for slot in stage.slots)
        if lost := self.losses.pop(step, ()):
            return SlotsLost(
                at_seconds=self._clock,
                lost_slots=lost,
                slot_count=self.slots,
                plan=self.plan,
                reason="killed",
                whole=not self.half_done,
            )
        self.ran.append((step, self.plan.plan_id))
        batch = self.batch(step)
        news = replace(PROFILE, slow=self.slow[step]) if step in self.slow else None
        self._profile = news or self._profile
        terms = step_terms(self.config, self.plan, batch, self._profile)
        seconds = {phase: self.factor(step) * sum(each.values()) for phase, each in terms.items()}
        self._clock += sum(seconds.values())
        self._write("step_done", step=step, state_version=0, metrics={"timing_s/step": sum(seconds.values())})
        return StepObserved(
            at_seconds=self._clock,
            step=step,
            step_seconds=sum(seconds.values()),
            tokens=round(batch.samples * (batch.prompt_tokens + batch.response_tokens[0])),
            plan_id=self.plan.plan_id,
            phase_seconds=seconds,
            batch=batch,
            profile=news,
            peak_bytes=self.peak_bytes(batch),
        )

    def batch(self, step: int) -> StepBatch:
        """What a step works on."""
        return largest_batch(self.config, step)

    def peak_bytes(self, batch: StepBatch) -> dict[str, int]:
        """What the slots show in a step."""
        return {"0": 1 << 27}

    def _recovered(self) -> Recovered:
        step = self.ran[-1][0] + 1 - (self.back_steps if self.half_done else 0)
        return Recovered(at_seconds=self._clock, plan=self.plan, slots=self.slots, next_step=step)

    def _found(self, seek: Seek) -> SearchDone:
        ground = Ground(
            outlook=seek.outlook,
            room=dict.fromkeys(seek.ids, ROOM),
            hosts=dict.fromkeys(seek.ids, 0),
            engine_seconds=dict.fromkeys(("actor.train", "critic.train", "reference.infer", "actor.generate"), 0.05),
            tolls=Tolls(group_seconds=0.01, activate_seconds=0.0, destroy_group_seconds=0.0, quiesce_seconds=0.0),
        )
        found = propose(seek.search.request, ground, seek.search.budget_count)
        self._write(
            "search_done",
            search_id=seek.search.search_id,
            processor_seconds=0.5,
            between_processor_seconds=1.0 if seek.search.search_id == 1 else 0.0,
            evaluated_count=found.evaluated_count,
            priced_count=found.priced_count,
        )
        return SearchDone(
            at_seconds=self._clock,
            search_id=seek.search.search_id,
            candidates=found.candidates,
            band=found.band,
            reason=found.reason,
        )


def run(world: ToyWorld, path: Path) -> tuple[Steering, list[dict[str, Any]]]:
    """Drives the world to its end; the edge and the journal's records."""
    journal = Journal(path)
    journal.append("run_started", config=asdict(world.config), slots=world.slots, rollouts=None)
    journal.append("probe", places={}, profile=PROFILE.record())
    world.journal = journal
    steering = Steering(
        config=world.config,
        plan=world.plan,
        journal=journal,
        beliefs=lambda: world.state,
        hosts=world.hosts,
    )
    drive(steering, world)
    assert steering.controller is not None
    steering.controller.check()
    steering.close()
    journal.close()
    return steering, read_journal(path)


def told(records: list[dict[str, Any]], index: int, **fields: Any) -> list[dict[str, Any]]:
    """The journal with other fields in its event number `index`."""
    at = [i for i, record in enumerate(records) if record["kind"] == "told"][index]
    event = {**records[at]["event"], **fields}
    return [*records[:at], {**records[at], "event": event}, *records[at + 1 :]]


__all__ = ["ToyWorld", "job", "replace", "run", "told"]
