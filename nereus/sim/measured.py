"""Kernel and collective times by interpolation in measured tables (`nereus/sim/tables`, made by `nereus.sim.derive`).

Interpolation is linear in the logarithms of sizes and times. Beyond a table's largest size times grow in proportion, below
its smallest they stay. A device without a table takes its relative's, times the ratio of what both would need at the
rates that they reach (roofline over nereus.costs.rates, from micro-benchmarks). Across nodes a collective takes what it
takes within one, and what two nodes joined by one port were measured to take more, for the bytes and the ports of the
nodes at hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nereus.costs.rates import LIKE, rates_of
from nereus.fleet import DEVICES, Device

Floats = npt.NDArray[np.float64]
TABLES = Path(__file__).parent / "tables"
MEASURED = ("a100", "b200", "h100", "h200", "l40s")
RELATIVE = {"h20": "h100", "mi300x": "h100", "cpu": "a100"}
"""Devices without a table whose relative is not in `nereus.costs.rates.LIKE`."""
BYTES = 2
HOP_SECONDS = 12e-6
"""What a collective takes more for each doubling of nodes."""
PORT_BYTES_PER_SECOND = 25e9
"""The network port whose traffic was measured: 200 Gbit/s, of which large messages reach 70 % (17.5 GB/s of bus bandwidth)."""


def relative(device: Device) -> Device:
    """The measured device whose tables stand for this one."""
    name = device.name if device.name in MEASURED else RELATIVE.get(device.name, LIKE.get(device.name, "a100"))
    return DEVICES[name]


@cache
def _table(name: str) -> dict[str, Any]:
    devices: dict[str, Any] = json.loads((TABLES / f"{name}.json").read_text(encoding="utf-8"))["devices"]
    return devices


@dataclass(frozen=True, eq=False)
class _Grid:
    """Seconds on a grid of sizes; `axes` ascend. Interpolates in logarithms."""

    axes: tuple[Floats, ...]
    log_seconds: Floats

    def at(self, *sizes: Floats | float) -> Floats:
        """Seconds at sizes, broadcast against each other."""
        points = np.broadcast_arrays(*(np.maximum(np.asarray(size, dtype=np.float64), 1e-9) for size in sizes))
        beyond = np.ones(points[0].shape)
        lows: list[npt.NDArray[np.int64]] = []
        shares: list[Floats] = []
        for axis, size in zip(self.axes, points, strict=True):
            beyond = beyond * np.maximum(size / axis[-1], 1.0)
            within = np.clip(size, axis[0], axis[-1])
            low = np.clip(np.searchsorted(axis, within, side="right") - 1, 0, len(axis) - 2)
            lows.append(low)
            shares.append(np.log(within / axis[low]) / np.log(axis[low + 1] / axis[low]))
        total = np.zeros(points[0].shape)
        for corner in range(2 ** len(lows)):
            weight = np.ones(points[0].shape)
            index: list[npt.NDArray[np.int64]] = []
            for number, (low, share) in enumerate(zip(lows, shares, strict=True)):
                upper = corner >> number & 1
                weight = weight * (share if upper else 1 - share)
                index.append(low + upper)
            total += weight * self.log_seconds[tuple(index)]
        return np.exp(total) * beyond


@cache
def _gemm_grid(name: str) -> _Grid:
    entry = _table("gemm")[name]
    axes = tuple(np.array(entry[axis], dtype=np.float64) for axis in ("rows", "outputs", "inputs"))
    times = np.array(entry["microseconds"]).reshape([len(axis) for axis in axes])
    return _Grid(axes, np.log(times * 1e-6))


def gemm_seconds(device: Device, rows: Floats | float, outputs: Floats | float, inputs: float) -> Floats:
    """A bf16 product [rows, inputs] x [inputs, outputs]. Outputs and inputs below the grid shrink it in proportion."""
    like = relative(device)
    grid = _gemm_grid(like.name)
    found = grid.at(rows, outputs, inputs)
    least = grid.axes[1][0], grid.axes[2][0]
    small = np.minimum(np.asarray(outputs) / least[0], 1.0) * min(inputs / least[1], 1.0)
    if np.any(small < 1.0):  # down to the launch of a kernel
        found = np.maximum(found * small, float(grid.at(1.0, least[0], least[1])))
    return found * _ratio(device, like, rows, outputs, inputs)


def grouped_gemm_seconds(
    device: Device, experts: Floats | float, rows: Floats | float, outputs: float, inputs: float
) -> Floats:
    """The products of `experts` matrices with `rows` each in one kernel: a product with as many times the outputs.

    It reads the same weights and computes as much, and is launched once, as engines and Megatron do it.
    """
    return gemm_seconds(device, rows, np.asarray(experts, dtype=np.float64) * outputs, inputs)


def _ratio(
    device: Device, like: Device, rows: Floats | float, outputs: Floats | float, inputs: float
) -> Floats | float:
    if device.name == like.name:
        return 1.0
    outputs = np.asarray(outputs)
    flops = 2.0 * np.asarray(rows) * outputs * inputs
    moved = BYTES * (np.asarray(rows) * (outputs + inputs) + outputs * inputs)
    return _roofline(device, flops, moved) / _roofline(like, flops, moved)


def _roofline(device: Device, flops: Floats | float, moved: Floats | float) -> Floats:
    """Seconds at the rates that products reach on a device, which are not the same share of every data sheet."""
    rates = rates_of(device)
    return np.maximum(np.asarray(flops) / rates.flops_per_second, np.asarray(moved) / rates.memory_bytes_per_second)


@cache
def _attention_grids(kind: str, name: str) -> dict[tuple[int, int], _Grid]:
    entry = _table(f"{kind}_attention")[name]
    axes = tuple(np.array(entry[axis], dtype=np.float64) for axis in ("batches", "lengths"))
    shape = [len(axis) for axis in axes]
    return {
        (heads[0], heads[1]): _Grid(axes, np.log(np.array(times).reshape(shape) * 1e-6))
        for heads, times in zip(entry["heads"], entry["microseconds"], strict=True)
    }


def _heads_grid(kind: str, name: str, heads: int, kv_heads: int) -> tuple[_Grid, float]:
    """The grid of the nearest measured head counts, and the factor from those to the wanted ones."""
    grids = _attention_grids(kind, name)
    weight = kv_heads if kind == "decode" else heads  # decode reads keys and values, prefill multiplies queries
    index = 1 if kind == "decode" else 0
    nearest = min(
        sorted(grids),
        key=lambda known: (abs(np.log(known[index] / weight)), abs(np.log(known[0] / max(heads, 1)))),
    )
    return grids[nearest], weight / nearest[index]


def decode_attention_seconds(
    device: Device, heads: int, kv_heads: int, batch: Floats | float, context_tokens: Floats | float
) -> Floats:
    """One layer's attention of a decode step over `batch` sequences with so much context each; heads of one rank."""
    like = relative(device)
    grid, factor = _heads_grid("decode", like.name, heads, kv_heads)
    ratio = rates_of(like).cache_bytes_per_second / rates_of(device).cache_bytes_per_second
    return grid.at(batch, context_tokens) * factor * ratio


def prefill_attention_seconds(
    device: Device, heads: int, kv_heads: int, batch: float, tokens: Floats | float
) -> Floats:
    """One layer's causal attention over `batch` sequences of so many tokens; longer than the table: by the square."""
    like = relative(device)
    grid, factor = _heads_grid("prefill", like.name, heads, kv_heads)
    ratio = rates_of(like).attention_flops_per_second / rates_of(device).attention_flops_per_second
    square = np.maximum(np.asarray(tokens, dtype=np.float64) / grid.axes[1][-1], 1.0)  # the grid counts one of the two
    return grid.at(batch, tokens) * square * factor * ratio


@cache
def _link_grid(name: str, operation: str, ranks: int) -> tuple[Floats, Floats]:
    entry = _table("collectives")[name][operation][str(ranks)]
    return np.log(np.array(entry["bytes"], dtype=np.float64)), np.log(np.array(entry["microseconds"]) * 1e-6)


@cache
def _network_grid() -> tuple[Floats, Floats]:
    entry = _table("network")["port"]
    return np.log(np.array(entry["bytes"], dtype=np.float64)), np.log(np.array(entry["microseconds"]) * 1e-6)


def _log_interpolated(grid: tuple[Floats, Floats], size: Floats | float) -> Floats:
    """Seconds at a size; in proportion above the grid."""
    sizes, seconds = grid
    wanted = np.log(np.maximum(np.asarray(size, dtype=np.float64), 1.0))
    return np.exp(np.interp(wanted, sizes, seconds)) * np.exp(np.maximum(wanted - sizes[-1], 0.0))


def collective_seconds(
    device: Device, operation: str, size_bytes: Floats | float, ranks: int, ranks_per_node: int
) -> Floats:
    """A collective of one message of `size_bytes` (what an all-reduce sums, an all-gather ends with) over `ranks`.

    `operation` is all_reduce, all_gather, reduce_scatter or alltoall. 0 for one rank.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    if ranks <= 1:
        return np.zeros(size.shape)
    per_node = max(min(ranks, ranks_per_node), 1)
    seconds = np.zeros(size.shape)
    like = relative(device)
    if per_node > 1:
        known = min(8, max(2, 1 << (per_node - 1).bit_length()))
        link = like.link_bytes_per_second / device.link_bytes_per_second
        found = _log_interpolated(_link_grid(like.name, operation, known), size)
        floor = np.exp(_link_grid(like.name, operation, known)[1][0])
        wire = (per_node - 1) / per_node / ((known - 1) / known)
        seconds = floor + (found - floor) * max(link, 1e-3) * wire
    nodes = -(-ranks // per_node)
    if nodes > 1:
        grid = _network_grid()
        floor = float(np.exp(grid[1][0]))
        once = 0.5 if operation in ("all_gather", "reduce_scatter") else 1.0
        ports = per_node * device.nic_bytes_per_second / PORT_BYTES_PER_SECOND
        share = once * 2 * (nodes - 1) / nodes / ports
        seconds = seconds + floor + (_log_interpolated(grid, size) - floor) * share + HOP_SECONDS * np.log2(nodes)
    return seconds
