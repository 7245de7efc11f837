"""Decode and prefill points: rows of decode_points.csv.

Rules, written before the errors were seen. The batch of a row is held constant: each sequence that ends is replaced,
with its prefill. Output tokens per second of a static batch or at maximum load are predicted as seconds per output
token of the whole replica. At maximum load the batch is what the cache holds, at most 2,048 (TensorRT-LLM's default).
The cache is of the type that the row says, else bf16; of TensorRT-LLM's fp8 checkpoints it is fp8 (added after errors
were seen). A first-token time without a time per token is a prefill point at batch 1. `bf16?` is bf16 (facts: costs, 5).

Kind "decode" is a sequence's whole time over its output tokens, first-token time included: engines differ in who
waits for whose prefill, and only the sum is work. Kind "tpot" is the table's time per output token alone; it was the
first rule, its errors were seen, and both are reported (tokens/s columns derived from it are not used).
"""

from __future__ import annotations

from dataclasses import replace

from nereus.costs.generation import Generator, cache_tokens, decode_step, prefill_seconds, steady_terms
from nereus.costs.rates import Rates, rates_of
from nereus.costs.shape import Shape
from nereus.report.accuracy.points import (
    Point,
    Record,
    Unusable,
    device_of,
    number,
    refuse_remembered,
    shape_of_row,
    whole,
)

WEIGHT_BYTES = {"bf16": 2.0, "bf16?": 2.0, "fp16": 2.0, "fp8": 1.0}
MAX_LIVE = 2048


def decode_point(record: Record) -> Point:
    """A row as a decode or prefill point. Raises Unusable with the rule that leaves it out."""
    point, live, batch = _steady(record)
    if not record["tpot_ms"]:
        return point
    output = whole(record, "output_len")
    waited = number(record, "ttft_ms", 0.0) / output
    terms = {name: seconds * batch / live for name, seconds in point.terms.items()}
    return replace(point, measured=(number(record, "tpot_ms") + waited) / 1e3, terms=terms)


def tpot_point(record: Record) -> Point:
    """A row with a time per output token as that alone. Raises Unusable for the others."""
    if not record["tpot_ms"]:
        raise Unusable("no time per output token")
    return replace(_steady(record)[0], kind="tpot", measured=number(record, "tpot_ms") / 1e3)


def _steady(record: Record) -> tuple[Point, float, float]:
    """(point of the steady state, sequences that run at once, sequences that the client keeps open)."""
    refuse_remembered(record)
    if record["weight_dtype"] not in WEIGHT_BYTES:
        raise Unusable(f"precision {record['weight_dtype']} is not modelled")
    if whole(record, "pp", 1) > 1:
        raise Unusable("pipelined generation is not modelled")
    if "ambiguous" in record["notes"].lower() and whole(record, "tp") > 1:
        raise Unusable("unit ambiguous for tp > 1, as the table says")
    device, shape = device_of(record), shape_of_row(record)
    engine, rates = _engine(record), rates_of(device)
    point = Point(
        kind="decode",
        source=f"{record['source'].removesuffix('(agg)').strip()} {record['engine'].split(' ')[0]}",
        model=record["model"],
        device=device.name,
        precision="bf16" if engine.weight_bytes > 1 else "fp8",
        parameters_count=shape.parameters_count,
        measured=1.0,
        terms={},
        layout=f"TP{engine.tp}",
        workload=f"{record['input_len']} {record['output_len']} {record['batch']}",
        dense=not shape.expert_count,
    )
    if record["ttft_ms"] and not record["tpot_ms"]:
        return _first_token(point, record, shape, engine, rates), 1.0, 1.0
    return _running(point, record, shape, engine, rates)


def _engine(record: Record) -> Generator:
    weight = WEIGHT_BYTES[record["weight_dtype"]]
    tensorrt = record["engine"].lower().startswith(("trtllm", "tensorrt"))
    cache = WEIGHT_BYTES.get(record["kv_dtype"], weight if tensorrt else 2.0)
    return Generator(tp=whole(record, "tp"), weight_bytes=weight, cache_bytes=cache)


def _first_token(point: Point, record: Record, shape: Shape, engine: Generator, rates: Rates) -> Point:
    prompt = whole(record, "input_len")
    if whole(record, "batch") != 1 or whole(record, "output_len") != 1:
        raise Unusable("first-token time with queueing")
    step = decode_step(shape, engine, rates, 1, prompt)
    launches = {name: step[name] for name in ("decode_launch", "engine_step")}
    terms = {"prefill": prefill_seconds(shape, engine, rates, 1, prompt), **launches}
    return replace(point, kind="prefill", measured=number(record, "ttft_ms") / 1e3, terms=terms)


def _running(point: Point, record: Record, shape: Shape, engine: Generator, rates: Rates) -> tuple[Point, float, float]:
    prompt, output = whole(record, "input_len"), whole(record, "output_len")
    held = cache_tokens(shape, engine, rates) / (prompt + output / 2)
    if held < 1:
        raise Unusable("the weights alone do not fit by the memory model")
    if not record["batch"] and "max load" not in record["batching"]:
        raise Unusable("batch not given")
    batch = number(record, "batch", min(held, MAX_LIVE))
    live = min(batch, held)
    terms = steady_terms(shape, engine, rates, prompt, output, live)
    if record["tpot_ms"]:
        return replace(point, terms=terms), live, batch
    rate = number(record, "output_tok_s_total")
    each = {name: seconds / live for name, seconds in terms.items()}
    return replace(point, measured=1 / rate, terms=each), live, batch
