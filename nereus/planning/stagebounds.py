"""Lower bounds of a stage's seconds: of each choice before it is evaluated, and of every one on some slots.

They rest on one micro-batch of the whole model on one rank, for each tensor parallelism and size of micro-batch. Some rank
of a pipeline has at least its even part of that, all other ranks together have the rest. What is left out is not negative:
sends between pipeline ranks, the part of collectives that may be hidden, what comes over PCIe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil

import numpy as np
import numpy.typing as npt

from nereus.costs.shape import Shape
from nereus.costs.training import HIDDEN_SHARE, STEP_SECONDS, Recompute, forward_terms, train_terms
from nereus.layout import Layout, first_problem
from nereus.planning.evaluate import Problem
from nereus.planning.ground import Ground
from nereus.planning.job import PHASES_OF
from nereus.planning.plan import StageChoice
from nereus.planning.space import LONG_TOKENS, Space, micro_batches, splits
from nereus.planning.stagework import batch_of

OF_PIPELINE = frozenset({"dp", "optimizer", "bubble", "pp", "step"})
"""Terms that do not follow from one rank's micro-batch."""
UNDER = 1 - 1e-12
"""Keeps a bound below what it bounds whatever the order of the sums."""
TIE_SHARE = 1e-9
"""Ranks that take so nearly the same may be told apart either way."""
MOST_BACKWARD_SHARE, MOST_FORWARD_SHARE = 3 / 4, 1 / 3
"""The most of a micro-batch's seconds that is backward, and forward, with any recomputation."""
LEVELS = 3
"""So many numbers of micro-batches above the least are told apart by the replicas that they need."""
RANKS_MOST = 1 << 32

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Kind = tuple[int, int, int, int, Recompute]
"""(tp, cp, ep, micro-batch, recomputation): what one rank's micro-batch follows from."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Choices as arrays: the index of each one's Kind, its pipeline ranks, replicas and whether it is fully sharded.

    `least_dp` has no more replicas than `dp` and as many micro-batches in training; collectives count over it. `first`
    and `last` are the layers of the fullest rank before the last, and of the last; None: any pipeline of `pp` ranks.
    """

    kind: Integers
    pp: Integers
    dp: Integers
    least_dp: Integers
    full: npt.NDArray[np.bool_]
    first: Integers | None = None
    last: Integers | None = None


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One micro-batch of each Kind: seconds as terms (`plain`) and as believed (`cost`) of layers and of the head.

    `ratio` is the least believed part of a term's second in any layer. `layers` is their number where all are alike, else 0.
    """

    layers: int
    layers_plain: Floats
    head_plain: Floats
    head_cost: Floats
    ratio: Floats

    def least(self, rows: Rows, counts: Integers, bubble: float) -> tuple[Floats, Floats]:
        """(believed seconds, the slowest rank's as terms in one of them) of so many micro-batches through pipelines.

        The slowest rank has its part, the rest is waited for. Of a pipeline that is not known the seconds are linear in
        how much the slowest rank has between the even part and all, so one of both ends is the least.
        """
        layers, head = self.layers_plain[rows.kind], self.head_plain[rows.kind]
        whole, ratio, head_cost = layers + head, self.ratio[rows.kind], self.head_cost[rows.kind]
        if rows.first is not None and rows.last is not None and self.layers:
            front, back = rows.first * layers / self.layers, rows.last * layers / self.layers
            before: Floats = ratio * front
            last: Floats = ratio * back + head_cost
            part: Floats = np.maximum(front, back + head)
            alike = np.abs(front - back - head) <= TIE_SHARE * part
            own: Floats = np.where(alike, np.minimum(before, last), np.where(front > back + head, before, last))
            return np.multiply(own, counts, dtype=np.float64) + bubble * (whole - part), part

        def reached(part: Floats) -> Floats:
            last = ratio * np.maximum(part - head, 0.0) + head_cost
            own: Floats = np.where(rows.pp == 1, last, np.minimum(ratio * part, last))
            return np.multiply(own, counts, dtype=np.float64) + np.where(rows.pp == 1, 0.0, bubble * (whole - part))

        least = self._part(rows, layers, head)
        return np.minimum(reached(least), reached(whole)), least

    def _part(self, rows: Rows, layers: Floats, head: Floats) -> Floats:
        """Seconds as terms that the slowest rank has at least: whole layers, the head on the last rank.

        Either it is a rank before the last and has the even part rounded up, or these have it rounded down.
        """
        if not self.layers:
            return (layers + head) / rows.pp
        each = layers / self.layers
        even = (layers + head) / rows.pp / each
        up, down = np.ceil(even - TIE_SHARE), np.floor(even + TIE_SHARE)
        return np.where(
            rows.pp == 1,
            layers + head,
            np.maximum(
                np.minimum(up * each, (self.layers - down * (rows.pp - 1)) * each + head), (layers + head) / rows.pp
            ),
        )


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """What a stage's bounds on one kind of ground follow from."""

    kinds: dict[Kind, int]
    degrees: Integers  # [kinds, 4]: tp, cp, ep, micro-batch
    forward: _Pass
    update: _Pass | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Least:
    """Seconds that a stage takes at least: in the block infer, in the block train, in both together."""

    infer_seconds: float
    train_seconds: float
    seconds: float


@dataclass(kw_only=True)
class StageBounds:
    """Bounds of a problem's stages, kept by stage and kind of ground."""

    problem: Problem
    space: Space
    once: dict[tuple[object, ...], tuple[float, ...]] = field(
        default_factory=dict[tuple[object, ...], tuple[float, ...]]
    )
    known: dict[tuple[object, ...], _Costs] = field(default_factory=dict[tuple[object, ...], _Costs])
    leasts: dict[tuple[object, ...], Least] = field(default_factory=dict[tuple[object, ...], Least])
    works: dict[tuple[object, ...], Least] = field(default_factory=dict[tuple[object, ...], Least])
    links: dict[tuple[object, ...], tuple[float, float]] = field(
        default_factory=dict[tuple[object, ...], tuple[float, float]]
    )
    fitting: dict[tuple[object, ...], bool] = field(default_factory=dict[tuple[object, ...], bool])

    # -- one micro-batch ----------------------------------------------------------------------------------------------

    def costs(self, name: str, ground: Ground) -> _Costs:
        """One rank's micro-batch of every Kind that the stage's model admits."""
        shape, trains = self.problem.job.model(name).shape, len(PHASES_OF[name]) > 1
        key = (shape, trains, ground.devices, max(ground.domain_slots))
        if key not in self.known:
            kinds = list(self._kinds(name, ground))
            forward = self._pass(name, ground, kinds, backward=False)
            update = self._pass(name, ground, kinds, backward=True) if trains else None
            degrees = np.array([kind[:4] for kind in kinds], dtype=np.int64).reshape(-1, 4)
            index = {kind: at for at, kind in enumerate(kinds)}
            self.known[key] = _Costs(kinds=index, degrees=degrees, forward=forward, update=update)
        return self.known[key]

    def _kinds(self, name: str, ground: Ground) -> Iterator[Kind]:
        job, config = self.problem.job, self.problem.job.model(name).config
        trains = len(PHASES_OF[name]) > 1
        spreads = [1, *(2**i for i in range(1, config.experts.bit_length()) if 2**i <= config.experts)]
        for tp in range(1, max(ground.domain_slots) + 1):
            alone = Layout(tp=tp, pp=1, dp=1, pipeline=(config.layers,))
            if first_problem(config, alone, "train" if trains else "infer") is not None:
                continue
            for cp in (1, 2, 4, 8) if job.longest_tokens >= LONG_TOKENS else (1,):
                for ep, micro_batch in product(spreads, micro_batches(job, self.space)):
                    for recompute in self.space.recomputes if trains else self.space.recomputes[:1]:
                        yield tp, cp, ep, micro_batch, recompute

    def _pass(self, name: str, ground: Ground, kinds: Sequence[Kind], *, backward: bool) -> _Pass:
        shape = self.problem.job.model(name).shape
        mixed = 0 < shape.dense_layers < shape.layers and shape.expert_count > 0
        pure = [replace(shape, dense_layers=0), replace(shape, dense_layers=shape.layers)] if mixed else [shape]
        table = np.zeros((4, len(kinds)))
        table[3] = np.inf
        for at, kind in enumerate(kinds):
            kind = kind if backward else (*kind[:4], "none")  # noqa: PLW2901 - only a backward recomputes
            plain, head, _, head_cost = self._once(shape, ground, kind, backward=backward)
            table[:3, at] = plain, head, head_cost
            for each in pure:
                layers, _, cost, _ = self._once(each, ground, kind, backward=backward)
                table[3, at] = min(table[3, at], cost / layers)
        return _Pass(
            layers=0 if mixed else shape.layers,
            layers_plain=table[0],
            head_plain=table[1],
            head_cost=table[2],
            ratio=table[3],
        )

    def _once(self, shape: Shape, ground: Ground, kind: Kind, *, backward: bool) -> tuple[float, ...]:
        """(layers, head) as terms and (layers, head) as believed, of one micro-batch on one rank."""
        key = (shape, ground.devices, max(ground.domain_slots), kind, backward)
        if key not in self.once:
            self.once[key] = self._asked_once(shape, ground, kind, backward=backward)
        return self.once[key]

    def _asked_once(self, shape: Shape, ground: Ground, kind: Kind, *, backward: bool) -> tuple[float, ...]:
        tp, cp, ep, micro_batch, recompute = kind
        layout = Layout(
            tp=tp, pp=1, dp=ep, pipeline=(shape.layers,), cp=cp, ep=ep, etp=1 if ep > 1 and tp > 1 else None
        )
        choice = StageChoice(layout=layout, micro_batch=micro_batch, recompute=recompute)
        batch = batch_of(self.problem.job, choice, ep * micro_batch)
        found = (train_terms if backward else forward_terms)(shape, layout, batch, ground.rates)
        head, known = found["head"], ground.coefficients
        layers = {term: value for term, value in found.items() if term not in OF_PIPELINE and term != "head"}
        return sum(layers.values()), head, ground.seconds(layers), known["head"] * head

    def rows(self, name: str, ground: Ground, degrees: Integers) -> Rows:
        """The choices of a StageList."""
        kinds, recomputes = self.costs(name, ground).kinds, self.space.recomputes
        found, at = np.unique(degrees[:, :5], axis=0, return_inverse=True)
        index = [kinds[tp, cp, ep, size, recomputes[how]] for tp, cp, ep, size, how in found.tolist()]
        pp, dp, full, first, last = degrees[:, 5:].T
        return Rows(
            kind=np.array(index, dtype=np.int64)[at.ravel()],
            pp=pp,
            dp=dp,
            least_dp=dp,
            full=full.astype(np.bool_),
            first=first,
            last=last,
        )

    def seconds(self, name: str, ground: Ground, rows: Rows) -> tuple[Floats, Floats]:
        """(infer, train) seconds that choices of the stage take at least."""
        job, costs = self.problem.job, self.costs(name, ground)
        known, fixed = ground.coefficients, ground.coefficients["step"] * STEP_SECONDS
        micro_batch = costs.degrees[rows.kind, 3]
        counts = _micro_batches(job.samples, rows.dp, micro_batch)
        infer = costs.forward.least(rows, counts, known["bubble"])[0] + fixed
        if costs.update is None:
            return infer * UNDER, np.zeros(len(infer))
        sequences, times = _mini_batch(job.samples, job.mini_batches), job.mini_batches * job.epochs
        counts = _micro_batches(sequences, rows.dp, micro_batch)
        train, busy = costs.update.least(rows, counts, known["bubble"])
        # where a slower rank would cost more than it hides, the least busy one hides least
        firm = counts * costs.update.ratio[rows.kind] >= known["bubble"] + HIDDEN_SHARE * known["dp"]
        hiding = np.where(firm, busy + self._sent(name, ground, rows), np.inf)
        train += fixed + self._replicas(job.model(name).shape, ground, costs.degrees[rows.kind], rows, hiding)
        return infer * UNDER, times * train * UNDER

    def _sent(self, name: str, ground: Ground, rows: Rows) -> Floats:
        """Seconds of a micro-batch's sends between pipeline ranks, at most."""
        job, degrees = self.problem.job, self.costs(name, ground).degrees[rows.kind]
        tokens = max(1, ceil(job.sample_tokens)) * degrees[:, 3] / degrees[:, 1]
        sent = 2 * tokens * job.model(name).shape.hidden / degrees[:, 0]
        wire = min(ground.rates.nic_bytes_per_second, ground.rates.link_bytes_per_second)
        return np.where(rows.pp > 1, 2 * (sent / wire + ground.rates.nic_seconds), 0.0)

    def _replicas(self, shape: Shape, ground: Ground, degrees: Integers, rows: Rows, hiding: Floats) -> Floats:
        """What collectives over replicas add where at most `hiding` hides them, and the optimizer's passes over its part."""
        tp, cp = degrees[:, 0], degrees[:, 1]
        experts = shape.expert_layers * shape.expert_count * shape.expert_parameters_count
        body = (shape.parameters_count - experts) / (tp * rows.pp)
        owned = shape.parameters_count / (tp * cp * rows.pp * rows.dp)
        local = np.where(rows.full, owned, body)
        optimizer = (30 * owned + 12 * local) / ground.rates.memory_bytes_per_second
        reduced, gathered = self._exchanged(ground, tp, cp * rows.least_dp, body)
        exposed = reduced - HIDDEN_SHARE * np.minimum(reduced, MOST_BACKWARD_SHARE * hiding)
        exposed += gathered - HIDDEN_SHARE * np.minimum(gathered, MOST_FORWARD_SHARE * hiding)
        known = ground.coefficients
        return known["dp"] * exposed + known["optimizer"] * optimizer

    def _exchanged(self, ground: Ground, tp: Integers, ranks: Integers, parameters: Floats) -> tuple[Floats, Floats]:
        """Seconds of reducing gradients, and of gathering weights, of a rank's parameters over `ranks`, nothing hidden."""
        keys, at = np.unique(tp * RANKS_MOST + ranks, return_inverse=True)
        table = np.array([self._link(ground, *divmod(key, RANKS_MOST)) for key in keys.tolist()]).reshape(-1, 2)
        latency, per_byte = table[at].T
        per_number = per_byte * (ranks - 1) / ranks * parameters
        return latency + 4 * per_number, latency + 2 * per_number

    def _link(self, ground: Ground, tp: int, ranks: int) -> tuple[float, float]:
        """(seconds, seconds a byte) of a collective over `ranks` replicas of `tp` ranks."""
        key = (ground.devices, max(ground.domain_slots), tp, ranks)
        if key not in self.links:
            per_node = max(1, ground.rates.slots_per_node // tp)
            latency = ground.rates.collective_seconds(0.0, ranks, per_node)
            self.links[key] = latency, (ground.rates.collective_seconds(1e9, ranks, per_node) - latency) / 1e9
        return self.links[key]

    # -- a stage on slots ---------------------------------------------------------------------------------------------

    def least(self, name: str, ground: Ground, slots: int | None = None) -> Least:
        """What the stage takes at least on so many slots of this kind (all of the ground), whatever else is there."""
        count = len(ground.slots) if slots is None else slots
        key = (name, ground.devices, max(ground.domain_slots), ground.room_bytes, count)
        if key not in self.leasts:
            rows = self._every(name, ground, count)
            infer, train = self.seconds(name, ground, rows)
            self.leasts[key] = Least(
                infer_seconds=self._first(name, ground, rows, infer),
                train_seconds=self._first(name, ground, rows, train),
                seconds=self._first(name, ground, rows, infer + train),
            )
        return self.leasts[key]

    def work(self, name: str, ground: Ground) -> Least:
        """Slot-seconds that the stage needs at least on slots of this kind, however many they are."""
        job, costs = self.problem.job, self.costs(name, ground)
        tp, cp, _, micro_batch = costs.degrees.T
        each = tp * cp / micro_batch
        passes = [(costs.forward, float(job.samples))]
        if costs.update is not None:
            passes.append((costs.update, float(job.samples * job.epochs)))
        alone = [
            count
            * each
            * np.minimum(one.ratio * (one.layers_plain + one.head_plain), one.ratio * one.layers_plain + one.head_cost)
            for one, count in passes
        ]
        infer, train = alone[0], alone[1] if len(alone) > 1 else np.zeros(len(each))
        return Least(
            infer_seconds=UNDER * float(infer.min()),
            train_seconds=UNDER * float(train.min()),
            seconds=UNDER * float((infer + train).min()),
        )

    def quick(self, name: str, ground: Ground, slots: int) -> Least:
        """As `least`, from what the stage takes on all slots of the fleet and from its slot-seconds: asked for at no cost."""
        key = (name, ground.devices, max(ground.domain_slots))
        if key not in self.works:
            self.works[key] = self.work(name, ground)
        work = self.works[key]
        return Least(
            infer_seconds=work.infer_seconds / slots,
            train_seconds=work.train_seconds / slots,
            seconds=work.seconds / slots,
        )

    def _every(self, name: str, ground: Ground, count: int) -> Rows:
        """Every Kind and pipeline with as many replicas as `count` slots have room for; fewer ones by micro-batches.

        The last of the LEVELS stands for all that have more micro-batches.
        """
        job, costs = self.problem.job, self.costs(name, ground)
        layers = job.model(name).config.layers
        trains = costs.update is not None
        levels = LEVELS + 1 if trains else 1
        kinds, pp, level = (
            each.ravel()
            for each in np.meshgrid(
                np.arange(len(costs.degrees)), np.arange(1, layers + 1), np.arange(levels), indexing="ij"
            )
        )
        tp, cp, _, micro_batch = costs.degrees[kinds].T
        most = count // (tp * cp * pp)
        sequences = _mini_batch(job.samples, job.mini_batches) if trains else job.samples
        reached = np.maximum(most, 1)
        counts = _micro_batches(sequences, reached, micro_batch) + level
        needed = -(-sequences // (counts * micro_batch))  # replicas with which so many micro-batches are enough
        before = -(-sequences // np.maximum((counts - 1) * micro_batch, 1)) - 1
        dp = np.where(level == 0, reached, np.minimum(before, reached))
        least = np.where(level == levels - 1, 1, np.minimum(needed, reached)) if trains else dp
        there = (most >= 1) & (dp >= 1) & ((cp == 1) | (tp * cp <= count))
        full = (tp == 1) & (pp == 1) & ("full" in self.space.shardings)
        return Rows(kind=kinds[there], pp=pp[there], dp=dp[there], least_dp=least[there], full=full[there])

    def _first(self, name: str, ground: Ground, rows: Rows, seconds: Floats) -> float:
        """The least of the seconds whose row fits on a slot by itself."""
        left = seconds.copy()
        while len(left):
            at = int(left.argmin())
            if left[at] == np.inf or self._fits(name, ground, int(rows.kind[at]), int(rows.pp[at]), int(rows.dp[at])):
                return float(left[at])
            left[at] = np.inf
        return float("inf")

    def _fits(self, name: str, ground: Ground, kind: int, pp: int, dp: int) -> bool:
        """Whether some pipeline and sharding of these degrees fits with least residency; more replicas never need more."""
        key = (name, ground.devices, max(ground.domain_slots), kind, pp, dp)
        if key not in self.fitting:
            self.fitting[key] = any(
                self._judged(name, ground, choice) for choice in self._ways(name, ground, kind, pp, dp)
            )
        return self.fitting[key]

    def _ways(self, name: str, ground: Ground, kind: int, pp: int, dp: int) -> Iterator[StageChoice]:
        tp, cp, ep, micro_batch, recompute = list(self.costs(name, ground).kinds)[kind]
        keeps = self.problem.memory.keeps
        for pipeline in splits(self.problem.job.model(name).config.layers, pp):
            layout = Layout(tp=tp, pp=pp, dp=dp, pipeline=pipeline, cp=cp, ep=ep, etp=1 if ep > 1 and tp > 1 else None)
            for sharding in self.space.shardings:
                if sharding != "full" or (tp == pp == 1 and dp * cp > 1):
                    yield StageChoice(
                        layout=layout,
                        micro_batch=micro_batch,
                        recompute=recompute,
                        sharding=sharding,
                        keep=keeps[-1],
                    )

    def _judged(self, name: str, ground: Ground, choice: StageChoice) -> bool:
        sizes = self.problem.memory.stage(self.problem.job, name, choice)
        peak = max(sum(phase.values()) for phase in sizes.phases.values())
        return peak * (1 + self.problem.memory.margin_share) <= ground.room_bytes


def _mini_batch(samples: int, mini_batches: int) -> int:
    return max(1, ceil(samples / mini_batches))


def _micro_batches(sequences: int, dp: Integers, micro_batch: Integers) -> Integers:
    """Micro-batches of the fullest replica."""
    fullest = -(-sequences // dp)
    return np.maximum(-(-fullest // micro_batch), 1)
