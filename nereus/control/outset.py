"""The controller of a run as it begins: what `nereus.policy` names, with what is known of the job then."""

from __future__ import annotations

from nereus.config import Config
from nereus.control.adaptive import Adaptive
from nereus.control.controller import AdaptiveController
from nereus.control.outlook import JobOutlook
from nereus.control.policies import DpScaling, Fixed, Policy
from nereus.control.records import Switches
from nereus.errors import ConfigError
from nereus.fleet import Fleet
from nereus.layout import Plan
from nereus.observe import Observed


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
        switches=Switches(
            freeze=wanted.freeze,
            max_transitions_count=wanted.max_transitions,
            allow=wanted.plans.allow,
            deny=wanted.plans.deny,
            dry_run=wanted.dry_run,
        ),
        search_budget_count=wanted.search_nodes,
    )
