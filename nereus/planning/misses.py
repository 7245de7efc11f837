"""Plans that nearly made it: on all slots together, faster than the best but too large; or the smallest where none fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from nereus.layout import Layout
from nereus.planning.evaluate import Evaluation, Problem, evaluate
from nereus.planning.options import Table
from nereus.planning.plan import GlobalPlan, StageChoice
from nereus.planning.space import engine_layouts

MOST_MISSES = 4


def near_misses(
    problem: Problem, tables: Mapping[str, Table], best: GlobalPlan | None, seconds: float
) -> list[Evaluation]:
    """At most MOST_MISSES plans that do not fit, fastest first: faster than `best` with its `seconds`.

    Without `best` the plan of which every model-stage needs as few bytes as it can.
    """
    slots = problem.terrain.ordered()
    if best is None:
        smallest = _smallest(problem, tables)
        return [] if smallest is None else [evaluate(problem, _joined(smallest, slots))]
    found: dict[str, Evaluation] = {}
    for choices in _faster(problem, tables, best if len(best.pools) == 1 else None):
        judged = evaluate(problem, _joined(choices, slots))
        if not judged.fits and judged.step.mean_seconds < seconds:
            found[str(judged.plan)] = judged
    ordered = sorted(found.values(), key=lambda each: (each.step.mean_seconds, str(each.plan)))
    return ordered[:MOST_MISSES]


def _joined(choices: Mapping[str, StageChoice], slots: tuple[int, ...]) -> GlobalPlan:
    return GlobalPlan(pools=(slots,), stages=tuple((name, replace(choice, pool=0)) for name, choice in choices.items()))


def _smallest(problem: Problem, tables: Mapping[str, Table]) -> dict[str, StageChoice] | None:
    """Every stage with the least of what it leaves and what it takes; None where a model has no layout at all."""
    choices: dict[str, StageChoice] = {}
    for name, table in tables.items():
        if table.options:
            least = min(table.options, key=lambda option: 2 * option.resident_bytes + option.excess_bytes)
            choices[name] = least.choice
        elif table.smallest is not None:
            choices[name] = table.smallest
        else:
            return None
    engines = list(engine_layouts(problem.job, problem.terrain.ground(problem.terrain.ordered())))
    if not engines:
        return None
    choices["actor_generate"] = StageChoice(layout=max(engines, key=lambda layout: layout.tp))
    return choices


def _faster(problem: Problem, tables: Mapping[str, Table], best: GlobalPlan | None) -> Iterator[dict[str, StageChoice]]:
    """The fastest option of every stage together; then the best plan with one stage changed to what it left out."""
    engines = engine_layouts(problem.job, problem.terrain.ground(problem.terrain.ordered()))
    fastest = {
        name: min(table.options, key=lambda o: o.seconds).choice for name, table in tables.items() if table.options
    }
    if len(fastest) < len(tables):
        return
    for layout in engines:
        yield {**fastest, "actor_generate": StageChoice(layout=layout)}
    if best is None:
        return
    base = dict(best.stages)
    for name, table in tables.items():
        yield {**base, name: fastest[name]}
        yield {**base, name: _at_ease(fastest[name])}
        if table.smallest is not None:
            yield {**base, name: table.smallest}


def _at_ease(choice: StageChoice) -> StageChoice:
    """The same without recomputation, everything resident, and as few cuts of the model as it has replicas for."""
    layout = choice.layout
    whole = Layout(tp=1, pp=1, dp=layout.ranks, pipeline=(sum(layout.pipeline),))
    return replace(choice, layout=whole, recompute="none", keep="all", sharding="optimizer")
