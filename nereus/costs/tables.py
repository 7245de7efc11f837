"""Kernel and collective tables of a device, and the Rates that they tell. Pure: who reads the files is elsewhere.

The shipped FRACTIONS are fitted to such tables, and the factors of `nereus.costs.coefficients` to measurements beside those
fractions: new tables for such a device would take the ground from under its factors. (Tried on the public points: the
cold decode error rose from 8.1 to 9.9 %.) So tables speak for the devices that have no fractions of their own and go by
what another is LIKE. What a table does not have stays as shipped, and so does what lies more than a factor PLAUSIBLE from
it: such a table tells of a broken run or of another machine (L40S's all-reduces at 1.4 GB/s).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.costs.rates import FRACTIONS, GEMM_POWER, LIKE, Rates, rates_of
from nereus.fleet import DEVICES, Device

LEAST_GEMM = 1024
"""Least outputs and inputs of a product: those of layers, not of heads or experts' gates."""
LEAST_PREFILL_TOKENS = 256
LEAST_CACHE_TOKENS = 4096
LARGE_BYTES = 16e6
"""All-reduces of at least this tell the bandwidth, those of at most SMALL_BYTES the latency."""
SMALL_BYTES = 1e6
LARGE_LAUNCHES = 100
"""Attention that takes at least as long as so many empty kernels tells its rate: less is launches and waves of tiles."""
FIT_ROWS = 2000
PLAUSIBLE = 3.0
TOLD = (
    *("flops_per_second", "memory_bytes_per_second", "launch_seconds", "attention_flops_per_second"),
    *("cache_bytes_per_second", "link_bytes_per_second", "link_seconds"),
)
"""The rates that tables tell."""
Table = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTables:
    """What was measured on one kind of device, in bf16; `source` says where it comes from.

    Columns, in seconds, tokens and bytes, any number of rows (none where there is no such table): `gemm` (rows, outputs, inputs,
    seconds); `prefill`, causal attention (sequences, tokens of each, heads, head size, seconds); `decode`, attention
    (sequences, cached tokens of each, key-value heads, head size, seconds); `all_reduce` (bytes, ranks, seconds).
    """

    device: str
    source: str
    gemm: Table
    prefill: Table
    decode: Table
    all_reduce: Table


def anchor_of(device: str) -> str | None:
    """The device whose shipped fractions this one takes for want of its own; None where it has its own."""
    return None if device in FRACTIONS else LIKE.get(device)


def sharpened(device: Device, own: KernelTables, anchor: KernelTables) -> Rates:
    """The rates of a device without fractions of its own: its anchor's, times what its tables tell over what the anchor's do.

    Two tables read in one way: whatever that way misses of both drops out, and the fitted factors, which belong to the
    anchor's fractions, stay right.
    """
    rates, like = rates_of(device), rates_of(DEVICES[anchor.device])
    told, base = told_rates(rates, own), told_rates(like, anchor)
    found = {name: getattr(like, name) * getattr(told, name) / getattr(base, name) for name in TOLD}
    return replace(rates, **{name: _believed(value, getattr(rates, name)) for name, value in found.items()})


def told_rates(shipped: Rates, tables: KernelTables) -> Rates:
    """The shipped rates with those that the tables tell in their place."""
    flops, memory, launch = _products(shipped, tables.gemm)
    link, latency = _link(shipped, tables.all_reduce)
    return replace(
        shipped,
        flops_per_second=flops,
        memory_bytes_per_second=memory,
        launch_seconds=launch,
        attention_flops_per_second=_attention(shipped, tables.prefill),
        cache_bytes_per_second=_cache(shipped, tables.decode),
        link_bytes_per_second=link,
        link_seconds=latency,
    )


def _believed(found: float, known: float) -> float:
    """`found` where it is within PLAUSIBLE of `known`."""
    return float(found) if known / PLAUSIBLE <= found <= known * PLAUSIBLE else known


def _columns(table: Table) -> list[Table]:
    return [table[:, at] for at in range(table.shape[1])]


def _products(shipped: Rates, gemm: Table) -> tuple[float, float, float]:
    """The three constants of `Rates.gemm_seconds`: least soft-L1 error of log time, by reweighted Gauss-Newton steps."""
    taken = gemm[(gemm[:, 1] >= LEAST_GEMM) & (gemm[:, 2] >= LEAST_GEMM)] if len(gemm) else gemm
    known = (shipped.flops_per_second, shipped.memory_bytes_per_second, shipped.launch_seconds)
    if len(taken) < 10:
        return known
    rows, outputs, inputs, seconds = _columns(taken[:: -(-len(taken) // FIT_ROWS)])
    work, moved = 2 * rows * outputs * inputs, 2 * (rows * (inputs + outputs) + inputs * outputs)
    at: Table = np.log(np.array(known))
    wanted = np.log(seconds)
    for _ in range(20):
        flops, memory, launch = np.exp(at)
        arithmetic, copying = (work / flops) ** GEMM_POWER, (moved / memory) ** GEMM_POWER
        both = arithmetic + copying
        product = both ** (1 / GEMM_POWER)
        total = product + launch
        error = np.log(total) - wanted
        slopes: Table = np.stack(
            [-product * arithmetic / both, -product * copying / both, np.full_like(total, launch)], 1
        )
        slopes /= total[:, None]
        weights = (1 + (error / 0.1) ** 2) ** -0.5
        normal = slopes.T @ (slopes * weights[:, None]) + 1e-6 * np.eye(3)
        change: Any = np.linalg.solve(normal, slopes.T @ (weights * error))  # pyright: ignore[reportUnknownVariableType]
        at = at - np.clip(np.asarray(change, dtype=np.float64), -0.5, 0.5)
    found = np.exp(at)
    return _believed(found[0], known[0]), _believed(found[1], known[1]), _believed(found[2], known[2])


def _attention(shipped: Rates, prefill: Table) -> float:
    """Scores and their sums over values: 4 operations for each pair of tokens, head and dimension, half of them masked."""
    taken = prefill[prefill[:, 1] >= LEAST_PREFILL_TOKENS] if len(prefill) else prefill
    known = shipped.attention_flops_per_second
    if not len(taken):
        return known
    count, tokens, heads, size, seconds = _columns(taken)
    work = 2 * count * heads * size * tokens**2
    large = work / known > LARGE_LAUNCHES * shipped.launch_seconds
    rates = work[large] / np.maximum(seconds[large] - shipped.launch_seconds, seconds[large] / 2)
    return _believed(float(np.median(rates)), known) if large.any() else known


def _cache(shipped: Rates, decode: Table) -> float:
    """Keys and values of every cached token are read once."""
    taken = decode[decode[:, 0] * decode[:, 1] >= LEAST_CACHE_TOKENS] if len(decode) else decode
    known = shipped.cache_bytes_per_second
    if not len(taken):
        return known
    count, tokens, heads, size, seconds = _columns(taken)
    moved = 4 * count * tokens * heads * size
    large = moved / known > LARGE_LAUNCHES * shipped.launch_seconds
    rates = moved[large] / np.maximum(seconds[large] - shipped.launch_seconds, seconds[large] / 2)
    return _believed(float(np.median(rates)), known) if large.any() else known


def _link(shipped: Rates, all_reduce: Table) -> tuple[float, float]:
    """Bytes per second of a port and seconds of a doubling of ranks, as `Rates.collective_seconds` takes them."""
    known = shipped.link_bytes_per_second, shipped.link_seconds
    if not len(all_reduce):
        return known
    size, ranks, seconds = _columns(all_reduce)
    doublings = np.floor(np.log2(ranks)) + 1
    wire = 2 * (ranks - 1) / ranks * size
    small, large = size <= SMALL_BYTES, size >= LARGE_BYTES
    latency = (
        float(np.median((seconds[small] - wire[small] / known[0]) / doublings[small])) if small.any() else known[1]
    )
    if not large.any():
        return known[0], _believed(latency, known[1])
    rates = wire[large] / np.maximum(seconds[large] - latency * doublings[large], seconds[large] / 4)
    return _believed(float(np.median(rates)), known[0]), _believed(latency, known[1])
