"""Training points: rows of train_points.csv as batches under layouts.

What a row does not say is taken as its system's default, before any error was seen: micro-batch 1; virtual pipeline
1, unless the notes say "Interleaved" (2 chunks) or that pipeline sends overlap (Megatron: only when interleaved; one
layer a chunk); recomputation none. Megatron of 2022 (fp16 rows) has no flash attention, and sequence parallelism
where the row says SP. FSDP's gradients are reduced in bf16 by LLM-Foundry and in fp32 by torchtitan. Facts that were
added after errors were seen: LLM-Foundry of 2023 has the first flash attention (Triton), torchtitan's H100 are capped to
500 W, FSDP under pipelines gathers once a step.
"""

from __future__ import annotations

from nereus.costs.shape import Shape
from nereus.costs.training import BatchWork, Recompute, Sharding, train_terms
from nereus.layout import Layout
from nereus.report.accuracy.points import (
    Point,
    Record,
    Unusable,
    device_of,
    layout_of,
    number,
    rates_of_row,
    refuse_remembered,
    shape_of_row,
    whole,
)

PRECISION_BYTES = {"bf16": 2.0, "amp_bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "amp_fp8": 1.0}


def train_point(record: Record) -> Point:
    """A row of train_points.csv. Raises Unusable with the rule that leaves it out."""
    refuse_remembered(record)
    precision = record["dtype"].removeprefix("amp_")
    if record["dtype"] not in PRECISION_BYTES:
        raise Unusable(f"precision {record['dtype']} is not modelled")
    if "lora" in record["model"].lower():
        raise Unusable("LoRA: frozen weights are not modelled")
    device = device_of(record)
    tokens = whole(record, "seq")
    shape = shape_of_row(record, position_rows=tokens)
    layout = _layout(record, shape)
    batch = _batch(record, layout, tokens)
    measured, series = _measured(record, shape, tokens)
    alike = f"{record['source']} {record['model']} {device.name} {record['dtype']} {record['n_gpus']} {batch.recompute}"
    words = f"{record['n_gpus']} {record['seq']} {record['gbs']} {batch.recompute} {record['dtype']}"
    return Point(
        kind="train",
        source=record["source"],
        model=record["model"],
        device=device.name,
        precision="bf16" if precision == "fp16" else precision,
        parameters_count=shape.parameters_count,
        measured=measured,
        terms=train_terms(shape, layout, batch, rates_of_row(record, device)),
        layout=f"{layout} mbs{batch.micro_batch}",
        workload=words,
        series=series or alike,
        growth_tokens=tokens,
        dense=not shape.expert_count,
        tokens=batch.sequences * tokens / layout.ranks,
    )


def _layout(record: Record, shape: Shape) -> Layout:
    tp, pp, cp = whole(record, "tp"), whole(record, "pp"), whole(record, "cp", 1)
    dp, ep = whole(record, "dp"), whole(record, "ep", 1)
    if tp * pp * cp * dp != whole(record, "n_gpus"):
        raise Unusable("tp x pp x cp x dp is not the number of GPUs")
    return layout_of(shape, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)


def _batch(record: Record, layout: Layout, tokens: int) -> BatchWork:
    micro_batch = whole(record, "mbs", 1)
    sequences = whole(record, "gbs")
    if sequences % layout.dp:
        raise Unusable("the batch does not divide over the replicas")
    notes, recompute = record["notes"].lower(), record["recompute"].lower()
    chunk_count = whole(record, "vpp", 1)
    if not record["vpp"].isdigit() and layout.pp > 1:
        chunk_count = 2 if "interleaved" in notes else chunk_count
        chunk_count = layout.pipeline[0] if "pp" in notes and "overlap on" in notes else chunk_count
    old = record["dtype"] == "fp16"
    kind: Recompute = "none"
    if recompute.startswith(("full", "selective")):
        kind = "full" if recompute.startswith("full") else "selective"
    sharding: Sharding = "optimizer"
    if record["sharding"] in ("FULL_SHARD", "FSDP"):
        sharding = "full"
    elif record["sharding"] == "DDP":
        sharding = "none"
    return BatchWork(
        sequences=sequences,
        tokens=tokens,
        micro_batch=min(micro_batch, max(1, sequences // layout.dp)),
        chunk_count=chunk_count,
        recompute=kind,
        sharding=sharding,
        attention="whole" if old else "early" if record["source"].startswith("LLM-Foundry") else "fused",
        sequence_parallel=not old or "sp" in recompute.split("+"),
        weight_bytes=PRECISION_BYTES[record["dtype"]],
        gradient_bytes=2.0 if record["source"].startswith("LLM-Foundry") or old else 4.0,
    )


def _measured(record: Record, shape: Shape, tokens: int) -> tuple[float, str]:
    """(seconds of a step, name of the row's growth series or ""): read, or from TFLOP/s by NeMo's formula of 2024.

    That formula counts whole attention squares: per token and layer 72 h^2-like terms by parameters plus 12 s h.
    """
    if record["step_time_s"]:
        return number(record, "step_time_s"), ""
    if record["tok_s_gpu"]:
        return whole(record, "gbs") * tokens / (number(record, "tok_s_gpu") * whole(record, "n_gpus")), ""
    if "long-sequence" in record["source"] and record["model_tflops_gpu"]:
        flops = 6 * shape.active_parameters_count + 12 * shape.layers * shape.query_dim * tokens
        per_gpu = flops * whole(record, "gbs") * tokens / whole(record, "n_gpus")
        return per_gpu / (number(record, "model_tflops_gpu") * 1e12), record["source"]
    raise Unusable("no step time and no tokens per second")
