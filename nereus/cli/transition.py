"""`nereus transition`: what a change of layout, or a weight sync, would move on a fleet, and the least it could take."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from nereus.cli.models import load_model
from nereus.config import ModelConfig
from nereus.errors import ConfigError, near
from nereus.layout import ORDERS, Layout, Stage, StagePlan, equal_shares, layout_problem
from nereus.model import Head, ModelSpec, model_spec

if TYPE_CHECKING:
    from nereus.fleet import Fleet
    from nereus.report.transition import MovementReport
    from nereus.report.transition_graph import ScheduledChange

HEADS: dict[str, Head] = {"actor": "language", "critic": "value"}
DEGREES = ("tp", "pp", "dp", "cp", "ep", "etp")
KEYS = (*DEGREES, "order", "pipeline")
EXAMPLE = "tp=2,pp=2,dp=4"
EPILOG = """\
A LAYOUT is key=value, separated by commas; what is left out is 1:
  tp pp dp cp ep   degrees of tensor, pipeline, data, context and expert parallelism
  etp              in how many parts an expert is cut (left out: as tp)
  pipeline         layers of each pipeline rank, such as 15/17 (left out: as equal as possible)
  order            of ranks, the fastest first: tp-cp-ep-dp-pp or tp-cp-ep-pp-dp
and after an @ the slots: of --from and --generate in the order of the ranks, of --to those that it may take. Left
out: the first slots of the fleet; for --to any. Slots are numbered through the fleet from 0, node by node.

  nereus transition --model llama-3.1-8b --from tp=8,dp=2 --to tp=2,pp=2,dp=4 --fleet 16xh100
  nereus transition --model qwen3-30b-a3b --from tp=4,dp=2,ep=8,etp=1@0-7 --to tp=2,dp=4,ep=8,etp=1@8-15 \\
      --fleet 8xh100,8xa100 --slots
  nereus transition --model llama-3.1-8b --sync --from tp=4,pp=2,dp=2 --to tp=2,dp=8 --fleet 16xh100 --steps 1000
  nereus transition --model llama-3.1-8b --from tp=8,dp=2 --to tp=2,pp=2,dp=4 --fleet 16xh100 --reserve-gb 20 \\
      --graph graph.json --timeline timeline.perfetto.json

With --mode, --graph, --timeline, --reserve-gb or --engine-seconds the change is ordered within the slots' memory, proven
and priced: see the timeline at ui.perfetto.dev or chrome://tracing. A host is taken to have the memory of its slots.
"""
GB = 1_000_000_000
MOST = 1e6  # gigabytes, seconds
SCHEDULED = ("mode", "graph", "timeline", "reserve_gb", "engine_seconds")
FILES = {"graph": "the graph", "timeline": "the timeline, for ui.perfetto.dev or chrome://tracing"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A layout and the slots named for it (empty: none named), as asked for by `key`, and the text that said so."""

    key: str
    text: str
    layout: Layout
    slots: tuple[int, ...]


def add_transition(parser: ArgumentParser) -> None:
    """The arguments of `nereus transition`."""
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.usage = "nereus transition --model NAME --from LAYOUT --to LAYOUT --fleet FLEET [options]"
    parser.epilog = EPILOG
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="a shipped model, a Hugging Face config.json, or its folder")
    add("--from", required=True, metavar="LAYOUT", dest="before", help="the layout now, such as tp=8,dp=2")
    add("--to", required=True, metavar="LAYOUT", dest="after", help=f"the layout wanted, such as {EXAMPLE}")
    add("--fleet", required=True, help="such as 16xh100, or 8xh100,8xa100-40")
    add("--models", default="actor", metavar="a,b", help="actor, critic or both, each cut like that (default: actor)")
    add("--stage", choices=("train", "generate"), help="train: with masters and moments (default); generate: weights")
    add("--sync", action="store_true", help="the weight sync of a step: --from trains, --to generates")
    add("--optimizer", choices=("zero1", "replicated"), default="zero1", help="how it is kept (default: zero1)")
    add(
        "--placement",
        choices=("cost", "total_bytes", "inter_node_bytes", "identity"),
        default="cost",
        help="what the choice of slots minimises (default: cost, with --generate over --steps); identity: none",
    )
    add("--generate", metavar="LAYOUT", help="a generation that stays and gets the actor's weights every step")
    add("--steps", type=int, default=100, metavar="N", help="horizon of the weight sync (default: 100)")
    add(
        "--mode",
        choices=("beside", "snapshot"),
        help="old state stays until the commit (default), or goes to the hosts",
    )
    add("--graph", metavar="FILE", help="write the operations, what they wait for and what each takes, as JSON")
    add("--timeline", metavar="FILE", help="write when each operation runs, as a Perfetto trace (Chrome JSON)")
    add("--reserve-gb", type=float, metavar="N", help="memory of a slot that a step's phases need (default: 0)")
    add(
        "--engine-seconds",
        type=float,
        metavar="N",
        help="to build an engine (default: 5 in training, 45 in generation)",
    )
    add("--slots", action="store_true", help="each slot too")
    add("--json", action="store_true", help="print JSON")


def transition(arguments: Namespace) -> int:
    """Carries the command out: 0. Raises ConfigError."""
    from nereus.report.schedule_text import schedule_json, schedule_text
    from nereus.report.transition_text import Model, as_json, render

    config = load_model(arguments.model)
    spec = model_spec("actor", config)
    _check_schedule(arguments)
    report = report_of(arguments, config)
    change = _scheduled(arguments, report)
    model = Model(name=arguments.model, parameters_count=spec.parameters, dtype=config.dtype)
    if arguments.json:
        values = as_json(report, model, slots=arguments.slots)
        print(json.dumps(values if change is None else values | {"schedule": schedule_json(change)}, indent=1))
        return 0
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # layouts are written with a middle dot
    print(render(report, model, slots=arguments.slots), end="")
    if change is not None:
        print("\n" + schedule_text(change, {name: getattr(arguments, key) for key, name in FILES.items()}), end="")
    return 0


def _check_schedule(arguments: Namespace) -> None:
    """ConfigError for options of the schedule that do not go together or cannot be."""
    for name in SCHEDULED:
        value, key = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if arguments.sync and value is not None:
            raise ConfigError(key, value, "expected none with --sync: a sync has no graph")
        if isinstance(value, float) and not 0 <= value < MOST:
            raise ConfigError(key, value, f"expected a number from 0 to {MOST:,.0f}")
    if arguments.graph is not None and arguments.graph == arguments.timeline:
        raise ConfigError("--timeline", arguments.timeline, "expected another file than --graph's")


def _scheduled(arguments: Namespace, report: MovementReport) -> ScheduledChange | None:
    """The change ordered, proven and priced, and written where it is asked for."""
    if all(getattr(arguments, name) is None for name in SCHEDULED):
        return None
    from nereus.report.perfetto import trace
    from nereus.report.transition_graph import scheduled

    if all((s.before.layout, s.before.slots) == (s.after.layout, s.after.slots) for s in report.stages):
        raise ConfigError("--to", arguments.after, "expected another layout or other slots: nothing changes, no graph")
    change = scheduled(
        report,
        mode=arguments.mode or "beside",
        reserve_bytes=round((arguments.reserve_gb or 0.0) * GB),
        engine_seconds=arguments.engine_seconds,
    )
    if arguments.graph is not None:
        write_json("--graph", arguments.graph, change.graph.data())
    if arguments.timeline is not None:
        write_json("--timeline", arguments.timeline, trace(change.graph, change.schedule, change.durations))
    return change


def write_json(key: str, name: str, values: Mapping[str, object]) -> None:
    """Writes a file that appears whole or not at all, in the place of what was there. Raises ConfigError."""
    path = Path(name)
    beside = path.with_name(f".{path.name}.{os.getpid()}") if path.name else path
    if path.exists() and not path.is_file():
        raise ConfigError(key, name, "expected a file to write, not a folder or a device")
    try:
        beside.write_text(json.dumps(values, separators=(",", ":")) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise ConfigError(key, name, f"expected a file to write: {error.strerror}") from error


def report_of(arguments: Namespace, config: ModelConfig) -> MovementReport:
    """What the command line asks for, computed. Raises ConfigError."""
    from nereus.fleet import parse_fleet
    from nereus.report.transition import change_report, sync_report
    from nereus.transfer.placement import StageMove  # scipy takes a second

    fleet = parse_fleet(arguments.fleet)
    models, before_stage, after_stage = _asked(arguments)
    sharded = arguments.optimizer == "zero1"
    before = parse_layout(arguments.before, "--from", config, before_stage, sharded=sharded)
    after = parse_layout(arguments.after, "--to", config, after_stage, sharded=sharded)
    objective, steps = arguments.placement, arguments.steps
    if arguments.sync:
        train, generate = stage_plan(before, "actor", "train", fleet), _free(after, "actor", "generate", fleet)
        return sync_report(
            model_spec("actor", config), train, generate, fleet, objective=objective, horizon_steps=steps
        )
    moves = {
        f"{name}_{after_stage}": StageMove(
            spec=_spec(name, config),
            before=stage_plan(before, name, before_stage, fleet),
            after=_free(after, name, after_stage, fleet),
        )
        for name in models
    }
    standing = None
    if arguments.generate is not None:
        cut = parse_layout(arguments.generate, "--generate", config, "generate", sharded=False)
        standing = stage_plan(cut, "actor", "generate", fleet)
    return change_report(moves, fleet, objective=objective, horizon_steps=steps, generate=standing)


def _asked(arguments: Namespace) -> tuple[list[str], Stage, Stage]:
    """The models and the stages before and after; refuses options that do not go together."""
    models = [name.strip() for name in arguments.models.split(",")]
    for name in models:
        if name not in HEADS:
            raise ConfigError("--models", arguments.models, f"unknown model {name!r}; {near(name, HEADS)}")
    if len(set(models)) < len(models):
        raise ConfigError("--models", arguments.models, "expected each model once")
    if arguments.steps < 1:
        raise ConfigError("--steps", arguments.steps, "expected at least 1")
    generates = arguments.sync or arguments.stage == "generate"
    if generates and models != ["actor"]:
        raise ConfigError("--models", arguments.models, "expected actor: no other model generates")
    if arguments.sync and arguments.stage is not None:
        raise ConfigError("--stage", arguments.stage, "expected none with --sync: it goes from train to generate")
    if arguments.sync and arguments.placement not in ("cost", "identity"):
        raise ConfigError("--placement", arguments.placement, "expected cost or identity with --sync")
    if arguments.generate is not None and (generates or "actor" not in models):
        raise ConfigError("--generate", arguments.generate, "expected only where the actor's training stage changes")
    if arguments.sync:
        return models, "train", "generate"
    stage: Stage = arguments.stage or "train"
    return models, stage, stage


def _spec(name: str, config: ModelConfig) -> ModelSpec:
    return model_spec(name, config, HEADS[name])


def parse_layout(text: str, key: str, config: ModelConfig, stage: Stage, *, sharded: bool) -> Cut:
    """The layout in `text`, judged for the model. Raises ConfigError with `key`: what is wrong and what would do."""
    cut, at, slots = text.partition("@")
    words: dict[str, str] = {}
    for word in cut.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not value:
            raise ConfigError(key, text, f"expected key=value, such as {EXAMPLE}, in the place of {word.strip()!r}")
        if name not in KEYS:
            raise ConfigError(key, text, f"unknown key {name}; {near(name, KEYS)}")
        if name in words:
            raise ConfigError(key, text, f"{name} is said twice")
        words[name] = value
    degrees = {name: _whole(key, text, name, words[name]) for name in DEGREES if name in words}
    parts = words["pipeline"].split("/") if "pipeline" in words else []
    pipeline = tuple(_whole(key, text, "pipeline", part) for part in parts)
    pp = degrees.get("pp", len(pipeline) or 1)
    if pp > config.layers:
        raise ConfigError(key, text, f"pp = {pp}: expected at most layers = {config.layers}")
    layout = Layout(
        tp=degrees.get("tp", 1),
        pp=pp,
        dp=degrees.get("dp", 1),
        pipeline=pipeline or equal_shares(config.layers, pp),
        distributed_optimizer=sharded and stage == "train",
        cp=degrees.get("cp", 1),
        ep=degrees.get("ep", 1),
        etp=degrees.get("etp"),
        order=words.get("order", ORDERS[0]),
    )
    problem = layout_problem(config, layout, stage)
    if problem is not None:
        raise ConfigError(key, text, problem)
    return Cut(key=key, text=text, layout=layout, slots=_slot_numbers(key, text, slots) if at else ())


def _whole(key: str, text: str, name: str, value: str) -> int:
    if not re.fullmatch(r"\d{1,6}", value, re.ASCII) or int(value) < 1:
        raise ConfigError(key, text, f"{name} = {value}: expected a whole number, at least 1")
    return int(value)


def _slot_numbers(key: str, text: str, listed: str) -> tuple[int, ...]:
    """The slots of "0-3,8": runs and single ones, in this order."""
    slots: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(key, text, f"expected slots after @, such as 0-7,12, in the place of {part.strip()!r}")
        slots += range(int(match[1]), int(match[2] or match[1]) + 1)
    twice = sorted({slot for slot in slots if slots.count(slot) > 1}) if len(set(slots)) < len(slots) else []
    if twice:
        raise ConfigError(key, text, f"slot {twice[0]} is named twice")
    return tuple(slots)


def stage_plan(cut: Cut, model: str, stage: Stage, fleet: Fleet) -> StagePlan:
    """A stage that stands: on the named slots or the first of the fleet. Raises ConfigError where they do not fit."""
    allowed = _free(cut, model, stage, fleet)
    ranks = cut.layout.ranks
    if cut.slots and len(cut.slots) != ranks:
        raise ConfigError(cut.key, cut.text, f"expected {ranks} slots after @, one for each rank; got {len(cut.slots)}")
    return _planned(cut, model, stage, allowed.slots[:ranks])


def _free(cut: Cut, model: str, stage: Stage, fleet: Fleet) -> StagePlan:
    """A stage and the slots that it may take: the named ones or any. Raises ConfigError where they are too few."""
    unknown = [slot for slot in cut.slots if slot not in fleet.device_of]
    if unknown:
        known = f"{fleet.slots[0]} to {fleet.slots[-1]}"
        raise ConfigError(cut.key, cut.text, f"slot {unknown[0]} is not in the fleet {fleet}, which has {known}")
    allowed = cut.slots or fleet.slots
    ranks = cut.layout.ranks
    if ranks > len(allowed):
        where = "are named after @" if cut.slots else f"are in the fleet {fleet}"
        replica = ranks // cut.layout.dp
        most = len(allowed) // replica
        fits = f"there is room for dp = {most} at most" if most else f"one replica takes {replica}"
        raise ConfigError(cut.key, cut.text, f"takes {ranks} slots, {len(allowed)} {where}; {fits}")
    return _planned(cut, model, stage, allowed)


def _planned(cut: Cut, model: str, stage: Stage, slots: tuple[int, ...]) -> StagePlan:
    return StagePlan(
        model=model, stage=stage, layout=cut.layout, slots=slots, shares=(1,) * cut.layout.dp, micro_batch=1
    )
