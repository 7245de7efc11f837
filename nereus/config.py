"""The configuration of a run: frozen records only; `nereus.cli.load` fills them from YAML with dotted overrides.

`nereus.validate` says whether the values fit together; here are the values and their defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Who and where: the run's name, its folder's parent, its seed, its number of PPO steps."""

    name: str = "run"
    folder: str = "runs"
    seed: int = 1
    steps: int = 20
    group: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only model with RMS norms, rotary embeddings and gated MLPs, in the words of its HF config.

    `nereus.catalogue` reads one from a Hugging Face configuration and says which architecture the values make: biases
    of q, k and v make Qwen2, norms of q and k Qwen3; with `experts` (each with `expert_ffn`, `experts_per_token` of
    them at a time, in every decoder layer but `dense_layers`) Qwen3-MoE with those norms and Mixtral without; else
    Llama. `rope_factor` above 1 is Llama 3.1's scaling of long wavelengths. A run creates its model from its seed, or
    takes the one in `folder`, a Hugging Face folder or an imported checkpoint, which then gives the other values. The
    default vocabulary is the byte tokenizer's.
    """

    folder: str = ""
    layers: int = 4
    hidden: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    ffn: int = 384
    vocab: int = 259
    dtype: str = "float32"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    init_std: float = 0.02
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseStepConfig:
    """From step `step` on a response has at most `max_response_tokens`."""

    step: int
    max_response_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The task (a reasoning-gym data set) and the size of a step's batch.

    A response has at most `max_response_tokens`, until `response_schedule` says otherwise from a step on.
    """

    task: str = "chain_sum"
    task_options: dict[str, object] = field(default_factory=dict[str, object])
    prompt_template: str = "{question}"
    prompts_per_step: int = 16
    samples_per_prompt: int = 4
    max_prompt_tokens: int = 128
    max_response_tokens: int = 8
    response_schedule: tuple[ResponseStepConfig, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """How vLLM samples."""

    temperature: float = 1.0
    kv_cache_bytes: int = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """PPO: advantages, losses and optimizers."""

    adv_estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    whiten_advantages: bool = True
    kl_coef: float = 0.0
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    dual_clip_ratio: float = 3.0
    value_clip: float = 0.2
    entropy_coef: float = 0.0
    loss_agg_mode: str = "token-mean"
    mini_batches: int = 2
    epochs: int = 1
    actor_lr: float = 1e-3
    critic_lr: float = 1e-3
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupConfig:
    """Supervised warm-up of the actor before PPO, so that rewards are not all zero.

    `wrong_share` of the answers' bytes are wrong on purpose: the model starts unsure, and PPO has something to sharpen.
    `lr` is reached in a straight line over the first `ramp_steps` steps.
    """

    steps: int = 100
    samples: int = 64
    lr: float = 2e-3
    ramp_steps: int = 5
    wrong_share: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetStepConfig:
    """From step `step` on the fleet has `slots` slots: the last ones leave, or as many new ones are started.

    A job that has no plan without the slots that leave stands still until they are back, `away_seconds` of the entry
    that gives them back, or by default the steps between at the pace of its last ones.
    """

    step: int
    slots: int
    away_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """The slots: how many, and the memory budget of each above the process after its imports.

    `host_bytes` of a node's memory may hold snapshots while a plan changes. `on_loss` says what a dead slot means:
    shrink goes on with the slots that are left, stop ends the run. `schedule` removes and returns slots on purpose.
    In a Ray cluster that RAY_ADDRESS names slots outlive a killed driver for `reattach_seconds` (0: not at all), in which
    `nereus resume` takes them over.
    """

    slots: int = 4
    slot_budget_bytes: int = 1 << 30
    host_bytes: int = 4 << 30
    on_loss: str = "shrink"
    schedule: tuple[FleetStepConfig, ...] = ()
    start_timeout_seconds: float = 300.0
    phase_timeout_seconds: float = 300.0
    reattach_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferConfig:
    """State movement: staging on a slot never exceeds a bucket (send and receive halves together).

    Of the budget a bucket is kept free. A smaller one than the default makes more messages and more rounds of the same bytes.
    """

    bucket_bytes: int = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """How one model-stage is cut. `slots` and `shares` default to the first slots and to equal shares.

    `pipeline` gives decoder layers per pipeline rank (default: even). `distributed_optimizer` shards moments and
    masters over DP. `micro_batch` is in samples. `cp` cuts sequences, `ep` spreads experts over ranks and `etp` cuts
    each expert (default: as `tp`); `order` is the order of ranks, fastest first. `keep: nothing` has an inference stage
    wait in host memory between its phases.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = "tp-cp-ep-dp-pp"
    pipeline: tuple[int, ...] | None = None
    slots: tuple[int, ...] | None = None
    shares: tuple[int, ...] | None = None
    micro_batch: int = 8
    distributed_optimizer: bool = True
    keep: str = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """One `StageConfig` for every model-stage."""

    actor_train: StageConfig = field(default_factory=StageConfig)
    actor_generate: StageConfig = field(default_factory=StageConfig)
    critic_train: StageConfig = field(default_factory=StageConfig)
    reference_infer: StageConfig = field(default_factory=StageConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanChange:
    """Stages to cut anew; a stage left out stays as it is."""

    actor_train: StageConfig | None = None
    actor_generate: StageConfig | None = None
    critic_train: StageConfig | None = None
    reference_infer: StageConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeConfig:
    """A scripted change of plan: carried out before step `step` begins (steps count from 1)."""

    step: int
    plan: PlanChange


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints of the run, below its folder: after each `every_steps` steps (0: none while it runs) and at its end.

    The end is the last step or an orderly stop. The last `keep_count` are kept; with 0 nothing is saved at all.
    """

    every_steps: int = 0
    keep_count: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """The probe at the start: at most about `seconds` of timed work on the slots; 0 takes the catalogue's figures."""

    seconds: float = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerConfig:
    """W&B: `auto` is online when the user is logged in and offline otherwise; also `offline`, `online`, `off`."""

    wandb: str = "auto"
    project: str = "nereus"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlansConfig:
    """Layouts that the controller may use, as shell patterns over "stage layout", such as "actor_train TP2*".

    Of a stage that `allow` names one of its patterns has to match; no stage may match `deny`.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NereusConfig:
    """Who changes the plan: `policy` is script (the changes above), nereus, fixed, dp-scaling or restart.

    With `divisible` dp-scaling has only numbers of replicas that divide a batch, as usual frameworks do. `freeze` and
    `max_transitions` bar changes that are not forced; with `dry_run` decisions are only written down. A search visits
    at most `search_nodes` plans.
    """

    policy: str = "script"
    divisible: bool = True
    freeze: bool = False
    max_transitions: int | None = None
    plans: PlansConfig = field(default_factory=PlansConfig)
    dry_run: bool = False
    search_nodes: int = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run is; its resolved form is written beside the run as config.yaml."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    changes: tuple[ChangeConfig, ...] = ()
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    nereus: NereusConfig = field(default_factory=NereusConfig)
