"""What `nereus explain` says of a run over the toy world, as text and as a page."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from nereus.errors import JournalError
from nereus.report.explain import Explanation, explained, render
from nereus.report.explain_page import page
from tests.runtime.toy_world import ToyWorld, job, run


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(ToyWorld(job()), tmp_path_factory.mktemp("run") / "events.jsonl")[1]


@pytest.fixture(scope="module")
def explanation(journal: list[dict[str, Any]]) -> Explanation:
    return explained(journal)


def test_a_change_is_told_with_its_numbers_and_what_it_turned_out_to_be(explanation: Explanation) -> None:
    (taken,) = [each for each in explanation.decisions if each.taken]
    outcome = taken.outcome
    assert outcome is not None
    assert outcome.state == "done"
    assert outcome.pause_seconds == 0.5
    assert outcome.steps == 17 - taken.step
    assert outcome.measured_seconds == pytest.approx(outcome.predicted_seconds, rel=0.15)
    text = render(explanation, taken.step)
    chosen = taken.chosen
    assert chosen is not None
    for words in (chosen["plan_id"], f"{chosen['step_seconds']:.3f}", "turned out", "the change cost 0.50 s"):
        assert words in text
    assert text.count("before step") == 1
    assert all(each["plan_id"] in text for each in taken.entry["weighed"])


def test_a_step_without_a_decision_shows_the_last_one_before_it(explanation: Explanation) -> None:
    last = explanation.decisions[-1].step
    assert render(explanation, last + 1) == render(explanation, last)
    assert "nothing was decided" in render(explanation, 1)


def test_the_page_stands_by_itself_and_draws_every_step(
    journal: list[dict[str, Any]], explanation: Explanation
) -> None:
    text = page(explanation, journal)
    assert not re.search(r"<script|https?://|src=|@import|url\(", text)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 3
    plans, steps, memory = (ET.fromstring(each) for each in pictures)  # our own
    assert len(plans.findall("rect")) == 16
    assert {each.text for each in plans.findall("text")} != set()
    tips = [each.text or "" for each in steps.iter("title")]
    assert {int(tip.split()[1].rstrip(",")) for tip in tips} == set(range(1, 17))
    assert len(memory.findall("rect")) == 16
    assert text.count("<details>") == len(explanation.decisions)


def test_a_run_with_a_script_has_nothing_to_explain() -> None:
    with pytest.raises(JournalError, match="script"):
        explained([])
