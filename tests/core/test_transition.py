"""Transitions: what changes and moves, room for it, the order of a weight sync, and golden files of named scenes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import ModelConfig
from nereus.errors import TransferFailed
from nereus.layout import Plan, batch_shares, changed_plan, first_plan
from nereus.model import EMBEDDING, FINAL_NORM, LM_HEAD, llama, models_of
from nereus.slices import Movement, check
from nereus.storage import emu_name, holding
from nereus.transition import Transition, build, build_sync, check_transition, same_cut, sync_order
from nereus.validate import validate
from tests.core.scenes import BUCKET_BYTES, CONFIG, TRANSITIONS, with_plan
from tests.moving import assert_legal, missing_bytes
from tests.strategies import FEW_VOCABS, model_configs, stage_plans

SPECS = models_of(CONFIG.model)
PLAN = first_plan(CONFIG)


def scene(name: str) -> Transition:
    first, change = TRANSITIONS[name]
    config = with_plan(first)
    before = first_plan(config)
    return build(SPECS, before, changed_plan(before, change, config), BUCKET_BYTES)


def summary(moved: Movement) -> dict[str, object]:
    """A movement in numbers, and its name, which is a function of every slice."""
    by_pair: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for bucket in moved.buckets:
        for piece in bucket.slices:
            by_pair[f"{bucket.source}>{bucket.destination}"][f"{piece.held.emu} {piece.held.component}"] += (
                piece.size_bytes
            )
    return {
        "movement_id": moved.movement_id,
        "moved_bytes": moved.moved_bytes,
        "kept_bytes": sum(s.size_bytes for s in moved.kept),
        "by_pair": {pair: dict(sorted(parts.items())) for pair, parts in sorted(by_pair.items())},
        "rounds": [
            " ".join(f"{b.source}>{b.destination}:{b.size_bytes}" for b in moved.buckets if b.turn == turn)
            for turn in range(moved.turns)
        ],
    }


@pytest.mark.parametrize("name", TRANSITIONS)
def test_golden_transitions(name: str, golden: Callable[[str, object], None]) -> None:
    transition = scene(name)
    slots = sorted({*transition.present, *transition.target})
    found = {
        "before": str(transition.before),
        "after": str(transition.after),
        "changed": list(transition.changed),
        "restart_generation": transition.restart_generation,
        "extra_bytes": {str(slot): transition.extra_bytes(slot, BUCKET_BYTES) for slot in slots},
        "sent_bytes": {str(slot): transition.moved.sent_bytes(slot) for slot in slots},
        "received_bytes": {str(slot): transition.moved.received_bytes(slot) for slot in slots},
        **summary(transition.moved),
    }
    golden(f"transition_{name}", found)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_named_transitions_hold(name: str) -> None:
    first, _ = TRANSITIONS[name]
    validate(with_plan(first))
    transition = scene(name)
    check_transition(transition, BUCKET_BYTES)
    assert_legal(transition.moved, BUCKET_BYTES)
    assert transition.moved.moved_bytes == sum(
        transition.moved.received_bytes(slot) for slot in {*transition.present, *transition.target}
    )
    slots = {*transition.present, *transition.target}
    with pytest.raises(TransferFailed):
        check_transition(replace(transition, moved=Movement(kept=(), buckets=())), BUCKET_BYTES)
    for slot in slots:
        old = sum(s.size_bytes for s in transition.present.get(slot, ()))
        new = sum(s.size_bytes for s in transition.target.get(slot, ()))
        assert transition.extra_bytes(slot, BUCKET_BYTES) == old + new + BUCKET_BYTES
    assert transition.extra_bytes(17, BUCKET_BYTES) == BUCKET_BYTES


def test_only_named_stages_change() -> None:
    transition = scene("actor_and_critic_at_once")
    assert transition.changed == ("actor_train", "critic_train")
    assert transition.emus() == ("actor.train", "critic.train")
    assert transition.restart_generation
    emus = {s.emu for shards in transition.target.values() for s in shards}
    assert emus == {"actor.train", "critic.train"}
    assert not scene("pp2dp2_to_dp4").restart_generation


def changed(plan: Plan, name: str, **parts: object) -> Plan:
    return replace(plan, **{name: replace(getattr(plan, name), **parts)})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["actor_train", "critic_train", "reference_infer", "actor_generate"])
def test_shares_and_micro_batches_move_nothing(name: str) -> None:
    stage = getattr(PLAN, name)
    shares = (sum(stage.shares), *(0,) * (stage.layout.dp - 1))
    after = changed(PLAN, name, shares=shares, micro_batch=stage.micro_batch + 1)
    transition = build(SPECS, PLAN, after, BUCKET_BYTES)
    assert transition.changed == ()
    assert not transition.restart_generation
    assert transition.moved.moved_bytes == transition.moved.turns == 0
    assert transition.extra_bytes(0, BUCKET_BYTES) == 0
    assert same_cut(stage, getattr(after, name))
    assert batch_shares(getattr(after, name), sum(shares)) == shares
    check_transition(transition, BUCKET_BYTES)


def test_another_order_of_slots_moves_state() -> None:
    after = changed(PLAN, "actor_train", slots=(1, 0, 3, 2))
    transition = build(SPECS, PLAN, after, BUCKET_BYTES)
    assert transition.changed == ("actor_train",)
    check_transition(transition, BUCKET_BYTES)
    replicated = sum(t.size_bytes for t in SPECS["actor"].tensors if t.cut == "none")
    everything = sum(s.size_bytes for shards in transition.target.values() for s in shards)
    assert everything - 3 * 4 * replicated <= transition.moved.moved_bytes < everything  # norms are on every TP rank


def test_another_optimizer_on_one_replica_stays_in_place() -> None:
    """DP 1: the distributed optimizer owns all; another layout, nothing to send."""
    stage = PLAN.actor_train
    after = changed(PLAN, "actor_train", layout=replace(stage.layout, distributed_optimizer=False))
    transition = build(SPECS, PLAN, after, BUCKET_BYTES)
    assert transition.changed == ("actor_train",)
    assert transition.moved.moved_bytes == 0
    check_transition(transition, BUCKET_BYTES)


def test_there_and_back_is_nothing_new() -> None:
    one = scene("tp2pp2_to_pp2dp2")
    back = build(SPECS, one.after, one.before, BUCKET_BYTES)
    assert {s: set(h) for s, h in back.target.items()} == {s: set(h) for s, h in one.present.items()}
    assert {s: set(h) for s, h in back.present.items()} == {s: set(h) for s, h in one.target.items()}


def test_sync_order_is_the_order_of_the_forward_pass() -> None:
    spec = SPECS["actor"]
    order = sync_order(spec)
    assert set(order) == {t.name for t in spec.tensors}
    assert order[EMBEDDING] == 0
    assert {t.layer: order[t.name] for t in spec.tensors if t.layer is not None} == {n: n + 1 for n in range(4)}
    assert (order[FINAL_NORM], order[LM_HEAD]) == (5, 6)


@settings(max_examples=40, deadline=None)
@given(model_configs(FEW_VOCABS).flatmap(lambda c: st.tuples(st.just(c), stage_plans(c), stage_plans(c, "generate"))))
def test_weight_sync(case: tuple[ModelConfig, object, object]) -> None:
    """From any training layout to any generation layout: layer after layer, each wanted byte once, none in place."""
    config, train, generate = case
    spec = llama("m", config)
    plan = replace(PLAN, actor_train=train, actor_generate=generate)
    sync = build_sync(spec, plan, 3000)
    order = sync_order(spec)
    pieces = [[*layer.kept, *(s for b in layer.buckets for s in b.slices)] for layer in sync.layers]
    assert [{order[s.wanted.tensor] for s in layer} for layer in pieces] == [{n} for n in range(config.layers + 3)]
    turns = [bucket.turn for layer in sync.layers for bucket in sorted(layer.buckets, key=lambda b: b.turn)]
    assert turns == sorted(turns)  # a layer is complete before the next begins
    assert_legal(sync.whole, 3000)
    weights = {s: tuple(x for x in held if x.component == "weight") for s, held in holding(spec, train).items()}
    renamed = {s: tuple(replace(x, emu="m.train") for x in held) for s, held in sync.target.items()}
    assert sync.whole.moved_bytes == missing_bytes(weights, renamed)
    check(weights, sync.target, sync.whole, 3000, rename={emu_name(plan.actor_generate): emu_name(plan.actor_train)})


def test_golden_sync(golden: Callable[[str, object], None]) -> None:
    sync = build_sync(SPECS["actor"], PLAN, BUCKET_BYTES)
    golden("sync_tp2pp2_to_2xtp2", {"plan": str(PLAN), "layers": [summary(layer) for layer in sync.layers]})
