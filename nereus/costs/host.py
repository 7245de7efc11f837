"""Bytes of host memory that a slot's process takes, by component: what is offloaded, what an engine backs up, the process.

Offloaded state is copied into pinned buffers that are allocated once and kept (verl 6193: allocated anew at every step
they come to twice the state). An engine that sleeps backs nothing up where new weights follow (vLLM's sleep level 2;
at level 1 a node keeps every engine's weights: vime 190).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.costs.footprint import Parts

PROCESS_BYTES = 6_000_000_000
"""A rank's process with its libraries, CUDA's host side, its loader and its part of Ray's object store: a rough figure."""
HOST_BYTES_PER_SLOT = 128 * 1024**3
"""Host memory of a slot's share of its node where nobody says: 1 TiB for eight slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPeak(Parts):
    """Host memory of one slot's share of its node: bytes by component, and how much there is."""

    components: Mapping[str, float]
    room_bytes: float

    @property
    def fits(self) -> bool:
        """Whether the node holds it."""
        return self.total_bytes <= self.room_bytes


def host_peak(offloaded: Mapping[str, float], room_bytes: float, *, sleeping_bytes: float = 0.0) -> HostPeak:
    """The host memory of a slot that offloads these components; `sleeping_bytes` is what its engine backs up."""
    kept = {name: size for name, size in offloaded.items() if size}
    if sleeping_bytes:
        kept["engine"] = sleeping_bytes
    return HostPeak(components={"process": PROCESS_BYTES, **kept}, room_bytes=room_bytes)
