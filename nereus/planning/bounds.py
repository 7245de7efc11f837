"""Lower bounds of a step: of every plan on a placement, and of every plan there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nereus.planning.evaluate import Problem
from nereus.planning.ground import Ground
from nereus.planning.options import EngineTimes, engine_options
from nereus.planning.space import APART, Placement, Space
from nereus.planning.stagebounds import Least, StageBounds
from nereus.planning.stagework import framework_work, sync_work

ENGINE = "actor_generate"
HALVINGS = 6
"""How finely pools are told apart in the bound of every division of the slots."""

GroundOf = Callable[[tuple[int, ...]], Ground]


@dataclass(kw_only=True)
class Relaxation:
    """Bounds of one problem's plans. `slots` are all slots in their order."""

    problem: Problem
    space: Space
    times: EngineTimes
    slots: tuple[int, ...]
    stages: StageBounds = field(init=False)
    engines: dict[tuple[object, ...], float] = field(default_factory=dict[tuple[object, ...], float])

    def __post_init__(self) -> None:
        self.stages = StageBounds(problem=self.problem, space=self.space)

    def generation(self, ground: Ground) -> float:
        """The least seconds of generation with all memory of these slots; inf where no engine fits."""
        key = (ground.domain_slots, ground.devices)
        if key not in self.engines:
            options = engine_options(self.problem, ground)
            times = (self.times.seconds(option, ground, 0.0) for option in options)
            self.engines[key] = min(times, default=float("inf"))
        return self.engines[key]

    def quick(self, placement: Placement, ground_of: GroundOf) -> float:
        """A step of this placement takes at least this, by work alone; on equal slots without looking at its pools."""
        whole = ground_of(self.slots)
        grounds = [whole if len(whole.devices) == 1 else ground_of(pool) for pool in placement.pools]
        counts = [len(pool) for pool in placement.pools]
        trained, served = placement.of("actor_train"), placement.of(ENGINE)
        reached = counts[trained] + (counts[served] if served != trained else 0)
        fixed = self._fixed(grounds[trained], one_domain=reached <= max(whole.domain_slots))
        generation = self.generation(grounds[served])
        return self._step(placement, fixed, generation, self._work(placement, grounds, counts))

    def placed(self, placement: Placement, ground_of: GroundOf) -> float:
        """A step of this placement takes at least this."""
        grounds = [ground_of(pool) for pool in placement.pools]
        least = {name: self.stages.least(name, grounds[pool]) for name, pool in placement.pool_of if name != ENGINE}
        trained, served = placement.of("actor_train"), placement.of(ENGINE)
        joint = grounds[trained]
        if trained != served:
            joint = ground_of(placement.pools[trained] + placement.pools[served])
        fixed = self._fixed(grounds[trained], one_domain=joint.one_domain)
        return self._step(placement, fixed, self.generation(grounds[served]), least)

    def _work(self, placement: Placement, grounds: Sequence[Ground], counts: Sequence[int]) -> dict[str, Least]:
        return {
            name: self.stages.quick(name, grounds[pool], counts[pool])
            for name, pool in placement.pool_of
            if name != ENGINE
        }

    def _step(self, placement: Placement, fixed: float, generation: float, least: Mapping[str, Least]) -> float:
        """The step when stages take this: blocks after each other, pools beside each other."""
        infer, train, both = ([0.0] * len(placement.pools) for _ in range(3))
        for name, pool in placement.pool_of:
            if name != ENGINE:
                infer[pool] += least[name].infer_seconds
                train[pool] += least[name].train_seconds
                both[pool] += least[name].seconds
        after = max(max(infer) + max(train), *both)
        served = placement.of(ENGINE)
        if not self.problem.job.on_policy and sum(pool == served for _, pool in placement.pool_of) == 1:
            return fixed + max(generation, after)
        return fixed + generation + after

    def _fixed(self, ground: Ground, *, one_domain: bool) -> float:
        """Seconds of weight sync and framework."""
        sync = sync_work(self.problem.job, ground.rates, one_domain=one_domain)
        return ground.seconds(sync) + ground.seconds(framework_work(self.problem.job))

    def anywhere(self, every: Sequence[Placement], quick: Sequence[float], ground_of: GroundOf) -> float:
        """A step of any placement, at any division of the slots, takes at least this.

        On equal slots: everything on all of them, or stages on two pools of any sizes with generation on all. On unequal
        ones, and one step off, the placements that were listed count, of which `quick` are bounds.
        """
        ground = ground_of(self.slots)
        if len(ground.devices) > 1 or not self.problem.job.on_policy:
            return self._listed(every, quick, ground_of)
        names = [name for name in self.problem.job.stages() if name != ENGINE]
        shared = sum(self.stages.least(name, ground).seconds for name in names)
        best = self._fixed(ground, one_domain=ground.one_domain) + self.generation(ground) + shared
        for apart in APART if self.space.pools else ():
            groups = [[name for name in names if name in group] for group in apart if ENGINE not in group]
            if len(groups) != 1 or not groups[0]:
                continue  # generation apart leaves the others fewer slots, and what they do waits for it
            rest = [name for name in names if name not in groups[0]]
            if len(apart) == 1:
                best = self._divided((groups[0], rest), ground, len(self.slots), best, generates=True)
            else:
                best = self._with_engines_apart((groups[0], rest), ground, best)
        return best

    def _listed(self, every: Sequence[Placement], quick: Sequence[float], ground_of: GroundOf) -> float:
        best = float("inf")
        for at in sorted(range(len(every)), key=lambda at: quick[at]):
            if quick[at] >= best:
                break
            best = min(best, self.placed(every[at], ground_of))
        return best

    def _divided(
        self, groups: tuple[list[str], list[str]], ground: Ground, count: int, best: float, *, generates: bool
    ) -> float:
        """The least step over all divisions of `count` slots between two groups of stages, or `best` if none is below.

        Between two numbers of slots of the first group, it has at most the larger and the second what the smaller leaves.
        With `generates` generation is on the second's slots; without it, it is left out.
        """
        pending = [(1, count - 1, HALVINGS)] if count > 1 else []
        while pending:
            low, high, halvings = pending.pop()
            rest = count - low
            ahead = self._fixed(ground, one_domain=rest <= max(ground.domain_slots))
            if generates:
                ahead += self._generation_on(ground, rest)
            bound = ahead
            for found in (self.stages.quick, self.stages.least):
                if bound < best:
                    taken = [
                        sum(found(name, ground, slots).seconds for name in names)
                        for names, slots in zip(groups, (high, rest), strict=True)
                    ]
                    bound = ahead + max(taken)
            if bound < best and (low == high or not halvings):
                best = bound
            elif bound < best:
                middle = (low + high) // 2
                pending += [(low, middle, halvings - 1), (middle + 1, high, halvings - 1)]
        return best

    def _with_engines_apart(self, groups: tuple[list[str], list[str]], ground: Ground, best: float) -> float:
        """As `_divided` with engines on slots of their own, over all numbers of these."""
        count = len(ground.slots)
        pending = [(1, count - 2, HALVINGS)] if count > 2 else []
        work = sum(self.stages.quick(name, ground, 1).seconds for names in groups for name in names)
        while pending:
            low, high, halvings = pending.pop()
            generation = self._generation_on(ground, high)
            bound = generation + self._fixed(ground, one_domain=True) + work / (count - low)
            if bound < best and (low == high or not halvings):
                best = generation + self._divided(groups, ground, count - low, best - generation, generates=False)
            elif bound < best:
                middle = (low + high) // 2
                pending += [(low, middle, halvings - 1), (middle + 1, high, halvings - 1)]
        return best

    def _generation_on(self, ground: Ground, count: int) -> float:
        """The least seconds of generation on so many slots of this kind, in as full domains as there are."""
        widest = max(ground.domain_slots)
        domains = (widest,) * (count // widest) + ((count % widest,) if count % widest else ())
        return self.generation(replace(ground, slots=ground.slots[:count], domain_slots=domains))
