"""What is true in the simulated world: random effects and constants that the controller never sees.

The controller's model (`nereus.costs`, `nereus.planning.evaluate`) adds analytic terms with coefficients. The truth has
another form; HIDDEN_TERMS lists what of it the controller has no term for, so that calibration has real work to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import exp, log2

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from nereus.fleet import Fleet
from nereus.model import seed_of
from nereus.transitions.graph import Operation

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_RANKS = 32
"""The largest communicator whose making was measured."""
HIDDEN_TERMS: dict[str, str] = {
    "kernel shape": "products and attention are interpolated in measured tables: no roofline, no constant efficiency",
    "collective size": "collectives follow measured times by message size, with NCCL's steps between protocols",
    "samples": "each micro-batch has its own samples; a replica's work is what its shares happened to get",
    "longest micro-batch": "a pipeline fills and drains at the pace of its longest micro-batch, not of the mean",
    "long tail": "every response has its own length; an engine decodes until its own longest one ends",
    "crowded engine": "overhead of a decode step grows faster than its sequences",
    "waves": "more sequences than the cache holds wait for the first that end",
    "slow slots": "every slot has a speed of its own; a group waits for its slowest member",
    "stragglers": "now and then a node is slow for some steps",
    "late reward": "a step waits for the slowest of its rewards",
    "noise": "each phase's time varies from step to step",
    "start-up spread": "engines and communicators take times of their own on each slot; large groups take longer",
    "allocator": "a share of memory is lost between blocks, another for each plan; the fullest micro-batch counts",
    "shared links": "transfers of a change share links with each other as they come",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StartUp:
    """How the seconds of a kind of operation spread: a log-normal factor per slot with this deviation.

    Each doubling of its ranks above 8 takes a communicator `doubling_ratio` times as long.
    """

    log_std: float
    doubling_ratio: float = 1.0


SPREADS: Mapping[str, StartUp] = {
    "build_engine": StartUp(log_std=0.14),  # a cold vLLM engine of an 8B model: 39 to 59 s (facts: resharding)
    "build_groups": StartUp(log_std=0.4, doubling_ratio=1.41),  # .7 to 2.5 s over 8 ranks; 2.0 over 8, 4.1 over 32
    "quiesce": StartUp(log_std=0.3),
    "destroy_groups": StartUp(log_std=0.3),
    "activate": StartUp(log_std=0.2),
    "verify": StartUp(log_std=0.05),
    "copy": StartUp(log_std=0.05),
    "commit": StartUp(log_std=0.5),
}


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The random effects of a world; equal seeds give equal worlds.

    `slot_log_std` spreads the slots' lasting speeds. A node becomes slow with `straggler_share` in each stretch of
    `straggler_steps` steps, by a factor of up to `straggler_ratio`. `noise_log_std` is of a phase in one step.
    `link_share` is what transfers reach of the links' data sheets; `link_ratio` is what links are of their data sheets, for
    collectives and transfers alike. `exact` leaves every spread out, for closed forms.
    """

    seed: int = 1
    slot_log_std: float = 0.012
    straggler_share: float = 0.004
    straggler_steps: int = 12
    straggler_ratio: float = 1.5
    noise_log_std: float = 0.012
    link_share: float = 0.75
    link_ratio: float = 1.0
    decode_step_seconds: float = 0.9e-3
    decode_token_seconds: float = 14e-6
    crowd_sequences: int = 400
    most_sequences: int = 512
    reward_sample_seconds: float = 0.12e-3
    reward_tail_seconds: float = 0.25
    rest_seconds: float = 0.4
    sync_tensor_seconds: float = 0.4e-3
    wasted_share: float = 0.03
    wasted_log_std: float = 0.4
    spreads: Mapping[str, StartUp] = field(default_factory=lambda: SPREADS)
    exact: bool = False

    def generator(self, *names: object) -> np.random.Generator:
        """Random numbers that depend on the seed and the names alone."""
        return np.random.Generator(np.random.PCG64(seed_of("truth", self.seed, *names)))

    def altered(self, *, noise_ratio: float = 1.0, engine_ratio: float = 1.0, link_ratio: float = 1.0) -> Truth:
        """Another truth under the same beliefs: spreads and stragglers, what engines take beside kernels, links' rates, each times its ratio."""
        return replace(
            self,
            slot_log_std=noise_ratio * self.slot_log_std,
            noise_log_std=noise_ratio * self.noise_log_std,
            straggler_share=noise_ratio * self.straggler_share,
            decode_step_seconds=engine_ratio * self.decode_step_seconds,
            decode_token_seconds=engine_ratio * self.decode_token_seconds,
            link_ratio=link_ratio * self.link_ratio,
        )

    def fleet(self, believed: Fleet) -> Fleet:
        """The fleet whose links are as they truly are, beside their data sheets."""
        if self.link_ratio == 1.0:
            return believed
        devices = {
            device: replace(
                device,
                link_bytes_per_second=self.link_ratio * device.link_bytes_per_second,
                nic_bytes_per_second=self.link_ratio * device.nic_bytes_per_second,
            )
            for device in believed.device_of.values()
        }
        return Fleet(nodes=tuple(replace(node, device=devices[node.device]) for node in believed.nodes))

    def slowness(self, slots: int) -> Floats:
        """[slots] how many times as long each slot takes, lasting."""
        if self.exact:
            return np.ones(slots)
        return np.exp(self.slot_log_std * self.generator("slots").standard_normal(slots))

    def straggling(self, nodes: int, step: int) -> Floats:
        """[nodes] how many times as long each node takes in this step, beside its slots' lasting speeds."""
        found = np.ones(nodes)
        if self.exact or not self.straggler_share:
            return found
        draw = self.generator("stragglers", step // self.straggler_steps)
        slow = draw.random(nodes) < self.straggler_share
        found[slow] += (self.straggler_ratio - 1) * draw.random(int(slow.sum()))
        return found

    def noise(self, step: int, phase: str) -> float:
        """The factor of a phase in a step."""
        if self.exact:
            return 1.0
        return float(np.exp(self.noise_log_std * self.generator("noise", step, phase).standard_normal()))

    def wasted(self, plan_text: str) -> float:
        """The share of memory that the allocator loses under a plan."""
        if self.exact:
            return 0.0
        draw = self.generator("allocator", plan_text).standard_normal()
        return self.wasted_share * float(np.exp(self.wasted_log_std * draw))

    def rest(self, step: int, samples: int) -> float:
        """Seconds of what no device does: dispatch, and rewards of which the slowest has a heavy tail."""
        plain = self.rest_seconds + self.reward_sample_seconds * samples
        if self.exact:
            return plain
        tail = self.generator("rest", step).pareto(2.5) + 1
        return plain + self.reward_tail_seconds * float(tail)

    def operation_seconds(self, operation: Operation, name: str, count: int) -> float:
        """What the operation `name` of a transition really takes on its own; of the `count`-th transition of the run.

        Moves are the network's business: of them this is the fixed part alone.
        """
        spread = self.spreads.get(operation.kind)
        if self.exact or spread is None or not operation.seconds:
            return operation.seconds
        drawn = (seed_of("operation", self.seed, count, name) + 0.5) / (1 << 63)
        factor = exp(spread.log_std * float(ndtri(drawn)))
        if spread.doubling_ratio != 1.0 and len(operation.lanes) > 1:
            factor *= spread.doubling_ratio ** log2(min(len(operation.lanes), MOST_RANKS) / 8)
        return operation.seconds * factor
