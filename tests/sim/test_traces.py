"""Traces: public formats read as they are published, transformations of step functions, files there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.errors import ConfigError
from nereus.sim.readers import read_availability, read_lengths, read_requests
from nereus.sim.traces import (
    Availability,
    FleetTrace,
    LengthCurve,
    TraceOrigin,
    coarse,
    paced,
    read_trace,
    scaled,
    step_function,
    window,
    write_trace,
)

PUBLIC = Path("/work/shared/data/traces")


@st.composite
def availabilities(draw: st.DrawFn) -> Availability:
    gaps = draw(st.lists(st.integers(0, 500), min_size=1, max_size=12))
    counts = draw(st.lists(st.integers(0, 40), min_size=len(gaps), max_size=len(gaps)))
    at = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    return step_function("drawn", list(zip(map(float, at), counts, strict=True)), at[-1] + draw(st.integers(1, 99)))


PARCAE = """[0, "add", {"nodes": ["a", "b"], "duration": 60000}]
[60000, "migration", {"nodes": [], "duration": 60000}]
[120000, "remove", {"nodes": ["a"], "duration": 60000}]
"""
FORMATS = {
    "events.csv": ("0,add,a\n0,add,b\n60000,remove,a\n90000,add,c\n", [0.0, 60.0, 90.0], [2, 1, 2]),
    "samples.txt": (
        "2021-12-11, 11:11:30, 5\n2021-12-11, 11:13:10, 5\n2021-12-11, 11:14:50, 3\n",
        [0.0, 200.0],
        [5, 3],
    ),
    "steps.csv": ("0,1\n0,4\n30,4\n30,2\n", [0.0, 30.0], [4, 2]),
    "header.csv": ("t_s,n_instances\n480.0,1\n540.0,2\n", [0.0, 60.0], [1, 2]),
    "sailor.json": ('[{"Time": 0, "GPUs": 4}, {"Time": 63, "GPUs": 3}]', [0.0, 63.0], [4, 3]),
    "parcae.txt": (PARCAE, [0.0, 120.0], [2, 1]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_public_format_is_read(name: str, tmp_path: Path) -> None:
    text, at, counts = FORMATS[name]
    (tmp_path / name).write_text(text)
    found = read_availability(tmp_path / name)
    assert list(found.at_seconds) == at
    assert list(found.counts) == counts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0,remove,a\n", ":1"),
        ('[0, "vanish", {"nodes": []}]\n', "vanish"),
        ("1,2,3,4\n", "4"),
        ("10,1\n5,2\n", "does not go back"),
        ("", "at least one row"),
    ],
)
def test_what_is_in_no_format_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_availability(tmp_path / "a.csv")


def test_the_unit_of_step_points_counts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("0,1\n2,3\n")
    assert read_availability(tmp_path / "a.csv", "hours").at_seconds == (0.0, 7200.0)
    with pytest.raises(ConfigError, match="weeks"):
        read_availability(tmp_path / "a.csv", "weeks")


@given(availabilities(), st.sampled_from([0.25, 0.5, 1.0, 3.0]), st.integers(0, 3))
def test_scaling_scales_every_moment(found: Availability, factor: float, least: int) -> None:
    made = scaled(found, factor, least_count=least, most_count=60)
    for at in (*found.at_seconds, found.until_seconds):
        assert made.count_at(at) == min(max(int(found.count_at(at) * factor + 0.5), least), 60)
    assert made.until_seconds == found.until_seconds


@given(availabilities(), st.integers(1, 10))
def test_coarse_stays_within_the_least_change(found: Availability, least: int) -> None:
    made = coarse(found, least)
    assert all(abs(made.count_at(at) - found.count_at(at)) < least for at in found.at_seconds)
    assert all(abs(b - a) >= least for a, b in zip(made.counts, made.counts[1:], strict=False))


@given(availabilities(), st.floats(0.0, 0.9), st.floats(0.05, 1.0))
def test_a_window_shows_the_same_counts(found: Availability, begin: float, share: float) -> None:
    start = begin * found.until_seconds
    end = start + share * (found.until_seconds - start)
    made = window(found, start, end)
    for part in (0.0, 0.3, 0.7, 0.99):
        at = part * (end - start)
        assert made.count_at(at) == found.count_at(start + at)
    assert made.until_seconds == pytest.approx(end - start)


@given(availabilities())
def test_a_trace_is_read_back(tmp_path_factory: pytest.TempPathFactory, found: Availability) -> None:
    path = tmp_path_factory.mktemp("trace") / "a.json"
    curve = LengthCurve(name="c", at_steps=(1, 5), mean_tokens=(10.0, 20.5))
    trace = FleetTrace(name="drawn", slots_per_node=8, nodes=found, lengths=curve, origin=TraceOrigin(source="here"))
    write_trace(path, trace)
    assert read_trace(path) == trace


def test_a_slower_pace_and_a_curve_over_steps() -> None:
    found = step_function("a", [(0.0, 1), (10.0, 2)], 20.0)
    assert paced(found, 2.5).at_seconds == (0.0, 25.0)
    assert found.mean_count == 1.5
    curve = LengthCurve(name="c", at_steps=(0, 10), mean_tokens=(100.0, 200.0)).over(101, 2.0)
    assert [curve.mean_at(step) for step in (0, 1, 51, 101, 500)] == [200.0, 200.0, 300.0, 400.0, 400.0]


def test_a_file_of_another_kind_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"name": "a"}))
    with pytest.raises(ConfigError, match="nereus trace build"):
        read_trace(tmp_path / "a.json")


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not on this machine")
def test_public_traces_have_the_figures_that_are_known_of_them() -> None:
    known = {  # hours, least, most, mean, up, down: availability/summary.csv, made by other code
        "bamboo/p3-trace.csv": (11.37, 10, 32, 24.03, 83, 79),
        "bamboo/g4dn-trace.csv": (10.63, 1, 24, 12.76, 50, 48),
        "bamboo/a100x1-east1b.txt": (27.02, 17, 64, 57.3, 38, 36),
        "sailor/a100_trace_16.json": (3.62, 7, 14, 11.63, 13, 14),
        "parcae/gpt-6.7b_trace_hh_55_65.txt": (None, 20, 32, None, 7, 9),
    }
    for name, (hours, least, most, mean, up, down) in known.items():
        found = read_availability(PUBLIC / "availability" / name)
        assert (min(found.counts), max(found.counts), found.gains_count, found.losses_count) == (least, most, up, down)
        if hours is not None:
            assert found.until_seconds / 3600 == pytest.approx(hours, abs=0.006)
            assert found.mean_count == pytest.approx(mean, abs=0.006)
    for path in sorted((PUBLIC / "requests").glob("*.csv")):
        assert min(prompt for prompt, _ in read_requests(path)) >= 0
    zoo = PUBLIC / "rl_lengths" / "digitised_simplerl-zoo_response_length.csv"
    assert read_lengths(zoo, "llama-3.1-8b").mean_tokens[-1] > 2000
    with pytest.raises(ConfigError, match=r"llama-3\.1-8b"):
        read_lengths(zoo, "gpt")
