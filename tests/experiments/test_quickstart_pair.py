"""What the experiment is: four runs, named by their content, that fit this machine's rules."""

from dataclasses import replace
from pathlib import Path

import pytest

from nereus.cli.experiments import load_experiment, overridden
from nereus.cli.load import load_config
from nereus.errors import ConfigError
from nereus.experiment import Run
from nereus.report.record import provenance_of, read_provenance, read_run, write_record
from nereus.validate import validate

ROOT = Path(__file__).parents[2]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> tuple[Run, ...]:
    monkeypatch.chdir(ROOT)
    return load_experiment("quickstart_pair")


def test_two_variants_with_two_seeds(runs: tuple[Run, ...]) -> None:
    assert [(run.variant, run.seed) for run in runs] == [("live", 1), ("fixed", 1), ("live", 2), ("fixed", 2)]
    assert [len(run.changes) for run in runs] == [2, 0, 2, 0]
    live, fixed = runs[0], runs[1]
    assert replace(fixed, variant="live", changes=live.changes) == live
    for run in runs:
        validate(run.config("runs"))


def test_it_is_the_quickstart_with_a_script_in_place_of_the_controller(runs: tuple[Run, ...]) -> None:
    config, scripted = runs[0].config("runs"), load_config(ROOT / "experiments/scripted.yaml", [])
    assert replace(config, run=scripted.run, logger=scripted.logger) == scripted
    assert config.run.steps == scripted.run.steps
    quickstart = load_config(ROOT / "experiments/quickstart.yaml", [])
    assert (quickstart.nereus.policy, quickstart.changes) == ("nereus", ())
    assert replace(quickstart, run=scripted.run, nereus=scripted.nereus, changes=scripted.changes) == scripted


def test_ids_are_a_function_of_content(runs: tuple[Run, ...]) -> None:
    assert len({run.run_id for run in runs}) == 4
    assert runs == load_experiment("quickstart_pair")
    changed = [overridden(run, ["run.steps=16", "algorithm.actor_lr=1e-3"]) for run in runs]
    assert len({run.run_id for run in [*runs, *changed]}) == 8
    assert [run.workload.steps for run in changed] == [16] * 4
    assert replace(changed[0].workload, steps=20, algorithm=runs[0].workload.algorithm) == runs[0].workload
    assert overridden(runs[0], ["run.steps=20"]) == runs[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("changes=[]", "changes = '[]': expected run.steps or a key of model, data,"),
        ("run.seed=3", "run.seed = '3': expected run.steps"),
        ("logger.wandb=off", "logger.wandb = 'off': expected"),
        ("warmup.stpes=3", "warmup.stpes = 3: is not a key; did you mean warmup.steps?"),
        ("warmup.steps=x", "warmup.steps = 'x': expected a whole number"),
    ],
)
def test_a_wrong_override(override: str, message: str, runs: tuple[Run, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(runs[0], [override])
    assert str(caught.value).startswith(message)


def test_the_record_reads_back_equal(runs: tuple[Run, ...], tmp_path: Path) -> None:
    provenance = provenance_of("nereus experiment run quickstart_pair")
    for run in runs:
        write_record(tmp_path, run, provenance)
        assert read_run(tmp_path) == run
        assert read_run(tmp_path).run_id == run.run_id
    assert read_provenance(tmp_path) == provenance
    assert provenance.versions["nereus"]
    assert "cores" in provenance.machine
