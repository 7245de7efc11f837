"""Kernel and collective tables of the package `aiconfigurator-core`, where it is installed (extra `tables`).

Read are its files alone, `systems/data/SYSTEM/{gemm,attention}/vllm/VERSION/*.parquet` and `comm/nccl/VERSION/*.parquet` as
0.12 has them; its code is not imported. Of several versions the newest with the file is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nereus.costs.tables import KernelTables, Table, anchor_of, sharpened
from nereus.errors import ConfigError
from nereus.fleet import Device

if TYPE_CHECKING:
    from nereus.costs.rates import Rates

PACKAGE = "aiconfigurator_core"
SYSTEMS = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "gb200": "gb200",
    "l40s": "l40s",
}
"""Devices of the catalogue as the package names their folders."""
BF16 = "bfloat16"
GEMM = ("m", "n", "k", "latency")
ATTENTION = ("batch_size", "isl", "num_heads", "head_dim", "latency")
CACHE = ("batch_size", "isl", "step", "num_key_value_heads", "head_dim", "latency")
COLLECTIVE = ("message_size", "num_gpus", "latency")
LATER = {"window_size"}
"""Columns that older tables do not have: theirs are all of whole attention."""
Wanted = dict[str, str | int]


def installed_tables() -> Path | None:
    """The folder with the package's tables; None where it is not installed."""
    found = find_spec(PACKAGE)
    places = found.submodule_search_locations if found is not None else None
    folder = Path(next(iter(places))) / "systems" / "data" if places else None
    return folder if folder is not None and folder.is_dir() else None


def table_rates(devices: Iterable[Device], folder: Path) -> tuple[dict[str, Rates], tuple[str, ...]]:
    """Device -> what tables tell, for those that need some and have some; and which tables were used. Raises ConfigError."""
    rates: dict[str, Rates] = {}
    sources: list[str] = []
    for device in {each.name: each for each in devices}.values():
        anchor = anchor_of(device.name)
        if anchor not in SYSTEMS or device.name not in SYSTEMS:
            continue
        own, base = read_tables(folder, device.name), read_tables(folder, anchor)
        if own is not None and base is not None:
            rates[device.name] = sharpened(device, own, base)
            sources.append(f"{device.name} from {own.source}, beside {base.source}")
    return rates, tuple(sources)


def read_tables(folder: Path, device: str) -> KernelTables | None:
    """A device's tables; None where there is no file of it. Raises ConfigError for a file that is not as documented."""
    if device not in SYSTEMS:
        raise ConfigError("tables.device", device, f"expected one of {', '.join(SYSTEMS)}")
    system = folder / SYSTEMS[device]
    paths = {
        "gemm": _newest(system / "gemm" / "vllm", "gemm_perf.parquet"),
        "prefill": _newest(system / "attention" / "vllm", "context_attention_perf.parquet"),
        "decode": _newest(system / "attention" / "vllm", "generation_attention_perf.parquet"),
        "all_reduce": _newest(system / "comm" / "nccl", "nccl_perf.parquet"),
    }
    used = dict.fromkeys(str(path.parent.relative_to(folder)) for path in paths.values() if path is not None)
    if not used:
        return None
    whole: Wanted = {"attn_dtype": BF16, "kv_cache_dtype": BF16, "window_size": 0}
    gemm = _rows(paths["gemm"], GEMM, {"gemm_dtype": BF16})
    prefill = _rows(paths["prefill"], ATTENTION, {**whole, "step": 0})
    decode = _rows(paths["decode"], CACHE, whole)
    decode[:, 1] += decode[:, 2]
    links = _rows(paths["all_reduce"], COLLECTIVE, {"nccl_dtype": "half", "op_name": "all_reduce"})
    links[:, 0] *= 2  # its sizes count numbers of two bytes
    return KernelTables(
        device=device,
        source=f"{_package(folder)}: {', '.join(used)}",
        gemm=gemm,
        prefill=prefill,
        decode=decode[:, [0, 1, 3, 4, 5]],
        all_reduce=links,
    )


def _package(folder: Path) -> str:
    """The package with its version, or the folder where it is another."""
    if folder != installed_tables():
        return str(folder)
    try:
        return f"aiconfigurator-core {version('aiconfigurator-core')}"
    except PackageNotFoundError:
        return "aiconfigurator-core"


def _newest(folder: Path, name: str) -> Path | None:
    """The file of the highest version that has one."""
    found = [path for path in folder.glob(f"*/{name}") if path.is_file()]
    return max(found, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.name)], default=None)


def _rows(path: Path | None, columns: Sequence[str], wanted: Wanted) -> Table:
    """The wanted rows' columns as numbers, milliseconds as seconds: [rows, columns]."""
    import numpy as np
    import polars as pl

    if path is None:
        return np.zeros((0, len(columns)))
    try:
        taken = pl.scan_parquet(path)
        known = set(taken.collect_schema().names())
        for name, value in wanted.items():
            if name in known or name not in LATER:
                taken = taken.filter(pl.col(name) == value)
        found = taken.select(columns).collect().cast(pl.Float64).to_numpy(writable=True)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise ConfigError("tables", str(path), f"expected columns {', '.join((*wanted, *columns))}: {error}") from error
    found[:, -1] *= 1e-3
    return found[found[:, -1] > 0]
