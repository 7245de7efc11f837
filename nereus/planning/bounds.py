"""Lower bounds of a step that hold for every layout: the least arithmetic of a stage over the slots that it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nereus.costs.training import forward_terms, train_terms
from nereus.layout import Layout, first_problem
from nereus.planning.evaluate import Problem
from nereus.planning.ground import Ground
from nereus.planning.job import PHASES_OF
from nereus.planning.options import EngineTimes, engine_options
from nereus.planning.plan import StageChoice
from nereus.planning.space import Placement, Space
from nereus.planning.stagework import batch_of, framework_work, sync_work

LEFT_OUT = frozenset({"dp", "optimizer", "bubble", "pp", "ep", "step"})
"""Terms that some layout has none of."""

GroundOf = Callable[[tuple[int, ...]], Ground]


@dataclass(kw_only=True)
class Relaxation:
    """Bounds of one problem, kept by stage and kind of slot.

    A stage's slot-seconds are at least those of one slot group without pipeline and replicas at its best tensor
    parallelism and micro-batch: pipelines and replicas add waiting and collectives to the same work.
    """

    problem: Problem
    space: Space
    times: EngineTimes
    work: dict[tuple[str, tuple[str, ...], int], tuple[float, float]] = field(
        default_factory=dict[tuple[str, tuple[str, ...], int], tuple[float, float]]
    )
    engines: dict[tuple[object, ...], float] = field(default_factory=dict[tuple[object, ...], float])

    def slot_seconds(self, name: str, ground: Ground) -> tuple[float, float]:
        """(infer, train) seconds x slots that a stage needs at least on slots of this kind."""
        key = (name, ground.devices, max(ground.domain_slots))
        if key not in self.work:
            best = [float("inf"), float("inf")]
            for tp in range(1, max(ground.domain_slots) + 1):
                for ep in self._spreads(name):
                    for index, seconds in enumerate(self._alone(name, ground, tp, ep)):
                        best[index] = min(best[index], seconds)
            self.work[key] = (best[0], best[1])
        return self.work[key]

    def _spreads(self, name: str) -> list[int]:
        """Numbers of ranks that experts may be spread over: spread ones have more tokens each."""
        experts = self.problem.job.model(name).config.experts
        return [1, *(2**i for i in range(1, experts.bit_length()) if 2**i <= experts)]

    def _alone(self, name: str, ground: Ground, tp: int, ep: int) -> tuple[float, float]:
        """The least slot-seconds at this TP over micro-batches, or inf where the model cannot be cut so."""
        job, model = self.problem.job, self.problem.job.model(name)
        etp = 1 if ep > 1 and tp > 1 else None
        layout = Layout(tp=tp, pp=1, dp=ep, pipeline=(model.config.layers,), ep=ep, etp=etp)
        kind = "infer" if name.endswith("_infer") else "train"
        if first_problem(model.config, layout, kind) is not None:
            return float("inf"), float("inf")
        best = [float("inf"), float("inf")]
        for micro_batch in self.space.micro_batches:
            if micro_batch > 1 and micro_batch * job.sample_tokens > self.space.most_packed_tokens:
                continue
            batch = batch_of(job, StageChoice(layout=layout, micro_batch=micro_batch), ep * micro_batch)
            passes = [forward_terms(model.shape, layout, batch, ground.rates)]
            if len(PHASES_OF[name]) > 1:
                passes.append(train_terms(model.shape, layout, batch, ground.rates))
            counts = (job.samples, job.samples * job.epochs)
            for index, terms in enumerate(passes):
                kept = {term: value for term, value in terms.items() if term not in LEFT_OUT}
                best[index] = min(best[index], tp * counts[index] / micro_batch * ground.seconds(kept))
        return best[0], best[1] if len(PHASES_OF[name]) > 1 else 0.0

    def generation(self, ground: Ground) -> float:
        """The least seconds of generation with all memory of these slots; inf where no engine fits."""
        key = (ground.domain_slots, ground.devices)
        if key not in self.engines:
            options = engine_options(self.problem, ground)
            times = (self.times.seconds(option, ground, 0.0) for option in options)
            self.engines[key] = min(times, default=float("inf"))
        return self.engines[key]

    def placed(self, placement: Placement, ground_of: GroundOf) -> float:
        """A step of this placement takes at least this."""
        grounds = [ground_of(pool) for pool in placement.pools]
        infer, train = [0.0] * len(grounds), [0.0] * len(grounds)
        for name, pool in placement.pool_of:
            if name != "actor_generate":
                work = self.slot_seconds(name, grounds[pool])
                infer[pool] += work[0] / len(grounds[pool].slots)
                train[pool] += work[1] / len(grounds[pool].slots)
        engine = placement.of("actor_generate")
        generation = self.generation(grounds[engine])
        trained = placement.of("actor_train")
        joint = grounds[trained]
        if trained != engine:
            joint = ground_of(placement.pools[trained] + placement.pools[engine])
        sync = grounds[trained].seconds(sync_work(self.problem.job, joint.rates, one_domain=joint.one_domain))
        after = max(infer) + max(train)
        apart = sum(pool == engine for _, pool in placement.pool_of) == 1
        if apart and not self.problem.job.on_policy:
            return sync + grounds[trained].seconds(framework_work(self.problem.job)) + max(generation, after)
        return sync + grounds[trained].seconds(framework_work(self.problem.job)) + generation + after

    def anywhere(self, bounds: Sequence[float], ground_of: GroundOf) -> float:
        """A step of any placement, at any division of the slots, takes at least this.

        On equal slots: generation on all of them, then the work of all stages over all of them. On unequal ones what
        was listed counts.
        """
        slots = self.problem.terrain.ordered()
        ground = ground_of(slots)
        if len(ground.devices) > 1 or not self.problem.job.on_policy:
            return min(bounds)
        names = [name for name in self.problem.job.stages() if name != "actor_generate"]
        work = sum(sum(self.slot_seconds(name, ground)) for name in names) / len(slots)
        fixed = ground.seconds(framework_work(self.problem.job))
        sync = ground.seconds(sync_work(self.problem.job, ground.rates, one_domain=ground.one_domain))
        return min(*bounds, fixed + sync + self.generation(ground) + work)
