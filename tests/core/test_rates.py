"""Device rates agree with the public micro-benchmarks that they were fitted to, and every device has some."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from nereus.costs.rates import FRACTIONS, LIKE, rates_of
from nereus.fleet import CPU_SLOT, DEVICES

TABLES = Path("/work/shared/data/profiling/aiconfigurator")
NAMES = {"a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "l40s": "l40s"}
needs_tables = pytest.mark.skipif(not TABLES.exists(), reason="the public kernel tables are not on this machine")


def rows(name: str, every: int = 1) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {name: [] for name in NAMES}
    with (TABLES / name).open() as file:
        for index, row in enumerate(csv.DictReader(file)):
            if row["system"] in found and index % every == 0:
                found[row["system"]].append(row)
    return found


@needs_tables
def test_products_take_what_was_measured() -> None:
    for system, measured in rows("gemm_bf16.csv", every=7).items():
        rates = rates_of(DEVICES[NAMES[system]])
        errors = [
            abs(rates.gemm_seconds(int(r["m"]), int(r["n"]), int(r["k"])) / (float(r["latency_ms"]) / 1e3) - 1)
            for r in measured
            if int(r["n"]) >= 1024 and int(r["k"]) >= 1024
        ]
        assert len(errors) > 100, system
        assert np.median(errors) < 0.11, system


@needs_tables
def test_large_all_reduces_take_what_was_measured() -> None:
    for system, measured in rows("nccl_half.csv").items():
        if system == "l40s":
            continue  # its table looks broken (data, README)
        rates = rates_of(DEVICES[NAMES[system]])
        ratios = [
            rates.collective_seconds(2 * (n - 1) / n * size, n, 8) / (float(r["latency_ms"]) / 1e3)
            for r in measured
            if r["op_name"] == "all_reduce"
            and (n := int(r["num_gpus"]))
            and (size := 2 * int(r["message_size"])) >= 16e6
        ]
        assert len(ratios) > 0, system
        assert 0.7 < np.median(ratios) < 1.3, system


def test_every_device_has_rates_and_reaches_less_than_its_data_sheet() -> None:
    for device in (*DEVICES.values(), CPU_SLOT):
        assert device.name in FRACTIONS or device.name in LIKE
        rates = rates_of(device)
        assert 0.2 < rates.flops_per_second / device.peak_flops_per_second < 1
        assert 0.5 < rates.memory_bytes_per_second / device.memory_bytes_per_second < 1
        assert rates.memory_bytes == device.memory_bytes
