"""RL step points: rows of perf_points.csv and rl_step_points.csv as whole steps.

Rules, written before the errors were seen. Only synchronous steps on shared slots (no "off", "async", "stream"); no
upper bounds; the mean response length, the number of samples, the device and its count must be given, and a length
that is a cap is no mean; a row that both tables hold counts once (the perf table's); DAPO samples until groups are
mixed, how often is not given (this rule was written after one such row's error was seen). A training layout that is
not given is TP1·PP1. Lengths are log-normal with deviation 0.6, cut at the row's cap. NeMo-RL trains in mini-batches
of 512 samples with two forward passes (policy and reference), its experts are not cut by TP; verl uses FSDP,
mini-batches as given, two forward passes and one more with a critic. Activations are recomputed. The engine's TP is
the row's; attention of DeepSeek is replicated over it.
"""

from __future__ import annotations

import re

from nereus.costs.generation import Generator, Lengths, equal_lengths, lognormal_lengths
from nereus.costs.rates import rates_of
from nereus.costs.shape import Shape
from nereus.costs.step import StepWork, step_phases, summed
from nereus.costs.training import BatchWork, Sharding
from nereus.layout import Layout
from nereus.report.accuracy.points import Point, Record, Unusable, device_of, layout_of, number, shape_of_row, whole

ASYNCHRONOUS = re.compile(r"\boff\b|\basync|\bstream|separate", re.IGNORECASE)
NEMO_TRAIN_SAMPLES = 512
PROMPT_TOKENS = 120.0
"""Prompts of the NeMo-RL rows where the table has none: between 98 and 136 in those that have one."""


def perf_point(record: Record) -> Point:
    """A row of perf_points.csv. Raises Unusable with the rule that leaves it out."""
    notes = record["notes"]
    _refuse(notes, record["step_time_s"])
    row = {
        **record,
        "n_gpus": record["num_gpus"],
        "samples": record["global_batch"],
        "framework": record["system"],
        "cap": _cap(notes),
        "train_samples": str(NEMO_TRAIN_SAMPLES) if "train GBS=512" in notes else record["global_batch"],
    }
    if not record["response_len"] or re.search(r"response_len=max|lengths are (the example-script )?caps", notes):
        raise Unusable("the mean response length is not given")
    return _point(row, number(record, "prompt_len"), number(record, "response_len"))


def rl_step_point(record: Record) -> Point:
    """A row of rl_step_points.csv. Raises Unusable with the rule that leaves it out."""
    _refuse(f"{record['policy_mode']} {record['notes']}", record["step_time_s"])
    if "validation" in record["notes"]:
        raise Unusable("the step time includes validation, as the table says")
    parallel = re.findall(r"\d+", record["train_parallel"])
    kind = record["train_parallel"]
    moe = len(parallel) >= 4
    row = {
        **record,
        "samples": record["rollout_batch_samples"],
        "cap": record["max_seq"],
        "train_samples": record["train_gbs"] or record["rollout_batch_samples"],
        "train_tp": parallel[0] if moe else "1",
        "train_cp": parallel[1] if moe else "1",
        "train_ep": parallel[2] if moe else "1",
        "train_pp": parallel[3] if moe else "1",
        "sharding": "full" if "FSDP" in kind else "optimizer",
    }
    return _point(row, PROMPT_TOKENS, number(record, "avg_seq_len"))


def _refuse(words: str, step_time: str) -> None:
    if "UPPER BOUND" in words:
        raise Unusable("a ceiling of a test, not a measurement")
    if "DOES NOT CLOSE" in words:
        raise Unusable("the row does not close, as the table says")
    if not step_time:
        raise Unusable("no step time")
    if ASYNCHRONOUS.search(words):
        raise Unusable("asynchronous: generation and training overlap")
    if "estimate" in words:
        raise Unusable("an estimate of its authors, not a measurement")


def _cap(notes: str) -> str:
    match = re.search(r"max_seq=(\d+)|context (\d+)", notes)
    return (match[1] or match[2]) if match else ""


def _lengths(row: Record, prompt: float, mean: float) -> Lengths:
    cap = number(row, "cap", 0.0) - prompt
    return lognormal_lengths(mean, cap) if cap > mean else equal_lengths(mean)


def _point(row: Record, prompt: float, mean: float) -> Point:
    if "DAPO" in row["algo"].upper():
        raise Unusable("DAPO's dynamic sampling generates an unknown multiple of the batch")
    if not mean > 0:
        raise Unusable("the mean response length is not above 0")
    device, shape = device_of(row), shape_of_row(row)
    slots, samples = whole(row, "n_gpus"), whole(row, "samples")
    rates = rates_of(device)
    fsdp = row.get("sharding") == "full" or row["framework"].lower().startswith(("verl", "rlinf"))
    layout = _layout(row, shape, slots, fsdp=fsdp)
    engine = Generator(tp=whole(row, "gen_tp", 1))
    critic = "PPO" in row["algo"].upper()
    mini = max(1, round(samples / number(row, "train_samples")))
    work = StepWork(
        samples=samples,
        prompt_tokens=prompt,
        lengths=_lengths(row, prompt, mean),
        mini_batches=mini,
        forward_count=3 if critic else 2,
        critic=critic,
        whole_sync=True,
    )
    sharding: Sharding = "full" if fsdp else "optimizer"
    batch = BatchWork(sequences=samples, tokens=1, recompute="full", sharding=sharding)
    replicas = max(1, slots // engine.tp)
    terms = summed(step_phases(shape, layout, batch, engine, replicas, work, rates))
    framework = re.split(r"[/ ]", row["framework"])[0]
    return Point(
        kind="rl",
        source=f"{framework} step",
        model=row["model"],
        device=device.name,
        precision="bf16",
        parameters_count=shape.parameters_count,
        measured=number(row, "step_time_s"),
        terms=terms,
        layout=f"{layout} gen TP{engine.tp}",
        workload=f"{slots} {samples} {mean:.0f}",
        dense=not shape.expert_count,
    )


def _layout(row: Record, shape: Shape, slots: int, *, fsdp: bool) -> Layout:
    tp, pp, cp = whole(row, "train_tp", 1), whole(row, "train_pp", 1), whole(row, "train_cp", 1)
    ep = whole(row, "train_ep", 1)
    if fsdp:
        tp = pp = cp = ep = 1
    dp = slots // (tp * pp * cp)
    if dp < 1 or dp * tp * pp * cp != slots:
        raise Unusable("tp x pp x cp x dp is not the number of GPUs")
    return layout_of(shape, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep)
