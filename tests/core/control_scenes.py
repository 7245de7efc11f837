"""Plans, fleets and an outlook of plain numbers for the tests of the closed loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nereus.control.controller import AdaptiveCommand, Record
from nereus.control.records import Candidate, Estimate, Misfit, PriceEstimate, StepMeasured, candidate, plan_kind
from nereus.layout import Layout, Plan, StagePlan, equal_shares

SAMPLES = 12


def plan_on(slots: tuple[int, ...], tp: int = 1, pp: int = 1) -> Plan:
    """All stages on these slots."""
    dp = len(slots) // (tp * pp)
    layout = Layout(tp=tp, pp=pp, dp=dp, pipeline=equal_shares(4, pp))

    def stage(model: str, kind: str) -> StagePlan:
        shares = equal_shares(SAMPLES, dp)
        return StagePlan(model=model, stage=kind, layout=layout, slots=slots, shares=shares, micro_batch=2)  # pyright: ignore[reportArgumentType]

    return Plan(
        actor_train=stage("actor", "train"),
        actor_generate=stage("actor", "generate"),
        critic_train=stage("critic", "train"),
        reference_infer=stage("reference", "infer"),
    )


def price(seconds: float, deviation: float = 0.0) -> PriceEstimate:
    return PriceEstimate(mean_seconds=seconds, deviation_seconds=deviation, bound_seconds=seconds / 2)


def shown(plan: Plan, seconds: float, deviation: float = 0.0) -> Candidate:
    return candidate(plan, price(seconds, deviation))


@dataclass(frozen=True)
class TableOutlook:
    """Seconds by plan_id, a share of them as the joint deviation; `scale` follows what is measured when `learns`.

    A plan named in `room_tokens` does not fit once wider rows are met. News make all plans `slowdown` as slow.
    """

    seconds: dict[str, float]
    joint_share: float = 0.0
    misfits: dict[str, Misfit] = field(default_factory=dict)
    room_tokens: dict[str, int] = field(default_factory=dict)
    scale: float = 1.0
    learns: bool = False
    slowdown: float = 1.0

    def met(self, candidates: tuple[Candidate, ...]) -> TableOutlook:
        return self

    def observe(self, finished: StepMeasured, plan_id: str, *, ratio: float, noise_share: float) -> TableOutlook:
        if finished.news:
            return replace(self, scale=self.scale * self.slowdown)
        if not self.learns:
            return self
        found = finished.step_seconds / ratio / self.seconds[plan_id]
        return replace(self, scale=0.9 * self.scale + 0.1 * found)

    def expected(self, finished: StepMeasured, plan_id: str) -> Estimate:
        return self.step(plan_id)

    def step(self, plan_id: str) -> Estimate:
        seconds = self.scale * self.seconds[plan_id]
        return Estimate(mean_seconds=seconds, deviation_seconds=self.joint_share * seconds)

    def saving(self, old_id: str, new_id: str, old_ratio: float, new_ratio: float) -> Estimate:
        mean = self.scale * (old_ratio * self.seconds[old_id] - new_ratio * self.seconds[new_id])
        return Estimate(mean_seconds=mean, deviation_seconds=self.joint_share * abs(mean))

    def met_rows(self, step: int, width_tokens: int) -> TableOutlook:
        narrow = [plan_id for plan_id, room in self.room_tokens.items() if room < width_tokens]
        misfit = Misfit(within_steps=0, reason=f"rows of {width_tokens} tokens")
        return replace(self, misfits={**self.misfits, **dict.fromkeys(narrow, misfit)})

    def overflowed(self, plan_id: str, used_bytes: int) -> TableOutlook:
        return self

    def misfit(self, plan_id: str, step: int) -> Misfit | None:
        return self.misfits.get(plan_id)


def entries(commands: tuple[AdaptiveCommand, ...]) -> list[object]:
    return [command.entry for command in commands if isinstance(command, Record)]


__all__ = ["SAMPLES", "TableOutlook", "entries", "plan_kind", "plan_on", "price", "shown"]
