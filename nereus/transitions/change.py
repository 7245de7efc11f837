"""What one change of plan asks for, in bytes: where each EMU is and shall be, who sends what, and how much room there is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nereus.errors import ConfigError
from nereus.transitions.order import Lane, lane_name

Mode = Literal["beside", "snapshot", "checkpoint"]
Hop = int
EARLY = ("allocate", "build_groups", "build_engine")
"""Kinds that the running step may carry between its phases (design, section 6)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Residency:
    """Bytes of one EMU on one lane before and after the change.

    `present_bytes` and `target_bytes` are state; `kept_bytes` of both are the same bytes, of which `copied_bytes` move
    to another place on the lane (one contiguous buffer gives way to another). `guarded_bytes` of the present state are
    held by another slot or host too, which keeps them until the commit. Every byte of state is in the target of some
    lane. Blank bytes need no content: gradients, KV cache, buffers of engines, weights that a sync fills again.
    """

    emu: str
    lane: Lane
    present_bytes: int = 0
    target_bytes: int = 0
    kept_bytes: int = 0
    copied_bytes: int = 0
    guarded_bytes: int = 0
    blank_present_bytes: int = 0
    blank_target_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Bytes of an EMU that `destination` misses and `source` gives; lanes, so host memory too.

    A flow of a higher hop sends on what its source received in lower ones. The first `frees_bytes` of a flow are read
    by no other flow and not kept: the source can drop them piece by piece as they arrive.
    """

    emu: str
    source: Lane
    destination: Lane
    size_bytes: int
    hop: Hop = 0
    frees_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EmuChange:
    """How one EMU changes. `mode`: what stands in for its old bytes until the commit.

    beside: they stay where they are; snapshot: they are copied to host memory, then the state changes in place;
    checkpoint: nothing is kept, a loss costs the steps since `checkpoint` (its name). A `frozen` EMU does not change
    while steps run, so its bytes may move before the pause. `old_groups` and `new_groups` communicators are destroyed
    and built; `engine_seconds` is what building its new engine takes on a slot, 0 for none.

    shell: the state arrives in the new engine's own storage. The engine is built in the claimed memory, state and blank,
    before bytes arrive in it, so every kept byte is copied; in mode beside old blank memory stays until the commit too.
    through_host (mode snapshot only): all old bytes of each slot go to its host and leave the slot at once; everything
    that moves or is kept is read from there. A slot then needs room for the larger of old and new, and nothing waits
    for another slot's room. No phase of the running step touches an `idle` EMU any more: it may end before the pause,
    and its next engine is built after that (a process has one at a time).
    """

    emu: str
    mode: Mode = "beside"
    checkpoint: str = ""
    frozen: bool = False
    old_groups: int = 0
    new_groups: int = 0
    engine_seconds: float = 0.0
    shell: bool = False
    through_host: bool = False
    idle: bool = False

    @property
    def anew(self) -> bool:
        """Whether the new state on a slot gets a place of its own as a whole: nothing stays where it is."""
        return self.shell or self.through_host


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change of plan. `capacity_bytes` by lane; `other_bytes` by lane is what stays and belongs to no EMU here.

    `phase_bytes` by lane is what a step's phases need beside what is resident: only what fits beside it may happen
    before the pause, of the kinds `early` between the step's phases, of the kinds `outside` in another process or the
    driver, beside the step. An `urgent` one commits as soon as all state has arrived, because slots of the plan before are
    about to leave: what has no state is built after it, unless that is done outside. Pieces have at most `chunk_bytes` and, where memory forces smaller ones, at least
    `least_chunk_bytes`. `host_of` gives the lane of each slot's host memory; mode snapshot needs it.
    """

    emus: tuple[EmuChange, ...]
    residencies: tuple[Residency, ...]
    flows: tuple[Flow, ...]
    capacity_bytes: Mapping[Lane, int]
    host_of: Mapping[Lane, Lane]
    other_bytes: Mapping[Lane, int] = field(default_factory=dict[Lane, int])
    phase_bytes: Mapping[Lane, int] = field(default_factory=dict[Lane, int])
    chunk_bytes: int = 256 << 20
    least_chunk_bytes: int = 1 << 20
    early: tuple[str, ...] = EARLY
    outside: tuple[str, ...] = ()
    urgent: bool = False

    def used_bytes(self) -> dict[Lane, int]:
        """Bytes in use on each lane before the change."""
        used: dict[Lane, int] = defaultdict(int, self.other_bytes)
        for r in self.residencies:
            used[r.lane] += r.present_bytes + r.blank_present_bytes
        return dict(used)

    def mode_of(self, emu: str) -> Mode:
        """The mode of an EMU of the change."""
        return next(entry.mode for entry in self.emus if entry.emu == emu)

    def after_commit(self) -> set[str]:
        """EMUs whose groups and engine are built after the commit: of an urgent change those without state."""
        if not self.urgent or "build_engine" in self.outside:
            return set()
        with_state = {r.emu for r in self.residencies if r.present_bytes or r.target_bytes}
        return {emu.emu for emu in self.emus if emu.emu not in with_state and not emu.shell}

    def through(self) -> set[str]:
        """EMUs whose old bytes are read from the snapshots of their slots."""
        return {entry.emu for entry in self.emus if entry.through_host}

    def validate(self) -> None:
        """ConfigError for the first number that cannot be true: names the EMU, the lane and what would be right."""
        if not 1 <= self.least_chunk_bytes <= self.chunk_bytes:
            raise ConfigError("least_chunk_bytes", self.least_chunk_bytes, f"1 to chunk_bytes = {self.chunk_bytes:,}")
        known = {change.emu: change for change in self.emus}
        if len(known) != len(self.emus):
            raise ConfigError("emus", [change.emu for change in self.emus], "each EMU once")
        if len({(f.emu, f.source, f.destination, f.hop) for f in self.flows}) != len(self.flows):
            raise ConfigError("flows", len(self.flows), "one flow for each EMU, source, destination and hop")
        places = {(r.emu, r.lane): r for r in self.residencies}
        if len(places) != len(self.residencies):
            raise ConfigError("residencies", len(self.residencies), "each EMU once on a lane")
        arriving: dict[tuple[str, Lane], int] = defaultdict(int)
        freed: dict[tuple[str, Lane], int] = defaultdict(int)
        for flow in self.flows:
            _validate_flow(flow, places)
            arriving[flow.emu, flow.destination] += flow.size_bytes
            freed[flow.emu, flow.source] += flow.frees_bytes
        for key, r in places.items():
            if r.emu not in known or r.lane not in self.capacity_bytes:
                raise ConfigError("residencies", f"{r.emu} on {lane_name(r.lane)}", "an EMU and a lane of the change")
            _validate_residency(r, arriving[key], freed[key])
            _validate_anew(r, known[r.emu])
            if r.lane >= 0 and r.present_bytes and r.lane not in self.host_of and self.mode_of(r.emu) == "snapshot":
                what = f"{r.emu} on {lane_name(r.lane)}"
                raise ConfigError("host_of", what, "the lane of the slot's host memory, where mode snapshot copies")


def _validate_flow(flow: Flow, places: Mapping[tuple[str, Lane], Residency]) -> None:
    source, destination = places.get((flow.emu, flow.source)), places.get((flow.emu, flow.destination))
    if source is None or destination is None or flow.source == flow.destination:
        raise _wrong_flow(flow, "two different lanes where the EMU has a residency")
    if flow.size_bytes <= 0 or not 0 <= flow.frees_bytes <= flow.size_bytes or (flow.hop and flow.frees_bytes):
        raise _wrong_flow(flow, "size_bytes > 0; frees_bytes at most that, and 0 for relays")
    given = source.present_bytes if flow.hop == 0 else source.target_bytes
    if flow.size_bytes > given:
        raise _wrong_flow(flow, f"at most {given:,} bytes, which is what the source has to give")


def _wrong_flow(flow: Flow, expected: str) -> ConfigError:
    return ConfigError("flows", f"{flow.emu} {lane_name(flow.source)} > {lane_name(flow.destination)}", expected)


def _validate_anew(r: Residency, emu: EmuChange) -> None:
    if emu.through_host and emu.mode != "snapshot":
        raise ConfigError("through_host", f"{emu.emu} in mode {emu.mode}", "mode snapshot")
    if emu.anew and r.lane >= 0 and r.copied_bytes != r.kept_bytes:
        raise ConfigError(
            "copied_bytes",
            f"{r.copied_bytes:,} of {r.emu} on {lane_name(r.lane)}",
            f"its {r.kept_bytes:,} kept bytes: the new state of a shell or through the host has its own place",
        )


def _validate_residency(r: Residency, arriving_bytes: int, freed_bytes: int) -> None:
    name = f"{r.emu} on {lane_name(r.lane)}"
    if r.kept_bytes + arriving_bytes != r.target_bytes:
        expected = f"kept {r.kept_bytes:,} + arriving {arriving_bytes:,} bytes to be the target's {r.target_bytes:,}"
        raise ConfigError("residencies", name, expected)
    if not 0 <= r.copied_bytes <= r.kept_bytes <= r.present_bytes or not 0 <= r.guarded_bytes <= r.present_bytes:
        raise ConfigError("residencies", name, "0 <= copied <= kept <= present bytes, 0 <= guarded <= present bytes")
    if freed_bytes > r.present_bytes - r.kept_bytes or min(r.blank_present_bytes, r.blank_target_bytes) < 0:
        leaving = r.present_bytes - r.kept_bytes
        raise ConfigError("residencies", name, f"flows that free at most the {leaving:,} bytes that leave; blank >= 0")
