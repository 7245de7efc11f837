"""The probe at a job's start: a few seconds of timed work on its slots, and the Profile that comes of it.

Alone on one slot: products by size in the model's type, a memory copy, an eager decoder layer. On all slots at once: that
layer forward and backward (what processes that share cores take from each other), and collectives by group size,
every group of a size at the same time. Pieces are taken in order while the budget of seconds lasts; what is left
out keeps what the catalogue says. Nothing of the job's state is touched, and nothing stays but a few groups.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from nereus.config import Config, ModelConfig
from nereus.costs.profile import Profile, Sample, fitted, supposed
from nereus.fleet import DEVICES
from nereus.model import DTYPE_BYTES
from nereus.runtime import state
from nereus.runtime.pool import SlotPool
from nereus.runtime.slot import Slot

PIECE_SECONDS = 0.02
"""How long a piece is repeated; at least REPEATS times."""
REPEATS = 3
UNITS_SECONDS = 0.3
ROUNDS = 3
"""How often a layer alone and on all slots is timed in turn: others on the machine disturb some, the best counts."""
PACE_SECONDS, PACE_WIDTH, PACE_TOKENS = 0.05, 512, 64
"""Of a check of the slots' speeds in a running job: a few megabytes, a fifth of a second."""
CALLS = 7
COPY_BYTES = 8 << 20
SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 20
SMALL_REPEATS, LARGE_REPEATS = 10, 3
LARGEST_WIDTH = 4096
ROWS_TOKENS = (8, 64, 256)
LAYER_TOKENS, UNITS_TOKENS = 8, 256
FEW_SLOTS = 8
"""Up to so many slots every power of two is a group size; beyond, a node's slots and all of them."""

Place = dict[str, Any]


class Probe:
    """Runs the pieces on a pool's slots; `samples` is what they measured."""

    def __init__(self, config: Config, pool: SlotPool) -> None:
        self._config, self._pool = config, pool
        self._deadline_seconds = 0.0
        self.samples: list[Sample] = []
        self.seconds = 0.0

    def places(self) -> dict[str, Place]:
        """Where the slots are: slot -> host, device, cores. Equal places are probed once."""
        found = self._pool.call_all("apply", place)
        return {str(slot): found[slot] for slot in sorted(found)}

    def run(self, places: Mapping[str, Place]) -> Profile:
        """The profile of the slots, within about `config.probe.seconds`; 0 probes nothing and supposes all of it."""
        default = supposed_of(self._config, places)
        started = time.monotonic()
        self._deadline_seconds = started + self._config.probe.seconds
        for piece in self._pieces(places):
            if time.monotonic() >= self._deadline_seconds:
                break
            self.samples += piece()
        self.seconds = time.monotonic() - started
        return fitted(self.samples, default)

    def _pieces(self, places: Mapping[str, Place]) -> Iterator[Callable[[], list[Sample]]]:
        """In the order of what they are worth."""
        model, numbers = self._config.model, self._pool.numbers
        first = numbers[:1]
        yield self._calls
        yield lambda: self._on(first, layers, model)
        for _ in range(ROUNDS):
            yield lambda: self._on(first, units, model, 1)
            if len(numbers) > 1:
                yield lambda: self._on(numbers, units, model, len(numbers))
        yield lambda: self._on(first, products, model)
        for size in group_sizes(len(numbers), per_node(places)):
            yield lambda size=size: self._collectives(size)

    def _on(self, slots: Sequence[int], piece: Callable[..., list[Sample]], *arguments: object) -> list[Sample]:
        found = self._pool.call("apply", dict.fromkeys(slots, (piece, *arguments)))
        return [sample for slot in slots for sample in found[slot]]

    def seconds_by_slot(self) -> dict[str, list[float]]:
        """Slot -> seconds of the layer, round by round, while all slots did the same."""
        numbers = self._pool.numbers
        units = [each.seconds for each in self.samples if each.kind == "units" and each.ranks == len(numbers) > 1]
        return {str(slot): units[at :: len(numbers)] for at, slot in enumerate(numbers)} if units else {}

    def _calls(self) -> list[Sample]:
        found: list[float] = []
        for _ in range(CALLS):
            started = time.monotonic()
            self._pool.call_all("apply", nothing)
            found.append(time.monotonic() - started)
        return [Sample(kind="call", seconds=median(found), ranks=len(self._pool.numbers))]

    def _collectives(self, size: int) -> list[Sample]:
        """All groups of `size` neighbours at once; slots that are left over take no part."""
        numbers = self._pool.numbers
        sets = tuple(tuple(numbers[at : at + size]) for at in range(0, len(numbers) - size + 1, size))
        counts = self._pool.call_all("group_count")
        self._pool.call_all("align", sets, max(counts.values()), frozenset(sets))
        return self._on([slot for ranks in sets for slot in ranks], collectives, sets)


def record(probe: Probe, places: Mapping[str, Place], profile: Profile) -> dict[str, Any]:
    """What the journal keeps of a probe."""
    return {
        "seconds": probe.seconds,
        "places": dict(places),
        "samples": [asdict(sample) for sample in probe.samples],
        "profile": profile.record(),
    }


def supposed_of(config: Config, places: Mapping[str, Place]) -> Profile:
    """What the catalogue says of slots in these places; cores are those of the hosts together."""
    hosts = {entry["host"]: int(entry["cores"]) for entry in places.values()}
    device = next(iter(places.values()))["device"]
    made = supposed(device, DTYPE_BYTES[config.model.dtype], len(places), sum(hosts.values()))
    return replace(made, slots_per_node=per_node(places))


def per_node(places: Mapping[str, Place]) -> int:
    """The slots of the fullest host."""
    hosts = [entry["host"] for entry in places.values()]
    return max(hosts.count(host) for host in hosts)


def group_sizes(slots: int, node_slots: int) -> tuple[int, ...]:
    """The sizes of groups whose collectives are timed, ascending."""
    powers = {1 << power for power in range(1, slots.bit_length())} if slots <= FEW_SLOTS else {node_slots}
    return tuple(sorted(size for size in powers | {slots} if 1 < size <= slots))


# -- on a slot ---------------------------------------------------------------------------------------------------------


def place(slot: Slot) -> Place:  # noqa: ARG001
    """Host, device and usable cores of this process."""
    device = "cpu"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower()
        device = next((key for key in sorted(DEVICES, key=len, reverse=True) if key in name), name)
    return {"host": socket.gethostname(), "device": device, "cores": len(os.sched_getaffinity(0))}


def nothing(slot: Slot) -> None:
    """What a call costs that does nothing."""


def products(slot: Slot, model: ModelConfig) -> list[Sample]:  # noqa: ARG001
    """Matrix products by size, and a copy, on this slot."""
    dtype, device = getattr(torch, model.dtype), state.device()
    found: list[Sample] = []
    hidden, wide = min(model.hidden, LARGEST_WIDTH), min(2 * (model.ffn or model.expert_ffn), LARGEST_WIDTH)
    for outputs, inputs in dict.fromkeys(((hidden, hidden), (wide, hidden))):
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device)
        for rows in ROWS_TOKENS:
            data = torch.randn(rows, inputs, dtype=dtype, device=device)
            seconds = _repeated(lambda data=data, weight=weight: torch.nn.functional.linear(data, weight))
            found.append(Sample(kind="gemm", seconds=seconds, shape=(rows, outputs, inputs)))
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found.append(Sample(kind="copy", seconds=_repeated(lambda: target.copy_(source)), shape=(COPY_BYTES,)))
    return found


def layers(slot: Slot, model: ModelConfig) -> list[Sample]:  # noqa: ARG001
    """An eager layer's forward pass over few tokens: what issuing its kernels takes."""
    layer = EagerLayer(model)
    with torch.no_grad():
        return [Sample(kind="layer", seconds=_repeated(lambda: layer(LAYER_TOKENS)), shape=(LAYER_TOKENS,))]


def units(slot: Slot, model: ModelConfig, ranks: int) -> list[Sample]:  # noqa: ARG001
    """Collective over `ranks` slots when above 1: seconds of a layer forward and backward while all do the same."""
    layer = EagerLayer(model)
    layer(UNITS_TOKENS).sum().backward()
    if ranks > 1:
        dist.barrier()
    settled, started = 0, time.monotonic()
    while time.monotonic() < started + UNITS_SECONDS:
        layer(UNITS_TOKENS).sum().backward()
        _synchronise()
        settled += 1
    seconds = (time.monotonic() - started) / settled
    return [Sample(kind="units", seconds=seconds, shape=(UNITS_TOKENS, *layer.widths), ranks=ranks)]


def pace(slot: Slot, model: ModelConfig) -> list[float]:  # noqa: ARG001
    """Collective over all slots: seconds of a small layer forward and backward while all do the same, round by round."""
    layer = EagerLayer(model, PACE_WIDTH)
    found: list[float] = []
    for _ in range(ROUNDS):
        dist.barrier()
        done, started = 0, time.monotonic()
        while time.monotonic() < started + PACE_SECONDS:
            layer(PACE_TOKENS).sum().backward()
            _synchronise()
            done += 1
        found.append((time.monotonic() - started) / done)
    return found


def collectives(slot: Slot, sets: tuple[tuple[int, ...], ...]) -> list[Sample]:
    """Collective over each of `sets`, all at once: all-reduce, all-gather and a ring of sends, small and large."""
    ranks = next(each for each in sets if slot.number in each)
    world = slot.world
    group = world.sub(ranks) if world is not None else None
    size, at = len(ranks), ranks.index(slot.number)
    found: list[Sample] = []
    for size_bytes, repeats in ((SMALL_BYTES, SMALL_REPEATS), (LARGE_BYTES, LARGE_REPEATS)):
        data = torch.zeros(size_bytes // 4, dtype=torch.float32, device=state.device())
        gathered = [torch.empty_like(data) for _ in ranks]

        def ring(data: torch.Tensor = data, into: torch.Tensor = gathered[0]) -> None:
            sends = dist.P2POp(dist.isend, data, ranks[(at + 1) % size], group)
            receives = dist.P2POp(dist.irecv, into, ranks[at - 1], group)
            for work in dist.batch_isend_irecv([sends, receives] if at % 2 else [receives, sends]):
                work.wait()

        pieces: dict[str, Callable[[], object]] = {
            "all_reduce": lambda data=data: dist.all_reduce(data, group=group),
            "all_gather": lambda data=data, gathered=gathered: dist.all_gather(gathered, data, group=group),
            "p2p": ring,
        }
        for kind, piece in pieces.items():
            piece()
            seconds = _counted(piece, repeats)
            found.append(Sample(kind=kind, seconds=seconds, shape=(size_bytes,), ranks=size))
    return found


class EagerLayer(torch.nn.Module):
    """A decoder layer in plain PyTorch with the model's widths: only its time counts."""

    def __init__(self, model: ModelConfig, widest: int = LARGEST_WIDTH) -> None:
        super().__init__()
        self._dim = model.head_dim
        self._heads = max(1, min(model.heads, widest // model.head_dim))
        self._hidden = min(model.hidden, widest)
        inner, wide = self._heads * self._dim, min(model.ffn or model.expert_ffn, widest)
        self.widths = (self._hidden, inner, wide)
        options: dict[str, Any] = {"bias": False, "dtype": getattr(torch, model.dtype), "device": state.device()}
        self.qkv = torch.nn.Linear(self._hidden, 3 * inner, **options)
        self.out = torch.nn.Linear(inner, self._hidden, **options)
        self.up = torch.nn.Linear(self._hidden, 2 * wide, **options)
        self.down = torch.nn.Linear(wide, self._hidden, **options)
        self.norms = torch.nn.Parameter(torch.ones(2, self._hidden, **{k: options[k] for k in ("dtype", "device")}))

    def forward(self, tokens: int) -> torch.Tensor:
        """[tokens, hidden] of random input, as sequences of 16 tokens at most."""
        width = min(tokens, 16)
        weight = self.qkv.weight
        data = torch.ones(tokens // width, width, self._hidden, dtype=weight.dtype, device=weight.device)
        query, key, value = self.qkv(self._norm(data, 0)).unflatten(-1, (3, self._heads, self._dim)).unbind(2)
        query, key = self._turned(query), self._turned(key)
        scores = torch.einsum("nqhd,nkhd->nhqk", query, key) * self._dim**-0.5
        mask = torch.ones(width, width, dtype=torch.bool, device=data.device).triu(1)
        weights = torch.softmax(scores.masked_fill(mask, -1e4), dim=-1)
        mixed = torch.einsum("nhqk,nkhd->nqhd", weights, value)
        data = data + self.out(mixed.flatten(2))
        gate, up = self.up(self._norm(data, 1)).chunk(2, dim=-1)
        return data + self.down(torch.nn.functional.silu(gate) * up)

    def _norm(self, data: torch.Tensor, which: int) -> torch.Tensor:
        return data * torch.rsqrt(data.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norms[which]

    @staticmethod
    def _turned(data: torch.Tensor) -> torch.Tensor:
        first, second = data.chunk(2, dim=-1)
        return data * 0.5 + torch.cat((-second, first), dim=-1) * 0.5


def _repeated(piece: Callable[[], object]) -> float:
    """Median seconds of a piece on this slot."""
    piece()
    _synchronise()
    times: list[float] = []
    until = time.monotonic() + PIECE_SECONDS
    while len(times) < REPEATS or time.monotonic() < until:
        started = time.perf_counter()
        piece()
        _synchronise()
        times.append(time.perf_counter() - started)
    return max(median(times), 1e-9)


def _counted(piece: Callable[[], object], repeats: int) -> float:
    """Mean seconds of a fixed count of repetitions: what all ranks of a group can do alike."""
    _synchronise()
    started = time.perf_counter()
    for _ in range(repeats):
        piece()
    _synchronise()
    return max((time.perf_counter() - started) / repeats, 1e-9)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
