"""Published pairs of layouts (data/README.md): the bounds of an idealised model, and what public projects test."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod
from pathlib import Path

import numpy as np

from nereus.config import ModelConfig
from nereus.fleet import DEVICES, Fleet, uniform
from nereus.layout import ORDERS, Layout, Stage, StagePlan, equal_shares, layout_problem
from nereus.model import ModelSpec, model_spec
from nereus.transfer.boxtable import of_stage
from nereus.transfer.streams import Streams, streams

POINTS = Path(__file__).parents[2] / "shared/data/points"
BOUNDS, CASES = POINTS / "layout_pairs_bounds.csv", POINTS / "layout_test_cases.csv"

LAYERS = 24  # every pipeline of the table divides it
IDEAL = model_spec(
    "m", ModelConfig(layers=LAYERS, hidden=1, heads=16, kv_heads=16, head_dim=1, ffn=16 * 10**12, vocab=1)
)
"""Layers times one tensor axis: the MLPs; all else of the model is less than 1e-11 of it."""
IDEAL_BYTES = sum(t.size_bytes for t in IDEAL.tensors)

DENSE = model_spec(
    "m",
    ModelConfig(layers=8, hidden=512, heads=32, kv_heads=16, head_dim=64, ffn=2048, vocab=5000, dtype="bfloat16"),
)
SPARSE = model_spec(
    "m",
    replace(
        DENSE.config, qk_norm=True, experts=32, experts_per_token=2, expert_ffn=512, dense_layers=tuple(range(1, 7))
    ),
)


def ideal_stage(degrees: tuple[int, int, int], first: int = 0) -> StagePlan:
    """The ideal model's weights cut by (tp, pp, dp), on the slots from `first`."""
    tp, pp, dp = degrees
    layout = Layout(tp=tp, pp=pp, dp=dp, pipeline=equal_shares(LAYERS, pp), distributed_optimizer=False)
    slots = tuple(range(first, first + layout.ranks))
    return StagePlan(model="m", stage="infer", layout=layout, slots=slots, shares=(1,) * dp, micro_batch=1)


def rows_of(path: Path) -> list[dict[str, str]]:
    """A table's rows; none where it is not there."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A change that a project tests: the model, its layouts on both sides, whether the slots are others."""

    name: str
    spec: ModelSpec
    before: Layout
    after: Layout
    stage: Stage = "train"
    disjoint: bool = False

    def stages(self) -> tuple[StagePlan, StagePlan]:
        """How the model is cut before and after."""
        first = self.before.ranks if self.disjoint else 0
        return _stage(self.before, "train"), _stage(self.after, self.stage, first)


def _stage(layout: Layout, stage: Stage, first: int = 0, slots: tuple[int, ...] = ()) -> StagePlan:
    slots = slots or tuple(range(first, first + layout.ranks))
    return StagePlan(model="m", stage=stage, layout=layout, slots=slots, shares=(1,) * layout.dp, micro_batch=1)


Degrees = dict[str, int]


def _degrees(text: str) -> list[Degrees]:
    """The degrees that a cell names; "dp1/2/4" stands for three layouts."""
    found = {k.lower(): [int(n) for n in v.split("/")] for k, v in re.findall(r"(?i)\b([tpdce]p|etp)(\d[\d/]*)", text)}
    if replicas := re.match(r"(\d+) x \(", text):
        found["dp"] = [int(replicas[1])]
    count = max(map(len, found.values()), default=0)
    return [{k: v[i % len(v)] for k, v in found.items()} for i in range(count)]


def _least_ranks(found: Degrees) -> int:
    """The fewest slots that a layout of these degrees takes."""
    base = prod(found.get(k, 1) for k in ("tp", "cp", "dp"))
    return max(base, found.get("ep", 1) * found.get("etp", 1)) * found.get("pp", 1)


def _layout(found: Degrees, world: int, spec: ModelSpec, stage: Stage, order: str) -> Layout:
    """The layout, with dp to fill the world where dp is not named, etp 1 where experts cut by tp would not fit."""
    tp, pp, cp, ep = (found.get(k, 1) for k in ("tp", "pp", "cp", "ep"))
    dp = found.get("dp", max(world // (tp * cp * pp), 1))
    etp = found.get("etp")
    if stage == "train" and ep > 1 and etp is None and (tp * cp * dp) % (tp * ep):
        etp = 1
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        etp=etp,
        pipeline=equal_shares(spec.config.layers, pp),
        distributed_optimizer=stage == "train",
        order=ORDERS[1] if order == "tp-pp-dp" else ORDERS[0],
    )


def _sides(row: dict[str, str]) -> list[tuple[Degrees, Degrees]]:
    """The degrees on both sides; those of HotSPa are (dp, tp, pp) of a set of which all ordered pairs count."""
    if "(dp,tp,pp) set" in row["src"]:
        names = ["dp", "tp", "pp"]
        some = [dict(zip(names, map(int, text.split(",")), strict=True)) for text in _set(row["src"])]
        return list(permutations(some, 2))
    source, target = _degrees(row["src"]), _degrees(row["dst"])
    if row["dst"].startswith("same layout"):
        target = source
    return list(zip(source, target, strict=True)) if source and target else []


def _set(text: str) -> list[str]:
    return text.split("set ")[1].split("|")


def _order(text: str) -> str:
    match = re.search(r"order (\S+)", text)
    return match[1] if match else ""


def pairs_of(row: dict[str, str]) -> Iterator[Pair | str]:
    """The pairs of a row of CASES; in their place the reason why one cannot run; none if a side names no degree."""
    for source, target in _sides(row):
        if row["expect"] == "raise":
            yield "shapes that do not agree"
            continue
        spec = SPARSE if max(source.get("ep", 1), target.get("ep", 1)) > 1 or "moe" in row["tensor"].lower() else DENSE
        stage: Stage = "generate" if row["case"] in ("refit", "e2e") else "train"
        world = int(row["world"] or 0) or max(_least_ranks(source), _least_ranks(target))
        before = _layout(source, world, spec, "train", _order(row["src"]))
        after = _layout(target, world, spec, stage, _order(row["dst"]))
        problem = layout_problem(spec.config, before) or layout_problem(spec.config, after, stage)
        name = f"{row['source']} {row['case']}: {before} -> {after}"
        disjoint = row["dst"].startswith("same layout")
        made = Pair(name=name, spec=spec, before=before, after=after, stage=stage, disjoint=disjoint)
        yield problem or made


def planned(spec: ModelSpec, before: StagePlan, after: StagePlan) -> Streams:
    """What the change must move; a change to generation is a weight sync."""
    rename = {"m.generate": "m.train"} if after.stage == "generate" else None
    return streams(of_stage(spec, before), of_stage(spec, after), rename)


# -- random changes -------------------------------------------------------------------------------------------------

SMALL = model_spec("m", replace(DENSE.config, layers=2, ffn=512))
SMALL_SPARSE = model_spec("m", replace(SMALL.config, experts=4, experts_per_token=2, expert_ffn=512, dense_layers=(1,)))


@dataclass(frozen=True, kw_only=True)
class Change:
    """Training changes on a fleet, and generation with it, to which weights are copied at every step."""

    spec: ModelSpec
    fleet: Fleet
    before: StagePlan
    after: StagePlan
    generate: StagePlan


def random_changes(count: int = 200) -> Iterator[Change]:
    """The same changes at every call: on 8 to 16 H100 in nodes of 4 or 8, from slots in any order."""
    rng = np.random.default_rng(4)
    for _ in range(count):
        spec = (SMALL, SMALL_SPARSE)[int(rng.integers(4) == 0)]
        fleet = uniform(int(rng.integers(8, 17)), DEVICES["h100"], slots_per_node=int(rng.choice((4, 8))))
        slots = tuple(rng.permutation(len(fleet.slots)).tolist())
        before, after = (_drawn_layout(rng, spec, len(slots)) for _ in range(2))
        generate = Layout(tp=int(rng.choice((1, 2, 4))), pp=1, dp=2, pipeline=(spec.config.layers,))
        yield Change(
            spec=spec,
            fleet=fleet,
            before=_stage(before, "train", slots=slots[: before.ranks]),
            after=_stage(after, "train", slots=fleet.slots),
            generate=_stage(generate, "generate", slots=fleet.slots),
        )


def _drawn_layout(rng: np.random.Generator, spec: ModelSpec, most: int) -> Layout:
    """A layout of at most `most` ranks that fits the model."""
    while True:
        tp, pp, cp = (int(rng.choice(some)) for some in ((1, 2, 4, 8), (1, 2), (1, 1, 2)))
        dp = int(rng.integers(1, 9))
        ep = int(rng.choice((1, 2, 4))) if spec.config.experts else 1
        layout = Layout(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            ep=ep,
            etp=1 if ep > 1 else None,
            pipeline=equal_shares(spec.config.layers, pp),
            distributed_optimizer=bool(rng.integers(2)),
        )
        if layout.ranks <= most and layout_problem(spec.config, layout) is None:
            return layout


# -- all of them as streams, with the number of slots ----------------------------------------------------------------


def published_streams() -> Iterator[tuple[Streams, int]]:
    """Every row of BOUNDS and every pair of CASES; none where the tables are not there."""
    for row in rows_of(BOUNDS):
        source, target = ([int(row[f"{side}_{d}"]) for d in ("tp", "pp", "dp")] for side in ("src", "dst"))
        before = ideal_stage((source[0], source[1], source[2]))
        after = ideal_stage((target[0], target[1], target[2]), 0 if row["collocated"] == "1" else prod(source))
        yield planned(IDEAL, before, after), max(*before.slots, *after.slots) + 1
    for pair in (pair for row in rows_of(CASES) for pair in pairs_of(row)):
        if isinstance(pair, Pair):
            before, after = pair.stages()
            yield planned(pair.spec, before, after), max(*before.slots, *after.slots) + 1


def random_streams() -> Iterator[tuple[Streams, int]]:
    """The random changes, each on its slots as they come."""
    for case in random_changes():
        yield planned(case.spec, case.before, case.after), len(case.fleet.slots)
