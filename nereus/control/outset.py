"""The controller of a run as it begins: what `nereus.policy` names, with what is known of the job then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from nereus.config import Config
from nereus.control.adaptive import Adaptive
from nereus.control.admission import Caution
from nereus.control.controller import AdaptiveController
from nereus.control.fleet_outlook import FleetOutlook
from nereus.control.fleet_search import FLEET_SPACE
from nereus.control.outlook import JobOutlook
from nereus.control.policies import DpScaling, Fixed, Policy, RulePolicy
from nereus.control.records import Switches
from nereus.control.scaling import TRAINED, FreeDpScaling
from nereus.errors import ConfigError, near
from nereus.fleet import Fleet
from nereus.layout import Plan
from nereus.observe import Observed
from nereus.planning.space import Space


def policy_of(config: Config, plan: Plan, state: Observed) -> Policy:
    """The policy that `nereus.policy` names, with what is known of the job. ConfigError for a name without a policy."""
    name = config.nereus.policy
    if name == "nereus":
        return Adaptive(JobOutlook(config=config, state=state, plans={plan.plan_id: plan}), plan)
    if name == "fixed":
        return Fixed()
    if name in ("dp-scaling", "restart"):
        return DpScaling(plan, divisible=config.nereus.divisible, by_restart=name == "restart")
    raise ConfigError(
        "nereus.policy", name, "expected a policy with a controller: nereus, fixed, dp-scaling or restart"
    )


def controller_of(config: Config, plan: Plan, fleet: Fleet, state: Observed) -> AdaptiveController:
    """The controller of a run as it begins, from its configuration and what was known then."""
    wanted = config.nereus
    return AdaptiveController(
        plan=plan,
        fleet=fleet,
        last_step=config.run.steps,
        policy=policy_of(config, plan, state),
        switches=switches_of(config),
        search_budget_count=wanted.search_nodes,
    )


def switches_of(config: Config) -> Switches:
    """How the configuration holds the controller back."""
    wanted = config.nereus
    return Switches(
        freeze=wanted.freeze,
        max_transitions_count=wanted.max_transitions,
        allow=wanted.plans.allow,
        deny=wanted.plans.deny,
        dry_run=wanted.dry_run,
    )


Freedom = Literal["micro_batch", "engines", "trainers"]
FREEDOMS: tuple[Freedom, ...] = ("micro_batch", "engines", "trainers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A policy of a fleet of GPUs. Of `nereus`: what is left out of it, to see what it is worth.

    `learns`: coefficients follow the job. `priced`: changes cost what their graphs say, else nothing. `patient`: a change
    waits for regret, evidence and probation. `live`: changes are transitions, else each a restart, or with `storage` in
    the same processes, but with all state written to storage and read back. `frees`: what it may choose beside the samples
    of each replica; the rest stays as in the first plan.
    """

    learns: bool = True
    priced: bool = True
    patient: bool = True
    live: bool = True
    storage: bool = False
    frees: tuple[Freedom, ...] = FREEDOMS

    def space(self, first: Plan) -> Space:
        """What its searches may choose; degrees and micro-batches that are not free are those of the first plan."""
        stages = [getattr(first, name) for name in TRAINED]
        found = FLEET_SPACE
        if "micro_batch" not in self.frees:
            found = replace(found, micro_batches=tuple(sorted({stage.micro_batch for stage in stages})))
        if "engines" not in self.frees:
            found = replace(found, only_engine_tps=(first.actor_generate.layout.tp,))
        if "trainers" not in self.frees:
            found = replace(found, only_tp_pp=tuple(sorted({(s.layout.tp, s.layout.pp) for s in stages})))
        return found


VARIANTS: Mapping[str, Variant] = {
    "nereus": Variant(),
    "nereus-uncalibrated": Variant(learns=False),
    "nereus-unpriced": Variant(priced=False),
    "nereus-hasty": Variant(patient=False),
    "nereus-restart": Variant(live=False),
    "nereus-storage": Variant(live=False, storage=True),
    "nereus-shares": Variant(frees=()),
    "nereus-micro-batch": Variant(frees=FREEDOMS[:1]),
    "nereus-engines": Variant(frees=FREEDOMS[:2]),
}
HASTY = Caution(caution_ratio=0.0, trust_share=1e-9, least_steps=1, probation_steps=1, evidence_share=1e9)
"""Whatever is expected to be better by its mean is taken at once."""


def fleet_policy(policy: str, config: Config, plan: Plan, inventory: Fleet) -> Policy:
    """A policy on a fleet of GPUs by its name. ConfigError for a name without one."""
    variant = VARIANTS.get(policy)
    if variant is not None:
        outlook = FleetOutlook(config=config, inventory=inventory, plans={plan.plan_id: plan}, learns=variant.learns)
        made = Adaptive(outlook, plan, None if variant.patient else HASTY)
        made.name, made.by_restart = policy, not variant.live
        return made
    if policy in FREE_RULES:
        outlook = FleetOutlook(config=config, inventory=inventory, plans={plan.plan_id: plan})
        return FreeDpScaling(plan, outlook, divisible=FREE_RULES[policy])
    if policy in RULES:
        return RULES[policy](plan)
    raise ConfigError("--policy", policy, near(policy, (*VARIANTS, *RULES, *FREE_RULES)))


RULES: Mapping[str, Callable[[Plan], RulePolicy]] = {
    "fixed": lambda _: Fixed(),
    "dp-scaling": lambda plan: DpScaling(plan, divisible=True),
    "dp-scaling-any": lambda plan: DpScaling(plan, divisible=False),
    "restart": lambda plan: DpScaling(plan, divisible=True, by_restart=True),
}
"""Policies that follow a fleet by a rule."""
FREE_RULES: Mapping[str, bool] = {"dp-scaling-free": True, "dp-scaling-any-free": False}
"""Those that choose micro-batches as well -> whether DP has to divide the samples."""


def fleet_controller(policy: str, config: Config, plan: Plan, fleet: Fleet, inventory: Fleet) -> AdaptiveController:
    """The controller of a run on a fleet of GPUs as it begins; `inventory` are all nodes that it may ever have."""
    wanted = config.nereus
    return AdaptiveController(
        plan=plan,
        fleet=fleet,
        last_step=config.run.steps,
        policy=fleet_policy(policy, config, plan, inventory),
        switches=switches_of(config),
        search_budget_count=wanted.search_nodes,
    )
