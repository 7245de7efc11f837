"""A search's answer and a plan's evaluation as text, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from nereus.costs.calibrate import Prediction
from nereus.planning.evaluate import Evaluation, PoolPeak
from nereus.planning.job import BLOCK_OF
from nereus.planning.objective import SearchResult
from nereus.planning.plan import GlobalPlan, StageChoice, ranges_text

GIB, MIB = 1024**3, 1024**2
BLOCKS = tuple(dict.fromkeys(BLOCK_OF.values()))
KEEP_TEXT = {"all": "keeps all", "weights": "offloads its optimizer", "nothing": "offloads all"}


def bytes_text(size: float) -> str:
    """Bytes in GiB, below one in MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def time_text(time: Prediction) -> str:
    """Mean and deviation."""
    places = 1 if time.mean_seconds >= 10 else 2
    return f"{time.mean_seconds:.{places}f} ± {time.deviation_seconds:.{places}f} s"


def search_text(result: SearchResult, judged: Sequence[Evaluation]) -> str:
    """The table of the best plans, the first of them in detail, near misses with their reasons, and the bound."""
    lines = list(_table(judged))
    if judged:
        lines += ["", "the first plan", *detail_lines(judged[0])]
    if result.near_misses:
        lines += ["", "would be faster, but do not fit" if judged else "nothing fits; the closest plan"]
        lines += list(_misses(result.near_misses))
    if judged:
        shown = " (every plan was judged)" if result.exact else ""
        short = "" if result.finished else "; the budget ended the search"
        other = "plan" if result.covers_all else "plan on the pools that were tried"
        best = f"no {other} is more than {result.gap_share:.1%} faster than the first"
        lines += ["", f"{best}{shown}; {result.evaluated_nodes:,} options and branches judged{short}"]
    return "\n".join(lines) + "\n"


def _table(judged: Sequence[Evaluation]) -> Iterator[str]:
    if not judged:
        return
    yield f"  #  {'step':>15}  generate   infer   train  tok/s/slot  {'peak of room':>20}  where it binds"
    for number, each in enumerate(judged, 1):
        seconds = block_seconds(each)
        peak = each.binding
        room = f"{bytes_text(peak.safe_bytes)} of {bytes_text(peak.room_bytes)}"
        yield (
            f"{number:>3}  {time_text(each.step):>15}  {seconds['generate']:8.1f}{seconds['infer']:8.1f}"
            f"{seconds['train']:8.1f}  {each.tokens_per_second:10.0f}  {room:>20}  {peak.phase}: {peak.binding}"
        )
        yield f"       {each.plan}"


def block_seconds(judged: Evaluation) -> dict[str, float]:
    """Block -> the seconds that the step waits for it."""
    seconds = dict.fromkeys(BLOCKS, 0.0)
    for phase in judged.phases:
        if phase.critical:
            seconds[BLOCK_OF[phase.phase]] += phase.time.mean_seconds
    return seconds


def detail_lines(judged: Evaluation) -> Iterator[str]:
    """Stages, phases, peaks and host memory of one plan."""
    for name, choice in judged.plan.stages:
        yield f"  {name:<16} {stage_text(judged, name, choice)}"
    for idle in judged.idle:
        many = f"{len(idle.slots)} slots" if len(idle.slots) > 1 else "one slot"
        yield f"  {idle.stage:<16} leaves {many} idle ({ranges_text(idle.slots)}): {idle.reason}"
    if judged.phases:
        yield "  phases"
    for phase in judged.phases:
        beside = "" if phase.critical else "  beside others"
        yield f"    {phase.phase:<18} {time_text(phase.time):>16}{beside}"
    if judged.peaks:
        yield "  peak of a slot, with margin"
    for peak in judged.peaks:
        yield f"    {_peak_text(judged.plan, peak)}"
    for pool, host in enumerate(judged.hosts):
        if len(host.components) > 1:
            parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in host.components.items())
            where = _where(judged.plan, pool)
            yield f"  host memory of a slot{where}: {bytes_text(host.total_bytes)} of {bytes_text(host.room_bytes)}: {parts}"


def _where(plan: GlobalPlan, pool: int) -> str:
    return f" (slots {ranges_text(plan.pools[pool])})" if len(plan.pools) > 1 else ""


def _peak_text(plan: GlobalPlan, peak: PoolPeak) -> str:
    room = f"{bytes_text(peak.safe_bytes):>9} of {bytes_text(peak.room_bytes)}"
    over = "" if peak.fits else "  DOES NOT FIT"
    largest = f"{peak.binding} {bytes_text(peak.components[peak.binding])}"
    return f"{peak.phase:<18} {room}; most is {largest}{_where(plan, peak.pool)}{over}"


def stage_text(judged: Evaluation, name: str, choice: StageChoice) -> str:
    """A model-stage as people say it."""
    plan, layout = judged.plan, choice.layout
    if name == "actor_generate":
        words = f"{layout.dp} engines of TP{layout.tp}"
        sleeps = any("actor_generate.asleep" in peak.components for peak in judged.peaks)
        return words + (", asleep between phases (no weights, no cache)" if sleeps else "") + _where(plan, choice.pool)
    words = [str(layout), f"micro-batches of {choice.micro_batch}"]
    if choice.recompute != "none":
        words.append(f"{choice.recompute} recomputation")
    if choice.sharding == "full":
        words.append("fully sharded")
    words.append(KEEP_TEXT[choice.keep])
    return ", ".join(words) + _where(plan, choice.pool)


def _misses(misses: Sequence[Evaluation]) -> Iterator[str]:
    for miss in misses:
        seconds = f"{miss.step.mean_seconds:.1f} s  " if miss.phases else ""
        yield f"  {seconds}{miss.plan}"
        yield from (f"       {misfit.reason}" for misfit in miss.misfits)


def check_text(judged: Evaluation) -> str:
    """The verdict on one given plan."""
    lines = [str(judged.plan), *detail_lines(judged)]
    if judged.phases:
        lines.append(f"  step {time_text(judged.step)}, {judged.tokens_per_second:.0f} tokens/s per slot")
    lines += [f"does not fit: {misfit.reason}" for misfit in judged.misfits] or ["fits"]
    return "\n".join(lines) + "\n"


def evaluation_values(judged: Evaluation) -> dict[str, object]:
    """An evaluation as plain values."""
    timed = judged.phases != ()
    return {
        "plan": str(judged.plan),
        "plan_id": judged.plan.plan_id,
        "fits": judged.fits,
        "step_seconds": judged.step.mean_seconds if timed else None,
        "step_deviation_seconds": judged.step.deviation_seconds if timed else None,
        "tokens_per_second_per_slot": judged.tokens_per_second if timed else None,
        "phases": [
            {
                "phase": phase.phase,
                "slots": ranges_text(judged.plan.pools[phase.pool]),
                "seconds": phase.time.mean_seconds,
                "deviation_seconds": phase.time.deviation_seconds,
                "critical": phase.critical,
                "terms_seconds": dict(phase.terms),
            }
            for phase in judged.phases
        ],
        "peaks": [
            {
                "slots": ranges_text(judged.plan.pools[peak.pool]),
                "phase": peak.phase,
                "safe_bytes": peak.safe_bytes,
                "room_bytes": peak.room_bytes,
                "binding": peak.binding,
                "components_bytes": dict(peak.components),
            }
            for peak in judged.peaks
        ],
        "host_bytes_per_slot": [dict(host.components) for host in judged.hosts],
        "idle": [{**asdict(idle), "slots": ranges_text(idle.slots)} for idle in judged.idle],
        "misfits": [
            {
                "reason": misfit.reason,
                "slot": misfit.slot,
                "phase": misfit.phase,
                "component": misfit.component,
                "needed_bytes": misfit.needed_bytes,
                "room_bytes": misfit.room_bytes,
            }
            for misfit in judged.misfits
        ],
    }


def search_values(result: SearchResult, judged: Sequence[Evaluation]) -> dict[str, object]:
    """A search's answer as plain values."""
    return {
        "plans": [evaluation_values(each) for each in judged],
        "near_misses": [evaluation_values(each) for each in result.near_misses],
        "lower_bound_seconds": result.lower_bound_seconds if result.candidates else None,
        "gap_share": result.gap_share,
        "exact": result.exact,
        "finished": result.finished,
        "evaluated_nodes": result.evaluated_nodes,
    }
