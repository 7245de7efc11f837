"""Transitions carried out in a world of bytes with random order, failures and losses: what must hold however they end."""

from __future__ import annotations

from collections import Counter

from nereus.transitions.assemble import assemble
from nereus.transitions.execution import (
    Cancel,
    Execution,
    ExecutionCommand,
    LanesLost,
    OperationDone,
    OperationFailed,
    PauseBegun,
    Settled,
    Start,
)
from nereus.transitions.graph import Operation
from nereus.transitions.order import Infeasible
from nereus.transitions.proof import Proof, check
from tests.core.changes import Choose, Scene, World, any_scene


class Trial:
    """One execution of a scene's graph: `choose` decides what ends next, how, and what is lost."""

    def __init__(self, scene: Scene, choose: Choose, *, faults: int) -> None:
        self.scene, self.choose, self.faults = scene, choose, faults
        self.graph = assemble(scene.change, scene.durations)
        self.proof: Proof = check(self.graph)
        self.world, self.execution = World(scene, self.graph), Execution(self.graph)
        self.running: dict[str, Operation] = {}
        self.cancelled = False
        self.paused = False

    def run(self) -> Settled:
        """Until it is settled; a transition that waits for nothing and is not settled is a deadlock."""
        self.take(self.execution.begin())
        while self.execution.settled is None:
            if not self.paused and (not self.running or self.choose(0, 9) == 0):
                self.paused = True
                self.take(self.execution.handle(PauseBegun()))
                continue
            assert self.running, "deadlock: nothing runs, nothing starts"
            self.step()
        self.judge(self.execution.settled)
        return self.execution.settled

    def take(self, commands: tuple[ExecutionCommand, ...]) -> None:
        for command in commands:
            if isinstance(command, Start):
                assert not self.cancelled, "an operation starts after the transition was given up"
                assert command.operation.place != "pause" or self.paused
                assert command.operation.id not in self.running
                self.running[command.operation.id] = command.operation
            elif isinstance(command, Cancel):
                assert command.operation.id in self.running
                self.cancelled = True

    def step(self) -> None:
        """Something happens: an operation ends, or fails, or lanes are lost."""
        fault = self.choose(0, self.faults) if self.faults else 0
        lanes = [lane for lane in self.scene.change.capacity_bytes if lane not in self.world.lost]
        if fault == 1 and lanes:
            self.lose((lanes[self.choose(0, len(lanes) - 1)],))
            return
        names = sorted(self.running)
        name = names[self.choose(0, len(names) - 1)]
        operation = self.running.pop(name)
        away = operation.via is not None and operation.via in self.world.lost  # what it reads is gone
        if fault == 2 or away or (self.cancelled and self.choose(0, 1)):
            if operation.kind == "release" and self.choose(0, 1):
                self.world.end(operation)  # it was done, only the answer was lost
            self.take(self.execution.handle(OperationFailed(operation_id=name, reason="broken pipe")))
            return
        self.world.end(operation)
        self.take(self.execution.handle(OperationDone(operation_id=name)))

    def lose(self, lanes: tuple[int, ...]) -> None:
        """A slot dies, or a node with its host memory and slots."""
        if lanes[0] < 0:
            lanes = (*lanes, *(s for s, host in self.scene.change.host_of.items() if host == lanes[0]))
        self.world.lose(lanes)
        self.running = {n: op for n, op in self.running.items() if not self.world.lost.intersection(op.lanes)}
        places = self.scene.change.residencies
        wanted = {r.lane for r in places if r.target_bytes + r.blank_target_bytes}
        self.cancelled |= not self.execution.committed or not wanted.isdisjoint(self.world.lost)
        self.take(self.execution.handle(LanesLost(lanes=lanes, reason="killed")))

    def forgone(self, operation: Operation) -> bool:
        """Whether an operation had nothing left to do: its lanes are lost, or it takes communicators apart with one that is."""
        lanes = set(operation.lanes)
        return bool(lanes & self.world.lost) and (lanes <= self.world.lost or operation.kind == "destroy_groups")

    def judge(self, settled: Settled) -> None:
        """The claims of a settlement against the bytes that are left."""
        status = self.execution.status
        committed = status("commit") == "done"
        assert settled.version == ("new" if committed else "old")
        assert settled.lost == tuple(sorted(self.world.lost))
        if settled.result == "committed":
            assert all(
                status(name) == "done" or self.forgone(op)
                for name, op in zip(self.graph.ids, self.graph.operations, strict=True)
            )
            used = {lane: self.scene.change.other_bytes.get(lane, 0) for lane in self.world.level}
            for r in self.scene.change.residencies:
                used[r.lane] += r.target_bytes + r.blank_target_bytes
            assert {lane: size for lane, size in used.items() if size and lane not in self.world.lost} == {
                lane: size for lane, size in self.world.level.items() if size and lane not in self.world.lost
            }
        assert (settled.result == "rolled_back") <= (not self.world.lost and not committed)
        beside = {emu.emu for emu in self.scene.change.emus if emu.shell and emu.mode == "beside"}
        assert committed or not any(emu in beside for emu, _ in self.world.stripped), "the old engine lacks memory"
        for emu in self.scene.before:
            self.judge_emu(emu, settled, committed=committed)
        replayed = Execution(self.graph)
        replayed.begin()
        for event in self.execution.events:
            replayed.handle(event)
        assert replayed.settled == settled

    def judge_emu(self, emu: str, settled: Settled, *, committed: bool) -> None:
        before, after, world = self.scene.before[emu], self.scene.after[emu], self.world
        source, bytes_ = settled.sources[emu], frozenset().union(*before.values())
        if source == "new":
            assert committed
            for lane, numbers in after.items():
                assert world.new[emu, lane] == set(numbers)
        elif source == "old":
            assert not committed
            for lane, numbers in before.items():
                assert lane in world.lost or world.old[emu, lane] == set(numbers)
            assert world.anywhere(emu, "old") == bytes_
        elif source == "snapshot":
            assert world.anywhere(emu, "old", "snapshot", "new") == bytes_
        elif source == "held":
            assert world.anywhere(emu, "old", "new", "parked") == bytes_
        else:
            here = [r for r in self.scene.change.residencies if r.emu == emu]
            hit = [r for r in here if r.lane in world.lost]
            bare = sum(r.present_bytes - r.guarded_bytes for r in hit)
            parked_hit = any(
                op.note == "parked" and op.emu == emu and op.lanes[1] in world.lost for op in self.graph.operations
            )
            named = "checkpoint" in self.proof.durability[emu]
            assert committed or bare or len(world.lost) > 1 or (named and (hit or parked_hit)), (
                "more is given up than named"
            )


def trial(choose: Choose, faults: int = 40) -> Counter[str]:
    """One random trial; what happened, counted."""
    scene = any_scene(choose)
    try:
        run = Trial(scene, choose, faults=faults)
    except Infeasible as refusal:
        return Counter({f"infeasible: {refusal.phase}": 1})
    settled = run.run()
    kinds = {op.note for op in run.graph.operations}
    found = Counter({f"settled: {settled.result} {settled.version}": 1})
    found += Counter(f"source: {source}" for source in settled.sources.values())
    found["with parked bytes"] += "parked" in kinds
    found["with snapshots"] += "snapshot" in kinds
    found["with relays"] += any(op.hop for op in run.graph.operations)
    found["with shells"] += any(emu.shell for emu in scene.change.emus)
    found["through hosts"] += bool(scene.change.through())
    found["with work outside"] += any(op.place == "outside" for op in run.graph.operations)
    found["operations"] += len(run.graph.operations)
    return found
