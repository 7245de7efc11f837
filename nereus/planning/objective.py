"""What a search minimises, how much it may judge, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nereus.planning.evaluate import Evaluation
from nereus.planning.plan import GlobalPlan, StageChoice


def free(plan: GlobalPlan) -> float:
    """The price of a change that costs nothing."""
    del plan
    return 0.0


def free_stage(name: str, choice: StageChoice, slots: tuple[int, ...]) -> float:
    """The least part of a price where nothing is known of its stages."""
    del name, choice, slots
    return 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What is minimised: `horizon_steps` x step seconds + `price` seconds of reaching the plan.

    Equal to maximising horizon x saving - price: the present plan's step is a constant. `price_bound` is never above
    `price` and cheap; `price` is asked for only where the bound leaves a chance. `priced` false: both are 0. A price follows
    from pools, layouts and sharding: micro-batches, recomputation and residency change without one. The sum of
    `stage_bound` over a plan's stages, each of a choice on its pool's slots, is never above its price either.
    """

    horizon_steps: float = 1.0
    price: Callable[[GlobalPlan], float] = free
    price_bound: Callable[[GlobalPlan], float] = free
    stage_bound: Callable[[str, StageChoice, tuple[int, ...]], float] = free_stage

    @property
    def priced(self) -> bool:
        """Whether plans cost something to reach."""
        return self.price is not free


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much may be evaluated: options of stages, and branches and plans of the search, together."""

    nodes: int = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that fits, with its cost under the objective, and its step and price in seconds."""

    plan: GlobalPlan
    cost_seconds: float
    step_seconds: float
    price_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best plans, cheapest first, of different layouts; what was too large; how much better any plan could be.

    `lower_bound_seconds` is below the cost of every plan there is, other numbers of replicas and divisions of the
    slots included; without `covers_all` (unequal slots, one step off) of every plan on the placements that were listed. `exact` says that every plan was judged, so that it is the best one's cost. `near_misses` are faster
    plans that do not fit, or without any that fits those that come closest.
    """

    candidates: tuple[Candidate, ...]
    near_misses: tuple[Evaluation, ...]
    lower_bound_seconds: float
    exact: bool
    evaluated_nodes: int
    finished: bool
    covers_all: bool

    @property
    def best(self) -> Candidate | None:
        """The best plan, None where nothing fits."""
        return self.candidates[0] if self.candidates else None

    @property
    def gap_share(self) -> float:
        """By how much of its cost the best plan may be above the best there is."""
        if not self.candidates:
            return 0.0
        cost = self.candidates[0].cost_seconds
        return max(0.0, (cost - self.lower_bound_seconds) / cost) if cost > 0 else 0.0
