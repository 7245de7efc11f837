"""Random switching problems: plans whose steps change in time, prices between them, a fleet; and a world that plays them.

The truth differs from what the policy may know: coefficients are off by 15 % and jump, every plan is off by 5 % of its
own, prices by 15 %, and steps have noise. Slots 0 to n - 1 are there when the fleet has n.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
import numpy.typing as npt

from nereus.control.controller import AdaptiveCommand, AdaptiveController, AdaptiveEvent, Record
from nereus.control.policies import Entry
from nereus.control.records import (
    Band,
    Candidate,
    Estimate,
    FleetChanged,
    Misfit,
    PriceEstimate,
    Search,
    SearchDone,
    SearchRequest,
    StepMeasured,
    candidate,
)
from nereus.costs.calibrate import Calibration, Prior, observe, start
from nereus.events import ChangePlan, Finish, JobReady, RunStep, TransitionDone
from nereus.fleet import uniform
from nereus.layout import Layout, Plan, StagePlan, equal_shares

Array = npt.NDArray[np.float64]
TERMS = ("compute", "exchange", "decode", "fixed")
FAMILIES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
SAMPLES = 64
TOKENS = 10_000
FORM_SHARE, COEFFICIENT_SHARE, PRICE_SHARE = 0.05, 0.15, 0.15
SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What kind of trace: `None` or 0 leaves a thing out."""

    steps: int = 300
    noise: float = 0.05
    fleet_every: float | None = None
    jump_every: float | None = None
    growth: float = 1.0
    start: str = "any"  # any, or best: the best first plan, in truth
    price: tuple[float, float] = (0.2, 10.0)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One problem. Arrays by [step, plan]; a step that a plan cannot run takes for ever."""

    plans: tuple[Plan, ...]
    degrees: tuple[tuple[int, int, int], ...]
    first: int
    fleet: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    terms: Array  # [step, plan, term] at coefficients of 1
    seconds: Array
    prices: Array  # [from, to]
    believed_prices: Array
    capacity: Array  # [plan] tokens
    index: dict[str, int] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()

    @property
    def feasible(self) -> npt.NDArray[np.bool_]:
        slots = np.array([tp * pp * dp for tp, pp, dp in self.degrees])
        return (slots[None, :] <= self.fleet[:, None]) & (self.tokens[:, None] <= self.capacity[None, :])


def plan_of(tp: int, pp: int, dp: int) -> Plan:
    layout = Layout(tp=tp, pp=pp, dp=dp, pipeline=equal_shares(8, pp))
    slots = tuple(range(layout.ranks))
    stages = {"actor_train": "train", "actor_generate": "generate", "critic_train": "train", "reference_infer": "infer"}
    return Plan(
        **{
            name: StagePlan(
                model=name.split("_")[0],
                stage=kind,  # pyright: ignore[reportArgumentType]
                layout=layout,
                slots=slots,
                shares=equal_shares(SAMPLES, dp),
                micro_batch=4,
            )
            for name, kind in stages.items()
        }
    )


def make(seed: int, shape: Shape) -> Trace:
    rng = np.random.default_rng([seed, 7])
    most = int(rng.choice([4, 8, 12, 16]))
    picked = rng.permutation(len(FAMILIES))[: rng.integers(2, 5)]
    families = sorted({FAMILIES[i] for i in picked} | {FAMILIES[rng.integers(3)]})
    degrees = tuple((tp, pp, dp) for tp, pp in families for dp in range(1, most // (tp * pp) + 1))
    steps, count = shape.steps, len(degrees)
    growth = shape.growth ** (np.arange(steps) / max(steps - 1, 1))
    tokens = (TOKENS * growth).astype(np.int64)
    base = _terms(degrees, rng)
    longer = np.stack([growth, growth, growth**1.2, np.ones(steps)], axis=1)
    terms = base[None] * longer[:, None, :]
    coefficients = np.tile(np.exp(rng.normal(0, COEFFICIENT_SHARE, len(TERMS))), (steps, 1))
    for step in _times(shape.jump_every, steps, rng):
        coefficients[step:, rng.integers(len(TERMS))] *= np.exp(rng.normal(0, 0.35))
    form = np.exp(rng.normal(0, FORM_SHARE, count))
    noise = np.exp(rng.normal(0, 1, (steps, count)) * shape.noise - shape.noise**2 / 2)
    clean = np.einsum("tkj,tj->tk", terms, coefficients) * form
    least = min(tp * pp for tp, pp, _ in degrees)
    capacity = _capacity(degrees, least, rng) if shape.growth > 1 else np.full(count, np.inf)
    typical = float(np.median(clean))
    prices = _prices(degrees, shape.price, rng) * typical
    off = np.exp(rng.normal(0, PRICE_SHARE, prices.shape))
    plans = tuple(plan_of(*d) for d in degrees)
    shown = tuple(candidate(p, PriceEstimate(mean_seconds=0, deviation_seconds=0, bound_seconds=0)) for p in plans)
    trace = Trace(
        plans=plans,
        degrees=degrees,
        first=0,
        fleet=_fleet(most, max(least, most // 3), shape, rng),
        tokens=tokens,
        terms=terms,
        seconds=clean * noise,
        prices=prices,
        believed_prices=prices * off,
        capacity=capacity,
        index={c.plan_id: k for k, c in enumerate(shown)},
        candidates=shown,
    )
    allowed = np.flatnonzero(trace.feasible[0])
    if shape.start == "best":  # dp-scaling can follow the fleet with it
        slim = np.array([tp * pp <= trace.fleet.min() for tp, pp, _ in degrees])
        allowed = np.flatnonzero(trace.feasible[0] & slim)
    best = int(allowed[np.argmin(clean[0, allowed])])
    first = best if shape.start == "best" else int(rng.choice(allowed))
    seconds = np.where(trace.feasible, trace.seconds, np.inf)
    return replace(trace, first=first, seconds=seconds)


def _times(every: float | None, steps: int, rng: np.random.Generator) -> list[int]:
    if every is None:
        return []
    return [int(t) for t in np.flatnonzero(rng.random(steps) < 1 / every) if t > 0]


def _terms(degrees: tuple[tuple[int, int, int], ...], rng: np.random.Generator) -> Array:
    work = rng.uniform(20, 120, 4) * np.array([1.0, 0.3, 0.15, 0.05])
    rows = []
    for tp, pp, dp in degrees:
        bubble = 1 + (pp - 1) / 8
        compute = work[0] * bubble / (tp * pp * dp)
        exchange = work[1] * (1 - 1 / tp) / (pp * dp) + 0.05 * work[1] * (1 - 1 / dp) / (tp * pp)
        decode = work[2] * (0.5 / (tp * pp * dp) ** 0.5 + 0.5 / tp**0.6)
        rows.append([compute, exchange, decode, work[3] * (1 + 0.2 * pp)])
    return np.array(rows)


def _fleet(most: int, least: int, shape: Shape, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    fleet = np.full(shape.steps, most, dtype=np.int64)
    for step in _times(shape.fleet_every, shape.steps, rng):
        choices = [n for n in range(least, most + 1) if n != fleet[step]]
        near = [n for n in choices if abs(n - fleet[step]) <= max(1, most // 4)] or choices
        fleet[step:] = rng.choice(near) if near else most
    return fleet


def _capacity(degrees: tuple[tuple[int, int, int], ...], least: int, rng: np.random.Generator) -> Array:
    """Tokens that fit: more with tensor and pipeline cuts; the families with the most cuts always fit."""
    cuts = np.array([tp * pp for tp, pp, _ in degrees])
    top = cuts.max()
    return np.where(cuts == top, np.inf, np.where(cuts == least, np.inf, TOKENS * rng.uniform(1.1, 2.5) * cuts / least))


def _prices(degrees: tuple[tuple[int, int, int], ...], price: tuple[float, float], rng: np.random.Generator) -> Array:
    level = float(np.exp(rng.uniform(*np.log(price))))
    pairs = level * rng.uniform(0.7, 1.3, (len(degrees), len(degrees)))
    for a, (tp, pp, _) in enumerate(degrees):
        for b, (tp2, pp2, _) in enumerate(degrees):
            if (tp, pp) == (tp2, pp2):
                pairs[a, b] *= 0.5
    np.fill_diagonal(pairs, 0.0)
    return pairs


# -- what the policy may know -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SwitchingOutlook:
    """Terms of the plans for the tokens last seen, and calibrated coefficients."""

    trace: Trace
    calibration: Calibration
    at: int = 0
    seen: tuple[int, ...] = ()

    @staticmethod
    def of(trace: Trace) -> SwitchingOutlook:
        return SwitchingOutlook(trace, start(Prior(means=dict.fromkeys(sorted(TERMS), 1.0))))

    def _believed(self, design: Array) -> Estimate:
        factors = np.array(self.calibration.mean_shares)
        variance = float(design @ np.array(self.calibration.covariance_shares) @ design)
        return Estimate(mean_seconds=float(design @ factors), deviation_seconds=max(variance, 0.0) ** 0.5)

    def _design(self, at: int, plan_id: str) -> Array:
        return self.trace.terms[at, self.trace.index[plan_id]][ORDER]

    def met(self, candidates: tuple[Candidate, ...]) -> SwitchingOutlook:  # noqa: ARG002 - it knows them all
        return self

    def observe(self, finished: StepMeasured, plan_id: str, *, ratio: float, noise_share: float) -> SwitchingOutlook:
        at = finished.step - 1
        prior = replace(self.calibration.prior, noise_share=max(noise_share, 0.01))
        design = dict(zip(prior.terms, self._design(at, plan_id), strict=True))
        calibration = observe(replace(self.calibration, prior=prior), design, finished.step_seconds / ratio)
        return replace(self, calibration=calibration, at=at, seen=(*self.seen, finished.tokens)[-8:])

    def expected(self, finished: StepMeasured, plan_id: str) -> Estimate:
        return self._believed(self._design(finished.step - 1, plan_id))

    def step(self, plan_id: str) -> Estimate:
        return self._believed(self._design(self.at, plan_id))

    def saving(self, old_id: str, new_id: str, old_ratio: float, new_ratio: float) -> Estimate:
        return self._believed(old_ratio * self._design(self.at, old_id) - new_ratio * self._design(self.at, new_id))

    def met_rows(self, step: int, width_tokens: int) -> SwitchingOutlook:  # noqa: ARG002
        return self

    def overflowed(self, plan_id: str, used_bytes: int) -> SwitchingOutlook:  # noqa: ARG002
        return self

    def misfit(self, plan_id: str, step: int) -> Misfit | None:  # noqa: ARG002
        capacity = self.trace.capacity[self.trace.index[plan_id]]
        if not self.seen or capacity == np.inf:
            return None
        rate = max((self.seen[-1] - self.seen[0]) / max(len(self.seen) - 1, 1), 1e-9)
        left = (capacity * 0.99 - self.seen[-1]) / rate
        return None if left > 1000 else Misfit(within_steps=max(ceil(left) - 1, 0), reason="kv cache")


ORDER = np.argsort(TERMS)


# -- the world --------------------------------------------------------------------------------------------------------


@dataclass
class Played:
    """What came of a trace under a policy: `path` is the plan of every step, `changes` (step, plan)."""

    seconds: float = 0.0
    path: list[int] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)
    overruns: int = 0
    searches: int = 0
    entries: list[Entry] = field(default_factory=list)
    events: list[AdaptiveEvent] = field(default_factory=list)
    commands: list[tuple[AdaptiveCommand, ...]] = field(default_factory=list)


class SwitchingWorld:
    """Plays a trace: a fleet change comes at the start of its step; a search is answered `late` steps later, a forced one at once."""

    def __init__(self, trace: Trace, outlook_of: AdaptiveController, late: int) -> None:
        self.trace, self.controller, self.late = trace, outlook_of, late
        self.played, self.present = Played(), trace.first
        self.count = int(trace.fleet[0])
        self.events: deque[AdaptiveEvent] = deque()
        self.due: list[tuple[int, SearchDone]] = []

    def play(self, *, check: bool = False) -> Played:
        self.events.append(JobReady(at_seconds=0.0, step=1))
        while self.events:
            event = self.events.popleft()
            commands = self.controller.handle(event)
            self.played.events.append(event)
            self.played.commands.append(commands)
            if check:
                self.controller.check()
            for command in commands:
                self._carry_out(command)
        return self.played

    def _carry_out(self, command: AdaptiveCommand) -> None:
        now = self.played.seconds
        match command:
            case RunStep(step=step):
                self._run(step)
            case ChangePlan(step=step, plan=plan):
                degrees = plan.actor_train.layout
                target = self.trace.degrees.index((degrees.tp, degrees.pp, degrees.dp))
                pause = float(self.trace.prices[self.present, target])
                self.played.seconds += pause
                self.played.changes.append((step, target))
                self.present = target
                at = self.played.seconds
                self.events.append(TransitionDone(at_seconds=at, plan=plan, state_version=0, pause_seconds=pause))
            case Search(search_id=number, request=request):
                self.played.searches += 1
                answer = self._answer(number, request, now)
                if self.controller.state == "searching" or not self.late:
                    self.events.appendleft(answer)  # before the end of a step that runs meanwhile
                else:
                    self.due.append((self.controller.step + self.late, answer))
            case Record(entry=entry):
                self.played.entries.append(entry)  # pyright: ignore[reportArgumentType]
            case Finish():
                pass
            case _:
                raise AssertionError(f"unexpected {command}")

    def _run(self, step: int) -> None:
        for due, answer in self.due:
            if due <= step:
                self.events.append(answer)
        self.due = [(due, answer) for due, answer in self.due if due > step]
        there = int(self.trace.fleet[step - 1])
        if there != self.count:
            lost = tuple(range(there, self.count))
            self.count = there
            self.events.append(FleetChanged(at_seconds=self.played.seconds, fleet=uniform(there), lost_slots=lost))
            if not set(lost).isdisjoint(self.controller.plan.actor_train.slots):
                return
        seconds = float(self.trace.seconds[step - 1, self.present])
        if seconds == np.inf:  # out of memory: as if the step before had to be done again
            seconds = 2 * float(self.trace.seconds[: step - 1, self.present].max(initial=1.0, where=self._finite(step)))
            self.played.overruns += 1
        self.played.seconds += seconds
        self.played.path.append(self.present)
        tokens = int(self.trace.tokens[step - 1])
        self.events.append(StepMeasured(at_seconds=self.played.seconds, step=step, step_seconds=seconds, tokens=tokens))

    def _finite(self, step: int) -> npt.NDArray[np.bool_]:
        return np.isfinite(self.trace.seconds[: step - 1, self.present])

    def _answer(self, number: int, request: SearchRequest, now: float) -> SearchDone:
        """The best by what the policy believes: horizon x step + price; plans to include whatever they are worth."""
        trace, outlook = self.trace, getattr(self.controller.policy, "outlook", None)
        assert isinstance(outlook, SwitchingOutlook)
        present, ratios = trace.index[request.present.plan_id], dict(request.ratios)
        included = {trace.index[plan.plan_id] for plan in request.include}
        costs: list[tuple[float, int]] = []
        for k, shown in enumerate(trace.candidates):
            tp, pp, dp = trace.degrees[k]
            if tp * pp * dp > len(request.slots) or k == present:
                continue
            step = outlook.step(shown.plan_id).mean_seconds * ratios.get(shown.kind, 1.0)
            cost = request.horizon_steps * step + trace.believed_prices[present, k]
            costs.append((-1.0 if k in included else cost, k))
        chosen = sorted(costs)[:SHOWN]
        seconds = outlook.step(request.present.plan_id).mean_seconds * ratios.get(trace.candidates[present].kind, 1.0)
        tokens = int(trace.tokens[outlook.at])
        return SearchDone(
            at_seconds=now,
            search_id=number,
            candidates=tuple(replace(trace.candidates[k], price=self._price(present, k)) for _, k in chosen),
            band=Band(
                least_step_seconds=0.9 * seconds,
                most_step_seconds=1.1 * seconds,
                least_tokens=0.95 * tokens,
                most_tokens=1.05 * tokens,
            ),
        )

    def _price(self, present: int, k: int) -> PriceEstimate:
        seconds = float(self.trace.believed_prices[present, k])
        return PriceEstimate(mean_seconds=seconds, deviation_seconds=0.2 * seconds, bound_seconds=0.8 * seconds)
