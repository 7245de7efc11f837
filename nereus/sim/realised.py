"""What plans and changes really take on a fleet over time, summed apart from the simulated world's steps: for the oracle.

Kernels, links and random effects are the truth's; summing phases, following the fleet and charging changes is done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np
import simpy

from nereus.config import Config
from nereus.costs.shape import shape_of
from nereus.fleet import Fleet
from nereus.layout import Plan, StagePlan
from nereus.sim.changes import DEVICE_ENGINE_SECONDS, Asked, sync_seconds
from nereus.sim.decoding import GenerationTimes
from nereus.sim.edges import Delays
from nereus.sim.memory import TrueMemory
from nereus.sim.network import Network
from nereus.sim.oracle import Edge
from nereus.sim.phases import critic_shape
from nereus.sim.play import Moment, inventory_of
from nereus.sim.searching import Changes, built_seconds
from nereus.sim.training import StageTimes
from nereus.sim.transit import Transit
from nereus.sim.truth import Floats, Truth
from nereus.sim.workload import SimWorkload, StepSamples
from nereus.sim.world import MANY_SLOTS, TOGETHER_SECONDS
from nereus.transitions.durations import Durations, Tolls
from nereus.transitions.holders import InvalidGraph
from nereus.transitions.order import Infeasible

PASSES = {
    "actor_train": (("old_log_prob", False), ("update_actor", True)),
    "critic_train": (("values", False), ("update_critic", True)),
    "reference_infer": (("ref", False),),
}
"""Stage -> (phase, whether it trains)."""


@dataclass(kw_only=True)
class RealisedSteps:
    """Seconds of any plan at any step in any moment of the fleet; each part is worked out once."""

    config: Config
    moments: Sequence[Moment]
    workload: SimWorkload
    truth: Truth
    _times: dict[tuple[str, StagePlan], StageTimes] = field(default_factory=dict["tuple[str, StagePlan]", StageTimes])
    _engines: dict[StagePlan, GenerationTimes] = field(default_factory=dict[StagePlan, GenerationTimes])
    _syncs: dict[tuple[object, ...], float] = field(default_factory=dict["tuple[object, ...]", float])
    _memory: dict[str, TrueMemory] = field(default_factory=dict[str, TrueMemory])
    _fits: dict[tuple[str, int], bool] = field(default_factory=dict["tuple[str, int]", bool])
    _known: dict[tuple[object, ...], float] = field(default_factory=dict["tuple[object, ...]", float])
    _samples: dict[int, tuple[StepSamples, Floats]] = field(default_factory=dict[int, tuple[StepSamples, Floats]])
    _slow: dict[tuple[int, int], tuple[Floats, int]] = field(
        default_factory=dict["tuple[int, int]", "tuple[Floats, int]"]
    )
    _asked: dict[int, Plan] = field(default_factory=dict[int, Plan])  # by identity: to hash a plan takes long
    _whole: dict[tuple[int, int, int], float] = field(default_factory=dict["tuple[int, int, int]", float])

    @cached_property
    def inventory(self) -> Fleet:
        """Every node that is there at some moment."""
        return inventory_of(tuple(self.moments))

    @cached_property
    def _lasting(self) -> Floats:
        return self.truth.slowness(max(self.inventory.slots) + 1)

    def seconds(self, plan: Plan, step: int, moment: int) -> float:
        """The step under the plan; infinite where a slot's memory overflows."""
        self._asked[id(plan)] = plan
        key = (id(plan), step, self._slowness(step, moment)[1])
        if key not in self._whole:
            self._whole[key] = self._summed(plan, step, moment)
        return self._whole[key]

    def _summed(self, plan: Plan, step: int, moment: int) -> float:
        if not self.fits(plan, step):
            return inf
        samples, tokens = self._batch(step)
        total = self._sync(plan) * self.truth.noise(step, "update_weights") + self.truth.rest(step, len(tokens))
        total += self._generation(plan.actor_generate, step, moment, samples) * self.truth.noise(step, "gen")
        for name, passes in PASSES.items():
            if name == "critic_train" and not self._has_critic:
                continue
            for phase, trains in passes:
                taken = self._pass(name, getattr(plan, name), step, moment, trains=trains)
                total += taken * self.truth.noise(step, phase)
        return total

    def fits(self, plan: Plan, step: int) -> bool:
        """Whether every slot holds the step's samples."""
        kind = _shape(plan)
        if (kind, step) not in self._fits:
            if kind not in self._memory:
                stages = {name: self._stage(name, getattr(plan, name)) for name in PASSES if self._has(name)}
                self._memory[kind] = TrueMemory(self.config, plan, self.inventory, self.truth, stages)
            peak = self._memory[kind].peak(self._batch(step)[1])
            self._fits[kind, step] = peak.used_bytes <= peak.room_bytes
        return self._fits[kind, step]

    @cached_property
    def _has_critic(self) -> bool:
        return self.config.algorithm.adv_estimator == "gae"

    def _has(self, name: str) -> bool:
        return name != "critic_train" or self._has_critic

    def _batch(self, step: int) -> tuple[StepSamples, Floats]:
        if step not in self._samples:
            made = self.workload.batch(step)
            self._samples[step] = (made, (made.prompt_tokens + made.response_tokens).astype(np.float64))
        return self._samples[step]

    def _stage(self, name: str, stage: StagePlan) -> StageTimes:
        if (name, stage) not in self._times:
            shape = shape_of(self.config.model)
            count = self.config.data.prompts_per_step * self.config.data.samples_per_prompt
            own = critic_shape(shape) if name == "critic_train" else shape
            minis = self.config.algorithm.mini_batches
            self._times[name, stage] = StageTimes(own, stage, self.inventory, count, minis)
        return self._times[name, stage]

    def _slowness(self, step: int, moment: int) -> tuple[Floats, int]:
        """[slots], and the moment if it matters: without stragglers every fleet is as slow."""
        if (step, moment) not in self._slow:
            fleet = self.moments[moment].fleet
            straggling = self.truth.straggling(len(fleet.nodes), step)
            nodes, found, matters = fleet.node_of, self._lasting, -1
            if (straggling != 1.0).any():
                found, matters = self._lasting.copy(), moment
                found[: len(nodes)] *= straggling[nodes]
            self._slow[step, moment] = found, matters
        return self._slow[step, moment]

    def _pass(self, name: str, stage: StagePlan, step: int, moment: int, *, trains: bool) -> float:
        slowness, matters = self._slowness(step, moment)
        key = (name, stage, trains, step, matters)
        if key not in self._known:
            times, tokens = self._stage(name, stage), self._batch(step)[1]
            epochs = self.config.algorithm.epochs
            taken = (
                times.training_seconds(tokens, slowness, epochs) if trains else times.forward_seconds(tokens, slowness)
            )
            self._known[key] = taken
        return self._known[key]

    def _generation(self, stage: StagePlan, step: int, moment: int, samples: StepSamples) -> float:
        slowness, matters = self._slowness(step, moment)
        key = ("gen", stage, step, matters)
        if key not in self._known:
            if stage not in self._engines:
                self._engines[stage] = GenerationTimes(self.config, stage, self.inventory, self.truth)
            engines = self._engines[stage]
            self._known[key] = engines.seconds(samples.prompt_tokens, samples.response_tokens, slowness)
        return self._known[key]

    def _sync(self, plan: Plan) -> float:
        key = _alike(self.inventory, plan.actor_train, plan.actor_generate)
        if key not in self._syncs:
            share, tensor = self.truth.link_share, self.truth.sync_tensor_seconds
            self._syncs[key] = sync_seconds(self.config, plan, self.inventory, share, tensor)
        return self._syncs[key]


def _shape(plan: Plan) -> str:
    """Plans that differ in nothing but slots have the same."""
    return str(plan) + str([(stage.micro_batch, stage.shares) for _, stage in plan.stages()])


def _alike(fleet: Fleet, *stages: StagePlan) -> tuple[object, ...]:
    """Equal for stages that are cut alike on nodes of the same kind, whichever nodes these are."""
    nodes: dict[int, int] = {}
    seats: list[tuple[int, int, str]] = []
    for stage in stages:
        for slot in stage.slots:
            node = int(fleet.node_of[slot])
            number = nodes.setdefault(node, len(nodes))
            seats.append((number, slot - min(fleet.nodes[node].slots), fleet.nodes[node].device.name))
    return (*(stage.layout for stage in stages), tuple(seats))


@dataclass(kw_only=True)
class RealisedPrices:
    """What changes between `plans` take: carried out alone by the world's operations, or as a policy was charged (`charged`).

    Until a change is asked for (`charge`), the engines that it builds one after the other on a slot bound it from below.
    """

    config: Config
    plans: Sequence[Plan]
    moments: Sequence[Moment]
    truth: Truth
    charged: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    delays: Delays = field(default_factory=Delays)
    tolls: Tolls = field(default_factory=Tolls)
    engine_seconds: Mapping[str, float] = field(default_factory=lambda: DEVICE_ENGINE_SECONDS)
    carried_out_count: int = 0
    _known: dict[Edge, float] = field(default_factory=dict[Edge, float])
    _least: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])

    def __post_init__(self) -> None:
        self._changes = Changes(config=self.config, tolls=self.tolls, engine_seconds=self.engine_seconds)

    def least(self, before: int, after: int) -> float:
        """What its slots build bounds a change, and what a policy was charged for one."""
        pair = (before, after)
        if pair not in self._least:
            built = built_seconds(self.plans[before], self.plans[after], self.engine_seconds)
            self._least[pair] = min(built, self.charged.get(pair, inf))
        return self._least[pair]

    def seconds(self, edge: Edge) -> float:
        """What the change takes as far as it is known."""
        found = self._known.get(edge)
        return self.least(edge.before, edge.after) if found is None else found

    def charge(self, edge: Edge) -> bool:
        """Carries the change out; False if that was done before."""
        if edge in self._known:
            return False
        self.carried_out_count += 1
        self._known[edge] = min(self._carried_out(edge), self.charged.get((edge.before, edge.after), inf))
        return True

    def _carried_out(self, edge: Edge) -> float:
        fleet, truth = self.moments[edge.moment].fleet, self.truth
        before, after = self.plans[edge.before], self.plans[edge.after]
        holders = frozenset(fleet.slots) - (_slots(before) - edge.holders)
        try:
            found = self._changes.between(Asked(before=before, after=after, fleet=fleet, holders=holders))
        except (Infeasible, InvalidGraph):
            return inf
        if found.missing:
            engines = self.engine_seconds["train"] + self.engine_seconds["generate"]
            return self.delays.restart(self.config, len(fleet.nodes), engines, 1.0, processes=False)
        if found.graph is None:
            return 0.0
        env = simpy.Environment()
        together = TOGETHER_SECONDS if max(max(each.fleet.slots) for each in self.moments) >= MANY_SLOTS else 0.0
        durations = Durations(fleet=fleet, tolls=replace(self.tolls, rate_share=truth.link_share))
        transit = Transit(
            env, found.graph, durations, Network(env, together_seconds=together), truth, count=edge.moment + 1
        )
        transit.begin()
        env.run(env.process(transit.pause()))
        return float(env.now)


def _slots(plan: Plan) -> frozenset[int]:
    return frozenset[int]().union(*(stage.slots for _, stage in plan.stages()))
