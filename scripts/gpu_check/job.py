"""A small PPO job on the slots, and the steps of a check that look at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from nereus.cli.folder import create_run_folder
from nereus.config import (
    Config,
    DataConfig,
    FleetConfig,
    LoggerConfig,
    ModelConfig,
    PlanConfig,
    RunConfig,
    StageConfig,
)
from nereus.lengths import WIDTH_MULTIPLE_TOKENS
from nereus.rl.batch import build
from nereus.rl.correction import mismatch
from nereus.runtime.changes import first_state, start_generation
from nereus.runtime.driven import DrivenJob
from nereus.runtime.outset import other_states
from nereus.runtime.phases import StepRecord
from nereus.runtime.pool import SlotPool
from nereus.validate import validate
from scripts.gpu_check.on_slot import digests_agreed, staging_rate, sum_and_ring

LOGP_NATS, TRAINED = 1e-3, ("actor.train", "critic.train")
Steps = dict[str, Callable[[], Iterator[str]]]


def config_of(slots: int) -> tuple[Config, StageConfig, StageConfig]:
    """A small PPO job on so many slots, another layout for what it trains, and its own."""
    one = StageConfig(dp=slots, micro_batch=4)
    other = (
        StageConfig(tp=slots, micro_batch=4) if slots > 1 else StageConfig(micro_batch=4, distributed_optimizer=False)
    )
    made = Config(
        run=RunConfig(name="gpu-check", seed=5, steps=1),
        model=ModelConfig(layers=4, hidden=256, heads=8, kv_heads=4, head_dim=64, ffn=512, init_std=0.08),
        data=DataConfig(
            task="spell_backward",
            task_options={"min_word_len": 3, "max_word_len": 5},
            prompt_template="{word}>",
            prompts_per_step=4 * slots,
            samples_per_prompt=1,
            max_prompt_tokens=8,
            max_response_tokens=7,
        ),
        fleet=FleetConfig(slots=slots, slot_budget_bytes=8 << 30),
        plan=PlanConfig(actor_train=one, critic_train=one, actor_generate=one, reference_infer=one),
        logger=LoggerConfig(wandb="off"),
    )
    validate(made)
    return made, other, one


class Check(DrivenJob):
    """The job on the slots and the steps that look at it."""

    def __init__(self, pool: SlotPool, folder: Path) -> None:
        made, *self.layouts = config_of(len(pool.numbers))
        super().__init__(pool, made, create_run_folder(made, folder))

    def checks(self) -> Steps:
        """By name, in order."""
        return {
            "fabric": self.fabric,
            "digests on the device": self.digests,
            "pinned staging": self.staging,
            "engines and an optimizer step": self.train,
            "live change there and back": self.there_and_back,
            "sampling beside the trainer": self.sample,
        }

    def fabric(self) -> Iterator[str]:
        """All slots at once."""
        for slot, (summed, ring) in sorted(self.pool.call_all("apply", sum_and_ring).items()):
            yield f"slot {slot}: all-reduce {summed:.1f} GB/s, ring {ring:.1f} GB/s, values right"

    def digests(self) -> Iterator[str]:
        """Each slot's device beside its host."""
        yield f"{self.pool.call_all('apply', digests_agreed)[0]} digests agree on each slot"

    def staging(self) -> Iterator[str]:
        """Each slot's device and host memory."""
        for slot, found in sorted(self.pool.call_all("apply", staging_rate).items()):
            yield f"slot {slot}: {f'{found:.1f} GB/s to the host' if found else 'nothing to copy on a CPU'}, bytes right"

    def train(self) -> Iterator[str]:
        """Actor, critic, reference; two supervised steps."""
        first_state(self.job)
        losses = [self.phases.warm_up(step) for step in (1, 2)]
        other_states(self.job)
        yield f"losses {losses[0]:.6f}, {losses[1]:.6f}"

    def there_and_back(self) -> Iterator[str]:
        """Two changes of plan; the trained state must come back bit for bit, and the job train on."""
        before = self.job.digests(TRAINED, "")
        for stage in self.layouts:
            record = self.change(actor_train=stage, critic_train=stage)
            moved = record.moved.counted_bytes if record.moved else 0
            kinds = ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in record.seconds.items())
            layout = self.job.plan.actor_train.layout
            yield f"to TP{layout.tp} PP{layout.pp} DP{layout.dp}, optimizer sharded: {layout.distributed_optimizer}"
            yield f"  pause {record.pause_seconds:.3f} s ({kinds}), {moved:,} bytes moved as planned"
        if self.job.digests(TRAINED, "") != before:
            raise ValueError("the state after the way back is not the state before")
        yield f"digests of {', '.join(TRAINED)} are those before; next loss {self.phases.warm_up(3):.6f}"

    def sample(self) -> Iterator[str]:
        """vLLM's engines by a weight sync; their log-probabilities beside Megatron's."""
        start_generation(self.job)
        self.job.plan_sync()
        yield from self.compare()

    def compare(self) -> Iterator[str]:
        """A batch sampled now: each token's log-probability by both."""
        rollouts = self.phases.rollouts(StepRecord(step=1))
        batch = build(rollouts.prompts, rollouts.responses, multiple_tokens=WIDTH_MULTIPLE_TOKENS)
        old = self.phases.infer(self.job.plan.actor_train, batch, "old_log_prob")["logp"]
        gap = mismatch(old, batch.align(rollouts.logprobs), batch.mask)
        if not gap.max_abs_nats <= LOGP_NATS:
            raise ValueError(
                f"log-probabilities differ by up to {gap.max_abs_nats:.1e} nats; at most {LOGP_NATS:.0e} is right"
            )
        yield f"{int(batch.mask.sum())} tokens, log-probabilities within {gap.max_abs_nats:.1e} nats"
