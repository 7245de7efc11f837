"""Any number of replicas on any batch: the same losses, gradients and gradient norms (clipping on)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nereus.rl.batch import Batch, build
from nereus.rl.losses import Denominators, PolicySettings, ValueSettings
from nereus.runtime.objective import Objective
from nereus.runtime.pool import SlotPool
from nereus.storage import emu_name
from tests.live.scene import S, Scene, config

LAYOUTS = {
    "DP1": (S(), (0,)),
    "DP2": (S(dp=2), (0, 1)),
    "DP3": (S(dp=3), (0, 1, 2)),
    "DP4": (S(dp=4), (0, 1, 2, 3)),
    "TP2·DP2": (S(tp=2, dp=2), (0, 1, 2, 3)),
    "PP2·DP2": (S(pp=2, dp=2), (0, 1, 2, 3)),
    "DP4 plain": (S(dp=4, distributed_optimizer=False), (0, 1, 2, 3)),
    "TP2·PP2": (S(tp=2, pp=2), (0, 1, 2, 3)),
}
BATCHES = (3, 8, 10)


def batch_of(rows: int) -> Batch:
    """Random samples of different lengths with all columns that the losses read."""
    generator = torch.Generator().manual_seed(rows)

    def numbers(count: int) -> list[int]:
        return torch.randint(0, 256, (count,), generator=generator).tolist()

    prompts = [numbers(3 + i % 4) for i in range(rows)]
    responses = [numbers(2 + (3 * i) % 7) for i in range(rows)]
    batch = build(prompts, responses)
    shape = batch.mask.shape
    return batch.with_columns(
        old_logp=-5.5 + 0.1 * torch.randn(shape, generator=generator),
        advantages=torch.randn(shape, generator=generator),
        values=torch.randn(shape, generator=generator),
        returns=torch.randn(shape, generator=generator),
    )


def objective(kind: str, batch: Batch) -> Objective:
    denominators = Denominators.of(batch.mask)
    if kind == "value":
        return Objective(kind="value", value=ValueSettings(), denominators=denominators)
    return Objective(kind="policy", policy=PolicySettings(entropy_coef=0.01), denominators=denominators)


def one_step(scene: Scene, name: str, batch: Batch, micro_batch: int, shares: tuple[int, ...] | None) -> tuple:
    """(loss, gradient norm, clipped gradients) of one optimizer step that leaves the weights where they were."""
    stage = getattr(scene.job.plan, name)
    stage = replace(stage, micro_batch=micro_batch, shares=shares or stage.shares)
    scene.pool.call_all("reset_optimizer", emu_name(stage))
    kind = "value" if name == "critic_train" else "policy"
    row = scene.phases.update(stage, batch, objective(kind, batch), 0.0)
    moments = {t: v for (_, t), v in scene.tensors(emu_name(stage), "exp_avg").items()}
    key = "critic/vf_loss" if kind == "value" else "actor/loss"
    return row[key], row[f"{stage.model}/grad_norm"], moments  # exp_avg after one step is (1 - beta1) x gradient


@pytest.mark.parametrize("name", ["actor_train", "critic_train"])
def test_losses_gradients_and_norms_do_not_depend_on_replicas(pool: SlotPool, tmp_path: Path, name: str) -> None:
    scene = Scene(pool, config(), tmp_path, generation=False)
    expected: dict[int, tuple] = {}
    for label, (layout, slots) in LAYOUTS.items():
        scene.change(**{name: replace(layout, slots=slots)})
        for rows in BATCHES:
            batch = batch_of(rows)
            micros = (1, 2, 4) if label in ("DP1", "DP3", "DP4") else (2,)
            uneven = [(rows - 1, *(0,) * (layout.dp - 2), 1)] if label in ("DP3", "PP2·DP2") and rows == 8 else []
            for micro, shares in [*((m, None) for m in micros), *((2, u) for u in uneven)]:
                loss, norm, moments = one_step(scene, name, batch, micro, shares)
                first = expected.setdefault(rows, (loss, norm, moments))
                where = f"{label}, {rows} samples, micro-batch {micro}, shares {shares}"
                assert norm > 1.0 or name == "critic_train", f"{where}: clipping takes no part"
                assert abs(loss - first[0]) <= 1e-5 * max(1.0, abs(first[0])), where
                assert abs(norm - first[1]) <= 1e-5 * first[1], f"{where}: norm {norm} for {first[1]}"
                for tensor, moment in moments.items():
                    gap = float((moment - first[2][tensor]).norm() / first[2][tensor].norm().clamp(min=1e-12))
                    assert gap <= 1e-5, f"{where}: gradient of {tensor} differs by {gap:.1e}"
