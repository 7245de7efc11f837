"""What is believed of a job's plans on a fleet of GPUs: the planner's terms with coefficients calibrated on the job's steps.

A phase's seconds are the sum of terms times coefficients, one coefficient for each term and device, so what two plans share
cancels in a saving. Memory is the planner's closed forms, with the largest share by which a measured peak was above them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, sqrt

from nereus.config import Config
from nereus.control.outlook import AHEAD_STEPS, KEPT_STEPS, LEAST_NOISE_SHARE, RECENT_STEPS, StepObserved
from nereus.control.records import Candidate, Estimate, Misfit, StepMeasured
from nereus.costs.calibrate import Calibration, observe, predict, start
from nereus.costs.coefficients import prior_for
from nereus.costs.generation import Lengths
from nereus.costs.rates import Rates, rates_of
from nereus.fleet import Fleet
from nereus.forecast import first_passing, trend
from nereus.layout import Layout, Plan, StagePlan
from nereus.lengths import largest_row_tokens
from nereus.planning.bytes import DeviceMemory, EngineBytes
from nereus.planning.evaluate import Problem, engine_cache_bytes, phase_terms
from nereus.planning.ground import TERMS, Ground, Terrain
from nereus.planning.job import BLOCK_OF, Job, language_model, scalar_model
from nereus.planning.plan import GlobalPlan, Keep, StageChoice
from nereus.workload import StepBatch, largest_batch

PHASE_NAMES = {
    "update_weights": "update_weights",
    "gen": "generate",
    "old_log_prob": "forward_actor",
    "ref": "forward_reference",
    "values": "forward_critic",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "rest": "framework",
}
"""Phases of a measured step by the planner's names."""
KEPT_ANSWERS = 512
HELD_SHARE = 0.02
MEAN_MULTIPLE = 128
"""How exactly the lengths that fit are told, in tokens."""
RATIO_PARTS = 4
ORDER = ("actor_train", "critic_train", "reference_infer", "actor_generate")
PhaseTerms = Mapping[str, Mapping[str, float]]
Question = tuple[str, StepBatch]
Ratios = tuple[tuple[int, float], ...]
Room = tuple[str, float, Ratios, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetMemory(DeviceMemory):
    """The memory model of GPUs with a cache of stated size; nothing waits in host memory."""

    cache_bytes: float
    keeps: tuple[Keep, ...] = ("all",)

    def engine(self, job: Job, layout: Layout) -> EngineBytes:
        """The bytes of the actor's engine: asleep it drops weights and cache, for a weight sync follows."""
        found = DeviceMemory.engine(self, job, layout)
        return replace(found, least_bytes=self.cache_bytes, most_bytes=self.cache_bytes)


@dataclass(frozen=True, kw_only=True)
class FleetOutlook:
    """The Outlook of a job on GPUs: a value. `inventory` are all nodes that slots may be of, there or not.

    `beliefs` are by device. `recent_fullest` are (samples of a micro-batch, tokens of the fullest over those of an average one) of
    each of the last steps. `recent_tokens` are (step, mean tokens of a prompt with its response, of the longest) of the last
    steps. `batch` is the last step's, kept while the mean length stays within HELD_SHARE of it.
    `carried` is plan -> the longest mean that it ran with. `missed_share` is by how much a measured peak was above its
    prediction at most. What follows from the rest is remembered.
    """

    config: Config
    inventory: Fleet
    plans: Mapping[str, Plan]
    beliefs: Mapping[str, Calibration] = field(default_factory=dict[str, Calibration])
    batch: StepBatch | None = None
    recent_tokens: tuple[tuple[int, int, int], ...] = ()
    recent_fullest: tuple[Ratios, ...] = ()
    missed_share: float = 0.0
    learns: bool = True
    carried: Mapping[str, int] = field(default_factory=dict[str, int])
    known: dict[Question, PhaseTerms] = field(default_factory=dict["Question", "PhaseTerms"], repr=False, compare=False)
    rooms: dict[Room, int] = field(default_factory=dict["Room", int], repr=False, compare=False)
    grounds: dict[tuple[int, ...], Ground] = field(
        default_factory=dict[tuple[int, ...], Ground], repr=False, compare=False
    )
    translated: dict[str, GlobalPlan] = field(default_factory=dict[str, GlobalPlan], repr=False, compare=False)
    placed: dict[tuple[str, str], tuple[str, ...]] = field(
        default_factory=dict[tuple[str, str], tuple[str, ...]], repr=False, compare=False
    )

    # -- Outlook ------------------------------------------------------------------------------------------------------

    def met(self, candidates: tuple[Candidate, ...]) -> FleetOutlook:
        """The same, knowing also these plans."""
        return replace(self, plans={**self.plans, **{each.plan_id: each.plan for each in candidates}})

    def observe(self, finished: StepMeasured, plan_id: str, *, ratio: float, noise_share: float) -> FleetOutlook:
        """Learns from every phase of the step what the plan's own ratio leaves. TypeError for a step without phases."""
        step = observed(finished)
        mean = mean_tokens(step.batch)
        recent = (*self.recent_tokens, (step.step, ceil(mean), step.batch.width_tokens))[-KEPT_STEPS:]
        held = self.batch is not None and abs(mean / mean_tokens(self.batch) - 1) <= HELD_SHARE
        carried = {**self.carried, plan_id: max(ceil(mean), self.carried.get(plan_id, 0))}
        full = (*self.recent_fullest, fullest_ratios_of(step.batch))[-RECENT_STEPS:]
        told = replace(
            self,
            batch=self.batch if held else step.batch,
            recent_tokens=recent,
            recent_fullest=full,
            carried=carried,
        )
        if not self.learns:
            return told
        noise = max(noise_share, LEAST_NOISE_SHARE)
        beliefs = dict(self.beliefs)
        terms = self._terms_of(plan_id, step.batch)
        devices = {phase: self._devices(plan_id, phase) for phase in terms}
        for name, seconds in step.phase_seconds.items():
            phase = PHASE_NAMES[name]
            for device in devices.get(phase, ()):
                belief = beliefs.get(device) or first_belief(device)
                belief = replace(belief, prior=replace(belief.prior, noise_share=noise))
                beliefs[device] = observe(belief, terms[phase], seconds / ratio)
        return replace(told, beliefs=beliefs, missed_share=max(self.missed_share, self._missed(step, plan_id)))

    def _missed(self, step: StepObserved, plan_id: str) -> float:
        peak = max(step.peak_bytes.values(), default=0)
        if not peak:
            return 0.0
        problem = self.problem(step.batch, self.inventory, step.batch.width_tokens, fullest_ratios_of(step.batch))
        found = fullest(problem, self.global_plan(plan_id))
        return peak / max(needed for needed, _ in found.values()) - 1

    def expected(self, finished: StepMeasured, plan_id: str) -> Estimate:
        """What this very step would have taken under `plan_id`."""
        return self._sum(plan_id, self._terms_of(plan_id, observed(finished).batch))

    def step(self, plan_id: str) -> Estimate:
        """A step to come, of a batch like the last one."""
        return self._sum(plan_id, self._terms_of(plan_id, self.present_batch))

    def saving(self, old_id: str, new_id: str, old_ratio: float, new_ratio: float) -> Estimate:
        """A step's old_ratio x old - new_ratio x new, from the difference of their terms."""
        parts: dict[str, dict[str, float]] = {}
        for plan_id, ratio in ((old_id, old_ratio), (new_id, -new_ratio)):
            for device, terms in self._by_device(plan_id, self._terms_of(plan_id, self.present_batch)).items():
                total = parts.setdefault(device, {})
                for name, seconds in terms.items():
                    total[name] = total.get(name, 0.0) + ratio * seconds
        return self._believed(parts)

    def misfit(self, plan_id: str, step: int) -> Misfit | None:
        """When a slot will not hold the plan: at the longest samples allowed never, now, or as they grow.

        Samples that the plan has carried before are no question.
        """
        longest = largest_row_tokens(self.config.data, step)
        room = max(self.room_tokens(plan_id), self.carried.get(plan_id, 0))
        if room >= longest or not self.recent_tokens:
            return None
        if room < self.mean_tokens:
            return Misfit(within_steps=0, reason=self.excess(plan_id, self.mean_tokens) or "")
        line = trend([(at, float(mean)) for at, mean, _ in self.recent_tokens])
        passing = None if line is None else first_passing(line, float(room), steps=AHEAD_STEPS)
        if passing is None:
            return None
        reason = self.excess(plan_id, room + MEAN_MULTIPLE)
        return Misfit(within_steps=passing.in_steps, reason=f"with samples of more than {room} tokens {reason}")

    def fits(self, plan: Plan, step: int) -> bool:
        """Whether the plan holds the samples of this step as far as they are foreseen; it need not be known."""
        known = self if plan.plan_id in self.plans else replace(self, plans={**self.plans, plan.plan_id: plan})
        misfit = known.misfit(plan.plan_id, step)
        return misfit is None or misfit.within_steps > 0

    def met_rows(self, step: int, width_tokens: int) -> FleetOutlook:
        """The same, knowing also that the longest sample of step `step` has so many tokens."""
        row = (step, ceil(mean_tokens(self.present_batch)), width_tokens)
        return replace(self, recent_tokens=(*self.recent_tokens, row)[-KEPT_STEPS:])

    def overflowed(self, plan_id: str, used_bytes: int) -> FleetOutlook:
        """The same; such a peak may be so many times what is predicted. A smaller margin met more overflows at the same step."""
        carried = {name: tokens for name, tokens in self.carried.items() if name != plan_id}
        missed = max(self.missed_share, used_bytes / self.peak_bytes(plan_id) - 1)
        return replace(self, missed_share=missed, carried=carried)

    # -- what follows -------------------------------------------------------------------------------------------------

    @property
    def present_batch(self) -> StepBatch:
        """The last step's; before any what is allowed at most."""
        return self.batch or largest_batch(self.config)

    def problem(self, batch: StepBatch, fleet: Fleet, longest_tokens: int, fullest: Ratios | None = None) -> Problem:
        """The planner's problem on a fleet, when a prompt with its response has at most so many tokens.

        Micro-batches are at most as full as in the last steps, or as `fullest` says.
        """
        terrain = Terrain(fleet=fleet, beliefs=self._all_beliefs(fleet), rates=self._rates(fleet))
        memory = FleetMemory(
            cache_bytes=float(self.config.rollout.kv_cache_bytes),
            margin_share=max(FleetMemory(cache_bytes=0.0).margin_share, self.missed_share),
        )
        ratios = self.fullest_ratios() if fullest is None else fullest
        return Problem(job=job_of(self.config, batch, longest_tokens, ratios), terrain=terrain, memory=memory)

    def _all_beliefs(self, fleet: Fleet) -> dict[str, Calibration]:
        return {name: self.beliefs.get(name) or first_belief(name) for name in sorted(fleet.devices)}

    def _rates(self, fleet: Fleet) -> dict[str, Rates]:
        budget = self.config.fleet.slot_budget_bytes
        return {
            name: replace(rates_of(device), memory_bytes=min(budget, device.memory_bytes))
            for name, device in fleet.devices.items()
        }

    def global_plan(self, plan_id: str) -> GlobalPlan:
        """A known plan in the planner's words."""
        if plan_id not in self.translated:
            self.translated[plan_id] = planned(self.config, self.plans[plan_id])
        return self.translated[plan_id]

    def _ground(self, pool: tuple[int, ...]) -> Ground:
        """Without the present beliefs: what depends on slots alone."""
        if pool not in self.grounds:
            terrain = Terrain(fleet=self.inventory, rates=self._rates(self.inventory))
            self.grounds[pool] = terrain.ground(pool)
        return self.grounds[pool]

    def _devices(self, plan_id: str, phase: str) -> tuple[str, ...]:
        key = (plan_id, phase)
        if key not in self.placed:  # a pool of a thousand slots takes long to look up
            self.placed[key] = self._ground(_slots_of(self.global_plan(plan_id), phase)).devices
        return self.placed[key]

    def _terms_of(self, plan_id: str, batch: StepBatch) -> PhaseTerms:
        key = (plan_id, batch)
        if key not in self.known:
            if len(self.known) >= KEPT_ANSWERS:
                self.known.clear()
            plan = self.global_plan(plan_id)
            problem = self.problem(batch, self.inventory, batch.width_tokens)
            grounds = [self._ground(pool) for pool in plan.pools]
            memory, job = problem.memory, problem.job
            sizes = {name: memory.stage(job, name, choice) for name, choice in plan.stages if name != "actor_generate"}
            engine = memory.engine(job, plan.stage("actor_generate").layout)
            cache = engine_cache_bytes(problem, plan, grounds, sizes, engine)
            self.known[key] = phase_terms(problem, plan, grounds, sizes, cache)
        return self.known[key]

    def _by_device(self, plan_id: str, phases: PhaseTerms) -> dict[str, dict[str, float]]:
        """Terms of a whole step by device; a phase on several devices counts as the last by name, which it waits for."""
        found: dict[str, dict[str, float]] = {}
        for phase, terms in phases.items():
            total = found.setdefault(max(self._devices(plan_id, phase)), {})
            for name, seconds in terms.items():
                total[name] = total.get(name, 0.0) + seconds
        return found

    def _sum(self, plan_id: str, phases: PhaseTerms) -> Estimate:
        return self._believed(self._by_device(plan_id, phases))

    def _believed(self, parts: Mapping[str, Mapping[str, float]]) -> Estimate:
        mean = variance = 0.0
        for device, terms in parts.items():
            belief = self.beliefs.get(device) or first_belief(device)
            found = predict(replace(belief, prior=replace(belief.prior, noise_share=0.0)), terms)
            mean += found.mean_seconds
            variance += found.deviation_seconds**2
        return Estimate(mean_seconds=mean, deviation_seconds=sqrt(variance))

    @property
    def mean_tokens(self) -> int:
        """Of a prompt with its response, the largest mean of the last steps."""
        longest = largest_row_tokens(self.config.data)
        return max((mean for _, mean, _ in self.recent_tokens[-RECENT_STEPS:]), default=longest)

    def longest_tokens(self, mean_tokens: int) -> int:
        """Of the longest sample of a step with such a mean: by as many times longer as in the last steps."""
        longest = largest_row_tokens(self.config.data)
        return min(longest, ceil(mean_tokens * self._spread_ratio()))

    def _spread_ratio(self) -> float:
        """The longest sample over the mean one, rounded up so that answers last some steps."""
        times = max((most / mean for _, mean, most in self.recent_tokens[-RECENT_STEPS:]), default=1.0)
        return ceil(RATIO_PARTS * times) / RATIO_PARTS

    def fullest_ratios(self) -> Ratios:
        """(samples of a micro-batch, tokens of the fullest over those of an average one) at most in the last steps, rounded up alike."""
        most: dict[int, float] = {}
        for size, ratio in (each for step in self.recent_fullest for each in step):
            most[size] = max(ratio, most.get(size, 0.0))
        return tuple((size, ceil(RATIO_PARTS * ratio) / RATIO_PARTS) for size, ratio in sorted(most.items()))

    def room_tokens(self, plan_id: str) -> int:
        """The largest mean of a prompt with its response at which every slot holds the plan, at most what is allowed.

        A multiple of MEAN_MULTIPLE; below 1 where nothing fits.
        """
        key = (plan_id, self._spread_ratio(), self.fullest_ratios(), self.missed_share)
        if key not in self.rooms:
            if len(self.rooms) >= KEPT_ANSWERS:
                self.rooms.clear()
            low, high = 0, ceil(largest_row_tokens(self.config.data) / MEAN_MULTIPLE)
            if self.excess(plan_id, high * MEAN_MULTIPLE) is None:
                low = high
            while high - low > 1:
                middle = (low + high) // 2
                fits = self.excess(plan_id, middle * MEAN_MULTIPLE) is None
                low, high = (middle, high) if fits else (low, middle)
            self.rooms[key] = low * MEAN_MULTIPLE
        return self.rooms[key]

    def excess(self, plan_id: str, mean_tokens: int) -> str | None:
        """What a slot lacks when a prompt with its response has so many tokens on average, or None."""
        plan = self.global_plan(plan_id)
        problem = self.memory_problem(mean_tokens, self.inventory)
        for pool, (needed, phase) in fullest(problem, plan).items():
            room, safe = self._ground(plan.pools[pool]).room_bytes, needed * (1 + problem.memory.margin_share)
            if safe > room:
                slot = plan.pools[pool][0]
                return f"slot {slot} needs {safe:,.0f} bytes in {phase} with its margin, it has {room:,.0f}"
        return None

    def peak_bytes(self, plan_id: str) -> int:
        """What the fullest slot is expected to need with samples as long as in the last steps, without margin."""
        found = fullest(self.memory_problem(self.mean_tokens, self.inventory), self.global_plan(plan_id))
        return int(max(needed for needed, _ in found.values()))

    def memory_problem(self, mean_tokens: int, fleet: Fleet) -> Problem:
        """What memory is judged by: all samples as long as the mean, but for the longest."""
        samples = self.present_batch.samples
        batch = StepBatch(
            samples=samples, width_tokens=0, prompt_tokens=0.0, response_tokens=(float(max(mean_tokens, 1)),)
        )
        return self.problem(batch, fleet, self.longest_tokens(mean_tokens))


def fullest(problem: Problem, plan: GlobalPlan) -> dict[int, tuple[float, str]]:
    """Pool -> bytes of its fullest slot without margin, and the phase."""
    memory, job = problem.memory, problem.job
    sizes = {name: memory.stage(job, name, choice) for name, choice in plan.stages if name != "actor_generate"}
    engine = memory.engine(job, plan.stage("actor_generate").layout)
    active = {name: {phase: sum(parts.values()) for phase, parts in s.phases.items()} for name, s in sizes.items()}
    active["actor_generate"] = {"generate": sum(engine.fixed.values()) + engine.least_bytes}
    left = {name: sum(size.resident.values()) for name, size in sizes.items()}
    left["actor_generate"] = sum(engine.resident.values())
    found: dict[int, tuple[float, str]] = {}
    for pool in range(len(plan.pools)):
        names = plan.sharing(pool)
        resting = sum(left[name] for name in names)
        found[pool] = max(
            (size + resting - left[name], phase) for name in names for phase, size in active[name].items()
        )
    return found


def observed(step: StepMeasured) -> StepObserved:
    """The step with its phases; TypeError for one without."""
    if not isinstance(step, StepObserved):
        raise TypeError("the fleet's outlook needs StepObserved: seconds by phase and the batch, not the step's alone")
    return step


def mean_tokens(batch: StepBatch) -> float:
    """Of a prompt with its response."""
    return batch.prompt_tokens + sum(batch.response_tokens) / len(batch.response_tokens)


def first_belief(device: str) -> Calibration:
    """What is believed of a device before the job ran."""
    return start(prior_for(TERMS, device, kind="rl"))


def fullest_ratios_of(batch: StepBatch) -> Ratios:
    """(samples of a micro-batch, tokens of the fullest one over those of an average one)."""
    mean = mean_tokens(batch)
    return tuple((size, tokens / (size * mean)) for size, tokens in batch.fullest_tokens)


def job_of(config: Config, batch: StepBatch, longest_tokens: int, fullest: Ratios = ()) -> Job:
    """A step of the job with such a batch, in the planner's words."""
    return Job(
        actor=language_model(config.model),
        critic=scalar_model(config.model) if config.algorithm.adv_estimator == "gae" else None,
        reference=language_model(config.model),
        samples=batch.samples,
        prompt_tokens=batch.prompt_tokens,
        lengths=Lengths(tokens=batch.response_tokens),
        longest_tokens=longest_tokens,
        mini_batches=config.algorithm.mini_batches,
        epochs=config.algorithm.epochs,
        fullest_ratios=fullest,
    )


def planned(config: Config, plan: Plan, pool: tuple[int, ...] = ()) -> GlobalPlan:
    """The plan in the planner's words: stages that share slots share a pool; with `pool` all stand on that one."""
    pools: list[tuple[int, ...]] = [pool] if pool else _pools(config, plan)
    place = {slot: index for index, slots in enumerate(pools) for slot in slots}
    stages: list[tuple[str, StageChoice]] = []
    for name in ORDER:
        if name == "critic_train" and config.algorithm.adv_estimator != "gae":
            continue
        stage: StagePlan = getattr(plan, name)
        choice = StageChoice(
            layout=replace(stage.layout, distributed_optimizer=True),  # said by `sharding` here
            pool=0 if pool else place[stage.slots[0]],
            micro_batch=stage.micro_batch,
            sharding="optimizer" if stage.layout.distributed_optimizer or stage.stage != "train" else "none",
        )
        stages.append((name, choice))
    return GlobalPlan(pools=tuple(pools), stages=tuple(stages))


def _pools(config: Config, plan: Plan) -> list[tuple[int, ...]]:
    found: list[set[int]] = []
    for name, stage in plan.stages():
        if name == "critic_train" and config.algorithm.adv_estimator != "gae":
            continue
        touching = [slots for slots in found if not slots.isdisjoint(stage.slots)]
        found = [slots for slots in found if slots not in touching] + [set(stage.slots).union(*touching)]
    return [tuple(sorted(slots)) for slots in found]


def _slots_of(plan: GlobalPlan, phase: str) -> tuple[int, ...]:
    """The pool that a phase runs on."""
    names = {
        "generate": "actor_generate",
        "forward_reference": "reference_infer",
        "forward_critic": "critic_train",
        "update_critic": "critic_train",
    }
    assert phase in BLOCK_OF, f"no phase {phase}"
    return plan.pools[plan.stage(names.get(phase, "actor_train")).pool]
