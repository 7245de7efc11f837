"""Options of one model-stage on one ground: a choice with its seconds and bytes as plain numbers, and which of them matter.

A pool's memory needs little of a stage: what it leaves between phases (`resident_bytes`) and what its largest phase takes
beyond that (`excess_bytes`). All stages of a pool fit exactly when the sum of the first and the largest of the second do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from nereus.layout import Layout
from nereus.planning.bytes import EngineBytes, StageBytes
from nereus.planning.evaluate import Problem, cache_room
from nereus.planning.ground import Ground
from nereus.planning.job import PHASES_OF
from nereus.planning.plan import Keep, StageChoice
from nereus.planning.space import engine_layouts
from nereus.planning.stagework import Terms, forward_work, generate_work, update_work


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A choice: seconds of its phases in the blocks infer and train, bytes on a slot and in host memory."""

    choice: StageChoice
    infer_seconds: float
    train_seconds: float
    resident_bytes: float
    excess_bytes: float
    host_bytes: float

    @property
    def seconds(self) -> float:
        """Of both blocks."""
        return self.infer_seconds + self.train_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOption:
    """An engine: its bytes, and its seconds as a function of the cache that is left to it."""

    choice: StageChoice
    resident_bytes: float
    excess_bytes: float


@dataclass(kw_only=True)
class Table:
    """The options of a stage on one ground that fit by themselves, as far as they were evaluated, and what is still to be.

    `choices` are by rising `bounds_seconds`, of which the first `evaluated_count` are done. Of those that do not fit
    `smallest` needs least; `smallest_bytes` counts its peak and what it leaves.
    """

    problem: Problem
    name: str
    ground: Ground
    keeps: tuple[Keep, ...]
    choices: Sequence[StageChoice]
    bounds_seconds: Sequence[float]
    options: list[Option] = field(default_factory=list[Option])
    evaluated_count: int = 0
    fastest_seconds: float = float("inf")
    smallest: StageChoice | None = None
    smallest_bytes: float = float("inf")

    def reach(self, seconds: float) -> int:
        """Evaluates every choice that may take less than this; how many that were."""
        first = self.evaluated_count
        while self.evaluated_count < len(self.choices) and self.bounds_seconds[self.evaluated_count] < seconds:
            self._enter(self.choices[self.evaluated_count])
            self.evaluated_count += 1
        return self.evaluated_count - first

    def least_seconds(self) -> float:
        """The seconds of the fastest option; inf where none fits by itself."""
        while self.evaluated_count < len(self.choices):
            if self.bounds_seconds[self.evaluated_count] >= self.fastest_seconds:
                break
            self._enter(self.choices[self.evaluated_count])
            self.evaluated_count += 1
        return self.fastest_seconds

    def _enter(self, choice: StageChoice) -> None:
        problem, ground = self.problem, self.ground
        room = ground.room_bytes / (1 + problem.memory.margin_share)
        work: list[Terms] = []
        for keep in self.keeps:
            kept = replace(choice, keep=keep)
            sizes = problem.memory.stage(problem.job, self.name, kept)
            peak = max(sum(phase.values()) for phase in sizes.phases.values())
            resident = sum(sizes.resident.values())
            if max(peak, resident) <= room:
                work = work or _work(problem, self.name, choice, ground)
                option = _option(self.name, kept, ground, sizes, work)
                self.options.append(option)
                self.fastest_seconds = min(self.fastest_seconds, option.seconds)
            elif peak + resident < self.smallest_bytes:
                self.smallest, self.smallest_bytes = kept, peak + resident


def _work(problem: Problem, name: str, choice: StageChoice, ground: Ground) -> list[Terms]:
    shape = problem.job.model(name).shape
    work = [forward_work(problem.job, shape, choice, ground.rates)]
    if name.endswith("_train"):
        work.append(update_work(problem.job, shape, choice, ground.rates))
    return work


def _option(name: str, choice: StageChoice, ground: Ground, sizes: StageBytes, work: list[Terms]) -> Option:
    port = ground.coefficients["offload"] / ground.rates.host_bytes_per_second
    seconds = [
        ground.seconds(terms) + port * sizes.moved[phase] for phase, terms in zip(PHASES_OF[name], work, strict=True)
    ]
    resident = sum(sizes.resident.values())
    peak = max(sum(phase.values()) for phase in sizes.phases.values())
    return Option(
        choice=choice,
        infer_seconds=seconds[0],
        train_seconds=sum(seconds[1:]),
        resident_bytes=resident,
        excess_bytes=peak - resident,
        host_bytes=sum(sizes.offloaded.values()),
    )


def engine_options(
    problem: Problem, ground: Ground, *, every_slot: bool = False, fewer: bool = False
) -> list[EngineOption]:
    """Every engine whose weights and least cache fit by themselves."""
    room = ground.room_bytes / (1 + problem.memory.margin_share)
    found: list[EngineOption] = []
    for layout in engine_layouts(problem.job, ground, every_slot=every_slot, fewer=fewer):
        if layout.tp > max(ground.domain_slots) and found:
            break
        engine = problem.memory.engine(problem.job, layout)
        resident = sum(engine.resident.values())
        peak = sum(engine.fixed.values()) + engine.least_bytes
        if max(peak, resident) <= room:
            choice = StageChoice(layout=layout)
            found.append(EngineOption(choice=choice, resident_bytes=resident, excess_bytes=peak - resident))
    return found


@dataclass(kw_only=True)
class EngineTimes:
    """Seconds of generation, each asked for once: they depend on the cache, and that is often all that can be used."""

    problem: Problem
    known: dict[tuple[object, ...], float] = field(default_factory=dict[tuple[object, ...], float])
    engines: dict[Layout, EngineBytes] = field(default_factory=dict[Layout, EngineBytes])

    def seconds(self, option: EngineOption, ground: Ground, others_bytes: float) -> float:
        """Seconds of generation beside what others leave on the slots."""
        layout, memory = option.choice.layout, self.problem.memory
        if layout not in self.engines:
            self.engines[layout] = memory.engine(self.problem.job, layout)
        cache = cache_room(memory, ground.room_bytes, self.engines[layout], others_bytes)
        key = (layout, ground.devices, ground.rates.slots_per_node, cache)
        if key not in self.known:
            self.known[key] = ground.seconds(generate_work(self.problem.job, layout, ground.rates, cache))
        return self.known[key]


def front(options: Iterable[Option], *, together: bool, apart: bool = False) -> list[Option]:
    """The options that no other one matches in everything: seconds of each block (or `together`), and bytes.

    Sorted by seconds. Of equal ones the first stays. `apart`: options of different layouts or sharding do not compare.
    """
    kept: dict[object, list[tuple[float, float, float, float, float]]] = {}
    found: list[Option] = []
    for option in sorted(options, key=attrgetter("seconds")):
        first = option.seconds if together else option.infer_seconds
        second = 0.0 if together else option.train_seconds
        resident, excess, host = option.resident_bytes, option.excess_bytes, option.host_bytes
        others = kept.setdefault((option.choice.layout, option.choice.sharding) if apart else None, [])
        for a, b, c, d, e in others:
            if c <= resident and d <= excess and e <= host and a <= first and b <= second:
                break
        else:
            others.append((first, second, resident, excess, host))
            found.append(option)
    return found
