"""What the section `nereus` and the fleet's schedule refuse, and which controller they make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereus.config import (
    ChangeConfig,
    CheckpointConfig,
    Config,
    FleetConfig,
    FleetStepConfig,
    NereusConfig,
    PlanChange,
    PlansConfig,
    StageConfig,
)
from nereus.control.outset import controller_of
from nereus.costs.profile import supposed
from nereus.errors import ConfigError
from nereus.fleet import uniform
from nereus.layout import first_plan
from nereus.observe import Observed, after
from nereus.validate import validate

GOOD = Config(nereus=NereusConfig(policy="nereus"))
SCRIPTED = (ChangeConfig(step=2, plan=PlanChange(actor_train=StageConfig(dp=2))),)

NEREUS = NereusConfig(policy="nereus")


def scheduled(*steps: tuple[int, int], policy: str = "nereus") -> Config:
    schedule = tuple(FleetStepConfig(step=step, slots=slots) for step, slots in steps)
    return Config(fleet=FleetConfig(schedule=schedule), nereus=NereusConfig(policy=policy))


@pytest.mark.parametrize(
    ("config", "key", "words"),
    [
        (replace(GOOD, nereus=NereusConfig(policy="best")), "nereus.policy", "dp-scaling"),
        (replace(GOOD, changes=SCRIPTED), "changes", "changes=[]"),
        (replace(GOOD, nereus=NereusConfig(max_transitions=-1)), "nereus.max_transitions", "at least 0"),
        (replace(GOOD, nereus=NereusConfig(search_nodes=0)), "nereus.search_nodes", "at least 1"),
        (replace(GOOD, nereus=NereusConfig(plans=PlansConfig(deny=("TP2",)))), "nereus.plans.deny[0]", "actor_train"),
        (replace(GOOD, nereus=NereusConfig(plans=PlansConfig(allow=("x *",)))), "nereus.plans.allow[0]", "a stage"),
        (
            Config(nereus=NereusConfig(policy="restart"), checkpoint=CheckpointConfig(keep_count=0)),
            "checkpoint.keep_count",
            "restart",
        ),
        (scheduled((5, 3), policy="script"), "nereus.policy", "follow the fleet"),
        (scheduled((5, 3), policy="fixed"), "nereus.policy", "follow the fleet"),
        (scheduled((5, 3), (9, 4), (12, 2), policy="fixed"), "nereus.policy", "give back"),
        (
            Config(fleet=FleetConfig(schedule=(FleetStepConfig(step=5, slots=3, away_seconds=-1.0),)), nereus=NEREUS),
            "fleet.schedule[0].away_seconds",
            "at least 0",
        ),
        (scheduled((1, 3)), "fleet.schedule[0].step", "above 1"),
        (scheduled((5, 3), (5, 4)), "fleet.schedule[1].step", "above 5"),
        (scheduled((5, 9)), "fleet.schedule[0].slots", "from 1 to fleet.slots = 4"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(config: Config, key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[").replace("]", r"\]")) as caught:
        validate(config)
    assert caught.value.key == key


@pytest.mark.parametrize("policy", ["nereus", "fixed", "dp-scaling", "restart"])
def test_every_policy_has_a_controller_with_the_switches_asked_for(policy: str) -> None:
    wanted = NereusConfig(policy=policy, freeze=True, max_transitions=3, plans=PlansConfig(deny=("* TP4*",)))
    config = replace(GOOD, nereus=wanted)
    validate(config)
    state = after(Observed(), {"kind": "probe", "profile": supposed("cpu", 4, 4, 2).record()})
    found = controller_of(config, first_plan(config), uniform(4), state)
    assert found.policy.name == policy
    assert (found.switches.freeze, found.switches.max_transitions_count) == (True, 3)
    assert found.switches.denies_stage("critic_train", "TP4·PP1·DP1") is not None
