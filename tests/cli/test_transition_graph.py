"""`nereus transition` with a schedule: files, text and JSON agree with the graph; wrong wishes are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nereus.cli.main import main
from nereus.transitions.graph import from_data
from nereus.transitions.order import lane_name
from nereus.transitions.proof import check
from tests.cli.test_transition_command import CUT, DENSE, NORMS, WEIGHTS_BYTES

WORDS = ("--from", "tp=2", "--to", "pp=2", "--fleet", "2xh100")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DENSE), encoding="utf-8")
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["transition", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(["transition", *words])
    shown = capsys.readouterr()
    assert code in (1, 2)
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize("mode", ["beside", "snapshot"])
def test_the_files_are_the_graph_and_its_timeline(
    mode: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, trace = tmp_path / "graph.json", tmp_path / "timeline.json"
    trace.write_text("old", encoding="utf-8")
    found = answer(
        capsys, "--model", model, *WORDS, "--mode", mode, "--graph", str(graph), "--timeline", str(trace), "--slots"
    )
    read = from_data(json.loads(graph.read_text(encoding="utf-8")))
    proof, told = check(read), found["schedule"]
    assert told["operations"] == len(read.operations)
    assert told["peak_bytes"] == {lane_name(lane): size for lane, size in proof.peak_bytes.items()}
    assert {emu.mode for emu in read.change.emus} == {mode}
    for row in found["slot_bytes"]:
        (r,) = [r for r in read.change.residencies if r.lane == row["slot"]]
        assert (r.present_bytes, r.target_bytes) == (row["before_bytes"], row["after_bytes"])
        assert r.kept_bytes == r.copied_bytes == row["kept_bytes"]
    assert sum(flow.size_bytes for flow in read.change.flows) == found["moved_bytes"]
    blank = sum(r.blank_present_bytes for r in read.change.residencies)
    assert blank == 4 * (CUT + 2 * NORMS)  # TP2: cut parameters once, norms on both
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = {event["name"] for event in events if event["ph"] in "Xi"}
    assert names == set(read.ids)
    assert list(tmp_path.glob(".*")) == []


def test_what_is_printed_adds_up(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", model, *WORDS, "--engine-seconds", "3")
    told = answer(capsys, *words)["schedule"]
    cost = told["price"]
    assert cost["seconds"] == pytest.approx(cost["pause_seconds"] + cost["interleaved_seconds"])
    assert told["makespan_seconds"] == pytest.approx(cost["seconds"] + cost["outside_seconds"])
    assert told["bound_seconds"] <= told["makespan_seconds"] == pytest.approx(told["bound_seconds"] * told["gap_ratio"])
    engines = [row for row in told["by_kind"] if row["kind"] == "build_engine"]
    assert [(row["place"], row["operations_count"], row["seconds"]) for row in engines] == [("interleaved", 2, 3.0)]
    assert main(["transition", *words]) == 0
    shown = capsys.readouterr().out
    for text in ("operations, proven", "actor.train beside: nothing old is dropped", "built in 3.00 s", "give or take"):
        assert text in shown
    assert max(map(len, shown.splitlines()[1:])) <= 100
    tight = answer(capsys, *words, "--reserve-gb", "85.899")["schedule"]  # nothing fits beside the phases
    assert {row["place"] for row in tight["by_kind"] if row["kind"] == "build_engine"} == {"pause"}
    assert tight["reserve_bytes"] == 85_899_000_000


def test_without_a_wish_for_a_schedule_there_is_none(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "schedule" not in answer(capsys, "--model", model, *WORDS)


def test_a_shrink_that_moves_nothing_is_a_change_too(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--from", "dp=2", "--to", "dp=1", "--optimizer", "replicated", "--fleet", "2xh100", "--mode", "beside")
    found = answer(capsys, "--model", model, *words)
    assert found["moved_bytes"] == 0
    assert found["components"][0]["after_bytes"] == WEIGHTS_BYTES
    assert {row["kind"] for row in found["schedule"]["by_kind"]} >= {"copy", "build_engine", "commit"}


def test_wrong_wishes_are_one_line(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> str:
        return refused(capsys, "--model", model, *WORDS, *words)

    assert "--graph = '/proc/x.json': expected a file to write: " in told("--graph", "/proc/x.json")
    assert "expected a file to write, not a folder or a device" in told("--timeline", str(tmp_path))
    assert "expected a file to write, not a folder or a device" in told("--graph", "/dev/null")
    assert "--graph = '': expected a file" in told("--graph", "")
    assert "expected another file than --graph's" in told("--graph", "x", "--timeline", "x")
    for value in ("nan", "-1", "inf", "1e9"):
        assert "expected a number from 0 to 1,000,000" in told("--reserve-gb", value)
    assert "expected none with --sync" in told("--sync", "--mode", "beside")
    assert "nothing changes, no graph" in told("--to", "tp=2", "--mode", "beside", "--placement", "identity")
    assert Path("/dev/null").is_char_device()


def test_what_does_not_fit_says_where_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3.1-70b", "--from", "tp=8,dp=2", "--to", "tp=8,pp=2", "--fleet", "16xh200")
    shown = refused(capsys, *words, "--mode", "beside")
    assert shown.startswith("error: slot 0 in phase beside: needs ")
    assert shown.endswith("choose mode snapshot\n")
    assert answer(capsys, *words, "--mode", "snapshot")["schedule"]["exposed_bytes"] == {"actor.train": 0}
