"""Peak memory of a plan on each slot, by component, from shapes alone; and the refusal of plans that do not fit.

Formulas: weights, gradients and Adam state as Megatron keeps them (facts: costs, item 6, with this engine's types);
activations by the tensors that a layer keeps for its backward pass in the local spec (no fusion, no recompute).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from nereus.config import Config, ModelConfig
from nereus.errors import ConfigError, InfeasiblePlan
from nereus.layout import Layout, Plan, StagePlan, batch_shares, first_plan, micro_batch_rows
from nereus.lengths import largest_limit, largest_row_tokens, request_tokens, response_limit, row_tokens
from nereus.model import DTYPE_BYTES, ModelSpec, is_sparse, models_of
from nereus.storage import holding, megatron_params, owned_ranges, vocab_rows
from nereus.transition import placed_change

OVERHEAD_BYTES = 16 << 20
"""Communicators and what processes keep of engines on the CPU: above what shapes say ledgers show 1 to 5 MB, and up to 16 MB
where all engines were built anew in a running job."""
LOGIT_COPIES = 6
CACHE_BLOCK_TOKENS = 32
"""Tokens of a block of an engine's cache: the least that vLLM's CPU attention works well with (platforms/cpu.py)."""
BATCH_TOKENS = 2048
"""Tokens of one forward pass of an engine at most (vLLM's max_num_batched_tokens), unless a request may be longer."""
REQUEST_TOKEN_BYTES = 5
"""Of each token that a request may have: its id and a flag in an engine's tables (vLLM's gpu_input_batch.py)."""
RNG_BYTES = 5056
"""A torch generator's state on the CPU (torch.get_rng_state); on CUDA it is 16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPeak:
    """The predicted peak of a slot: bytes by component, and the phase in which it is reached."""

    slot: int
    phase: str
    components: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return sum(self.components.values())

    @property
    def largest_parts(self) -> str:
        """The largest components with their bytes, for people."""
        largest = sorted(self.components.items(), key=lambda item: -item[1])[:4]
        return ", ".join(f"{name} {size:,}" for name, size in largest)


def state_bytes(spec: ModelSpec, stage: StagePlan, rank: int) -> dict[str, int]:
    """Bytes that a Megatron stage keeps on a rank between phases, by component.

    weights; where it trains also grads (float32, of all local weights), masters (of weights that are not float32) and
    moments (two, float32), each of the elements whose optimizer state the rank owns; rng.
    """
    return dict(_state_bytes(spec, stage.layout, rank, trains=stage.stage == "train"))


@lru_cache(maxsize=4096)
def _state_bytes(spec: ModelSpec, layout: Layout, rank: int, *, trains: bool) -> Mapping[str, int]:
    at = layout.coordinates(rank)
    params = megatron_params(spec, layout, at)
    weights = sum(p.elements * DTYPE_BYTES[p.dtype] for p in params)
    if not trains:
        return {"weights": weights, "rng": RNG_BYTES}
    owned = {name: stop - start for name, (start, stop) in owned_ranges(params, layout, at).items()}
    return {
        "weights": weights,
        "grads": sum(p.elements for p in params) * 4,
        "masters": sum(owned.get(p.name, 0) for p in params if p.dtype != "float32") * 4,
        "moments": sum(owned.values()) * 8,
        "rng": RNG_BYTES,
    }


def resident(spec: ModelSpec, stage: StagePlan, rank: int) -> dict[str, int]:
    """Bytes that a Megatron stage keeps on a rank between phases as a slot's ledger has them: weights, grads, optimizer."""
    held = state_bytes(spec, stage, rank)
    if stage.stage != "train":
        return {"weights": held["weights"]}
    optimizer = held["masters"] + held["moments"]
    return {"weights": held["weights"], "grads": held["grads"], "optimizer": optimizer}


def kv_bytes_per_token(config: ModelConfig, tp: int) -> int:
    """Bytes of KV cache for a token on one rank of an engine: keys and values of its KV heads in every layer.

    Above `kv_heads` ranks share heads, so the bytes fall no further.
    """
    heads = max(config.kv_heads // tp, 1)
    return 2 * config.layers * heads * config.head_dim * DTYPE_BYTES[config.dtype]


def request_cache_bytes(config: Config, tp: int) -> int:
    """The least cache of a rank of an engine: whole blocks for the longest request of the run, and one that vLLM keeps."""
    blocks = -(-request_tokens(config.data) // CACHE_BLOCK_TOKENS) + 1
    return blocks * CACHE_BLOCK_TOKENS * kv_bytes_per_token(config.model, tp)


def activation_bytes(spec: ModelSpec, stage: StagePlan, rank: int, width_tokens: int, samples: int) -> int:
    """Bytes kept for backward of a mini-batch of so many samples on a rank at its peak: micro-batches in flight x layers x tokens x what a layer keeps.

    No more are in flight than a replica has.
    Per token and layer what autograd saves of the local spec, over TP where cut: norms and residuals 7 h; q, k and v (both
    as wide as q by then) and the attention's output 4 q; probabilities heads S; MLP 5 f (gate and up, the activation, the
    product). The last rank adds the logits, saved once, and their copies. A layer with experts has 5 f and 2 h (sent
    and received) for each of a token's experts, as if all experts took equal shares.
    """
    c, layout = spec.config, stage.layout
    at = layout.coordinates(rank)
    attention = 7 * c.hidden + 4 * c.heads * c.head_dim // layout.tp + c.heads * width_tokens // layout.tp
    dense = attention + 5 * c.ffn // layout.tp
    sparse = attention + c.experts_per_token * (5 * c.expert_ffn // layout.expert_tp + 2 * c.hidden)
    elements = sum(sparse if is_sparse(c, layer) else dense for layer in layout.layers(at.pp))
    share = replica_samples(stage, rank, samples)
    in_flight = min(layout.pp - at.pp, max(1, -(-share // stage.micro_batch)))
    tokens = micro_batch_rows(share, stage.micro_batch) * -(-width_tokens // layout.cp)
    kept = in_flight * elements * tokens * max(DTYPE_BYTES[c.dtype], 2)
    logits = logit_bytes(spec, stage, rank, width_tokens, samples)
    return kept + logits + logits // LOGIT_COPIES


def replica_samples(stage: StagePlan, rank: int, samples: int) -> int:
    """How many of `samples` the rank's replica runs; where replicas share out experts, as many as the one with most."""
    shares = batch_shares(stage, samples)
    return max(shares) if stage.layout.ep > 1 else shares[stage.layout.coordinates(rank).dp]


def logit_bytes(spec: ModelSpec, stage: StagePlan, rank: int, width_tokens: int, samples: int) -> int:
    """Bytes of a micro-batch's logits and their copies on the last pipeline rank: tokens x local vocabulary x 4.

    The micro-batch is one of the rank's replica, of a pass over so many samples.
    """
    layout, at = stage.layout, stage.layout.coordinates(rank)
    if at.pp != layout.pp - 1 or spec.head != "language":
        return 0
    rows = vocab_rows(spec.config.vocab, layout.tp, at.tp)[2]
    micro_batch = micro_batch_rows(replica_samples(stage, rank, samples), stage.micro_batch)
    return LOGIT_COPIES * micro_batch * width_tokens * rows * 4


def plan_peaks(config: Config, plan: Plan, width_tokens: int | None = None) -> tuple[SlotPeak, ...]:
    """The predicted peak of every slot under `plan`, over the phases of a step (not of a change of plan).

    Rows are `width_tokens` wide, or without that as wide as any of the run may be.
    """
    specs = models_of(config.model)
    width = width_tokens or largest_row_tokens(config.data)
    peaks: list[SlotPeak] = []
    for slot in range(config.fleet.slots):
        base: dict[str, int] = {"overhead": OVERHEAD_BYTES}
        phases: dict[str, dict[str, int]] = {"update_weights": {"staging": staging_bytes(config, plan, slot)}}
        for name, stage in plan.stages():
            rank = stage.rank_of(slot)
            if rank is None:
                continue
            held, added = stage_bytes(config, specs[stage.model], stage, rank, width)
            always = phases.setdefault(f"forward_{stage.model}", {}) if stage.keep == "nothing" else base
            always |= {f"{name}.{part}": size for part, size in held.items()}
            for phase, parts in added.items():
                phases.setdefault(phase, {}).update(parts)
        worst = max(phases, key=lambda phase: sum(phases[phase].values()))
        peaks.append(SlotPeak(slot=slot, phase=worst, components=base | phases[worst]))
    return tuple(peaks)


def staging_bytes(config: Config, plan: Plan, slot: int) -> int:
    """What a slot stages of a weight sync: a bucket, and no more than it sends and receives."""
    own = sum(stage_weight_bytes(config.model, stage).get(slot, 0) for stage in (plan.actor_train, plan.actor_generate))
    return min(config.transfer.bucket_bytes, own)


@lru_cache(maxsize=512)
def stage_weight_bytes(model: ModelConfig, stage: StagePlan) -> Mapping[int, int]:
    """Slot -> bytes of weights that it holds of the stage, padding left out."""
    held = holding(models_of(model)[stage.model], stage)
    return {slot: sum(s.size_bytes for s in shards if s.component == "weight") for slot, shards in held.items()}


def stage_bytes(
    config: Config, spec: ModelSpec, stage: StagePlan, rank: int, width_tokens: int
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """What a stage keeps on the slot of a rank, by component; and phase -> what that adds with rows so wide."""
    if stage.stage == "generate":
        weights = stage_weight_bytes(config.model, stage)[stage.slots[rank]]
        return engine_bytes(config, weights, stage.layout.tp, max(stage.shares)), {}
    samples = config.data.prompts_per_step * config.data.samples_per_prompt
    phases = {f"forward_{stage.model}": {"logits": logit_bytes(spec, stage, rank, width_tokens, samples)}}
    if stage.stage == "train":
        part = samples // config.algorithm.mini_batches
        phases[f"update_{stage.model}"] = {"activations": activation_bytes(spec, stage, rank, width_tokens, part)}
    return resident(spec, stage, rank), phases


def engine_bytes(config: Config, weight_bytes: int, tp: int, requests: int) -> dict[str, int]:
    """Bytes of a slot's part of an engine for so many requests, by component.

    The cache has a fixed size, tables hold the longest requests. The workspace is what the process keeps of its largest
    forward pass, the prompts: 2 h for a token, 2 q and 2 k, and 3 f of the MLP (gate and up, their product).
    """
    data, c = config.data, config.model
    ffn = max(c.ffn, c.experts_per_token * c.expert_ffn)
    cut = 2 * (c.heads + max(c.kv_heads, tp)) * c.head_dim + 3 * ffn
    tokens = min(max(BATCH_TOKENS, request_tokens(data)), requests * data.max_prompt_tokens)
    return {
        "workspace": tokens * (2 * c.hidden + cut // tp) * DTYPE_BYTES[c.dtype],
        "weights": weight_bytes * 2,  # the engine packs a copy of some tensors
        "kv_cache": config.rollout.kv_cache_bytes,
        "tables": REQUEST_TOKEN_BYTES * data.prompts_per_step * data.samples_per_prompt * request_tokens(data),
    }


def check_memory(config: Config, first_step: int = 1) -> None:
    """InfeasiblePlan for the first plan of a run from `first_step` on that a slot's budget cannot hold: slot, phase, bytes.

    A script's plans have to hold the widest rows of all their steps, the plan that a controller begins with those of the
    first step. The policy nereus may begin with a plan that holds only shorter ones than are allowed: it changes the
    plan as rows grow.
    """
    policy, data, plan = config.nereus.policy, config.data, first_plan(config)
    _check_cache(config, plan.actor_generate.layout.tp)
    if policy != "script":
        limit = 1 if policy == "nereus" else response_limit(data, first_step)
        _check_plan(config, "plan", plan, row_tokens(data, limit))
        return
    starts = [first_step, *(change.step for change in config.changes)]
    ends: list[int | None] = [*starts[1:], None]
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if index:
            plan = placed_change(config, plan, config.changes[index - 1].plan)
            _check_cache(config, plan.actor_generate.layout.tp)
        key = f"changes[{index - 1}].plan" if index else "plan"
        _check_plan(config, key, plan, row_tokens(data, largest_limit(data, start, end)))


def _check_cache(config: Config, tp: int) -> None:
    """vLLM starts no engine whose cache does not hold one request as long as it may be."""
    least = request_cache_bytes(config, tp)
    if config.rollout.kv_cache_bytes < least:
        tokens = request_tokens(config.data)
        expected = f"expected at least {least:,}: on an engine of tp {tp} a request of {tokens} tokens takes so much"
        raise ConfigError("rollout.kv_cache_bytes", config.rollout.kv_cache_bytes, expected)


def _check_plan(config: Config, key: str, plan: Plan, width_tokens: int) -> None:
    budget = config.fleet.slot_budget_bytes
    for peak in plan_peaks(config, plan, width_tokens):
        if peak.total_bytes > budget:
            raise InfeasiblePlan(
                key,
                str(plan),
                f"slot {peak.slot} needs {peak.total_bytes:,} bytes in {peak.phase} ({peak.largest_parts}) with rows of "
                f"{width_tokens} tokens, its budget fleet.slot_budget_bytes is {budget:,}; use more shards, a smaller "
                "micro_batch, or a larger budget",
            )
