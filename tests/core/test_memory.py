"""The memory prediction: monotone where it must be, sums of what storage holds, and a refusal that says everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import Config, FleetConfig, ModelConfig, PlanChange, PlanConfig, StageConfig
from nereus.errors import ConfigError, InfeasiblePlan
from nereus.layout import first_plan
from nereus.memory import activation_bytes, check_memory, plan_peaks, resident, state_bytes
from nereus.model import llama
from nereus.storage import holding
from tests.core import definition
from tests.core.scenes import CONFIG, with_changes
from tests.strategies import general_specs, general_stage_plans

SIZES = (
    ModelConfig(),
    ModelConfig(hidden=256, ffn=768, layers=6, dtype="bfloat16"),
    ModelConfig(hidden=64, heads=4, kv_heads=2),
)


def budget(config: Config, slot_budget_bytes: int) -> Config:
    return replace(config, fleet=replace(config.fleet, slot_budget_bytes=slot_budget_bytes))


def highest(config: Config) -> int:
    return max(peak.total_bytes for peak in plan_peaks(config, first_plan(config)))


def growing(model: ModelConfig, stage: StageConfig) -> Config:
    """Actor and critic in this stage's layout, on eight slots; nothing else differs."""
    plan = PlanConfig(actor_train=stage, critic_train=stage)
    return Config(model=model, fleet=FleetConfig(slots=8), plan=plan)


@pytest.mark.parametrize("model", SIZES, ids=["quickstart", "bf16", "small"])
def test_more_replicas_of_a_distributed_optimizer_never_need_more(model: ModelConfig) -> None:
    peaks = [highest(growing(model, StageConfig(dp=dp, micro_batch=1))) for dp in range(1, 9)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


@pytest.mark.parametrize("model", SIZES, ids=["quickstart", "bf16", "small"])
def test_more_replicas_of_a_plain_optimizer_change_nothing(model: ModelConfig) -> None:
    peaks = {
        highest(growing(model, StageConfig(dp=dp, micro_batch=1, distributed_optimizer=False))) for dp in range(1, 9)
    }
    assert len(peaks) == 1


@pytest.mark.parametrize("model", SIZES[:2], ids=["quickstart", "bf16"])
def test_more_tensor_parallelism_never_needs_more(model: ModelConfig) -> None:
    peaks = [highest(growing(model, StageConfig(tp=tp))) for tp in (1, 2, 4)]
    assert peaks == sorted(peaks, reverse=True)


def test_larger_micro_batches_need_more_where_their_rows_are_more() -> None:
    """A mini-batch of 32 samples: at most 10 rows make 4 micro-batches of 8, as at most 8 do; 11 make 3 of 11."""
    found = {m: highest(growing(ModelConfig(), StageConfig(micro_batch=m))) for m in (7, 8, 10, 11, 16, 31, 32, 40)}
    assert found[7] < found[8] == found[10] < found[11] < found[16] == found[31] < found[32] == found[40]


@settings(max_examples=40, deadline=None)
@given(general_specs().flatmap(lambda spec: st.tuples(st.just(spec), general_stage_plans(spec.config))))
def test_resident_bytes_are_what_storage_holds(case) -> None:
    """Optimizer bytes are exactly the shards'; weights are the shards and the vocabulary's padding; gradients fp32."""
    spec, stage = case
    for rank, slot in enumerate(stage.slots):
        parts, shards = resident(spec, stage, rank), holding(spec, stage)[slot]
        assert parts["optimizer"] == sum(s.size_bytes for s in shards if s.component != "weight") + padding_state(
            spec, stage, rank
        )
        state = state_bytes(spec, stage, rank)
        assert parts["optimizer"] == state["masters"] + state["moments"]
        assert state["masters"] > 0 or all(s.component != "master" for s in shards)
        elements = sum(s.box.elements for s in shards if s.component == "weight")
        assert parts["weights"] >= sum(s.size_bytes for s in shards if s.component == "weight")
        assert parts["grads"] >= 4 * elements


def padding_state(spec, stage, rank: int) -> int:
    """Optimizer bytes of the padded rows of vocabularies: they are kept, and are nobody's state."""
    state = definition.trained_state(spec, stage.layout, stage.layout.coordinates(rank))
    return sum(4 * int((a == definition.PAD).sum()) for (component, _), a in state.items() if component != "weight")


def test_pipeline_ranks_keep_fewer_micro_batches_in_flight() -> None:
    spec = llama("m", ModelConfig(), "value")
    config = growing(ModelConfig(), StageConfig(pp=4))
    stage = first_plan(config).critic_train
    kept = [activation_bytes(spec, stage, rank, 56, 32) for rank in range(4)]
    assert [k // kept[3] for k in kept] == [4, 3, 2, 1]


def test_no_more_micro_batches_are_in_flight_than_there_are() -> None:
    spec, config = llama("m", ModelConfig(), "value"), growing(ModelConfig(), StageConfig(pp=4, micro_batch=16))
    stage = first_plan(config).critic_train  # 32 samples of a mini-batch: two micro-batches
    kept = [activation_bytes(spec, stage, rank, 56, 32) for rank in range(4)]
    assert [k // kept[3] for k in kept] == [2, 2, 2, 1]


def test_every_slot_has_a_peak_and_idle_ones_only_the_overhead() -> None:
    config = growing(ModelConfig(), StageConfig(dp=3))
    peaks = plan_peaks(config, first_plan(config))
    assert [p.slot for p in peaks] == list(range(8))
    assert all(p.total_bytes == sum(p.components.values()) for p in peaks)
    assert set(peaks[7].components) == {"overhead", "staging"}
    assert {"actor_train.optimizer", "actor_generate.kv_cache", "activations"} <= set(peaks[0].components)


def test_a_plan_that_fits_to_the_byte_passes() -> None:
    peaks = plan_peaks(CONFIG, first_plan(CONFIG))
    worst = max(peaks, key=lambda p: p.total_bytes)
    check_memory(budget(CONFIG, worst.total_bytes))
    with pytest.raises(InfeasiblePlan) as refused:
        check_memory(budget(CONFIG, worst.total_bytes - 1))
    text = str(refused.value)
    assert refused.value.key == "plan"
    assert f"slot {worst.slot} " in text
    assert worst.phase in text
    assert f"{worst.total_bytes:,}" in text
    assert f"fleet.slot_budget_bytes is {worst.total_bytes - 1:,}" in text
    assert max(worst.components, key=lambda name: worst.components[name]) in text
    assert isinstance(refused.value, ConfigError)  # the command line ends with code 2


def test_a_change_that_does_not_fit_is_named() -> None:
    """The second change takes the actor off TP and PP; the run is refused before it starts."""
    smaller = StageConfig(tp=2, dp=2, micro_batch=4)
    changes = (2, PlanChange(critic_train=smaller)), (4, PlanChange(actor_train=StageConfig(micro_batch=64)))
    config = with_changes(*changes)
    with pytest.raises(InfeasiblePlan) as refused:
        check_memory(budget(config, highest(CONFIG)))
    assert refused.value.key == "changes[1].plan"


def alone(micro_batch: int) -> Config:
    """Slot 3 does nothing but the reference's forward passes."""
    other = StageConfig()
    reference = StageConfig(slots=(3,), micro_batch=micro_batch)
    plan = PlanConfig(actor_train=other, actor_generate=other, critic_train=other, reference_infer=reference)
    return Config(plan=plan)


def test_the_reference_needs_room_for_its_logits() -> None:
    one, many = (plan_peaks(alone(m), first_plan(alone(m)))[3].total_bytes for m in (1, 64))
    assert many > one
