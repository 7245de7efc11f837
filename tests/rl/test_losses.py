"""Losses against loops written from the definitions; invariance under any split; KL identities by enumeration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nereus.errors import ConfigError
from nereus.rl import losses
from nereus.rl.losses import Denominators, PolicySettings, ValueSettings

torch.set_num_threads(1)

MODES = get_args(losses.LossAggMode)
HORIZON = 7.0


def random_rows(seed: int, rows: int, width: int = 6) -> dict[str, Tensor]:
    """Per-token tensors [rows, width] in double whose log ratios reach beyond every clip; some rows fully masked."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((rows, width))
    for row in mask:
        start = rng.integers(0, width)
        row[start : start + rng.integers(0, width - start + 1)] = 1
    names = ("logp", "entropy", "old_logp", "advantages", "reference_logp", "values", "old_values", "returns")
    tensors = {name: torch.tensor(rng.normal(size=(rows, width))) for name in names}
    return tensors | {"mask": torch.tensor(mask), "weights": torch.tensor(rng.random((rows, width)) * 2)}


def policy(
    rows: dict[str, Tensor], chosen: PolicySettings, denominators: Denominators
) -> tuple[Tensor, losses.Metrics]:
    """The policy loss of these rows with every optional term given."""
    logp, entropy, old_logp, advantages, mask, reference_logp, weights = (
        rows[key] for key in ("logp", "entropy", "old_logp", "advantages", "mask", "reference_logp", "weights")
    )
    given = {"reference_logp": reference_logp, "rollout_weights": weights}
    return losses.policy_loss(logp, entropy, old_logp, advantages, mask, chosen, denominators, **given)


def value(rows: dict[str, Tensor], chosen: ValueSettings, denominators: Denominators) -> tuple[Tensor, losses.Metrics]:
    values, old_values, returns, mask = (rows[key] for key in ("values", "old_values", "returns", "mask"))
    return losses.value_loss(values, old_values, returns, mask, chosen, denominators)


def aggregate_by_definition(token: np.ndarray, mask: np.ndarray, mode: str) -> float:
    rows = [token[i][mask[i] > 0] for i in range(len(mask)) if mask[i].sum() > 0]
    every = np.concatenate(rows) if rows else np.zeros(1)
    match mode:
        case "token-mean":
            return float(every.mean())
        case "token-sum":
            return float(every.sum())
        case "seq-mean-token-mean":
            return float(np.mean([row.mean() for row in rows] or [0.0]))
        case "seq-mean-token-sum":
            return float(np.mean([row.sum() for row in rows] or [0.0]))
    return float(np.mean([row.sum() / HORIZON for row in rows] or [0.0]))


def policy_token_loss(log_ratio: float, advantage: float, low: float, high: float, dual: float) -> float:
    """-min(r A, clip(r) A), and for A < 0 at most -c A."""
    ratio = math.exp(min(max(log_ratio, -20.0), 20.0))
    loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return min(loss, -dual * advantage) if dual and advantage < 0 else loss


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dual", [0.0, 3.0, 1.5])
def test_policy_loss_by_definition(mode: losses.LossAggMode, dual: float) -> None:
    for seed in range(10):
        rows = random_rows(seed, 6)
        chosen = PolicySettings(
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            dual_clip_ratio=dual,
            entropy_coef=0.01,
            kl_loss_coef=0.1,
            kl_loss_estimator="k2",
            loss_agg_mode=mode,
        )
        denominators = Denominators.of(rows["mask"], horizon_tokens=HORIZON)
        loss, metrics = policy(rows, chosen, denominators)
        log_ratio = (rows["logp"] - rows["old_logp"]).numpy()
        clipped = np.vectorize(lambda x, a: policy_token_loss(x, a, 0.2, 0.28, dual))(
            log_ratio, rows["advantages"].numpy()
        )
        mask = rows["mask"].numpy()
        gradient_part = aggregate_by_definition(clipped * rows["weights"].numpy(), mask, mode)
        kl = aggregate_by_definition(0.5 * ((rows["logp"] - rows["reference_logp"]) ** 2).numpy(), mask, mode)
        entropy = aggregate_by_definition(rows["entropy"].numpy(), mask, mode)
        assert float(loss) == pytest.approx(gradient_part - 0.01 * entropy + 0.1 * kl, abs=1e-12)
        assert float(metrics["actor/pg_loss"]) == pytest.approx(gradient_part, abs=1e-12)
        assert float(metrics["actor/ppo_kl"]) == pytest.approx(
            aggregate_by_definition(-log_ratio, mask, "token-mean"), abs=1e-12
        )


def test_clip_fractions_count_strictly() -> None:
    """Ratio 2 with A = 1 is clipped; ratio 2 with A = -1 is not; ratio 8 with A = -1 meets the dual clip; ties do not."""
    ratio = torch.tensor([[2.0, 2.0, 8.0, 1.0, 0.5]])
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 0.0]])
    mask = torch.ones(1, 5)
    _, metrics = losses.policy_loss(
        ratio.log(), None, torch.zeros(1, 5), advantages, mask, PolicySettings(), Denominators.of(mask)
    )
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(1 / 5)
    assert float(metrics["actor/pg_clipfrac_lower"]) == pytest.approx(1 / 5)


def test_gradient_at_the_old_policy_is_the_policy_gradient() -> None:
    rows = random_rows(1, 5)
    logp = rows["old_logp"].clone().requires_grad_()
    denominators = Denominators.of(rows["mask"])
    loss, metrics = losses.policy_loss(
        logp, None, rows["old_logp"], rows["advantages"], rows["mask"], PolicySettings(), denominators
    )
    loss.backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -rows["advantages"] * rows["mask"] / denominators.tokens)
    assert float(metrics["actor/pg_clipfrac"]) == float(metrics["actor/ppo_kl"]) == 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_value_loss_by_definition(mode: losses.LossAggMode, clip: float) -> None:
    for seed in range(10):
        rows = random_rows(seed, 6)
        chosen = ValueSettings(value_clip=clip, loss_agg_mode=mode)
        denominators = Denominators.of(rows["mask"], horizon_tokens=HORIZON)
        loss, metrics = value(rows, chosen, denominators)
        predicted, old, target, mask = (rows[key].numpy() for key in ("values", "old_values", "returns", "mask"))
        bounded = np.clip(predicted, old - clip, old + clip) if clip else predicted
        token = np.maximum((predicted - target) ** 2, (bounded - target) ** 2)
        assert float(loss) == pytest.approx(0.5 * aggregate_by_definition(token, mask, mode), abs=1e-12)
        larger = ((bounded - target) ** 2 > (predicted - target) ** 2).astype(float)
        assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(
            aggregate_by_definition(larger, mask, "token-mean"), abs=1e-12
        )


Call = Callable[[dict[str, Tensor], Denominators], tuple[Tensor, losses.Metrics]]


def all_losses(mode: losses.LossAggMode) -> list[Call]:
    chosen = PolicySettings(entropy_coef=0.01, kl_loss_coef=0.1, kl_loss_estimator="k3+", loss_agg_mode=mode)
    return [
        lambda rows, denominators: policy(rows, chosen, denominators),
        lambda rows, denominators: value(rows, ValueSettings(loss_agg_mode=mode), denominators),
        lambda rows, denominators: losses.sft_loss(rows["logp"], rows["mask"], denominators),
    ]


@given(
    seed=st.integers(0, 1000),
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    mode=st.sampled_from(MODES),
    spare=st.integers(0, 2),
)
@settings(max_examples=150, deadline=None)
def test_any_split_gives_the_same_loss_gradient_and_metrics(
    seed: int, owners: list[int], mode: losses.LossAggMode, spare: int
) -> None:
    """Row i goes to micro-batch owners[i] of 4 (some empty), each padded with `spare` zero-weight rows full of junk."""
    rows = random_rows(seed, len(owners))
    denominators = Denominators.of(rows["mask"], horizon_tokens=HORIZON)
    for call in all_losses(mode):
        whole = {name: tensor.clone().requires_grad_(name in ("logp", "values")) for name, tensor in rows.items()}
        loss, metrics = call(whole, denominators)
        loss.backward()
        parts = {name: tensor.clone().requires_grad_(name in ("logp", "values")) for name, tensor in rows.items()}
        total, sums = 0.0, dict.fromkeys(metrics, 0.0)
        for owner in range(4):
            index = torch.tensor([i for i, chosen in enumerate(owners) if chosen == owner], dtype=torch.int64)
            junk = {name: torch.full((spare, 6), 0.0 if name == "mask" else math.inf) for name in rows}
            piece = {name: torch.cat([parts[name][index], junk[name].double()]) for name in rows}
            part, part_metrics = call(piece, denominators)
            part.backward()
            total += float(part.detach())
            sums = {name: sums[name] + float(part_metrics[name]) for name in sums}
        assert total == pytest.approx(float(loss.detach()), abs=1e-6)
        assert sums == pytest.approx({name: float(metric) for name, metric in metrics.items()}, abs=1e-6)
        for name in ("logp", "values"):
            one, other = whole[name].grad, parts[name].grad
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_kl_estimators_have_the_exact_mean() -> None:
    """E_p[k1] = E_p[k3] = KL(p || q); k2 as a loss has the gradient of the exact KL (k1 and k3 have not), k3+ too."""
    logits = torch.tensor([0.3, -0.5, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    other = torch.log_softmax(torch.tensor([0.1, 0.4, -0.7, 0.2], dtype=torch.float64), -1)

    def expectation(estimator: losses.KlEstimator) -> tuple[float, Tensor]:
        logp = torch.log_softmax(logits, -1)
        mean = (logp.exp().detach() * losses.kl_divergence(logp, other, estimator)).sum()
        return float(mean.detach()), torch.autograd.grad(mean, logits)[0]

    logp = torch.log_softmax(logits, -1)
    exact = (logp.exp() * (logp - other)).sum()
    gradient = torch.autograd.grad(exact, logits)[0]
    for estimator in ("k1", "k3", "k3+"):
        assert expectation(estimator)[0] == pytest.approx(float(exact.detach()), abs=1e-12)
    for estimator in ("k2", "k3+"):
        torch.testing.assert_close(expectation(estimator)[1], gradient)
    for estimator in ("k1", "k3"):
        assert not torch.allclose(expectation(estimator)[1], gradient, atol=1e-3)


def test_kl_clamps() -> None:
    far = torch.tensor([-100.0, 100.0])
    assert losses.kl_divergence(far, torch.zeros(2), "k3").tolist() == [10.0, 10.0]
    assert losses.kl_divergence(far, torch.zeros(2), "k1").tolist() == [-100.0, 100.0]


EDGE_MASKS = {
    "all masked": [[0.0, 0, 0, 0], [0, 0, 0, 0]],
    "one row masked": [[0.0, 0, 0, 0], [0, 1, 1, 0]],
    "eos at once": [[1.0, 0, 0, 0], [0, 1, 0, 0]],
    "longest without eos": [[1.0, 1, 1, 1], [1, 1, 1, 1]],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", EDGE_MASKS.values(), ids=EDGE_MASKS.keys())
def test_edge_cases_are_finite_in_value_and_gradient(mask: list[list[float]], mode: losses.LossAggMode) -> None:
    """Junk (NaN, infinity) outside the mask and log ratios of 1000 inside it."""
    kept = torch.tensor(mask)
    for junk in (math.nan, math.inf, -math.inf):
        dirty = torch.where(kept > 0, 1000.0, junk)
        rows = {
            name: dirty.clone()
            for name in ("entropy", "advantages", "reference_logp", "old_values", "returns", "weights")
        }
        rows |= {"old_logp": -dirty, "mask": kept}
        for call in all_losses(mode):
            rows["logp"], rows["values"] = (-dirty).requires_grad_(), dirty.clone().requires_grad_()
            loss, metrics = call(rows, Denominators.of(kept, horizon_tokens=4))
            loss.backward()
            assert math.isfinite(float(loss.detach()))
            assert all(math.isfinite(float(metric)) for metric in metrics.values())
            for name in ("logp", "values"):
                gradient = rows[name].grad
                assert gradient is None or bool(torch.isfinite(gradient).all())


def test_denominators_count_the_whole_mini_batch() -> None:
    mask = torch.tensor([[1.0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
    assert Denominators.of(mask, horizon_tokens=8) == Denominators(tokens=4.0, sequences=2.0, horizon_tokens=8.0)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.loss_agg_mode = 'mean': must be one of token-mean"):
        PolicySettings(loss_agg_mode="mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"algorithm.dual_clip_ratio = 0.5: must be above 1, or 0"):
        PolicySettings(dual_clip_ratio=0.5)
    with pytest.raises(ConfigError, match=r"algorithm.value_clip = nan"):
        ValueSettings(value_clip=math.nan)
    mask = torch.ones(1, 2)
    with pytest.raises(ValueError, match="entropy"):
        losses.policy_loss(mask, None, mask, mask, mask, PolicySettings(entropy_coef=0.1), Denominators.of(mask))
    with pytest.raises(ValueError, match="reference_logp"):
        losses.policy_loss(mask, None, mask, mask, mask, PolicySettings(kl_loss_coef=0.1), Denominators.of(mask))
    with pytest.raises(ValueError, match="horizon_tokens"):
        losses.aggregate(mask, mask, Denominators.of(mask), "seq-mean-token-sum-norm")
