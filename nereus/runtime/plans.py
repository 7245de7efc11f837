"""What a change of plan will do, worked out and proved before it touches anything: graph, movements, slots' parts, sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.fleet import CPU_SLOT, Fleet, Node
from nereus.layout import Plan, StagePlan
from nereus.runtime.fabric import program_of
from nereus.runtime.job import Job, ShellKey
from nereus.runtime.transformation import GENERATION, Outcome, SlotChange
from nereus.slices import Movement, Slice, join, movement
from nereus.storage import emu_name
from nereus.transition import Transition, WeightSync, build, build_sync, check_transition, same_cut
from nereus.transitions.durations import Durations
from nereus.transitions.graph import TransitionGraph
from nereus.transitions.planned import Settings, SlotRoom, planned_graph
from nereus.transitions.programs import Stretch, stretches
from nereus.transitions.proof import check

GROUPS_PER_STAGE = 1_000  # names that the groups of one stage may use up
CACHED_SHELLS = 4  # stages whose shells and communicators are kept because layouts come back
EXPECTED_ENGINE_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A proved change: its graph as stretches, the movement of each, all of them as one, and the sync after it."""

    transition: Transition
    graph: TransitionGraph
    stretches: tuple[Stretch, ...]
    movements: Mapping[int, Movement]
    moved: Movement
    copies: Mapping[str, tuple[Slice, ...]]
    sync: WeightSync | None
    folders: Mapping[str, str]
    on_disk: bool

    @property
    def modes(self) -> dict[str, str]:
        """The mode of every EMU; checkpoint where its snapshot is on the disk."""
        snapshot = "checkpoint" if self.on_disk else "snapshot"
        return {emu.emu: snapshot if emu.mode == "snapshot" else emu.mode for emu in self.graph.change.emus}

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of the model-stages that are built anew."""
        return (*self.transition.changed, *(("actor_generate",) if self.restart_generation else ()))

    @property
    def restart_generation(self) -> bool:
        """Whether the engines of generation change."""
        return self.transition.restart_generation

    def stages(self, plan: Plan) -> dict[str, StagePlan]:
        """The stages that are built anew, by EMU, as `plan` has them."""
        return {emu_name(stage): stage for stage in (getattr(plan, name) for name in self.stage_names)}

    def told(self, job: Job, first_count: int) -> dict[int, SlotChange]:
        """What each slot is told. Takes engines that come back out of the job's cache."""
        before, after = self.stages(self.transition.before), self.stages(self.transition.after)
        reused: set[str] = set()
        for emu, stage in after.items():
            if emu != GENERATION and (key := (emu, stage.slots, stage.layout)) in job.shells:
                job.shells.remove(key)
                reused.add(emu)
        cached, evicted = self._cache(job, before)
        counts = {emu: first_count + GROUPS_PER_STAGE * number for number, emu in enumerate(after)}
        return {
            slot: SlotChange(
                before=before,
                after=after,
                programs={n: program_of(moved, slot, ()) for n, moved in self.movements.items()},
                copies={emu: tuple(s for s in kept if s.destination == slot) for emu, kept in self.copies.items()},
                counts=counts,
                reused=frozenset(reused),
                cached=frozenset(cached),
                evicted=evicted,
                snapshots=self.folders,
            )
            for slot in job.pool.numbers
        }

    @staticmethod
    def _cache(job: Job, before: Mapping[str, StagePlan]) -> tuple[dict[str, ShellKey], tuple[ShellKey, ...]]:
        """Old engines that are kept as shells, each key once, and those that make room for them."""
        cached: dict[str, ShellKey] = {}
        for emu, stage in before.items():
            key = emu, stage.slots, stage.layout
            if emu != GENERATION and key not in job.shells:
                cached[emu] = key
        keys = [*job.shells, *cached.values()]
        return cached, tuple(keys[: max(len(keys) - CACHED_SHELLS, 0)])

    def cache_shells(self, job: Job) -> None:
        """After the change: what `told` said about the cache is so."""
        cached, evicted = self._cache(job, self.stages(self.transition.before))
        job.shells = [key for key in (*job.shells, *cached.values()) if key not in evicted]


def plan_change(job: Job, plan: Plan, room: Mapping[int, SlotRoom], *, urgent: bool = False) -> Planned:
    """Plans and proves the change to `plan`. Infeasible, TransferFailed or InvalidGraph when it cannot be done."""
    bucket_bytes = job.config.transfer.bucket_bytes
    transition = build(job.specs, job.plan, plan, bucket_bytes)
    nodes = sorted(set(job.pool.hosts.values()))
    fleet = Fleet(
        nodes=tuple(
            Node(slots=tuple(s for s, n in job.pool.hosts.items() if n == node), device=CPU_SLOT) for node in nodes
        )
    )
    settings = Settings(
        engine_seconds={
            emu_name(stage): job.engine_seconds.get(emu_name(stage), EXPECTED_ENGINE_SECONDS)
            for _, stage in plan.stages()
        },
        hosts=job.pool.hosts,
        host_bytes=job.config.fleet.host_bytes,
        staging_bytes=bucket_bytes,
        kv_cache_bytes=job.config.rollout.kv_cache_bytes,
        modes=job.modes,
        urgent=urgent,
    )
    graph, on_disk = planned_graph(job.specs, transition, room, settings, Durations(fleet=fleet, tolls=job.tolls))
    check(graph)
    parts = stretches(graph)
    movements = _movements(transition, parts, bucket_bytes)
    copies = {emu: tuple(s for s in transition.moved.kept if s.wanted.emu == emu) for emu in transition.emus()}
    kept = tuple(s for pieces in copies.values() for s in pieces)
    moved = join((Movement(kept=kept, buckets=()), *movements.values()))
    check_transition(transition, bucket_bytes, moved)
    unsynced = same_cut(job.plan.actor_train, plan.actor_train) and not transition.restart_generation
    return Planned(
        transition=transition,
        graph=graph,
        stretches=parts,
        movements=movements,
        moved=moved,
        copies=copies,
        sync=None if unsynced else build_sync(job.specs["actor"], plan, bucket_bytes),
        folders=dict.fromkeys(graph.change.through(), str(job.host.snapshots("checkpoint" if on_disk else "snapshot"))),
        on_disk=on_disk,
    )


def _movements(transition: Transition, parts: tuple[Stretch, ...], bucket_bytes: int) -> dict[int, Movement]:
    """The movement of each number, its rounds after those before it."""
    flows: dict[tuple[str, int, int, int], list[Slice]] = {}
    for piece in transition.slices:
        if piece.source != piece.destination:
            flows.setdefault((piece.wanted.emu, piece.source, piece.destination, piece.hop), []).append(piece)
    found: dict[int, Movement] = {}
    turn = 0
    for number, operations in sorted((n, o) for part in parts for n, o in part.moves.items()):
        slices = [s for o in operations for s in flows[o.emu, o.lanes[0], o.lanes[1], o.hop]]
        found[number] = movement(tuple(slices), bucket_bytes, turn)
        turn = max(turn, found[number].turns)
    return found


def engine_seconds_of(outcomes: Mapping[int, list[Outcome]]) -> dict[str, float]:
    """How long the slowest slot took to build each EMU's engine."""
    found: dict[str, float] = {}
    for listed in outcomes.values():
        for outcome in listed:
            if outcome.task.kind == "build_engine":
                found[outcome.task.emu] = max(found.get(outcome.task.emu, 0.0), outcome.seconds)
    return found
