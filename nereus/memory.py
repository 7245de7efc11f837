"""Peak memory of a plan on each slot, by component, from shapes alone; and the refusal of plans that do not fit.

Formulas: weights, gradients and Adam state as Megatron keeps them (facts: costs, item 6, with this engine's types);
activations by the tensors that a layer keeps for its backward pass in the local spec (no fusion, no recompute).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.config import Config, ModelConfig
from nereus.errors import InfeasiblePlan
from nereus.layout import Plan, StagePlan, first_plan
from nereus.model import DTYPE_BYTES, ModelSpec, is_sparse, models_of, round_up
from nereus.storage import holding, megatron_params, owned_ranges, vocab_rows
from nereus.transition import placed_change

OVERHEAD_BYTES = 48 << 20
"""Communicators, engine tables and first-use caches of a slot on the CPU: 30 to 45 MB measured in the quickstart's ledgers."""
LOGIT_COPIES = 6
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


def state_bytes(spec: ModelSpec, stage: StagePlan, rank: int) -> dict[str, int]:
    """Bytes that a Megatron stage keeps on a rank between phases, by component.

    weights; where it trains also grads (float32, of all local weights), masters (of weights that are not float32) and
    moments (two, float32), each of the elements whose optimizer state the rank owns; rng.
    """
    at = stage.layout.coordinates(rank)
    params = megatron_params(spec, stage.layout, at)
    weights = sum(p.elements * DTYPE_BYTES[p.dtype] for p in params)
    if stage.stage != "train":
        return {"weights": weights, "rng": RNG_BYTES}
    owned = {name: stop - start for name, (start, stop) in owned_ranges(params, stage.layout, at).items()}
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


def activation_bytes(spec: ModelSpec, stage: StagePlan, rank: int, width_tokens: int) -> int:
    """Bytes kept for backward on a rank at its peak: micro-batches in flight x layers x tokens x what a layer keeps.

    Per token and layer, over TP where cut: norms and residuals 6 h, qkv and their rotations 3 (q + 2 k), scores and
    probabilities 3 heads S, attention output 2 q, MLP 4 f; the last rank adds the logits' copies. A layer with experts
    has 4 f and 2 h (sent and received) for each of a token's experts, as if all experts took equal shares.
    """
    c, layout = spec.config, stage.layout
    at = layout.coordinates(rank)
    queries, keys = c.heads * c.head_dim // layout.tp, 2 * c.kv_heads * c.head_dim // layout.tp
    scores = 3 * c.heads // layout.tp * width_tokens
    attention = 6 * c.hidden + 3 * (queries + keys) + 2 * queries + scores
    dense = attention + 4 * c.ffn // layout.tp
    sparse = attention + c.experts_per_token * (4 * c.expert_ffn // layout.expert_tp + 2 * c.hidden)
    elements = sum(sparse if is_sparse(c, layer) else dense for layer in layout.layers(at.pp))
    in_flight = layout.pp - at.pp
    tokens = stage.micro_batch * -(-width_tokens // layout.cp)
    kept = in_flight * elements * tokens * max(DTYPE_BYTES[c.dtype], 2)
    return kept + logit_bytes(spec, stage, rank, width_tokens)


def logit_bytes(spec: ModelSpec, stage: StagePlan, rank: int, width_tokens: int) -> int:
    """Bytes of a micro-batch's logits and their copies on the last pipeline rank: tokens x local vocabulary x 4."""
    layout, at = stage.layout, stage.layout.coordinates(rank)
    if at.pp != layout.pp - 1 or spec.head != "language":
        return 0
    rows = vocab_rows(spec.config.vocab, layout.tp, at.tp)[2]
    return LOGIT_COPIES * stage.micro_batch * width_tokens * rows * 4


def plan_peaks(config: Config, plan: Plan) -> tuple[SlotPeak, ...]:
    """The predicted peak of every slot under `plan`, over the phases of a step (not of a change of plan)."""
    specs = models_of(config.model)
    width = round_up(config.data.max_prompt_tokens + config.data.max_response_tokens, 8)
    peaks: list[SlotPeak] = []
    for slot in range(config.fleet.slots):
        base: dict[str, int] = {"overhead": OVERHEAD_BYTES}
        phases: dict[str, dict[str, int]] = {"update_weights": {"staging": config.transfer.bucket_bytes}}
        for name, stage in plan.stages():
            rank = stage.rank_of(slot)
            if rank is None:
                continue
            if stage.stage == "generate":
                weights = sum(s.size_bytes for s in holding(specs[stage.model], stage)[slot])
                base[f"{name}.weights"] = weights * 2  # the engine packs a copy of some tensors
                base[f"{name}.kv_cache"] = config.rollout.kv_cache_bytes
                continue
            spec = specs[stage.model]
            held = phases.setdefault(f"forward_{stage.model}", {}) if stage.keep == "nothing" else base
            held |= {f"{name}.{part}": size for part, size in resident(spec, stage, rank).items()}
            logits = logit_bytes(spec, stage, rank, width)
            phases.setdefault(f"forward_{stage.model}", {})["logits"] = logits
            if stage.stage == "train":
                phases[f"update_{stage.model}"] = {"activations": activation_bytes(spec, stage, rank, width)}
        worst = max(phases, key=lambda phase: sum(phases[phase].values()))
        peaks.append(SlotPeak(slot=slot, phase=worst, components=base | phases[worst]))
    return tuple(peaks)


def check_memory(config: Config) -> None:
    """InfeasiblePlan for the first plan of the run that a slot's budget cannot hold: names slot, phase and bytes."""
    plan = first_plan(config)
    _check_plan(config, "plan", plan)
    for index, change in enumerate(config.changes):
        plan = placed_change(config, plan, change.plan)
        _check_plan(config, f"changes[{index}].plan", plan)


def _check_plan(config: Config, key: str, plan: Plan) -> None:
    for peak in plan_peaks(config, plan):
        if peak.total_bytes > config.fleet.slot_budget_bytes:
            largest = sorted(peak.components.items(), key=lambda item: -item[1])[:4]
            parts = ", ".join(f"{name} {size:,}" for name, size in largest)
            raise InfeasiblePlan(
                key,
                str(plan),
                f"slot {peak.slot} needs {peak.total_bytes:,} bytes in {peak.phase} ({parts}), its budget "
                f"fleet.slot_budget_bytes is {config.fleet.slot_budget_bytes:,}; use more shards, a smaller micro_batch, "
                "or a larger budget",
            )
