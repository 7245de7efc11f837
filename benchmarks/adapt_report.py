"""What bench-adapt found, as text: static plans by segment, contestants beside each other, ratios with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.adapt_job import BUDGET_BYTES, Segment

DRAWS, SEED = 4000, 1
Run = Mapping[str, Any]
Static = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Segment -> plan -> `seconds` of measured steps and `peak_bytes`, the highest of a slot."""


def static_rows(segments: Sequence[Segment], measured: Static) -> dict[str, list[float | None]]:
    """Plan -> median seconds of a step in each segment; None where it cannot run: a slot is away, or holds too little."""
    names = dict.fromkeys(name for plans in measured.values() for name in plans)

    def cell(segment: str, name: str) -> float | None:
        found = measured[segment].get(name)
        return median(found["seconds"]) if found and found["peak_bytes"] <= BUDGET_BYTES else None

    return {name: [cell(each.name, name) for each in segments] for name in names}


def lasting(measured: Static) -> set[str]:
    """The plans that no budget stops in any segment, wherever they run."""
    names = {name for plans in measured.values() for name in plans}
    big = {name for plans in measured.values() for name, found in plans.items() if found["peak_bytes"] > BUDGET_BYTES}
    return names - big


def segment_steps(segments: Sequence[Segment], steps: int) -> list[int]:
    """How many steps each segment has."""
    ends = [*(each.first_step for each in segments[1:]), steps + 1]
    return [end - each.first_step for each, end in zip(segments, ends, strict=True)]


def best_by_segment(rows: Mapping[str, Sequence[float | None]]) -> list[str]:
    """The fastest plan of every segment, of those that run in it."""
    count = len(next(iter(rows.values())))
    return [min((row[at], name) for name, row in rows.items() if row[at] is not None)[1] for at in range(count)]  # pyright: ignore[reportArgumentType]


def best_static(rows: Mapping[str, Sequence[float | None]], counts: Sequence[int]) -> str:
    """The plan that runs in every segment and takes least over all of them."""
    whole = {
        name: sum(count * each for count, each in zip(counts, row, strict=True) if each is not None)
        for name, row in rows.items()
        if None not in row
    }
    return min(whole, key=lambda name: whole[name])


def static_text(segments: Sequence[Segment], measured: Static, steps: int) -> Iterator[str]:
    """The table of static plans."""
    rows = static_rows(segments, measured)
    counts, best = segment_steps(segments, steps), best_by_segment(rows)
    yield "Static plans, measured: median seconds of a step under each condition (* the fastest);"
    yield f"  away: needs a slot that is not there; MB: what a slot holds at its peak, of a budget of {BUDGET_BYTES / 1e6:.0f}"
    yield f"  {'':<16}" + "".join(f"{each.name:>18}" for each in segments) + f"{'all steps, s':>14}"
    yield f"  {'steps':<16}" + "".join(f"{count:>18}" for count in counts) + f"{steps:>14}"
    for name, row in rows.items():
        cells = "".join(
            f"{_unfit(measured[segments[at].name].get(name)) if each is None else f'{each:.3f}' + ('*' if best[at] == name else ' '):>18}"
            for at, each in enumerate(row)
        )
        known = [each for each in row if each is not None]
        total = f"{sum(c * s for c, s in zip(counts, known, strict=True)):.1f}" if len(known) == len(row) else "waits"
        whole = total if name in lasting(measured) else "stops"
        yield f"  {name:<16}{cells}{whole:>14}"
    free = sum(count * min(r[at] for r in rows.values() if r[at] is not None) for at, count in enumerate(counts))  # pyright: ignore[reportArgumentType, reportOptionalOperand]
    yield f"  {'the fastest in each segment, changes free':<{16 + 18 * len(segments)}}{free:>14.1f}"


def _unfit(found: Mapping[str, Any] | None) -> str:
    """Why a plan does not run: a slot of it is away, or it needs so much of one."""
    return "away " if found is None else f"{found['peak_bytes'] / 1e6:.0f} MB "


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Mean step latency over another's, with a 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(mine: Sequence[Run], others: Sequence[Run], segments: Sequence[Segment], seed: int = SEED) -> Ratio | None:
    """Of steps paired by repetition and number; the bootstrap draws repetitions, and steps within their segments.

    None where no repetition has both.
    """
    theirs = {run["repeat"]: run["step_seconds"] for run in others if run["complete"]}
    pairs = [
        (run["step_seconds"], theirs[run["repeat"]]) for run in mine if run["complete"] and run["repeat"] in theirs
    ]
    if not pairs:
        return None
    both = np.array(pairs)  # [repetitions, 2, steps]
    starts = [each.first_step - 1 for each in segments]
    parts = np.split(np.arange(both.shape[2]), starts[1:])
    rng, found = np.random.default_rng(seed), np.empty(DRAWS)
    for draw in range(DRAWS):
        sums = np.zeros(2)
        for repeat in rng.integers(0, len(both), len(both)):
            steps: npt.NDArray[np.intp] = np.concatenate([rng.choice(part, len(part)) for part in parts])
            sums += both[repeat][:, steps].sum(axis=1)
        found[draw] = sums[0] / sums[1]
    whole = both.sum(axis=(0, 2))
    low, high = np.percentile(found, (2.5, 97.5))
    return Ratio(mean=float(whole[0] / whole[1]), low=float(low), high=float(high))


def contest_text(runs: Sequence[Run], names: Sequence[str], segments: Sequence[Segment]) -> Iterator[str]:
    """A line a contestant: latency and where it goes; then by segment."""
    by_name = {name: [run for run in runs if run["name"] == name and run["complete"]] for name in names}
    yield "Contestants, real runs: mean wall seconds of a step, all that is between steps included"
    yield f"  {'':<48}{'runs':>5}{'step s':>9}{'spread':>8}{'pause s':>9}{'share':>8}{'beside s':>9}{'share':>8}{'waits s':>9}{'changes':>9}"
    for name, found in by_name.items():
        if not found:
            yield f"  {name:<48}{0:>5}"
            continue
        means = [float(np.mean(run["step_seconds"])) for run in found]
        whole = sum(sum(run["step_seconds"]) for run in found)
        pause, beside = (sum(run[key] for run in found) for key in ("pause_seconds", "interleaved_seconds"))
        waits = sum(run["waited_seconds"] for run in found) / len(found)
        changes = sum(len(run["changes"]) + run["reformed"] for run in found) / len(found)
        spread = (max(means) - min(means)) / np.mean(means)
        yield (
            f"  {name:<48}{len(found):>5}{np.mean(means):>9.3f}{spread:>8.1%}{pause / len(found):>9.2f}{pause / whole:>8.1%}"
            f"{beside / len(found):>9.2f}{beside / whole:>8.1%}{waits:>9.1f}{changes:>9.1f}"
        )
    yield ""
    yield f"{'  by segment':<48}" + "".join(f"{each.name:>18}" for each in segments)
    for name, found in by_name.items():
        if found:
            ends = [*(each.first_step - 1 for each in segments[1:]), None]
            cells = [
                np.mean([second for run in found for second in run["step_seconds"][each.first_step - 1 : end]])
                for each, end in zip(segments, ends, strict=True)
            ]
            yield f"  {name:<48}"[:48] + "".join(f"{float(cell):>18.3f}"[-18:] for cell in cells)


def target_text(runs: Sequence[Run], names: Sequence[str], segments: Sequence[Segment]) -> Iterator[str]:
    """Ratios that have a target, and whether they meet it; `names` as `contestants` orders them."""
    usual, scaling, best, any_dp, restart, fixed, static = names
    rows = (
        (usual, scaling, "at most 0.723: 27.7 % below", lambda r: r.mean <= 1 - 0.277),
        (usual, static, "below 1", lambda r: r.mean < 1),
        (best, any_dp, "the interval reaches 1.01 or less", lambda r: r.low <= 1.01),
        (best, restart, "", None),
        (best, fixed, "", None),
        (best, static, "below 1", lambda r: r.mean < 1),
    )
    yield "Ratios of mean step latency, with 95 % intervals of paired steps"
    for mine, other, target, met in rows:
        found = ratio([r for r in runs if r["name"] == mine], [r for r in runs if r["name"] == other], segments)
        said = "not measured" if found is None else str(found)
        verdict = "" if met is None or found is None else "met" if met(found) else "MISSED"
        yield f"  {mine:<28} over {other:<44}{said:<24}{target:<36}{verdict}"
