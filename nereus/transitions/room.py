"""Room: what a change claims and releases on each lane, in whole or in pieces, and an order of it that fits.

Whole first: one claim for an EMU on a lane, one release. Where lanes then wait for each other, the flows of EMUs that
change in place are cut in pieces: small enough for the room that the waiting lanes have, else for the parking shared by
them all, so that a cycle moves on all its lanes at once (chunks of spare / k).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from nereus.transitions.change import Change, Flow, Residency
from nereus.transitions.order import Claim, Infeasible, Lane, Release, Step, lane_name, order

MOST_PIECES = 200_000
Key = tuple[str, Lane]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowPiece:
    """Bytes [start, start + size_bytes) of flow `flow_index`, the claim that they fill, the release that reads them.

    `release_index` is None when nothing that they are read from is dropped before the commit.
    """

    flow_index: int
    start: int
    size_bytes: int
    claim_index: int
    release_index: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoomPlan:
    """Claims and releases before the commit, the pieces of all flows, and a legal order of the claims and releases.

    `whole_claims` gives the claim of an EMU on a lane as a whole, or in pieces that of what is copied on the lane;
    `copy_releases` the release of what is copied. `claim_pieces` and `release_pieces` tell which piece a claim or a
    release is for, if it is for one; `blank_releases` give back memory without content.
    """

    claims: tuple[Claim, ...]
    releases: tuple[Release, ...]
    pieces: tuple[FlowPiece, ...]
    steps: tuple[Step, ...]
    whole_claims: dict[Key, int]
    copy_releases: dict[Key, int]
    claim_pieces: dict[int, FlowPiece]
    release_pieces: dict[int, FlowPiece]
    blank_releases: set[int]


def stays(r: Residency) -> bool:
    """Whether nothing at all happens to the EMU's state on the lane."""
    return r.present_bytes == r.kept_bytes == r.target_bytes and not r.copied_bytes


def in_place(change: Change) -> set[str]:
    """EMUs that drop old bytes before the commit."""
    return {emu.emu for emu in change.emus if emu.mode != "beside"}


def needs(r: Residency, *, beside: bool) -> int:
    """Bytes of new room for an EMU's state on a lane."""
    if stays(r):
        return 0
    return r.target_bytes if beside else r.target_bytes - r.kept_bytes + r.copied_bytes


def gives(change: Change, r: Residency) -> int:
    """Bytes of old state that the lane gives back before the commit; what a host holds is its own snapshot."""
    mode = change.mode_of(r.emu)
    if mode == "beside" or (mode == "snapshot" and r.lane < 0):
        return 0
    return r.present_bytes - r.kept_bytes + r.copied_bytes


def snapshots(change: Change) -> dict[Key, int]:
    """Bytes that each slot must copy to host memory first: of EMUs in mode snapshot what no other domain guards.

    All that it has where everything is read from the host.
    """
    through = change.through()
    dropping = {
        r.emu for r in change.residencies if change.mode_of(r.emu) == "snapshot" and r.lane >= 0 and gives(change, r)
    }
    return {
        (r.emu, r.lane): size
        for r in change.residencies
        if r.emu in dropping and r.lane >= 0
        if (size := r.present_bytes - (0 if r.emu in through else r.guarded_bytes))
    }


def plan_room(change: Change) -> RoomPlan:
    """An order of all claims and releases of a change that fits, else Infeasible."""
    used = change.used_bytes()
    capacity = dict(change.capacity_bytes)
    _check_target(change)
    for (_, lane), size in sorted(snapshots(change).items()):
        host = change.host_of[lane]
        used[host] = used.get(host, 0) + size
        if used[host] > capacity.get(host, 0):
            room = capacity.get(host, 0)
            say = f"the snapshot of {lane_name(lane)} does not fit beside what the host holds"
            raise Infeasible(host, "snapshot", used[host], room, (say, "choose mode beside or checkpoint"))
    whole = _Cut(change, None)
    _check_beside(change, used, whole)
    try:
        return whole.plan(order(capacity, used, whole.claims, whole.releases, change.host_of, park=False))
    except Infeasible as told:
        if told.phase != "order":
            raise
        refusal = told
    for size in _piece_sizes(change, capacity, used, refusal):
        cut = _Cut(change, size)
        if len(cut.pieces) > MOST_PIECES:
            break
        try:
            return cut.plan(order(capacity, used, cut.claims, cut.releases, change.host_of))
        except Infeasible as told:
            refusal = told
    raise refusal


def _check_target(change: Change) -> None:
    """Infeasible when the state after the change, blank memory included, exceeds a lane."""
    final: dict[Lane, int] = defaultdict(int, change.other_bytes)
    for r in change.residencies:
        final[r.lane] += r.target_bytes + r.blank_target_bytes
    for lane, size in sorted(final.items()):
        room = change.capacity_bytes.get(lane, 0)
        if size > room:
            say = f"the target state takes {size:,} of {room:,} bytes, {size - room:,} too many"
            raise Infeasible(lane, "target", size, room, (say,))


def _check_beside(change: Change, used: dict[Lane, int], whole: _Cut) -> None:
    """Infeasible where the new state does not fit beside old that stays until the commit."""
    level: dict[Lane, int] = defaultdict(int, used)
    stay: dict[Lane, int] = defaultdict(int)
    for claim in whole.claims:
        level[claim.lane] += claim.size_bytes
    for release in whole.releases:
        level[release.lane] -= release.size_bytes
    shells = {emu.emu for emu in change.emus if emu.shell}
    for r in change.residencies:
        if r.emu not in whole.changing and not stays(r):
            stay[r.lane] += r.present_bytes + (r.blank_present_bytes if r.emu in shells else 0)
    for lane, size in sorted(level.items()):
        room = change.capacity_bytes.get(lane, 0)
        if size > room >= used.get(lane, 0) and stay[lane]:
            say = f"{stay[lane]:,} bytes of old state stay beside the new until the commit"
            raise Infeasible(lane, "beside", size, room, (say, "choose mode snapshot"))


def _piece_sizes(change: Change, capacity: dict[Lane, int], used: dict[Lane, int], refusal: Infeasible) -> list[int]:
    """Sizes worth a try: the room of the waiting lanes, the parking over all of them, the parking, halves of these."""
    lanes = [lane for lane, _ in refusal.cycle]
    own = min((free for _, free in refusal.cycle), default=0)
    hosts: dict[Lane, int] = defaultdict(int)
    for lane in lanes:
        if lane in change.host_of:
            hosts[change.host_of[lane]] += 1
    free = {lane: size - used.get(lane, 0) for lane, size in capacity.items()}
    shared = min((free.get(host, 0) // count for host, count in hosts.items()), default=0)
    single = max((room for lane, room in free.items() if lane not in lanes), default=0)
    sizes: list[int] = []
    for size in (own, shared, single // max(len(lanes), 1), single, change.chunk_bytes):
        size = min(size, change.chunk_bytes)  # noqa: PLW2901
        while size >= change.least_chunk_bytes:
            sizes.append(size)
            size //= 2  # noqa: PLW2901
    first = [min(size, change.chunk_bytes) for size in (own, shared, single) if size >= change.least_chunk_bytes]
    return list(dict.fromkeys([*first, *sorted(sizes, reverse=True), change.least_chunk_bytes]))


class _Cut:
    """Claims, releases and pieces of a change, with pieces of at most `size_bytes` (None: whole flows)."""

    def __init__(self, change: Change, size_bytes: int | None) -> None:
        self.change, self.size_bytes = change, size_bytes
        self.claims: list[Claim] = []
        self.releases: list[Release] = []
        self.pieces: list[FlowPiece] = []
        self.claim_pieces: dict[int, FlowPiece] = {}
        self.release_pieces: dict[int, FlowPiece] = {}
        self.blank_releases: set[int] = set()
        self.whole_claims: dict[Key, int] = {}
        self.copy_releases: dict[Key, int] = {}
        self.places = {(r.emu, r.lane): r for r in change.residencies}
        self.changing = in_place(change)
        self.through = change.through()
        self.shells = {emu.emu for emu in change.emus if emu.shell}
        self.cut = self.changing - {emu.emu for emu in change.emus if emu.anew}
        self.given = {key: gives(change, r) for key, r in self.places.items()}
        for key, r in self.places.items():
            self._claim_whole(key, r)
        self._cut_flows()
        self._release_rest()
        for (emu, lane), r in self.places.items():
            if r.blank_present_bytes and (emu in self.changing or emu not in self.shells):
                self.blank_releases.add(len(self.releases))
                self.releases.append(Release(name=emu, lane=lane, size_bytes=r.blank_present_bytes))

    def plan(self, steps: tuple[Step, ...]) -> RoomPlan:
        """The plan with an order of its claims and releases."""
        return RoomPlan(
            claims=tuple(self.claims),
            releases=tuple(self.releases),
            pieces=tuple(self.pieces),
            steps=steps,
            whole_claims=self.whole_claims,
            copy_releases=self.copy_releases,
            claim_pieces=self.claim_pieces,
            release_pieces=self.release_pieces,
            blank_releases=self.blank_releases,
        )

    def _fine(self, emu: str) -> bool:
        return self.size_bytes is not None and emu in self.cut

    def _claim_whole(self, key: Key, r: Residency) -> None:
        """One claim for the EMU's new bytes on a lane; in pieces only for what is copied on the lane.

        A shell's blank memory comes with it: its engine is built in both.
        """
        size = r.copied_bytes if self._fine(r.emu) else needs(r, beside=r.emu not in self.changing)
        if r.emu in self.shells and r.lane >= 0:
            size += r.blank_target_bytes
        if size:
            self.whole_claims[key] = len(self.claims)
            self.claims.append(Claim(name=r.emu, lane=r.lane, size_bytes=size))

    def _cut_flows(self) -> None:
        self.rest_after: dict[Key, set[int]] = defaultdict(set)
        self.freed: dict[Key, int] = defaultdict(int)
        self.rest_pieces: dict[Key, list[int]] = defaultdict(list)
        for index, flow in enumerate(self.change.flows):
            if not self._fine(flow.emu):
                self._add_piece(index, flow, 0, flow.size_bytes, self.whole_claims[flow.emu, flow.destination])
                continue
            frees = flow.frees_bytes if self.given[flow.emu, flow.source] else 0
            for first, last in ((0, frees), (frees, flow.size_bytes)):
                for start in range(first, last, self.size_bytes or 1):
                    size = min(self.size_bytes or 1, last - start)
                    claim = len(self.claims)
                    self.claims.append(Claim(name=flow.emu, lane=flow.destination, size_bytes=size))
                    self._add_piece(index, flow, start, size, claim, frees=last == frees)
                    self.claim_pieces[claim] = self.pieces[-1]

    def _add_piece(self, index: int, flow: Flow, start: int, size: int, claim: int, *, frees: bool = False) -> None:
        release = None
        key = (flow.emu, flow.source)
        if frees:
            release = len(self.releases)
            self.releases.append(Release(name=flow.emu, lane=flow.source, size_bytes=size, after=(claim,)))
            self.freed[key] += size
        elif flow.hop == 0 and self.given[key] and flow.emu not in self.through:
            self.rest_after[key].add(claim)
            self.rest_pieces[key].append(len(self.pieces))
        piece = FlowPiece(flow_index=index, start=start, size_bytes=size, claim_index=claim, release_index=release)
        self.pieces.append(piece)
        if release is not None:
            self.release_pieces[release] = piece

    def _release_rest(self) -> None:
        """What no piece drops alone goes when all that read it, and the copy on the lane, are done."""
        for key, given in self.given.items():
            size = given - self.freed[key]
            if size <= 0:
                continue
            release = len(self.releases)
            after = set(self.rest_after[key])
            if self.places[key].copied_bytes and key[0] not in self.through:
                after.add(self.whole_claims[key])
                self.copy_releases[key] = release
            self.releases.append(Release(name=key[0], lane=key[1], size_bytes=size, after=tuple(sorted(after))))
            for number in self.rest_pieces[key]:
                self.pieces[number] = replace(self.pieces[number], release_index=release)
