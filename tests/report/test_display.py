"""The display: rich on a terminal, plain lines elsewhere; one line for each step and each transition."""

import io
import os
import pty

import pytest
from rich.console import Console

from nereus.report.display import (
    PlainDisplay,
    QuietDisplay,
    RichDisplay,
    bytes_text,
    change_text,
    open_display,
    step_line,
    transition_line,
)

LAYOUT = "train TP2·PP2·DP1 · gen 2xTP2"
STEP = {
    "training/global_step": 3,
    "critic/score/mean": 0.4123,
    "response_length/mean": 5.25,
    "perf/total_num_tokens": 3000,
    "timing_s/step": 2.0,
}
DONE = {
    "transition": 1,
    "from": "TP2·PP2·DP1",
    "to": "TP1·PP2·DP2",
    "seconds": {"move": 0.5, "quiesce": 0.1, "other": 0.2},
    "pause_seconds": 0.8,
    "counted_bytes": 12_300_000,
}


def test_a_step_in_one_line() -> None:
    assert step_line(STEP, LAYOUT, 20) == f"step  3/20  reward  0.412  length   5.2   1,500 tok/s   2.00 s  {LAYOUT}"


def test_a_step_with_little_known() -> None:
    assert step_line({"training/global_step": 1}, "", 5) == "step 1/5"
    assert "77 tok/s" in step_line({"perf/throughput": 77.0}, "", 5)


def test_a_transition_in_one_line() -> None:
    line = transition_line(DONE)
    assert line.startswith("change 1: TP2·PP2·DP1 -> TP1·PP2·DP2  pause 0.80 s")
    assert "(quiesce 0.10, move 0.50, other 0.20) 12.3 MB moved" in line
    assert transition_line({"transition": 2, "reason": "a peer did not answer"}) == (
        "change 2 failed: a peer did not answer"
    )


def test_plain_lines_and_counting_phases() -> None:
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(20, stream, clock=lambda: now[0])
    display.phase("starting 4 slots")
    for count in range(20):
        display.phase(f"warm-up {count}/20 loss {count / 7:.2f}")
        now[0] += 1.0
    display.step(STEP, LAYOUT)
    display.transition(DONE)
    display.note("a note")
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(" loss")[0] for line in lines[:5]] == [
        "starting 4 slots",
        "warm-up 0/20",
        "warm-up 5/20",
        "warm-up 10/20",
        "warm-up 15/20",
    ]
    assert [line.split()[0] for line in lines[5:]] == ["step", "change", "a"]


def test_rich_lines_stay_and_markup_is_text() -> None:
    stream = io.StringIO()
    display = RichDisplay(20, Console(file=stream, force_terminal=True, width=60, color_system=None))
    display.phase("reading [bold]x[/] [0/1]")
    display.step(STEP, LAYOUT)
    display.transition(DONE)
    display.note("[red] is a word here")
    display.close()
    display.close()
    shown = stream.getvalue()
    assert step_line(STEP, LAYOUT, 20) in shown
    assert "[red] is a word here" in shown
    assert "[bold]x[/] [0/1]" in shown


def test_a_terminal_gets_rich() -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        display = open_display(3, terminal)
        display.close()
    os.close(leader)
    assert isinstance(display, RichDisplay)
    assert isinstance(open_display(3, io.StringIO()), PlainDisplay)


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = QuietDisplay()
    display.phase("a")
    display.step(STEP, LAYOUT)
    display.transition(DONE)
    display.note("b")
    display.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("count_bytes", "text"), [(0, "0 B"), (999, "999 B"), (3_400, "3.4 kB"), (3_400_000, "3.4 MB"), (2e9, "2.0 GB")]
)
def test_bytes_for_people(count_bytes: float, text: str) -> None:
    assert bytes_text(count_bytes) == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("train TP2·PP2·DP1 · gen 2xTP2", "train TP1·PP2·DP2 · gen 2xTP2", "train TP2·PP2·DP1 -> TP1·PP2·DP2"),
        ("train TP2 · gen 2xTP2", "train TP1 · gen 4xTP1", "train TP2 -> TP1, gen 2xTP2 -> 4xTP1"),
        ("TP2·PP2·DP1", "TP1·PP2·DP2", "TP2·PP2·DP1 -> TP1·PP2·DP2"),
        ("train TP2", "train TP2 · gen 1xTP1", "train TP2 -> train TP2 · gen 1xTP1"),
        ("train TP2", "train TP2", "train TP2 -> train TP2"),
    ],
)
def test_a_change_names_what_differs(before: str, after: str, text: str) -> None:
    assert change_text(before, after) == text
