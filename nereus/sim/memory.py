"""True peaks of a slot's memory in a step: the fullest micro-batch of real samples, and what an allocator wastes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from nereus.config import Config
from nereus.control.fleet_outlook import FleetMemory, job_of, planned
from nereus.control.records import MemoryAlarm
from nereus.fleet import Fleet
from nereus.layout import Plan, StagePlan
from nereus.planning.job import PHASES_OF
from nereus.planning.plan import StageChoice
from nereus.sim.training import StageTimes
from nereus.sim.truth import Floats, Truth
from nereus.workload import StepBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakBytes:
    """The fullest slot of a step: how much, in which phase, and what its device has."""

    slot: int
    phase: str
    used_bytes: int
    room_bytes: int

    def alarm(self, at_seconds: float) -> MemoryAlarm:
        """As a controller is told it."""
        return MemoryAlarm(
            at_seconds=at_seconds,
            slot=self.slot,
            phase=self.phase,
            used_bytes=self.used_bytes,
            budget_bytes=self.room_bytes,
        )


class TrueMemory:
    """A plan's peaks by the rows of its fullest micro-batches. Stages that share slots leave their state on them."""

    def __init__(
        self, config: Config, plan: Plan, fleet: Fleet, truth: Truth, stages: Mapping[str, StageTimes]
    ) -> None:
        self.config, self.stages = config, stages
        self.memory = FleetMemory(cache_bytes=float(config.rollout.kv_cache_bytes))
        self.choices = dict(planned(config, plan).stages)
        self.slots: dict[str, StagePlan] = dict(plan.stages())
        self.room = {
            name: min(fleet.device_of[s].memory_bytes for s in self.slots[name].slots) for name in self.choices
        }
        self.wasted = truth.wasted(str(plan))
        self._known: dict[tuple[str, int], Mapping[str, Mapping[str, float]]] = {}
        resting = {name: self._rest_bytes(name) for name in self.choices}
        self._beside = {name: sum(resting[other] for other in self._sharing(name)) for name in self.choices}

    def _sharing(self, name: str) -> list[str]:
        own = set(self.slots[name].slots)
        return [other for other in self.choices if other != name and own.intersection(self.slots[other].slots)]

    def _sizes(self, name: str, rows: int) -> Mapping[str, Mapping[str, float]]:
        """Bytes by phase with so many rows in the fullest micro-batch; "" is between phases."""
        if (name, rows) not in self._known:
            choice = self.choices[name]
            samples = self.config.data.prompts_per_step * self.config.data.samples_per_prompt
            batch = StepBatch(samples=samples, width_tokens=rows, prompt_tokens=0.0, response_tokens=(1.0,))
            found = self.memory.stage(job_of(self.config, batch, rows), name, choice)
            self._known[name, rows] = {**found.phases, "": found.resident}
        return self._known[name, rows]

    def _rest_bytes(self, name: str) -> float:
        if name == "actor_generate":
            return sum(self._engine(self.choices[name])[1].values())
        return sum(self._sizes(name, 1)[""].values())

    def _engine(self, choice: StageChoice) -> tuple[Mapping[str, float], Mapping[str, float]]:
        batch = StepBatch(samples=1, width_tokens=1, prompt_tokens=0.0, response_tokens=(1.0,))
        engine = self.memory.engine(job_of(self.config, batch, 1), choice.layout)
        return {**engine.fixed, "cache": engine.least_bytes}, engine.resident

    def _phases(self, name: str, tokens: Floats) -> Iterator[tuple[str, float]]:
        if name == "actor_generate":
            yield "gen", sum(self._engine(self.choices[name])[0].values())
            return
        for phase in PHASES_OF[name]:
            rows = self.stages[name].most_rows(tokens, training=phase.startswith("update"))
            rounded = ceil(rows / 64) * 64
            yield phase, sum(self._sizes(name, rounded)[phase].values())

    def peak(self, tokens: Floats) -> PeakBytes:
        """The fullest slot of a step of samples with so many tokens each."""
        best: PeakBytes | None = None
        for name in self.choices:
            for phase, held in self._phases(name, tokens):
                used = int((held + self._beside[name]) * (1 + self.wasted))
                if best is None or used / self.room[name] > best.used_bytes / best.room_bytes:
                    slot = self.slots[name].slots[0]
                    best = PeakBytes(slot=slot, phase=phase, used_bytes=used, room_bytes=self.room[name])
        assert best is not None
        return best
