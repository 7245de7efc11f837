"""A change of plan as data: which model-stages are cut anew, what moves, and the proof that it may run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nereus.config import Config, PlanChange, StageConfig
from nereus.fleet import uniform
from nereus.layout import Plan, StagePlan, changed_plan
from nereus.model import EMBEDDING, FINAL_NORM, ModelSpec, models_of
from nereus.slices import Holding, Movement, Slice, check, cut, join, layered, movement
from nereus.storage import Shard, emu_name, holding
from nereus.transfer.placement import StageMove, place


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """From one plan to another: stages with state to cut anew, whether generation restarts, and the movement.

    `present` and `target` are the holdings of the changed stages' state only.
    """

    before: Plan
    after: Plan
    changed: tuple[str, ...]
    restart_generation: bool
    present: Mapping[int, tuple[Shard, ...]]
    target: Mapping[int, tuple[Shard, ...]]
    slices: tuple[Slice, ...]
    moved: Movement

    def extra_bytes(self, slot: int, bucket_bytes: int) -> int:
        """What a slot needs beside all that is live: the old state detached, the new one, and staging."""
        old, new = self.present.get(slot, ()), self.target.get(slot, ())
        return sum(s.size_bytes for s in (*old, *new)) + (bucket_bytes if self.moved.buckets else 0)

    def emus(self) -> tuple[str, ...]:
        """Names of the EMUs that change."""
        return tuple(emu_name(getattr(self.after, name)) for name in self.changed)


def _merged(holdings: list[Holding]) -> dict[int, tuple[Shard, ...]]:
    slots = sorted({slot for held in holdings for slot in held})
    return {slot: tuple(s for held in holdings for s in held.get(slot, ())) for slot in slots}


def same_cut(one: StagePlan, other: StagePlan) -> bool:
    """Whether two StagePlans keep state in the same places (shares and micro-batches do not matter)."""
    return one.layout == other.layout and one.slots == other.slots


def build(specs: Mapping[str, ModelSpec], before: Plan, after: Plan, bucket_bytes: int) -> Transition:
    """The transition between two plans: fewest bytes by preferring what is in place, senders balanced."""
    changed = tuple(
        name
        for name, stage in after.stages()
        if stage.stage != "generate" and not same_cut(getattr(before, name), stage)
    )
    present = _merged([holding(specs[getattr(before, n).model], getattr(before, n)) for n in changed])
    target = _merged([holding(specs[getattr(after, n).model], getattr(after, n)) for n in changed])
    slices = cut(present, target)
    return Transition(
        before=before,
        after=after,
        changed=changed,
        restart_generation=not same_cut(before.actor_generate, after.actor_generate),
        present=present,
        target=target,
        slices=slices,
        moved=movement(slices, bucket_bytes),
    )


def placed_change(config: Config, plan: Plan, change: PlanChange) -> Plan:
    """The plan after a scripted change, each stage that is cut anew placed on its slots so that least is paid.

    A stage whose `slots` are given keeps their order, and so does generation (an engine keeps shared memory for each
    order of its slots that it has seen); the others take them in the order that `nereus.transfer.placement` finds, as
    if all slots were in one node: the configuration does not say which share one.
    """
    after = changed_plan(plan, change, config)
    specs = models_of(config.model)
    moves: dict[str, StageMove] = {}
    standing: dict[str, tuple[ModelSpec, StagePlan]] = {}
    for name, stage in after.stages():
        before: StagePlan = getattr(plan, name)
        wanted: StageConfig | None = getattr(change, name)
        if wanted is None or same_cut(before, stage) or stage.stage == "generate":
            standing[name] = (specs[stage.model], stage)
            continue
        pinned = wanted.slots is not None
        moves[name] = StageMove(spec=specs[stage.model], before=before, after=stage, pinned=pinned)
    if all(move.pinned for move in moves.values()):
        return after
    slots = config.fleet.slots
    found = place(
        moves, uniform(slots, slots_per_node=slots), syncs=(("actor_train", "actor_generate"),), standing=standing
    )
    return replace(after, **{name: replace(moves[name].after, slots=taken) for name, taken in found.slots.items()})


def check_transition(transition: Transition, bucket_bytes: int, moved: Movement | None = None) -> None:
    """Proves a transition's movement (or another one for it) before it runs: TransferFailed with the first violation."""
    check(transition.present, transition.target, moved or transition.moved, bucket_bytes)


def sync_order(spec: ModelSpec) -> dict[str, int]:
    """The order in which a weight sync visits tensors: embedding, decoder layers, final norm, head."""
    last = spec.config.layers + 1
    order = {t.name: t.layer + 1 if t.layer is not None else last + 1 for t in spec.tensors}
    return order | {EMBEDDING: 0, FINAL_NORM: last}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSync:
    """Movement of the actor's weights from training to generation, one Movement per layer."""

    layers: tuple[Movement, ...]
    target: Mapping[int, tuple[Shard, ...]]

    @property
    def whole(self) -> Movement:
        """All layers as one movement."""
        return join(self.layers)


def build_sync(spec: ModelSpec, plan: Plan, bucket_bytes: int) -> WeightSync:
    """The weight sync of a plan, checked."""
    present = {
        slot: tuple(s for s in shards if s.component == "weight")
        for slot, shards in holding(spec, plan.actor_train).items()
    }
    target = holding(spec, plan.actor_generate)
    names = {emu_name(plan.actor_generate): emu_name(plan.actor_train)}
    layers = layered(cut(present, target, rename=names), sync_order(spec), bucket_bytes)
    sync = WeightSync(layers=layers, target=target)
    check(present, target, sync.whole, bucket_bytes, rename=names)
    return sync
