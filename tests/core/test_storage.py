"""Storage: what every rank and slot holds, against the definition in tests/core/definition.py."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.config import Config, ModelConfig, PlanConfig, StageConfig
from nereus.errors import ConfigError
from nereus.layout import STAGES, Layout, Stage, StagePlan, first_plan
from nereus.model import EMBEDDING, LM_HEAD, ModelSpec, llama, models_of
from nereus.storage import buffers, holding, megatron_params, megatron_regions, owned_ranges, vocab_rows
from nereus.validate import validate
from tests.core import definition
from tests.strategies import general_layouts, general_specs, general_stage_plans, stage_plan

KINDS: tuple[Stage, ...] = ("train", "infer", "generate")
PIECES = general_specs().flatmap(lambda spec: st.tuples(st.just(spec), general_layouts(spec.config)))


def ranks(layout: Layout):
    return [layout.coordinates(rank) for rank in range(layout.ranks)]


@settings(max_examples=60, deadline=None)
@given(PIECES)
def test_parameters_are_megatrons(case: tuple[ModelSpec, Layout]) -> None:
    spec, layout = case
    for at in ranks(layout):
        params = megatron_params(spec, layout, at)
        arrays = definition.megatron_arrays(spec, layout, at)
        assert [(p.name, p.shape) for p in params] == [(name, array.shape) for name, array in arrays.items()]
        for param in params:
            assert param.dtype == ("float32" if definition.is_norm(param.name) else spec.config.dtype)
            assert param.elements == arrays[param.name].size


@settings(max_examples=60, deadline=None)
@given(PIECES)
def test_regions_rebuild_every_parameter_and_its_optimizer_state(case: tuple[ModelSpec, Layout]) -> None:
    """qkv per KV group, gate over up, padding left out, flat ranges of the distributed optimizer: element by element."""
    spec, layout = case
    ids = definition.element_ids(spec)
    for at in ranks(layout):
        wanted = definition.trained_state(spec, layout, at)
        built = {key: np.full_like(array, definition.PAD) for key, array in wanted.items()}
        for r in megatron_regions(spec, layout, at, trained=True):
            values = ids[r.tensor][r.box.slices((0,) * len(r.box.start))]
            for n, row in enumerate(values.reshape(-1, values.shape[-1])):
                into = built[r.component, r.param][r.offset + n * r.stride :][: len(row)]
                assert (into == definition.PAD).all()  # nothing is written twice
                into[:] = row
        for key, array in wanted.items():
            np.testing.assert_array_equal(built[key], array, err_msg=str(key))
        weights = [r for r in megatron_regions(spec, layout, at, trained=True) if r.component == "weight"]
        assert weights == list(megatron_regions(spec, layout, at, trained=False))


@settings(max_examples=60, deadline=None)
@given(PIECES)
def test_optimizer_ranges_are_megatrons(case: tuple[ModelSpec, Layout]) -> None:
    """Each rank's, and of all ranks that hold the same weights together each element exactly once."""
    spec, layout = case[0], replace(case[1], distributed_optimizer=True)
    covered: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[tuple[object, ...], int] = {}
    for at in ranks(layout):
        params = megatron_params(spec, layout, at)
        arrays = definition.megatron_arrays(spec, layout, at)
        ranges = owned_ranges(params, layout, at)
        assert ranges == definition.owned(spec, arrays, layout, at)
        for param in params:
            weights = (at.pp, at.ep, at.etp) if param.expert else (at.pp, at.tp)
            sizes[param.name, param.expert, weights] = param.elements
            if param.name in ranges:
                covered[param.name, param.expert, weights].append(ranges[param.name])
    for key, size in sizes.items():
        edges = [0, *(edge for part in sorted(covered[key]) for edge in part), size]
        assert edges[::2] == edges[1::2], key  # one ends where the next begins: disjoint, and each element once


@settings(max_examples=40, deadline=None)
@given(PIECES)
def test_buffers_hold_every_parameter_once(case: tuple[ModelSpec, Layout]) -> None:
    spec, layout = case
    for at in ranks(layout)[:2]:
        params = megatron_params(spec, layout, at)
        by_name = {p.name: p for p in params}
        assert len(by_name) == len(params)
        found = buffers(params, layout)
        assert sorted(name for b in found for name in b.places) == sorted(by_name)
        for b in found:
            taken = sorted((place, place + by_name[name].elements) for name, place in b.places.items())
            assert all(stop <= start for (_, stop), (start, _) in pairwise(taken))
            assert taken[-1][1] <= b.elements == b.buckets[-1][1]
            assert [start for start, _ in b.buckets] == [0, *(stop for _, stop in b.buckets[:-1])]
            assert {(by_name[n].dtype, by_name[n].expert) for n in b.places} == {(b.dtype, b.expert)}


def slot_ids(spec: ModelSpec, stage: StagePlan) -> dict[int, dict[str, np.ndarray]]:
    """The ids in the boxes that `holding` gives each slot, by component, sorted."""
    ids = definition.element_ids(spec)
    found: dict[int, dict[str, np.ndarray]] = {}
    for slot, shards in holding(spec, stage).items():
        parts: dict[str, list[np.ndarray]] = defaultdict(list)
        for shard in shards:
            parts[shard.component].append(ids[shard.tensor][shard.box.slices((0,) * len(shard.box.start))].ravel())
        found[slot] = {component: np.sort(np.concatenate(arrays)) for component, arrays in parts.items()}
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_slots_hold_exactly_what_the_definition_says(kind: Stage, data: st.DataObject) -> None:
    spec = data.draw(general_specs())
    stage = data.draw(general_stage_plans(spec.config, kind))
    wanted, found = definition.held_ids(spec, stage), slot_ids(spec, stage)
    assert set(found) == set(wanted) == set(stage.slots)
    for slot in wanted:
        assert set(found[slot]) == set(wanted[slot])
        for component, ids in wanted[slot].items():
            np.testing.assert_array_equal(found[slot][component], ids)  # sorted with repeats: no element is held twice


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_element_is_held(kind: Stage, data: st.DataObject) -> None:
    """The union over slots is the whole model in every component; in optimizer state once per copy (distributed).

    Copies are TP ranks of what is not cut, and both ends of the pipeline for a tied embedding.
    """
    spec = data.draw(general_specs())
    stage = data.draw(general_stage_plans(spec.config, kind))
    held: dict[str, list[np.ndarray]] = defaultdict(list)
    for parts in slot_ids(spec, stage).values():
        for component, ids in parts.items():
            held[component].append(ids)
    whole = np.concatenate([a.ravel() for a in definition.element_ids(spec).values()])
    for component in {"weight", "exp_avg", "exp_avg_sq"} if kind == "train" else {"weight"}:
        np.testing.assert_array_equal(np.unique(np.concatenate(held[component])), whole)
    if kind == "train" and stage.layout.distributed_optimizer:
        times = np.bincount(np.concatenate(held["exp_avg"]), minlength=len(whole))
        for t in spec.tensors:
            copies = stage.layout.tp if t.cut == "none" else 1
            if spec.tied and t.name == EMBEDDING and stage.layout.pp > 1:
                copies = 2
            assert set(times[definition.element_ids(spec)[t.name].ravel()]) == {copies}


def test_shards_have_their_types() -> None:
    """bf16: weights and gradients in bf16, norms in float32, masters of what is bf16, all optimizer state in float32."""
    spec = llama("m", ModelConfig(layers=1, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=12, dtype="bfloat16"))
    stage = stage_plan(Layout(tp=1, pp=1, dp=1, pipeline=(1,)))
    types = {(s.component, s.tensor): s.dtype for s in holding(spec, stage)[0]}
    assert types["weight", EMBEDDING] == "bfloat16"
    assert types["weight", "model.norm.weight"] == "float32"
    assert ("master", "model.norm.weight") not in types
    assert types["master", EMBEDDING] == types["exp_avg", EMBEDDING] == "float32"


@pytest.mark.parametrize(
    ("tp", "rows"),
    [
        (1, [(0, 259)]),
        (2, [(0, 160), (160, 259)]),
        (4, [(0, 80), (80, 160), (160, 240), (240, 259)]),
        (8, [(0, 40), (40, 80), (80, 120), (120, 160), (160, 200), (200, 240), (240, 259), (259, 259)]),
    ],
)
def test_vocabulary_of_the_byte_tokenizer(tp: int, rows: list[tuple[int, int]]) -> None:
    """259 rows are padded to 320 whatever tp is; at tp 8 the last rank has padding only."""
    assert [vocab_rows(259, tp, rank)[:2] for rank in range(tp)] == rows
    assert {vocab_rows(259, tp, rank)[2] for rank in range(tp)} == {320 // tp}
    spec = llama("m", ModelConfig(layers=1, kv_heads=8, hidden=8, head_dim=4))
    held = holding(spec, stage_plan(Layout(tp=tp, pp=1, dp=1, pipeline=(1,)), stage="generate"))
    shown = [(s.box.start[0], s.box.stop[0]) for shards in held.values() for s in shards if s.tensor == LM_HEAD]
    assert shown == [row for row in rows if row[0] < row[1]]


def refused_or_whole(config: Config) -> None:
    """A configuration is refused with a ConfigError, or its first plan holds every element of every model."""
    try:
        validate(config)
    except ConfigError:
        return
    plan, models = first_plan(config), models_of(config.model)
    for stage in (getattr(plan, name) for name in STAGES):
        held = {(s.tensor, s.box) for shards in holding(models[stage.model], stage).values() for s in shards}
        for tensor in models[stage.model].tensors:
            rows = {r for name, box in held if name == tensor.name for r in range(box.start[0], box.stop[0])}
            assert rows == set(range(tensor.shape[0])), f"{stage.model} {stage.stage}: {tensor.name}"


def test_no_valid_configuration_loses_qkv() -> None:
    refused_or_whole(Config(model=ModelConfig(kv_heads=2), plan=PlanConfig(actor_train=StageConfig(tp=4))))


def test_no_valid_configuration_loses_rows_of_the_vocabulary() -> None:
    model = ModelConfig(heads=6, kv_heads=3, vocab=320)
    refused_or_whole(Config(model=model, plan=PlanConfig(actor_train=StageConfig(tp=3))))
