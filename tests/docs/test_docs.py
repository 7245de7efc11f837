"""The documentation: commands that their own parsers take, files, make targets and links that are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereus.cli.load import load_config
from nereus.cli.main import _parsed
from nereus.errors import ConfigError
from nereus.validate import validate

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```sh( gpu)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`((?:nereus|tests|benchmarks|experiments|scripts)/[\w/.]*)`")
FOREIGN = {"python3.12", ".venv/bin/pip", "ray"}


def commands(page: Path) -> Iterator[list[str]]:
    for _, text in BLOCK.findall(page.read_text()):
        for line in text.splitlines():
            words = shlex.split(line)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            yield words


ALL = [pytest.param(words, id=" ".join(words)[:60]) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize("words", ALL)
def test_a_command_is_one(words: list[str]) -> None:
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words[1]
        return
    if words[:2] == [".venv/bin/python", "-m"]:
        assert (ROOT / words[2].replace(".", "/") / "__main__.py").is_file(), words[2]
        return
    if words[0] in FOREIGN:
        return
    assert words[0] == "nereus"
    arguments, _ = _parsed(words[1:])
    given: list[str] = getattr(arguments, "words", None) or []
    if given and given[0].startswith("experiments/"):
        assert (ROOT / given[0]).is_file(), given[0]
        if given[0].endswith("quickstart.yaml"):
            validate(load_config(ROOT / given[0], given[1:]))


def test_a_wrong_word_is_found() -> None:
    with pytest.raises(SystemExit):
        _parsed(["explain", "runs/quickstart", "--setp", "9"])
    with pytest.raises(ConfigError, match="actor_trian"):
        load_config(ROOT / "experiments" / "quickstart.yaml", ["plan.actor_trian.tp=2"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_points_at_is_there(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in CODE.findall(text):
        assert (ROOT / path).exists(), path
    for names, path in re.findall(r"((?:`test_\w+`(?: and )?)+) in `([\w/.]+)`", text):
        for name in re.findall(r"test_\w+", names):
            assert f"def {name}(" in (ROOT / path).read_text(), name
    assert len(ALL) > 15
