"""Named changes of plan, small enough to read: 1 byte stands for a piece of a model."""

from __future__ import annotations

from collections.abc import Callable

from nereus.fleet import CPU_SLOT, Fleet, Node, uniform
from nereus.transitions.change import Mode
from nereus.transitions.order import host_lane
from tests.core.changes import Scene, idle, joined, scene, split, two_nodes

HOST = host_lane(0)
FOUR = uniform(4)


def on_slots(size: int, slots: int = 4, host: int = 200) -> dict[int, int]:
    """Capacities of slots and of two hosts."""
    return {**dict.fromkeys(range(slots), size), HOST: host, host_lane(1): host}


def tp_change() -> Scene:
    """TP2 x DP2 to TP4: half of each half leaves, nothing arrives."""
    before = joined(split(0, 64, [0, 1]), split(0, 64, [2, 3]))
    return scene({"actor.train": (before, split(0, 64, [0, 1, 2, 3]))}, FOUR, on_slots(64))


def pp_change() -> Scene:
    """TP2 x PP2 to PP4, in place with a snapshot: every slot keeps half a stage and takes the other half."""
    before = joined(split(0, 32, [0, 1]), split(32, 32, [2, 3]))
    after = joined(split(0, 16, [0]), split(16, 16, [1]), split(32, 16, [2]), split(48, 16, [3]))
    moved = joined({0: after[1], 1: after[0], 2: after[3], 3: after[2]})
    return scene({"actor.train": (before, moved)}, FOUR, on_slots(20), modes={"actor.train": "snapshot"})


def dp_grow() -> Scene:
    """One replica to four on two nodes, as a chain: each byte enters the second node once and is passed on there."""
    whole = frozenset(range(24))
    before = {0: whole}
    return scene({"actor.train": (before, dict.fromkeys(range(4), whole))}, two_nodes(4), on_slots(64), chain=True)


def dp_shrink_with_a_lost_slot() -> Scene:
    """DP4 with a distributed optimizer loses slot 2; its optimizer shard comes from the host's snapshot."""
    fleet = Fleet(nodes=(Node(slots=(0, 1), device=CPU_SLOT), Node(slots=(3,), device=CPU_SLOT)))
    weights = frozenset(range(24))
    shards = split(24, 48, [0, 1, 2, 3])
    before = {slot: weights | shards[slot] for slot in (0, 1, 3)} | {host_lane(1): shards[2]}
    after = joined(dict.fromkeys((0, 1, 3), weights), split(24, 48, [0, 1, 3]))
    room = {slot: size for slot, size in on_slots(90).items() if slot != 2}
    return scene({"actor.train": (before, after)}, fleet, room)


def swap_of_two_models_between_full_slots() -> Scene:
    """Two models change places on full slots: pieces wait in the host and a hole goes round."""
    emus = {
        "actor.train": (split(0, 24, [0, 1]), split(0, 24, [2, 3])),
        "critic.train": (split(0, 24, [2, 3]), split(0, 24, [0, 1])),
    }
    return scene(emus, FOUR, on_slots(12, host=8), modes=dict.fromkeys(emus, "checkpoint"), chunk_bytes=4)


def colocated_to_disaggregated() -> Scene:
    """Training and generation on all four slots; then training on 0 and 1, generation on 2 and 3 with more KV cache."""
    train, weights = (0, 32), (0, 16)
    emus = {
        "actor.train": (split(*train, [0, 1, 2, 3]), split(*train, [0, 1])),
        "actor.generate": (split(*weights, [0, 1, 2, 3]), split(*weights, [2, 3])),
    }
    blank = {("actor.generate", slot): (12, 24 if slot > 1 else 0) for slot in range(4)}
    blank |= {("actor.train", slot): (4, 8 if slot < 2 else 0) for slot in range(4)}
    return scene(emus, FOUR, on_slots(40), blank=blank, phase_bytes=dict.fromkeys(range(4), 6))


def critic_and_actor_at_once_with_offload() -> Scene:
    """Actor PP2 to TP2, critic the other way, and the reference goes to host memory, all on two full slots."""
    quarter = split(0, 40, [0, 1, 2, 3])
    stages = {0: quarter[0] | quarter[1], 1: quarter[2] | quarter[3]}
    halves = {0: quarter[0] | quarter[2], 1: quarter[1] | quarter[3]}
    emus = {
        "actor.train": (stages, halves),
        "critic.train": (halves, stages),
        "reference.infer": (split(0, 16, [0, 1]), {HOST: frozenset(range(16))}),
    }
    modes: dict[str, Mode] = {"actor.train": "snapshot", "critic.train": "checkpoint", "reference.infer": "beside"}
    room = {0: 50, 1: 50, HOST: 120}
    return scene(emus, uniform(2), room, modes=modes, copied={("critic.train", 0): 4})


def moe_ep_change() -> Scene:
    """EP2 x DP2 to EP4: attention on every slot stays, each slot drops half of its experts."""
    shared = dict.fromkeys(range(4), frozenset(range(8)))
    experts = joined(split(8, 32, [0, 1]), split(8, 32, [2, 3]))
    swapped = {slot: split(8, 32, [0, 1, 2, 3])[(slot + 1) % 4] for slot in range(4)}
    emus = {"actor.train": (joined(shared, experts), joined(shared, swapped))}
    return scene(emus, two_nodes(4), on_slots(30, host=300), modes={"actor.train": "snapshot"})


def reference_back_from_host() -> Scene:
    """The offloaded reference returns to its slots, in pieces over PCIe."""
    emus = {"reference.infer": ({HOST: frozenset(range(32))}, split(0, 32, [0, 1]))}
    return scene(emus, uniform(2), {0: 20, 1: 20, HOST: 40})


def shell_beside_with_room() -> Scene:
    """TP2 to PP2 on two slots with room: the new engine is built beside the step, then filled; the old one stays whole."""
    quarter = split(0, 40, [0, 1, 2, 3])
    halves = {0: quarter[0] | quarter[2], 1: quarter[1] | quarter[3]}
    stages = {0: quarter[0] | quarter[1], 1: quarter[2] | quarter[3]}
    blank = {("actor.train", slot): (6, 6) for slot in range(2)}
    room, phases = on_slots(60, slots=2), {0: 8, 1: 8}
    return scene(
        {"actor.train": (halves, stages)}, uniform(2), room, shells=["actor.train"], blank=blank, phase_bytes=phases
    )


def engines_last_before_a_slot_leaves() -> Scene:
    """DP4 to DP3 and engines on the three slots that stay: all state arrives and is committed before they are built."""
    whole = frozenset(range(12))
    parts = split(12, 24, [0, 1, 2, 3])
    emus = {
        "actor.train": (
            {slot: whole | parts[slot] for slot in range(4)},
            joined(dict.fromkeys(range(3), whole), split(12, 24, [0, 1, 2])),
        ),
        "actor.generate": (dict.fromkeys(range(4), frozenset[int]()),) * 2,
    }
    blank = {("actor.generate", slot): (10, 10 if slot < 3 else 0) for slot in range(4)}
    made = scene(emus, FOUR, on_slots(48), blank=blank, shells=["actor.train"], urgent=True)
    return idle(made, "actor.generate")


def swap_through_the_host_on_full_slots() -> Scene:
    """Two models change places on full slots, each by way of the host: no slot waits for another's room."""
    emus = {
        "actor.train": (split(0, 24, [0, 1]), joined(split(0, 12, [2, 3]), split(12, 12, [1]))),
        "critic.train": (split(0, 24, [2, 3]), joined(split(0, 12, [0]), split(12, 12, [2, 3]))),
    }
    modes: dict[str, Mode] = dict.fromkeys(emus, "snapshot")
    return scene(emus, FOUR, on_slots(12, host=48), modes=modes, shells=emus, through=emus)


NAMED: dict[str, Callable[[], Scene]] = {
    make.__name__: make
    for make in (
        tp_change,
        pp_change,
        dp_grow,
        dp_shrink_with_a_lost_slot,
        swap_of_two_models_between_full_slots,
        colocated_to_disaggregated,
        critic_and_actor_at_once_with_offload,
        moe_ep_change,
        reference_back_from_host,
        shell_beside_with_room,
        engines_last_before_a_slot_leaves,
        swap_through_the_host_on_full_slots,
    )
}
