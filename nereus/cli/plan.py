"""`nereus plan`: the best global plans for a job on a fleet, or whether one given plan fits. Nothing is started.

The job is that of a run's configuration, or is given by options. Predictions are the cost model's priors, fitted to public
measurements; no running job has corrected them.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nereus.errors import ConfigError, near

if TYPE_CHECKING:  # numpy is not loaded for --help
    from nereus.config import Config
    from nereus.costs.rates import Rates
    from nereus.fleet import Fleet
    from nereus.planning.evaluate import Evaluation, Problem
    from nereus.planning.job import Job, PlannedModel
    from nereus.planning.plan import GlobalPlan
    from nereus.planning.space import Space

DONE, FAILED = 0, 1
ALGORITHMS = {"ppo": 1, "grpo": 8}
"""Algorithm -> samples of a prompt where nobody says."""
PEERS = ("verl", "openrlhf", "nemo-rl")
GIVEN = ("fleet", "prompt", "response", "batch")


def add_plan(parser: ArgumentParser) -> None:
    """What the command takes."""
    parser.usage = (
        "nereus plan (CONFIG [key=value ...] | --model MODEL --fleet FLEET ...) [--check PLAN] [--export PEER]"
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG", help="a run's YAML file, then overrides")
    parser.add_argument("--model", metavar="MODEL", help="a shipped model's name, a config.json or a folder with one")
    parser.add_argument("--algo", default="ppo", metavar="ALGORITHM", help="ppo (with a critic) or grpo")
    parser.add_argument("--fleet", metavar="FLEET", help="such as 16xh100 or 8xh100,8xa100-40")
    parser.add_argument("--prompt", type=int, metavar="TOKENS", help="prompt length")
    parser.add_argument("--response", type=int, metavar="TOKENS", help="the longest response")
    parser.add_argument("--mean-response", type=float, metavar="TOKENS", help="their mean (default: half the longest)")
    parser.add_argument("--batch", type=int, metavar="PROMPTS", help="prompts of a step")
    parser.add_argument("--samples", type=int, metavar="N", help="responses to a prompt (default: ppo 1, grpo 8)")
    parser.add_argument("--mini-batches", type=int, default=4, metavar="N", help="optimizer steps of a step (4)")
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="passes over the batch (1)")
    parser.add_argument("--critic", metavar="MODEL", help="default: the actor's model")
    parser.add_argument("--reference", metavar="MODEL|none", help="default: the actor's model")
    parser.add_argument("--reward", default="rule", metavar="MODEL|rule", help="default: a rule")
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="of a node (default: 128 GiB for each slot)")
    parser.add_argument("--off-policy", action="store_true", help="generation may run one step ahead, on its own slots")
    parser.add_argument("--top", type=int, default=3, metavar="N", help="how many plans to show (3)")
    parser.add_argument(
        "--check", metavar="PLAN", help="judge this plan (its text or a file): exit code 1 if it does not fit"
    )
    parser.add_argument("--export", metavar="PEER", help="print the plan as flags of verl, openrlhf or nemo-rl")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is to be planned, how it is named in the output, and the model's name where it has one."""

    problem: Problem
    space: Space
    title: str
    model: str
    samples_per_prompt: int
    config: Config | None = None


def plan(arguments: Namespace) -> int:
    """Prints the plans; exit code 1 when nothing fits, or when the given plan does not."""
    if arguments.top < 1:
        raise ConfigError("--top", arguments.top, "expected at least 1")
    if arguments.export is not None and arguments.export not in PEERS:
        raise ConfigError(
            "--export", arguments.export, f"expected one of {', '.join(PEERS)}; {near(arguments.export, PEERS)}"
        )
    if arguments.export is not None and arguments.words:
        raise ConfigError("--export", arguments.export, "expected --model: a CONFIG's model is made for this runtime")
    asked = _from_config(arguments.words) if arguments.words else _from_options(arguments)
    return _check(arguments, asked) if arguments.check is not None else _search(arguments, asked)


def _check(arguments: Namespace, asked: Asked) -> int:
    from nereus.planning.evaluate import evaluate
    from nereus.report.plan_text import check_text, evaluation_values

    judged = evaluate(asked.problem, _given_plan(arguments.check, asked))
    if arguments.export is not None and judged.fits:
        print(_exported(arguments.export, asked, judged))
    elif arguments.json:
        print(json.dumps({"job": asked.title, **evaluation_values(judged)}, indent=1))
    else:
        print(asked.title)
        print(check_text(judged), end="")
    return DONE if judged.fits else FAILED


def _search(arguments: Namespace, asked: Asked) -> int:
    from nereus.planning.evaluate import evaluate
    from nereus.planning.search import search
    from nereus.report.plan_text import check_text, evaluation_values, search_text, search_values

    if arguments.export is not None:
        print(_best_exported(arguments.export, asked))
        return DONE
    result = search(asked.problem, space=asked.space, top_count=arguments.top, with_misses=True)
    judged = [evaluate(asked.problem, each.plan) for each in result.candidates]
    own = None if asked.config is None else _configured(asked.problem, asked.config)
    if arguments.json:
        values = search_values(result, judged)
        if own is not None:
            values["configured"] = evaluation_values(own)
        print(json.dumps({"job": asked.title, **values}, indent=1))
    else:
        print(asked.title)
        print(search_text(result, judged), end="")
        if own is not None:
            print(f"\nthe configured plan\n{check_text(own)}", end="")
    return DONE if judged else FAILED


def _configured(problem: Problem, config: Config) -> Evaluation:
    """The plan that the configuration starts with."""
    from nereus.layout import first_plan
    from nereus.planning.evaluate import evaluate
    from nereus.planning.slots import global_plan

    return evaluate(problem, global_plan(config, first_plan(config)))


def _exported(peer: str, asked: Asked, judged: Evaluation) -> str:
    """The judged plan as a peer's flags. Raises ConfigError for what the peer cannot express."""
    from nereus.report.exports import nemo_rl, openrlhf, verl
    from nereus.report.exports.peer import Export

    export = Export(
        job=asked.problem.job,
        judged=judged,
        fleet=asked.problem.terrain.fleet,
        model_path=asked.model,
        samples_per_prompt=asked.samples_per_prompt,
    )
    return {"verl": verl.flags, "openrlhf": openrlhf.flags, "nemo-rl": nemo_rl.flags}[peer](export)


def _best_exported(peer: str, asked: Asked) -> str:
    """The fastest plan that the peer can express, as its flags. Raises the first refusal where there is none."""
    from nereus.planning.evaluate import evaluate
    from nereus.planning.search import search
    from nereus.report.exports.peer import even_spaces

    found: list[tuple[float, str]] = []
    refused: ConfigError | None = None
    for space in even_spaces(asked.problem.job, asked.problem.terrain.fleet):
        for each in search(asked.problem, space=space, top_count=3).candidates:
            try:
                found.append((each.step_seconds, _exported(peer, asked, evaluate(asked.problem, each.plan))))
            except ConfigError as error:
                refused = refused or error
    if found:
        return min(found)[1]
    raise refused or ConfigError("--export", peer, f"no plan that {peer} can express fits")


def _given_plan(text: str, asked: Asked) -> GlobalPlan:
    """The plan of a text, or of a file with that text or with what --json prints."""
    from nereus.planning.plan import parse_plan

    job, slots = asked.problem.job, asked.problem.terrain.ordered()
    if "=" not in text or Path(text).is_file():
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--check", text, f"expected a plan's text or a readable file: {error}") from error
        if text.lstrip().startswith("{"):
            text = _plan_of_json(text)
    models = {name: job.model(name).config for name in job.stages()}
    return parse_plan(text, job.stages(), models, slots)


def _plan_of_json(text: str) -> str:
    try:
        found = json.loads(text)
        found = found["plans"][0] if "plans" in found else found
        return str(found["plan"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError("--check", text[:40], "expected JSON as `nereus plan --json` prints it") from error


def _from_config(words: list[str]) -> Asked:
    from nereus.cli.load import load_config
    from nereus.planning.slots import problem_of, space_of
    from nereus.validate import validate

    config = load_config(Path(words[0]), words[1:])
    validate(config)
    problem = problem_of(config)
    slots = config.fleet.slots
    title = f"{words[0]}: {_job_text(problem.job)} on {slots} CPU slots; their rates are rough until a job has run"
    return Asked(
        problem=problem,
        space=space_of(config),
        title=title,
        model=config.model.folder,
        samples_per_prompt=config.data.samples_per_prompt,
        config=config,
    )


def _from_options(arguments: Namespace) -> Asked:
    from nereus.costs.host import HOST_BYTES_PER_SLOT
    from nereus.fleet import parse_fleet
    from nereus.planning.evaluate import Problem
    from nereus.planning.ground import Terrain
    from nereus.planning.space import Space

    if arguments.model is None:
        raise ConfigError("plan", None, "expected a CONFIG, or --model with --fleet, --prompt, --response and --batch")
    for name in GIVEN:
        if getattr(arguments, name) is None:
            raise ConfigError(f"--{name}", None, "is missing: --model needs --fleet, --prompt, --response and --batch")
    if arguments.algo not in ALGORITHMS:
        raise ConfigError("--algo", arguments.algo, f"expected one of {', '.join(ALGORITHMS)}")
    _at_least_one(arguments, ("prompt", "response", "batch", "mini_batches", "epochs", "samples"))
    samples = arguments.samples or ALGORITHMS[arguments.algo]
    fleet = parse_fleet(arguments.fleet)
    host = HOST_BYTES_PER_SLOT
    if arguments.host_memory is not None:
        if not arguments.host_memory > 0:
            raise ConfigError("--host-memory", arguments.host_memory, "expected GiB of a node, above 0")
        host = arguments.host_memory * 1024**3 / max(len(node.slots) for node in fleet.nodes)
    job = _job(arguments, samples)
    rates, tables = _measured_rates(fleet)
    problem = Problem(job=job, terrain=Terrain(fleet=fleet, rates=rates, host_bytes_per_slot=host))
    title = "\n".join([f"{arguments.model}, {arguments.algo}, {fleet}: {_job_text(job)}", *tables])
    return Asked(problem=problem, space=Space(), title=title, model=arguments.model, samples_per_prompt=samples)


def _measured_rates(fleet: Fleet) -> tuple[dict[str, Rates], list[str]]:
    """What installed kernel tables tell of devices without rates of their own, and lines that name the tables used."""
    from nereus.cli.kernel_tables import SYSTEMS, installed_tables, table_rates

    devices = {node.device.name: node.device for node in fleet.nodes}
    folder = installed_tables() if devices.keys() & SYSTEMS.keys() else None
    if folder is None:
        return {}, []
    rates, sources = table_rates(devices.values(), folder)
    return rates, [f"kernel tables: {source}" for source in sources]


def _at_least_one(arguments: Namespace, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", value, "expected a whole number, at least 1")


def _job(arguments: Namespace, samples: int) -> Job:
    from nereus.cli.models import load_model
    from nereus.costs.generation import lognormal_lengths
    from nereus.planning.job import Job, language_model, scalar_model

    mean = arguments.response / 2 if arguments.mean_response is None else arguments.mean_response
    if not 0 < mean <= arguments.response:
        raise ConfigError("--mean-response", mean, f"expected above 0, at most --response = {arguments.response}")
    actor = load_model(arguments.model)

    def scalar(name: str | None) -> PlannedModel:
        return scalar_model(actor if name is None else load_model(name))

    if arguments.algo == "grpo" and arguments.critic is not None:
        raise ConfigError("--critic", arguments.critic, "expected none: GRPO has no critic")
    reference = None
    if arguments.reference != "none":
        reference = language_model(actor if arguments.reference is None else load_model(arguments.reference))
    return Job(
        actor=language_model(actor),
        critic=scalar(arguments.critic) if arguments.algo == "ppo" else None,
        reference=reference,
        reward=None if arguments.reward == "rule" else scalar(arguments.reward),
        samples=arguments.batch * samples,
        prompt_tokens=float(arguments.prompt),
        lengths=lognormal_lengths(mean, arguments.response),
        longest_tokens=float(arguments.prompt + arguments.response),
        mini_batches=min(arguments.mini_batches, arguments.batch * samples),
        epochs=arguments.epochs,
        on_policy=not arguments.off_policy,
    )


def _job_text(job: Job) -> str:
    tokens = (
        f"{job.prompt_tokens:.0f} + {job.lengths.mean_tokens:.0f} tokens on average, at most {job.longest_tokens:.0f}"
    )
    return f"{job.samples} samples of {tokens}, {job.mini_batches} mini-batches"
