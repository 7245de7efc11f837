"""verl 0.9.1, hybrid engine: every model and the engines on all slots, one after the other; FSDP or Megatron trains.

What is taken from where stands in sources.json. verl refuses a batch that its replicas do not divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nereus.fleet import Fleet
from nereus.sim.rivals.memory import misfit
from nereus.sim.rivals.setups import Cut, Engines, Packing, RlJob, Setup

TENSOR_PARALLEL = (1, 2, 4, 8)
PIPELINES = (1, 2, 4, 8)
MEMORY_SHARES = (0.85, 0.8, 0.7, 0.6, 0.5, 0.4)
DEFAULT_SHARE, DEFAULT_TP, DEFAULT_SEQUENCES = 0.5, 2, 256
DEFAULT_MICRO, DEFAULT_FORWARD = 16, 32
TOKEN_FACTORS = (1, 2, 3)
OFFLOADS = ("nothing", "optimizer", "all")
TUNED_SEQUENCES = 1024


def refusal(job: RlJob, setup: Setup, slots: int) -> str | None:
    """Why verl does not start: its replicas must divide the batch, and the mini-batch."""
    cut = setup.actor
    if cut.dp * cut.tp * cut.pp * cut.cp != slots:
        return f"{slots} slots are not TP{cut.tp} x PP{cut.pp} x DP"
    if job.samples % slots and cut.sharding == "full":
        return f"a batch of {job.samples} samples on {slots} slots: real_train_batch_size must be divisible"
    if (job.samples // job.mini_batches) % cut.dp:
        return f"a mini-batch of {job.samples // job.mini_batches} samples over {cut.dp} replicas"
    if slots % setup.engines.tp:
        return f"{slots} slots in engines of TP{setup.engines.tp}"
    return None


def fsdp(
    job: RlJob, slots: Sequence[int], packing: Packing, *, recompute: bool = True, offload: str = "nothing"
) -> tuple[Cut, Cut | None, Cut | None]:
    """Actor, critic and reference under FSDP. The reference's shards wait in host memory always."""
    cut = Cut(
        slots=tuple(slots),
        dp=len(slots),
        sharding="full",
        packing=packing,
        recompute=recompute,
        offload=offload,  # type: ignore[arg-type]
    )
    return _three(job, cut, replace(cut, on_host=True, offload="nothing", recompute=False))


def megatron(
    job: RlJob,
    slots: Sequence[int],
    tp: int,
    pp: int,
    packing: Packing,
    *,
    recompute: bool = True,
    offload: str = "nothing",
    ep: int = 1,
) -> tuple[Cut, Cut | None, Cut | None]:
    """Actor, critic and reference under Megatron: one set of process groups, so one layout."""
    cut = Cut(
        slots=tuple(slots),
        tp=tp,
        pp=pp,
        dp=len(slots) // (tp * pp),
        ep=ep,
        packing=packing,
        recompute=recompute,
        offload=offload,  # type: ignore[arg-type]
    )
    kept = "all" if offload == "all" else "nothing"
    return _three(job, cut, replace(cut, recompute=False, offload=kept))


def _three(job: RlJob, cut: Cut, reference: Cut) -> tuple[Cut, Cut | None, Cut | None]:
    return cut, cut if job.critic else None, reference if job.reference else None


def setup_of(name: str, cuts: tuple[Cut, Cut | None, Cut | None], engines: Engines) -> Setup:
    """A Setup of verl."""
    actor, critic, reference = cuts
    return Setup(
        system="verl", name=name, actor=actor, critic=critic, reference=reference, engines=engines, sync="whole"
    )


def engines_of(slots: Sequence[int], tp: int, share: float, sequences: int) -> Engines:
    """vLLM on all slots, asleep while others work."""
    return Engines(
        slots=tuple(slots), tp=tp, replicas=len(slots) // tp, memory_share=share, sleeps=True, most_sequences=sequences
    )


def default(job: RlJob, fleet: Fleet) -> Setup | None:
    """The example for 7B models with the configuration's defaults; micro-batches halved until they fit; None if none does."""
    slots = fleet.slots
    micro, forward = DEFAULT_MICRO, DEFAULT_FORWARD
    while micro:
        packing = Packing(samples=micro, forward_samples=forward, balanced=True)
        made = setup_of(
            "default", fsdp(job, slots, packing), engines_of(slots, DEFAULT_TP, DEFAULT_SHARE, DEFAULT_SEQUENCES)
        )
        if refusal(job, made, len(slots)) is None and misfit(job, made, fleet) is None:
            return made
        micro, forward = micro // 2, max(forward // 2, 1)
    return None


def grid(job: RlJob, fleet: Fleet) -> Iterator[Setup]:
    """What a user would try, as the performance guide says: dynamic batches, engines' TP and memory, both back ends, offload.

    Of an engine's memory shares the largest that fits is taken.
    """
    slots = fleet.slots
    for cuts in _trained(job, slots):
        for tp in TENSOR_PARALLEL:
            if len(slots) % tp:
                continue
            for share in MEMORY_SHARES:
                made = setup_of("tuned", cuts, engines_of(slots, tp, share, TUNED_SEQUENCES))
                if refusal(job, made, len(slots)) is not None:
                    break
                reason = misfit(job, made, fleet)
                if reason is None:
                    yield made
                if reason is None or not reason.startswith("generation"):
                    break  # with less memory for engines nothing else fits either


def _trained(job: RlJob, slots: Sequence[int]) -> Iterator[tuple[Cut, Cut | None, Cut | None]]:
    for factor in TOKEN_FACTORS:
        tokens = factor * job.longest_tokens
        packing = Packing(tokens=tokens, forward_tokens=2 * tokens, balanced=True)
        for recompute in (True, False):
            for offload in OFFLOADS:
                yield fsdp(job, slots, packing, recompute=recompute, offload=offload)
                for tp in TENSOR_PARALLEL:
                    for pp in PIPELINES:
                        if len(slots) % (tp * pp) or job.actor.layers % pp or tp > job.actor.kv_heads:
                            continue
                        yield megatron(job, slots, tp, pp, packing, recompute=recompute, offload=offload)
