"""OpenRLHF 0.11.2: DeepSpeed trains, vLLM engines generate, on slots of their own or on shared ones with sleep.

What is taken from where stands in sources.json. Apart, actor (with the reference) and critic (with the reward) work at
the same time; colocated, one after the other, with DeepSpeed's states in host memory meanwhile. New weights go tensor by
tensor: gathered, then broadcast or handed over, each with a call to every engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nereus.fleet import Fleet
from nereus.sim.rivals.memory import misfit
from nereus.sim.rivals.setups import Cut, Engines, Packing, RlJob, Setup, Sharding

ENGINE_TP = (1, 2, 4, 8)
EXAMPLE_TP, SHARED_SHARE, OWN_SHARE = 2, 0.5, 0.95
EXAMPLE_TOKENS = 16_192
EXAMPLE_MICRO, EXAMPLE_FORWARD = 8, 32
MEMORY_SHARES = (0.85, 0.8, 0.7, 0.6, 0.5)
PARTS = ((1, 1, 2), (1, 1, 1), (1, 1, 6), (2, 1, 1), (2, 2, 4), (3, 3, 2))
"""Eighths (or shares) of the slots for actor, critic and engines; the first is the example's."""
TOKEN_FACTORS = (1, 2, 3)
SEQUENCES = 256


def refusal(job: RlJob, setup: Setup) -> str | None:
    """Why OpenRLHF does not start: train.batch_size must be shared out evenly, engines must take the actor's slots exactly."""
    for cut in (setup.actor, setup.critic):
        if cut is not None and (job.samples // job.mini_batches) % cut.dp:
            return f"a batch of {job.samples // job.mini_batches} samples over {cut.dp} slots"
    if setup.engines.replicas * setup.engines.tp != len(setup.engines.slots):
        return f"{len(setup.engines.slots)} slots in engines of TP{setup.engines.tp}"
    return None


def cut_of(slots: Sequence[int], packing: Packing, *, sharding: Sharding = "full", recompute: bool = True) -> Cut:
    """A model under DeepSpeed: ZeRO-3 or ZeRO-2, bf16 on the wire."""
    return Cut(
        slots=tuple(slots),
        dp=len(slots),
        sharding=sharding,
        packing=packing,
        recompute=recompute,
        gradient_bytes=2.0,
    )


def colocated(
    name: str, job: RlJob, fleet: Fleet, packing: Packing, *, tp: int, share: float, eager: bool, recompute: bool = True
) -> Setup:
    """train.colocate_all with both sleeps: all models and engines on all slots."""
    slots = fleet.slots
    actor = replace(cut_of(slots, packing, recompute=recompute), offload="optimizer")
    return Setup(
        system="openrlhf",
        name=name,
        actor=actor,
        critic=actor if job.critic else None,
        reference=replace(actor, offload="nothing", recompute=False) if job.reference else None,
        engines=_engines(slots, tp, share, eager=eager, sleeps=True),
        sync="broadcast",
    )


def apart(
    name: str,
    job: RlJob,
    fleet: Fleet,
    packing: Packing,
    *,
    parts: tuple[int, int, int],
    tp: int,
    sharding: Sharding = "full",
    recompute: bool = True,
    host_adam: bool = False,
) -> Setup | None:
    """colocate_actor_ref and colocate_critic_reward: three groups of slots. None where the parts do not come out even."""
    slots = fleet.slots
    total = sum(parts) if job.critic else parts[0] + parts[2]
    sizes = [len(slots) * part // total for part in parts]
    if not job.critic:
        sizes[1] = 0
    if any(len(slots) * part % total for part in parts) or sizes[2] % tp:
        return None
    first, second = sizes[0], sizes[0] + sizes[1]
    actor = replace(cut_of(slots[:first], packing, sharding=sharding, recompute=recompute), host_adam=host_adam)
    return Setup(
        system="openrlhf",
        name=name,
        actor=actor,
        critic=replace(actor, slots=slots[first:second], dp=sizes[1]) if job.critic else None,
        reference=replace(actor, recompute=False, host_adam=False) if job.reference else None,
        engines=_engines(slots[second:], tp, OWN_SHARE, eager=False, sleeps=False),
        sync="broadcast",
    )


def _engines(slots: Sequence[int], tp: int, share: float, *, eager: bool, sleeps: bool) -> Engines:
    return Engines(
        slots=tuple(slots),
        tp=tp,
        replicas=len(slots) // tp,
        memory_share=share,
        eager=eager,
        sleeps=sleeps,
        most_sequences=SEQUENCES,
    )


def default_colocated(job: RlJob, fleet: Fleet) -> Setup | None:
    """The quick start's hybrid engine, with dynamic batches as in its script; None where it does not fit."""
    packing = Packing(
        tokens=max(EXAMPLE_TOKENS, job.longest_tokens), forward_tokens=max(EXAMPLE_TOKENS, job.longest_tokens)
    )
    made = colocated("default", job, fleet, packing, tp=EXAMPLE_TP, share=SHARED_SHARE, eager=True)
    return made if _runs(job, made, fleet) else None


def default_apart(job: RlJob, fleet: Fleet) -> Setup | None:
    """The script with groups of their own (1 : 1 : 2), the optimizer on the host; micro-batches halved until they fit."""
    micro, forward = EXAMPLE_MICRO, EXAMPLE_FORWARD
    while micro:
        packing = Packing(samples=micro, forward_samples=forward)
        made = apart(
            "default, apart", job, fleet, packing, parts=PARTS[0], tp=EXAMPLE_TP, host_adam=True
        )  # fmt: skip
        if made is not None and _runs(job, made, fleet):
            return made
        micro, forward = micro // 2, max(forward // 2, 1)
    return None


def grid(job: RlJob, fleet: Fleet) -> Iterator[Setup]:
    """Colocated and apart, engines with graphs, their TP and memory, the division of the slots, ZeRO stage, recomputation."""
    for factor in TOKEN_FACTORS:
        tokens = factor * job.longest_tokens
        packing = Packing(tokens=tokens, forward_tokens=2 * tokens)
        for tp in ENGINE_TP:
            for recompute in (True, False):
                yield from _grid_point(job, fleet, packing, tp, recompute=recompute)


def _grid_point(job: RlJob, fleet: Fleet, packing: Packing, tp: int, *, recompute: bool) -> Iterator[Setup]:
    if len(fleet.slots) % tp == 0:
        for share in MEMORY_SHARES:
            made = colocated("tuned", job, fleet, packing, tp=tp, share=share, eager=False, recompute=recompute)
            if _runs(job, made, fleet):
                yield made
                break
    for parts in PARTS:
        for sharding in ("full", "gradients"):
            found = apart(
                "tuned", job, fleet, packing, parts=parts, tp=tp,
                sharding=sharding, recompute=recompute,
            )  # fmt: skip
            if found is not None and _runs(job, found, fleet):
                yield found


def _runs(job: RlJob, setup: Setup, fleet: Fleet) -> bool:
    return refusal(job, setup) is None and misfit(job, setup, fleet) is None
