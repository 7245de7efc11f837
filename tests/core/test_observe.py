"""What is known of a job: predictions learn from its steps, new plans profit, a journal replays to the same state."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from nereus.config import AlgorithmConfig, Config, DataConfig, PlanConfig, StageConfig
from nereus.costs.calibrate import Factor, margin, observe_peak
from nereus.costs.profile import supposed
from nereus.layout import Plan, first_plan
from nereus.observe import Observed, after, by_toll, calibrated_tolls, expect, expected_change, fold, slow_phases
from nereus.transitions.durations import Tolls
from nereus.workload import StepBatch

S = StageConfig
PROFILE = supposed("cpu", 4, 4, 2)
TRUE = {"launch": 4.0, "step": 1.2, "tp": 3.0, "decode_tp": 2.0, "engine_step": 3.0, "memory": 2.0}
"""The machine's coefficients over the terms; the rest are 1.3."""
BATCH = StepBatch(samples=64, width_tokens=64, prompt_tokens=20.0, response_tokens=(10.0, 20.0, 30.0))


def config(train: StageConfig, generate: StageConfig) -> Config:
    plan = PlanConfig(actor_train=train, actor_generate=generate, critic_train=train, reference_infer=S(dp=4))
    data = DataConfig(prompts_per_step=16, samples_per_prompt=4, max_prompt_tokens=32, max_response_tokens=32)
    return Config(plan=plan, data=data, algorithm=AlgorithmConfig(mini_batches=2))


FIRST = config(S(tp=2, pp=2), S(tp=2, dp=2))
OTHERS = (config(S(pp=2, dp=2), S(dp=4)), config(S(dp=4), S(dp=4)), config(S(tp=2, dp=2), S(tp=2)))


def journal(steps: int, *, noise: float = 0.03, seed: int = 1, peak: float = 0.7) -> Iterator[dict[str, Any]]:
    """A run as its journal has it: the plan changes every ten steps; the truth has other coefficients and noise."""
    rng = random.Random(seed)
    state = Observed()

    def tell(record: dict[str, Any]) -> dict[str, Any]:
        nonlocal state
        record = json.loads(json.dumps(record))
        state = after(state, record)
        return record

    yield tell({"kind": "run_started"})
    yield tell({"kind": "probe", "profile": PROFILE.record()})
    for step in range(1, steps + 1):
        used = (FIRST, *OTHERS)[(step - 1) // 10 % 4]
        said = expect(state, used, first_plan(used), step)
        yield tell({"kind": "prediction", **said.record()})
        seconds = {
            phase: sum(TRUE.get(name, 1.3) * value for name, value in terms.items()) * (1 + rng.gauss(0, noise))
            for phase, terms in said.terms.items()
        }
        peaks = {slot: parts["state"] + peak * parts["overhead"] for slot, parts in said.memory.items()}
        observed = {"step": step, "seconds": seconds, "batch": BATCH.record(), "peak_bytes": peaks}
        yield tell({"kind": "observed", **observed})


def errors(records: list[dict[str, Any]]) -> dict[int, float]:
    said = {r["step"]: r for r in records if r["kind"] == "prediction"}
    return {
        r["step"]: abs(said[r["step"]]["step_seconds"][0] / sum(r["seconds"].values()) - 1)
        for r in records
        if r["kind"] == "observed"
    }


def test_a_few_steps_bring_the_step_time_within_a_few_per_cent() -> None:
    records = list(journal(10))
    found = errors(records)
    prior = next(r for r in records if r["kind"] == "prediction")["prior_seconds"]
    measured = next(r for r in records if r["kind"] == "observed")["seconds"]
    assert abs(prior / sum(measured.values()) - 1) > 0.15, "or the test shows nothing"
    assert max(list(found.values())[5:]) < 0.06


def test_plans_that_never_ran_profit_from_what_others_taught() -> None:
    found = errors(list(journal(40)))
    assert found[11] < 0.3
    assert found[21] < 0.15
    assert found[31] < 0.15


def test_the_journal_replays_to_the_same_state_and_the_same_predictions() -> None:
    records = list(journal(25))
    one, other = fold(records), fold(json.loads(json.dumps(records)))
    assert one == other
    part = fold(records[:-2])  # up to the prediction of the last step
    last = records[-2]
    again = expect(part, OTHERS[1], first_plan(OTHERS[1]), last["step"])
    assert json.loads(json.dumps(again.record())) == {k: v for k, v in last.items() if k != "kind"}


def test_stated_deviations_cover_what_comes() -> None:
    inside = total = 0
    for seed in range(6):
        records = list(journal(20, noise=0.06, seed=seed))
        said = {r["step"]: r["step_seconds"] for r in records if r["kind"] == "prediction"}
        for record in (r for r in records if r["kind"] == "observed"):
            mean, deviation = said[record["step"]]
            inside += abs(mean - sum(record["seconds"].values())) <= 2 * deviation
            total += 1
    assert inside / total > 0.85


def test_the_memory_margin_is_learnt_from_peaks() -> None:
    records = list(journal(12, peak=0.4))
    said = [r for r in records if r["kind"] == "prediction"]
    peaks = [r["peak_bytes"] for r in records if r["kind"] == "observed"]
    first, last = (abs(said[at]["memory_expected_bytes"]["0"] / peaks[at]["0"] - 1) for at in (0, -1))
    assert first > 0.1
    assert last < 0.02
    assert all(said[-1]["memory_safe_bytes"][slot] >= peaks[-1][slot] for slot in peaks[-1])


def test_a_peak_above_its_prediction_is_never_forgotten() -> None:
    parts = {"state": 100e6, "overhead": 10e6}
    state = margin()
    for _ in range(5):
        state = observe_peak(state, parts, 105e6)
    burst = observe_peak(state, parts, 140e6)
    assert burst.safe_bytes(parts) >= 1.3 * state.expected_bytes(parts)
    assert burst.expected_bytes(parts) < 125e6, "one outlier moves the mean little"


def test_new_engines_are_fresh_and_a_plan_is_new_once() -> None:
    records = list(journal(2))
    said = [r for r in records if r["kind"] == "prediction"]
    assert (said[0]["is_new"], said[1]["is_new"]) == (True, False)
    assert len(said[0]["fresh"]) == 4
    assert said[1]["fresh"] == []
    resumed = after(fold(records), {"kind": "resumed"})
    assert len(expect(resumed, FIRST, first_plan(FIRST), 3).fresh) == 4
    changed = expect(fold(records), OTHERS[0], first_plan(OTHERS[0]), 3)
    assert "reference_infer" not in changed.fresh
    assert "actor_train" in changed.fresh


def test_rows_carried_within_a_larger_budget_say_nothing_of_a_smaller_one() -> None:
    def resumed(state: Observed, budget_bytes: int) -> Observed:
        return after(state, {"kind": "resumed", "config": {"fleet": {"slot_budget_bytes": budget_bytes}}})

    started = [{"kind": "run_started", "config": {"fleet": {"slot_budget_bytes": 200}}}]
    known = fold([*started, *list(journal(3))[1:]])
    assert set(known.carried.values()) == {BATCH.width_tokens}
    assert resumed(known, 200).carried == resumed(known, 300).carried == known.carried
    assert not resumed(known, 199).carried
    assert not resumed(resumed(known, 300), 299).carried


def test_a_phase_that_takes_far_longer_than_expected_is_told() -> None:
    expected = expect(fold(list(journal(8))), FIRST, first_plan(FIRST), 9)
    usual = {phase: each.mean_seconds for phase, each in expected.phases.items()}
    assert slow_phases(expected, usual) == {}
    assert slow_phases(expected, {**usual, "update_weights": 60.0}) == {"update_weights": usual["update_weights"]}
    assert slow_phases(expected, {**usual, "update_weights": 3 * usual["update_weights"]}) == {}, "small things scatter"
    first = expect(fold(list(journal(0))), FIRST, first_plan(FIRST), 1)
    assert slow_phases(first, {"gen": 99.0}) == {}, "engines work for the first time"


def test_torn_journals_teach_nothing_wrong() -> None:
    records = list(journal(3))
    torn = [r for r in records if not (r["kind"] == "prediction" and r["step"] == 2)]
    assert fold(torn).calibrations["train"].observation_count == 4  # two phases of two steps
    with pytest.raises(ValueError, match="no probe record"):
        expect(Observed(), FIRST, first_plan(FIRST), 1)


def test_other_slots_begin_anew_and_more_of_the_same_do_not() -> None:
    known = fold(list(journal(8)))
    more = after(known, {"kind": "probe", "profile": supposed("cpu", 4, 8, 4).record()})
    assert more.calibrations == known.calibrations
    other = after(known, {"kind": "probe", "profile": supposed("h100", 2, 4, 4).record()})
    assert other.calibrations["train"].observation_count == 0
    plan: Plan = first_plan(FIRST)
    assert expect(other, FIRST, plan, 9).whole.mean_seconds > 0


def test_tolls_follow_what_changes_took() -> None:
    expected = {"verify": 0.004, "rate": 0.02, "quiesce": 0.02, "build_engine": 1.0}
    took = {"verify": 0.1, "rate": 0.04, "quiesce": 0.06, "build_engine": 1.0}
    state = Observed()
    first = expected_change(state, expected)
    for number in range(3):
        record = {"transition": f"t{number}", "expected_seconds": expected, "seconds": took}
        state = after(state, {"kind": "transition_observed", **record})
    last = expected_change(state, expected)
    assert abs(last.mean_seconds / sum(took.values()) - 1) < 0.05
    assert last.deviation_seconds / last.mean_seconds < first.deviation_seconds / first.mean_seconds
    tolls = calibrated_tolls(state)
    assert tolls.quiesce_seconds == pytest.approx(3 * Tolls().quiesce_seconds, rel=0.1)
    assert tolls.rate_share == pytest.approx(Tolls().rate_share / 2, rel=0.1)
    assert tolls.digest_share == pytest.approx(Tolls().digest_share / 25, rel=0.2)
    assert tolls.group_seconds == Tolls().group_seconds, "what was not measured keeps its prior"
    assert tolls.deviation_share["quiesce"] < 0.3
    assert "build_engine" not in state.tolls, "the job remembers what its engines took"


def test_kinds_that_move_bytes_share_a_toll() -> None:
    assert by_toll({"transfer": 1.0, "copy": 0.5, "stage_in": 0.25, "verify": 2.0}) == {"rate": 1.75, "verify": 2.0}


def test_a_factor_is_learnt_in_a_step_and_refuses_nonsense() -> None:
    once = Factor().observe(0.01, 0.3)
    assert once.ratio == pytest.approx(30, rel=0.2)
    assert once.predict(0.01).deviation_seconds < Factor().predict(0.01).deviation_seconds * once.ratio
    with pytest.raises(ValueError, match="expected times above 0"):
        Factor().observe(0.0, 1.0)


def test_a_plan_that_has_not_run_is_judged_with_the_whole_overhead() -> None:
    parts = {"state": 100e6, "overhead": 24e6}
    state = margin()
    assert state.unseen_bytes(parts) == state.safe_bytes(parts)
    for _ in range(8):
        state = observe_peak(state, parts, 106e6)  # a slot that shows a quarter of it
    assert state.expected_bytes(parts) == pytest.approx(106e6, rel=0.01)
    assert state.unseen_bytes(parts) >= max(124e6, state.safe_bytes(parts) + 15e6)
    for _ in range(8):
        state = observe_peak(state, parts, 132e6)  # and one that shows more than all
    assert state.unseen_bytes(parts) == state.safe_bytes(parts)
