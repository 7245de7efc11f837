"""One set of four slots for all multi-process tests: they are started once, and each test begins a new job on them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereus.runtime.pool import SlotPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "live" in item.path.parts:
            item.add_marker(pytest.mark.multiprocess)
    items.sort(
        key=lambda item: item.path.parts[-2:] == ("live", "test_losses.py")
    )  # its tests take the shared slots' lives


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlotPool]:
    """Four live slots in one world."""
    logs: Path = tmp_path_factory.mktemp("slots")
    slots = SlotPool(4, logs, start_timeout_seconds=400.0, phase_timeout_seconds=120.0, note=print)
    yield slots
    slots.close()
    gc.collect()
