"""The profile of a probe: rates come back out of timed work, absent pieces keep the catalogue's, sizes change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.costs.profile import Profile, Sample, fitted, recorded, resized, supposed
from nereus.costs.rates import GEMM_POWER

DEFAULT = supposed("cpu", 4, 4, 2)


def gemm(rows: int, outputs: int, inputs: int, flops: float, memory: float) -> Sample:
    arithmetic = 2 * rows * outputs * inputs / flops
    moved = 4 * (rows * (inputs + outputs) + inputs * outputs) / memory
    seconds = (arithmetic**GEMM_POWER + moved**GEMM_POWER) ** (1 / GEMM_POWER) + 2e-6
    return Sample(kind="gemm", seconds=seconds, shape=(rows, outputs, inputs))


@settings(deadline=None)
@given(flops=st.floats(1e10, 1e12), memory=st.floats(2e9, 1e11))
def test_arithmetic_and_memory_come_back_out_of_products_and_copies(flops: float, memory: float) -> None:
    samples = [gemm(rows, width, 512, flops, memory) for rows in (8, 64, 256) for width in (512, 2048)]
    samples.append(Sample(kind="copy", seconds=2 * 1e6 / memory, shape=(1_000_000,)))
    profile = fitted(samples, DEFAULT)
    assert profile.memory_bytes_per_second == pytest.approx(memory)
    if flops / memory < 50:  # else even large products are all memory, and say little of arithmetic
        assert profile.flops_per_second == pytest.approx(flops, rel=0.15)


@settings(deadline=None)
@given(latency=st.floats(1e-5, 1e-2), rate=st.floats(1e8, 1e11))
def test_latency_and_bandwidth_come_back_out_of_collectives(latency: float, rate: float) -> None:
    samples = [
        Sample(
            kind="all_reduce",
            seconds=latency * ranks.bit_length() + 2 * (ranks - 1) / ranks * size / rate,
            shape=(size,),
            ranks=ranks,
        )
        for ranks in (2, 4)
        for size in (16, 1 << 26)
    ]
    profile = fitted(samples, DEFAULT)
    assert profile.link_seconds == pytest.approx(latency, rel=0.05)
    if (1 << 26) / rate > latency:
        assert profile.link_bytes_per_second == pytest.approx(rate, rel=0.1)


def unit(seconds: float, ranks: int) -> Sample:
    return Sample(kind="units", seconds=seconds, shape=(256, 128, 256, 384), ranks=ranks)


def test_slots_that_share_cores_slow_each_other_down() -> None:
    samples = [unit(0.010, 1), unit(0.013, 1), *[unit(0.020, 4)] * 4, *[unit(0.030, 4)] * 4]
    profile = fitted(samples, DEFAULT)
    assert profile.together_slots == pytest.approx(2.0), "of each the best round: another process disturbed the rest"
    assert profile.crowding(4) == pytest.approx(2.0)
    assert profile.crowding(1) == 1.0
    assert fitted([unit(0.01, 1), *[unit(0.01, 4)] * 4], DEFAULT).together_slots == pytest.approx(4.0)


def test_what_nothing_measured_is_the_catalogues() -> None:
    assert fitted([], DEFAULT) == DEFAULT
    timed = fitted([Sample(kind="call", seconds=0.25)], DEFAULT)
    assert timed == replace(DEFAULT, call_seconds=0.25)
    assert supposed("h100", 2, 16, 8).together_slots == 16
    assert supposed("a thing unheard of", 2, 4, 2) == supposed("cpu", 2, 4, 2)


def test_a_profile_survives_json() -> None:
    assert recorded(DEFAULT.record()) == DEFAULT
    with pytest.raises(KeyError, match="call_seconds"):
        recorded({k: v for k, v in DEFAULT.record().items() if k != "call_seconds"})


def test_more_slots_on_the_same_cores_do_not_get_more_done() -> None:
    measured = replace(DEFAULT, together_slots=1.7)
    fewer = resized(measured, DEFAULT, supposed("cpu", 4, 2, 2))
    assert (fewer.slots, fewer.together_slots) == (2, pytest.approx(1.7))
    alone = resized(measured, DEFAULT, supposed("cpu", 4, 1, 2))
    back = resized(alone, supposed("cpu", 4, 1, 2), DEFAULT)
    assert (back.slots, back.together_slots) == (4, pytest.approx(1.7))
    more = resized(measured, DEFAULT, supposed("cpu", 4, 8, 4))  # a second host of two cores
    assert more.together_slots == pytest.approx(3.4)


def test_bandwidths_are_stated_in_numbers_of_two_bytes() -> None:
    wide, narrow = supposed("cpu", 4, 4, 2).rates(1 << 30), supposed("cpu", 2, 4, 2).rates(1 << 30)
    assert wide.memory_bytes_per_second == pytest.approx(narrow.memory_bytes_per_second / 2)
    assert wide.link_bytes_per_second == pytest.approx(narrow.link_bytes_per_second / 2)
    assert isinstance(supposed("h100", 2, 8, 1), Profile)
