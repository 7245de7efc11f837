"""The import rule (contracts in pyproject.toml) holds, and each contract can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def broken_imports(root: Path) -> str:
    """import-linter's report on the package in `root`, empty if all contracts hold."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_import_rule_holds() -> None:
    report = broken_imports(ROOT)
    assert not report, report


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of a few modules that keeps the rule."""
    root = tmp_path_factory.mktemp("clean")
    shutil.copy(ROOT / "pyproject.toml", root)
    for module in (
        "plan",
        "transfer/routes",
        "transitions/order",
        "costs/step",
        "planning/search",
        "sim/world",
        "runtime/slot",
        "rl/batch",
        "engines/vllm/sync",
    ):
        file = root / "nereus" / f"{module}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("import vllm\n" if "engines" in module else "")
    for folder in [root / "nereus", *(p for p in (root / "nereus").rglob("*") if p.is_dir())]:
        (folder / "__init__.py").write_text('"""A package."""\n')
    assert broken_imports(root) == ""
    return root


@pytest.mark.parametrize(
    ("path", "line", "complaint"),
    [
        ("plan.py", "import time", "nereus.plan is not allowed to import time"),
        ("plan.py", "import torch", "nereus.plan is not allowed to import torch"),
        ("plan.py", "import nereus.runtime.slot", "nereus.plan is not allowed to import nereus.runtime.slot"),
        ("plan.py", "import nereus.engines.vllm.sync", "not allowed to import nereus.engines.vllm.sync"),
        ("transfer/routes.py", "import torch", "nereus.transfer.routes is not allowed to import torch"),
        ("transitions/order.py", "import time", "nereus.transitions.order is not allowed to import time"),
        ("costs/step.py", "import nereus.rl.batch", "nereus.costs.step is not allowed to import nereus.rl.batch"),
        ("planning/search.py", "import time", "nereus.planning.search is not allowed to import time"),
        ("sim/world.py", "import nereus.runtime.slot", "nereus.sim.world is not allowed to import nereus.runtime.slot"),
        ("runtime/slot.py", "import nereus.sim.world", "nereus.runtime.slot is not allowed to import nereus.sim.world"),
        ("runtime/slot.py", "import vllm", "not allowed to import vllm"),
        ("rl/batch.py", "from megatron.core import parallel_state", "not allowed to import megatron"),
    ],
)
def test_import_rule_can_fail(clean: Path, tmp_path: Path, path: str, line: str, complaint: str) -> None:
    root = shutil.copytree(clean, tmp_path / "package")
    (root / "nereus" / path).write_text(f"{line}\n")
    assert complaint in " ".join(broken_imports(root).split())
