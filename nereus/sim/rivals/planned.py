"""Nereus' side: the best plan of its own search, by its own cost model, as a Setup that is timed like the others."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from nereus.config import Config
from nereus.costs.calibrate import observe, start
from nereus.costs.coefficients import prior_for
from nereus.costs.generation import lognormal_lengths
from nereus.fleet import Fleet
from nereus.layout import STAGES
from nereus.planning.bytes import DeviceMemory
from nereus.planning.evaluate import Problem, engine_cache_bytes, evaluate
from nereus.planning.ground import TERMS, Terrain
from nereus.planning.job import Job, language_model, scalar_model
from nereus.planning.plan import GlobalPlan, StageChoice
from nereus.planning.search import SearchResult, search
from nereus.planning.slots import runtime_plan
from nereus.planning.space import Space
from nereus.sim.changes import sync_seconds
from nereus.sim.rivals.setups import Cut, Engines, Packing, Setup, job_of
from nereus.sim.rivals.stepping import SystemTimes
from nereus.sim.truth import Truth
from nereus.sim.workload import SimWorkload

TOP_COUNT, ROUNDS = 1, 8
MEASURED_AS = {
    "update_weights": "update_weights",
    "generate": "gen",
    "forward_actor": "old_log_prob",
    "forward_reference": "ref",
    "forward_critic": "values",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
    "framework": "reward",
}
"""The planner's phases under verl's names."""
SPACE = Space(shardings=("optimizer",))
"""What Megatron-core trains: weights whole on each rank of a layout, optimizer state shared out."""


def problem_on(config: Config, fleet: Fleet, prompt_tokens: float, response_tokens: float) -> Problem:
    """What the planner is asked: the configuration's job with these mean lengths. It knows no true times."""
    data = config.data
    return Problem(
        job=Job(
            actor=language_model(config.model),
            critic=scalar_model(config.model) if config.algorithm.adv_estimator == "gae" else None,
            reference=language_model(config.model),
            samples=data.prompts_per_step * data.samples_per_prompt,
            prompt_tokens=prompt_tokens,
            lengths=lognormal_lengths(response_tokens, data.max_response_tokens),
            longest_tokens=data.max_prompt_tokens + data.max_response_tokens,
            mini_batches=config.algorithm.mini_batches,
            epochs=config.algorithm.epochs,
        ),
        terrain=Terrain(fleet=fleet),
    )


def best_setup(config: Config, fleet: Fleet, problem: Problem, truth: Truth) -> tuple[Setup, SearchResult] | None:
    """The planner's best plan as a Setup, and what the search said; None where nothing fits."""
    found = search(problem, space=SPACE, top_count=TOP_COUNT)
    if found.best is None:
        return None
    return setup_of(config, fleet, problem, found.best.plan, truth), found


def settled_setup(
    config: Config, fleet: Fleet, problem: Problem, truth: Truth, workload: SimWorkload
) -> tuple[Setup, int] | None:
    """The plan that Nereus settles on in a running job, and how many it ran; None where nothing fits.

    Each plan runs a step; its phases, as measured, correct the beliefs, and the search goes on from them until it names a
    plan that has run, at most ROUNDS times. The fastest as measured stays. What changes of plan cost is not counted.
    """
    job, tried = job_of(config), dict[GlobalPlan, tuple[float, Setup]]()
    beliefs = {name: start(prior_for(TERMS, name, kind="rl")) for name in {d.name for d in fleet.device_of.values()}}
    slowness = truth.slowness(max(fleet.slots) + 1)
    for turn in range(1, ROUNDS + 1):
        known = replace(problem, terrain=replace(problem.terrain, beliefs=beliefs))
        found = search(known, space=SPACE, top_count=TOP_COUNT).best
        if found is None or found.plan in tried:
            break
        setup = setup_of(config, fleet, known, found.plan, truth)
        done = SystemTimes(job, setup, fleet, truth).step(turn, workload.batch(turn), slowness)
        tried[found.plan] = (done.seconds, setup)
        for phase in evaluate(known, found.plan).phases:
            for device in known.terrain.ground(found.plan.pools[phase.pool]).devices:
                beliefs[device] = observe(beliefs[device], phase.terms, done.phases[MEASURED_AS[phase.phase]])
    if not tried:
        return None
    return min(tried.values(), key=lambda each: each[0])[1].named("settled plan"), len(tried)


def setup_of(config: Config, fleet: Fleet, problem: Problem, plan: GlobalPlan, truth: Truth) -> Setup:
    """A global plan as a Setup."""
    choices = dict(plan.stages)
    engine = choices["actor_generate"]
    pool = plan.pools[engine.pool]
    critic, reference = choices.get("critic_train"), choices.get("reference_infer")
    return Setup(
        system="nereus",
        name="best plan",
        actor=_cut(problem, plan, choices["actor_train"]),
        critic=_cut(problem, plan, critic) if critic else None,
        reference=_cut(problem, plan, reference) if reference else None,
        engines=Engines(
            slots=pool[: engine.layout.ranks],
            tp=engine.layout.tp,
            replicas=engine.layout.dp,
            cache_bytes=_cache_bytes(problem, plan),
            sleeps=len(plan.sharing(engine.pool)) > 1,
            most_sequences=truth.most_sequences,
        ),
        sync="planned",
        planned_sync_seconds=_sync(config, fleet, plan, truth),
    )


def _cut(problem: Problem, plan: GlobalPlan, choice: StageChoice) -> Cut:
    """Micro-batches are packed up to the tokens that the planner's memory model counts."""
    layout, job = choice.layout, problem.job
    tokens = ceil(max(choice.micro_batch * job.sample_tokens, job.longest_tokens))
    return Cut(
        slots=plan.pools[choice.pool][: layout.ranks],
        tp=layout.tp,
        pp=layout.pp,
        dp=layout.dp,
        cp=layout.cp,
        ep=layout.ep,
        pipeline=layout.pipeline,
        sharding="full" if choice.sharding == "full" else "optimizer",
        packing=Packing(tokens=tokens, forward_tokens=tokens),
        recompute=choice.recompute == "full",
        offload={"all": "nothing", "weights": "optimizer", "nothing": "all"}[choice.keep],  # type: ignore[arg-type]
    )


def _cache_bytes(problem: Problem, plan: GlobalPlan) -> float:
    memory = DeviceMemory()
    grounds = [problem.terrain.ground(pool) for pool in plan.pools]
    sizes = {n: memory.stage(problem.job, n, choice) for n, choice in plan.stages if n != "actor_generate"}
    engine = memory.engine(problem.job, plan.stage("actor_generate").layout)
    return engine_cache_bytes(problem, plan, grounds, sizes, engine)


def _sync(config: Config, fleet: Fleet, plan: GlobalPlan, truth: Truth) -> float:
    """As the simulated world times a plan's weight sync. Stages that the job lacks stand where the actor does."""
    known = dict(plan.stages)
    whole = GlobalPlan(
        pools=plan.pools, stages=tuple((name, known.get(name, replace(known["actor_train"]))) for name in STAGES)
    )
    return sync_seconds(config, runtime_plan(config, whole), fleet, truth.link_share, truth.sync_tensor_seconds)
