"""The truth: tables at their own points, scaling laws that hold whatever the tables say, random effects that repeat."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.costs.rates import rates_of
from nereus.costs.shape import shape_of
from nereus.fleet import DEVICES, uniform
from nereus.layout import first_plan
from nereus.sim.decoding import GenerationTimes
from nereus.sim.derive import derive
from nereus.sim.measured import (
    TABLES,
    collective_seconds,
    decode_attention_seconds,
    gemm_seconds,
    grouped_gemm_seconds,
    prefill_attention_seconds,
)
from nereus.sim.training import Batching, StageTimes
from nereus.sim.truth import Truth
from tests.sim.scene import job, plan_config

PUBLIC = Path("/work/shared/data/profiling")
H100 = DEVICES["h100"]


def test_tables_have_their_own_points() -> None:
    entry = json.loads((TABLES / "gemm.json").read_text())["devices"]["h100"]
    at = (entry["rows"].index(512) * len(entry["outputs"]) + entry["outputs"].index(4096)) * len(entry["inputs"])
    known = entry["microseconds"][at + entry["inputs"].index(2048)]
    assert float(gemm_seconds(H100, 512, 4096, 2048)) == pytest.approx(known * 1e-6)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_device_has_times(name: str) -> None:
    device = DEVICES[name]
    assert 0 < float(gemm_seconds(device, 4096, 4096, 4096)) < 1
    assert 0 < float(decode_attention_seconds(device, 8, 2, 64, 2000)) < 1
    assert 0 < float(prefill_attention_seconds(device, 8, 2, 1, 2000)) < 1
    assert 0 < float(collective_seconds(device, "all_reduce", 1e8, 16, 8)) < 10


def test_large_work_scales() -> None:
    one, four = (float(gemm_seconds(H100, rows, 8192, 8192)) for rows in (8192, 4 * 8192))
    assert four == pytest.approx(4 * one)
    assert 2 * 8192**3 / one < H100.peak_flops_per_second
    short, long = (float(prefill_attention_seconds(H100, 32, 8, 1, tokens)) for tokens in (16384, 65536))
    assert long == pytest.approx(16 * short)
    inside, across = (float(collective_seconds(H100, "all_reduce", 1e9, ranks, 8)) for ranks in (8, 16))
    assert across > 1.5 * inside
    assert float(collective_seconds(H100, "all_reduce", 1e9, 1, 8)) == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 9), st.integers(1, 16))
def test_every_sample_is_in_one_micro_batch(samples: int, minis: int, replicas: int, micro: int) -> None:
    stage = first_plan(job(slots=8 * replicas, plan=plan_config(8, 1, replicas, 1))).actor_train
    stage = replace(stage, micro_batch=micro, shares=(0,) * replicas)
    found = Batching.of(stage, samples, min(minis, samples))
    assert len(found.micro_of) == samples
    assert np.bincount(found.micro_of).max() <= micro
    assert len(found.group_of) == found.micro_of.max() + 1
    assert found.group_of.max() < found.groups == min(minis, samples) * replicas


def test_a_device_without_a_table_is_its_relative_at_the_rates_that_both_reach() -> None:
    """MI300X: 1,307 TFLOP/s on paper, of which products reach half (hardware table: 668); H100 reaches four fifths of 989."""
    for name in ("mi300x", "h20"):
        device = DEVICES[name]
        reached = rates_of(H100).flops_per_second / rates_of(device).flops_per_second
        large = float(gemm_seconds(device, 16384, 8192, 8192)) / float(gemm_seconds(H100, 16384, 8192, 8192))
        assert large == pytest.approx(reached, rel=1e-6)
        read = rates_of(H100).cache_bytes_per_second / rates_of(device).cache_bytes_per_second
        sizes = (32, 8, 64, 4096)
        cached = float(decode_attention_seconds(device, *sizes)) / float(decode_attention_seconds(H100, *sizes))
        assert cached == pytest.approx(read, rel=1e-6)
    assert 2 * 16384 * 8192**2 / float(gemm_seconds(DEVICES["mi300x"], 16384, 8192, 8192)) < 700e12


def test_experts_are_one_kernel() -> None:
    """One expert is a product; many read their weights once and are launched once."""
    assert float(grouped_gemm_seconds(H100, 1, 64, 4096, 2048)) == pytest.approx(
        float(gemm_seconds(H100, 64, 4096, 2048))
    )
    alone, many = float(gemm_seconds(H100, 8, 1536, 2048)), float(grouped_gemm_seconds(H100, 128, 8, 1536, 2048))
    assert many < 64 * alone
    read = 2 * 128 * 1536 * 2048 / H100.memory_bytes_per_second
    assert read < many < 2 * read
    each = grouped_gemm_seconds(H100, np.array([1.0, 16.0, 128.0]), np.array([8.0, 8.0, 8.0]), 1536, 2048)
    assert each[-1] == pytest.approx(many)
    assert (np.diff(each) > 0).all()


def test_a_pipeline_and_a_slow_slot() -> None:
    config = job(slots=16, plan=plan_config(2, 4, 2, 2))
    stage = first_plan(config).actor_train
    times = StageTimes(shape_of(config.model), stage, uniform(16, H100), 256, 2)
    tokens, even = np.full(256, 1000.0), np.ones(16)
    base = times.forward_seconds(tokens, even)
    slow = even.copy()
    slow[stage.slots[0]] = 1.5
    assert base * 1.2 < times.forward_seconds(tokens, slow) < base * 1.5
    uneven = tokens.copy()
    uneven[0] = 20_000.0
    assert times.forward_seconds(uneven, even) > base * 1.1
    assert times.training_seconds(tokens, even, 2) == pytest.approx(2 * times.training_seconds(tokens, even, 1))


def test_generation_waits_for_the_longest_and_for_room() -> None:
    config = job(slots=16)
    engines = GenerationTimes(config, first_plan(config).actor_generate, uniform(16, H100), Truth(exact=True))
    prompts, even = np.full(256, 200), np.ones(16)
    base = engines.seconds(prompts, np.full(256, 500), even)
    tail = np.full(256, 500)
    tail[7] = 2000
    assert engines.seconds(prompts, tail, even) > 2 * base
    roomy = engines.cache_tokens
    engines.cache_tokens = 700 * 8  # eight sequences at a time, of thirty-two
    assert engines.seconds(prompts, np.full(256, 500), even) > 2 * base
    engines.cache_tokens = roomy


def test_random_effects_repeat() -> None:
    one, same, other = Truth(seed=1), Truth(seed=1), Truth(seed=2)
    assert (one.slowness(64) == same.slowness(64)).all()
    assert (one.slowness(64) != other.slowness(64)).any()
    assert one.noise(3, "gen") == same.noise(3, "gen") != one.noise(4, "gen")
    slow = [one.straggling(64, step).max() for step in range(0, 2000, 12)]
    assert 0.05 < np.mean(np.array(slow) > 1) < 0.6  # 64 nodes, 0.4 % each
    assert Truth(exact=True).noise(3, "gen") == 1.0


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public profiles are not on this machine")
def test_the_shipped_tables_are_made_by_their_command(tmp_path: Path) -> None:
    derive(PUBLIC, tmp_path)
    for path in sorted(TABLES.glob("*.json")):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public profiles are not on this machine")
def test_interpolation_against_points_that_are_not_in_the_grid() -> None:
    """H100 products with rows that the shipped grid leaves out."""
    with (PUBLIC / "aiconfigurator" / "gemm_bf16.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["system"] == "h100_sxm"]
    kept = {2**i for i in range(14)}
    left = [r for r in rows if int(r["m"]) not in kept and int(r["m"]) > 17][::7]
    found = np.array([float(gemm_seconds(H100, int(r["m"]), int(r["n"]), int(r["k"]))) for r in left])
    ratio = found / (np.array([float(r["latency_ms"]) for r in left]) * 1e-3)
    print(f"{len(left)} products: median {np.median(ratio):.3f}, 90 % within {np.quantile(np.abs(ratio - 1), 0.9):.3f}")
    assert 0.9 < np.median(ratio) < 1.1
    assert np.quantile(np.abs(ratio - 1), 0.9) < 0.35
