"""Makes the measured tables of `nereus/sim/tables` from public profiles: `python -m nereus.sim.derive PROFILING_FOLDER`.

Kept are a grid of sizes and microseconds with three digits. Where a profile has no entry because its memory was full
(large batches of long sequences), twice the entry of half the batch stands: such kernels are limited by bandwidth.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "tables"
SYSTEMS = {"a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "l40s": "l40s"}
GEMM_ROWS = tuple(2**i for i in range(14))
BATCHES = tuple(2**i for i in range(12))
CONTEXTS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
PREFILL_BATCHES = (1, 4, 16, 64)
PREFILL_LENGTHS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
HEADS = ((4, 1), (8, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8), (64, 8))
OPERATIONS = ("all_gather", "all_reduce", "alltoall", "reduce_scatter")
NCCL = {"h200": "2.26.2"}
"""Version by device; 2.27.3 where nothing is said."""
AICONFIGURATOR = "aiconfigurator-core 0.12 systems/data (Apache-2.0; vLLM 0.14 on A100, 0.24 elsewhere)"

Rows = Sequence[Mapping[str, str]]


def derive(folder: Path, out: Path) -> None:
    """Reads the profiles in `folder` and writes the tables to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    package = folder / "aiconfigurator"
    _write(out / "gemm.json", f"{AICONFIGURATOR}, bf16 GEMMs", _gemm(_rows(package / "gemm_bf16.csv")))
    decode = _attention(_rows(package / "decode_attention_bf16.csv"), "kv_len", BATCHES, CONTEXTS)
    _write(out / "decode_attention.json", f"{AICONFIGURATOR}, bf16 decode attention", decode)
    prefill = _attention(_rows(package / "prefill_attention_bf16.csv"), "isl", PREFILL_BATCHES, PREFILL_LENGTHS)
    _write(out / "prefill_attention.json", f"{AICONFIGURATOR}, bf16 causal prefill attention", prefill)
    links = _collectives(_rows(package / "nccl_half.csv"))
    _write(out / "collectives.json", f"{AICONFIGURATOR}, NCCL 2.26 and 2.27 within a node", links)
    network = _network(_rows(folder / "vidur_collectives_median.csv"))
    _write(
        out / "network.json", "microsoft/vidur data/profiling/network (MIT): A100 DGX all-reduce over 2 nodes", network
    )


def _rows(path: Path) -> Rows:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, source: str, devices: Mapping[str, Any]) -> None:
    record = {"source": source, "command": "python -m nereus.sim.derive PROFILING_FOLDER", "devices": devices}
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")


def _digits(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.3g}") for value in values]


def _gemm(rows: Rows) -> dict[str, Any]:
    found: dict[str, dict[tuple[int, int, int], float]] = {}
    for row in rows:
        sizes = int(row["m"]), int(row["n"]), int(row["k"])
        found.setdefault(SYSTEMS[row["system"]], {})[sizes] = float(row["latency_ms"]) * 1e3
    made: dict[str, Any] = {}
    for device, times in sorted(found.items()):
        outputs, inputs = (sorted({key[axis] for key in times}) for axis in (1, 2))
        made[device] = {
            "rows": GEMM_ROWS,
            "outputs": outputs,
            "inputs": inputs,
            "microseconds": _digits(times[key] for key in product(GEMM_ROWS, outputs, inputs)),
        }
    return made


def _attention(rows: Rows, length: str, batches: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    found: dict[str, dict[tuple[int, int], dict[tuple[int, int], float]]] = {}
    for row in rows:
        heads = int(row["num_heads"]), int(row["num_key_value_heads"])
        sizes = int(row["batch_size"]), int(row[length])
        found.setdefault(SYSTEMS[row["system"]], {}).setdefault(heads, {})[sizes] = float(row["latency_ms"]) * 1e3
    made: dict[str, Any] = {}
    for device, by_heads in sorted(found.items()):
        kept = {heads: times for heads, times in sorted(by_heads.items()) if heads in HEADS}
        made[device] = {
            "batches": batches,
            "lengths": lengths,
            "heads": list(kept),
            "microseconds": [
                _digits(_complete(times, batch, size) for batch, size in product(batches, lengths))
                for times in kept.values()
            ],
        }
    return made


def _complete(times: Mapping[tuple[int, int], float], batch: int, size: int) -> float:
    """The entry; twice that of half the batch, or of half the length for a batch of one, where there is none."""
    if (batch, size) in times:
        return times[batch, size]
    if batch > 1:
        return 2 * _complete(times, batch // 2, size)
    return 2 * _complete(times, batch, size // 2)


def _collectives(rows: Rows) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for row in rows:
        name = SYSTEMS[row["system"]]
        if row["nccl"] != NCCL.get(name, "2.27.3"):
            continue
        device = made.setdefault(name, {})
        entry = device.setdefault(row["op_name"], {}).setdefault(row["num_gpus"], {"bytes": [], "microseconds": []})
        entry["bytes"].append(2 * int(row["message_size"]))
        entry["microseconds"].append(float(row["latency_ms"]) * 1e3)
    for device in made.values():
        for sizes in device.values():
            for entry in sizes.values():
                order = sorted(range(len(entry["bytes"])), key=entry["bytes"].__getitem__)
                entry["microseconds"] = _digits(entry["microseconds"][i] for i in order)
                entry["bytes"] = [entry["bytes"][i] for i in order]
    if "l40s" in made:  # its tables of 8 GPUs are broken (1.4 GB/s): those of 4 stand for them
        for sizes in made["l40s"].values():
            sizes["8"] = sizes["4"]
    return made


def _network(rows: Rows) -> dict[str, Any]:
    """What 16 ranks on two nodes take more than the 8 of one: traffic that one network port of a node carries."""
    across, inside = (
        {
            int(row["size_bytes"]): float(row["median_ms"]) * 1e3
            for row in rows
            if (row["topology"], row["collective"]) == ("a100_dgx", "all_reduce")
            and (row["num_workers"], row["devices_per_node"]) == (workers, "8")
        }
        for workers in ("16", "8")
    )
    sizes = sorted(across)
    extra = [max(across[size] - inside[size], 1.0) for size in sizes]
    return {"port": {"bytes": sizes, "microseconds": _digits(extra)}}


if __name__ == "__main__":
    derive(Path(sys.argv[1]), TABLES)
