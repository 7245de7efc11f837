"""What the transitions' benchmark found, as ratios with their spread beside the targets, and where the time goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

TARGETS = {
    "a": (4.0, "live, against save and load in the same processes", "at least"),
    "b": (20.0, "live, against stop and restart", "at least"),
    "c": (1.0, "weights alone, against swap_model_weights", "at least"),
    "raw": (0.8, "bytes a second at the busiest port, of raw gloo's", "at least"),
    "digests": (0.25, "digests, of the move", "at most"),
}


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A target's samples, one for each pair of layouts and direction, or for each pair."""

    target: str
    samples: tuple[float, ...]

    @property
    def met(self) -> bool:
        limit, _, sense = TARGETS[self.target]
        return self.median >= limit if sense == "at least" else self.median <= limit

    @property
    def median(self) -> float:
        return median(self.samples)

    def record(self) -> dict[str, Any]:
        return {"samples": list(self.samples), "median": self.median, "met": self.met}

    def __str__(self) -> str:
        limit, what, sense = TARGETS[self.target]
        spread = f"{min(self.samples):.2f} to {max(self.samples):.2f}"
        verdict = "met" if self.met else "MISSED"
        return f"({self.target}) {what}: {self.median:.2f} ({spread}), target {sense} {limit:g}: {verdict}"


def by_kind(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Median seconds by kind, largest first."""
    listed = list(parts)
    kinds = {kind for each in listed for kind in each}
    found = {kind: median(each.get(kind, 0.0) for each in listed) for kind in kinds}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def kinds_text(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in parts.items() if seconds >= 0.001)


def middle(samples: Sequence[float]) -> str:
    """Median and spread in seconds."""
    return f"{median(samples):.3f} s ({min(samples):.3f} to {max(samples):.3f})"


def ratios(found: Mapping[str, Any]) -> dict[str, Ratio]:
    """From the measurements of `benchmarks.transition` to the ratios that have targets."""
    changes, moves = found["changes"], found["moves"]
    made: dict[str, list[float]] = {name: [] for name in TARGETS}
    for way in changes:
        live = median(way["live_seconds"])
        made["a"].append(min(sum(parts.values()) for parts in way["saved"]["memory"]) / live)
        work = by_kind(way["pause"])
        made["digests"].append((work.get("quiesce", 0) + work.get("verify", 0)) / (work["transfer"] + work["copy"]))
    if restart := found.get("restart"):
        live = median(second for way in changes for second in way["live_seconds"])
        made["b"].append(sum(restart.values()) / live)
    for move in moves:
        if move["weights"]:
            made["c"].append(median(move["swap_again_seconds"]) / median(move["move_seconds"]))
        elif move["busiest_port_bytes"]:
            made["raw"].append(median(move["raw_seconds"]) / median(move["wire_seconds"]))
    return {name: Ratio(target=name, samples=tuple(samples)) for name, samples in made.items() if samples}


def text(found: Mapping[str, Any]) -> str:
    """The whole report."""
    lines: list[str] = []
    for way in found["changes"]:
        lines.append(f"{way['from']} -> {way['to']}, {way['moved_bytes'] / 1e6:.0f} MB travel")
        lines.append(f"  live       {middle(way['live_seconds'])}: pause {middle(way['pause_seconds'])}")
        lines.append(f"    pause        {kinds_text(by_kind(way['pause']))}")
        lines.append(f"    interleaved  {kinds_text(by_kind(way['interleaved']))}")
        for place, runs in way["saved"].items():
            total = middle([sum(parts.values()) for parts in runs])
            lines.append(f"  (a) {place:<7}{total}: {kinds_text(by_kind(runs))}")
    for move in found["moves"]:
        lines += _move_lines(move)
    if restart := found.get("restart"):
        lines.append(f"(b) one restart {sum(restart.values()):.1f} s: {kinds_text(restart)}")
    judged = ratios(found)
    lines += ["", *(str(ratio) for ratio in judged.values())]
    lines += [_where(name, found) for name, ratio in judged.items() if not ratio.met]
    return "\n".join(lines)


def _move_lines(move: Mapping[str, Any]) -> list[str]:
    port, what = move["busiest_port_bytes"], "weights" if move["weights"] else "all state"
    lines = [f"move of {what} {move['from']} -> {move['to']}: {port / 1e6:.0f} MB at the busiest port"]
    lines.append(f"  fabric     {middle(move['move_seconds'])} with local copies, wire {middle(move['wire_seconds'])}")
    if port:
        ours, raw = (port / median(move[f"{name}_seconds"]) / 1e6 for name in ("wire", "raw"))
        lines.append(f"  raw gloo   {middle(move['raw_seconds'])}; {ours:,.0f} MB/s are {ours / raw:.2f} of {raw:,.0f}")
    lines.append(f"  digests    {middle(move['digest_seconds'])}, before and after together")
    if move["weights"]:
        lines.append(
            f"  (c) swap   {middle(move['swap_again_seconds'])}, the first with its plan {move['swap_first_seconds']:.3f} s"
        )
    return lines


def _where(name: str, found: Mapping[str, Any]) -> str:
    """Where the time goes for a missed target."""
    pause = by_kind(part for way in found["changes"] for part in way["pause"])
    early = by_kind(part for way in found["changes"] for part in way["interleaved"])
    if name in ("a", "b"):
        return f"({name}) live, median by kind: pause {kinds_text(pause)}; interleaved {kinds_text(early)}"
    if name == "digests":
        return (
            f"({name}) quiesce {pause['quiesce']:.3f}, verify {pause['verify']:.3f}; transfer {pause['transfer']:.3f}"
        )
    chosen = [move for move in found["moves"] if move["weights"] == (name == "c")]
    copies = median(median(m["move_seconds"]) - median(m["wire_seconds"]) for m in chosen)
    rounds = median(m["rounds"] for m in chosen)
    slices = median(m["slices"] for m in chosen)
    return (
        f"({name}) local copies {copies:.3f} s; {slices:.0f} slices in {rounds:.0f} rounds, packed where they have gaps"
    )
