"""The command line: exit codes, one clear line for each mistake, nothing heavy before a job starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nereus.cli.main import STOPPED, carry_out, main
from nereus.config import Config, RunConfig
from nereus.errors import ConfigError, NereusError, SlotFailed
from nereus.report.display import Display
from nereus.runtime.journal import Journal, RunFolder
from nereus.runtime.stop import StopSignal


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(f"run: {{folder: {tmp_path / 'runs'}, steps: 2}}\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run=RunConfig(folder=str(tmp_path / "runs"), steps=2))


def job(config: Config, folder: RunFolder, display: Display, stop: StopSignal, rollouts: Path | None) -> None:
    """A job that only records its steps and stops when asked."""
    journal = Journal(folder.events)
    journal.append("run_started", config={"run": {"steps": config.run.steps}})
    for step in range(1, config.run.steps + 1):
        if not stop.requested:
            display.step({"training/global_step": step}, "gen 1xTP1")
            journal.append("step_done", step=step)
    journal.append("run_stopped", reason="stopped" if stop.requested else "done")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "error: CONFIG = None: expected a configuration file, such as the shipped experiments/quickstart"),
        (["train", "run.steps=3"], "error: CONFIG = None: expected a configuration file"),
        (["train", "nowhere.yaml"], "error: CONFIG = 'nowhere.yaml': no such file; the shipped quickstart is"),
        (["train", "{}", "run.stpes=3"], "error: run.stpes = 3: is not a key; did you mean run.steps?"),
        (["train", "{}", "run.steps=x"], "error: run.steps = 'x': expected a whole number, such as 20"),
        (["train", "{}", "plan.actor_train.tp=3"], "error: plan.actor_train.tp = 3: expected a divisor of model.heads"),
        (["train", "{}", "logger.wandb=online"], "error: logger.wandb = 'online': expected a login"),
        (["train", "{}", "--rollouts", "nowhere"], "error: --rollouts = 'nowhere': expected a run folder"),
        (["train", "{}", "--rollouts", "nowhere", "run.steps=3"], "error: --rollouts = 'nowhere'"),
        (["report", "nowhere"], "error: RUN = 'nowhere': expected a run folder"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_2(
    words: list[str], message: str, config_path: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert main([word.replace("{}", config_path) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(message)
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_an_unwritable_folder(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config_path, f"run.folder={config_path}/runs"]) == 2
    assert "error: run.folder = " in capsys.readouterr().err


@pytest.mark.parametrize("words", [["trian"], ["train", "--nope"], ["report"]])
def test_wrong_words_are_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


def test_a_job_done(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert carry_out(config, None, job) == 0
    shown = capsys.readouterr().out
    assert "step 1/2  gen 1xTP1\nstep 2/2  gen 1xTP1\n" in shown
    assert "run run: done" in shown
    assert main(["report", f"{config.run.folder}/run"]) == 0
    assert "run run: done" in capsys.readouterr().out


def test_a_job_asked_to_stop(config: Config, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(
        config: Config, folder: RunFolder, display: Display, stop: StopSignal, rollouts: Path | None
    ) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        job(config, folder, display, stop, rollouts)

    assert carry_out(config, None, interrupted) == STOPPED
    shown = capfd.readouterr()
    assert "stopping after this step" in shown.err
    assert "run run: stopped" in shown.out


@pytest.mark.parametrize("error", [SlotFailed("slot 2: Traceback\n  boom"), NereusError("no"), KeyboardInterrupt()])
def test_a_job_that_fails_leaves_its_record(
    config: Config, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(config: Config, folder: RunFolder, display: Display, stop: StopSignal, rollouts: Path | None) -> None:
        Journal(folder.events).append("run_started")
        raise error

    with pytest.raises(type(error)):
        carry_out(config, None, failing)
    assert f"what was recorded is in {config.run.folder}/run" in capsys.readouterr().err
    assert RunFolder(path=Path(config.run.folder, "run")).is_run()


def test_a_job_that_refuses_its_configuration_leaves_nothing(config: Config) -> None:
    def refusing(config: Config, folder: RunFolder, display: Display, stop: StopSignal, rollouts: Path | None) -> None:
        raise ConfigError("plan.actor_train", "tp=1", "does not fit")

    with pytest.raises(ConfigError):
        carry_out(config, None, refusing)
    assert list(Path(config.run.folder).iterdir()) == []


@pytest.mark.parametrize(("error", "code"), [("SlotFailed('boom')", 1), ("KeyboardInterrupt", 130)])
def test_exit_codes_of_what_a_command_raises(error: str, code: int) -> None:
    script = f"""
import dataclasses, sys
from nereus.cli import main as subject
from nereus.errors import SlotFailed
def run(arguments):
    raise {error}
subject.COMMANDS["doctor"] = dataclasses.replace(subject.COMMANDS["doctor"], run=run)
sys.exit(subject.main(["doctor"]))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr


def test_doctor_names_what_it_finds(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    shown = capsys.readouterr().out
    for name in ("python", "torch", "megatron", "vllm", "ray", "cores", "memory", "disk", "W&B login"):
        assert name in shown
    assert ("nothing is missing" in shown) == (code == 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_that_takes_nothing_is_one_line() -> None:
    """A full disk behind the output, and a reader that has gone."""
    command = [sys.executable, "-m", "nereus.cli.main", "transition", "--model", "llama-3.2-1b", "--fleet", "8xh100"]
    command += ["--from", "tp=8", "--to", "dp=8", "--slots", "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_loads_nothing_heavy() -> None:
    script = """
import contextlib, sys
from nereus.cli.main import main
with contextlib.suppress(SystemExit):
    main(["--help"])
heavy = {"torch", "ray", "vllm", "megatron", "transformers", "wandb", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "train" in ended.stdout
