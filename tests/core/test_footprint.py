"""Peaks of memory: published closed forms to the byte, laws, and jobs of which everybody knows whether they fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.costs.footprint import (
    activation_components,
    binding_peak,
    fits,
    generate_peak,
    in_flight,
    infer_peak,
    state_components,
    train_peak,
    with_resident,
    worst_train_peak,
)
from nereus.costs.generation import Generator
from nereus.costs.rates import rates_of
from nereus.costs.shape import dense, gpt
from nereus.costs.training import BatchWork, Recompute
from nereus.fleet import DEVICES
from nereus.layout import Layout

GIB = 1024**3
LLAMA_8B = dense(32, 4096, 32, 8, 14336, 128256)
LLAMA_70B = dense(80, 8192, 64, 8, 28672, 128256)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "gib"),
    [("none", False, 59.25), ("none", True, 39.6), ("selective", True, 9.59), ("full", False, 4.5)],
)
def test_activations_of_korthikantis_22b(recompute: Recompute, sequence_parallel: bool, gib: float) -> None:
    """Table 2 and figure 7 of Korthikanti et al. 2022, GPT-22B at TP 8, micro-batch 4."""
    shape = gpt(48, 6144, 64, 51200, position_rows=2048)
    batch = BatchWork(
        sequences=4,
        tokens=2048,
        micro_batch=4,
        recompute=recompute,
        attention="whole",
        sequence_parallel=sequence_parallel,
    )  # pyright: ignore[reportArgumentType]
    kept = activation_components(shape, Layout(tp=8, pp=1, dp=1, pipeline=(48,)), batch, 0)
    assert kept["activations"] / GIB == pytest.approx(gib, rel=0.01)


def test_states_are_eighteen_bytes_a_parameter_and_fewer_when_sharded() -> None:
    layout = Layout(tp=2, pp=1, dp=4, pipeline=(32,))
    batch = BatchWork(sequences=64, tokens=2048)
    local = LLAMA_8B.parameters_count / 2
    for sharding, bytes_each in (("none", 18), ("optimizer", 6 + 12 / 4), ("full", 16 / 4)):
        state = state_components(LLAMA_8B, layout, replace(batch, sharding=sharding), 0)
        assert sum(state.values()) == pytest.approx(bytes_each * local, rel=1e-6)


@given(
    tp=st.sampled_from((1, 2, 4, 8)),
    pp=st.sampled_from((1, 2, 4)),
    dp=st.sampled_from((1, 2, 8)),
    recompute=st.sampled_from(("none", "selective", "half", "full")),
    sharding=st.sampled_from(("none", "optimizer", "full")),
    tokens=st.sampled_from((512, 4096, 32768)),
    factor=st.sampled_from((2, 3)),
)
def test_longer_sequences_are_never_smaller(tp, pp, dp, recompute, sharding, tokens, factor) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp, pipeline=(32 // pp,) * pp)
    batch = BatchWork(sequences=64, tokens=tokens, recompute=recompute, sharding=sharding)
    longer = replace(batch, tokens=tokens * factor)
    for rank in range(pp):
        before, after = (train_peak(LLAMA_8B, layout, each, rank) for each in (batch, longer))
        assert after.total_bytes > before.total_bytes
        assert all(after.components[name] >= size for name, size in before.components.items())
    engine = Generator(tp=tp)
    assert (
        generate_peak(LLAMA_8B, engine, 8, tokens).total_bytes
        < generate_peak(LLAMA_8B, engine, 8, tokens * factor).total_bytes
    )


@given(memory=st.integers(1, 400), more=st.integers(0, 400), tokens=st.sampled_from((512, 8192)))
def test_more_memory_never_makes_a_plan_infeasible(memory: int, more: int, tokens: int) -> None:
    peak = train_peak(LLAMA_8B, Layout(tp=1, pp=1, dp=8, pipeline=(32,)), BatchWork(sequences=8, tokens=tokens), 0)
    small = replace(rates_of(DEVICES["h100"]), memory_bytes=memory * GIB)
    large = replace(small, memory_bytes=(memory + more) * GIB)
    assert not fits(peak, small) or fits(peak, large)


def test_1f1b_keeps_a_micro_batch_for_each_stage_behind_it() -> None:
    layout = Layout(tp=1, pp=4, dp=1, pipeline=(8,) * 4)
    batch = BatchWork(sequences=32, tokens=2048)
    assert [in_flight(layout, batch, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(layout, replace(batch, sequences=2), 0) == 2
    assert in_flight(layout, replace(batch, chunk_count=2), 0) == pytest.approx(4 * (1 + 3 / 8))


def test_ppo_of_70b_on_eight_a100_of_40_gib_does_not_fit_and_says_what_binds() -> None:
    """Full fine-tuning keeps 18 bytes for each of actor's and critic's parameters: 2.5 TB, on 0.34 TB."""
    a100 = rates_of(DEVICES["a100-40"])
    batch = BatchWork(sequences=64, tokens=1024, recompute="full")
    peaks = [
        with_resident(
            worst_train_peak(LLAMA_70B, Layout(tp=tp, pp=8 // tp, dp=1, pipeline=(80 * tp // 8,) * (8 // tp)), batch),
            {"critic.moments": 8 * LLAMA_70B.parameters_count / 8},
        )
        for tp in (1, 2, 4, 8)
    ]
    assert not any(fits(peak, a100) for peak in peaks)
    assert {peak.binding for peak in peaks} <= {"moments", "critic.moments"}
    assert all(peak.phase == "train" for peak in peaks)


def test_ppo_of_8b_on_eight_h100_fits() -> None:
    h100 = rates_of(DEVICES["h100"])
    layout = Layout(tp=2, pp=1, dp=4, pipeline=(32,))
    batch = BatchWork(sequences=64, tokens=2560, recompute="full")
    resident = {
        "critic.weights": 2 * LLAMA_8B.parameters_count / 2,
        "reference.weights": 2 * LLAMA_8B.parameters_count / 2,
    }
    actor = with_resident(train_peak(LLAMA_8B, layout, batch, 0), resident)
    generate = generate_peak(LLAMA_8B, Generator(tp=1), 64, 2560)
    infer = infer_peak(LLAMA_8B, layout, batch, 0)
    assert fits(actor, h100)
    assert fits(generate, h100)
    assert binding_peak((actor, generate, infer)) is actor
