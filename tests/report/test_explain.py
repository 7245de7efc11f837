"""What `nereus explain` says of a run over the toy world, as text and as a page."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from matplotlib.image import imread

from nereus.errors import JournalError
from nereus.report.explain import Explanation, explained, render
from nereus.report.explain_page import CHANGE, COLOURS, MEASURED, page
from nereus.report.replay import made_again
from nereus.report.verdict import verdict
from nereus.workload import PHASES
from tests.runtime.toy_world import ToyWorld, job, run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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
    for words in (
        chosen["plan_id"],
        f"{chosen['step_seconds']:.3f}",
        "change train TP2·PP2·DP1 -> ",
        "turned out  the change cost 0.50 s",
        f"its first {outcome.probation['steps']} steps took" if outcome.probation else "no probation",
        f"search {taken.entry['search_id']}",
    ):
        assert words in text, words
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
    changes = sum(each.taken for each in explanation.decisions)
    assert changes
    for picture in (steps, memory):
        assert len(picture.findall("circle")) == 16  # a prediction before every step
        assert len([line for line in picture.findall("line") if line.get("stroke") == CHANGE]) == changes
    assert {each.text for each in plans.findall("text")} != set()
    tips = [each.text or "" for each in steps.iter("title")]
    assert {int(tip.split()[1].rstrip(",")) for tip in tips} == set(range(1, 17))
    assert len(memory.findall("rect")) == 16
    assert text.count("<details") == len(explanation.decisions)
    assert text.count("<details class=change open>") == changes
    assert text.count("<tr class=chosen>") == sum(each.chosen is not None for each in explanation.decisions)
    taken = next(each for each in explanation.decisions if each.taken)
    assert escape(verdict(taken.entry, explanation.texts)) in text


def test_a_browser_shows_the_page_without_a_word_on_its_console(
    journal: list[dict[str, Any]], explanation: Explanation, tmp_path: Path
) -> None:
    text = page(explanation, journal)
    said, colours = shown(text, tmp_path / "page")
    assert "CONSOLE" not in said, said
    for colour in (*COLOURS[: len(PHASES)], MEASURED, CHANGE):
        assert colours[colour] > 20, f"{colour} is not drawn"
    broken = text.replace("</html>", "<script>missing()</script></html>")
    assert "CONSOLE" in shown(broken, tmp_path / "broken")[0]  # what the first assertion would have seen


def shown(text: str, folder: Path) -> tuple[str, Counter[str]]:
    """What a headless browser said while it drew a page, and how many points of the picture have each colour."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    folder.mkdir()
    (folder / "page.html").write_text(text, encoding="utf-8")
    picture = folder / "page.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder}/profile", "--window-size=1300,1100", f"--screenshot={picture}"]
    done = subprocess.run(
        [*command, (folder / "page.html").as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    points = (imread(picture)[..., :3] * 255).round().astype(int) @ (1 << 16, 1 << 8, 1)
    colours, counts = np.unique(points, return_counts=True)
    return done.stderr, Counter({f"#{c:06x}": int(n) for c, n in zip(colours, counts, strict=True)})


@pytest.mark.parametrize(
    ("policy", "words"), [("nereus", "nothing has been decided yet"), ("fixed", "fixed has a rule")]
)
def test_a_run_that_has_just_begun_and_a_policy_with_a_rule(policy: str, words: str) -> None:
    begun = [{"kind": "run_started", "seq": 1, "at_seconds": 0.0, "config": asdict(job(policy))}]
    assert words in render(explained(begun))
    assert words in page(explained(begun), begun)
    assert made_again(begun) == []


def test_a_run_with_a_script_has_nothing_to_explain() -> None:
    with pytest.raises(JournalError, match="script"):
        explained([])
