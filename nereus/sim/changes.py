"""The graph of a change of plan on a simulated fleet, by classes of slots, so that a thousand slots take seconds.

Slots that are gone hold nothing: what only they held is missing, and comes from the last checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from nereus.config import Config, ModelConfig
from nereus.fleet import Fleet
from nereus.layout import Plan, StagePlan
from nereus.model import ModelSpec, models_of
from nereus.report.transition import MovementReport, PlacedStage, held_by_slot
from nereus.report.transition_graph import change_of, groups_of
from nereus.storage import emu_name
from nereus.transfer.boxtable import BoxTable, joined, of_stage
from nereus.transfer.routes import Routes, routes
from nereus.transfer.streams import streams
from nereus.transition import same_cut
from nereus.transitions.assemble import assemble
from nereus.transitions.change import Change, EmuChange, Residency
from nereus.transitions.durations import Durations
from nereus.transitions.graph import TransitionGraph
from nereus.transitions.order import Infeasible
from nereus.transitions.planned import GENERATION

DEVICE_ENGINE_SECONDS: Mapping[str, float] = {"train": 5.0, "infer": 5.0, "generate": 45.0}
"""To build an engine on a GPU: vLLM's cold start of an 8B model takes 39 to 59 s; Megatron's shell is an estimate."""
Placing = Literal["measured", "standby", "pause"]
"""Where a change's operations run: as the real world has run them; engines and groups built ahead by standby processes where
there is room for them, which no real run has done yet; or everything while the job waits."""
PLACINGS: tuple[Placing, ...] = get_args(Placing)
STANDBY = ("allocate", "build_groups", "build_engine")
ENGINE_COPIES = 1
STAGING_BYTES = 512 << 20
Key = tuple[str, str, Fleet, frozenset[int], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Which change: on the slots of `fleet`, of which `holders` have their state; `urgent` as Change has it."""

    before: Plan
    after: Plan
    fleet: Fleet
    holders: frozenset[int]
    urgent: bool = False

    @property
    def key(self) -> Key:
        """Its name: plans are compared by theirs."""
        return (self.before.plan_id, self.after.plan_id, self.fleet, self.holders, self.urgent)


@dataclass(frozen=True, kw_only=True, eq=False)
class SimChange:
    """A change of plan: its graph (None where nothing is cut anew), and the stages of which some bytes are on no slot."""

    graph: TransitionGraph | None
    moved_bytes: int
    missing: tuple[str, ...]


def restarts_generation(before: Plan, after: Plan) -> bool:
    """Whether the engines of generation are built anew."""
    return not same_cut(before.actor_generate, after.actor_generate)


def change_between(
    config: Config,
    before: Plan,
    after: Plan,
    fleet: Fleet,
    durations: Durations,
    engine_seconds: Mapping[str, float],
    *,
    holders: frozenset[int] | None = None,
    placing: Placing = "measured",
    urgent: bool = False,
) -> SimChange:
    """The change on the slots of `fleet`, of which `holders` (all) have their state. Infeasible where no mode fits."""
    living = set(fleet.slots) if holders is None else set(holders)
    changed, restart = _cut_anew(before, after, living)
    tables = {name: _held(config.model, getattr(before, name), living) for name in changed}
    missing = _missing(tables)
    if missing or not (changed or restart):
        return SimChange(graph=None, moved_bytes=0, missing=missing)
    if not changed:
        change, moved = _empty(fleet), 0
    else:
        report = _report(config.model, before, after, changed, fleet, list(tables.values()))
        change = change_of(report, mode="beside", reserve_bytes=0, engine_seconds=0.0)
        moved = int(report.routes.row_bytes.sum())
    change = _completed(config, change, before, after, changed, fleet, engine_seconds, living, restart=restart)
    change = replace(_placed(change, placing), urgent=urgent)
    try:
        graph = assemble(change, durations)
    except Infeasible:
        graph = assemble(_through_hosts(change, fleet), durations)
    return SimChange(graph=graph, moved_bytes=moved, missing=())


def estimated_seconds(
    config: Config,
    before: Plan,
    after: Plan,
    fleet: Fleet,
    durations: Durations,
    engine_seconds: Mapping[str, float],
    holders: frozenset[int],
    placing: Placing,
) -> tuple[float, float, bool]:
    """What the busiest slot's thread does in a change, before generation's engines are built too, and whether all its state is
    on some slot; without routes or graph.

    Building groups and engines is nearly all that a change on hundreds of slots takes, so this is within a few percent of the
    graph's price (tests/sim/test_placing.py), a hundred times faster. Whether there is room is not looked at.
    """
    living, tolls = set(holders), durations.tolls
    changed, restart = _cut_anew(before, after, living)
    torn = [name for name in changed if not living.issuperset(getattr(before, name).slots)]
    if _missing({name: _held(config.model, getattr(before, name), living) for name in torn}):
        return 0.0, 0.0, False
    ahead = placing == "standby"
    device = fleet.device_of[fleet.slots[0]]
    rate = tolls.rate_share * min(device.link_bytes_per_second, device.nic_bytes_per_second)
    verified = tolls.digest_share * tolls.rate_share * device.memory_bytes_per_second
    busy: dict[int, float] = defaultdict(float)
    moved = 0.0  # generation comes last
    for name in (*changed, *(("actor_generate",) if restart else ())):
        old, new = getattr(before, name), getattr(after, name)
        if name == "actor_generate":
            moved = max(busy.values(), default=0.0)
        groups = 1 if name == "actor_generate" else groups_of(new)
        built = 0.0 if ahead else engine_seconds[new.stage] + tolls.group_seconds * groups
        held = {} if name == "actor_generate" else _slot_bytes(config.model, new)
        for slot in old.slots:
            busy[slot] += tolls.quiesce_seconds + tolls.destroy_group_seconds
        for slot in new.slots:
            busy[slot] += built + tolls.activate_seconds + held.get(slot, 0) * (1 / rate + 1 / verified)
    whole = max(busy.values(), default=0.0)
    commit = tolls.commit_seconds if busy else 0.0
    return whole + commit, (moved if restart else whole) + commit, True


def _cut_anew(before: Plan, after: Plan, living: set[int]) -> tuple[list[str], bool]:
    """Stages whose state is cut anew or lost in part, and whether the engines of generation are built anew."""
    changed = [
        name
        for name, stage in after.stages()
        if stage.stage != "generate"
        and (not same_cut(getattr(before, name), stage) or not living.issuperset(getattr(before, name).slots))
    ]
    return changed, restarts_generation(before, after) or not living.issuperset(before.actor_generate.slots)


def _missing(tables: Mapping[str, BoxTable]) -> tuple[str, ...]:
    """Stages of which some bytes are on no slot."""
    return tuple(name for name, table in tables.items() if any(not len(slots) for slots in table.sets))


@lru_cache(maxsize=4)
def _specs(config: ModelConfig) -> dict[str, ModelSpec]:
    return models_of(config)


@lru_cache(maxsize=64)
def _cut(config: ModelConfig, stage: StagePlan) -> BoxTable:
    """What the slots of a stage hold that are numbered like its ranks."""
    return of_stage(_specs(config)[stage.model], stage)


@lru_cache(maxsize=24)
def _placed_cut(config: ModelConfig, stage: StagePlan) -> BoxTable:
    table, slots = _cut(config, _by_rank(stage)), np.array(stage.slots, dtype=np.int64)
    return replace(table, sets=tuple(np.sort(slots[ranks]) for ranks in table.sets))


def _table(config: ModelConfig, stage: StagePlan) -> BoxTable:
    """What a stage's slots hold; the same cuts come back in change after change, on these slots or on others."""
    return _placed_cut(config, replace(stage, shares=(), micro_batch=0))


def _by_rank(stage: StagePlan) -> StagePlan:
    """The cut alone: shares and micro-batches hold nothing."""
    return replace(stage, slots=tuple(range(len(stage.slots))), shares=(), micro_batch=0)


@lru_cache(maxsize=64)
def _rank_bytes(config: ModelConfig, stage: StagePlan) -> tuple[int, ...]:
    return tuple(held_by_slot(_cut(config, stage), len(stage.slots)).tolist())


def _slot_bytes(config: ModelConfig, stage: StagePlan) -> dict[int, int]:
    """Bytes that each slot of a stage holds."""
    return dict(zip(stage.slots, _rank_bytes(config, _by_rank(stage)), strict=True))


def _held(config: ModelConfig, stage: StagePlan, living: set[int]) -> BoxTable:
    """What a stage's living slots hold."""
    table = _table(config, stage)
    if living.issuperset(stage.slots):
        return table
    kept = tuple(np.array([slot for slot in slots.tolist() if slot in living], dtype=np.int64) for slots in table.sets)
    return replace(table, sets=kept)


def _report(
    config: ModelConfig,
    before: Plan,
    after: Plan,
    changed: list[str],
    fleet: Fleet,
    present: list[BoxTable],
) -> MovementReport:
    """As much of a report as a Change is made from."""
    stages = tuple(PlacedStage(name=name, before=getattr(before, name), after=getattr(after, name)) for name in changed)
    target = joined([_table(config, stage.after) for stage in stages])
    found = routes(streams(joined(present), target), np.arange(len(fleet.node_of), dtype=np.int64), fleet)
    return MovementReport(
        fleet=fleet,
        routes=found,
        is_sync=False,
        stages=stages,
        components=(),
        ports=(),
        slots=(),
        objective="identity",
        exact=True,
        split_groups=0,
        least_moved_bytes=None,
        bottleneck="",
        seconds=0.0,
        least_seconds=0.0,
        direct_send_bytes=0,
        hops_count=0,
        horizon_steps=1,
    )


def _empty(fleet: Fleet) -> Change:
    return Change(
        emus=(),
        residencies=(),
        flows=(),
        capacity_bytes=dict.fromkeys(fleet.slots, 0),
        host_of={slot: -1 - int(fleet.node_of[slot]) for slot in fleet.slots},
    )


def _completed(
    config: Config,
    change: Change,
    before: Plan,
    after: Plan,
    changed: list[str],
    fleet: Fleet,
    engine_seconds: Mapping[str, float],
    living: set[int],
    *,
    restart: bool,
) -> Change:
    """With the engines of generation, what stays on the slots beside, and the slots' budgets."""
    emus = [
        replace(
            emu,
            frozen=getattr(after, name).stage == "infer",
            engine_seconds=engine_seconds[getattr(after, name).stage],
        )
        for emu, name in zip(change.emus, changed, strict=True)
    ]
    residencies = list(change.residencies)
    if restart:
        emus.append(
            EmuChange(emu=GENERATION, idle=True, old_groups=1, new_groups=1, engine_seconds=engine_seconds["generate"])
        )
        old, new = (_engine_bytes(config, p, s) for p, s in ((before, living), (after, set(fleet.slots))))
        residencies += [
            Residency(
                emu=GENERATION, lane=slot, blank_present_bytes=old.get(slot, 0), blank_target_bytes=new.get(slot, 0)
            )
            for slot in sorted({*old, *new})
        ]
    standing = _standing(config, before, changed, living, restart=restart)
    other = {slot: standing[slot] for slot in fleet.slots}
    used = dict(other)
    for r in residencies:
        if r.lane in used:
            used[r.lane] += r.present_bytes + r.blank_present_bytes
    budget = config.fleet.slot_budget_bytes
    hosts = {lane: size for lane, size in change.capacity_bytes.items() if lane < 0}
    return replace(
        change,
        emus=tuple(emus),
        residencies=tuple(residencies),
        capacity_bytes={**{slot: max(budget, used[slot]) for slot in fleet.slots}, **hosts},
        other_bytes=other,
        phase_bytes=dict.fromkeys(fleet.slots, budget // 4),
    )


def _placed(change: Change, placing: Placing) -> Change:
    """The change with its operations where `placing` says."""
    if placing == "measured":
        return change
    emus = tuple(replace(emu, frozen=emu.frozen and placing != "pause", idle=False) for emu in change.emus)
    return replace(change, emus=emus, early=(), outside=STANDBY if placing == "standby" else ())


def _standing(
    config: Config,
    before: Plan,
    changed: list[str],
    living: set[int],
    *,
    restart: bool,
) -> dict[int, int]:
    """Bytes on each slot of stages that stay as they are, and what is kept free for staging."""
    standing: dict[int, int] = defaultdict(lambda: STAGING_BYTES)
    for name, stage in before.stages():
        if name in changed or (stage.stage == "generate" and restart):
            continue
        if stage.stage == "generate":
            own = _engine_bytes(config, before, living)
        else:
            held = _slot_bytes(config.model, stage)
            own = {slot: size for slot, size in held.items() if slot in living}
        for slot, size in own.items():
            standing[slot] += size
    return standing


def _engine_bytes(config: Config, plan: Plan, living: set[int]) -> dict[int, int]:
    """What an engine takes on each living slot of generation: weights and cache."""
    stage = plan.actor_generate
    held = _slot_bytes(config.model, stage)
    cache = config.rollout.kv_cache_bytes
    return {slot: ENGINE_COPIES * size + cache for slot, size in held.items() if slot in living}


def _through_hosts(change: Change, fleet: Fleet) -> Change:
    """The same by way of the hosts' memory: a slot then needs room for the larger of old and new."""
    emus = tuple(emu if emu.idle else replace(emu, mode="snapshot", through_host=True) for emu in change.emus)
    hosts = dict.fromkeys(set(change.host_of.values()), 1 << 50)
    del fleet
    return replace(change, emus=emus, capacity_bytes={**change.capacity_bytes, **hosts})


def sync_seconds(config: Config, plan: Plan, fleet: Fleet, link_share: float, tensor_seconds: float) -> float:
    """A weight sync of one step: its busiest port, and what handing over each tensor takes."""
    spec = _specs(config.model)["actor"]
    weights, generate = replace(plan.actor_train, stage="infer"), plan.actor_generate
    rename = {emu_name(plan.actor_generate): emu_name(weights)}
    found: Routes = routes(
        streams(_table(config.model, weights), _table(config.model, generate), rename),
        np.arange(len(fleet.node_of), dtype=np.int64),
        fleet,
    )
    return found.loads.seconds / link_share + tensor_seconds * len(spec.tensors)
