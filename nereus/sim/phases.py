"""The phases of one RL step in the simulated world, and what each of them really takes under a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from nereus.config import Config
from nereus.control.outlook import StepObserved
from nereus.control.records import plan_slots
from nereus.costs.shape import Shape, shape_of
from nereus.fleet import Fleet
from nereus.layout import Plan, StagePlan
from nereus.planning.space import MICRO_BATCHES
from nereus.sim.changes import sync_seconds
from nereus.sim.decoding import GenerationTimes
from nereus.sim.memory import PeakBytes, TrueMemory
from nereus.sim.training import StageTimes
from nereus.sim.truth import Floats, Truth
from nereus.sim.workload import StepSamples
from nereus.workload import PHASES, QUANTILES, StepBatch

CRITIC_PHASES = ("values", "update_critic")


def critic_shape(shape: Shape) -> Shape:
    """A critic's: the embedding stays, the head says one number."""
    return replace(shape, vocab=1, position_rows=shape.vocab, tied=False)


class StepTimes:
    """A plan on a fleet: seconds of each phase of a step's batch. Slots are those of the fleet."""

    def __init__(self, config: Config, plan: Plan, fleet: Fleet, truth: Truth) -> None:
        fleet = truth.fleet(fleet)
        self.config, self.plan, self.fleet, self.truth = config, plan, fleet, truth
        shape, critic = shape_of(config.model), critic_shape(shape_of(config.model))
        samples = config.data.prompts_per_step * config.data.samples_per_prompt
        minis = config.algorithm.mini_batches

        def times(of: Shape, stage: StagePlan) -> StageTimes:
            return StageTimes(of, stage, fleet, samples, minis)

        self.has_critic = config.algorithm.adv_estimator == "gae"
        self.actor, self.reference = times(shape, plan.actor_train), times(shape, plan.reference_infer)
        self.critic = times(critic, plan.critic_train) if self.has_critic else None
        found = {"actor_train": self.actor, "reference_infer": self.reference}
        trained = found | ({"critic_train": self.critic} if self.critic is not None else {})
        self.memory = TrueMemory(config, plan, fleet, truth, trained)
        self.generation = GenerationTimes(config, plan.actor_generate, fleet, truth)
        self.sync_seconds = sync_seconds(config, plan, fleet, truth.link_share, truth.sync_tensor_seconds)

    def phases(self, step: int, samples: StepSamples, slowness: Floats) -> Iterator[tuple[str, float]]:
        """(name, seconds) in the order of a step; `slowness` [slots] is how much longer each slot takes in it."""
        tokens = (samples.prompt_tokens + samples.response_tokens).astype(np.float64)
        epochs = self.config.algorithm.epochs
        yield "update_weights", self.sync_seconds * self.truth.noise(step, "update_weights")
        made = self.generation.seconds(samples.prompt_tokens, samples.response_tokens, slowness)
        yield "gen", made * self.truth.noise(step, "gen")
        yield "reward", self.truth.rest(step, len(tokens))
        yield "old_log_prob", self.actor.forward_seconds(tokens, slowness) * self.truth.noise(step, "old_log_prob")
        yield "ref", self.reference.forward_seconds(tokens, slowness) * self.truth.noise(step, "ref")
        if self.critic is not None:
            yield "values", self.critic.forward_seconds(tokens, slowness) * self.truth.noise(step, "values")
            trained = self.critic.training_seconds(tokens, slowness, epochs)
            yield "update_critic", trained * self.truth.noise(step, "update_critic")
        trained = self.actor.training_seconds(tokens, slowness, epochs)
        yield "update_actor", trained * self.truth.noise(step, "update_actor")


def step_row(
    step: int, samples: StepSamples, seconds: Mapping[str, float], plan: Plan, fleet_slots: int, peak: PeakBytes
) -> dict[str, float]:
    """A step's metrics under verl's names, as far as batch, times, plan and memory say them."""
    train, generate, lengths = plan.actor_train.layout, plan.actor_generate.layout, samples.response_tokens
    return {
        "training/global_step": float(step),
        **{f"timing_s/{name}": value for name, value in seconds.items()},
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "prompt_length/mean": float(samples.prompt_tokens.mean()),
        "perf/total_num_tokens": float(samples.total_tokens),
        "perf/time_per_step": seconds["step"],
        "perf/throughput": samples.total_tokens / (seconds["step"] * fleet_slots),
        "perf/max_memory_allocated_gb": peak.used_bytes / 2**30,
        "fleet/slots": float(fleet_slots),
        "plan/tp": float(train.tp),
        "plan/pp": float(train.pp),
        "plan/dp": float(train.dp),
        "plan/gen_tp": float(generate.tp),
        "plan/gen_dp": float(generate.dp),
        "plan/slots": float(len(plan_slots(plan))),
    }


def observed(
    at_seconds: float,
    step: int,
    samples: StepSamples,
    seconds: Mapping[str, float],
    plan_id: str,
    peak: PeakBytes,
) -> StepObserved:
    """A step as a controller is told it: seconds by phase without those of a change within it, lengths as quantiles."""
    phases = {name: seconds[name] for name in PHASES if name in seconds}
    return StepObserved(
        at_seconds=at_seconds,
        step=step,
        step_seconds=seconds["step"] - seconds.get("interleaved", 0.0),
        tokens=samples.total_tokens,
        plan_id=plan_id,
        phase_seconds={**phases, "rest": seconds["reward"]},
        batch=batch_of(samples),
        peak_bytes={str(peak.slot): peak.used_bytes},
    )


def batch_of(samples: StepSamples) -> StepBatch:
    """The lengths of a step as a controller learns them; the width is the longest prompt with its response.

    The fullest micro-batches are those of any run of samples in their order, wherever replicas begin.
    """
    before = np.concatenate(([0], np.cumsum(samples.prompt_tokens + samples.response_tokens)))
    ordered = np.sort(samples.response_tokens)
    picks = ((np.arange(QUANTILES) + 0.5) / QUANTILES * len(ordered)).astype(np.int64)
    return StepBatch(
        samples=len(ordered),
        width_tokens=int((samples.prompt_tokens + samples.response_tokens).max()),
        prompt_tokens=float(samples.prompt_tokens.mean()),
        response_tokens=tuple(float(tokens) for tokens in ordered[picks]),
        fullest_tokens=tuple(
            (size, int((before[size:] - before[:-size]).max())) for size in MICRO_BATCHES if size <= len(ordered)
        ),
    )
