"""Under what configuration a run goes on: the plan in the words of a config, cut anew where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.checkpoint import Manifest, model_section
from nereus.config import Config, ModelConfig, PlanChange, PlanConfig, StageConfig
from nereus.errors import CheckpointError, ConfigError
from nereus.layout import STAGES, changed_plan, first_plan
from nereus.resumption import agreeing, check_same_job, fitted, plan_section, remaining, stated_stages
from nereus.validate import validate
from tests.core.scenes import CONFIG, DP4, THREE, with_changes

S = StageConfig


def of_section(section: dict[str, dict[str, object]]) -> PlanConfig:
    """The plan's configuration, as loading a YAML file makes it."""
    made = {}
    for name, words in section.items():
        made[name] = S(**{k: tuple(v) if isinstance(v, list) else v for k, v in words.items()})  # type: ignore[arg-type]
    return PlanConfig(**made)


@st.composite
def stage_configs(draw: st.DrawFn, *, generate: bool, samples: int) -> StageConfig:
    tp = draw(st.sampled_from((1, 2)))
    pipeline = None if generate else draw(st.sampled_from((None, None, (2, 2), (1, 3), (1, 2, 1))))
    pp = 1 if generate else len(pipeline) if pipeline else draw(st.sampled_from((1, 2, 4)))
    dp = draw(st.integers(1, 3))
    slots = draw(st.sampled_from((None, tuple(reversed(range(tp * pp * dp))))))
    shares = draw(st.sampled_from((None, (samples, *(0,) * (dp - 1)))))
    return StageConfig(
        tp=tp, pp=pp, dp=dp, pipeline=pipeline, slots=slots, shares=shares,
        micro_batch=draw(st.integers(1, 9)), distributed_optimizer=draw(st.booleans()),
        order=draw(st.sampled_from(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"))),
    )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> PlanConfig:
    made = {}
    for name in STAGES:
        made[name] = draw(stage_configs(generate=name == "actor_generate", samples=32 if "train" in name else 64))
    return PlanConfig(**made)


@given(plans())
@settings(max_examples=80, deadline=None)
def test_a_plan_is_what_its_section_says(plan: PlanConfig) -> None:
    config = replace(CONFIG, plan=plan)
    section = plan_section(first_plan(config))
    assert first_plan(replace(config, plan=of_section(section))) == first_plan(config)


def test_a_section_says_what_is_not_the_default() -> None:
    plan = changed_plan(first_plan(CONFIG), PlanChange(actor_train=THREE, critic_train=DP4), CONFIG)
    section = plan_section(plan)
    assert section["actor_train"] == {"tp": 1, "pp": 1, "dp": 3, "slots": [0, 1, 3]}
    assert section["critic_train"] == {"tp": 1, "pp": 1, "dp": 4}


@given(plans(), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_a_fitted_plan_is_valid_on_any_number_of_slots(plan: PlanConfig, slots: int) -> None:
    config = replace(CONFIG, plan=plan, fleet=replace(CONFIG.fleet, slots=slots))
    section = plan_section(first_plan(config))
    fit = {name: fitted(name, words, slots) for name, words in section.items()}
    made = replace(config, plan=of_section(fit))
    validate(made)
    for name, stage in first_plan(made).stages():
        assert max(stage.slots) < slots
        if max(getattr(first_plan(config), name).slots) < slots:
            assert fit[name] == section[name], "what fits stays"
        else:
            tp = section[name]["tp"]
            assert isinstance(tp, int)
            assert stage.layout.ranks > slots // 2, "no half of the slots idles"


def test_how_stages_are_cut_anew() -> None:
    four = {"tp": 2, "pp": 2, "dp": 1, "micro_batch": 4}
    assert fitted("actor_train", four, 4) == four
    assert fitted("actor_train", four, 3) == {"tp": 1, "pp": 1, "dp": 3, "micro_batch": 4}
    assert fitted("actor_train", four, 2) == {"tp": 2, "pp": 1, "dp": 1, "micro_batch": 4}
    assert fitted("critic_train", {"tp": 1, "pp": 2, "dp": 4, "pipeline": [1, 3], "shares": [8, 8, 8, 8]}, 6) == {
        "tp": 1, "pp": 2, "dp": 3, "pipeline": [1, 3],
    }  # fmt: skip
    assert fitted("actor_generate", {"tp": 1, "pp": 1, "dp": 2, "slots": [2, 3]}, 2) == {"tp": 1, "pp": 1, "dp": 2}


def test_what_is_stated_over_a_saved_stage_takes_what_fits_with_it() -> None:
    saved = {"tp": 2, "pp": 2, "dp": 1, "slots": [3, 2, 1, 0], "pipeline": [1, 3], "micro_batch": 4}
    assert agreeing(saved, S(tp=2, pp=2, micro_batch=8), 4) == saved
    assert agreeing(saved, S(tp=2, pp=2), 3) == {k: v for k, v in saved.items() if k != "slots"}
    assert agreeing(saved, S(tp=1, pp=1, dp=4), 4) == {k: v for k, v in saved.items() if k != "pipeline"}
    assert agreeing({"tp": 1, "dp": 2, "shares": [30, 2]}, S(dp=4), 4) == {"tp": 1, "dp": 2}
    assert agreeing({"tp": 1, "dp": 2}, S(dp=0), 4) == {"tp": 1, "dp": 2}, "that 0 is no degree is judged elsewhere"


def test_which_stages_overrides_state() -> None:
    assert stated_stages(["fleet.slots=2", "run.steps=3"]) == frozenset()
    assert stated_stages(["plan.actor_train.dp=2", "plan.critic_train={tp: 2}"]) == {"actor_train", "critic_train"}
    assert stated_stages(["plan={}"]) == frozenset(STAGES)


def test_applied_changes_are_behind() -> None:
    config = with_changes((2, PlanChange(actor_train=DP4)), (5, PlanChange(critic_train=DP4)))
    assert [change.step for change in remaining(config, 1).changes] == [2, 5]
    assert [change.step for change in remaining(config, 2).changes] == [5], "done before step 2 began"
    assert remaining(config, 5).changes == ()


def manifest(config: Config) -> Manifest:
    return Manifest(
        run_id="r", step=1, state_version=0, model=model_section(config.model), plan={}, plan_text="",
        seed=config.run.seed, data_position=0, kl_coef=0.0, optimizer_steps={}, files=(),
    )  # fmt: skip


def test_what_must_stay() -> None:
    check_same_job(CONFIG, CONFIG, manifest(CONFIG))
    older = manifest(CONFIG)
    check_same_job(CONFIG, CONFIG, replace(older, model={k: v for k, v in older.model.items() if k != "init_std"}))
    other = replace(CONFIG, model=ModelConfig(layers=2))
    with pytest.raises(ConfigError, match=r"model.layers = 2: expected 4"):
        check_same_job(other, CONFIG, manifest(CONFIG))
    with pytest.raises(CheckpointError, match=r"model.layers = 2, the run's config has 4"):
        check_same_job(CONFIG, CONFIG, manifest(other))
    with pytest.raises(ConfigError, match=r"run.seed = 9: expected 1"):
        check_same_job(replace(CONFIG, run=replace(CONFIG.run, seed=9)), CONFIG, manifest(CONFIG))
    with pytest.raises(ConfigError, match=r"run.name = 'x'"):
        check_same_job(replace(CONFIG, run=replace(CONFIG.run, name="x")), CONFIG, manifest(CONFIG))
