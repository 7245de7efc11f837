"""The cost model's laws: more of anything that is fast is never slower, work is conserved, phases sum up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.costs.coefficients import FACTORS, coefficient, factor_names, prior_for
from nereus.costs.generation import (
    Generator,
    Lengths,
    cache_tokens,
    decode_step,
    equal_lengths,
    generate_terms,
    lognormal_lengths,
    quantiles_of,
    steady_terms,
)
from nereus.costs.rates import Rates, rates_of, slower, weakest
from nereus.costs.shape import Shape, dense, gpt
from nereus.costs.step import StepWork, step_phases, summed
from nereus.costs.training import BatchWork, forward_terms, predicted_seconds, train_terms
from nereus.fleet import CPU_SLOT, DEVICES
from nereus.layout import Layout

LLAMA_8B = dense(32, 4096, 32, 8, 14336, 128256)
QWEN_MOE = Shape(
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=6144,
    vocab=151936,
    expert_count=128,
    active_expert_count=8,
    expert_ffn=768,
)
RATES = (
    "flops_per_second",
    "memory_bytes_per_second",
    "attention_flops_per_second",
    "cache_bytes_per_second",
    "link_bytes_per_second",
    "nic_bytes_per_second",
    "host_bytes_per_second",
    "memory_bytes",
)
H100 = rates_of(DEVICES["h100"])

degrees = st.sampled_from((1, 2, 4, 8))
devices = st.sampled_from(("a100", "h100", "b200", "l40s", "h20", "mi300x")).map(lambda name: rates_of(DEVICES[name]))
shapes = st.sampled_from((LLAMA_8B, QWEN_MOE, gpt(24, 2048, 16, 50304)))


@st.composite
def layouts(draw: st.DrawFn, shape: Shape = LLAMA_8B) -> Layout:
    tp, pp, cp = draw(degrees), draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2)))
    base, more = divmod(shape.layers, pp)
    pipeline = tuple(base + (rank < more) for rank in range(pp))
    return Layout(tp=tp, pp=pp, dp=draw(degrees), cp=cp, pipeline=pipeline)


@st.composite
def batches(draw: st.DrawFn) -> BatchWork:
    return BatchWork(
        sequences=draw(st.sampled_from((64, 256))),
        tokens=draw(st.sampled_from((512, 2048, 8192))),
        micro_batch=draw(st.sampled_from((1, 2))),
        recompute=draw(st.sampled_from(("none", "selective", "half", "full"))),
        sharding=draw(st.sampled_from(("none", "optimizer", "full"))),
        attention=draw(st.sampled_from(("fused", "early", "whole"))),
        sequence_parallel=draw(st.booleans()),
    )


def seconds(terms: dict[str, float], kind: str = "train") -> float:
    return predicted_seconds(terms, prior_for(terms, "h100", kind=kind).means)  # pyright: ignore[reportArgumentType]


def better(rates: Rates, name: str, factor: float) -> Rates:
    return replace(rates, **{name: type(getattr(rates, name))(getattr(rates, name) * factor)})


@given(layout=layouts(), batch=batches(), rates=devices, name=st.sampled_from(RATES), factor=st.floats(1, 8))
def test_more_of_a_rate_never_slows_training(
    layout: Layout, batch: BatchWork, rates: Rates, name: str, factor: float
) -> None:
    before = seconds(train_terms(LLAMA_8B, layout, batch, rates))
    after = seconds(train_terms(LLAMA_8B, layout, batch, better(rates, name, factor)))
    assert after <= before * (1 + 1e-9)


@settings(max_examples=50)
@given(
    tp=degrees, rates=devices, name=st.sampled_from(RATES), factor=st.floats(1, 8), responses=st.integers(1, 3000),
    mean=st.floats(20, 3000), shape=shapes,
)  # fmt: skip
def test_more_of_a_rate_never_slows_generation(
    tp: int, rates: Rates, name: str, factor: float, responses: int, mean: float, shape: Shape
) -> None:
    engine, lengths = Generator(tp=tp), lognormal_lengths(mean, 4096)
    before = seconds(generate_terms(shape, engine, rates, 200, responses, lengths), "generate")
    after = seconds(generate_terms(shape, engine, better(rates, name, factor), 200, responses, lengths), "generate")
    assert after <= before * (1 + 1e-9)


@settings(max_examples=50)
@given(
    tp=degrees, rates=devices, responses=st.integers(1, 3000), mean=st.floats(20, 3000), factor=st.floats(1, 4), shape=shapes
)  # fmt: skip
def test_longer_responses_are_never_faster(
    tp: int, rates: Rates, responses: int, mean: float, factor: float, shape: Shape
) -> None:
    engine, lengths = Generator(tp=tp), lognormal_lengths(mean, 8192)
    before = seconds(generate_terms(shape, engine, rates, 200, responses, lengths), "generate")
    after = seconds(generate_terms(shape, engine, rates, 200, responses, lengths.scaled(factor)), "generate")
    assert after >= before * (1 - 1e-9)


@given(layout=layouts(), batch=batches(), factor=st.sampled_from((2, 3, 4)))
def test_longer_sequences_are_never_faster_to_train(layout: Layout, batch: BatchWork, factor: int) -> None:
    longer = replace(batch, tokens=batch.tokens * factor)
    assert seconds(train_terms(LLAMA_8B, layout, longer, H100)) >= seconds(train_terms(LLAMA_8B, layout, batch, H100))


@given(layout=layouts(), batch=batches(), rates=devices)
def test_dp_shares_out_work_and_adds_none(layout: Layout, batch: BatchWork, rates: Rates) -> None:
    """What all slots compute in total does not depend on DP; only its collectives and sharding do."""
    alone = replace(layout, dp=1)
    one = train_terms(LLAMA_8B, alone, replace(batch, sequences=batch.sequences), rates)
    spread = train_terms(LLAMA_8B, layout, replace(batch, sequences=batch.sequences * layout.dp), rates)
    for term in ("gemm", "attention", "memory", "launch", "head", "tp", "cp", "recompute"):
        assert spread.get(term, 0.0) == pytest.approx(one.get(term, 0.0))


@given(layout=layouts(), batch=batches(), rates=devices, mini=st.integers(1, 4), critic=st.booleans())
@settings(max_examples=50)
def test_a_step_is_the_sum_of_its_phases(
    layout: Layout, batch: BatchWork, rates: Rates, mini: int, critic: bool
) -> None:
    work = StepWork(
        samples=256,
        prompt_tokens=200,
        lengths=lognormal_lengths(500, 2048),
        mini_batches=mini,
        critic=critic,
        forward_count=3,
    )
    phases = step_phases(LLAMA_8B, layout, batch, Generator(tp=2), 4, work, rates)
    whole = seconds(summed(phases), "rl")
    assert whole == pytest.approx(sum(seconds(dict(terms), "rl") for terms in phases.values()))
    assert set(phases) == {"generate", "infer", "train", "sync", "framework"}


@given(layout=layouts(), batch=batches(), weight=st.sampled_from((1.0, 2.0)), chunks=st.sampled_from((1, 2)))
@settings(max_examples=50)
def test_a_step_trains_and_infers_as_its_batch_says(
    layout: Layout, batch: BatchWork, weight: float, chunks: int
) -> None:
    """256 samples of 700 tokens: two mini-batches of 128 are trained, 11 samples fill 8,192 tokens."""
    batch = replace(batch, weight_bytes=weight, gradient_bytes=2.0, chunk_count=chunks)
    work = StepWork(samples=256, prompt_tokens=200, lengths=equal_lengths(500), mini_batches=2, forward_count=3)
    phases = step_phases(LLAMA_8B, layout, batch, Generator(tp=2), 4, work, H100)
    whole = replace(batch, sequences=256, tokens=700, micro_batch=11)
    forward = forward_terms(LLAMA_8B, layout, whole, H100)
    trained = train_terms(LLAMA_8B, layout, replace(whole, sequences=128), H100)
    assert phases["infer"] == {name: 3 * seconds for name, seconds in forward.items()}
    assert phases["train"] == {name: 2 * seconds for name, seconds in trained.items()}


def test_the_bubble_of_equal_stages_is_1f1bs() -> None:
    """(p - 1) / v micro-batches of the whole stage (Narayanan et al. 2021)."""
    shape = replace(dense(32, 4096, 32, 8, 14336, 64), tied=False)  # a head too small to count
    layout = Layout(tp=1, pp=4, dp=1, pipeline=(8, 8, 8, 8))
    for chunks in (1, 2):
        batch = BatchWork(sequences=16, tokens=2048, chunk_count=chunks)
        terms = train_terms(shape, layout, batch, H100)
        stage = sum(terms[name] for name in ("gemm", "attention", "memory", "launch", "head", "pp")) / 16
        assert terms["bubble"] == pytest.approx(3 * stage / chunks, rel=0.01)


def test_an_uneven_pipeline_waits_for_its_longest_stage() -> None:
    batch = BatchWork(sequences=64, tokens=2048)
    even = train_terms(LLAMA_8B, Layout(tp=1, pp=2, dp=1, pipeline=(16, 16)), batch, H100)
    uneven = train_terms(LLAMA_8B, Layout(tp=1, pp=2, dp=1, pipeline=(24, 8)), batch, H100)
    assert uneven["gemm"] / even["gemm"] == pytest.approx(24 / 16, rel=0.05)
    assert sum(uneven.values()) > 1.2 * sum(even.values())


def test_large_products_run_near_the_device_and_small_ones_at_its_memory() -> None:
    a100 = rates_of(DEVICES["a100"])
    assert a100.gemm_seconds(8192, 8192, 8192) == pytest.approx(2 * 8192**3 / a100.flops_per_second, rel=0.05)
    read = 2 * 8192 * 8192 / a100.memory_bytes_per_second
    assert a100.gemm_seconds(1, 8192, 8192) == pytest.approx(read + a100.launch_seconds, rel=0.05)


def test_a_collective_across_nodes_shares_their_ports() -> None:
    inside = H100.collective_seconds(1e9, 8, 8)
    assert inside == pytest.approx(1e9 / H100.link_bytes_per_second, rel=0.02)
    two_per_node = H100.collective_seconds(1e9, 16, 2)
    assert two_per_node == pytest.approx(1e9 / (2 * H100.nic_bytes_per_second), rel=0.02)
    assert H100.collective_seconds(1e9, 1, 8) == 0


def test_recomputation_costs_a_third_at_most() -> None:
    layout = Layout(tp=1, pp=1, dp=8, pipeline=(32,))
    none, full = (
        train_terms(LLAMA_8B, layout, BatchWork(sequences=64, tokens=4096, recompute=how), H100)
        for how in ("none", "full")
    )
    assert 1.2 < sum(full.values()) / sum(none.values()) < 1.36


def test_the_longest_response_sets_the_end_of_a_batch() -> None:
    """Equal means, another tail: the batch with the long tail takes longer, though it makes as many tokens."""
    engine = Generator(tp=1)
    short = generate_terms(LLAMA_8B, engine, H100, 200, 64, equal_lengths(500))
    tail = generate_terms(LLAMA_8B, engine, H100, 200, 64, Lengths(tokens=(250.0,) * 12 + (2250.0,) * 1 + (270.0,) * 3))
    assert sum(tail.values()) > 1.5 * sum(short.values())


def test_a_full_cache_makes_sequences_wait() -> None:
    engine, lengths = Generator(tp=1), equal_lengths(4000)
    most = cache_tokens(LLAMA_8B, engine, H100) / 4200
    few, twice = (
        sum(generate_terms(LLAMA_8B, engine, H100, 200, int(count * most), lengths).values()) for count in (0.99, 1.98)
    )
    assert twice == pytest.approx(2 * few, rel=0.03)


def test_a_model_that_does_not_fit_takes_for_ever() -> None:
    large = dense(80, 8192, 64, 8, 28672, 128256)
    terms = generate_terms(large, Generator(tp=1), H100, 200, 8, equal_lengths(100))
    assert sum(terms.values()) == float("inf")


def test_decode_reads_only_the_experts_that_are_chosen() -> None:
    one = decode_step(QWEN_MOE, Generator(tp=1), H100, 1, 1000)["decode_experts"]
    all_read = 48 * 3 * 128 * 768 * 2048 * 2 / H100.memory_bytes_per_second
    assert one == pytest.approx(all_read * 8 / 128, rel=0.3)
    many = decode_step(QWEN_MOE, Generator(tp=1), H100, 256, 1000)["decode_experts"]
    assert many == pytest.approx(all_read, rel=0.3)


def test_steady_state_spreads_prefills_over_outputs() -> None:
    short = steady_terms(LLAMA_8B, Generator(tp=1), H100, 1000, 100, 32)["prefill"]
    assert steady_terms(LLAMA_8B, Generator(tp=1), H100, 1000, 400, 32)["prefill"] == pytest.approx(short / 4)


@given(mean=st.floats(5, 3000), cap=st.floats(100, 4000), spread=st.floats(0.1, 1.2))
def test_lengths_have_the_mean_and_the_cap_asked_for(mean: float, cap: float, spread: float) -> None:
    lengths = lognormal_lengths(mean, cap, spread)
    assert lengths.mean_tokens == pytest.approx(min(mean, cap), rel=1e-3)
    assert max(lengths.tokens) <= cap * (1 + 1e-9)
    assert list(lengths.tokens) == sorted(lengths.tokens)


def test_quantiles_of_measured_lengths_keep_their_mean() -> None:
    measured = [float(n) for n in range(1, 1001)]
    assert quantiles_of(measured).mean_tokens == pytest.approx(500, rel=0.02)


def test_a_straggler_is_slower_and_the_weakest_slot_counts() -> None:
    slow = slower(H100, 2.0)
    assert slow.flops_per_second == H100.flops_per_second / 2
    a100 = rates_of(DEVICES["a100-40"])
    both = weakest((H100, a100))
    assert both.memory_bytes == a100.memory_bytes
    assert both.launch_seconds == a100.launch_seconds


def test_forward_is_a_third_of_training_without_recomputation() -> None:
    layout = Layout(tp=1, pp=1, dp=1, pipeline=(32,))
    batch = BatchWork(sequences=8, tokens=2048, micro_batch=4)
    forward, whole = forward_terms(LLAMA_8B, layout, batch, H100), train_terms(LLAMA_8B, layout, batch, H100)
    assert whole["gemm"] == pytest.approx(3 * forward["gemm"])


def test_small_layers_take_what_the_host_takes_to_issue_them() -> None:
    """A quarter of the work is not faster when kernels are too small; on a CPU host and slot are one."""
    layout = Layout(tp=8, pp=1, dp=1, pipeline=(24,))
    small, tiny = (gpt(24, hidden, 16, 50304) for hidden in (512, 256))
    batch = BatchWork(sequences=8, tokens=1024)
    times = [seconds(train_terms(shape, layout, batch, H100)) for shape in (small, tiny)]
    assert times[0] == pytest.approx(times[1], rel=0.1)
    assert train_terms(tiny, layout, batch, H100)["host"] > 0
    assert train_terms(tiny, layout, batch, rates_of(CPU_SLOT))["host"] == 0
    large = train_terms(LLAMA_8B, Layout(tp=1, pp=1, dp=1, pipeline=(32,)), replace(batch, tokens=4096), H100)
    assert large["host"] == 0


def test_coefficients_are_products_of_shipped_factors() -> None:
    assert coefficient("gemm", "h200") == FACTORS["gemm"] * FACTORS["gemm@h100"]
    assert coefficient("gemm", "h100", "fp8") == coefficient("gemm", "h100") * FACTORS["fp8.gemm"]
    assert coefficient("decode_cache", "b200", kind="rl") == FACTORS["decode_cache"] * FACTORS["rl.generate"]
    assert coefficient("host", "h100") == 1
    assert factor_names("sync", "h100", "bf16", "rl") == ("sync",)
    assert coefficient("a term that nobody fitted", "cpu") == 1
