"""The comparison of `make verl-parity`: differences by hand, bounds that bite, a comparison that shows nothing is refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.verl import parity
from baselines.verl.parity import BOUNDS, CLIPS, SETTINGS, beyond, differences, shows_nothing, table
from baselines.verl.parity_records import Recorded, StepOfVerl, StepOutcome, base_config
from nereus.rl.batch import build
from nereus.validate import validate

BATCH = build([[256, 1], [256, 2, 3]], [[4, 5, 257], [6]], width_tokens=8)
COLUMNS = {"actor/grad_norm": 2.0, "actor/pg_loss": 0.5, "actor/entropy": 1.0}
CRITIC = {"critic/grad_norm": 4.0, "critic/vf_loss": 100.0}


def recorded() -> Recorded:
    weights = {"actor": {"w": torch.zeros(2, 2)}, "critic": {"score.weight": torch.zeros(1, 2)}}
    return Recorded(
        folder=Path(),
        step=1,
        data_position=0,
        batch=BATCH,
        scores=torch.ones(2),
        groups=torch.zeros(2),
        columns={},
        weights=weights,
        horizon_tokens=7,
    )


def both() -> tuple[StepOutcome, StepOfVerl]:
    """A step that both computed alike: verl's rows begin at the first response token."""
    ours = torch.zeros(BATCH.tokens.shape)
    ours[BATCH.mask > 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    ours[BATCH.mask == 0] = 99.0  # never compared
    theirs = torch.tensor([[1.0, 2.0, 3.0], [4.0, 55.0, 66.0]])
    weights = {"actor": {"w": torch.full((2, 2), 3.0)}, "critic": {"score.weight": torch.full((1, 2), 3.0)}}
    clips = dict.fromkeys(CLIPS, 0.1)
    mine = StepOutcome(advantages=ours, returns=ours, updates=[{**COLUMNS, **CRITIC, **clips}], weights=weights)
    updates = {
        "actor": [{"grad_norm": 2.0, "actor/pg_loss": 0.5, "actor/entropy_loss": 1.0}],
        "critic": [{"grad_norm": 4.0, "critic/vf_loss": 100.0}],
    }
    copies = {model: {name: tensor.clone() for name, tensor in held.items()} for model, held in weights.items()}
    return mine, StepOfVerl(advantages=theirs, returns=theirs, updates=updates, weights=copies)


def test_equal_steps_differ_by_nothing() -> None:
    found = differences(recorded(), *both(), with_returns=True)
    assert set(found) == {*BOUNDS, "of update"}
    assert set(found.values()) == {0.0}
    assert list(beyond({"one": found})) == []


def test_differences_by_hand() -> None:
    mine, theirs = both()
    theirs.weights["actor"]["w"][0, 0] = 2.0
    theirs.updates["critic"][0].update({"grad_norm": 3.2, "critic/vf_loss": 101.0})
    theirs.advantages[1, 0] = 4.5
    found = differences(recorded(), mine, theirs, with_returns=False)
    assert found["weights"] == 1.0
    assert found["of update"] == pytest.approx(1.0 / math.sqrt(3 * 9 + 4))
    assert found["gradient norm"] == pytest.approx(0.25)
    assert found["value loss"] == pytest.approx(1.0 / 101.0)
    assert (found["policy loss"], found["entropy"], found["advantages"]) == (0.0, 0.0, 0.5)
    assert "returns" not in found
    complaints = list(beyond({"one": found}))
    assert [line.split(" differ")[0] for line in complaints] == [
        f"one: {kind}" for kind in ("advantages", "value loss", "gradient norm", "weights")
    ]


def test_another_number_of_optimizer_steps_is_an_error() -> None:
    mine, theirs = both()
    theirs.updates["actor"].append(theirs.updates["actor"][0])
    with pytest.raises(ValueError, match="longer"):
        differences(recorded(), mine, theirs, with_returns=True)


def test_not_a_number_is_beyond_every_bound() -> None:
    mine, theirs = both()
    theirs.weights["actor"]["w"][0, 0] = math.nan
    theirs.updates["actor"][0]["grad_norm"] = math.nan
    complaints = list(beyond({"one": differences(recorded(), mine, theirs, with_returns=True)}))
    assert [line.split(" differ")[0] for line in complaints] == ["one: gradient norm", "one: weights"]
    assert list(beyond({"one": {"weights": math.nan}}))
    assert not list(beyond({"one": {"weights": BOUNDS["weights"]}}))


def test_a_comparison_that_shows_nothing() -> None:
    active: dict[str, dict[str, float]] = {"one": dict.fromkeys(CLIPS, 0.1)}
    control = dict.fromkeys(BOUNDS, 1.0)
    assert list(shows_nothing(active, control)) == []
    assert "actor/pg_clipfrac_lower is 0" in next(shows_nothing({"one": active["one"] | {CLIPS[1]: 0.0}}, control))
    assert "this check cannot fail" in next(shows_nothing(active, control | {"weights": 0.0}))


def test_the_table_has_the_largest_and_the_bounds() -> None:
    mine, theirs = both()
    found = differences(recorded(), mine, theirs, with_returns=True)
    lines = table({"one": found, "two": found | {"weights": 3e-5}}, dict.fromkeys(("one", "two"), parity.shares(mine)))
    rows = lines.splitlines()
    assert "10%, 10%, 10%" in rows[1]
    assert "3.0e-05" in rows[3]
    assert rows[3].startswith("largest")
    assert rows[4].startswith("bound")


def test_every_setting_is_a_job_of_nereus() -> None:
    for algorithm in SETTINGS.values():
        validate(replace(base_config(), algorithm=algorithm))
    assert {a.loss_agg_mode for a in SETTINGS.values()} == {
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
    }  # fmt: skip
    assert {a.adv_estimator for a in SETTINGS.values()} == {"gae", "grpo", "rloo", "reinforce++"}
