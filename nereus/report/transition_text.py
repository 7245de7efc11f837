"""A MovementReport as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from nereus.layout import Layout, StagePlan
from nereus.report.display import bytes_text
from nereus.report.transition import MovementReport, PlacedStage, StandingSync
from nereus.storage import emu_name

WIDEST = 48  # columns that a list of slots may take
OPTIMIZERS = {True: "zero1", False: "replicated"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What the text says of the model: its name as asked for, the parameters of the actor, and their type."""

    name: str
    parameters_count: int
    dtype: str


# -- text ----------------------------------------------------------------------------------------------------------------


def render(report: MovementReport, model: Model, *, slots: bool) -> str:
    """The report as text: what is asked, bytes, ports, time, remarks; with `slots` a line for each slot too."""
    blocks = [_head(report, model), _bytes_table(report)]
    if report.total("moved_bytes"):
        blocks.append(_port_table(report))
    blocks.append([*_conclusion(report), *_remarks(report)])
    if slots:
        blocks.append(_slot_table(report))
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _head(report: MovementReport, model: Model) -> list[str]:
    fleet = report.fleet
    slots, nodes = counted(len(fleet.slots), "slot"), counted(len(fleet.nodes), "node")
    lines = [
        f"model   {model.name}: {model.parameters_count / 1e9:.2f} B parameters, {model.dtype}",
        f"fleet   {fleet}: {slots}, {nodes}",
    ]
    for stage in report.stages:
        lines += [
            f"sync    {emu_name(stage.before)} to {emu_name(stage.after)}" if report.is_sync else emu_name(stage.after),
            f"  from  {_plan_text(stage.before)}",
            f"  to    {_plan_text(stage.after)}",
        ]
    return lines


def _plan_text(stage: StagePlan) -> str:
    cut = f" {OPTIMIZERS[stage.layout.distributed_optimizer]}" if stage.stage == "train" else ""
    return f"{stage.layout}{cut} on {slots_text(stage.slots)}"


def _bytes_table(report: MovementReport) -> list[str]:
    fields = ("before_bytes", "after_bytes", "kept_bytes", "moved_bytes", "inter_node_bytes")
    rows: list[tuple[str, ...]] = [("bytes", "before", "after", "kept", "moved", "inter-node")]
    emus = list(dict.fromkeys(c.emu for c in report.components))
    for emu in emus:
        own = [c for c in report.components if c.emu == emu]
        label = f"{emu} {own[0].component}" if len(own) == 1 else emu
        rows.append((label, *(size_text(sum(getattr(c, f) for c in own)) for f in fields)))
        rows += [(f"  {c.component}", *(size_text(getattr(c, f)) for f in fields)) for c in own if len(own) > 1]
    if len(emus) > 1:
        rows.append(("in all", *(size_text(report.total(f)) for f in fields)))
    return table(rows)


def _port_table(report: MovementReport) -> list[str]:
    rows: list[tuple[str, ...]] = [("busiest port", "which", "carries", "at", "takes", "at least", "")]
    for port in report.ports:
        mark = "<- bottleneck" if port.kind == report.bottleneck else ""
        rate = f"{port.rate_bytes_per_second / 1e9:.4g} GB/s"
        which = f"slot {port.slot}, node {port.node}" if port.load_bytes else "-"
        times = seconds_text(port.seconds), seconds_text(port.least_seconds)
        rows.append((port.kind, which, size_text(port.load_bytes), rate, *times, mark))
    return table(rows, left=(0, 1, 6))


def _conclusion(report: MovementReport) -> Iterator[str]:
    moved, each = report.total("moved_bytes"), " a step" if report.is_sync else ""
    if not moved:
        yield "moved   nothing: every byte is in place"
        return
    yield f"moved   {size_text(moved)}{each}, {size_text(report.total('kept_bytes'))} stay in place"
    if report.least_moved_bytes is not None:
        gap = f", gap {report.moved_gap:.1%}" if report.moved_gap is not None else ""
        yield f"        any placement moves at least {size_text(report.least_moved_bytes)}{gap}"
    yield f"time    {seconds_text(report.seconds)}{each} at the busiest port ({report.bottleneck})"
    yield f"        any choice of senders takes at least {seconds_text(report.least_seconds)}, gap {report.gap:.1%}"
    if report.is_sync:
        over = f"{seconds_text(report.seconds * report.horizon_steps)} over {counted(report.horizon_steps, 'step')}"
        yield f"        {over}"
    yield "        at the links' data-sheet rates, without groups, engines and latency:"
    yield f"        a lower bound of the {'sync' if report.is_sync else 'pause'}"


def _remarks(report: MovementReport) -> Iterator[str]:
    if (sync := report.sync) is not None:
        yield f"sync    {seconds_text(sync.after_seconds)} a step to {sync.generate.layout}, {_now(sync)}"
        yield f"        weighed over {counted(report.horizon_steps, 'step')} in the placement"
    if report.hops_count:
        yield f"relays  bytes are handed on between slots, up to {counted(report.hops_count, 'time')}"
    fullest = max(report.slots, key=lambda s: s.after_bytes)
    held = max(s.before_bytes for s in report.slots)
    yield f"held    {size_text(held)} on the fullest slot before, {size_text(fullest.after_bytes)} after"
    over = [s for s in report.slots if s.after_bytes > report.fleet.device_of[s.slot].memory_bytes]
    if over:
        device, slot = report.fleet.device_of[over[0].slot], over[0]
        yield f"note    {counted(len(over), 'slot')} cannot hold that: slot {slot.slot} would hold"
        yield f"        {size_text(slot.after_bytes)}, {device.name} has {size_text(device.memory_bytes)}"
    if report.split_groups:
        yield f"note    {counted(report.split_groups, 'tensor or expert group')} over more than one node"
    if not report.exact:
        yield "note    so many slots are compared coarsely: other placements may be better"


def _now(sync: StandingSync) -> str:
    return "as now" if sync.after_seconds == sync.before_seconds else f"now {seconds_text(sync.before_seconds)}"


def _slot_table(report: MovementReport) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("slot", "node", "ranks", "before", "after", "kept", "received", "sent", "inter-node", "busy")
    ]
    ranks = [(_rank_of(stage.before), _rank_of(stage.after)) for stage in report.stages]
    for s in report.slots:
        changes = [f"{old.get(s.slot, '-')}>{new.get(s.slot, '-')}" for old, new in ranks]
        amounts = (s.before_bytes, s.after_bytes, s.kept_bytes, s.received_bytes, s.sent_bytes, s.inter_node_bytes)
        texts = [size_text(amount) if amount else "-" for amount in amounts]
        busy = seconds_text(s.seconds) if s.seconds else "-"
        rows.append((str(s.slot), str(s.node), " ".join(changes), *texts, busy))
    names = ", ".join(emu_name(stage.after) for stage in report.stages)
    return [
        f"ranks: before>after of {names}; inter-node: sent and received; busy: its busiest port",
        *table(rows, left=()),
    ]


def _rank_of(stage: StagePlan) -> dict[int, int]:
    return {slot: rank for rank, slot in enumerate(stage.slots)}


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Rows of equal length as aligned lines; the columns `left` are flush left, the others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def counted(count: int, noun: str) -> str:
    """`1 slot`, `1,024 slots`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def seconds_text(seconds: float) -> str:
    """A time for people: `1.23 s`, `16.7 ms`, `0.33 us`, `0 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor or (unit == "us" and seconds > 0):
            count = seconds / factor
            return f"{count:,.0f} {unit}" if count >= 99.95 else f"{count:#.3g} {unit}"
    return "0 s"


def size_text(size_bytes: float) -> str:
    """A count of bytes for people, as `bytes_text`, with TB: `512 B`, `3.4 MB`, `1.58 TB` (powers of 1000)."""
    return f"{size_bytes / 1e12:,.2f} TB" if size_bytes >= 1e12 else bytes_text(size_bytes)


def slots_text(slots: Sequence[int]) -> str:
    """Slots in the order of the ranks, runs as first-last; where that is long, what fits, and how to see the rest."""
    noun, ascending = "slot" if len(slots) == 1 else "slots", _runs(sorted(slots))
    if len(in_order := _runs(slots)) <= WIDEST:
        return f"{noun} {in_order}"
    if len(ascending) <= WIDEST:
        return f"{noun} {ascending}, ranks in another order (--slots)"
    return f"{len(slots):,} {noun} of {min(slots)}-{max(slots)} (--slots)"


def _runs(slots: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


# -- JSON ----------------------------------------------------------------------------------------------------------------


def as_json(report: MovementReport, model: Model, *, slots: bool) -> dict[str, object]:
    """The report as JSON values under stable keys, units in their names; `slot_bytes` with `slots` alone."""
    totals = ("before_bytes", "after_bytes", "kept_bytes", "moved_bytes", "inter_node_bytes")
    sync = report.sync
    values: dict[str, object] = {
        "kind": "sync" if report.is_sync else "transition",
        "model": {"name": model.name, "parameters": model.parameters_count, "dtype": model.dtype},
        "fleet": {"text": str(report.fleet), "slots": len(report.fleet.slots), "nodes": len(report.fleet.nodes)},
        "stages": [_stage_json(stage) for stage in report.stages],
        "components": [asdict(component) for component in report.components],
        **{name: report.total(name) for name in totals},
        "least_moved_bytes": report.least_moved_bytes,
        "moved_gap_ratio": report.moved_gap,
        "ports": [asdict(port) for port in report.ports],
        "bottleneck": report.bottleneck or None,
        "seconds": report.seconds,
        "least_seconds": report.least_seconds,
        "gap_ratio": report.gap,
        "direct_least_send_bytes": report.direct_send_bytes,
        "relay_hops": report.hops_count,
        "placement": {
            "objective": report.objective,
            "exact": report.exact,
            "split_groups": report.split_groups,
            "horizon_steps": report.horizon_steps,
        },
        "sync": None
        if sync is None
        else {
            "generate": _plan_json(sync.generate),
            **{key: value for key, value in asdict(sync).items() if key != "generate"},
        },
    }
    return values | ({"slot_bytes": [asdict(slot) for slot in report.slots]} if slots else {})


def _stage_json(stage: PlacedStage) -> dict[str, object]:
    return {"emu": emu_name(stage.after), "from": _plan_json(stage.before), "to": _plan_json(stage.after)}


def _plan_json(stage: StagePlan) -> dict[str, object]:
    return {
        "stage": stage.stage,
        "layout": str(stage.layout),
        **_layout_json(stage.layout),
        "optimizer": OPTIMIZERS[stage.layout.distributed_optimizer] if stage.stage == "train" else None,
        "slots": list(stage.slots),
    }


def _layout_json(layout: Layout) -> dict[str, object]:
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "dp", "cp", "ep")}
    return {**degrees, "etp": layout.expert_tp, "order": layout.order, "pipeline": list(layout.pipeline)}
