"""A PPO step as data: its phases, whose model-stage does each, and the terms that a plan takes for each of them.

  update_weights  weights from the trainer to the engines          kind sync
  gen             sampling                                         kind gen
  old_log_prob, ref, values   one forward pass each                kind infer
  update_critic, update_actor  mini_batches x epochs steps each    kind train
  rest            rewards, advantages, records, dispatch           kind rest

The step is the sum of its phases. Slots that share cores (a Profile's `together_slots`) slow each other down: work that
runs at once takes the longer of the busiest slot's own time and of all slots' time over what runs together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, Literal

from nereus.config import Config
from nereus.costs.generation import (
    MEMORY_SHARE,
    WORKSPACE_BYTES,
    Generator,
    Lengths,
    generate_terms,
    quantiles_of,
    weight_bytes_per_slot,
)
from nereus.costs.profile import Profile
from nereus.costs.rates import Rates
from nereus.costs.shape import Shape, shape_of
from nereus.costs.speeds import finish, replica_speeds
from nereus.costs.training import BatchWork, Terms, forward_terms, train_terms
from nereus.layout import Plan, StagePlan, batch_shares, micro_batch_rows
from nereus.lengths import limit_row_tokens, response_limit

PhaseKind = Literal["sync", "gen", "infer", "train", "rest"]

PHASE_STAGES: dict[str, str] = {
    "update_weights": "actor_generate",
    "gen": "actor_generate",
    "old_log_prob": "actor_train",
    "ref": "reference_infer",
    "values": "critic_train",
    "update_critic": "critic_train",
    "update_actor": "actor_train",
}
"""Phase -> the model-stage whose plan decides its time; `rest` has none."""
PHASE_KINDS: dict[str, PhaseKind] = {
    "update_weights": "sync",
    "gen": "gen",
    "old_log_prob": "infer",
    "ref": "infer",
    "values": "infer",
    "update_critic": "train",
    "update_actor": "train",
    "rest": "rest",
}
PHASES = tuple(PHASE_KINDS)
REST_PARTS = ("reward", "adv")
"""Phases that are timed and count as `rest`, as does what no phase of a step says."""
TRANSIT_TERMS = frozenset({"tp", "cp", "ep", "pp", "dp", "decode_tp", "sync"})
"""Terms of traffic: the probe measures them with all groups at work, so that no crowding is put on top."""
FIRST_USE_SECONDS = 0.05
"""Unit of the term `first_use`: what a phase takes more when its engine runs it for the first time."""
TENSOR_SECONDS = 1e-3
FRAMEWORK_SECONDS, FRAMEWORK_SAMPLE_SECONDS = 1e-2, 1e-4
QUANTILES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """What a step's batch weighs: samples, the padded width of a row, mean prompt, response lengths as quantiles.

    `sampled` is False where rollouts are read instead of sampled: then there is neither sync nor generation. `fullest_tokens`
    are (samples of a micro-batch, tokens of the fullest one), where micro-batches are not padded to the width.
    """

    samples: int
    width_tokens: int
    prompt_tokens: float
    response_tokens: tuple[float, ...]
    sampled: bool = True
    fullest_tokens: tuple[tuple[int, int], ...] = ()

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def step_batch(
    prompts: Sequence[int], responses: Sequence[int], width_tokens: int, *, sampled: bool = True
) -> StepBatch:
    """The StepBatch of measured lengths in tokens."""
    return StepBatch(
        samples=len(prompts),
        width_tokens=width_tokens,
        prompt_tokens=sum(prompts) / len(prompts),
        response_tokens=quantiles_of([float(tokens) for tokens in responses], QUANTILES).tokens,
        sampled=sampled,
    )


def recorded_batch(record: Mapping[str, Any]) -> StepBatch:
    """The StepBatch of `StepBatch.record`."""
    values: dict[str, Any] = {**record, "response_tokens": tuple(record["response_tokens"])}
    values["fullest_tokens"] = tuple((size, tokens) for size, tokens in record.get("fullest_tokens", ()))
    return StepBatch(**values)


def largest_batch(config: Config, step: int = 1, *, sampled: bool = True) -> StepBatch:
    """What is supposed of a step before any has run: every prompt and response at the step's limit."""
    data = config.data
    return StepBatch(
        samples=data.prompts_per_step * data.samples_per_prompt,
        width_tokens=limit_row_tokens(data, step),
        prompt_tokens=float(data.max_prompt_tokens),
        response_tokens=(float(response_limit(data, step)),),
        sampled=sampled,
    )


def step_terms(
    config: Config, plan: Plan, batch: StepBatch, profile: Profile, fresh: Collection[str] = ()
) -> dict[str, Terms]:
    """Phase -> terms of a step of `batch` under `plan`; `fresh` names the stages whose engines have not run yet."""
    terms: dict[str, Terms] = {"rest": _rest(batch)}
    for name, stage in plan.stages():
        terms |= stage_terms(config, name, stage, batch, profile)
    for phase, name in PHASE_STAGES.items():
        if phase in terms and name in fresh:
            terms[phase] = {**terms[phase], "first_use": FIRST_USE_SECONDS * every_slot(getattr(plan, name), profile)}
    return {phase: terms[phase] for phase in PHASES if phase in terms}


def stage_terms(
    config: Config, name: str, stage: StagePlan, batch: StepBatch, profile: Profile
) -> dict[str, dict[str, float]]:
    """Phase -> terms of the phases whose time the plan of model-stage `name` decides."""
    rates = profile.rates(config.fleet.slot_budget_bytes)
    shape = shape_of(config.model)
    if name == "actor_generate":
        if not batch.sampled:
            return {}
        sync = _sync(config, stage, shape, rates, profile)
        return {"update_weights": sync, "gen": _generate(config, stage, shape, batch, rates, profile)}
    sized = _headless(shape) if stage.model == "critic" else shape
    terms: dict[str, dict[str, float]] = {}
    for phase, of in PHASE_STAGES.items():
        if of != name:
            continue
        if PHASE_KINDS[phase] == "infer":
            work = _work(config, stage, batch, batch.samples, profile)
            once = forward_terms(sized, stage.layout, work, rates)
            terms[phase] = _crowded(once, stage, work, batch.samples, profile)
            continue
        samples = batch.samples // config.algorithm.mini_batches
        work = _work(config, stage, batch, samples, profile)
        crowded = _crowded(train_terms(sized, stage.layout, work, rates), stage, work, samples, profile)
        steps = config.algorithm.mini_batches * config.algorithm.epochs
        terms[phase] = {term: steps * seconds for term, seconds in crowded.items()}
    return terms


def _headless(shape: Shape) -> Shape:
    """A critic's shape: the embedding stays, the head says one number."""
    return replace(shape, vocab=1, position_rows=shape.vocab, tied=False)


def _work(config: Config, stage: StagePlan, batch: StepBatch, samples: int, profile: Profile) -> BatchWork:
    """The work of one pass of a stage over `samples` padded rows, as the replica has it that takes longest."""
    shares = batch_shares(stage, samples)
    most = max(1, shares[_last(shares, replica_speeds(stage, profile.slow))])
    layout = stage.layout
    wide = config.model.dtype == "float32"
    return BatchWork(
        sequences=most * layout.dp,
        tokens=batch.width_tokens,
        micro_batch=micro_batch_rows(most, stage.micro_batch),
        sharding="optimizer" if layout.distributed_optimizer else "none",
        attention="whole" if profile.device == "cpu" else "fused",
        sequence_parallel=False,
        gradient_bytes=2.0 if wide else 4.0,  # float32 gradients, in the numbers of 2 bytes that rates are stated in
    )


def _last(shares: Sequence[int], speeds: Sequence[float]) -> int:
    """The replica that is done last."""
    return max(range(len(shares)), key=lambda at: (shares[at] / speeds[at], -at))


def every_slot(stage: StagePlan, profile: Profile) -> float:
    """How much longer work takes that each slot of the stage has alike than on one usual slot alone."""
    return profile.crowding(profile.weight(stage.slots)) / profile.slowest(stage.slots)


def _crowded(terms: Terms, stage: StagePlan, work: BatchWork, samples: int, profile: Profile) -> dict[str, float]:
    """Terms of a stage whose slots may share cores, or be slow.

    The pipeline's busiest rank and its bubble are stretched alike where all ranks together want more than there is.
    """
    layout, steps = stage.layout, work.micro_batches(stage.layout)
    own = sum(seconds for name, seconds in terms.items() if name not in TRANSIT_TERMS | SOLE_TERMS)
    bubble = terms.get("bubble", 0.0)
    shares, speeds = batch_shares(stage, samples), replica_speeds(stage, profile.slow)
    most = max(1, shares[_last(shares, speeds)])
    whole = layout.ranks // layout.pp / layout.dp * (own + steps * bubble)
    parts = [share / most for share in shares]
    last = finish(parts, speeds, alone=own + bubble, crowded=whole, together=profile.at_once_slots)
    stretch = last / (own + bubble) if own else 1.0
    every = every_slot(stage, profile)
    found: dict[str, float] = {}
    for name, seconds in terms.items():
        factor = 1.0 if name in TRANSIT_TERMS else every if name in ("optimizer", "step") else stretch
        found[name] = factor * seconds
    found["memory"] *= profile.memory_ratio
    found["call"] = profile.call_seconds
    return found


SOLE_TERMS = frozenset({"bubble", "optimizer", "step"})
"""Terms that are not a rank's work on micro-batches."""


def _generate(
    config: Config, stage: StagePlan, shape: Shape, batch: StepBatch, rates: Rates, profile: Profile
) -> dict[str, float]:
    """Terms of the engine that is done last; its cache is what the configuration gives it."""
    engine = Generator(tp=stage.layout.tp)
    scale = config.model.dtype == "float32"
    cache = config.rollout.kv_cache_bytes / (2 if scale else 1)
    needed = (cache + weight_bytes_per_slot(shape, engine) + WORKSPACE_BYTES) / MEMORY_SHARE
    roomy = replace(rates, memory_bytes=ceil(needed) + 1)
    lengths = Lengths(tokens=batch.response_tokens)
    crowding = profile.crowding(profile.weight(stage.slots))
    engines = sorted(set(zip(batch_shares(stage, batch.samples), replica_speeds(stage, profile.slow), strict=True)))
    found: dict[str, float] = {}
    fullest = {speed: responses for responses, speed in engines}  # of equally fast ones
    for speed, responses in fullest.items():
        terms = generate_terms(shape, engine, roomy, batch.prompt_tokens, max(1, responses), lengths)
        factors = {name: 1.0 if name in TRANSIT_TERMS else crowding / speed for name in terms}
        found = max(found, {name: factors[name] * seconds for name, seconds in terms.items()}, key=_total)
    found["call"] = profile.call_seconds
    return found


def _total(terms: Terms) -> float:
    return sum(terms.values())


def _sync(config: Config, stage: StagePlan, shape: Shape, rates: Rates, profile: Profile) -> dict[str, float]:
    """Bytes of an engine's weights over a slot's port, and what handing over each tensor takes."""
    experts = 3 * config.model.experts
    per_layer = 9 + experts
    tensors = config.model.layers * per_layer + 3
    received = weight_bytes_per_slot(shape, Generator(tp=stage.layout.tp))
    return {
        "sync": received / rates.link_bytes_per_second,
        "sync_tensors": TENSOR_SECONDS * tensors * every_slot(stage, profile),
        "call": profile.call_seconds,
    }


def _rest(batch: StepBatch) -> dict[str, float]:
    return {"step_framework": FRAMEWORK_SECONDS, "sample_framework": FRAMEWORK_SAMPLE_SECONDS * batch.samples}


def measured_phases(seconds: Mapping[str, float]) -> dict[str, float]:
    """Phase -> measured seconds of a step from its timings by name; `rest` is what of the step no phase says.

    Timings that are no phase of a step's work (a checkpoint's stop) are left out of it.
    """
    found = {phase: seconds[phase] for phase in PHASES if phase in seconds}
    others = sum(value for name, value in seconds.items() if name not in (*found, *REST_PARTS, "step", "transition"))
    if "step" in seconds:
        found["rest"] = seconds["step"] - others - sum(found.values())
    return {phase: value for phase, value in found.items() if value > 0}
