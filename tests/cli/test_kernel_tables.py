"""Kernel tables: what they tell agrees with what is shipped, broken ones are not believed, the package's files are read."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from nereus.cli.kernel_tables import SYSTEMS, installed_tables, read_tables, table_rates
from nereus.costs.rates import rates_of
from nereus.costs.tables import TOLD, KernelTables, anchor_of, sharpened, told_rates
from nereus.errors import ConfigError
from nereus.fleet import DEVICES

PUBLIC = Path("/work/shared/data/profiling/aiconfigurator")


def made(device: str, flops: float, memory: float, link: float = 3e11) -> KernelTables:
    """Tables of a device that does exactly what `Rates` says, with these rates."""
    rates = replace(
        rates_of(DEVICES[device]),
        flops_per_second=flops,
        memory_bytes_per_second=memory,
        attention_flops_per_second=flops / 2,
        cache_bytes_per_second=memory,
        link_bytes_per_second=link,
        link_seconds=4e-6,
        launch_seconds=4e-6,
    )
    sizes = [(m, n, k) for m in (1, 64, 512, 4096, 16384) for n in (1024, 4096, 8192) for k in (1024, 4096)]
    gemm = [(*size, rates.gemm_seconds(*size)) for size in sizes]
    prefill = [(b, 8192, 32, 128, 2 * b * 32 * 128 * 8192**2 / (flops / 2) + 4e-6) for b in (1, 2, 8)]
    decode = [(b, 8192, 8, 128, 4 * b * 8192 * 8 * 128 / memory + 4e-6) for b in (64, 256)]
    links = [
        (size, n, rates.collective_seconds(2 * (n - 1) / n * size, n, 8))
        for size in (1e3, 1e4, 1e8, 1e9)
        for n in (2, 8)
    ]
    return KernelTables(
        device=device,
        source="made",
        gemm=np.array(gemm),
        prefill=np.array(prefill),
        decode=np.array(decode),
        all_reduce=np.array(links),
    )


def empty(device: str) -> KernelTables:
    return KernelTables(
        device=device,
        source="empty",
        gemm=np.zeros((0, 4)),
        prefill=np.zeros((0, 5)),
        decode=np.zeros((0, 5)),
        all_reduce=np.zeros((0, 3)),
    )


def test_rates_are_found_again_in_the_tables_that_they_make() -> None:
    told = told_rates(rates_of(DEVICES["b200"]), made("b200", 1.3e15, 5e12, 5e11))
    assert told.flops_per_second == pytest.approx(1.3e15, rel=0.01)
    assert told.memory_bytes_per_second == pytest.approx(5e12, rel=0.01)
    assert told.launch_seconds == pytest.approx(4e-6, rel=0.02)
    assert told.attention_flops_per_second == pytest.approx(6.5e14, rel=0.02)
    assert told.cache_bytes_per_second == pytest.approx(5e12, rel=0.02)
    assert told.link_bytes_per_second == pytest.approx(5e11, rel=0.02)
    assert told.link_seconds == pytest.approx(4e-6, rel=0.02)


def test_a_device_without_fractions_takes_the_ratio_of_its_tables_to_its_anchors() -> None:
    assert anchor_of("gb200") == "b200"
    assert anchor_of("h100") is None
    like = rates_of(DEVICES["b200"])
    found = sharpened(DEVICES["gb200"], made("gb200", 1.5e15, 6e12), made("b200", 1.2e15, 5e12))
    assert found.flops_per_second == pytest.approx(1.25 * like.flops_per_second, rel=0.01)
    assert found.memory_bytes_per_second == pytest.approx(1.2 * like.memory_bytes_per_second, rel=0.01)
    assert found.memory_bytes == DEVICES["gb200"].memory_bytes


def test_no_rows_and_broken_rows_leave_what_is_shipped() -> None:
    shipped = rates_of(DEVICES["l40s"])
    assert told_rates(shipped, empty("l40s")) == shipped
    broken = replace(empty("l40s"), all_reduce=made("l40s", 1e14, 1e12, shipped.link_bytes_per_second / 20).all_reduce)
    assert told_rates(shipped, broken).link_bytes_per_second == shipped.link_bytes_per_second


def write_package(folder: Path, tables: KernelTables, version: str) -> None:
    """A folder as the package has it: latencies in milliseconds, with rows that are of no interest."""
    system = folder / SYSTEMS[tables.device]
    whole = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": 128}
    gemm = [
        {"gemm_dtype": kind, "m": int(m), "n": int(n), "k": int(k), "latency": s * 1e3 / (1 + (kind == "fp8"))}
        for m, n, k, s in tables.gemm
        for kind in ("bfloat16", "fp8")
    ]
    prefill = [
        {**whole, "batch_size": int(b), "isl": int(t), "num_heads": int(h), "step": 0, "latency": s * 1e3}
        for b, t, h, _, s in tables.prefill
    ]
    decode = [
        {**whole, "batch_size": int(b), "isl": int(t) - 1, "step": 1, "num_key_value_heads": int(h), "latency": s * 1e3}
        for b, t, h, _, s in tables.decode
    ]
    links = [
        {"nccl_dtype": "half", "op_name": name, "message_size": int(size / 2), "num_gpus": int(n), "latency": s * 1e3}
        for size, n, s in tables.all_reduce
        for name in ("all_reduce", "all_gather")
    ]
    for place, name, rows in (
        ("gemm/vllm", "gemm", gemm),
        ("attention/vllm", "context_attention", prefill),
        ("attention/vllm", "generation_attention", decode),
        ("comm/nccl", "nccl", links),
    ):
        (system / place / version).mkdir(parents=True, exist_ok=True)
        pl.DataFrame(rows).write_parquet(system / place / version / f"{name}_perf.parquet")


def test_files_of_the_package_are_read_and_the_newest_counts(tmp_path: Path) -> None:
    write_package(tmp_path, made("gb200", 9e14, 3e12), "0.9.0")
    new, base = made("gb200", 1.5e15, 6e12), made("b200", 1.2e15, 5e12)
    write_package(tmp_path, new, "0.24.0")
    assert table_rates([DEVICES["gb200"]], tmp_path) == ({}, ())  # its anchor has no tables
    write_package(tmp_path, base, "0.24.0")
    rates, sources = table_rates([DEVICES[name] for name in ("gb200", "h100", "v100")], tmp_path)
    assert list(rates) == ["gb200"]
    assert "gb200/gemm/vllm/0.24.0" in sources[0]
    wanted = sharpened(DEVICES["gb200"], new, base)
    for name in TOLD:
        assert getattr(rates["gb200"], name) == pytest.approx(getattr(wanted, name), rel=1e-3), name


def test_a_file_of_another_form_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "gb200" / "gemm" / "vllm" / "1.0"
    folder.mkdir(parents=True)
    pl.DataFrame({"m": [1]}).write_parquet(folder / "gemm_perf.parquet")
    with pytest.raises(ConfigError, match=r"gemm_perf\.parquet.*expected columns gemm_dtype, m, n, k, latency"):
        read_tables(tmp_path, "gb200")
    assert read_tables(tmp_path, "h200") is None


def test_the_installed_package_has_the_files_that_are_read() -> None:
    folder = installed_tables()
    if folder is None:
        pytest.skip("aiconfigurator-core is not installed (extra `tables`)")
    rates, sources = table_rates([DEVICES["gb200"]], folder)
    assert set(rates) == {"gb200"}
    assert sources[0].startswith("gb200 from aiconfigurator-core ")


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public kernel tables are not on this machine")
@pytest.mark.parametrize(("system", "device"), [("a100_sxm", "a100"), ("h100_sxm", "h100"), ("b200_sxm", "b200")])
def test_public_tables_tell_nearly_what_is_shipped(system: str, device: str) -> None:
    with (PUBLIC / "gemm_bf16.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["system"] == system]
    gemm = np.array([[float(row[name]) for name in ("m", "n", "k", "latency_ms")] for row in rows])
    gemm[:, 3] *= 1e-3
    shipped = rates_of(DEVICES[device])
    told = told_rates(shipped, replace(empty(device), gemm=gemm))
    assert told.flops_per_second == pytest.approx(shipped.flops_per_second, rel=0.1)
    assert told.memory_bytes_per_second == pytest.approx(shipped.memory_bytes_per_second, rel=0.1)
    assert told.launch_seconds == pytest.approx(shipped.launch_seconds, rel=0.25)
