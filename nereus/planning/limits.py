"""How far a plan holds: the longest responses with which it still fits, and when a trend is past them."""

from __future__ import annotations

from dataclasses import replace

from nereus.forecast import Passing, Trend, first_passing
from nereus.planning.evaluate import Problem, evaluate
from nereus.planning.plan import GlobalPlan


def grown(problem: Problem, factor: float) -> Problem:
    """The problem with all responses this many times as long, the longest one too."""
    job = problem.job
    longest = job.prompt_tokens + factor * (job.longest_tokens - job.prompt_tokens)
    return replace(problem, job=replace(job, lengths=job.lengths.scaled(factor), longest_tokens=longest))


def room_to_grow(problem: Problem, plan: GlobalPlan, *, most: float = 64.0, precision_share: float = 0.01) -> float:
    """The largest factor by which responses may grow with the plan still fitting, at most `most`; 0 if it does not fit.

    Longer responses never need less, so halving finds it; the answer is at most `precision_share` too low.
    """
    if not evaluate(problem, plan).fits:
        return 0.0
    low, high = 1.0, most
    if evaluate(grown(problem, most), plan).fits:
        return most
    while high / low > 1 + precision_share:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if evaluate(grown(problem, middle), plan).fits else (low, middle)
    return low


def will_not_fit(
    problem: Problem, plan: GlobalPlan, lengths: Trend, *, steps: int, confidence_share: float = 0.9
) -> Passing | None:
    """Within how many of the next `steps` steps the plan will no longer fit, by the trend of mean response lengths.

    None where that is not to be expected with this confidence. A plan that does not fit now passes at the next step.
    """
    bound = problem.job.lengths.mean_tokens * room_to_grow(problem, plan)
    return first_passing(lengths, bound, steps=steps, confidence_share=confidence_share)
