"""Simulated runs side by side, and again: the same bytes, and a difference that is found."""

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest

from nereus.cli.experiment_jobs import chosen_share
from nereus.cli.experiments import Trainer, add_experiment, chosen_runs, experiment, folder_of
from nereus.cli.main import carry_out
from nereus.errors import ConfigError, NereusError
from nereus.experiment import Run, Scene
from nereus.validate import validate

SCENES = """
from dataclasses import replace
from nereus.cli.load import load_config
from nereus.experiment import Scene, run_of
from pathlib import Path
def runs():
    words = ["run.steps=3", "data.prompts_per_step=32"]
    base = run_of(load_config(Path("JOB"), words), experiment="pair", variant="a", seed=1)
    base = replace(base, scene=Scene(fleet="64xh100", mean_tokens=400.0, policy="dp-scaling"))
    return base, replace(base, variant="b", scene=replace(base.scene, noise_ratio=4.0))
"""
JOB = Path(__file__).parents[2] / "experiments" / "traces" / "ppo_8b.yaml"
Command = Callable[..., int]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`nereus experiment WORDS` in a folder with two simulated runs."""
    monkeypatch.chdir(tmp_path)
    Path("experiments").mkdir()
    Path("experiments/pair.py").write_text(SCENES.replace("JOB", str(JOB)))
    parser = ArgumentParser()
    add_experiment(parser)

    def never(*_: object) -> None:
        raise AssertionError("a simulated run is no real job")

    def run(*words: str) -> int:
        trainer = Trainer(check=validate, run_job=never, carry_out=carry_out)
        return experiment(parser.parse_intermixed_args(words), trainer)

    return run


def test_side_by_side_gives_the_bytes_of_one_by_one(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NereusError, match="no simulated run is finished"):
        command("verify", "pair")
    assert command("run", "pair", "--jobs", "2") == 0
    assert capsys.readouterr().out.count("simulated 3 steps in") == 2
    folders = [folder_of(run) for run in chosen_runs("pair", [], None)]
    assert folders[0].metrics.read_bytes() != folders[1].metrics.read_bytes()
    assert command("run", "pair", "--jobs", "2") == 0
    assert capsys.readouterr().out == "2 of 2 runs: finished, skipped\n"

    assert command("verify", "pair", "--share", "1") == 0
    assert capsys.readouterr().out.endswith("2 of 2 runs done again: none differ\n")
    text = folders[0].metrics.read_text()
    folders[0].metrics.write_text(text.replace('"timing_s/gen":', '"timing_s/gen":1', 1))
    assert command("verify", "pair", "--share", "1") == 1
    told = capsys.readouterr().out
    assert "metrics.jsonl differs from line 1 on" in told
    assert told.endswith("2 of 2 runs done again: 1 differs\n")


def test_the_share_is_drawn_by_its_seed() -> None:
    runs = [Run(experiment="pair", variant=f"v{i}", scene=Scene(fleet="8xh100")) for i in range(100)]
    drawn = [chosen_share(runs, 0.05, seed) for seed in (1, 1, 2)]
    assert len(drawn[0]) == len(drawn[2]) == 5
    assert drawn[0] == drawn[1] != drawn[2]
    assert {run.variant for run in chosen_share(runs, 1.0, 1)} == {run.variant for run in runs}
    assert len(chosen_share(runs[:3], 0.05, 1)) == 1
    for share in (0.0, 1.5):
        with pytest.raises(ConfigError, match="--share"):
            chosen_share(runs, share, 1)


def test_wrong_words(command: Command) -> None:
    with pytest.raises(ConfigError, match="--jobs"):
        command("run", "pair", "--jobs", "0")
