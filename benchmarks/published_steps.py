"""The simulated world against published RL step times: `python -m benchmarks.published_steps --points DIR`.

No row was used to fit the simulated world: its tables are kernel and collective times, its constants are in nereus/sim.
The rules by which rows are read and left out stand before the errors were seen:

* Left out: upper bounds, rows that do not close, estimates, DAPO (its sampling is open), steps with validation, devices or
  models without sizes, lengths that are caps, latent attention (no table of its kernels), fp8.
* NeMo-RL: Megatron as the row says (blank: TP1 PP1), mini-batches of 512 samples, sequences packed to max_seq, activations
  recomputed, two passes without gradients, state offloaded while it generates, engines take 0.6 of the memory.
* One step off: generation and training on half of the nodes each, as its recipes do; the step is the longer of both.
* verl: a configuration is stated when system, model, device, GPUs, samples and mean lengths are; FSDP with dynamic batches
  where the row names no degrees; engines of the row's TP, else verl's default; memory share 0.5.
* OpenRLHF: every row, by the range over what it does not state: lengths, division of the slots, engines' TP, optimizer on host.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.tables import Number, write_numbers
from nereus.fleet import Fleet, uniform
from nereus.report.accuracy.points import Record, Unusable, device_of, number, read_table, shape_of_row, whole
from nereus.sim.phases import critic_shape
from nereus.sim.rivals import openrlhf, verl
from nereus.sim.rivals.setups import Cut, Engines, Packing, RlJob, Setup
from nereus.sim.rivals.stepping import PUBLISHED, Step, SystemTimes
from nereus.sim.truth import Truth
from nereus.sim.workload import SimWorkload, StepSamples, constant

STEPS, PROMPT_TOKENS = 3, 120.0
NEMO_SAMPLES, NEMO_SHARE, NEMO_SEQUENCES = 512, 0.6, 1024
OFF_POLICY = re.compile(r"\b1-step off|\b1-off", re.IGNORECASE)
ASYNCHRONOUS = re.compile(r"\boff\b|-off\b|\basync|\bstream|separate", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A published step and how the simulated world took it."""

    system: str
    name: str
    gpus: int
    device: str
    kind: str  # sync, 1-off
    measured_seconds: float
    step: Step
    measured: Mapping[str, float]

    @property
    def error_share(self) -> float:
        """Simulated over measured, less 1."""
        return self.step.seconds / self.measured_seconds - 1


def simulated(job: RlJob, setup: Setup, fleet: Fleet, samples: Sequence[StepSamples]) -> Step:
    """The mean of some steps."""
    truth = Truth(seed=1)
    times = SystemTimes(job, setup, fleet, truth, PUBLISHED)
    slow = truth.slowness(max(fleet.slots) + 1)
    steps = [
        times.step(i, each, slow * truth.straggling(len(fleet.nodes), i)[fleet.node_of])
        for i, each in enumerate(samples, 1)
    ]
    names = steps[0].phases
    return Step(
        phases={name: float(np.mean([s.phases[name] for s in steps])) for name in names},
        seconds=float(np.mean([s.seconds for s in steps])),
    )


def batches(job: RlJob, prompt: float, mean: float) -> list[StepSamples]:
    """Batches of these mean lengths."""
    made = SimWorkload(
        prompts_per_step=max(1, job.samples // job.samples_per_prompt),
        samples_per_prompt=job.samples_per_prompt,
        mean_prompt_tokens=prompt,
        most_prompt_tokens=job.most_prompt_tokens,
        most_response_tokens=job.most_response_tokens,
        curve=constant(mean),
    )
    return [made.batch(step) for step in range(1, STEPS + 1)]


def refused(row: Record, words: str) -> None:
    """Raises Unusable with the rule that leaves a row out."""
    rules = (
        ("UPPER BOUND" in words, "a ceiling of a test, not a measurement"),
        ("DOES NOT CLOSE" in words, "the row does not close, as the table says"),
        ("estimate" in words, "an estimate of its authors"),
        ("DAPO" in row["algo"].upper(), "DAPO's sampling generates an unknown multiple of the batch"),
        (not row["step_time_s"], "no step time"),
        ("validation" in words, "the step includes validation"),
        ("; fp8;" in words, "fp8"),
        (bool(re.search(r"response_len=max|lengths are (the example-script )?caps", words)), "lengths are caps"),
    )
    for applies, rule in rules:
        if applies:
            raise Unusable(rule)


def job_of_row(row: Record, samples: int, prompt: float, mean: float, cap: float, train_samples: int) -> RlJob:
    """The job of a row."""
    shape = shape_of_row(row)
    if shape.kv_latent_dim:
        raise Unusable("latent attention: no table of its kernels")
    each = whole(row, "rollouts_per_prompt", 1)
    critic = critic_shape(shape) if "PPO" in row["algo"].upper() else None
    longest = max(cap - prompt, mean * 1.0001)
    return RlJob(
        actor=shape,
        critic=critic,
        reference=shape,
        samples=samples,
        samples_per_prompt=each if samples % each == 0 else 1,
        mini_batches=max(1, round(samples / train_samples)),
        most_prompt_tokens=int(4 * prompt),
        most_response_tokens=int(np.ceil(longest)),
    )


def nemo(row: Record) -> Row:
    """A row of NeMo-RL's performance summary, synchronous or one step off."""
    notes = row["notes"]
    refused(row, notes)
    one_off = bool(OFF_POLICY.search(notes))
    if ASYNCHRONOUS.search(notes) and not one_off:
        raise Unusable("more than one step off")
    gpus, device = whole(row, "num_gpus"), device_of(row)
    prompt, mean = number(row, "prompt_len", PROMPT_TOKENS), number(row, "response_len")
    found = re.search(r"max_seq=(\d+)", notes)
    cap = float(found[1]) if found else 0.0
    job = job_of_row(row, whole(row, "global_batch"), prompt, mean, cap, NEMO_SAMPLES)
    fleet = uniform(gpus, device)
    half = gpus // 2 if one_off else gpus
    cut = _nemo_cut(row, job, fleet.slots[:half], int(cap) or 8192)
    tp = whole(row, "gen_tp", 1)
    slots = fleet.slots[half:] if one_off else fleet.slots
    engines = Engines(
        slots=slots, tp=tp, replicas=len(slots) // tp, memory_share=0.9 if one_off else NEMO_SHARE,
        sleeps=not one_off, most_sequences=NEMO_SEQUENCES,
    )  # fmt: skip
    setup = Setup(
        system="nemo-rl", name=row["version"], actor=cut if one_off else replace(cut, offload="all"), critic=None,
        reference=replace(cut, recompute=False), engines=engines, sync="whole", on_policy=not one_off,
    )  # fmt: skip
    step = simulated(job, setup, fleet, batches(job, prompt, mean))
    return _row(row, "NeMo-RL", gpus, device.name, "1-off" if one_off else "sync", step)


def _nemo_cut(row: Record, job: RlJob, slots: tuple[int, ...], cap: int) -> Cut:
    tp, pp, cp, ep = (whole(row, f"train_{name}", 1) for name in ("tp", "pp", "cp", "ep"))
    dp = len(slots) // (tp * pp * cp)
    if dp < 1 or dp * tp * pp * cp != len(slots):
        raise Unusable("tp x pp x cp does not divide the GPUs that train")
    layers = job.actor.layers
    base, more = divmod(layers, pp)
    return Cut(
        slots=slots, tp=tp, pp=pp, dp=dp, cp=cp, ep=ep if job.actor.expert_count else 1,
        pipeline=tuple(base + (rank >= pp - more) for rank in range(pp)), recompute=True,
        packing=Packing(tokens=cap, forward_tokens=cap),
    )  # fmt: skip


def _row(row: Record, system: str, gpus: int, device: str, kind: str, step: Step) -> Row:
    keys = {"gen_s": "gen", "logprob_s": "logprob", "train_s": "train"}
    return Row(
        system=system,
        name=f"{row['model']} {row.get('version', '')} {row['algo']}",
        gpus=gpus,
        device=device,
        kind=kind,
        measured_seconds=number(row, "step_time_s"),
        step=step,
        measured={name: number(row, key) for key, name in keys.items() if row.get(key)},
    )


def rl_row(row: Record) -> Record:
    """A row of rl_step_points.csv in the columns of perf_points.csv."""
    actor, critic = row["train_actor_s"], row["train_critic_s"]
    return {
        **row,
        "num_gpus": row["n_gpus"],
        "global_batch": row["rollout_batch_samples"],
        "version": "",
        "prompt_len": "",
        "response_len": row["avg_seq_len"],
        "rollouts_per_prompt": "5" if "n=5" in row["algo"] else "1",
        "system": row["framework"],
        "logprob_s": row["logprob_ref_values_s"],
        "train_s": str(float(actor) + float(critic or 0)) if actor else "",
        "notes": f"{row['policy_mode']}; {row['notes']}; max_seq={row['max_seq']}",
        "train_samples": row["train_gbs"],
    }


def verl_row(row: Record) -> Row:
    """A synchronous row of verl with a stated configuration."""
    notes = row["notes"]
    refused(row, notes)
    if ASYNCHRONOUS.search(notes):
        raise Unusable("asynchronous")
    gpus, samples = whole(row, "num_gpus"), whole(row, "global_batch")
    device = device_of({**row, "gpu": "H100" if "(H100 cluster)" in row["gpu"] else row["gpu"]})
    mean = number(row, "response_len")
    prompt = PROMPT_TOKENS if row["prompt_len"] in ("", "1024") else number(row, "prompt_len")
    found = re.search(r"max_seq=(\d+)|context (\d+)|max_new_tokens (\d+)|cap (\d+)", notes)
    cap = float(next(filter(None, found.groups()))) if found else 0.0
    minis = re.search(r"(\d+) mini-updates", notes)
    train = samples // int(minis[1]) if minis else int(number(row, "train_samples", samples))
    job = job_of_row(row, samples, prompt, mean, cap, train)
    fleet = uniform(gpus, device)
    packing = Packing(tokens=2 * job.longest_tokens, forward_tokens=4 * job.longest_tokens, balanced=True)
    tp = whole(row, "train_tp", 1)
    cuts = verl.fsdp(job, fleet.slots, packing) if tp == 1 else verl.megatron(job, fleet.slots, tp, 1, packing)
    engines = verl.engines_of(fleet.slots, whole(row, "gen_tp", verl.DEFAULT_TP), 0.5, NEMO_SEQUENCES)
    step = simulated(job, verl.setup_of("stated", cuts, engines), fleet, batches(job, prompt, mean))
    return _row(row, "verl", gpus, device.name, "sync", step)


def openrlhf_range(row: Record) -> tuple[Record, list[float]]:
    """A row of OpenRLHF, and the step under every choice of what it does not state."""
    gpus, device, shape = whole(row, "num_gpus"), device_of(row), shape_of_row(row)
    fleet, samples = uniform(gpus, device), whole(row, "global_batch")
    job = RlJob(
        actor=shape, critic=critic_shape(shape), reference=shape, samples=samples, mini_batches=8,
        most_prompt_tokens=whole(row, "prompt_len"), most_response_tokens=whole(row, "response_len"),
    )  # fmt: skip
    found: list[float] = []
    for share in (0.25, 0.5, 1.0):
        lengths = batches(job, share * job.most_prompt_tokens, share * job.most_response_tokens)[:1]
        for parts in openrlhf.PARTS:
            for tp in (1, 2, 4):
                for host_adam in (True, False):
                    packing = Packing(samples=2, forward_samples=4)
                    setup = openrlhf.apart("row", job, fleet, packing, parts=parts, tp=tp, host_adam=host_adam)
                    if setup is not None:
                        found.append(simulated(job, setup, fleet, lengths).seconds)
    return row, found


Ranges = Sequence[tuple[Record, list[float]]]


def read(folder: Path) -> tuple[list[Row], list[tuple[str, str]], list[tuple[Record, list[float]]]]:
    """Rows that could be simulated, (system, rule) of those left out, and OpenRLHF's with their ranges."""
    records = read_table(folder, "perf_points.csv")
    records += [rl_row(row) for row in read_table(folder, "rl_step_points.csv")]
    rows: list[Row] = []
    left: list[tuple[str, str]] = []
    ranges: list[tuple[Record, list[float]]] = []
    seen: set[tuple[object, ...]] = set()
    for row in records:
        system = row["system"].split("/")[0]
        if not row["step_time_s"] or "weight sync only" in row["notes"]:
            continue
        try:
            if system == "OpenRLHF" and "estimate" not in row["notes"]:
                ranges.append(openrlhf_range(row))
                continue
            if system not in ("NeMo-RL", "verl"):
                raise Unusable("another system: what it does is not modelled")
            found = nemo(row) if system == "NeMo-RL" else verl_row(row)
        except (Unusable, ValueError) as rule:
            left.append((system, str(rule)))
            continue
        key = (found.system, found.gpus, found.device, found.kind, found.measured_seconds)
        if key not in seen:
            rows.append(found)
        seen.add(key)
    return rows, left, ranges


def pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Rows of one model and system that differ in fleet or in being one step off, with measured times 3 % apart or more."""
    for i, one in enumerate(rows):
        for other in rows[i + 1 :]:
            alike = one.name == other.name and one.system == other.system
            differs = (one.gpus, one.device, one.kind) != (other.gpus, other.device, other.kind)
            if alike and differs and abs(one.measured_seconds / other.measured_seconds - 1) > 0.03:
                yield one, other


def kept_order(rows: Sequence[Row]) -> tuple[int, int]:
    """Pairs in which the simulated world has the faster one right, and all pairs."""
    found = list(pairs(rows))
    right = sum((a.step.seconds < b.step.seconds) == (a.measured_seconds < b.measured_seconds) for a, b in found)
    return right, len(found)


def numbers(rows: Sequence[Row], left: Sequence[tuple[str, str]], ranges: Ranges) -> Iterator[Number]:
    """What the figure of analysis/accuracy.py is drawn from."""
    for row in rows:
        variant = f"{row.name.strip()}, {row.gpus}x{row.device}, {row.kind}, {row.measured_seconds:g} s"
        yield row.system, variant, "published/step_seconds", row.measured_seconds
        yield row.system, variant, "simulated/step_seconds", row.step.seconds
        yield row.system, variant, "gpus", row.gpus
        yield row.system, variant, "one_step_off", row.kind == "1-off"
    for row, found in ranges:
        variant = f"{row['model']}, {row['num_gpus']}x{row['gpu']}, {row['step_time_s']} s"
        yield "OpenRLHF", variant, "published/step_seconds", number(row, "step_time_s")
        yield "OpenRLHF", variant, "simulated/least_seconds", min(found)
        yield "OpenRLHF", variant, "simulated/most_seconds", max(found)
    for kind, chosen in (("sync", ("sync",)), ("sync and one step off", ("sync", "1-off"))):
        right, count = kept_order([row for row in rows if row.kind in chosen])
        yield "order", kind, "pairs_right_count", right
        yield "order", kind, "pairs_count", count
    for rule in sorted(set(left)):
        yield "left out", f"{rule[0]}: {rule[1]}", "rows_count", left.count(rule)


def text(rows: Sequence[Row], left: Sequence[tuple[str, str]], ranges: Ranges) -> str:
    """All tables."""
    lines = ["published and simulated step times (seconds); no row was fitted to", ""]
    lines.append(
        f"{'row':<46} {'GPUs':<11} {'kind':<5} {'published':>9} {'simulated':>9} {'error':>7}  phases: published, simulated"
    )
    for row in sorted(rows, key=lambda r: (r.system, r.kind, r.name, r.gpus)):
        phases = row.step.phases
        ours = {
            "gen": phases["gen"] + phases["update_weights"] * (row.system == "verl"),
            "logprob": sum(phases.get(name, 0.0) for name in ("old_log_prob", "ref", "values")),
            "train": phases["update_actor"] + phases.get("update_critic", 0.0),
        }
        told = ", ".join(f"{name} {value:.0f} {ours[name]:.0f}" for name, value in row.measured.items())
        told = told or ", ".join(f"{name} {value:.0f}" for name, value in ours.items())
        head = f"{row.system + ' ' + row.name:<46.46} {f'{row.gpus}x{row.device}':<11} {row.kind:<5}"
        lines.append(f"{head} {row.measured_seconds:9.1f} {row.step.seconds:9.1f} {row.error_share:+7.1%}  {told}")
    lines.append("")
    for name, chosen, bound in (
        ("all, synchronous", [r for r in rows if r.kind == "sync"], 0.15),
        ("all, with one step off", rows, 0.15),
        ("verl, stated configuration", [r for r in rows if r.system == "verl"], 0.20),
    ):
        if chosen:
            middle = median(abs(r.error_share) for r in chosen)
            lines.append(f"median error, {name}: {middle:.1%} of {len(chosen)} rows (goal: at most {bound:.0%})")
    for name, kinds in (("fleets", ("sync",)), ("fleets, and one step off against synchronous", ("sync", "1-off"))):
        right, count = kept_order([r for r in rows if r.kind in kinds])
        lines.append(f"rank order, {name}: {right} of {count} pairs")
    lines += ["", "OpenRLHF: published, and the range over what the row does not state"]
    for row, found in ranges:
        inside = "inside" if min(found) <= number(row, "step_time_s") <= max(found) else "outside"
        head = f"{row['model']} {row['num_gpus']}x{row['gpu']}"
        lines.append(
            f"  {head:<32} {row['step_time_s']:>8} s, {min(found):.0f} to {max(found):.0f} s of {len(found)} choices: {inside}"
        )
    lines += [
        "  (published 2024-05 to 2025-06 and before 0.11.2; a reward model of the same size is not in the range)",
        "",
        "MI300X and H20 have no tables of their own here: H100's, scaled by the rates that they reach",
    ]
    lines += ["", "left out"]
    for rule in sorted(set(left)):
        lines.append(f"  {left.count(rule):>4} {rule[0]:<20} {rule[1]}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The simulated world against published RL step times.")
    parser.add_argument(
        "--points", required=True, metavar="DIR", help="a folder with perf_points.csv, rl_step_points.csv"
    )
    parser.add_argument("--table", metavar="FILE", help="write the numbers of analysis/accuracy.py here")
    asked = parser.parse_args()
    known = read(Path(asked.points))
    print(text(*known))
    if asked.table:
        told = "python -m benchmarks.published_steps --points DIR --table FILE"
        write_numbers(Path(asked.table), "accuracy", numbers(*known), command=told, measured=False)
