"""Every script in analysis/ draws from its sample: as a script, as a notebook's cells, with the same bytes each time."""

import dataclasses
import os
import runpy
import shutil
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import jupytext
import polars as pl
import pytest

from nereus.report.table import read_table, write_table
from tests.report.test_cluster_table import run_folder as clusters_folder
from tests.report.test_run_table import run_folder

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "analysis").glob("*.py"))
SIMULATED = {"throughput", "trace", "scale", "sensitivity", "accuracy"}
"""Experiments whose runs are simulated: their tables and figures say so, and measured data is never to be had of them."""
WHOLE = {"scale", "sensitivity", "accuracy", "overhead", "trace", "throughput"}
"""Experiments whose whole table ships, frozen: no sample."""
OF_A_RUN = {"measured_run", "measured_throughput"}
"""Scripts that draw run folders instead of the table of an experiment."""
TAKEN = [script for script in SCRIPTS if script.stem not in SIMULATED | WHOLE | OF_A_RUN]
MAX_SAMPLE_BYTES = 100_000


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a script ended: its exit code, what it printed, and the error that ended it."""

    returncode: int
    stdout: str
    stderr: str


def placed(script: Path, folder: Path) -> Path:
    """`script`, copied with its shipped table to `folder`/analysis, where there may be a collected table."""
    (folder / "analysis/data").mkdir(parents=True, exist_ok=True)
    shutil.copy(script, folder / "analysis")
    shutil.copy(sample_of(script), folder / "analysis/data")
    return folder / "analysis" / script.name


def asked() -> list[str]:
    """What the user's environment asks of the scripts: a run's folder, measured data."""
    return [name for name in os.environ if name.startswith("NEREUS_R")]


def drawn(script: Path, folder: Path, **environment: str) -> Ended:
    """The end of the script in this process, which has its imports: as the cells of a notebook are run."""
    copy, printed, error = placed(script, folder), StringIO(), ""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [str(copy)])
        for name in asked():
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            runpy.run_path(str(copy), run_name="__main__")
        except Exception:  # noqa: BLE001 - a process would print it and end with 1
            error = traceback.format_exc()
    return Ended(returncode=1 if error else 0, stdout=printed.getvalue(), stderr=error)


def drawn_alone(script: Path, folder: Path, settings: Path) -> Ended:
    """The end of the script in a process of its own; matplotlib keeps its list of fonts in `settings`."""
    copy = placed(script, folder)
    known = {name: value for name, value in os.environ.items() if name not in asked()}
    known |= {"PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(settings)}
    ended = subprocess.run(
        [sys.executable, str(copy)], cwd=folder, env=known, capture_output=True, text=True, timeout=120, check=False
    )
    return Ended(returncode=ended.returncode, stdout=ended.stdout, stderr=ended.stderr)


@pytest.fixture(scope="module")
def matplotlib_settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matplotlib")


def sample_of(script: Path) -> Path:
    return ROOT / f"analysis/data/{script.stem}{'' if script.stem in WHOLE else '.sample'}.parquet"


def figures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "analysis/figures").iterdir())}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_ships_is_small_real_and_says_so(script: Path) -> None:
    table, source = read_table(sample_of(script))
    assert sample_of(script).stat().st_size < MAX_SAMPLE_BYTES
    assert source.sample == (script.stem not in WHOLE)
    assert source.measured == (script.stem not in SIMULATED)
    assert set(source.runs) == set(table["run_id"])
    assert all(run.command and run.machine and run.date and run.versions for run in source.runs.values())
    assert sample_of(script).name in (ROOT / "analysis/data/README.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_same_table_gives_the_same_bytes(script: Path, tmp_path: Path, matplotlib_settings: Path) -> None:
    first, second = drawn_alone(script, tmp_path / "a", matplotlib_settings), drawn(script, tmp_path / "b")
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert ("SAMPLE DATA" in first.stdout) == (script.stem not in WHOLE)
    assert ("simulated" in first.stdout) == (script.stem in SIMULATED)
    assert {Path(name).suffix for name in figures(tmp_path / "a")} >= {".png", ".pdf"}
    assert figures(tmp_path / "a") == figures(tmp_path / "b")


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.stem not in WHOLE - SIMULATED], ids=lambda s: s.stem)
def test_a_sample_is_refused_where_measured_data_is_required(script: Path, tmp_path: Path) -> None:
    ended = drawn(script, tmp_path, NEREUS_REQUIRE_MEASURED="1")
    assert ended.returncode != 0
    how = "make run" if script.stem in OF_A_RUN else f"make experiments EXPERIMENT={script.stem}"
    message = f"is sample data, and NEREUS_REQUIRE_MEASURED is set; measure it first: {how}"
    assert message in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "analysis/figures").exists()


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.stem in SIMULATED], ids=lambda script: script.stem)
def test_a_collected_simulation_goes_before_the_sample_and_is_never_measured(script: Path, tmp_path: Path) -> None:
    table, source = read_table(sample_of(script))
    write_table(table, dataclasses.replace(source, sample=False), tmp_path / f"runs/{script.stem}/table.parquet")
    ended = drawn(script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "simulated" in ended.stdout
    assert "SAMPLE DATA" not in ended.stdout
    assert drawn(script, tmp_path, NEREUS_REQUIRE_MEASURED="1").returncode != 0


@pytest.mark.parametrize("script", TAKEN, ids=lambda script: script.stem)
def test_a_collected_table_goes_before_the_sample(script: Path, tmp_path: Path) -> None:
    table, source = read_table(sample_of(script))
    longer = table.with_columns(
        pl.when(pl.col("metric") == "timing_s/step").then(2.0).otherwise("value").alias("value")
    )
    measured = dataclasses.replace(source, sample=False)
    write_table(longer, measured, tmp_path / f"runs/{script.stem}/table.parquet")
    ended = drawn(script, tmp_path, NEREUS_REQUIRE_MEASURED="1")
    assert ended.returncode == 0, ended.stderr
    assert "measured" in ended.stdout
    assert "SAMPLE" not in ended.stdout
    assert "2.000" in ended.stdout


RUN_SCRIPT = ROOT / "analysis/measured_run.py"


@pytest.mark.parametrize("changes", [(), (3,)], ids=["no change of plan", "a change"])
def test_a_run_folder_goes_before_the_sample(tmp_path: Path, changes: tuple[int, ...]) -> None:
    run = run_folder(tmp_path / "runs/quickstart", changes=changes)
    ended = drawn(RUN_SCRIPT, tmp_path, NEREUS_REQUIRE_MEASURED="1")
    assert ended.returncode == 0, ended.stderr
    assert "measured, run quickstart" in ended.stdout
    assert "SAMPLE" not in ended.stdout
    assert f"pauses: {0.5 * len(changes):.3f} s" in ended.stdout
    named = drawn(RUN_SCRIPT, tmp_path / "elsewhere", NEREUS_RUN=str(run))
    assert named.returncode == 0, named.stderr
    assert "measured, run quickstart" in named.stdout


def test_throughput_of_runs_goes_before_the_sample(tmp_path: Path) -> None:
    clusters_folder(tmp_path / "runs/took-place", 2)
    clusters_folder(tmp_path / "runs/model-of-it", 2, began_seconds=0.0)
    ended = drawn(ROOT / "analysis/measured_throughput.py", tmp_path, NEREUS_REQUIRE_MEASURED="1")
    assert ended.returncode == 0, ended.stderr
    assert "2 runs on 1 clusters" in ended.stdout
    assert "SAMPLE" not in ended.stdout
    marks = {line.split()[3]: line.split()[5] for line in ended.stdout.splitlines() if line.startswith("2 x cpu")}
    assert marks == {"took-place": "measured", "model-of-it": "simulated"}
    named = drawn(ROOT / "analysis/measured_throughput.py", tmp_path, NEREUS_RUNS=str(tmp_path / "runs/took-place"))
    assert "1 runs on 1 clusters" in named.stdout


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    ended = drawn(RUN_SCRIPT, tmp_path, NEREUS_RUN=str(tmp_path / "none"))
    assert ended.returncode != 0
    assert "expected a run folder" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_opens_as_a_notebook(script: Path) -> None:
    cells = jupytext.read(script)["cells"]
    assert {cell["cell_type"] for cell in cells} == {"code", "markdown"}
    assert len(cells) > 4
