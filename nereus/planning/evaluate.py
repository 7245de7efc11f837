"""What a global plan costs and needs: seconds by phase with their deviation, bytes by pool and phase, what does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nereus.costs.calibrate import Prediction, predict
from nereus.costs.footprint import Parts
from nereus.costs.host import HostPeak, host_peak
from nereus.layout import Layout, first_problem
from nereus.planning.bytes import Components, DeviceMemory, EngineBytes, MemoryModel, StageBytes
from nereus.planning.ground import Ground, Terrain
from nereus.planning.job import BLOCK_OF, PHASES_OF, Job
from nereus.planning.plan import GlobalPlan, StageChoice
from nereus.planning.stagework import (
    Terms,
    added,
    forward_work,
    framework_work,
    generate_work,
    sync_work,
    update_work,
    with_offload,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is planned: a job on a terrain, under a memory model."""

    job: Job
    terrain: Terrain
    memory: MemoryModel = field(default_factory=DeviceMemory)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """A phase of the step: where it runs and what it takes. The seconds of critical phases sum to the step's."""

    phase: str
    stage: str
    pool: int
    terms: Mapping[str, float]
    time: Prediction
    critical: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPeak(Parts):
    """A slot of a pool in one phase: bytes by component (stage.component), and the room that it has.

    `safe_bytes` is what is compared with `room_bytes`: the sum with the memory model's margin.
    """

    pool: int
    phase: str
    components: Components
    safe_bytes: float
    room_bytes: float

    @property
    def fits(self) -> bool:
        """Whether a slot has the room."""
        return self.safe_bytes <= self.room_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """Why a plan cannot run: of layouts a reason alone; of memory where, when, what, and by how many bytes."""

    reason: str
    pool: int = -1
    slot: int = -1
    phase: str = ""
    component: str = ""
    needed_bytes: float = 0.0
    room_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """Slots of its pool that a model-stage leaves idle, and why."""

    stage: str
    slots: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A plan with its step, its memory, what does not fit, and which stages leave slots idle."""

    plan: GlobalPlan
    step: Prediction
    phases: tuple[PhaseTime, ...]
    peaks: tuple[PoolPeak, ...]
    hosts: tuple[HostPeak, ...]
    misfits: tuple[Misfit, ...]
    idle: tuple[Idle, ...]
    step_tokens: float
    fleet_slots: int

    @property
    def fits(self) -> bool:
        """Whether the plan can run."""
        return not self.misfits

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and responses per second and slot of the fleet, idle ones included."""
        return self.step_tokens / self.step.mean_seconds / self.fleet_slots

    @property
    def binding(self) -> PoolPeak:
        """The peak that has least room left."""
        return max(self.peaks, key=lambda peak: peak.safe_bytes / peak.room_bytes)


def evaluate(problem: Problem, plan: GlobalPlan) -> Evaluation:
    """The plan's step and memory, and everything about it that does not fit. A layout that cannot be cut costs nothing."""
    job = problem.job
    grounds = [problem.terrain.ground(pool) for pool in plan.pools]
    wrong = list(layout_misfits(job, plan, grounds))
    slots = len(problem.terrain.fleet.slots)
    tokens = job.samples * job.sample_tokens
    if wrong:
        return Evaluation(
            plan=plan,
            step=Prediction(mean_seconds=float("inf"), deviation_seconds=0.0),
            phases=(),
            peaks=(),
            hosts=(),
            misfits=tuple(wrong),
            idle=(),
            step_tokens=tokens,
            fleet_slots=slots,
        )
    sizes = {name: problem.memory.stage(job, name, choice) for name, choice in plan.stages if name != "actor_generate"}
    engine = problem.memory.engine(job, plan.stage("actor_generate").layout)
    cache = engine_cache_bytes(problem, plan, grounds, sizes, engine)
    peaks = tuple(_peaks(problem, plan, grounds, sizes, engine, cache))
    hosts = tuple(_hosts(plan, grounds, sizes))
    phases, step = timed(problem, plan, grounds, phase_terms(problem, plan, grounds, sizes, cache))
    return Evaluation(
        plan=plan,
        step=step,
        phases=phases,
        peaks=peaks,
        hosts=hosts,
        misfits=(*_memory_misfits(plan, peaks), *_host_misfits(plan, hosts)),
        idle=tuple(_idle(plan, grounds)),
        step_tokens=tokens,
        fleet_slots=slots,
    )


def layout_misfits(job: Job, plan: GlobalPlan, grounds: Sequence[Ground]) -> Iterator[Misfit]:
    """Layouts that cannot hold their model, or that have more ranks than their pool has seats."""
    for name, choice in plan.stages:
        reason = stage_problem(job, name, choice.layout, grounds[choice.pool])
        if reason is not None:
            yield Misfit(reason=f"{name}: {reason}", pool=choice.pool)


def stage_problem(job: Job, name: str, layout: Layout, ground: Ground) -> str | None:
    """Why a layout cannot be cut for its model on this ground, or None."""
    stage = "generate" if name == "actor_generate" else "infer" if name.endswith("_infer") else "train"
    found = first_problem(job.model(name).config, layout, stage)
    if found is not None:
        return f"{found[0]} = {found[1]}: {found[2]}"
    within_domain = layout.tp <= max(ground.domain_slots)
    seats = ground.seats(layout.tp) if within_domain else len(ground.slots)
    if layout.ranks > seats:
        lost = len(ground.slots) - seats
        within = f" ({lost} are left over by groups of tp = {layout.tp} within nodes)" if lost else ""
        product = f"tp * cp * pp * dp = {layout.ranks}"
        return f"{product}: expected at most {seats} of its {len(ground.slots)} slots{within}"
    if not within_domain and stage != "generate":
        return f"tp = {layout.tp}: expected at most the {max(ground.domain_slots)} slots of a node"
    return None


def engine_cache_bytes(
    problem: Problem,
    plan: GlobalPlan,
    grounds: Sequence[Ground],
    sizes: Mapping[str, StageBytes],
    engine: EngineBytes,
) -> float:
    """Bytes of keys and values on a slot: what others leave of the engine's share, at most what it has a use for."""
    choice = plan.stage("actor_generate")
    others = sum(sum(sizes[name].resident.values()) for name in plan.sharing(choice.pool) if name in sizes)
    return cache_room(problem.memory, grounds[choice.pool].room_bytes, engine, others)


def cache_room(memory: MemoryModel, room_bytes: float, engine: EngineBytes, others_bytes: float) -> float:
    """Bytes of cache beside `others_bytes`; below `engine.least_bytes` the engine cannot run."""
    share = min(memory.engine_share, 1 / (1 + memory.margin_share))
    room = room_bytes * share - others_bytes - sum(engine.fixed.values())
    return min(max(room, engine.least_bytes), engine.most_bytes)


def phase_terms(
    problem: Problem, plan: GlobalPlan, grounds: Sequence[Ground], sizes: Mapping[str, StageBytes], cache: float
) -> dict[str, Terms]:
    """Phase -> terms, in the order of a step."""
    job = problem.job
    trained, served = plan.stage("actor_train"), plan.stage("actor_generate")
    ground = grounds[trained.pool]
    near = (
        ground.one_domain
        if trained.pool == served.pool
        else len(problem.terrain.ground(_union(plan)).domain_slots) == 1
    )
    work: dict[str, Terms] = {"update_weights": sync_work(job, ground.rates, one_domain=near)}
    work["generate"] = generate_work(job, served.layout, grounds[served.pool].rates, cache)
    for name, choice in plan.stages:
        if name != "actor_generate":
            work |= stage_terms(job, name, choice, grounds[choice.pool], sizes[name])
    work["framework"] = framework_work(job)
    return {phase: work[phase] for phase in BLOCK_OF if phase in work}


def _union(plan: GlobalPlan) -> tuple[int, ...]:
    return plan.pools[plan.stage("actor_train").pool] + plan.pools[plan.stage("actor_generate").pool]


def stage_terms(job: Job, name: str, choice: StageChoice, ground: Ground, sizes: StageBytes) -> dict[str, Terms]:
    """Phase -> terms of a stage that trains or infers, what it fetches from host included."""
    shape = job.model(name).shape
    phases = PHASES_OF[name]
    work = {phases[0]: forward_work(job, shape, choice, ground.rates)}
    if name.endswith("_train"):
        work[phases[1]] = update_work(job, shape, choice, ground.rates)
    return {phase: with_offload(terms, sizes.moved[phase], ground.rates) for phase, terms in work.items()}


def timed(
    problem: Problem, plan: GlobalPlan, grounds: Sequence[Ground], work: Mapping[str, Terms]
) -> tuple[tuple[PhaseTime, ...], Prediction]:
    """Every phase's prediction, and the step's over the phases that it waits for.

    Deviations of one ground's phases are joint (their common terms are wrong together); those of several grounds add.
    """
    stage_of = {phase: name for name in PHASES_OF for phase in PHASES_OF[name]}
    pool_of = {phase: _pool(plan, stage_of.get(phase, "actor_train")) for phase in work}
    means = {phase: grounds[pool_of[phase]].seconds(terms) for phase, terms in work.items()}
    critical = critical_phases(problem.job, means, pool_of)
    times = tuple(
        PhaseTime(
            phase=phase,
            stage=stage_of.get(phase, ""),
            pool=pool_of[phase],
            terms=terms,
            time=_predicted(grounds[pool_of[phase]], terms),
            critical=phase in critical,
        )
        for phase, terms in work.items()
    )
    grouped: dict[tuple[str, ...], tuple[Ground, list[Mapping[str, float]]]] = {}
    for phase in critical:
        ground = grounds[pool_of[phase]]
        grouped.setdefault(ground.devices, (ground, []))[1].append(work[phase])
    parts = [_predicted(ground, added(terms)) for ground, terms in grouped.values()]
    step = Prediction(
        mean_seconds=sum(means[phase] for phase in critical),
        deviation_seconds=sum(part.deviation_seconds for part in parts),
    )
    return times, step


def _predicted(ground: Ground, terms: Mapping[str, float]) -> Prediction:
    if any(value == float("inf") for value in terms.values()):
        return Prediction(mean_seconds=float("inf"), deviation_seconds=0.0)
    return predict(ground.beliefs, terms)


def _pool(plan: GlobalPlan, stage: str) -> int:
    return plan.stage(stage).pool


def critical_phases(job: Job, seconds: Mapping[str, float], pool_of: Mapping[str, int]) -> tuple[str, ...]:
    """The phases whose seconds sum to the step's: in each block those of the pool that takes longest.

    With one step off and an engine on slots of its own, either generation or the blocks after it hide behind the other.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    for block in dict.fromkeys(BLOCK_OF.values()):
        by_pool: dict[int, list[str]] = {}
        for phase in seconds:
            if BLOCK_OF[phase] == block:
                by_pool.setdefault(pool_of[phase], []).append(phase)
        if by_pool:
            chosen[block] = tuple(max(by_pool.values(), key=lambda names: sum(seconds[name] for name in names)))
    apart = "generate" in pool_of and list(pool_of.values()).count(pool_of["generate"]) == 1
    if not job.on_policy and apart:
        beside = [*chosen.get("infer", ()), *chosen.get("train", ())]
        if seconds["generate"] > sum(seconds[name] for name in beside):
            chosen["infer"] = chosen["train"] = ()
        else:
            chosen["generate"] = ()
    return tuple(phase for names in chosen.values() for phase in names)


def _peaks(
    problem: Problem,
    plan: GlobalPlan,
    grounds: Sequence[Ground],
    sizes: Mapping[str, StageBytes],
    engine: EngineBytes,
    cache: float,
) -> Iterator[PoolPeak]:
    """Every phase of every pool: the active stage with all it holds, the others with what they leave."""
    margin = 1 + problem.memory.margin_share
    for pool, ground in enumerate(grounds):
        sharing = plan.sharing(pool)
        left = {name: sizes[name].resident if name in sizes else engine.resident for name in sharing}
        for name in sharing:
            phases = sizes[name].phases if name in sizes else {"generate": {**engine.fixed, "cache": cache}}
            for phase, active in phases.items():
                held = {f"{name}.{part}": size for part, size in active.items() if size}
                for other in sharing:
                    if other != name:
                        held |= {f"{other}.{part}": size for part, size in left[other].items() if size}
                yield PoolPeak(
                    pool=pool,
                    phase=phase,
                    components=held,
                    safe_bytes=sum(held.values()) * margin,
                    room_bytes=ground.room_bytes,
                )


def _hosts(plan: GlobalPlan, grounds: Sequence[Ground], sizes: Mapping[str, StageBytes]) -> Iterator[HostPeak]:
    for pool, ground in enumerate(grounds):
        offloaded = {
            f"{name}.{part}": size
            for name in plan.sharing(pool)
            if name in sizes
            for part, size in sizes[name].offloaded.items()
        }
        yield host_peak(offloaded, ground.host_room_bytes)


def _memory_misfits(plan: GlobalPlan, peaks: Sequence[PoolPeak]) -> Iterator[Misfit]:
    """The worst phase of each pool that does not fit."""
    for pool in range(len(plan.pools)):
        over = [peak for peak in peaks if peak.pool == pool and not peak.fits]
        if over:
            worst = max(over, key=lambda peak: peak.safe_bytes)
            slot = plan.pools[pool][0]
            largest = sorted(worst.components.items(), key=lambda item: -item[1])[:4]
            parts = ", ".join(f"{name} {size:,.0f}" for name, size in largest)
            yield Misfit(
                reason=f"slot {slot} needs {worst.safe_bytes:,.0f} bytes in {worst.phase} with its margin, it has "
                f"{worst.room_bytes:,.0f}; {worst.binding} binds ({parts})",
                pool=pool,
                slot=slot,
                phase=worst.phase,
                component=worst.binding,
                needed_bytes=worst.safe_bytes,
                room_bytes=worst.room_bytes,
            )


def _host_misfits(plan: GlobalPlan, hosts: Sequence[HostPeak]) -> Iterator[Misfit]:
    for pool, host in enumerate(hosts):
        if not host.fits:
            slot = plan.pools[pool][0]
            yield Misfit(
                reason=f"slot {slot} needs {host.total_bytes:,.0f} bytes of host memory, its share of the node is "
                f"{host.room_bytes:,.0f}; {host.binding} binds",
                pool=pool,
                slot=slot,
                phase="host",
                component=host.binding,
                needed_bytes=host.total_bytes,
                room_bytes=host.room_bytes,
            )


def _idle(plan: GlobalPlan, grounds: Sequence[Ground]) -> Iterator[Idle]:
    for name, choice in plan.stages:
        layout, ground = choice.layout, grounds[choice.pool]
        idle = len(ground.slots) - layout.ranks
        if idle:
            group = layout.tp * layout.cp * layout.pp
            fewer = f"replicas of {group} slots" if idle < group or group > 1 else "more replicas"
            why = f"{fewer} do not fill {len(ground.slots)}" if idle < group else "more replicas would not be faster"
            taken = frozenset(ground.first_seats(layout.tp, layout.ranks))
            yield Idle(stage=name, slots=tuple(slot for slot in ground.slots if slot not in taken), reason=why)
