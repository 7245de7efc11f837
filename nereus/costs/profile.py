"""Profile: what a probe measured on the running machine, as the Rates that every cost term takes. Pure.

A probe times small pieces of real work (`Sample`) for a few seconds; `fitted` turns them into a Profile. The terms of
`nereus.costs` count numbers of 2 bytes; `rates` states every bandwidth in those, so that a job in float32 is priced by
the same terms with twice the bytes.

Slots may share cores. `together_slots` says how many slots' worth of work gets done at once at most: equal to the slots
on GPUs, about the cores for processes of one thread on a CPU. After slots left it may be more than are there, or
less than one, so that it is right again when they come back: `at_once_slots` is what to reckon with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import exp, log
from statistics import median
from typing import Any

from nereus.costs.rates import GEMM_POWER, Rates, rates_of
from nereus.costs.speeds import Slow
from nereus.fleet import CPU_SLOT, DEVICES

LAYER_LAUNCHES = 20
"""Launches that the terms count for one layer's forward pass with whole attention: 12 small kernels, 4 products, 4 more."""
LEAST_SECONDS = 1e-9
CALL_SECONDS = 0.005
"""A call of all slots and its answers, where nothing measured it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One timed piece of work: seconds of one repetition.

    Kinds: `gemm` (shape: rows, outputs, inputs), `copy` (bytes), `layer` (tokens of an eager forward pass), `units` (an
    eager layer forward and backward while `ranks` slots do the same; tokens, and its widths: hidden, heads together,
    MLP), `all_reduce`, `all_gather`, `p2p` (bytes of a rank's tensor, over `ranks`), `call` (a round trip to all slots).
    """

    kind: str
    seconds: float
    shape: tuple[int, ...] = ()
    ranks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What was reached on a slot: SI units, real bytes, `dtype_bytes` a number; `device` as the catalogue names it.

    `layer_seconds` is an eager layer's forward pass with next to no work; `call_seconds` a call of all slots.
    `memory_ratio` is what eager elementwise work takes over what its bytes would take as one copy. `slow` are the slots
    that compute slower than what is stated here.
    """

    device: str
    dtype_bytes: int
    slots: int
    slots_per_node: int
    together_slots: float
    flops_per_second: float
    memory_bytes_per_second: float
    memory_ratio: float
    layer_seconds: float
    link_bytes_per_second: float
    link_seconds: float
    nic_bytes_per_second: float
    nic_seconds: float
    call_seconds: float
    slow: Slow = ()

    def rates(self, memory_bytes: int) -> Rates:
        """The rates of a slot with this memory, bandwidths in numbers of 2 bytes.

        On a CPU who issues an operation also runs it: launches add up. A GPU's host runs ahead (`dispatch_seconds`).
        """
        scale = 2 / self.dtype_bytes
        known = rates_of(DEVICES.get(self.device, CPU_SLOT))
        eager = self.device == CPU_SLOT.name
        attention_share = 0.5 if eager else known.attention_flops_per_second / known.flops_per_second
        memory = self.memory_bytes_per_second * scale
        return Rates(
            flops_per_second=self.flops_per_second,
            memory_bytes_per_second=memory,
            launch_seconds=self.layer_seconds / LAYER_LAUNCHES if eager else known.launch_seconds,
            attention_flops_per_second=self.flops_per_second * attention_share,
            cache_bytes_per_second=memory,
            link_bytes_per_second=self.link_bytes_per_second * scale,
            link_seconds=self.link_seconds,
            nic_bytes_per_second=self.nic_bytes_per_second * scale,
            nic_seconds=self.nic_seconds,
            host_bytes_per_second=memory,
            slots_per_node=self.slots_per_node,
            memory_bytes=memory_bytes,
            dispatch_seconds=0.0 if eager else self.layer_seconds,
        )

    @property
    def at_once_slots(self) -> float:
        """How many slots' worth gets done while all compute: one at least."""
        return max(1.0, self.together_slots)

    def crowding(self, busy_slots: float) -> float:
        """How much slower a slot computes while `busy_slots` do (its own included): at least 1."""
        return max(1.0, busy_slots / self.at_once_slots)

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {**asdict(self), "slow": [list(each) for each in self.slow]}

    def weight(self, slots: Iterable[int]) -> float:
        """How many usual slots' worth these slots compute."""
        speeds = dict(self.slow)
        return sum(speeds.get(slot, 1.0) for slot in slots)

    def slowest(self, slots: Iterable[int]) -> float:
        """The speed of the slowest of these slots."""
        speeds = dict(self.slow)
        return min((speeds.get(slot, 1.0) for slot in slots), default=1.0)


def recorded(record: Mapping[str, Any]) -> Profile:
    """The Profile of `Profile.record`. KeyError names a key that is missing."""
    values = {each.name: record[each.name] for each in fields(Profile) if each.name != "slow"}
    return Profile(**values, slow=tuple((int(slot), float(speed)) for slot, speed in record.get("slow", ())))


def supposed(device: str, dtype_bytes: int, slots: int, cores: int) -> Profile:
    """The profile of slots that nobody probed: the catalogue's device, or an ordinary core for each CPU slot."""
    known = DEVICES.get(device, CPU_SLOT)
    rates = rates_of(known)
    cpu = known is CPU_SLOT
    return Profile(
        device=known.name,
        dtype_bytes=dtype_bytes,
        slots=slots,
        slots_per_node=slots if cpu else min(slots, known.slots_per_node),
        together_slots=float(min(slots, max(cores, 1))) if cpu else float(slots),
        flops_per_second=rates.flops_per_second,
        memory_bytes_per_second=rates.memory_bytes_per_second,
        memory_ratio=6.0 if cpu else 1.0,
        layer_seconds=1e-3 if cpu else rates.dispatch_seconds,
        link_bytes_per_second=rates.link_bytes_per_second,
        link_seconds=2e-4 if cpu else rates.link_seconds,
        nic_bytes_per_second=rates.nic_bytes_per_second,
        nic_seconds=rates.nic_seconds,
        call_seconds=CALL_SECONDS,
    )


def resized(profile: Profile, before: Profile, now: Profile) -> Profile:
    """The measured profile after slots came or went; `before` and `now` are what is supposed of the slots then and now.

    What runs together follows the supposed alone: slots that come back find the machine as it was measured.
    """
    together = profile.together_slots / before.together_slots * now.together_slots
    return replace(profile, slots=now.slots, slots_per_node=now.slots_per_node, together_slots=together)


def fitted(samples: Sequence[Sample], default: Profile) -> Profile:
    """The profile that samples tell; what none of them measured is the default's."""
    copies = [size / each.seconds for each in samples if each.kind == "copy" for size in each.shape]
    memory = 2 * median(copies) if copies else default.memory_bytes_per_second
    layers = [each.seconds for each in samples if each.kind == "layer"]
    calls = [each.seconds for each in samples if each.kind == "call"]
    inside = [each for each in samples if 1 < each.ranks <= default.slots_per_node]
    latency, link = _link(inside, default.link_seconds, default.link_bytes_per_second)
    across = [each for each in samples if each.ranks > default.slots_per_node]
    one_host = default.slots_per_node >= default.slots
    nic_latency, nic = _link(across, default.nic_seconds, default.nic_bytes_per_second)
    if one_host and inside:
        nic_latency, nic = latency, link
    flops = _flops(samples, memory, default)
    layer = median(layers) if layers else default.layer_seconds
    return Profile(
        device=default.device,
        dtype_bytes=default.dtype_bytes,
        slots=default.slots,
        slots_per_node=default.slots_per_node,
        together_slots=_together(samples, default),
        flops_per_second=flops,
        memory_bytes_per_second=memory,
        memory_ratio=_memory_ratio(samples, flops, memory, layer, default),
        layer_seconds=layer,
        link_bytes_per_second=link,
        link_seconds=latency,
        nic_bytes_per_second=nic,
        nic_seconds=nic_latency,
        call_seconds=median(calls) if calls else default.call_seconds,
    )


def _together(samples: Sequence[Sample], default: Profile) -> float:
    """All slots' repetitions a second over one slot's alone, from 1 to the number of slots; of each the best round."""
    alone = [1 / each.seconds for each in samples if each.kind == "units" and each.ranks == 1]
    crowd = [each for each in samples if each.kind == "units" and each.ranks > 1]
    if not alone or not crowd:
        return default.together_slots
    most = max(each.ranks for each in crowd)
    rates = [1 / each.seconds for each in crowd if each.ranks == most]
    rounds = [sum(rates[at : at + most]) for at in range(0, len(rates) - most + 1, most)]
    together = max(rounds, default=0.0) / max(alone)
    return max(1.0, min(float(most), together)) * default.slots / most


def _memory_ratio(samples: Sequence[Sample], flops: float, memory: float, layer: float, default: Profile) -> float:
    """What is left of an eager layer's forward and backward beside products and launches, over the bytes of the terms.

    1 on GPUs: their engines fuse what this layer does one by one.
    """
    if default.device != CPU_SLOT.name:
        return 1.0
    found: list[float] = []
    units = [each for each in samples if each.kind == "units" and each.ranks == 1]
    for each in sorted(units, key=lambda unit: unit.seconds)[:1]:
        tokens, hidden, inner, wide = each.shape
        cut = ((3 * inner, hidden), (hidden, inner), (2 * wide, hidden), (hidden, wide))
        products = sum(_gemm_seconds((tokens, *size), flops, memory, default.dtype_bytes) for size in cut)
        moved = default.dtype_bytes * tokens * (10 * hidden + 4 * inner + 3 * wide) / memory
        found.append((each.seconds / 3 - products - layer) / moved)
    return max(1.0, found[0]) if found else default.memory_ratio


def _flops(samples: Sequence[Sample], memory_bytes_per_second: float, default: Profile) -> float:
    """The arithmetic rate under which `Rates.gemm_seconds` has the samples' median right, in the log of time.

    Products that are nearly all memory or launch say little of it: each is weighed by its arithmetic share.
    """
    gemms = [(each.shape, each.seconds) for each in samples if each.kind == "gemm"]
    if not gemms:
        return default.flops_per_second
    launch = min(seconds for _, seconds in gemms) / 10
    low, high = log(1e8), log(1e16)
    for _ in range(60):
        middle = (low + high) / 2
        errors = [
            log(_gemm_seconds(sizes, exp(middle), memory_bytes_per_second, default.dtype_bytes) + launch) - log(seconds)
            for sizes, seconds in sorted(gemms, key=lambda pair: -_work(pair[0]))[: (len(gemms) + 1) // 2]
        ]
        low, high = (middle, high) if median(errors) > 0 else (low, middle)
    return exp(low)


def _work(sizes: tuple[int, ...]) -> int:
    rows, outputs, inputs = sizes
    return rows * outputs * inputs


def _gemm_seconds(sizes: tuple[int, ...], flops: float, memory: float, dtype_bytes: int) -> float:
    rows, outputs, inputs = sizes
    arithmetic = 2 * rows * outputs * inputs / flops
    moved = dtype_bytes * (rows * (inputs + outputs) + inputs * outputs) / memory
    return (arithmetic**GEMM_POWER + moved**GEMM_POWER) ** (1 / GEMM_POWER)


def _wire_bytes(sample: Sample) -> float:
    """What a rank puts on its port."""
    size, ranks = sample.shape[0], sample.ranks
    return {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": float(ranks - 1), "p2p": 1.0}[sample.kind] * size


def _link(samples: Sequence[Sample], latency: float, bandwidth: float) -> tuple[float, float]:
    """Seconds of a doubling of ranks and bytes per second of a port: small messages say the first, large the second."""
    timed = [each for each in samples if each.kind in ("all_reduce", "all_gather", "p2p")]
    if not timed:
        return latency, bandwidth
    smallest = min(each.shape[0] for each in timed)
    small = [each.seconds / each.ranks.bit_length() for each in timed if each.shape[0] == smallest]
    found = median(small)
    large = [
        _wire_bytes(each) / max(each.seconds - found * each.ranks.bit_length(), each.seconds / 4, LEAST_SECONDS)
        for each in timed
        if each.shape[0] > smallest
    ]
    return found, median(large) if large else bandwidth
