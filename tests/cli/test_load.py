"""Loading: what is right loads, what is wrong says where and what would be right, what is dumped loads back equal."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.cli.load import _paths, dump_config, load_config
from nereus.config import ChangeConfig, Config, PlanChange, PlanConfig, RunConfig, StageConfig
from nereus.errors import ConfigError


def written(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, ""), []) == Config()


def test_yaml_and_overrides_in_order(tmp_path: Path) -> None:
    text = "run: {steps: 4}\nplan:\n  actor_train: {tp: 2, slots: [0, 1]}\nalgorithm: {actor_lr: 1e-4}\n"
    overrides = [
        "run.steps=3",
        "run.name=7",
        "plan.actor_train.pp=2",
        "plan.actor_train.slots=[3,2,1,0]",
        "algorithm.lam=1",
        "data.task_options={min_terms: 2}",
        "changes=[{step: 2, plan: {actor_train: {dp: 4}}}]",
        "changes[0].step=3",
    ]
    config = load_config(written(tmp_path, text), overrides)
    assert config.run == RunConfig(steps=3, name="7")
    assert config.plan.actor_train == StageConfig(tp=2, pp=2, slots=(3, 2, 1, 0))
    assert (config.algorithm.actor_lr, config.algorithm.lam) == (1e-4, 1.0)
    assert config.data.task_options == {"min_terms": 2}
    assert config.changes == (ChangeConfig(step=3, plan=PlanChange(actor_train=StageConfig(dp=4))),)


def test_references_and_null(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "run: {name: a, group: '${run.name}-b'}"), ["plan.actor_train.slots=null"])
    assert config.run.group == "a-b"
    assert config.plan.actor_train.slots is None


WRONG = [
    (["run.stpes=3"], "run.stpes", 3, ["did you mean run.steps?", "name, folder, seed, steps, group"]),
    (["steps=3"], "steps", 3, ["did you mean run.steps?"]),
    (["plan.actor_gen.tp=2"], "plan.actor_gen", {"tp": 2}, ["plan.actor_generate", "critic_train"]),
    (
        ["plan.critic_train.dpp=2"],
        "plan.critic_train.dpp",
        2,
        ["did you mean plan.critic_train.", "distributed_optimizer"],
    ),
    (["zzz=1"], "zzz", 1, ["run, model, data"]),
    (["run.steps=three"], "run.steps", "three", ["a whole number, such as 20"]),
    (["run.steps=3.0"], "run.steps", 3.0, ["a whole number"]),
    (["run.steps=true"], "run.steps", True, ["a whole number"]),
    (["run.steps="], "run.steps", None, ["a whole number"]),
    (["run.steps=null"], "run.steps", None, ["a whole number"]),
    (["algorithm.lam=high"], "algorithm.lam", "high", ["a number, such as 1.0"]),
    (["algorithm.whiten_advantages=1"], "algorithm.whiten_advantages", 1, ["true or false, such as true"]),
    (["run=5"], "run", 5, ["a mapping with the keys name, folder"]),
    (["run.steps.x=5"], "run.steps", {"x": 5}, ["a whole number"]),
    (["data.task_options=3"], "data.task_options", 3, ["a mapping"]),
    (["plan.actor_train.slots=4"], "plan.actor_train.slots", 4, ["a list of whole numbers"]),
    (["plan.actor_train.slots=[0, a]"], "plan.actor_train.slots[1]", "a", ["a whole number"]),
    (["nereus.plans.deny=critic"], "nereus.plans.deny", "critic", ["a list of texts"]),
    (["changes=3"], "changes", 3, ["a list of mappings with the keys step, plan"]),
    (["changes=[{step: 3}]"], "changes[0].plan", None, ["is missing", "critic_train"]),
    (["changes=[{plan: {}}]"], "changes[0].step", None, ["is missing", "a whole number"]),
    (["changes=[{step: 1, plan: {actor_train: {tq: 2}}}]"], "changes[0].plan.actor_train.tq", 2, ["actor_train.tp"]),
    (["changes[3].step=1"], "changes", {"3": {"step": 1}}, ["a list"]),
    (["run.steps"], "override", "run.steps", ["key=value"]),
    (["=3"], "override", "=3", ["key=value"]),
    (["run.name=${oops"], "run.name", "${oops", ["YAML value"]),
    (["changes=[{"], "changes", "[{", ["YAML value"]),
]


@pytest.mark.parametrize(("overrides", "key", "value", "words"), WRONG, ids=lambda entry: str(entry)[:30])
def test_mistakes_name_key_value_and_what_is_right(
    tmp_path: Path, overrides: list[str], key: str, value: object, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, ""), overrides)
    assert (caught.value.key, caught.value.value) == (key, value)
    for word in words:
        assert word in caught.value.expected


@pytest.mark.parametrize("key", _paths())
@pytest.mark.parametrize("text", ["word", "[word]", "{word: 1}", "3.5", "null"])
def test_no_value_of_any_key_is_met_with_another_error(tmp_path: Path, key: str, text: str) -> None:
    with suppress(ConfigError):
        load_config(written(tmp_path, ""), [f"{key}={text}"])


def test_an_entry_beyond_a_list_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, "changes: [{step: 1, plan: {actor_train: {}}}]")
    with pytest.raises(ConfigError, match=r"changes\[3\].step"):
        load_config(path, ["changes[3].step=1"])


def test_no_config_names_the_quickstart() -> None:
    with pytest.raises(ConfigError, match=r"experiments/quickstart\.yaml"):
        load_config(None, ["run.steps=3"])


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml.*no such file.*quickstart"):
        load_config(tmp_path / "nowhere.yaml", [])
    with pytest.raises(ConfigError, match="expected a readable YAML file"):
        load_config(tmp_path, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run:\n  steps: 3\n  name: [a\nplan: {}\n", "line 4"),
        ("run:\n  steps: 3\n  steps: 4\n", "duplicate"),
        ("- run\n", "expected sections: run, model"),
        ("run: {name: '${oops'}\n", "expected YAML"),
        ("run: {name: '${nowhere.at}'}\n", "nowhere"),
        ("run:\n", "mapping"),
        ("run: \x00\n", "expected YAML"),
        ("hello\n", "is not a key"),
    ],
)
def test_malformed_yaml(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(written(tmp_path, text), [])


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"run: \xff\xfe")
    with pytest.raises(ConfigError, match="readable YAML"):
        load_config(tmp_path / "config.yaml", [])


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    ["1e3", "null", "yes", "???", "${run.name}", "a\\${b", "${", "\\\\${x}\\", "2020-01-01", "0x1f", "1_000", ".inf"]
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
degrees = st.integers(1, 9)
maybe_numbers = st.none() | st.lists(st.integers(0, 9), max_size=4).map(tuple)
stages = st.builds(
    StageConfig, tp=degrees, pp=degrees, dp=degrees, pipeline=maybe_numbers, slots=maybe_numbers, shares=maybe_numbers
)
maybe_stage = st.none() | stages
changes = st.builds(
    ChangeConfig,
    step=degrees,
    plan=st.builds(PlanChange, actor_train=maybe_stage, actor_generate=maybe_stage, critic_train=maybe_stage),
)


@settings(max_examples=30, deadline=None)
@given(
    name=texts,
    options=st.dictionaries(texts, plain, max_size=3),
    stage=stages,
    some=st.lists(changes, max_size=2).map(tuple),
    rate=st.floats(allow_nan=False),
)
def test_dump_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    options: dict[str, object],
    stage: StageConfig,
    some: tuple[ChangeConfig, ...],
    rate: float,
) -> None:
    base = Config(run=RunConfig(name=name), plan=PlanConfig(actor_train=stage), changes=some)
    config = replace(
        base, data=replace(base.data, task_options=options), algorithm=replace(base.algorithm, actor_lr=rate)
    )
    path = written(tmp_path_factory.getbasetemp(), dump_config(config))
    assert load_config(path, []) == config
