"""The transitions' benchmark at a tiny size: each means ends with the state that it began with, and all of it is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import cloudpickle

import benchmarks.transition
from benchmarks.transition import measure_pair
from benchmarks.transition_job import BenchJob, bench_config
from benchmarks.transition_report import TARGETS, ratios, text
from nereus.config import ModelConfig
from nereus.errors import DigestMismatch
from nereus.runtime.pool import SlotPool

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # slots need not find this file


def test_every_means_brings_the_same_state(pool: SlotPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.transition, "REPETITIONS", 1)
    bench = BenchJob(pool, bench_config(ModelConfig(layers=2), "TP2 PP2"), tmp_path)
    found: dict[str, Any] = {"changes": [], "moves": []}
    measure_pair(bench, "TP2 PP2", "PP2 DP2", found)
    judged = ratios(found)
    assert set(judged) == set(TARGETS) - {"b"}
    assert all(sample > 0 for ratio in judged.values() for sample in ratio.samples)
    assert all(str(ratio) in text({**found, "restart": {"stop": 1.0}}) for ratio in judged.values())

    pool.call("apply", {1: (flip,)})  # the measurements would notice a state that is not the one they began with
    with pytest.raises((AssertionError, DigestMismatch), match=r"changed on the way|differs between slots"):
        bench.check()


def flip(slot: Any) -> None:
    """One bit of a slot's live weights."""
    view = next(iter(slot.live["actor.train"].views().values()))
    view.view(torch.int32)[(0,) * view.dim()] ^= 1
