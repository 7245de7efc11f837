"""Options of the test run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("nereus", deadline=None)  # examples take longer beside other work, and no timing is asserted
settings.load_profile("nereus")
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what the tests found as the golden files")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, object], None]:
    """Compares a value with tests/golden/NAME.json; with --update-golden writes it there."""

    def compare(name: str, value: object) -> None:
        path = GOLDEN / f"{name}.json"
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest with --update-golden and look at what it wrote"
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs: if meant, pytest --update-golden"

    return compare
