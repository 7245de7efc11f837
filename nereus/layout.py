"""How a model-stage is cut over slots: Layout, StagePlan, Plan."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Literal

from nereus.config import Config, ModelConfig, PlanChange, StageConfig
from nereus.model import VOCAB_ALIGN, is_sparse, round_up

Stage = Literal["train", "generate", "infer"]
STAGES = ("actor_train", "actor_generate", "critic_train", "reference_infer")
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
"""Orders of ranks, the fastest dimension first: Megatron's default, and the one that keeps pipelines together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's place in each parallel dimension; of its layout `tp`, `cp`, `pp` and `dp` say which rank it is.

    For experts the same ranks are counted anew: `etp` within an expert's tensor group, `ep` among the groups that
    share out the experts, `edp` among the replicas of those. They follow from the other four and the layout.
    """

    tp: int
    pp: int
    dp: int
    cp: int = 0
    ep: int = field(default=0, compare=False)
    etp: int = field(default=0, compare=False)
    edp: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Degrees of parallelism; `pipeline` holds decoder layers per pipeline rank.

    Tensor (`tp`), pipeline (`pp`), data (`dp`) and context (`cp`: sequences are cut, weights are not). `ep` spreads the
    experts of a layer over ranks and `etp` cuts each expert (None: as `tp`); both count the ranks of one pipeline rank
    anew, so that `expert_dp` replicas of the experts remain. Ranks are numbered as Megatron's RankGenerator does
    (parallel_state.py, 0.16): in `order`, the fastest first, with ep = 1 outside experts and cp = 1 for them.
    """

    tp: int
    pp: int
    dp: int
    pipeline: tuple[int, ...]
    distributed_optimizer: bool = True
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = ORDERS[0]

    @property
    def ranks(self) -> int:
        """How many slots the layout takes."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """In how many parts an expert is cut."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """How many replicas of each expert there are; at least 1, also where the degrees do not fit."""
        return max(self.ranks // (self.expert_tp * self.ep * self.pp), 1)

    @property
    def optimizer_ranks(self) -> int:
        """Over how many ranks the distributed optimizer shards what is not of an expert."""
        return self.dp * self.cp

    def optimizer_rank(self, at: Coordinates) -> int:
        """The index of a rank in its dp-cp group, which shards the optimizer: cp counts faster in either order."""
        return at.cp + self.cp * at.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        if self.order == ORDERS[0]:
            pp, within = divmod(rank, self.tp * self.cp * self.dp)
            dp, edp = within // (self.tp * self.cp), within // (self.expert_tp * self.ep) % self.expert_dp
        else:
            dp, within = divmod(rank, self.tp * self.cp * self.pp)
            pp = within // (self.tp * self.cp)
            edp = rank // (self.expert_tp * self.ep * self.pp) % self.expert_dp
        return Coordinates(
            tp=rank % self.tp,
            pp=pp,
            dp=dp,
            cp=rank // self.tp % self.cp,
            ep=rank // self.expert_tp % self.ep,
            etp=rank % self.expert_tp,
            edp=edp,
        )

    def rank(self, at: Coordinates) -> int:
        """The rank that stands there."""
        outer = at.dp + self.dp * at.pp if self.order == ORDERS[0] else at.pp + self.pp * at.dp
        return at.tp + self.tp * (at.cp + self.cp * outer)

    def layers(self, pp_rank: int) -> range:
        """The decoder layers of a pipeline rank."""
        first = sum(self.pipeline[:pp_rank])
        return range(first, first + self.pipeline[pp_rank])

    def __str__(self) -> str:
        uneven = f"({'/'.join(map(str, self.pipeline))})" if len(set(self.pipeline)) > 1 else ""
        context = f"·CP{self.cp}" if self.cp > 1 else ""
        experts = f"·EP{self.ep}" if self.ep > 1 else ""
        if self.expert_tp != self.tp:
            experts += f"·ETP{self.expert_tp}"
        order = f" ({self.order})" if self.order != ORDERS[0] and self.pp > 1 and self.dp > 1 else ""
        return f"TP{self.tp}{context}·PP{self.pp}{uneven}·DP{self.dp}{experts}{order}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One model-stage's Layout, the slots of its ranks in order, and how a mini-batch's samples are shared.

    `shares` are samples per DP replica of one mini-batch (train), of the batch (infer, generate). `keep` says what stays
    on the slots between the stage's phases: all, or nothing (it waits in host memory).
    """

    model: str
    stage: Stage
    layout: Layout
    slots: tuple[int, ...]
    shares: tuple[int, ...]
    micro_batch: int
    keep: str = "all"

    def rank_of(self, slot: int) -> int | None:
        """The rank that `slot` takes, None when it idles in this stage."""
        return self.slots.index(slot) if slot in self.slots else None

    def replica_slots(self, dp_rank: int) -> tuple[int, ...]:
        """The slots of one DP replica, in rank order, its context-parallel ranks included."""
        return tuple(s for r, s in enumerate(self.slots) if self.layout.coordinates(r).dp == dp_rank)

    def output_slot(self, dp_rank: int) -> int:
        """The slot whose results speak for a replica: last pipeline rank, first tensor and context rank."""
        return self.slots[self.layout.rank(Coordinates(tp=0, pp=self.layout.pp - 1, dp=dp_rank))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The global plan: a StagePlan for every model-stage."""

    actor_train: StagePlan
    actor_generate: StagePlan
    critic_train: StagePlan
    reference_infer: StagePlan

    def stages(self) -> tuple[tuple[str, StagePlan], ...]:
        """(name, StagePlan) of every model-stage, in a fixed order."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))

    @property
    def plan_id(self) -> str:
        """A short name that is a function of the plan's content."""
        return _named(self)

    def __str__(self) -> str:
        train, critic, reference = map(_cut_text, (self.actor_train, self.critic_train, self.reference_infer))
        engines = self.actor_generate.layout
        return f"train {train} · critic {critic} · ref {reference} · gen {engines.dp}xTP{engines.tp}{_shares_text(self.actor_generate)}"


@lru_cache(maxsize=256)
def _named(plan: Plan) -> str:
    """On a thousand slots a plan's text takes longer than finding it again, and a name is asked for again and again."""
    return hashlib.sha256(repr(plan).encode()).hexdigest()[:10]


def _cut_text(stage: StagePlan) -> str:
    return f"{stage.layout}{_shares_text(stage)}"


def _shares_text(stage: StagePlan) -> str:
    """The shares where they are not as equal as can be."""
    if sorted(stage.shares) == sorted(equal_shares(sum(stage.shares), stage.layout.dp)):
        return ""
    return f"[{'/'.join(map(str, stage.shares))}]"


Problem = tuple[str, object, str]
"""The degree that does not fit, its value, and what was expected."""


def layout_problem(config: ModelConfig, layout: Layout, stage: Stage = "train") -> str | None:
    """Why `layout` cannot hold the model in that kind of stage, or None: names the degree and what would do."""
    found = first_problem(config, layout, stage)
    return None if found is None else f"{found[0]} = {found[1]}: {found[2]}"


def first_problem(config: ModelConfig, layout: Layout, stage: Stage = "train") -> Problem | None:
    """The first thing about `layout` that does not fit the model in that kind of stage, or None.

    Training and inference cut by Megatron's rules, generation by vLLM's: there a KV head may stand on several ranks,
    there is neither pipeline nor context parallelism, and `ep` is 1 or the engine's `tp`.
    """
    return next(_layout_problems(config, layout, stage), None)


def _layout_problems(c: ModelConfig, layout: Layout, stage: Stage) -> Iterator[Problem]:
    degrees = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "ep": layout.ep}
    degrees["etp"] = layout.expert_tp
    yield from ((name, degree, "expected at least 1") for name, degree in degrees.items() if degree < 1)
    if layout.order not in ORDERS:
        yield "order", layout.order, f"expected one of {', '.join(ORDERS)}"
    padded = round_up(c.vocab, VOCAB_ALIGN)
    counts = {"heads": c.heads, "ffn": c.ffn if not all_sparse(c) else 0, "padded vocabulary rows": padded}
    if stage != "generate" or layout.tp < c.kv_heads:
        counts["kv_heads"] = c.kv_heads
    yield from _divisions("tp", layout.tp, counts)
    if stage == "generate" and layout.tp % c.kv_heads and c.kv_heads % layout.tp:
        yield "tp", layout.tp, f"expected a divisor or a multiple of kv_heads = {c.kv_heads}"
    fits = len(layout.pipeline) == layout.pp and min(layout.pipeline, default=0) >= 1
    if not (fits and sum(layout.pipeline) == c.layers):
        expected = f"expected {layout.pp} entries (pp), each at least 1, with the sum layers = {c.layers}"
        yield "pipeline", list(layout.pipeline), expected
    yield from _generation_problems(c, layout) if stage == "generate" else _expert_problems(c, layout)


def all_sparse(config: ModelConfig) -> bool:
    """Whether every decoder layer has experts, so that no layer has a plain MLP."""
    return all(is_sparse(config, layer) for layer in range(config.layers))


def _divisions(name: str, degree: int, counts: dict[str, int]) -> Iterator[Problem]:
    for what, count in counts.items():
        if count % degree:
            divisors = ", ".join(str(d) for d in range(1, count + 1) if all(n % d == 0 for n in counts.values()))
            yield name, degree, f"expected a divisor of {what} = {count}: {divisors} would do"


def _generation_problems(c: ModelConfig, layout: Layout) -> Iterator[Problem]:
    for name, degree in (("pp", layout.pp), ("cp", layout.cp)):
        if degree != 1:
            yield name, degree, "expected 1: vLLM generates here with tp, ep and dp alone"
    if layout.ep not in (1, layout.tp):
        yield "ep", layout.ep, f"expected 1 or tp = {layout.tp}: an engine spreads experts over all its ranks"
    if layout.ep > 1 and not c.experts:
        yield "ep", layout.ep, "expected 1: the model has no experts"
    if c.experts:
        yield from _divisions("ep", layout.ep, {"experts": c.experts})
        yield from _divisions("tp", layout.tp if layout.ep == 1 else 1, {"expert_ffn": c.expert_ffn})


def _expert_problems(c: ModelConfig, layout: Layout) -> Iterator[Problem]:
    if layout.order != ORDERS[0] and layout.pp > 1 and layout.expert_tp * layout.ep != layout.tp * layout.cp:
        same = f"{ORDERS[0]}, or etp * ep = tp * cp = {layout.tp * layout.cp}"
        yield "order", layout.order, f"expected {same}: Megatron has one pipeline group for experts and the rest"
    if not c.experts:
        if layout.ep > 1:
            yield "ep", layout.ep, "expected 1: the model has no experts"
        if layout.etp not in (None, layout.tp):
            yield "etp", layout.etp, f"expected null or tp = {layout.tp}: the model has no experts"
        return
    yield from _divisions("ep", layout.ep, {"experts": c.experts})
    yield from _divisions("etp", layout.expert_tp, {"expert_ffn": c.expert_ffn})
    if layout.ep == 1 and layout.expert_tp != layout.tp:
        expected = f"expected null or tp = {layout.tp} where ep = 1: Megatron then reduces experts as all else"
        yield "etp", layout.expert_tp, expected
    group = layout.ranks // layout.pp
    if group % (layout.expert_tp * layout.ep):
        product = f"etp * ep = {layout.expert_tp * layout.ep}, a divisor of tp * cp * dp = {group}"
        yield "ep", layout.ep, f"expected {product}: experts take the ranks of one pipeline rank"


def equal_shares(samples: int, replicas: int) -> tuple[int, ...]:
    """Samples per replica, as equal as possible, larger first: equal_shares(8, 3) == (3, 3, 2)."""
    base, more = divmod(samples, replicas)
    return tuple(base + (replica < more) for replica in range(replicas))


def batch_shares(stage: StagePlan, samples: int) -> tuple[int, ...]:
    """`samples` in the proportion of the plan's shares: largest remainders get what whole numbers leave over.

    Shares (6, 2) of 12 samples are (9, 3); with all shares 0 the parts are equal.
    """
    total = sum(stage.shares)
    if not total:
        return equal_shares(samples, stage.layout.dp)
    parts = [share * samples // total for share in stage.shares]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-(stage.shares[i] * samples % total), i))
    for index in by_remainder[: samples - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


def micro_batch_rows(samples: int, most: int) -> int:
    """Rows of every micro-batch of a replica: no more micro-batches than `most` rows each need, and as even as they can be.

    10 samples in micro-batches of at most 8 are two of 5. At least 1 row, also where there is no sample.
    """
    return max(1, -(-samples // max(1, -(-samples // most))))


def _stage_plan(config: Config, name: str, stage: StageConfig) -> StagePlan:
    model, kind = name.split("_")
    layout = Layout(
        tp=stage.tp,
        pp=stage.pp,
        dp=stage.dp,
        pipeline=stage.pipeline or equal_shares(config.model.layers, stage.pp),
        distributed_optimizer=stage.distributed_optimizer and kind == "train",
        cp=stage.cp,
        ep=stage.ep,
        etp=stage.etp,
        order=stage.order,
    )
    samples = config.data.prompts_per_step * config.data.samples_per_prompt
    if kind == "train":
        samples //= config.algorithm.mini_batches
    return StagePlan(
        model=model,
        stage=kind,  # type: ignore[arg-type]  # the names of STAGES end in a Stage
        layout=layout,
        slots=stage.slots or tuple(range(layout.ranks)),
        shares=stage.shares or equal_shares(samples, stage.dp),
        micro_batch=stage.micro_batch,
        keep=stage.keep,
    )


def first_plan(config: Config) -> Plan:
    """The plan that a run starts with."""
    return Plan(**{name: _stage_plan(config, name, getattr(config.plan, name)) for name in STAGES})


def changed_plan(plan: Plan, change: PlanChange, config: Config) -> Plan:
    """The plan after a scripted change: named stages are cut anew, the others stay."""
    stages = {name: getattr(change, name) for name in STAGES if getattr(change, name) is not None}
    return replace(plan, **{name: _stage_plan(config, name, stage) for name, stage in stages.items()})
