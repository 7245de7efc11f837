"""dp-scaling that may also choose micro-batches: at the same TP and PP, what the planner expects to be fastest on each fleet.

What a Plan of the simulated world can say beside degrees is the micro-batch: nothing is recomputed or offloaded there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nereus.control.fleet_outlook import FleetOutlook
from nereus.control.policies import DpScaling, Situation
from nereus.control.records import StepMeasured
from nereus.events import StepFinished
from nereus.layout import Plan
from nereus.planning.space import MICRO_BATCHES

TRAINED = ("actor_train", "critic_train", "reference_infer")
ROOM_RATIO = 1.15
"""A choice has room for samples so many times as long as now."""
HELD_RATIO = 1.25
"""A choice stays while samples are at most so many times as long or short as when it was made."""


class FreeDpScaling(DpScaling):
    """dp-scaling with free micro-batches. `outlook` learns from the job's steps as that of nereus does."""

    def __init__(self, first: Plan, outlook: FleetOutlook, *, divisible: bool) -> None:
        super().__init__(first, divisible=divisible)
        self.outlook = outlook
        self._chosen: tuple[Plan, Plan, int] | None = (
            None  # scaled, with its micro-batches, for samples of so many tokens
        )
        self._outgrown = False

    def finished(self, step: StepFinished | StepMeasured, plan_id: str) -> None:
        """Learns from a step."""
        if not isinstance(step, StepMeasured):
            raise TypeError("free dp-scaling needs StepMeasured: a step's tokens, not its seconds alone")
        self.outlook = self.outlook.observe(step, plan_id, ratio=1.0, noise_share=0.0)

    def outgrown(self, step: int, width_tokens: int) -> None:
        """The micro-batches are chosen anew before the step."""
        self.outlook = self.outlook.met_rows(step, width_tokens)
        self._outgrown = True

    def overflowed(self, plan_id: str, used_bytes: int, budget_bytes: int) -> None:
        """The micro-batches are chosen anew, with that margin."""
        if used_bytes > budget_bytes:
            self.outlook = self.outlook.overflowed(plan_id, used_bytes)
            self._outgrown = True

    def wanted(self, situation: Situation) -> Plan | None:
        """The scaled plan with the micro-batches that are fastest; they stay while the fleet does and they fit."""
        scaled = super().wanted(situation)
        if scaled is None:
            return None
        known = self._chosen
        if known is None or known[0] != scaled or self._outgrown or not self._holds(*known[1:], situation.step):
            known = (scaled, self._fastest(scaled), self.outlook.mean_tokens)
            self._chosen, self._outgrown = known, False
        return known[1]

    def _holds(self, plan: Plan, tokens: int, step: int) -> bool:
        """Whether the plan still fits, and samples are about as long as when it was chosen."""
        ratio = self.outlook.mean_tokens / tokens
        self._meet(plan)
        misfit = self.outlook.misfit(plan.plan_id, step)
        return 1 / HELD_RATIO < ratio < HELD_RATIO and (misfit is None or misfit.within_steps > 1)

    def _meet(self, plan: Plan) -> None:
        if plan.plan_id not in self.outlook.plans:
            self.outlook = replace(self.outlook, plans={**self.outlook.plans, plan.plan_id: plan})

    def _fastest(self, scaled: Plan) -> Plan:
        """Stage by stage, for what one takes is no matter of the others' micro-batches."""
        best = scaled
        for name in TRAINED:
            found = [(self._seconds(plan), number, plan) for number, plan in enumerate(self._choices(best, name))]
            best = min(found)[2] if found else best
        return best

    def _choices(self, plan: Plan, name: str) -> Iterator[Plan]:
        """The plan with each micro-batch of a stage with which it fits."""
        stage = getattr(plan, name)
        mean = int(ROOM_RATIO * self.outlook.mean_tokens)
        for size in MICRO_BATCHES:
            other = replace(plan, **{name: replace(stage, micro_batch=size)})
            self._meet(other)
            if self.outlook.excess(other.plan_id, mean) is None:
                yield other

    def _seconds(self, plan: Plan) -> float:
        return self.outlook.step(plan.plan_id).mean_seconds
