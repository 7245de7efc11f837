"""Carrying an experiment out: what is finished is skipped, what was interrupted set aside and done again.

The job is small and real in what it writes: a journal and metrics by the product's own writers.
"""

import os
import signal
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from nereus.cli.experiments import Trainer, add_experiment, chosen_runs, experiment, folder_of
from nereus.cli.main import carry_out, main
from nereus.config import Config
from nereus.errors import ConfigError, JournalError, NereusError, SlotFailed
from nereus.report.display import Display
from nereus.report.record import read_provenance, read_run
from nereus.report.table import SCHEMA, read_table, write_table
from nereus.runtime.journal import Journal, RunFolder
from nereus.runtime.metrics import MetricsWriter, NoMirror
from nereus.runtime.stop import StopSignal
from nereus.validate import validate

PAIR = """
from nereus.config import ChangeConfig, PlanChange, StageConfig
from nereus.experiment import Run, Workload, without_changes
def runs():
    change = ChangeConfig(step=2, plan=PlanChange(actor_train=StageConfig(dp=2)))
    live = Run(experiment="pair", variant="live", workload=Workload(steps=3), changes=(change,))
    return live, without_changes(live, "fixed")
"""
LIVE, FIXED = "pair-live-s1-", "pair-fixed-s1-"

Job = Callable[[Config, RunFolder, Display, StopSignal, Path | None], None]
Command = Callable[..., int]


def job(config: Config, folder: RunFolder, display: Display, stop: StopSignal, rollouts: Path | None) -> None:
    """Steps whose reward is their number; stops after the present step when asked."""
    journal, metrics = Journal(folder.events), MetricsWriter(folder.metrics, NoMirror())
    journal.append("run_started", config={"run": {"steps": config.run.steps}}, at_seconds=100.0)
    changes = {change.step for change in config.changes}
    step = 0
    while step < config.run.steps and not stop.requested:
        step += 1
        if step in changes:
            facts = {"transition": "t1", "step": step, "from": "a", "to": "b"}
            seconds = {"move": 0.25, "attach": 0.5}
            journal.append("transition_started", **facts, at_seconds=100.0 + step)
            journal.append("transition_done", **facts, seconds=seconds, pause_seconds=0.75, at_seconds=100.0 + step)
        row = {"timing_s/step": 0.5, "critic/score/mean": float(step), "timing_s/transition": 0.75 * (step in changes)}
        journal.append("step_done", step=step, metrics=row, at_seconds=101.0 + step)
        metrics.write(step, row)
    reason = "stopped" if stop.requested else "done"
    journal.append("run_stopped", reason=reason, steps=step, at_seconds=101.0 + step)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`nereus experiment WORDS` in a folder with the experiment `pair`, with any job."""
    monkeypatch.chdir(tmp_path)
    Path("experiments").mkdir()
    Path("experiments/pair.py").write_text(PAIR)
    parser = ArgumentParser()
    add_experiment(parser)

    def run(*words: str, job: Job = job) -> int:
        trainer = Trainer(check=validate, run_job=job, carry_out=carry_out)
        return experiment(parser.parse_intermixed_args(words), trainer)

    return run


def folders() -> list[str]:
    """What lies in runs/pair, without the hash in the names."""
    names = [path.name for path in Path("runs/pair").glob("pair-*")]
    return sorted(name[: name.index("-s1-") + 4] for name in names)


def test_it_runs_then_skips(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("run", "pair") == 0
    shown = capsys.readouterr().out
    assert f"run 1 of 2, {LIVE}" in shown
    assert shown.count("done, 3 of 3 steps") == 2
    assert folders() == [FIXED, LIVE]
    for run in chosen_runs("pair", [], None):
        assert read_run(folder_of(run).path) == run
        assert read_provenance(folder_of(run).path).command == "nereus experiment run pair"

    def never(*_: object) -> None:
        raise AssertionError("a finished run is carried out again")

    assert command("run", "pair", job=never) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines] == ["finished, skipped"] * 2


def test_overrides_are_other_runs(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command("run", "pair")
    command("run", "pair", "run.steps=4")
    assert folders() == [FIXED, FIXED, LIVE, LIVE]
    capsys.readouterr()
    assert command("status", "pair", "run.steps=4", "--only", "live") == 0
    assert "finished  4/4 steps" in capsys.readouterr().out


def test_ctrl_c_leaves_the_rest_for_the_next_time(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(*words: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        job(*words)  # type: ignore[arg-type]

    assert command("run", "pair", job=interrupted) == 130
    assert "stopped; the same command goes on from here" in capfd.readouterr().err
    assert folders() == [LIVE]
    command("status", "pair")
    assert [line.split()[1:4] for line in capfd.readouterr().out.splitlines()] == [
        ["unfinished", "0/3", "steps"],
        ["to", "do", "0/3"],
    ]
    assert command("run", "pair") == 0
    assert "what was interrupted is now runs/pair/pair-live-s1-" in capfd.readouterr().out
    assert folders() == [FIXED, LIVE, LIVE]
    aside = list(Path("runs/pair").glob("*-interrupted-1"))
    assert len(aside) == 1
    assert RunFolder(path=aside[0]).is_run()
    command("status", "pair")
    assert "finished  3/3 steps  1 set aside" in capfd.readouterr().out


def test_a_failing_run_ends_the_experiment_and_the_rest_resumes(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(config: Config, folder: RunFolder, *words: object) -> None:
        if "-fixed-" in folder.path.name:
            journal = Journal(folder.events)
            journal.append("run_started")
            journal.append("run_stopped", reason="failed", error="boom")
            raise SlotFailed("slot 2: boom")
        job(config, folder, *words)  # type: ignore[arg-type]

    for times in (1, 2):
        with pytest.raises(SlotFailed, match="boom"):
            command("run", "pair", job=failing)
        assert folders() == [*[FIXED] * times, LIVE]
    assert "failed; the same command starts it again" in capsys.readouterr().err
    assert command("run", "pair") == 0
    assert sorted(path.name[-2:] for path in Path("runs/pair").glob("*-interrupted-*")) == ["-1", "-2"]


def test_a_killed_run_is_done_again(command: Command) -> None:
    command("run", "pair")
    events = folder_of(chosen_runs("pair", [], ["live"])[0]).events
    events.write_bytes(events.read_bytes()[:-10])  # the last line is torn: nobody saw it end
    assert command("run", "pair") == 0
    assert folders() == [FIXED, LIVE, LIVE]


def test_a_run_in_other_hands_is_left_alone(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    def meanwhile(config: Config, folder: RunFolder, *words: object) -> None:
        if "-live-" in folder.path.name:
            Journal(folder.events).append("run_started")
            command("status", "pair", "--only", "live")
            command("run", "pair")
            folder.events.unlink()
        job(config, folder, *words)  # type: ignore[arg-type]

    assert command("run", "pair", job=meanwhile) == 0
    shown = capsys.readouterr().out
    assert "running  0/3 steps" in shown
    assert "another process carries it out, skipped" in shown
    assert folders() == [FIXED, LIVE]


def test_all_are_checked_before_the_first_starts(command: Command) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a run started")

    with pytest.raises(ConfigError, match=r"changes\[0\]\.step = 2: expected a step from 1 to run\.steps = 1"):
        command("run", "pair", "run.steps=1", job=never)
    assert not Path("runs").exists()


def test_a_job_that_refuses_leaves_nothing(command: Command) -> None:
    def refusing(*_: object) -> None:
        raise ConfigError("plan.actor_train", "tp=1", "does not fit")

    with pytest.raises(ConfigError):
        command("run", "pair", job=refusing)
    assert folders() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run",), "NAME = None: expected an experiment: pair"),
        (("run", "run.steps=3"), "NAME = 'run.steps=3': expected an experiment"),
        (("status", "piar"), "NAME = 'piar': no such experiment; there are: pair"),
        (("status", "../pair"), "NAME = '../pair': no such experiment"),
        (
            ("run", "pair", "--only", "dead"),
            "--only = 'dead': expected a variant or a run's id: fixed, live, pair-live-s1-",
        ),
        (("collect", "pair", "changes=[]"), "changes = '[]': expected run.steps or a key of model"),
    ],
)
def test_wrong_words(words: tuple[str, ...], message: str, command: Command) -> None:
    with pytest.raises(ConfigError) as caught:
        command(*words)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "expected a function runs()"),
        ("def runs(): return ()", "expected of runs()"),
        (PAIR.replace('"pair"', '"other"'), "expected of runs()"),
        (PAIR.replace("live, without_changes(", "live, live, without_changes("), "expected of runs()"),
    ],
)
def test_a_wrong_experiment(text: str, message: str, command: Command) -> None:
    Path("experiments/pair.py").write_text(text)
    with pytest.raises(ConfigError, match="NAME = 'pair'") as caught:
        command("status", "pair")
    assert message in str(caught.value)


def test_list(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list") == 0
    command("run", "pair", "--only", "fixed")
    capsys.readouterr()
    assert main(["experiment", "list"]) == 0
    assert capsys.readouterr().out == "pair  2 runs  1 finished\n"


def test_collect(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NereusError, match="no run of pair is finished"):
        command("collect", "pair")
    command("run", "pair", "--only", "live")
    capsys.readouterr()
    assert command("collect", "pair") == 0
    shown = capsys.readouterr()
    assert shown.out == "runs/pair/table.parquet: 1 of 2 runs, 18 rows\n"
    assert shown.err.startswith(f"left out: {FIXED}")
    table, source = read_table(Path("runs/pair/table.parquet"))
    assert table.schema == SCHEMA
    [run] = chosen_runs("pair", [], ["live"])
    assert set(table.select("run_id", "experiment", "variant", "system", "seed").iter_rows()) == {
        (run.run_id, "pair", "live", "nereus", 1)
    }
    values = {(step, metric): value for step, metric, value in table.select("step", "metric", "value").iter_rows()}
    assert values == {
        (None, "run/seconds"): 4.0,
        (None, "run/training_seconds"): 2.5,  # from the start of the first step, half a second before its end
        (None, "run/transition_fraction"): 0.3,
        (None, "run/transitions_count"): 1.0,
        (None, "run/restores_count"): 0.0,
        (None, "run/steps_count"): 3.0,
        **{(step, "critic/score/mean"): float(step) for step in (1, 2, 3)},
        **{(step, "timing_s/step"): 0.5 for step in (1, 2, 3)},
        **{(step, "timing_s/transition"): 0.75 * (step == 2) for step in (1, 2, 3)},
        (2, "transition_s/move"): 0.25,
        (2, "transition_s/attach"): 0.5,
        (2, "transition/failed"): 0.0,
    }
    assert (source.measured, source.sample, source.command) == (True, False, "nereus experiment collect pair")
    assert list(source.runs) == [run.run_id]


def test_collect_keeps_the_metrics_that_are_asked_for(command: Command) -> None:
    command("run", "pair")
    command("collect", "pair", "--metric", "timing_s/step")
    table, source = read_table(Path("runs/pair/table.parquet"))
    of_steps = table.filter(pl.col("step").is_not_null())
    assert set(of_steps["metric"]) == {"timing_s/step"}
    assert of_steps.height == 6
    assert "run/seconds" in set(table["metric"])
    assert source.command == "nereus experiment collect pair --metric timing_s/step"


def test_collect_again_gives_the_same_bytes(command: Command) -> None:
    command("run", "pair")
    command("collect", "pair", "--out", "a/table.parquet")
    command("collect", "pair", "--out", "b/table.parquet")
    assert Path("a/table.parquet").read_bytes() == Path("b/table.parquet").read_bytes()
    command("collect", "pair", "--sample", "--out", "c.parquet")
    assert read_table(Path("c.parquet"))[1].sample
    command("collect", "pair", "--metric", "run/*", "--metric", "*/step", "--out", "d.parquet")
    few, source = read_table(Path("d.parquet"))
    assert set(few["metric"]) == {
        *(name for name in few["metric"] if name.startswith("run/")),
        "timing_s/step",
    }
    assert source.command == "nereus experiment collect pair --metric 'run/*' --metric '*/step'"
    with pytest.raises(ConfigError, match="--metric"):
        command("collect", "pair", "--metric", "none")


def test_collect_refuses_records_that_are_not_whole(command: Command) -> None:
    command("run", "pair")
    metrics = folder_of(chosen_runs("pair", [], None)[0]).metrics
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(JournalError, match="expected the steps 1 to 3, found"):
        command("collect", "pair")


def test_a_table_of_another_shape_is_refused(command: Command) -> None:
    command("run", "pair")
    command("collect", "pair")
    path = Path("runs/pair/table.parquet")
    table, source = read_table(path)
    table.write_parquet("bare.parquet")
    write_table(table.rename({"value": "number"}), source, Path("other.parquet"))
    Path("text.parquet").write_text("no")
    for name, message in (("bare", "where it comes from"), ("other", "collect it again"), ("text", "as parquet")):
        with pytest.raises(JournalError, match=message):
            read_table(Path(f"{name}.parquet"))
    with pytest.raises(ConfigError, match="--out"):
        write_table(pl.DataFrame(schema=SCHEMA), source, path / "below")


SIMULATED = f"""
from dataclasses import replace
from pathlib import Path
from nereus.cli.load import load_config
from nereus.experiment import Scene, run_of
def runs():
    words = ["data.prompts_per_step=16", "run.steps=2"]
    config = load_config(Path("{Path(__file__).parents[2] / "experiments" / "traces" / "ppo_8b.yaml"}"), words)
    run = run_of(config, experiment="paper", variant="short", seed=1)
    scene = Scene(fleet="64xh100", mean_tokens=200.0)
    return tuple(
        replace(run, variant=name, scene=replace(scene, mean_tokens=mean))
        for name, mean in (("short", 200.0), ("long", 2000.0))
    )
"""


def test_runs_of_a_scene_are_simulated(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    Path("experiments/paper.py").write_text(SIMULATED)

    def never(*_: object) -> None:
        raise AssertionError("a simulated run took place")

    assert command("run", "paper", job=never) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].split(" in ")[0] for line in lines] == ["simulated 2 steps"] * 2
    runs = chosen_runs("paper", [], None)
    assert [read_run(folder_of(run).path) for run in runs] == list(runs)
    assert command("run", "paper", job=never) == 0
    assert capsys.readouterr().out.count("finished, skipped") == 2
    assert command("collect", "paper") == 0
    table, source = read_table(Path("runs/paper/table.parquet"))
    assert not source.measured
    seconds = table.filter(pl.col("metric") == "timing_s/step").group_by("variant").agg(pl.col("value").mean())
    known = dict(seconds.iter_rows())
    assert known["long"] > 2 * known["short"]
    events = folder_of(runs[0]).events.read_bytes()
    folder_of(runs[0]).path.rename("aside")
    assert command("run", "paper", job=never) == 0
    assert folder_of(runs[0]).events.read_bytes() == events


LOOKING_BACK = """
from dataclasses import replace
from experiments.past import runs as shared
def runs():
    made = [replace(run, experiment="back") for run in shared()]
    last = replace(made[0], variant="oracle")
    return [*made, replace(last, scene=replace(last.scene, policy="oracle", hindsight=tuple(r.run_id for r in made)))][::-1]
"""


def test_runs_side_by_side_and_those_that_look_back_last(command: Command, capfd: pytest.CaptureFixture[str]) -> None:
    text = LOOKING_BACK.replace(
        "from experiments.past import runs as shared", SIMULATED.replace("def runs", "def shared")
    )
    Path("experiments/back.py").write_text(text.replace("mean_tokens=mean", 'policy="fixed"'))
    with pytest.raises(ConfigError, match="carry it out first"):
        command("run", "back", "--only", "oracle", "run.steps=3")
    assert command("run", "back", "--jobs", "2", "run.steps=3") == 0
    lines = capfd.readouterr().out.splitlines()
    assert "3 of 3" in lines[-1]
    assert "the best of" in lines[-1]
    assert sum("simulated 3 steps" in line for line in lines) == 2
    assert command("run", "back", "--jobs", "2", "run.steps=3") == 0
    assert capfd.readouterr().out == "3 of 3 runs: finished, skipped\n"
    assert command("verify", "back", "--share", "1", "run.steps=3") == 0
    assert "3 of 3 runs done again: none differ" in capfd.readouterr().out
    assert command("collect", "back", "run.steps=3") == 0
    table, _ = read_table(Path("runs/back/table.parquet"))
    ends = dict(table.filter(pl.col("metric") == "run/seconds").select("variant", "value").iter_rows())
    assert ends["oracle"] <= min(ends.values())


def test_systems_of_a_scene_are_simulated(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """Nereus' best plan, verl's defaults, and a cluster on which no configuration of verl's defaults fits."""
    text = (Path(__file__).parents[2] / "experiments" / "throughput.py").read_text()
    Path("experiments/throughput.py").write_text(text.replace("STEPS = 5", "STEPS = 2"))
    names = ("nereus-best-plan-8xh100-short", "verl-default-8xh100-short")
    small = (*(word for name in names for word in ("--only", name)), "data.prompts_per_step=64")
    assert command("run", "throughput", *small) == 0
    assert capsys.readouterr().out.count("s a step, simulated") == 2
    assert command("collect", "throughput", *small) == 0
    table, source = read_table(Path("runs/throughput/table.parquet"))
    assert not source.measured
    assert set(table["system"]) == {"nereus", "verl"}
    phases = table.filter(pl.col("metric") == "timing_s/update_actor")
    assert phases.height == 4
    assert phases["value"].min() > 0  # type: ignore[operator]
    nowhere = ("--only", "verl-default-16xl40s-long", "data.max_response_tokens=60000")
    assert command("run", "throughput", *nowhere) == 0
    assert "verl default does not fit on 16xl40s" in capsys.readouterr().out
    assert command("run", "throughput", *nowhere) == 0
    assert "finished, skipped" in capsys.readouterr().out
    assert command("collect", "throughput", *nowhere) == 0
