"""From a change of plan to what its graph is made of: bytes of every EMU on every slot, who sends what, room, modes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nereus.layout import StagePlan
from nereus.memory import resident
from nereus.model import ModelSpec
from nereus.slices import Slice
from nereus.storage import Shard, emu_name, holding
from nereus.transition import Transition
from nereus.transitions.assemble import assemble
from nereus.transitions.change import Change, EmuChange, Flow, Mode, Residency
from nereus.transitions.durations import Durations
from nereus.transitions.graph import TransitionGraph
from nereus.transitions.order import Infeasible, Lane, host_lane

GENERATION = "actor.generate"
ENGINE_BYTES = 6 << 20
"""What a new engine and its communicators take beside state and gradients: 1 to 5 MB in a slot's ledger on a CPU."""
DISK_BYTES = 1 << 60
"""What is assumed of a disk until it is written to."""
Key = tuple[str, Lane]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRoom:
    """A slot's memory when a change is planned: its budget, what it holds, and the most that a phase held above that.

    `generation_bytes` of what it holds are its engine's.
    """

    budget_bytes: int
    held_bytes: int
    phase_bytes: int
    generation_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a graph is made with. `engine_seconds` by EMU is what building its engine is expected to take.

    `hosts` gives the host of each slot and `host_bytes` what a host may hold; `staging_bytes` are kept free on each
    slot for buckets; `kv_cache_bytes` are a new engine's. `modes` are asked for by EMU; others are chosen. `urgent` as in Change.
    """

    engine_seconds: Mapping[str, float]
    hosts: Mapping[int, int]
    host_bytes: int
    staging_bytes: int
    kv_cache_bytes: int
    modes: Mapping[str, Mode]
    urgent: bool = False


def planned_graph(
    specs: Mapping[str, ModelSpec],
    transition: Transition,
    room: Mapping[int, SlotRoom],
    settings: Settings,
    durations: Durations,
) -> tuple[TransitionGraph, bool]:
    """The graph of a change in the modes with the least work that fit, and whether snapshots go to the disk.

    Beside where there is room, else snapshot, largest EMU first; where the hosts cannot hold these, on the disk, which
    is mode checkpoint of the state as it is now. Infeasible when no mode fits, with the last reason.
    """
    asked = dict(settings.modes)
    on_disk = "checkpoint" in asked.values()
    modes: dict[str, Mode] = {emu: "snapshot" if mode == "checkpoint" else mode for emu, mode in asked.items()}
    while True:
        hosts = replace(settings, host_bytes=DISK_BYTES) if on_disk else settings
        change = change_of(specs, transition, room, hosts, modes)
        try:
            return assemble(change, durations), on_disk
        except Infeasible as refusal:
            if refusal.lane < 0 and not on_disk:
                on_disk = True
                continue
            emu = _to_change(change, refusal, frozenset(asked))
            if emu is None:
                raise
            modes[emu] = "snapshot"


def _to_change(change: Change, refusal: Infeasible, asked: frozenset[str]) -> str | None:
    """The EMU whose mode gives most room on the lane that lacks it: the largest there that is beside and not asked for."""
    lanes = {refusal.lane} | {lane for lane, _ in refusal.cycle}
    best: dict[str, int] = defaultdict(int)
    for r in change.residencies:
        if r.lane in lanes and r.emu not in asked and change.mode_of(r.emu) == "beside" and r.present_bytes:
            best[r.emu] += r.present_bytes
    return max(sorted(best), key=lambda emu: best[emu]) if best else None


def change_of(
    specs: Mapping[str, ModelSpec],
    transition: Transition,
    room: Mapping[int, SlotRoom],
    settings: Settings,
    modes: Mapping[str, Mode],
) -> Change:
    """The change in the given modes (others beside)."""
    places = _places(specs, transition, room, settings)
    flows = _flows(transition.slices)
    used: dict[Lane, int] = defaultdict(int)
    for r in places.values():
        used[r.lane] += r.present_bytes + r.blank_present_bytes
    other = {s: max(m.held_bytes - used[s], 0) + settings.staging_bytes for s, m in room.items()}
    hosts = {slot: host_lane(host) for slot, host in settings.hosts.items()}
    return Change(
        emus=tuple(_emu(transition, name, settings, modes) for name in _names(transition)),
        residencies=tuple(places[key] for key in sorted(places)),
        flows=flows,
        capacity_bytes={
            **{slot: max(m.budget_bytes, other[slot] + used[slot]) for slot, m in room.items()},
            **dict.fromkeys(hosts.values(), settings.host_bytes),
        },
        host_of=hosts,
        other_bytes=other,
        phase_bytes={slot: m.phase_bytes for slot, m in room.items()},
        urgent=settings.urgent,
    )


def _names(transition: Transition) -> tuple[str, ...]:
    return (*transition.changed, *(("actor_generate",) if transition.restart_generation else ()))


def _emu(transition: Transition, name: str, settings: Settings, modes: Mapping[str, Mode]) -> EmuChange:
    stage: StagePlan = getattr(transition.after, name)
    emu = emu_name(stage)
    mode = modes.get(emu, "beside")
    return EmuChange(
        emu=emu,
        mode=mode,
        frozen=stage.stage == "infer",
        idle=stage.stage == "generate",
        shell=stage.stage != "generate",
        through_host=mode == "snapshot",
        old_groups=1,
        new_groups=1,
        engine_seconds=settings.engine_seconds.get(emu, 1.0),
    )


def _places(
    specs: Mapping[str, ModelSpec], transition: Transition, room: Mapping[int, SlotRoom], settings: Settings
) -> dict[Key, Residency]:
    places: dict[Key, Residency] = {}
    kept: dict[Key, int] = defaultdict(int)
    guarded = _guarded(transition)
    for piece in transition.slices:
        if piece.source == piece.destination:
            kept[piece.wanted.emu, piece.destination] += piece.size_bytes
    for name in transition.changed:
        before: StagePlan = getattr(transition.before, name)
        after: StagePlan = getattr(transition.after, name)
        emu = emu_name(after)
        for slot in sorted({*before.slots, *after.slots}):
            old, old_blank = _state_and_blank(specs[after.model], before, slot)
            new, new_blank = _state_and_blank(specs[after.model], after, slot)
            same = kept[emu, slot]
            places[emu, slot] = Residency(
                emu=emu,
                lane=slot,
                present_bytes=old,
                target_bytes=new,
                kept_bytes=same,
                copied_bytes=same,
                guarded_bytes=guarded[emu, slot],
                blank_present_bytes=old_blank,
                blank_target_bytes=new_blank + (ENGINE_BYTES if after.rank_of(slot) is not None else 0),
            )
    if transition.restart_generation:
        places |= _engines(specs["actor"], transition, room, settings)
    return places


def _guarded(transition: Transition) -> dict[Key, int]:
    """Bytes of each EMU on each slot that another slot holds in the same box too."""
    holders: dict[Shard, int] = defaultdict(int)
    for shards in transition.present.values():
        for shard in shards:
            holders[shard] += 1
    found: dict[Key, int] = defaultdict(int)
    for slot, shards in transition.present.items():
        for shard in shards:
            found[shard.emu, slot] += shard.size_bytes if holders[shard] > 1 else 0
    return found


def _state_and_blank(spec: ModelSpec, stage: StagePlan, slot: int) -> tuple[int, int]:
    """Bytes of state of a stage on a slot, and of what needs no content: gradients, padding."""
    rank = stage.rank_of(slot)
    if rank is None:
        return 0, 0
    state = sum(shard.size_bytes for shard in holding(spec, stage)[slot])
    return state, max(sum(resident(spec, stage, rank).values()) - state, 0)


def _engines(
    spec: ModelSpec, transition: Transition, room: Mapping[int, SlotRoom], settings: Settings
) -> dict[Key, Residency]:
    """Engines hold only what a sync fills again; with a packed copy of each weight and their KV cache."""
    before, after = transition.before.actor_generate, transition.after.actor_generate
    new = {
        slot: 2 * sum(shard.size_bytes for shard in shards) + settings.kv_cache_bytes
        for slot, shards in holding(spec, after).items()
    }
    return {
        (GENERATION, slot): Residency(
            emu=GENERATION,
            lane=slot,
            blank_present_bytes=room[slot].generation_bytes,
            blank_target_bytes=new.get(slot, 0),
        )
        for slot in sorted({*before.slots, *after.slots})
    }


def _flows(slices: Sequence[Slice]) -> tuple[Flow, ...]:
    sizes: dict[tuple[str, int, int, int], int] = defaultdict(int)
    for piece in slices:
        if piece.source != piece.destination:
            sizes[piece.wanted.emu, piece.source, piece.destination, piece.hop] += piece.size_bytes
    return tuple(
        Flow(emu=emu, source=source, destination=destination, size_bytes=size, hop=hop)
        for (emu, source, destination, hop), size in sorted(sizes.items())
    )
