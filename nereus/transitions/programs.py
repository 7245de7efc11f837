"""A transition graph as programs: what each slot does, in which order, between the moments that only the driver decides.

A program is a legal serial order of the graph restricted to a slot, so slots wait for each other only where bytes travel
or groups are built, and always in the same global order: no two of them can wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nereus.errors import TransferFailed
from nereus.transitions.graph import MOVES, Kind, Operation, TransitionGraph
from nereus.transitions.order import Lane

BARRIERS = frozenset(("secure", "commit"))
"""Kinds that the driver ends once everything before them is done."""
When = Literal["early", "pause", "after"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One entry of a slot's program: an operation, or all moves of a movement that the slot takes part in.

    `movement_index` is the movement's number for kind "transfer", else -1; `emu` is "" for a movement.
    """

    kind: Kind
    emu: str
    operation_ids: tuple[str, ...]
    size_bytes: int = 0
    note: str = ""
    movement_index: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """What runs without the driver: early before the pause, in the pause before the commit, or after it.

    `tasks` by slot; `moves` by movement number; `order` holds all its operations in a legal serial order, with those
    of hosts and of the driver, which end it.
    """

    when: When
    tasks: Mapping[Lane, tuple[Task, ...]]
    moves: Mapping[int, tuple[Operation, ...]]
    order: tuple[Operation, ...]


def stretches(graph: TransitionGraph) -> tuple[Stretch, ...]:
    """The stretches of a graph in order. TransferFailed for what no program has: moves in
    pieces, what is parked, and what a host hands on. Changes of shells need none of it.
    """
    level, turn = _levels(graph)
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    commit = graph.by_kind["commit"][0]
    for index, operation in enumerate(graph.operations):
        early = operation.place != "pause"
        when = 0 if early else 2 if index in graph.late else 1
        groups[when, 0 if early else level[index]].append(index)
    made: list[Stretch] = []
    numbers = 0
    for (when, _), members in sorted(groups.items()):
        stretch = _stretch(graph, members, turn, numbers, when)
        numbers += len(stretch.moves)
        made.append(stretch)
    if not any(operation.id == graph.ids[commit] for stretch in made for operation in stretch.order):
        raise TransferFailed("the transition has no commit")
    return tuple(made)


def _levels(graph: TransitionGraph) -> tuple[list[int], list[int]]:
    """For each operation how many barriers, and how many movements, must be over before it starts.

    What is handed on goes in the movement in which it came: its rounds keep the order.
    """
    level, turn = [0] * len(graph.operations), [0] * len(graph.operations)
    for index, operation in enumerate(graph.operations):
        for before in graph.predecessors[index]:
            earlier = graph.operations[before]
            level[index] = max(level[index], level[before] + (earlier.kind in BARRIERS))
            again = earlier.kind in MOVES and operation.kind != "arrive" and earlier.lanes[1] >= 0
            turn[index] = max(turn[index], turn[before] + again)
    return level, turn


def _travels(operation: Operation) -> bool:
    """Whether bytes go from slot to slot, be it out of the sender's host memory."""
    return operation.kind in MOVES and min(operation.lanes) >= 0 and operation.lanes[0] != operation.lanes[1]


def _refuse(operation: Operation) -> None:
    """TransferFailed for what no program has."""
    if operation.note.startswith("parked"):
        raise TransferFailed(f"{operation.id}: slots park nothing")
    if operation.kind in MOVES and (max(operation.lanes) < 0 or (operation.hop and operation.lanes[0] < 0)):
        raise TransferFailed(f"{operation.id}: no slot gives these bytes")
    if operation.kind in MOVES and operation.start:
        raise TransferFailed(f"{operation.id}: slots move whole flows only")


def _stretch(graph: TransitionGraph, members: list[int], turn: list[int], first: int, when: int) -> Stretch:
    turns = sorted({turn[i] for i in members if _travels(graph.operations[i])})
    number = {value: first + rank for rank, value in enumerate(turns)}

    def moving(index: int) -> bool:
        """Part of a movement: a move, or the arrival of what its later rounds hand on."""
        operation = graph.operations[index]
        return _travels(operation) or (operation.kind == "arrive" and operation.lanes[0] >= 0 and turn[index] in number)

    ordered = sorted(members, key=lambda index: (turn[index], moving(index), index))
    moves: dict[int, list[Operation]] = defaultdict(list)
    tasks: dict[Lane, list[Task]] = defaultdict(list)
    for index in ordered:
        operation = graph.operations[index]
        _refuse(operation)
        if moving(index):
            if operation.kind != "arrive":
                moves[number[turn[index]]].append(operation)
            for lane in operation.lanes:
                _add_move(tasks[lane], number[turn[index]], operation.id)
            continue
        task = Task(
            kind=operation.kind,
            emu=operation.emu,
            operation_ids=(operation.id,),
            size_bytes=operation.size_bytes,
            note=operation.note,
        )
        for lane in dict.fromkeys(operation.lanes):
            if lane >= 0:
                tasks[lane].append(task)
    return Stretch(
        when=("early", "pause", "after")[when],  # type: ignore[arg-type]
        tasks={lane: tuple(listed) for lane, listed in sorted(tasks.items())},
        moves={n: tuple(listed) for n, listed in moves.items()},
        order=tuple(graph.operations[index] for index in sorted(members)),
    )


def _add_move(listed: list[Task], number: int, operation_id: str) -> None:
    """Moves of one movement are one task."""
    if listed and listed[-1].movement_index == number:
        last = listed[-1]
        listed[-1] = Task(
            kind="transfer", emu="", operation_ids=(*last.operation_ids, operation_id), movement_index=number
        )
    else:
        listed.append(Task(kind="transfer", emu="", operation_ids=(operation_id,), movement_index=number))
