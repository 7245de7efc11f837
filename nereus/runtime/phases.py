"""The phases of a PPO step, carried out on the slots under the present plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nereus.config import ModelConfig
from nereus.errors import JournalError, NereusError, SlotFailed
from nereus.layout import StagePlan, batch_shares
from nereus.lengths import WIDTH_MULTIPLE_TOKENS, largest_limit, response_limit
from nereus.rl.advantages import AdvantageSettings, estimate, token_rewards
from nereus.rl.batch import Batch, build, split
from nereus.rl.correction import mismatch
from nereus.rl.folder_tokenizer import tokenizer_of
from nereus.rl.losses import Denominators, PolicySettings, ValueSettings, kl_divergence
from nereus.rl.tasks import Task
from nereus.rollout import Completion, Request, samples_of_step
from nereus.runtime.job import Job, MoveReport, report
from nereus.runtime.messages import PhaseResult
from nereus.runtime.objective import Objective
from nereus.runtime.progress import completions
from nereus.runtime.rollouts import Rollouts, load, save
from nereus.storage import emu_name
from nereus.workload import StepBatch, step_batch

RESUMED = "rollout/requests_resumed", "rollout/tokens_kept"
"""Of a step whose generation a loss cut short."""


@dataclass(kw_only=True)
class StepRecord:
    """What one PPO step measured: times by phase, metrics, the sync's bytes, a row per optimizer step."""

    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    sync: MoveReport | None = None
    updates: list[dict[str, Any]] = field(default_factory=list)
    rollouts: str = ""
    batch: StepBatch | None = None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the wall seconds inside to a phase."""
        started = time.monotonic()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started


@dataclass(kw_only=True)
class Phases:
    """Runs PPO steps of a job; rollouts are sampled, or read from another run's `recorded` folder.

    `refusal` says why the present plan may not work on a step's rows of so many tokens. They are kept for the same step
    once more, under another plan.
    """

    job: Job
    task: Task
    folder: Path
    recorded: Path | None = None
    refusal: Callable[[int, int], NereusError | None] = lambda _step, _width_tokens: None

    def __post_init__(self) -> None:
        self.resumed = 0, 0  # requests that the last sampling found begun, and their tokens
        self._kept: dict[str, Completion] = {}
        self._refused: tuple[int, Rollouts] | None = None
        self.updating = False  # between the first update of a step and its end: the state is of no step
        a = self.job.config.algorithm
        self.policy = PolicySettings(
            clip_ratio_low=a.clip_ratio_low,
            clip_ratio_high=a.clip_ratio_high,
            dual_clip_ratio=a.dual_clip_ratio,
            entropy_coef=a.entropy_coef,
            loss_agg_mode=a.loss_agg_mode,  # type: ignore[arg-type]  # checked by the record itself
        )
        self.value = ValueSettings(value_clip=a.value_clip, loss_agg_mode=a.loss_agg_mode)  # type: ignore[arg-type]
        self.advantage = AdvantageSettings(
            adv_estimator=a.adv_estimator,  # type: ignore[arg-type]
            gamma=a.gamma,
            lam=a.lam,
            whiten_advantages=a.whiten_advantages,
        )

    # -- one step ------------------------------------------------------------------------------------------------

    def run(self, step: int, between: Callable[[StepRecord], None] = lambda _: None) -> StepRecord:
        """PPO step `step`: sample, score, infer, estimate advantages, update critic and actor.

        `between` is called at boundaries between phases after generation, when nothing runs on the slots. Raises what
        `refusal` says before any phase has begun on the rows.
        """
        record = StepRecord(step=step)
        started = time.monotonic()
        before, self._refused = self._refused, None
        known = before[1] if before is not None and before[0] == step else None
        rollouts = known or self.rollouts(record)
        record.rollouts = rollouts.digest
        batch = build(rollouts.prompts, rollouts.responses, multiple_tokens=WIDTH_MULTIPLE_TOKENS)
        record.batch = step_batch(
            batch.prompt_lengths.tolist(),
            batch.response_lengths.tolist(),
            batch.width_tokens,
            sampled=self.recorded is None and known is None,
        )
        if (refusal := self.refusal(step, batch.width_tokens)) is not None:
            self._refused = step, rollouts
            raise refusal
        plan = self.job.plan
        between(record)
        with record.timed("old_log_prob"):
            old = self.infer(plan.actor_train, batch, "old_log_prob")["logp"]
        with record.timed("ref"):
            reference = self.infer(plan.reference_infer, batch, "ref")["logp"]
        if plan.reference_infer.keep == "nothing":
            with record.timed("offload"):
                self.job.offload(plan.reference_infer)
        with record.timed("values"):
            values = self.infer(plan.critic_train, batch, "values")["values"]
        between(record)
        with record.timed("adv"):
            batch = self._advantages(batch, rollouts, old, reference, values)
        self._parity(record, batch, rollouts, old)
        self._update(record, batch)
        record.seconds["step"] = time.monotonic() - started
        self._facts(record, batch, rollouts, reference, old)
        self.job.data_position += self.job.config.data.prompts_per_step
        self.updating = False
        return record

    def rollouts(self, record: StepRecord) -> Rollouts:
        """The step's samples: recorded ones, or sampled now after a weight sync, and put on record."""
        if self.recorded is not None:
            rollouts = load(self.recorded, record.step)
            self._check_recorded(rollouts, record.step)
        else:
            with record.timed("update_weights"):
                record.sync = self.sync()
            with record.timed("gen"):
                done = self.generate(record.step)
            if self.resumed[0]:
                record.metrics |= dict(zip(RESUMED, map(float, self.resumed), strict=True))
            with record.timed("reward"):
                rollouts = self._scored(record.step, done)
        save(rollouts, self.folder)
        return rollouts

    def _check_recorded(self, rollouts: Rollouts, step: int) -> None:
        expected = self._samples(step)
        if rollouts.samples != expected:
            raise JournalError(
                f"recorded rollouts of step {step} hold {len(rollouts.samples)} samples of other ids than this run's "
                f"{len(expected)}: data.prompts_per_step and data.samples_per_prompt must be those of the recording run"
            )

    def _samples(self, step: int):  # noqa: ANN202
        data = self.job.config.data
        return samples_of_step(step, self.job.data_position, data.prompts_per_step, data.samples_per_prompt)

    # -- generation ----------------------------------------------------------------------------------------------

    def sync(self, *, poison: bool = False) -> MoveReport:
        """Moves the actor's weights from the training layout to the generation layout, slot to slot."""
        planned = self.job.sync or self.job.plan_sync()
        emu = emu_name(self.job.plan.actor_train)
        return report(planned.whole, self.job.pool.call_all("sync", emu, poison))

    def generate(self, step: int) -> list[Completion]:
        """Completions of the step's samples in batch order."""
        config = self.job.config
        requests = [
            Request(
                request_id=f"{s.step}/{s.prompt}/{s.sample}",
                prompt_tokens=self.task.prompt(s.prompt).token_ids,
                seed=s.seed(config.run.seed),
                temperature=config.rollout.temperature,
                max_response_tokens=response_limit(config.data, step),
                stop_token=self.task.tokenizer.eos_id,
            )
            for s in self._samples(step)
        ]
        return self.sample(requests)

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions of any requests: those that a loss cut short go on where they were."""
        begun = self._kept = self._begun()
        known = [begun[r.request_id] for r in requests if r.request_id in begun]
        left = [r.after(begun[r.request_id]) if r.request_id in begun else r for r in requests]
        finished = {c.request_id: c for c in known if c.finished != "running"}
        done = self._sampled([r for r in left if r.request_id not in finished])
        self._kept = {}
        self.job.host.drop_progress()
        self.resumed = len(known), sum(len(c.tokens) for c in known)
        found = {**finished, **{c.request_id: c for c in done}}
        if set(found) != {r.request_id for r in requests}:
            raise SlotFailed("the engines returned other requests than they were given")
        return [found[r.request_id] for r in requests]

    def _sampled(self, requests: Sequence[Request]) -> list[Completion]:
        """The requests shared over the engines of the present plan."""
        stage = self.job.plan.actor_generate
        shares = batch_shares(stage, len(requests))
        given: dict[int, tuple[object, ...]] = {}
        folder, start = str(self.job.host.progress), 0
        for replica, share in enumerate(shares):
            for slot in stage.replica_slots(replica):
                given[slot] = (list(requests[start : start + share]), folder, self._policy_steps)
            start += share
        answers = self.job.pool.gather("generate", given)
        outputs = [answers[stage.output_slot(replica)] for replica in range(stage.layout.dp)]
        done = [c for answer in outputs if not isinstance(answer, NereusError) for c in answer]
        self._kept = {**self._kept, **{c.request_id: c for c in done}}
        if failures := [answer for answer in answers.values() if isinstance(answer, NereusError)]:
            raise max(failures, key=lambda error: isinstance(error, SlotFailed) and len(error.lost))
        return done

    def _begun(self) -> dict[str, Completion]:
        """What is known of requests that a loss cut short: of engines that live, and what the dead ones left."""
        told = completions(self.job.host.progress, self._policy_steps)
        longer = {k: c for k, c in told.items() if k not in self._kept or len(self._kept[k].tokens) < len(c.tokens)}
        return {**self._kept, **longer}

    @property
    def _policy_steps(self) -> int:
        return self.job.optimizer_steps.get(emu_name(self.job.plan.actor_train), 0)

    def _scored(self, step: int, done: Sequence[Completion]) -> Rollouts:
        samples = self._samples(step)
        return Rollouts(
            samples=samples,
            prompts=tuple(self.task.prompt(s.prompt).token_ids for s in samples),
            responses=tuple(c.tokens for c in done),
            logprobs=tuple(c.logprobs for c in done),
            scores=tuple(self.task.score_tokens(s.prompt, c.tokens) for s, c in zip(samples, done, strict=True)),
        )

    # -- inference and advantages --------------------------------------------------------------------------------

    def infer(self, stage: StagePlan, batch: Batch, phase: str) -> dict[str, Tensor]:
        """What a model says about every row of the batch, [rows, S] by name."""
        shares = split(batch, batch_shares(stage, batch.rows))
        given = {
            slot: (emu_name(stage), shares[replica], stage.micro_batch, phase)
            for replica in range(stage.layout.dp)
            for slot in stage.replica_slots(replica)
        }
        results = self.job.pool.call("forward", given)
        parts = [results[stage.output_slot(replica)].outputs for replica in range(stage.layout.dp)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _advantages(self, batch: Batch, rollouts: Rollouts, old: Tensor, reference: Tensor, values: Tensor) -> Batch:
        coefficient = self.job.config.algorithm.kl_coef
        scores = torch.tensor(rollouts.scores, dtype=torch.float32)
        kl = kl_divergence(old, reference, "k1") if coefficient else None
        rewards = token_rewards(scores, batch.mask, kl=kl, kl_coef=coefficient)
        groups = torch.tensor([s.prompt for s in rollouts.samples])
        advantages, returns = estimate(self.advantage, rewards, batch.mask, values=values, groups=groups)
        return batch.with_columns(old_logp=old, values=values, advantages=advantages, returns=returns)

    def _parity(self, record: StepRecord, batch: Batch, rollouts: Rollouts, old: Tensor) -> None:
        """vLLM's log-probabilities beside the trainer's on the same tokens (comparable at temperature 1)."""
        if self.recorded is not None or self.job.config.rollout.temperature != 1.0:
            return
        gap = mismatch(old, batch.align(rollouts.logprobs), batch.mask)
        record.metrics["rollout_corr/logp_diff_max"] = gap.max_abs_nats
        record.metrics["rollout_corr/mean_exp_abs_diff"] = gap.mean_exp_abs
        record.metrics["rollout_corr/kl"] = gap.kl_nats
        record.metrics["rollout_corr/k3_kl"] = gap.k3_nats

    # -- updates -------------------------------------------------------------------------------------------------

    def _update(self, record: StepRecord, batch: Batch) -> None:
        algorithm, plan = self.job.config.algorithm, self.job.plan
        self.updating = True
        size = batch.rows // algorithm.mini_batches
        for epoch in range(algorithm.epochs):
            for index, mini in enumerate(split(batch, [size] * algorithm.mini_batches)):
                longest = float(largest_limit(self.job.config.data))  # of the run: a step's loss has one scale
                denominators = Denominators.of(mini.mask, horizon_tokens=longest)
                row: dict[str, Any] = {"epoch": epoch, "mini_batch": index}
                with record.timed("update_critic"):
                    objective = Objective(kind="value", value=self.value, denominators=denominators)
                    row |= self.update(plan.critic_train, mini, objective, algorithm.critic_lr)
                with record.timed("update_actor"):
                    objective = Objective(kind="policy", policy=self.policy, denominators=denominators)
                    row |= self.update(plan.actor_train, mini, objective, algorithm.actor_lr)
                record.updates.append(row)

    def update(self, stage: StagePlan, mini: Batch, objective: Objective, lr: float) -> dict[str, Any]:
        """One optimizer step: metrics summed over replicas, the gradient norm, the digest of the random state."""
        shares = split(mini, batch_shares(stage, mini.rows))
        emu = emu_name(stage)
        given = {
            slot: (emu, shares[replica], stage.micro_batch, objective, lr)
            for replica in range(stage.layout.dp)
            for slot in stage.replica_slots(replica)
        }
        results: dict[int, PhaseResult] = self.job.pool.call("train", given)
        self.job.optimizer_steps[emu] = self.job.optimizer_steps.get(emu, 0) + 1
        outputs = [results[stage.output_slot(replica)] for replica in range(stage.layout.dp)]
        metrics: dict[str, Any] = {name: sum(o.metrics[name] for o in outputs) for name in outputs[0].metrics}
        metrics[f"{stage.model}/grad_norm"] = outputs[0].grad_norm
        metrics[f"{stage.model}/rng"] = outputs[0].rng
        return metrics

    def warm_up(self, step: int) -> float:
        """One supervised step of the actor on fresh examples of the task; the mean negative log-likelihood."""
        config = self.job.config
        ids = range((step - 1) * config.warmup.samples, step * config.warmup.samples)
        lessons, wrong = self.lessons, config.warmup.wrong_share
        batch = build(
            [lessons.prompt(i).token_ids for i in ids],
            [lessons.demonstration(i, wrong_share=wrong) for i in ids],
            multiple_tokens=WIDTH_MULTIPLE_TOKENS,
        )
        objective = Objective(kind="sft", denominators=Denominators.of(batch.mask))
        lr = config.warmup.lr * min(1.0, step / max(config.warmup.ramp_steps, 1))
        return float(self.update(self.job.plan.actor_train, batch, objective, lr)["sft/loss"])

    @property
    def lessons(self) -> Task:
        """The task's stream of examples for the warm-up: other prompts than training sees."""
        data = self.job.config.data
        return task_of(
            data.task,
            data.task_options,
            self.job.config.run.seed,
            data.prompt_template,
            "warmup",
            self.job.config.model,
        )

    def _shuffled(self, rollouts: Rollouts) -> float:
        """Mean score of the responses held against the next sample's prompt: the base rate, if the reward needs it."""
        prompts = [s.prompt for s in rollouts.samples]
        others = prompts[self.job.config.data.samples_per_prompt :] + prompts[: self.job.config.data.samples_per_prompt]
        scores = [self.task.score_tokens(p, r) for p, r in zip(others, rollouts.responses, strict=True)]
        return sum(scores) / len(scores)

    # -- what a step says ----------------------------------------------------------------------------------------

    def _facts(self, record: StepRecord, batch: Batch, rollouts: Rollouts, reference: Tensor, old: Tensor) -> None:
        scores = torch.tensor(rollouts.scores, dtype=torch.float64)
        lengths = batch.response_lengths.double()
        tokens = int(batch.prompt_lengths.sum() + batch.response_lengths.sum())
        slots = len(self.job.pool.numbers)
        limit = response_limit(self.job.config.data, record.step)
        kl = kl_divergence(old, reference, "k3")[batch.mask > 0]
        m = record.metrics
        m["training/global_step"] = float(record.step)
        for name, value in record.seconds.items():
            m[f"timing_s/{name}"] = value
        m["critic/score/mean"], m["critic/score/count"] = float(scores.mean()), float(len(scores))
        m["critic/score/std"] = float(scores.std()) if len(scores) > 1 else 0.0
        m["critic/score/shuffled_mean"] = self._shuffled(rollouts)
        m["critic/score/max"], m["critic/score/min"] = float(scores.max()), float(scores.min())
        m["response_length/mean"], m["response_length/max"] = float(lengths.mean()), float(lengths.max())
        m["response_length/min"], m["response_length/limit"] = float(lengths.min()), float(limit)
        m["perf/row_width_tokens"] = float(batch.width_tokens)
        m["response_length/clip_ratio"] = float(
            sum(len(r) == limit and r[-1] != self.task.tokenizer.eos_id for r in rollouts.responses)
            / len(rollouts.responses)
        )
        m["prompt_length/mean"] = float(batch.prompt_lengths.double().mean())
        m["critic/advantages/mean"] = float(batch.columns["advantages"][batch.mask > 0].mean())
        m["critic/returns/mean"] = float(batch.columns["returns"][batch.mask > 0].mean())
        m["critic/values/mean"] = float(batch.columns["values"][batch.mask > 0].mean())
        m["actor/ref_kl"] = float(kl.mean()) if kl.numel() else 0.0
        m["perf/total_num_tokens"] = float(tokens)
        m["perf/time_per_step"] = record.seconds["step"]
        m["perf/throughput"] = tokens / (record.seconds["step"] * slots)
        for name in sorted({n for row in record.updates for n in row if "/" in n and not n.endswith("/rng")}):
            rows = [float(row[name]) for row in record.updates if name in row]
            m[name] = sum(rows) / len(rows)
        if record.sync is not None:
            m["transition/sync_planned_bytes"] = float(record.sync.planned_bytes)
            m["transition/sync_counted_bytes"] = float(record.sync.counted_bytes)
            m["transition/sync_staged_bytes"] = float(record.sync.staged_bytes)


_TASKS: dict[tuple[object, ...], Task] = {}


def task_of(
    name: str,
    options: dict[str, object],
    seed: int,
    template: str,
    stream: str,
    model: ModelConfig | None = None,
) -> Task:
    """The task, in the tokens of `model`'s folder (by default bytes); made once for the same arguments."""
    folder, vocab = (model.folder, model.vocab) if model else ("", 0)
    key = (name, repr(sorted(options.items())), seed, template, stream, folder, vocab)
    if key not in _TASKS:
        tokenizer = tokenizer_of(folder, vocab)
        _TASKS[key] = Task(name, options, seed, template=template, stream=stream, tokenizer=tokenizer)
    return _TASKS[key]
