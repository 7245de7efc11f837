"""What a job reaches of a device's data sheet: Rates, from public micro-benchmarks or a probe on the running machine.

FRACTIONS are fitted to kernel and collective tables, never to training or RL runs. Sources, by column:
  gemm, memory, launch   `aiconfigurator-core` 0.12 (Apache-2.0), bf16 GEMMs with n, k >= 1,024 on vLLM 0.14: the three
                         constants of `gemm_seconds` (soft-L1 fit of log time; median error 6 to 8 %)
  attention, decode      the same package's causal prefill (isl >= 256) and decode attention (>= 4,096 cached tokens)
  link, link_seconds     the same package's NCCL tables (2 to 8 GPUs in a node), all-reduce; agrees with vTrain's
                         nccl-tests on A100 (MIT) and with Vidur's DGX tables (MIT)
  nic                    Vidur's A100 DGX all-reduce over 2 nodes; the other devices take the same share of their NIC
A device without a table takes the row named in LIKE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from nereus.fleet import Device

GEMM_POWER = 2.5
"""Exponent of the soft maximum of a GEMM's arithmetic and memory time: one number for all devices."""
NIC_FRACTION = 0.75
NIC_SECONDS = 20e-6
DISPATCH_SECONDS = 0.7e-3
"""Eager PyTorch. Fitted to vTrain's single-node table (MIT; A100, 1,440 runs of small models): its only use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What is reached on a slot, in SI units; links in one direction, per slot.

    `launch_seconds` is what a kernel takes that does nothing. A collective over ranks takes `link_seconds` (times the
    doublings of its ranks) within a node and `nic_seconds` across nodes, beside its bytes. `slots_per_node` are the
    slots that links reach, which on NVL72 are those of a rack.
    """

    flops_per_second: float
    memory_bytes_per_second: float
    launch_seconds: float
    attention_flops_per_second: float
    cache_bytes_per_second: float
    link_bytes_per_second: float
    link_seconds: float
    nic_bytes_per_second: float
    nic_seconds: float
    host_bytes_per_second: float
    slots_per_node: int
    memory_bytes: int
    dispatch_seconds: float = 0.0

    def gemm_seconds(self, rows: float, outputs: float, inputs: float, weight_bytes: float = 2.0) -> float:
        """Seconds of a product [rows, inputs] x [inputs, outputs]; 1-byte weights run at twice the arithmetic rate."""
        arithmetic = 2 * rows * outputs * inputs / (self.flops_per_second * 2.0 / weight_bytes)
        moved = 2 * rows * (inputs + outputs) + weight_bytes * inputs * outputs
        memory = moved / self.memory_bytes_per_second
        return (arithmetic**GEMM_POWER + memory**GEMM_POWER) ** (1 / GEMM_POWER) + self.launch_seconds

    def collective_seconds(self, wire_bytes: float, ranks: int, ranks_per_node: int) -> float:
        """Seconds of a collective that puts `wire_bytes` on each rank's port; 0 for one rank.

        Across nodes the ranks of a node share their NICs' sum, so that `ranks_per_node` of them go that much faster.
        """
        if ranks <= 1:
            return 0.0
        within = min(ranks, max(ranks_per_node, 1))
        latency = self.link_seconds * within.bit_length()
        if within == ranks:
            return latency + wire_bytes / self.link_bytes_per_second
        across = min(self.link_bytes_per_second, within * self.nic_bytes_per_second)
        return latency + self.nic_seconds * (ranks // within).bit_length() + wire_bytes / across


@dataclass(frozen=True, kw_only=True, slots=True)
class Fractions:
    """Reached shares of the data sheet (`*_share`) and latencies of one device."""

    gemm_share: float
    memory_share: float
    launch_seconds: float
    attention_share: float
    decode_share: float
    link_share: float
    link_seconds: float


def _fractions(gemm: float, memory: float, launch: float, attention: float, decode: float, link: float) -> Fractions:
    """Shares, and the launch in microseconds."""
    return Fractions(
        gemm_share=gemm,
        memory_share=memory,
        launch_seconds=launch * 1e-6,
        attention_share=attention,
        decode_share=decode,
        link_share=link,
        link_seconds=6e-6,
    )


FRACTIONS: dict[str, Fractions] = {
    "a100": _fractions(0.83, 0.76, 5.6, 0.57, 0.72, 0.69),
    "h100": _fractions(0.81, 0.87, 3.7, 0.69, 0.85, 0.75),
    "h200": _fractions(0.81, 0.83, 4.0, 0.67, 0.82, 0.75),
    "b200": _fractions(0.72, 0.77, 3.6, 0.57, 0.86, 0.70),
    "l40s": _fractions(0.63, 0.78, 2.0, 0.52, 0.82, 0.62),
    "mi300x": _fractions(0.51, 0.70, 5.0, 0.30, 0.70, 0.69),  # hardware table: MAMF 668 of 1,307 TFLOP/s
    "h20": _fractions(0.90, 0.80, 4.0, 0.84, 0.80, 0.75),  # InferSim's tables (Apache-2.0)
    "cpu": _fractions(0.80, 0.80, 5.0, 0.40, 0.80, 0.50),
}
LINK_DOMAIN_SLOTS = {"gb200": 64}
"""Slots that links reach where that is more than a node: NVL72 racks join 18 trays of four; powers of 2 use 16 of them."""
LIKE = {
    "a100-40": "a100",
    "a100-pcie": "a100",
    "a800": "a100",
    "v100": "a100",
    "a10g": "a100",
    "910b": "a100",
    "rtx4090": "l40s",
    "h100-pcie": "h100",
    "h800": "h100",
    "gb200": "b200",
}


def rates_of(device: Device) -> Rates:
    """The rates of a device of the catalogue; an unknown one is taken for the one that it is LIKE, or a CPU."""
    name = device.name if device.name in FRACTIONS else LIKE.get(device.name, "cpu")
    f = FRACTIONS[name]
    return Rates(
        flops_per_second=f.gemm_share * device.peak_flops_per_second,
        memory_bytes_per_second=f.memory_share * device.memory_bytes_per_second,
        launch_seconds=f.launch_seconds,
        attention_flops_per_second=f.attention_share * device.peak_flops_per_second,
        cache_bytes_per_second=f.decode_share * device.memory_bytes_per_second,
        link_bytes_per_second=f.link_share * device.link_bytes_per_second,
        link_seconds=f.link_seconds,
        nic_bytes_per_second=NIC_FRACTION * device.nic_bytes_per_second,
        nic_seconds=NIC_SECONDS,
        host_bytes_per_second=0.8 * device.pcie_bytes_per_second,
        slots_per_node=LINK_DOMAIN_SLOTS.get(device.name, device.slots_per_node),
        memory_bytes=device.memory_bytes,
        dispatch_seconds=0.0 if device.name == "cpu" else DISPATCH_SECONDS,
    )


def slower(rates: Rates, factor: float) -> Rates:
    """The same slot with every arithmetic and memory rate divided by `factor`: a straggler, or a capped power budget."""
    return replace(
        rates,
        flops_per_second=rates.flops_per_second / factor,
        attention_flops_per_second=rates.attention_flops_per_second / factor,
        memory_bytes_per_second=rates.memory_bytes_per_second / factor,
        cache_bytes_per_second=rates.cache_bytes_per_second / factor,
    )


def weakest(rates: Sequence[Rates]) -> Rates:
    """What slots of several kinds reach together when all do the same part: the lowest rates, the longest latencies."""
    latencies = ("launch_seconds", "link_seconds", "nic_seconds", "dispatch_seconds")
    worst = {
        each.name: (max if each.name in latencies else min)(getattr(one, each.name) for one in rates)
        for each in fields(Rates)
    }
    return Rates(**worst)
