"""Memory points: rows of memory_points.csv as peaks in bytes.

Rules, written before the errors were seen. What is measured is named by `component`: the allocator's peak (of all
ranks, or of the first pipeline rank), activations alone, or states alone; "reserved" peaks are taken as peaks.
Engines on the same slot, and rows without a micro-batch or a sequence length, are left out. fp8 training keeps 16-bit
weights and activations. Torchtitan's selective recomputation keeps half of the products: between none and full, as
their mean. Micro-batches are 4 where the row does not say ("mbc="). Added after errors were seen: a truncated DeepSeek
keeps one dense layer, as SimuMax's does.
"""

from __future__ import annotations

import re

from nereus.costs.footprint import activation_components, state_components, train_peak
from nereus.costs.shape import Shape
from nereus.costs.training import BatchWork, Kernel, Recompute, Sharding
from nereus.layout import Layout
from nereus.report.accuracy.points import (
    Point,
    Record,
    Unusable,
    device_of,
    layout_of,
    number,
    refuse_remembered,
    shape_of_row,
    whole,
)

GIB = 1024**3


def memory_point(record: Record) -> Point:
    """A row of memory_points.csv. Raises Unusable with the rule that leaves it out."""
    refuse_remembered(record)
    if "vllm" in record["component"].lower():
        raise Unusable("an engine shares the slot")
    device, tokens = device_of(record), whole(record, "seq")
    shape = shape_of_row({"heads": HEADS.get(record["hidden"], ""), **record}, position_rows=tokens)
    layout = _layout(record, shape)
    batch = _batch(record, layout, tokens)
    components = _components(record, shape, layout, batch)
    return Point(
        kind="memory",
        source=record["source"].split(" Fig")[0],
        model=record["model"],
        device=device.name,
        precision="bf16",
        parameters_count=shape.parameters_count,
        measured=number(record, "peak_mem_gib") * GIB,
        terms=components,
        layout=str(layout),
        workload=f"{record['component'][:24]} {record['recompute']} {tokens} {record['notes'][:12]}",
        dense=not shape.expert_count,
    )


HEADS = {"6144": "64", "12288": "96", "20480": "128", "25600": "160"}
"""Heads of Korthikanti's models, by hidden size: the memory table has no such column."""


def _layout(record: Record, shape: Shape) -> Layout:
    tp, pp, cp = whole(record, "tp", 1), whole(record, "pp", 1), whole(record, "cp", 1)
    dp, ep = whole(record, "dp"), whole(record, "ep", 1)
    return layout_of(shape, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)


def _batch(record: Record, layout: Layout, tokens: int) -> BatchWork:
    micro_batch = whole(record, "mbs")
    recompute = record["recompute"].lower()
    kind: Recompute = "none"
    if recompute.startswith("full"):
        kind = "full"
    elif recompute.startswith("selective"):
        kind = "half" if record["source"] == "torchtitan" else "selective"
    sharding: Sharding = "optimizer" if "ZeRO-1" in record["sharding"] else "none"
    if "FSDP" in record["sharding"]:
        sharding = "full"
    found = re.search(r"mbc=(\d+)", record["notes"])
    count = int(found[1]) if found else (4 if "local batch" not in record["notes"] else 1)
    if record["source"].startswith("Korthikanti"):
        count = max(count, 4 * layout.pp)
    attention: Kernel = "whole" if record["source"].startswith("Korthikanti") else "fused"
    return BatchWork(
        sequences=micro_batch * count * layout.dp,
        tokens=tokens,
        micro_batch=micro_batch,
        chunk_count=whole(record, "vpp", 1),
        recompute=kind,
        sharding=sharding,
        attention=attention,
        sequence_parallel=attention == "fused" or "sp" in re.split(r"[+ ]", recompute.replace("no sp", "")),
    )


def _components(record: Record, shape: Shape, layout: Layout, batch: BatchWork) -> dict[str, float]:
    component = record["component"]
    if component.startswith("params+grads"):
        return state_components(shape, layout, batch, 0)
    if component.startswith("activations"):
        kept = activation_components(shape, layout, batch, 0)
        return {name: size for name, size in kept.items() if name in ("activations", "logits")}
    ranks = [0] if record["stage"] == "first" else range(layout.pp)
    peak = max((train_peak(shape, layout, batch, rank) for rank in ranks), key=lambda each: each.total_bytes)
    return dict(peak.components)
