"""Named configurations, plans and changes of plan that several tests use: the quickstart's model on four slots."""

from __future__ import annotations

from dataclasses import replace

from nereus.config import ChangeConfig, Config, PlanChange, PlanConfig, RunConfig, StageConfig

BUCKET_BYTES = 1 << 20

TP2_PP2 = StageConfig(tp=2, pp=2)
PP2_DP2 = StageConfig(pp=2, dp=2)
DP4 = StageConfig(dp=4)
THREE = StageConfig(dp=3, slots=(0, 1, 3))

CONFIG = Config(
    run=RunConfig(steps=8),
    plan=PlanConfig(
        actor_train=TP2_PP2,
        actor_generate=StageConfig(tp=2, dp=2),
        critic_train=StageConfig(tp=2, pp=1, dp=2),
        reference_infer=StageConfig(pp=2),
    ),
)

TRANSITIONS: dict[str, tuple[PlanConfig, PlanChange]] = {
    "tp2pp2_to_pp2dp2": (CONFIG.plan, PlanChange(actor_train=PP2_DP2)),
    "pp2dp2_to_dp4": (replace(CONFIG.plan, actor_train=PP2_DP2), PlanChange(actor_train=DP4)),
    "dp4_to_three_slots": (replace(CONFIG.plan, actor_train=DP4), PlanChange(actor_train=THREE)),
    "actor_and_critic_at_once": (
        CONFIG.plan,
        PlanChange(actor_train=PP2_DP2, critic_train=DP4, actor_generate=StageConfig(dp=4)),
    ),
}


def with_plan(plan: PlanConfig) -> Config:
    """The configuration with another first plan."""
    return replace(CONFIG, plan=plan)


def with_changes(*changes: tuple[int, PlanChange], steps: int = 8) -> Config:
    """The configuration with scripted changes."""
    scripted = tuple(ChangeConfig(step=step, plan=plan) for step, plan in changes)
    return replace(CONFIG, run=RunConfig(steps=steps), changes=scripted)
